//! What is measured as it happens: calls, and the layers of the stack. All that
//! can be read from state that exists is read at the scrape, in
//! `state`.
//!
//! Nothing here is global: every server has its own. A label is a value of an
//! enum of ours, never a text of a request.

use std::time::Duration;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::{method::Method, outcome::Outcome};

/// From a millisecond, a replay's, to a long rollout's turn.
const REQUEST_SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 900.0,
];

/// From ten microseconds, what a layer costs, to what the engine takes.
const LAYER_SECONDS: [f64; 16] = [
    0.000_01, 0.000_03, 0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
    100.0, 300.0,
];

/// A layer of the stack, in their order, and the engine below them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as the layers are")]
pub enum Layer {
    Deadline,
    Validate,
    Idempotency,
    Resolve,
    Admission,
    Affinity,
    Dispatch,
    Engine,
}

impl Layer {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Deadline,
        Self::Validate,
        Self::Idempotency,
        Self::Resolve,
        Self::Admission,
        Self::Affinity,
        Self::Dispatch,
        Self::Engine,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::Validate => "validate",
            Self::Idempotency => "idempotency",
            Self::Resolve => "resolve",
            Self::Admission => "admission",
            Self::Affinity => "affinity",
            Self::Dispatch => "dispatch",
            Self::Engine => "engine",
        }
    }
}

impl EncodeLabelValue for Layer {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.name(), encoder)
    }
}

impl EncodeLabelValue for Method {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.name(), encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    method: Method,
    code: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByMethod {
    method: Method,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByLayer {
    layer: Layer,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// One server's measurements.
#[derive(Debug)]
pub struct Metrics {
    on: bool,
    requests: Family<ByOutcome, Counter>,
    durations: Histograms<ByMethod>,
    in_flight: Family<ByMethod, Gauge>,
    layers: Histograms<ByLayer>,
    /// Of `layers`, in the order of [`Layer::ALL`]: nothing is looked up.
    by_layer: [Histogram; Layer::ALL.len()],
    first_token: Histogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(true)
    }
}

impl Metrics {
    /// Ones that count, or that do nothing: for a benchmark of what they cost.
    pub fn new(on: bool) -> Self {
        let layers: Histograms<ByLayer> =
            Family::new_with_constructor(|| Histogram::new(LAYER_SECONDS));
        let by_layer = Layer::ALL.map(|layer| layers.get_or_create_owned(&ByLayer { layer }));
        Self {
            on,
            requests: Family::default(),
            durations: Family::new_with_constructor(|| Histogram::new(REQUEST_SECONDS)),
            in_flight: Family::default(),
            layers,
            by_layer,
            first_token: Histogram::new(REQUEST_SECONDS),
        }
    }

    /// Whether anything is measured.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// A call begins.
    pub(super) fn begun(&self, method: Method) {
        self.in_flight.get_or_create(&ByMethod { method }).inc();
    }

    /// A call that began is over.
    pub(super) fn ended(&self, method: Method, outcome: Outcome, took: Duration) {
        self.in_flight.get_or_create(&ByMethod { method }).dec();
        let labels = ByOutcome {
            method,
            code: outcome.code_name(),
            reason: outcome.reason,
        };
        self.requests.get_or_create(&labels).inc();
        let durations = self.durations.get_or_create(&ByMethod { method });
        durations.observe(took.as_secs_f64());
    }

    /// A layer has answered.
    pub(super) fn layer(&self, layer: Layer, took: Duration) {
        if let Some(histogram) = self.by_layer.get(layer as usize) {
            histogram.observe(took.as_secs_f64());
        }
    }

    /// An attempt's first tokens have come.
    pub(super) fn first_token(&self, took: Duration) {
        self.first_token.observe(took.as_secs_f64());
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "requests",
            "Calls that are over, by gRPC code and by the reason in the error's details",
            self.requests.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "From a call's arrival to the last byte of its answer",
            Unit::Seconds,
            self.durations.clone(),
        );
        registry.register(
            "requests_in_flight",
            "Calls that are not over",
            self.in_flight.clone(),
        );
        registry.register_with_unit(
            "layer_duration",
            "From a call of a layer of the stack to its answer, what lies below included",
            Unit::Seconds,
            self.layers.clone(),
        );
        registry.register_with_unit(
            "first_token",
            "From an attempt's dispatch to its first tokens",
            Unit::Seconds,
            self.first_token.clone(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_under_their_own_names() {
        let metrics = Metrics::default();
        for (times, layer) in (1..).zip(Layer::ALL) {
            assert_eq!(Layer::ALL[layer as usize], layer);
            for _ in 0..times {
                metrics.layer(layer, Duration::from_micros(50));
            }
        }
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains(r#"layer_duration_seconds_count{layer="deadline"} 1"#),
            "{text}"
        );
        assert!(
            text.contains(r#"layer_duration_seconds_count{layer="engine"} 8"#),
            "{text}"
        );
    }
}
