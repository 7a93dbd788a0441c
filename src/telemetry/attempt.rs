//! Around each attempt at an engine: how long it took, the span at the end of a
//! trace (OpenTelemetry's conventions for generative models), and the context of
//! that span for the engine.
//!
//! An attempt is over when its events are, or when nobody reads them any more.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{Stream, StreamExt};
use http::Uri;
use tokio::time::Instant;
use tracing::{Span, debug_span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::{
    metrics::{Layer, Metrics},
    trace::{TRACED, header_of},
};
use crate::{
    engine::{
        EngineClient, EngineError, EngineEvent, EngineRequest, EngineStream, Finish, FinishReason,
    },
    fleet::facts::EngineKind,
    ids::Target,
};

/// What is told of an attempt besides what is asked of the engine.
pub struct About<'a> {
    /// The model, as its replica registered it.
    pub model: &'a str,
    /// What the engine speaks.
    pub engine: EngineKind,
    /// Where.
    pub target: &'a Target,
    /// Which sample of its request.
    pub sample: u32,
    /// 1 for the sample's first.
    pub number: u32,
}

/// Starts an attempt that is watched.
pub fn generate(
    client: &dyn EngineClient,
    mut request: EngineRequest,
    about: &About<'_>,
    metrics: &Arc<Metrics>,
) -> EngineStream {
    if !metrics.is_on() {
        return client.generate(request);
    }
    let span = span(&request, about);
    request.traceparent = header_of(&span);
    Watched {
        events: client.generate(request),
        span,
        metrics: Arc::clone(metrics),
        begun: None,
        answered: false,
        over: false,
    }
    .boxed()
}

fn span(request: &EngineRequest, about: &About<'_>) -> Span {
    let span = debug_span!(
        target: TRACED,
        "attempt",
        otel.name = format!("text_completion {}", about.model),
        otel.kind = "client",
        otel.status_code = Empty,
        error.type = Empty,
        sample = about.sample,
        attempt = about.number,
        target = %about.target,
    );
    if span.is_disabled() {
        return span;
    }
    let set = |key: &'static str, value: i64| span.set_attribute(key, value);
    span.set_attribute("gen_ai.operation.name", "text_completion");
    span.set_attribute(
        "gen_ai.provider.name",
        match about.engine {
            EngineKind::Sglang => "sglang",
            EngineKind::Vllm => "vllm",
        },
    );
    span.set_attribute("gen_ai.request.model", about.model.to_owned());
    set("gen_ai.request.max_tokens", request.max_tokens.into());
    let sampling = &request.sampling.shared;
    for (key, value) in [
        ("gen_ai.request.temperature", sampling.temperature),
        ("gen_ai.request.top_p", sampling.top_p),
    ] {
        if let Some(value) = value {
            span.set_attribute(key, f64::from(value));
        }
    }
    if let Some(top_k) = sampling.top_k {
        set("gen_ai.request.top_k", top_k.into());
    }
    if let Some(seed) = request.sampling.seed.and_then(|s| i64::try_from(s).ok()) {
        set("gen_ai.request.seed", seed);
    }
    if let Ok(url) = request.url.parse::<Uri>() {
        if let Some(host) = url.host() {
            span.set_attribute("server.address", host.to_owned());
        }
        if let Some(port) = url.port_u16() {
            set("server.port", port.into());
        }
    }
    let target = about.target;
    span.set_attribute("berth.replica.id", target.replica.as_str().to_owned());
    span.set_attribute("berth.replica.incarnation", target.incarnation.to_string());
    set("berth.replica.rank", target.rank.into());
    set("berth.attempt.number", about.number.into());
    set("berth.sample.index", about.sample.into());
    span.set_attribute("berth.engine.request_id", request.id.as_str().to_owned());
    span
}

/// Nobody wants it any more: no fault of the engine's.
const GIVEN_UP: &str = "given_up";

/// The events of an attempt, watched.
struct Watched {
    events: EngineStream,
    span: Span,
    metrics: Arc<Metrics>,
    /// When it was first asked for an event: nothing is sent before.
    begun: Option<Instant>,
    answered: bool,
    over: bool,
}

impl Stream for Watched {
    type Item = Result<EngineEvent, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let begun = *this.begun.get_or_insert_with(Instant::now);
        let event = this.events.poll_next_unpin(cx);
        match &event {
            Poll::Ready(Some(Ok(EngineEvent::Tokens(_)))) => {
                if !std::mem::replace(&mut this.answered, true) {
                    this.metrics.first_token(begun.elapsed());
                }
            }
            Poll::Ready(Some(Ok(EngineEvent::Finished(finish)))) => {
                this.end(Ok(finish));
            }
            Poll::Ready(Some(Err(error))) => this.end(Err(name(error))),
            Poll::Ready(None) => this.end(Err("lost")),
            Poll::Pending => {}
        }
        event
    }
}

impl Watched {
    fn end(&mut self, how: Result<&Finish, &'static str>) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        if let Some(begun) = self.begun {
            self.metrics.layer(Layer::Engine, begun.elapsed());
        }
        if self.span.is_disabled() {
            return;
        }
        match how {
            Ok(finish) => {
                let usage = &finish.usage;
                let set = |key: &'static str, count: u32| {
                    self.span.set_attribute(key, i64::from(count));
                };
                set("gen_ai.usage.input_tokens", usage.prompt_tokens);
                set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
                set("gen_ai.usage.output_tokens", usage.completion_tokens);
                let reason = match &finish.reason {
                    FinishReason::Stop(_) => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Aborted { .. } => "abort",
                };
                self.span.set_attribute(
                    "gen_ai.response.finish_reasons",
                    opentelemetry::Value::Array(opentelemetry::Array::String(vec![reason.into()])),
                );
            }
            Err(kind) => {
                self.span.record("error.type", kind);
                if kind != GIVEN_UP {
                    self.span.record("otel.status_code", "ERROR");
                }
            }
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.over {
            self.end(Err(GIVEN_UP));
        }
    }
}

fn name(error: &EngineError) -> &'static str {
    match error {
        EngineError::Refused(_) => "refused",
        EngineError::Busy { .. } => "busy",
        EngineError::Rejected(_) => "rejected",
        EngineError::Lost(_) => "lost",
        EngineError::Failed(_) => "failed",
        EngineError::Died(_) => "died",
        EngineError::BadReply(_) => "bad_reply",
        EngineError::AdapterMissing(_) => "adapter_missing",
    }
}
