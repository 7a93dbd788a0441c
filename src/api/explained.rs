//! What tonic itself says of a call, with a reason as every error has one: it reads
//! and writes messages, and no service sees those that it refuses.

use std::task::{Context, Poll};

use futures_util::{TryFutureExt as _, future::MapOk};
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tonic::{Code, Status, body::Body};
use tower::Service;

use crate::error::{Error, Reason};

/// Bytes of a message that a sidecar sends, at most.
pub const REPLICA_MESSAGE: usize = 1 << 20;
/// Bytes of a message that an operator sends, at most.
pub const FLEET_MESSAGE: usize = 1 << 16;

/// The layer's service.
#[derive(Clone, Debug)]
pub struct Explained<S>(S);

impl<S> Explained<S> {
    /// Of what `inner` answers.
    pub fn new(inner: S) -> Self {
        Self(inner)
    }
}

impl<S> Service<Request<Body>> for Explained<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = MapOk<S::Future, fn(Response<Body>) -> Response<Body>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let explain: fn(_) -> _ = if path.starts_with("/berth.v1.SamplingService/") {
            |response| explained(response, &SAMPLING)
        } else if path.starts_with("/berth.v1.ReplicaService/") {
            |response| explained(response, &REPLICA)
        } else if path.starts_with("/berth.v1.FleetService/") {
            |response| explained(response, &FLEET)
        } else {
            |response| explained(response, &OTHER)
        };
        self.0.call(request).map_ok(explain)
    }
}

/// What bounds the messages of a service.
struct Bounds {
    request: &'static str,
    answer: &'static str,
}

const OPTION: &str = "--max-message-bytes of the server raises it";
const FIXED: &str = "it is fixed for this method";

const SAMPLING: Bounds = Bounds {
    request: OPTION,
    answer: OPTION,
};
const REPLICA: Bounds = Bounds {
    request: FIXED,
    answer: FIXED,
};
const FLEET: Bounds = Bounds {
    request: FIXED,
    answer: OPTION,
};
const OTHER: Bounds = REPLICA;

/// In its headers, which is where a request is refused, or in its trailers, after
/// which an answer is. Errors of ours are left as they are.
fn explained(response: Response<Body>, bounds: &'static Bounds) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    explain(&mut head.headers, "the request", bounds.request);
    if head.headers.contains_key(Status::GRPC_STATUS) {
        // That was all.
        return Response::from_parts(head, body);
    }
    let body = body.map_frame(|frame| match frame.into_trailers() {
        Ok(mut trailers) => {
            explain(&mut trailers, "the answer", bounds.answer);
            Frame::trailers(trailers)
        }
        Err(data) => data,
    });
    Response::from_parts(head, Body::new(body))
}

fn explain(headers: &mut HeaderMap, what: &str, bound: &str) {
    if headers.contains_key(Status::GRPC_STATUS_DETAILS) {
        return;
    }
    let Some(status) = Status::from_header_map(headers) else {
        return;
    };
    let said = status.message();
    let error = match status.code() {
        // tonic says how large it is, and the limit.
        Code::OutOfRange => Error::new(
            Reason::MessageTooLarge,
            format!(
                "{what} is too large: {} ({bound})",
                said.strip_prefix("Error, ").unwrap_or(said)
            ),
        ),
        // Of a message that is none, or not the one of this method.
        Code::Internal => Error::new(
            Reason::InvalidRequest,
            format!("the request cannot be read: {said}"),
        ),
        Code::Unimplemented => Error::new(Reason::NotImplemented, said),
        _ => return,
    };
    headers.remove(Status::GRPC_MESSAGE);
    // It fits: what is said is bounded.
    let _ = Status::from(error).add_header(headers);
}
