//! Addresses that a replica gives: where Berth will call.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};

use super::Faults;
use crate::{
    engine::{egress::Egress, url::base_url},
    error::Error,
    fleet::facts::ReplicaFacts,
    proto,
};

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
