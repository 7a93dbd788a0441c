//! Deadlines. A call that brings none gets the server's; one whose deadline has
//! passed already is not begun.
//!
//! The HTTP half ([`TakeTimeout`]) takes `grpc-timeout` away before anything else
//! can act on it, and the deadline is kept here, where it becomes
//! DEADLINE_EXCEEDED.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::HeaderValue;
use tokio::time::Instant;
use tower::Service;

use super::generation::Ticket;
use crate::{call::SampleCall, error::Error};

/// The header by which a gRPC client says how long it waits.
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// Waits longer than this are as good as none; keeps time arithmetic in range.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// When the caller gives up, as an extension of the HTTP request.
#[derive(Clone, Copy, Debug)]
pub struct CallerDeadline(pub Instant);

/// HTTP service that turns `grpc-timeout` into a [`CallerDeadline`].
#[derive(Clone, Debug)]
pub struct TakeTimeout<S> {
    inner: S,
}

impl<S> TakeTimeout<S> {
    /// Before `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S, B> Service<http::Request<B>> for TakeTimeout<S>
where
    S: Service<http::Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        // A header that cannot be read counts as absent, as in other servers.
        if let Some(timeout) = request
            .headers_mut()
            .remove(GRPC_TIMEOUT)
            .as_ref()
            .and_then(parse)
        {
            request
                .extensions_mut()
                .insert(CallerDeadline(Instant::now() + timeout.min(LONGEST)));
        }
        self.inner.call(request)
    }
}

/// gRPC's form: at most eight digits and a unit.
pub(crate) fn parse(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

/// The layer.
#[derive(Clone, Debug)]
pub struct Deadline<S> {
    inner: S,
    default: Duration,
}

impl<S> Deadline<S> {
    /// With `default` for calls that bring none.
    pub fn new(inner: S, default: Duration) -> Self {
        Self { inner, default }
    }
}

impl<S> Service<SampleCall> for Deadline<S>
where
    S: Service<SampleCall, Response = Ticket, Error = Error>,
    S::Future: Send + 'static,
{
    type Response = Ticket;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Ticket, Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut call: SampleCall) -> Self::Future {
        let now = Instant::now();
        let deadline = call.deadline.unwrap_or(now + self.default.min(LONGEST));
        if deadline <= now {
            return Box::pin(async { Err(Error::deadline()) });
        }
        call.deadline = Some(deadline);
        let opening = self.inner.call(call);
        Box::pin(async move {
            match tokio::time::timeout_at(deadline, opening).await {
                Ok(opened) => opened.map(|ticket| ticket.until(deadline)),
                Err(_) => Err(Error::deadline()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_read_as_grpc_writes_it() {
        let read = |s: &str| parse(&HeaderValue::from_str(s).unwrap());
        assert_eq!(read("1S"), Some(Duration::from_secs(1)));
        assert_eq!(read("250m"), Some(Duration::from_millis(250)));
        assert_eq!(
            read("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        assert_eq!(read("7u"), Some(Duration::from_micros(7)));
        for bad in ["", "S", "1", "-1S", "1s", "123456789S", "1.5S", "é"] {
            assert_eq!(
                HeaderValue::from_str(bad).ok().as_ref().and_then(parse),
                None,
                "{bad}"
            );
        }
    }
}
