//! Which addresses Berth may call. A replica names the URL at which Berth will
//! send it prompts; whoever may register could else have Berth call anything that
//! it can reach and they cannot.
//!
//! An address is checked when it is registered, and again whenever a connection
//! is made: every address that a name resolves to must be allowed, and one of
//! those that were checked is used. Redirects are never followed (`http`).

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::client::legacy::connect::dns::Name;
use ipnet::IpNet;
use tracing::warn;

/// Clouds tell secrets at these, whatever network they lie in.
const METADATA: [IpAddr; 7] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
];

/// Addresses that a name may resolve to: more are no replica's.
const MAX_ADDRESSES: usize = 32;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Egress {
    /// Where engines may be. Empty: anywhere but what is never allowed.
    pub networks: Vec<IpNet>,
    /// On which ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Whether this very machine counts, where `networks` does not name it.
    pub loopback: bool,
    /// Berth's own addresses, which are no engine's.
    pub own: Vec<SocketAddr>,
    /// What names stand for, before any name server is asked.
    pub hosts: BTreeMap<String, Vec<IpAddr>>,
}

impl Default for Egress {
    /// Everything but what is never allowed: for a sidecar, whose one engine is
    /// named by whoever starts it.
    fn default() -> Self {
        Self {
            networks: Vec::new(),
            ports: vec![1..=u16::MAX],
            loopback: true,
            own: Vec::new(),
            hosts: BTreeMap::new(),
        }
    }
}

/// Why an address may not be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// A class of addresses that no option allows.
    #[error("{0} is {1}, which is never called")]
    Never(IpAddr, &'static str),
    /// This machine.
    #[error(
        "{0} is this control plane's own machine: name it in engine-networks if engines run there"
    )]
    Loopback(IpAddr),
    /// Outside the allowed networks.
    #[error("{0} is in none of the networks that engine-networks allows")]
    Network(IpAddr),
    /// Not an allowed port.
    #[error("port {0} is none of those that engine-ports allows")]
    Port(u16),
    /// Berth itself.
    #[error("{0} is this control plane's own address")]
    Own(SocketAddr),
    /// The name does not resolve, or not in time.
    #[error("{0:?} cannot be resolved: {1}")]
    Unresolved(String, String),
}

impl Egress {
    /// Whether this address may be called.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, address: SocketAddr) -> Result<(), Forbidden> {
        let ip = plain(address.ip());
        if let Some(class) = never(ip) {
            return Err(Forbidden::Never(address.ip(), class));
        }
        let port = address.port();
        if !self.ports.iter().any(|range| range.contains(&port)) {
            return Err(Forbidden::Port(port));
        }
        if self.is_own(ip, port, is_here) {
            return Err(Forbidden::Own(address));
        }
        let named = self.networks.iter().any(|network| network.contains(&ip));
        match (ip.is_loopback(), named) {
            (_, true) => Ok(()),
            (true, false) if self.loopback => Ok(()),
            (true, false) => Err(Forbidden::Loopback(address.ip())),
            (false, false) if self.networks.is_empty() => Ok(()),
            (false, false) => Err(Forbidden::Network(address.ip())),
        }
    }

    /// Whether Berth listens there itself. On all interfaces it does so on every
    /// address that this machine has (`here`).
    fn is_own(&self, ip: IpAddr, port: u16, here: impl FnOnce(IpAddr) -> bool) -> bool {
        let own = self.own.iter().filter(|own| own.port() == port);
        let mut own = own.map(SocketAddr::ip);
        let one = own.clone().any(|own| plain(own) == ip);
        one || (own.any(|own| own.is_unspecified()) && (ip.is_loopback() || here(ip)))
    }

    /// The addresses of `host`, which may be a number or a name, if every one of
    /// them may be called.
    ///
    /// # Errors
    /// Why not.
    pub async fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, Forbidden> {
        let unresolved = |why: String| Forbidden::Unresolved(host.to_owned(), why);
        let addresses: Vec<SocketAddr> = match (literal(host), self.hosts.get(host)) {
            (Some(ip), _) => vec![SocketAddr::new(ip, port)],
            (None, Some(known)) => known.iter().map(|ip| SocketAddr::new(*ip, port)).collect(),
            (None, None) => tokio::net::lookup_host((host, port))
                .await
                .map_err(|error| unresolved(error.to_string()))?
                .take(MAX_ADDRESSES + 1)
                .collect(),
        };
        self.check_all(host, &addresses)?;
        Ok(addresses)
    }

    /// A name that also stands for an address that may not be called is refused:
    /// which one a connection takes is chance.
    fn check_all(&self, host: &str, addresses: &[SocketAddr]) -> Result<(), Forbidden> {
        if addresses.is_empty() || addresses.len() > MAX_ADDRESSES {
            let why = format!("it has {} addresses", addresses.len());
            return Err(Forbidden::Unresolved(host.to_owned(), why));
        }
        addresses
            .iter()
            .try_for_each(|address| self.check(*address))
    }

    /// Whether a URL `http://host:port` may be called, as far as can be told now
    /// and within `limit`.
    ///
    /// # Errors
    /// Why not.
    pub async fn check_url(&self, url: &str, limit: Duration) -> Result<(), Forbidden> {
        let unresolved = |why: &str| Forbidden::Unresolved(url.to_owned(), why.to_owned());
        let uri: http::Uri = url.parse().map_err(|_| unresolved("it is no URL"))?;
        let host = uri.host().ok_or_else(|| unresolved("it has no host"))?;
        let resolved = self.resolve(host, uri.port_u16().unwrap_or(80));
        match tokio::time::timeout(limit, resolved).await {
            Ok(resolved) => resolved.map(drop),
            Err(_) => Err(unresolved("the name servers do not answer")),
        }
    }
}

