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
mod tests;
