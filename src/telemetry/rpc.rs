//! Every gRPC call, measured and traced: an HTTP layer, since only there all ends
//! are seen, those of refused and of broken-off calls too.
//!
//! A call counts once, when the last of its answer is handed out or the client
//! has gone: then as CANCELLED.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;
use tonic::Code;
use tower::Service;
use tower_http::request_id::RequestId;
use tracing::{Instrument, Span, debug_span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::{
    method::Method,
    metrics::Metrics,
    outcome::Outcome,
    trace::{ONLY_TRACED, parent_of},
};

/// Characters of a request id that are kept.
const MAX_REQUEST_ID: usize = 256;

/// The id of this request. A client may bring it; one that would not stand well
/// in a log line is cut down to what does.
pub fn request_id(extensions: &http::Extensions) -> Arc<str> {
    let id: String = extensions
        .get::<RequestId>()
        .and_then(|id| id.header_value().to_str().ok())
        .unwrap_or_default()
        .chars()
        .filter(char::is_ascii_graphic)
        .take(MAX_REQUEST_ID)
        .collect();
    Arc::from(id)
}

/// The layer's service.
#[derive(Clone, Debug)]
pub struct Observed<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S> Observed<S> {
    /// Before `inner`.
    pub fn new(inner: S, metrics: Arc<Metrics>) -> Self {
        Self { inner, metrics }
    }
}

impl<S, B, R> Service<http::Request<B>> for Observed<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
    R: Body,
{
    type Response = http::Response<Answer<R>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let mut call = Call::begin(Arc::clone(&self.metrics), &request);
        let (log, traced) = (call.log.clone(), call.traced.clone());
        let answering = log.in_scope(|| traced.in_scope(|| self.inner.call(request)));
        let answering = async move {
            let answer = answering.await?;
            // A refusal has no trailers: its status stands in the head.
            if let Some(outcome) = Outcome::of_headers(answer.headers()) {
                call.end(outcome);
            }
            Ok(answer.map(|body| Answer {
                body: Some(body),
                call,
            }))
        };
        Box::pin(answering.instrument(traced).instrument(log))
    }
}

/// A call that is not over, or that has just been told of.
struct Call {
    metrics: Arc<Metrics>,
    method: Method,
    begun: Instant,
    log: Span,
    traced: Span,
    over: bool,
}

impl Call {
    fn begin<B>(metrics: Arc<Metrics>, request: &http::Request<B>) -> Self {
        let method = Method::of(request.uri().path());
        let mut call = Self {
            method,
            begun: Instant::now(),
            log: Span::none(),
            traced: Span::none(),
            over: !metrics.is_on(),
            metrics,
        };
        if call.over {
            return call;
        }
        call.metrics.begun(method);
        if method.is_traced() {
            // At INFO there are no spans: each line says whose it is by itself.
            let id = || request_id(request.extensions());
            call.log = debug_span!("request", request_id = &*id());
            let (service, name) = method.parts();
            call.traced = call.log.in_scope(|| {
                debug_span!(
                    target: ONLY_TRACED,
                    "rpc",
                    otel.name = method.name(),
                    otel.kind = "server",
                    otel.status_code = Empty,
                    rpc.system = "grpc",
                    rpc.service = service,
                    rpc.method = name,
                    rpc.grpc.status_code = Empty,
                    error.type = Empty,
                    berth.request_id = &*id(),
                )
            });
            if !call.traced.is_disabled()
                && let Some(parent) = parent_of(request.headers())
            {
                // It has not begun: nothing has entered it.
                let _ = call.traced.set_parent(parent);
            }
        }
        call
    }

