//! Spans to a collector, over OTLP/gRPC.
//!
//! What it guarantees: a request never waits for a collector. Ended spans go into
//! a bounded queue and are dropped, and counted, when it is full; one task sends
//! them in batches, each within a bound, and after a failure pauses. At the end
//! what is queued is sent within a bound.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{RetryPolicy, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor},
};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// Spans that wait to be sent. A sample has some eight.
const QUEUE: usize = 8192;
/// Spans of one batch at most.
const BATCH: usize = 512;
/// A batch is sent when it is full, or so long after its first span.
const LINGER: Duration = Duration::from_millis(500);
/// A batch that is not taken in this time is dropped.
const SEND: Duration = Duration::from_secs(5);
/// After a failure, before the next batch.
const PAUSE: Duration = Duration::from_secs(2);
/// For what is queued at the end.
const FLUSH: Duration = Duration::from_secs(3);

/// Where spans go.
#[derive(Clone, Debug, PartialEq)]
pub struct OtlpConfig {
    /// A collector's OTLP/gRPC URL, `http://host:4317`.
    pub endpoint: String,
    /// The part of traces that is told of where the client does not decide, 0 to 1.
    pub sample_ratio: f64,
}

/// What became of spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl SpanCounts {
    /// A collector has taken them.
    pub fn exported(&self) -> u64 {
        self.exported.load(Ordering::Relaxed)
    }

    /// The queue was full, or no collector took them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// The way of spans to a collector.
pub(super) struct Pipeline {
    provider: SdkTracerProvider,
    counts: Arc<SpanCounts>,
    stop: CancellationToken,
    sending: JoinHandle<()>,
}

impl Pipeline {
    /// To the collector of this configuration; nothing is sent yet.
    ///
    /// # Errors
    /// When the endpoint is no URL.
    pub(super) fn start(config: &OtlpConfig) -> anyhow::Result<Self> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(&config.endpoint)
            .with_timeout(SEND)
            // What waits for a second try is in the way of what is new.
            .with_retry_policy(RetryPolicy::disabled())
            .build()
            .with_context(|| format!("otlp-endpoint: {} is of no use", config.endpoint))?;
        Ok(Self::with(exporter, config.sample_ratio))
    }

    fn with(exporter: impl SpanExporter + 'static, sample_ratio: f64) -> Self {
        let counts = Arc::new(SpanCounts::default());
        let (queue, queued) = mpsc::channel(QUEUE);
        let stop = CancellationToken::new();
        let resource = Resource::builder_empty()
            .with_service_name("berth")
            .with_attributes([
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
                KeyValue::new("service.instance.id", uuid::Uuid::new_v4().to_string()),
            ])
            .build();
        let mut sender = Sender {
            exporter,
            counts: Arc::clone(&counts),
            stop: stop.clone(),
        };
        sender.exporter.set_resource(&resource);
        let ratio = Sampler::TraceIdRatioBased(sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(ratio)))
            .with_resource(resource)
            .with_span_processor(Queue {
                queue,
                counts: Arc::clone(&counts),
            })
            .build();
        Self {
            provider,
            counts,
            stop,
            sending: tokio::spawn(sender.run(queued)),
        }
    }

    pub(super) fn provider(&self) -> &SdkTracerProvider {
        &self.provider
    }

    pub(super) fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }

    /// Sends what is queued, within a bound.
    pub(super) async fn flush(self) {
        self.stop.cancel();
        if tokio::time::timeout(FLUSH, self.sending).await.is_err() {
            tracing::warn!("the last spans were not taken in time");
        }
    }
}

