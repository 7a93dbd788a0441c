//! What one request may take before it is whole: a layer of its headers and of
//! its body.

use std::{
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use futures_util::future::Either;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tower::{BoxError, Service};

use super::limits::{Counts, Limits, RequestLimit};
use crate::error::{Error, Reason};

/// What RFC 9113 (6.5.2) adds for each header.
const HEADER: usize = 32;
/// Its calls stay open while a client looks around: what is bounded there is the
/// time between its messages.
const REFLECTION: &str = "/grpc.reflection.";

/// The layer's service.
#[derive(Clone, Debug)]
pub struct Bounded<S> {
    inner: S,
    limits: Limits,
    counts: Arc<Counts>,
}

impl<S> Bounded<S> {
    /// Before `inner`.
    pub fn new(inner: S, limits: Limits, counts: Arc<Counts>) -> Self {
        Self {
            inner,
            limits,
            counts,
        }
    }
}

impl<S> Service<http::Request<tonic::body::Body>> for Bounded<S>
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<tonic::body::Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<S::Response, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let bytes = size(&request);
        if bytes > usize::try_from(self.limits.header_bytes).unwrap_or(usize::MAX) {
            self.counts.refuses(RequestLimit::Headers);
            let error = Error::new(
                Reason::HeadersTooLarge,
                format!(
                    "the request's headers have {bytes} bytes, 32 for each included; at most {} \
                     are taken (--max-header-bytes of the server)",
                    self.limits.header_bytes
                ),
            );
            return Either::Right(ready(Ok(Status::from(error).into_http())));
        }
        let patience = if request.uri().path().starts_with(REFLECTION) {
            Patience::Between(self.limits.idle)
        } else {
            Patience::Until(Instant::now() + self.limits.body)
        };
        let (limits, counts) = (self.limits, Arc::clone(&self.counts));
        Either::Left(self.inner.call(request.map(|body| {
            tonic::body::Body::new(Coming {
                body,
                taken: 0,
                patience,
                late: None,
                limits,
                counts,
            })
        })))
    }
}

/// Bytes of a request's headers as HTTP/2 counts them; the pseudo-headers are about
/// as long as what they say.
fn size<B>(request: &http::Request<B>) -> usize {
    let uri = request.uri().path().len()
        + request.uri().authority().map_or(0, |a| a.as_str().len())
        + request.method().as_str().len();
    let fields = request.headers().iter();
    fields.fold(uri, |sum, (name, value)| {
        sum + name.as_str().len() + value.len() + HEADER
    })
}

#[derive(Clone, Copy, Debug)]
enum Patience {
    /// For the whole body.
    Until(Instant),
    /// For the next part of it.
    Between(Duration),
}

/// A request's body as it comes. What has come of it counts as unfinished until it
/// is dropped: whoever reads it keeps it till then.
struct Coming {
    body: tonic::body::Body,
    taken: u64,
    patience: Patience,
    /// Made when it is first waited for: most bodies are there already.
    late: Option<Pin<Box<Sleep>>>,
    limits: Limits,
    counts: Arc<Counts>,
}

impl Coming {
    fn refuse(&mut self, limit: RequestLimit, error: Error) -> BoxError {
        self.counts.refuses(limit);
        // Nothing more is read.
        self.body = tonic::body::Body::empty();
        Status::from(error).into()
    }
}

impl Body for Coming {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let me = self.get_mut();
        match Pin::new(&mut me.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Buf::remaining);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                if matches!(me.patience, Patience::Between(_)) {
                    me.late = None;
                } else if me.counts.takes(bytes, me.limits.unfinished_bytes) {
                    me.taken += bytes;
                } else {
                    let error = Error::new(
                        Reason::ReceivingFull,
                        format!(
                            "as many bytes of messages that are not whole are here already, of \
                             all callers, as may be: {} (--max-unfinished-bytes of the server)",
                            me.limits.unfinished_bytes
                        ),
                    );
                    let error = me.refuse(RequestLimit::UnfinishedBytes, error);
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                let patience = me.patience;
                let late = me.late.get_or_insert_with(|| {
                    Box::pin(match patience {
                        Patience::Until(at) => tokio::time::sleep_until(at),
                        Patience::Between(long) => tokio::time::sleep(long),
                    })
                });
                if late.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                let error = Error::new(
                    Reason::RequestTooSlow,
                    match patience {
                        Patience::Until(_) => format!(
                            "the request's message was not here whole {:?} after its headers \
                             (--body-timeout of the server)",
                            me.limits.body
                        ),
                        Patience::Between(long) => format!(
                            "no message came on this stream for {long:?} (--idle-timeout of the \
                             server)"
                        ),
                    },
                );
                let error = me.refuse(RequestLimit::Body, error);
                Poll::Ready(Some(Err(error)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.counts.gives_back(self.taken);
    }
}
