//! How Berth is seen through: metrics, log lines, traces.
//!
//! What it guarantees:
//! - no prompt, completion or key of a caller is in any of them, and no other text
//!   of a request but its `x-request-id` and the id of its trace;
//! - every label has a bounded number of values: an enum's, or ids of replicas and
//!   models that registrations give, which are bounded;
//! - nothing that watches can hold up what is watched: there is no queue without
//!   a bound and nothing that is waited for.
//!
//! One wrapper, [`layer::Measured`], stands around each layer of the stack, and
//! [`rpc::Observed`] around the gRPC service as a whole.

pub mod attempt;
mod connections;
mod families;
mod fleet;
#[cfg(test)]
pub(crate) mod kept;
pub mod layer;
pub mod logs;
pub mod method;
pub mod metrics;
pub mod otlp;
pub mod outcome;
mod plain;
pub mod rpc;
mod state;
pub mod text;
pub mod trace;

use std::sync::Arc;

use prometheus_client::registry::Registry;

use crate::{listen::limits::Counts, stack::Parts};

/// All that a server tells Prometheus.
pub fn registry(parts: &Parts, spans: Arc<otlp::SpanCounts>, listened: Arc<Counts>) -> Registry {
    let mut registry = Registry::default();
    let berth = registry.sub_registry_with_prefix("berth");
    parts.metrics.register(berth);
    state::register(berth, parts.clone(), spans);
    berth.register_collector(Box::new(connections::Listened(listened)));
    registry
}
