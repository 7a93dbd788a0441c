//! What a process says: log lines to standard error, and spans to a collector
//! where one is configured.
//!
//! What dependencies say below INFO is never shown, whatever the filter: it may
//! hold what passes through them (sled's trace lines print what it stores).

use std::sync::Arc;

use opentelemetry::trace::TracerProvider as _;
use tracing::{Level, Metadata};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    filter::{FilterExt as _, filter_fn},
    layer::SubscriberExt as _,
    util::SubscriberInitExt as _,
};

use super::{
    otlp::{OtlpConfig, Pipeline, SpanCounts},
    plain::Plain,
    trace::{ONLY_TRACED, TRACED},
};
use crate::config::LogFormat;

/// What a process has set up. Flush it at the end.
#[must_use]
pub struct Logs {
    pipeline: Option<Pipeline>,
}

impl Logs {
    /// Sets it up, once for the process. With a collector: within a runtime.
    ///
    /// # Errors
    /// When `filter` is none, the collector's URL is none, or it was set up before.
    pub fn init(
        format: LogFormat,
        filter: &str,
        otlp: Option<&OtlpConfig>,
    ) -> anyhow::Result<Self> {
        let lines = lines(format, std::io::stderr)
            .with_filter(EnvFilter::try_new(filter)?.and(filter_fn(is_shown)));
        let pipeline = otlp.map(Pipeline::start).transpose()?;
        let spans = pipeline.as_ref().map(|pipeline| {
            tracing_opentelemetry::layer()
                .with_tracer(pipeline.provider().tracer("berth"))
                .with_location(false)
                .with_threads(false)
                .with_target(false)
                .with_tracked_inactivity(false)
                .with_filter(filter_fn(is_traced))
        });
        Registry::default().with(lines).with(spans).try_init()?;
        Ok(Self { pipeline })
    }

    /// What became of spans; zeros where there is no collector.
    pub fn spans(&self) -> Arc<SpanCounts> {
        self.pipeline
            .as_ref()
            .map(|pipeline| Arc::clone(pipeline.counts()))
            .unwrap_or_default()
    }

    /// Sends the last spans, within a bound.
    pub async fn flush(self) {
        if let Some(pipeline) = self.pipeline {
            pipeline.flush().await;
        }
    }
}

/// Whether this says what to log.
pub fn is_filter(text: &str) -> bool {
    EnvFilter::try_new(text).is_ok()
}

/// The layer that writes lines in this form.
pub fn lines<W>(format: LogFormat, to: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> tracing_subscriber::fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_writer(to);
    match format {
        LogFormat::Human => lines.fmt_fields(Plain).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

fn is_shown(metadata: &Metadata<'_>) -> bool {
    let ours = is_ours(metadata.target()) && metadata.target() != ONLY_TRACED;
    ours || (*metadata.level() <= Level::INFO && metadata.target() != ONLY_TRACED)
}

fn is_ours(target: &str) -> bool {
    target == "berth" || target.starts_with("berth::")
}

/// Spans of the stack, and no events: an event's text is for the log.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && matches!(metadata.target(), ONLY_TRACED | TRACED)
}