/// Whether this address is one of this machine's, as its interfaces are now: they come
/// and go, and containers get theirs late. It is asked only about the few ports that
/// Berth listens on. Where it cannot be told, it may be.
fn is_here(ip: IpAddr) -> bool {
    match if_addrs::get_if_addrs() {
        Ok(interfaces) => interfaces.iter().any(|one| plain(one.ip()) == ip),
        Err(error) => {
            warn!(%error, "this machine's addresses cannot be told");
            true
        }
    }
}

/// A host that is a number; a version 6 one stands in brackets in a URL.
pub(crate) fn literal(host: &str) -> Option<IpAddr> {
    let inner = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    inner.unwrap_or(host).parse().ok()
}

/// The address that is meant: a version 4 one in a version 6 wrapping is what it
/// wraps.
fn plain(ip: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = ip else { return ip };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return v4.into();
    }
    match v6.segments() {
        // Translated: NAT64, by the well-known prefix or one for local use, and
        // SIIT. Compatible: ::a.b.c.d, but for :: and ::1.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => wrapped(high, low),
        [0x64, 0xff9b, 1, .., high, low] => wrapped(high, low),
        [0, 0, 0, 0, 0xffff, 0, high, low] => wrapped(high, low),
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => wrapped(high, low),
        // 6to4.
        [0x2002, high, low, ..] => wrapped(high, low),
        _ => ip,
    }
}

fn wrapped(high: u16, low: u16) -> IpAddr {
    Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)).into()
}

fn never(ip: IpAddr) -> Option<&'static str> {
    if METADATA.contains(&ip) {
        return Some("a cloud's metadata address");
    }
    match ip {
        IpAddr::V4(v4) if v4.is_link_local() => Some("a link-local address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address"),
        _ if ip.is_multicast() => Some("a multicast address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
        IpAddr::V4(v4) if v4.octets()[0] >= 240 => Some("a reserved address"),
        IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfec0 => Some("a site-local address"),
        // What it leads to is somebody else's choice.
        IpAddr::V6(v6) if matches!(v6.segments(), [0x2001, 0, ..]) => Some("a tunnel's address"),
        IpAddr::V4(v4) if v4.octets()[0] == 0 => Some("an unspecified address"),
        _ if ip.is_unspecified() => Some("an unspecified address"),
        _ => None,
    }
}

/// Resolves names for connections, within what may be called.
#[derive(Clone)]
pub(super) struct Resolver(pub(super) Arc<Egress>);

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

type Resolving = Pin<Box<dyn Future<Output = io::Result<std::vec::IntoIter<SocketAddr>>> + Send>>;

