//! What the listeners have counted.

use std::{fmt, sync::Arc};

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

use super::families::Page;
use crate::listen::limits::{Counts, HandshakeFailure, Limit, Port, RequestLimit};

/// Read at the scrape.
#[derive(Debug)]
pub(super) struct Listened(pub(super) Arc<Counts>);

impl Collector for Listened {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        let counts = &self.0;
        let ports = |of: &dyn Fn(Port) -> u64| {
            let row = |port: &Port| ([("port", port.name())], of(*port));
            Port::ALL.iter().map(row).collect::<Vec<_>>()
        };
        page.gauges(
            "connections",
            "Connections that are open, by port",
            ports(&|port| counts.open(port))
                .into_iter()
                .map(|(labels, count)| (labels, count as f64)),
        )?;
        page.counters(
            "connections_accepted",
            "Connections accepted, refused ones included, by port",
            ports(&|port| counts.accepted(port)),
        )?;
        page.counters(
            "accept_failures",
            "Times that no connection could be accepted, by port: for want of files or memory, \
             mostly",
            ports(&|port| counts.accept_failures(port)),
        )?;
        let limited = Port::ALL.iter().flat_map(|&port| {
            Limit::ALL.iter().map(move |&limit| {
                let labels = [("port", port.name()), ("limit", limit.name())];
                (labels, counts.limited(port, limit))
            })
        });
        page.counters(
            "connections_limited",
            "Connections refused or ended, by port and by the limit that they met",
            limited,
        )?;
        let unshaken = HandshakeFailure::ALL
            .iter()
            .map(|&why| ([("reason", why.name())], counts.unshaken(why)));
        page.counters(
            "tls_handshake_failures",
            "TLS handshakes of the gRPC port that failed, by why",
            unshaken,
        )?;
        page.counter(
            "connections_throttled",
            "Times that a connection began to be read from more slowly, for its control frames",
            counts.throttled(),
        )?;
        let refused = RequestLimit::ALL
            .iter()
            .map(|&limit| ([("limit", limit.name())], counts.refused(limit)));
        page.counters(
            "requests_limited",
            "Requests refused before they were whole, by the limit that they met",
            refused,
        )?;
        page.gauge_of(
            "unfinished_requests",
            Unit::Bytes,
            "Bytes of requests that have begun and are not whole",
            counts.unfinished() as f64,
        )
    }
}
