//! A connection from its first request to its end.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Body, Frame, SizeHint};
use hyper_util::server::graceful::GracefulConnection;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::limits::{Limit, Limits};

/// A connection that was told to end is cut when nothing has happened on it for so
/// long: until then an answer may be on its way.
const CLOSING: Duration = Duration::from_secs(5);
/// One on which nothing happened before, either, so long after it was told: a way to
/// its client and back, with a call that was already under way.
const MOMENT: Duration = Duration::from_secs(1);

/// What is known of a connection while it lives.
#[derive(Debug)]
pub(super) struct Life {
    began: Instant,
    /// A request has come.
    seen: AtomicBool,
    /// Requests that are not answered whole.
    open: AtomicU64,
    /// Milliseconds from the beginning to the end of the last stream.
    ended: AtomicU64,
    /// Likewise, to the last bytes of an answer.
    answered: AtomicU64,
}

impl Life {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            seen: AtomicBool::new(false),
            open: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            answered: AtomicU64::new(0),
        })
    }

    /// A request has come; it is open until what this gives is dropped.
    pub(super) fn open(self: &Arc<Self>) -> Stream {
        self.seen.store(true, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::Relaxed);
        Stream(Arc::clone(self))
    }

    /// Bytes of an answer went.
    pub(super) fn answers(&self) {
        self.answered.store(self.age(), Ordering::Relaxed);
    }

    fn age(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Since when no stream is open; `None`: one is.
    fn idle_since(&self) -> Option<Instant> {
        let ended = Duration::from_millis(self.ended.load(Ordering::Relaxed));
        (self.open.load(Ordering::Relaxed) == 0).then(|| self.began + ended)
    }

    /// Until it was without a first request, or without an open stream, for too
    /// long. It is looked at when that could be, not at each request.
    pub(super) async fn too_long(&self, limits: &Limits) -> Limit {
        let seen = || self.seen.load(Ordering::Relaxed);
        sleep_until(self.began + limits.first_request.min(limits.idle)).await;
        if !seen() {
            sleep_until(self.began + limits.first_request).await;
        }
        if !seen() {
            return Limit::FirstRequest;
        }
        loop {
            match self.idle_since().map(|since| since + limits.idle) {
                Some(until) if until <= Instant::now() => return Limit::Idle,
                Some(until) => sleep_until(until).await,
                None => sleep(limits.idle).await,
            }
        }
    }

    /// Lets a connection that was told to end do so. One that does not, though
    /// nothing is left to say, is cut: its client is gone, or does not listen.
    pub(super) async fn close<C: GracefulConnection>(
        &self,
        mut connection: Pin<&mut C>,
    ) -> Result<(), C::Error> {
        loop {
            if let Ok(ended) = timeout(MOMENT, connection.as_mut()).await {
                return ended.map(drop);
            }
            let answered = Duration::from_millis(self.answered.load(Ordering::Relaxed));
            let last = self
                .idle_since()
                .map(|since| since.max(self.began + answered));
            if last.is_some_and(|last| last.elapsed() >= CLOSING) {
                return Ok(());
            }
        }
    }
}

/// An open stream, as long as it is not dropped.
#[derive(Debug)]
pub(super) struct Stream(Arc<Life>);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.ended.store(self.0.age(), Ordering::Relaxed);
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer's body, whose stream is open until it is dropped.
#[derive(Debug)]
pub(super) struct Answer<B> {
    body: B,
    _stream: Stream,
}

impl<B> Answer<B> {
    pub(super) fn new(body: B, stream: Stream) -> Self {
        Self {
            body,
            _stream: stream,
        }
    }
}

impl<B: Body + Unpin> Body for Answer<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        pin!(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
