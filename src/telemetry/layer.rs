//! Around each layer of the stack: how long it took, and a span of it. One
//! wrapper for all, so that the layers themselves know nothing of it.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tower::Service;
use tracing::{Instrument, Span, debug_span, field::Empty};

use super::{
    metrics::{Layer, Metrics},
    trace::TRACED,
};

/// An error that has a name of a few that are known beforehand.
pub trait Named {
    /// The name.
    fn name(&self) -> &'static str;
}

impl Named for crate::error::Error {
    fn name(&self) -> &'static str {
        self.reason.name()
    }
}

/// A layer that is measured.
#[derive(Clone, Debug)]
pub struct Measured<S> {
    inner: S,
    layer: Layer,
    metrics: Arc<Metrics>,
}

impl<S> Measured<S> {
    /// Measures `inner` as `layer`.
    pub fn new(inner: S, layer: Layer, metrics: &Arc<Metrics>) -> Self {
        Self {
            inner,
            layer,
            metrics: Arc::clone(metrics),
        }
    }
}

impl<S, R> Service<R> for Measured<S>
where
    S: Service<R>,
    S::Response: 'static,
    S::Error: Named + 'static,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        if !self.metrics.is_on() {
            return Box::pin(self.inner.call(request));
        }
        let (layer, metrics) = (self.layer, Arc::clone(&self.metrics));
        let span = span(layer);
        let begun = Instant::now();
        let answering = span.in_scope(|| self.inner.call(request));
        let told = span.clone();
        let measured = async move {
            let answer = answering.await;
            metrics.layer(layer, begun.elapsed());
            if let Err(error) = &answer {
                told.record("error.type", error.name());
                told.record("otel.status_code", "ERROR");
            }
            answer
        };
        Box::pin(measured.instrument(span))
    }
}

/// A name of a span must be known when the program is built.
fn span(layer: Layer) -> Span {
    macro_rules! named {
        ($($layer:ident = $name:literal,)*) => {
            match layer {
                $(Layer::$layer => debug_span!(
                    target: TRACED,
                    $name,
                    otel.status_code = Empty,
                    error.type = Empty,
                ),)*
            }
        };
    }
    named! {
        Deadline = "deadline",
        Validate = "validate",
        Idempotency = "idempotency",
        Resolve = "resolve",
        Admission = "admission",
        Affinity = "affinity",
        Dispatch = "dispatch",
        Engine = "engine",
    }
}
