//! What a request may take before it is whole.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpStream, sync::mpsc};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    plane::{Plane, SAMPLE, request},
    wire::{self, REFUSED_STREAM, RST_STREAM, Wire},
};

type Part = Result<Frame<Bytes>, Infallible>;

/// A call whose body is sent by hand.
struct Call {
    body: mpsc::Sender<Part>,
    answer: tokio::task::JoinHandle<Status>,
}

impl Call {
    async fn begin(to: SocketAddr, path: &str) -> Self {
        let io = TokioIo::new(TcpStream::connect(to).await.unwrap());
        let (mut sender, connection): (SendRequest<_>, _) =
            handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(connection);
        let (body, parts) = mpsc::channel::<Part>(1);
        let parts = stream::unfold(parts, async |mut parts| {
            let part = parts.recv().await?;
            Some((part, parts))
        });
        let request = http::Request::post(format!("http://{to}{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(StreamBody::new(Box::pin(parts)))
            .unwrap();
        let answer = tokio::spawn(async move {
            let answer = sender.send_request(request).await.unwrap();
            Status::from_header_map(answer.headers()).expect("a status and no message")
        });
        Self { body, answer }
    }

    async fn send(&self, bytes: impl Into<Bytes>) {
        let part = Ok(Frame::data(bytes.into()));
        self.body.send(part).await.unwrap();
    }
}

fn reason(status: &Status) -> String {
    status.get_details_error_info().unwrap().reason
}

/// The beginning of a message of so many bytes.
fn beginning(len: u32) -> Vec<u8> {
    [&[0][..], &len.to_be_bytes()].concat()
}

#[tokio::test]
async fn a_body_that_takes_too_long_is_refused() {
    let plane = Plane::start(|config| config.limits.body = Duration::from_millis(500)).await;
    let call = Call::begin(plane.grpc(), SAMPLE).await;
    call.send(beginning(1000)).await;
    let bytes = async {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if call
                .body
                .send(Ok(Frame::data(Bytes::from_static(b"1"))))
                .await
                .is_err()
            {
                return;
            }
        }
    };
    let (status, ()) = tokio::join!(call.answer, bytes);
    let status = status.unwrap();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert_eq!(reason(&status), "REQUEST_TOO_SLOW");
    assert!(status.message().contains("--body-timeout"), "{status}");
    plane.refused("body", 1.0).await;
    // A slow answer is no slow request.
    plane.client().sample(request(20)).await.unwrap();
    plane.refused("body", 1.0).await;
}

#[tokio::test]
async fn bytes_of_unfinished_requests_are_bounded() {
    let plane = Plane::start(|config| config.limits.unfinished_bytes = 100_000).await;
    let held = Call::begin(plane.grpc(), SAMPLE).await;
    held.send(beginning(90_000)).await;
    held.send(vec![0; 60_000]).await;
    let unfinished = "berth_unfinished_requests_bytes";
    plane.counts(unfinished, 60_005.0).await;
    let refused = Call::begin(plane.grpc(), SAMPLE).await;
    refused.send(beginning(90_000)).await;
    refused.send(vec![0; 60_000]).await;
    let status = refused.answer.await.unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(reason(&status), "RECEIVING_FULL");
    assert!(
        status.message().contains("--max-unfinished-bytes"),
        "{status}"
    );
    assert!(status.get_details_retry_info().is_some());
    plane.refused("unfinished_bytes", 1.0).await;
    // Small ones still find room, and what is given up leaves it.
    plane.serves().await;
    drop(held.body);
    held.answer.abort();
    plane.counts(unfinished, 0.0).await;
}

#[tokio::test]
async fn a_frame_that_does_not_end_counts_as_unfinished() {
    let plane = Plane::start(|config| config.limits.unfinished_bytes = 100_000).await;
    let mut wires = Vec::new();
    for _ in 0..2 {
        let mut wire = Wire::open(plane.grpc()).await;
        // Of more than the least limit of frames, so it waits until ours are known.
        wire.send(&wire::frame(wire::SETTINGS, wire::ACK, 0, &[]))
            .await;
        wire.send(&wire::call(1, SAMPLE)).await;
        wire.send(&wire::head(wire::DATA, 0, 1, 200_000)).await;
        wire.send(&[0; 60_000]).await;
        wires.push(wire);
    }
    let codes = tokio::select! {
        codes = async { let [a, b] = &mut wires[..] else { unreachable!() };
            tokio::select! { codes = a.goaways() => codes, codes = b.goaways() => codes } } => codes,
    };
    assert!(codes.contains(&wire::ENHANCE_YOUR_CALM), "{codes:?}");
    plane.limited("unfinished_bytes", 1.0).await;
    drop(wires);
    plane.counts("berth_unfinished_requests_bytes", 0.0).await;
    plane.serves().await;
}

#[tokio::test]
async fn headers_that_are_too_large_are_refused_with_a_reason() {
    let plane = Plane::start(|config| config.limits.header_bytes = 2000).await;
    let mut large = tonic::Request::new(request(1));
    let value = "x".repeat(2000).parse().unwrap();
    large.metadata_mut().insert("x-large", value);
    let status = plane.client().sample(large).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(reason(&status), "HEADERS_TOO_LARGE");
    assert!(status.message().contains("--max-header-bytes"), "{status}");
    plane.refused("headers", 1.0).await;
    plane.serves().await;
}

#[tokio::test]
async fn a_message_that_is_too_large_is_refused() {
    let plane = Plane::start(|config| config.max_message_bytes = 100_000).await;
    let mut large = request(1);
    large.cache_affinity_key = Some("x".repeat(200_000));
    let status = plane.client().sample(large).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    assert_eq!(reason(&status), "MESSAGE_TOO_LARGE");
    assert!(status.message().contains("--max-message-bytes"), "{status}");
    let series = "berth_requests_total{method=\"berth.v1.SamplingService/Sample\",\
                  code=\"OUT_OF_RANGE\",reason=\"MESSAGE_TOO_LARGE\"}";
    plane.counts(series, 1.0).await;
    plane.serves().await;
}

#[tokio::test]
async fn more_streams_than_a_connection_may_have_are_refused() {
    let plane = Plane::start(|config| config.limits.max_streams = 2).await;
    let mut wire = Wire::open(plane.grpc()).await;
    for stream in [1, 3, 5] {
        wire.send(&wire::call(stream, SAMPLE)).await;
    }
    let reset = wire.until(RST_STREAM).await;
    assert_eq!((reset.stream, reset.code()), (5, REFUSED_STREAM));
    plane.refused("streams", 1.0).await;
    plane.serves().await;
}
