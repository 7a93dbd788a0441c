//! The HTTP layer: every request is let in by the [`Gate`] or answered here.
//! Behind it every request has a [`Caller`](super::Caller).

use std::{
    future::{Ready, ready},
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::Either;
use tonic::{Status, body::Body};
use tower::{Layer, Service};

use super::Gate;

/// See the module.
#[derive(Clone, Debug)]
pub struct Authenticate(pub Arc<Gate>);

/// What it makes of a service.
#[derive(Clone, Debug)]
pub struct Authenticated<S> {
    inner: S,
    gate: Arc<Gate>,
}

impl<S> Layer<S> for Authenticate {
    type Service = Authenticated<S>;

    fn layer(&self, inner: S) -> Authenticated<S> {
        Authenticated {
            inner,
            gate: Arc::clone(&self.0),
        }
    }
}

impl<S, B> Service<http::Request<B>> for Authenticated<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Self::Response, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let admitted = self.gate.admit(
            request.uri().path(),
            request.headers(),
            request.extensions(),
        );
        match admitted {
            Ok(caller) => {
                // Nothing behind this needs it, so nothing can tell it.
                request.headers_mut().remove(http::header::AUTHORIZATION);
                request.extensions_mut().insert(caller);
                Either::Left(self.inner.call(request))
            }
            Err(error) => Either::Right(ready(Ok(Status::from(error).into_http()))),
        }
    }
}