    fn end(&mut self, outcome: Outcome) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        self.metrics
            .ended(self.method, outcome, self.begun.elapsed());
        if !self.traced.is_disabled() {
            self.traced
                .record("rpc.grpc.status_code", i64::from(outcome.code as i32));
            if outcome.code != Code::Ok {
                self.traced.record("error.type", outcome.reason);
            }
            if outcome.is_server_fault() {
                self.traced.record("otel.status_code", "ERROR");
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let code = if std::thread::panicking() {
            Code::Internal
        } else {
            Code::Cancelled
        };
        self.end(Outcome::without_reason(code));
    }
}

/// The body of an answer, watched to its end.
pub struct Answer<B> {
    /// `None`: dropped.
    body: Option<B>,
    call: Call,
}

impl<B> Answer<B> {
    fn end(&mut self, outcome: Outcome) {
        self.call.end(outcome);
    }
}

impl<B> Body for Answer<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        let Some(body) = &mut this.body else {
            return Poll::Ready(None);
        };
        let polled = {
            let _log = this.call.log.enter();
            let _traced = this.call.traced.enter();
            Pin::new(body).poll_frame(cx)
        };
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(outcome) = frame.trailers_ref().and_then(Outcome::of_headers) {
                    this.end(outcome);
                }
            }
            // An end without a status is none that gRPC knows.
            Poll::Ready(None | Some(Err(_))) => {
                this.end(Outcome::without_reason(Code::Unknown));
            }
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl<B> Drop for Answer<B> {
    fn drop(&mut self) {
        // What a stream says when it is given up belongs to its request.
        let _log = self.call.log.enter();
        let _traced = self.call.traced.enter();
        drop(self.body.take());
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::error::{Error, Reason};

    type Reply = UnsyncBoxBody<Bytes, Infallible>;

    fn frames(frames: Vec<Frame<Bytes>>) -> Reply {
        let frames = futures_util::stream::iter(frames.into_iter().map(Ok));
        UnsyncBoxBody::new(StreamBody::new(frames))
    }

    fn trailers(status: &str) -> Frame<Bytes> {
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", status.parse().unwrap());
        Frame::trailers(trailers)
    }

    async fn call(
        metrics: &Arc<Metrics>,
        answer: impl FnOnce() -> http::Response<Reply>,
    ) -> http::Response<Answer<Reply>> {
        let answer = answer();
        let mut answer = Some(answer);
        let inner = tower::service_fn(move |_: http::Request<()>| {
            let answer = answer.take();
            async move { Ok::<_, Infallible>(answer.unwrap()) }
        });
        let request = http::Request::builder()
            .uri("/berth.v1.SamplingService/Sample")
            .body(())
            .unwrap();
        Observed::new(inner, Arc::clone(metrics))
            .call(request)
            .await
            .unwrap()
    }

    fn counted(metrics: &Metrics) -> Vec<String> {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let wanted = |l: &&str| l.starts_with("requests_total") || l.starts_with("requests_in");
        text.lines().filter(wanted).map(str::to_owned).collect()
    }

    const METHOD: &str = r#"method="berth.v1.SamplingService/Sample""#;

    #[tokio::test]
    async fn each_call_counts_once_by_how_it_ended() {
        let metrics = Arc::new(Metrics::default());
        let data = || Frame::data(Bytes::from_static(b"x"));
        // Well; refused in its head; refused in its trailers; broken off; without
        // an end; not read.
        let whole = || http::Response::new(frames(vec![data(), trailers("0")]));
        let read = call(&metrics, whole).await;
        read.into_body().collect().await.unwrap();
        let refused = || tonic::Status::from(Error::new(Reason::NoReplica, "none")).into_http();
        let head = call(&metrics, || {
            let head: http::Response<()> = refused();
            head.map(|()| frames(vec![]))
        });
        head.await.into_body().collect().await.unwrap();
        let late = || http::Response::new(frames(vec![data(), trailers("14")]));
        let body = call(&metrics, late).await.into_body();
        body.collect().await.unwrap();
        let cut = call(&metrics, || http::Response::new(frames(vec![data()]))).await;
        cut.into_body().collect().await.unwrap();
        drop(call(&metrics, whole).await);
        let counted = counted(&metrics);
        for (code, reason) in [
            ("OK", "none"),
            ("UNAVAILABLE", "NO_REPLICA"),
            ("UNAVAILABLE", "none"),
            ("UNKNOWN", "none"),
            ("CANCELLED", "none"),
        ] {
            let line = format!(r#"requests_total{{{METHOD},code="{code}",reason="{reason}"}} 1"#);
            assert!(counted.contains(&line), "{line} in {counted:?}");
        }
        assert!(counted.contains(&format!("requests_in_flight{{{METHOD}}} 0")));
        assert_eq!(counted.len(), 6, "{counted:?}");
    }
}