/// Where spans wait.
#[derive(Debug)]
struct Queue {
    queue: mpsc::Sender<SpanData>,
    counts: Arc<SpanCounts>,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _span: &mut Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.queue.try_send(span).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

struct Sender<E> {
    exporter: E,
    counts: Arc<SpanCounts>,
    stop: CancellationToken,
}

impl<E: SpanExporter> Sender<E> {
    async fn run(self, mut queued: mpsc::Receiver<SpanData>) {
        let mut failing = false;
        let mut batch = Vec::new();
        while self.fill(&mut batch, &mut queued).await {
            let count = batch.len() as u64;
            let spans = std::mem::take(&mut batch);
            let sent = tokio::time::timeout(SEND, self.exporter.export(spans)).await;
            let ok = matches!(sent, Ok(Ok(())));
            let counts = &self.counts;
            let counter = if ok {
                &counts.exported
            } else {
                &counts.dropped
            };
            counter.fetch_add(count, Ordering::Relaxed);
            match (ok, failing) {
                // Once, not for every batch.
                (false, false) => tracing::warn!("the collector takes no spans: they are dropped"),
                (true, true) => tracing::info!("the collector takes spans again"),
                _ => {}
            }
            failing = !ok;
            if failing {
                let _ = tokio::time::timeout(PAUSE, self.stop.cancelled()).await;
            }
        }
    }

    /// Waits for a batch. False: there is none, and no more is waited for.
    async fn fill(&self, batch: &mut Vec<SpanData>, queued: &mut mpsc::Receiver<SpanData>) -> bool {
        tokio::select! {
            biased;
            received = queued.recv_many(batch, BATCH) => {
                if received == 0 {
                    return false;
                }
            }
            () = self.stop.cancelled() => return false,
        }
        let full = async {
            while batch.len() < BATCH {
                let room = BATCH - batch.len();
                if queued.recv_many(batch, room).await == 0 {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            () = full => {}
            () = tokio::time::sleep(LINGER) => {}
            () = self.stop.cancelled() => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, Tracer,
        TracerProvider,
    };
    use opentelemetry_sdk::error::OTelSdkError;
    use tokio::sync::Semaphore;

    use super::*;

    /// A collector that takes a batch for each permit.
    #[derive(Clone, Debug)]
    struct Collector {
        permits: Arc<Semaphore>,
        taken: Arc<AtomicU64>,
        well: bool,
    }

    impl Collector {
        fn new(permits: usize, well: bool) -> Self {
            Self {
                permits: Arc::new(Semaphore::new(permits)),
                taken: Arc::default(),
                well,
            }
        }
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.permits.acquire().await.unwrap().forget();
            if !self.well {
                return Err(OTelSdkError::InternalFailure("no".into()));
            }
            self.taken.fetch_add(batch.len() as u64, Ordering::Relaxed);
            Ok(())
        }
    }

    fn end(pipeline: &Pipeline, spans: usize) {
        let tracer = pipeline.provider().tracer("test");
        for _ in 0..spans {
            drop(tracer.start("span"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_queued_is_sent_at_the_end() {
        let collector = Collector::new(100, true);
        let pipeline = Pipeline::with(collector.clone(), 1.0);
        end(&pipeline, 700);
        let counts = Arc::clone(pipeline.counts());
        pipeline.flush().await;
        assert_eq!(collector.taken.load(Ordering::Relaxed), 700);
        assert_eq!((counts.exported(), counts.dropped()), (700, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_takes_nothing_costs_a_bounded_queue() {
        let collector = Collector::new(0, true);
        let pipeline = Pipeline::with(collector, 1.0);
        end(&pipeline, QUEUE + 10);
        let counts = Arc::clone(pipeline.counts());
        assert_eq!(counts.dropped(), 10);
        let begun = tokio::time::Instant::now();
        pipeline.flush().await;
        assert!(begun.elapsed() <= FLUSH + Duration::from_millis(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_collector_refuses_is_counted() {
        let collector = Collector::new(100, false);
        let pipeline = Pipeline::with(collector, 1.0);
        end(&pipeline, 3);
        let counts = Arc::clone(pipeline.counts());
        pipeline.flush().await;
        assert_eq!((counts.exported(), counts.dropped()), (0, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_s_decision_goes_before_the_ratio() {
        let collector = Collector::new(100, true);
        let pipeline = Pipeline::with(collector.clone(), 0.0);
        end(&pipeline, 3);
        let client = SpanContext::new(
            TraceId::from(1),
            SpanId::from(1),
            TraceFlags::SAMPLED,
            true,
            TraceState::NONE,
        );
        let parent = Context::new().with_remote_span_context(client);
        let tracer = pipeline.provider().tracer("test");
        drop(tracer.start_with_context("span", &parent));
        drop(tracer);
        pipeline.flush().await;
        assert_eq!(collector.taken.load(Ordering::Relaxed), 1);
    }
}
