//! Addresses that a replica gives: where Berth will call.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};

use super::Faults;
use crate::{engine::egress::Egress, error::Error, fleet::facts::ReplicaFacts, proto};

/// Names are looked up, of one registration so many at once, for so long.
const LOOKUPS: usize = 16;
const LOOKUP_LIMIT: Duration = Duration::from_secs(2);

/// Whether Berth may call every address that the replica gives. Nothing is
/// called.
///
/// # Errors
/// Each that it may not.
pub(in crate::api) async fn reachable(facts: &ReplicaFacts, egress: &Egress) -> Result<(), Error> {
    let mut urls: BTreeMap<Arc<str>, String> = BTreeMap::new();
    for (i, rank) in facts.ranks.iter().enumerate().rev() {
        urls.insert(Arc::clone(&rank.url), format!("ranks[{i}].endpoint"));
    }
    urls.insert(Arc::clone(&facts.url), "endpoint".to_owned());
    let checks = urls.into_iter().map(|(url, field)| async move {
        let checked = egress.check_url(&url, LOOKUP_LIMIT).await;
        checked.err().map(|why| (field, why))
    });
    let mut faults = Faults::default();
    let mut refused = stream::iter(checks).buffered(LOOKUPS);
    while let Some(refusal) = refused.next().await {
        if let Some((field, why)) = refusal {
            faults.add(field, format!("may not be called: {why}"));
        }
    }
    faults.or(Some(()))
}

/// Where a replica says that it is.
pub(super) fn address(
    message: &proto::RegisterReplicaRequest,
    caller: Option<SocketAddr>,
    faults: &mut Faults,
) -> Option<Arc<str>> {
    use proto::register_replica_request::Address;
    match &message.address {
        Some(Address::Endpoint(endpoint)) => match base_url(endpoint) {
            Ok(url) => Some(url),
            Err(what) => {
                faults.add("endpoint", what);
                None
            }
        },
        Some(Address::Port(port)) => match (u16::try_from(*port), caller) {
            (Ok(port @ 1..), Some(caller)) => Some(match caller.ip().to_canonical() {
                IpAddr::V4(ip) => format!("http://{ip}:{port}").into(),
                IpAddr::V6(ip) => format!("http://[{ip}]:{port}").into(),
            }),
            (Ok(1..), None) => {
                faults.add(
                    "port",
                    "the caller's address is not known: give an endpoint",
                );
                None
            }
            _ => {
                faults.add("port", "must be from 1 to 65535");
                None
            }
        },
        None => {
            faults.add("endpoint", "is missing: give endpoint or port");
            None
        }
    }
}

/// An absolute http URL of host and port, without anything else.
pub(in crate::api) fn base_url(text: &str) -> Result<Arc<str>, &'static str> {
    const FORM: &str =
        "must be an absolute URL as \"http://host:port\", without user, path, query or fragment";
    if text.len() > 512 {
        return Err("may have 512 bytes at most");
    }
    let uri: http::Uri = text.parse().map_err(|_| FORM)?;
    let authority = uri.authority().ok_or(FORM)?;
    const HOST: &str = "its host must be a name, or an address written as 10.0.0.1 or [fd00::1]";
    if uri.scheme_str() != Some("http")
        || !matches!(uri.path(), "" | "/")
        || uri.query().is_some()
        || authority.as_str().contains('@')
        || authority.host().is_empty()
        || !is_port(authority.as_str().strip_prefix(authority.host()))
        || authority.as_str().contains('%')
    {
        return Err(FORM);
    }
    if !is_host(authority.host()) {
        return Err(HOST);
    }
    let url = format!("http://{authority}");
    // The parser drops some parts without a word, as what follows a `#`.
    if !text
        .strip_suffix('/')
        .unwrap_or(text)
        .eq_ignore_ascii_case(&url)
    {
        return Err(FORM);
    }
    Ok(url.into())
}

/// Whether what follows a host is nothing, or a port that there is: `:+80` is one to some
/// readers only.
fn is_port(behind: Option<&str>) -> bool {
    let Some(digits) = behind.and_then(|behind| behind.strip_prefix(':')) else {
        return behind == Some("");
    };
    digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Whether everybody who reads this host means the same by it. `127.1`, `0x7f000001` and
/// `127.0.0.1.` are numbers to some and names to others.
fn is_host(host: &str) -> bool {
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']');
        return inner.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    }
    if host.parse::<Ipv4Addr>().is_ok() {
        return true;
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let last = name.rsplit('.').next().unwrap_or(name);
    let number = last.bytes().all(|b| b.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .or_else(|| last.strip_prefix("0X"))
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    name.len() <= 253 && name.split('.').all(label) && !number
}