impl tower::Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Resolving;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Resolving {
        let egress = Arc::clone(&self.0);
        Box::pin(async move {
            // The port is not known here and was checked before: any allowed one
            // stands for it.
            let port = egress.ports.first().map_or(1, |range| *range.start());
            let addresses = egress.resolve(name.as_str(), port).await;
            let addresses = addresses
                .map_err(|why| io::Error::new(io::ErrorKind::PermissionDenied, why.to_string()))?;
            Ok(addresses.into_iter())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(egress: &Egress, address: &str) -> Forbidden {
        egress.check(address.parse().unwrap()).unwrap_err()
    }

    fn allowed(egress: &Egress, address: &str) {
        egress.check(address.parse().unwrap()).unwrap();
    }

    #[test]
    fn some_addresses_are_never_called_whatever_is_allowed() {
        let everything = Egress {
            networks: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            ..Egress::default()
        };
        for address in [
            "169.254.169.254:80",
            "169.254.7.7:30000",
            "100.100.100.200:80",
            "192.0.0.192:8080",
            "[fd00:ec2::254]:80",
            "[fd20:ce::254]:3000",
            "[64:ff9b:1::a9fe:a9fe]:80",
            "[::ffff:0:169.254.169.254]:80",
            "[2001:0:1:2:3:4:80ff:fffe]:30000",
            "[fec0::1]:30000",
            "240.0.0.1:30000",
            "[fe80::1]:30000",
            "[::ffff:169.254.169.254]:80",
            "[64:ff9b::a9fe:a9fe]:80",
            "[2002:a9fe:a9fe::1]:80",
            "[::169.254.169.254]:80",
            "224.0.0.1:30000",
            "[ff02::1]:30000",
            "255.255.255.255:1",
            "0.0.0.0:30000",
            "0.1.2.3:30000",
            "[::]:30000",
        ] {
            let why = refused(&everything, address);
            assert!(matches!(why, Forbidden::Never(..)), "{address}: {why}");
        }
        for address in ["10.1.2.3:30000", "127.0.0.1:30000", "[2001:db8::1]:1"] {
            allowed(&everything, address);
        }
    }

    #[test]
    fn loopback_is_called_only_where_it_is_allowed_in_any_writing() {
        let closed = Egress {
            loopback: false,
            ..Egress::default()
        };
        for address in [
            "127.0.0.1:30000",
            "127.9.9.9:30000",
            "[::1]:30000",
            "[::ffff:127.0.0.1]:30000",
            "[64:ff9b::7f00:1]:30000",
            "[64:ff9b:1::7f00:1]:30000",
            "[::ffff:0:127.0.0.1]:30000",
        ] {
            let why = refused(&closed, address);
            assert!(matches!(why, Forbidden::Loopback(_)), "{address}: {why}");
            allowed(&Egress::default(), address);
        }
        let named = Egress {
            networks: vec!["127.0.0.0/8".parse().unwrap()],
            ..closed
        };
        allowed(&named, "127.0.0.1:30000");
        allowed(&named, "[::ffff:127.0.0.1]:30000");
        assert!(matches!(
            refused(&named, "10.0.0.1:30000"),
            Forbidden::Network(_)
        ));
    }

    #[test]
    fn ports_networks_and_own_addresses() {
        let egress = Egress {
            networks: vec!["10.0.0.0/8".parse().unwrap(), "fd12::/16".parse().unwrap()],
            ports: vec![8000..=8099, 30000..=30000],
            loopback: true,
            own: vec![
                "0.0.0.0:8001".parse().unwrap(),
                "10.0.0.9:8002".parse().unwrap(),
            ],
            ..Egress::default()
        };
        allowed(&egress, "10.0.0.1:8000");
        allowed(&egress, "[fd12::7]:30000");
        assert_eq!(refused(&egress, "10.0.0.1:22"), Forbidden::Port(22));
        assert!(matches!(
            refused(&egress, "11.0.0.1:8000"),
            Forbidden::Network(_)
        ));
        assert!(matches!(
            refused(&egress, "10.0.0.9:8002"),
            Forbidden::Own(_)
        ));
        assert!(matches!(
            refused(&egress, "127.0.0.1:8001"),
            Forbidden::Own(_)
        ));
        allowed(&egress, "127.0.0.1:8002");
    }

    #[test]
    fn who_listens_on_all_interfaces_has_all_addresses_of_the_machine() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let here = |asked: IpAddr| [ip("10.0.0.9"), ip("fd12::9")].contains(&asked);
        for wildcard in ["0.0.0.0:7700", "[::]:7700"] {
            let egress = Egress {
                own: vec![wildcard.parse().unwrap(), "10.0.0.9:7701".parse().unwrap()],
                ..Egress::default()
            };
            let own = |text: &str, port| egress.is_own(ip(text), port, here);
            for text in ["10.0.0.9", "fd12::9", "127.0.0.1", "127.8.8.8", "::1"] {
                assert!(own(text, 7700), "{text}");
                // An engine beside it.
                assert!(!own(text, 30000), "{text}");
            }
            // An engine elsewhere, on the same port.
            assert!(!own("10.0.0.8", 7700));
            assert!(own("10.0.0.9", 7701));
            assert!(!own("fd12::9", 7701));
            // What this machine says of itself is asked for, in any writing.
            let all = if_addrs::get_if_addrs().unwrap();
            assert!(!all.is_empty());
            for one in all.iter().map(if_addrs::Interface::ip) {
                let refused = egress.check(SocketAddr::new(one, 7700)).unwrap_err();
                let never = never(one).is_some();
                assert!(never || matches!(refused, Forbidden::Own(_)), "{refused}");
                if let IpAddr::V4(v4) = one {
                    let mapped = SocketAddr::new(v4.to_ipv6_mapped().into(), 7700);
                    assert!(egress.check(mapped).is_err(), "{mapped}");
                }
                let beside = egress.check(SocketAddr::new(one, 30000));
                assert!(never || beside.is_ok(), "{one}: {beside:?}");
            }
            // 203.0.113.0/24 is for documents only: it is nobody's.
            allowed(&egress, "203.0.113.99:7700");
        }
    }

    #[test]
    fn a_name_with_a_good_and_a_bad_address_is_refused() {
        let egress = Egress::default();
        let good: SocketAddr = "10.0.0.1:30000".parse().unwrap();
        let bad: SocketAddr = "169.254.169.254:30000".parse().unwrap();
        egress.check_all("name", &[good]).unwrap();
        for addresses in [[good, bad], [bad, good]] {
            let why = egress.check_all("name", &addresses).unwrap_err();
            assert!(matches!(why, Forbidden::Never(..)), "{why}");
        }
        let none = egress.check_all("name", &[]).unwrap_err();
        assert!(matches!(none, Forbidden::Unresolved(..)));
        let many = egress
            .check_all("name", &[good; MAX_ADDRESSES + 1])
            .unwrap_err();
        assert!(matches!(many, Forbidden::Unresolved(..)));
    }

    #[tokio::test]
    async fn a_number_is_checked_without_a_name_server() {
        let closed = Egress {
            loopback: false,
            ..Egress::default()
        };
        for url in [
            "http://127.0.0.1:1",
            "http://[::1]:30000",
            "http://[::ffff:7f00:1]:80",
        ] {
            let why = closed.check_url(url, Duration::from_secs(1)).await;
            assert!(matches!(why, Err(Forbidden::Loopback(_))), "{url}: {why:?}");
        }
        let why = closed
            .check_url("http://localhost:80", Duration::from_secs(5))
            .await;
        assert!(matches!(why, Err(Forbidden::Loopback(_))), "{why:?}");
    }

    #[tokio::test]
    async fn a_name_that_came_to_mean_berth_itself_is_not_spoken_to() {
        use crate::engine::http::{HttpClient, HttpConfig, HttpError};
        use tokio::{io::AsyncReadExt as _, net::TcpListener};

        let own = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = |of: &TcpListener| of.local_addr().unwrap().port();
        let egress = Egress {
            hosts: BTreeMap::from([("engine.test".to_owned(), vec![Ipv4Addr::LOCALHOST.into()])]),
            own: vec![own.local_addr().unwrap()],
            ..Egress::default()
        };
        let http = HttpClient::within(HttpConfig::default(), Arc::new(egress));
        let ask = async |listener: &TcpListener| {
            let url = format!("http://engine.test:{}", port(listener));
            let answer = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.read(&mut [0; 64]).await.unwrap_or(0)
            };
            let limit = Duration::from_secs(30);
            let asked = http.call(http::Method::GET, &url, "/health", None, 1 << 10, limit);
            tokio::join!(asked, answer)
        };
        let (refused, heard) = ask(&own).await;
        let Err(HttpError::Refused(why)) = refused else {
            panic!("{refused:?}");
        };
        assert!(why.contains("own address"), "{why}");
        assert_eq!(heard, 0);
        let (_, heard) = ask(&engine).await;
        assert!(heard > 0, "an engine beside it is");
    }
}
