//! The gRPC listener: HTTP/2 over TCP with every limit set.
//!
//! Not tonic's own server, for one reason above all: that one enforces
//! `grpc-timeout` outside every layer and answers CANCELLED, and a client must
//! hear DEADLINE_EXCEEDED. Here the stack's own deadline is the only one.

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use bytes::Bytes;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tower::{BoxError, Service, ServiceExt};
use tracing::{debug, warn};

/// Where a request comes from, as an extension of it.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Limits of each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Streams open at once. A trainer runs thousands of trajectories on one
    /// channel; a lower limit queues them unseen in the client.
    pub max_streams: u32,
}

/// 1 MiB frames: 40 % faster than the default 16 KiB for prompts of 128k tokens.
const MAX_FRAME: u32 = 1 << 20;
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
const MAX_HEADER_LIST: u32 = 16 << 10;
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Streams that a client reset before they were looked at, and resets of our own
/// that it may provoke: more end the connection (rapid reset).
const MAX_PENDING_RESETS: usize = 20;
const MAX_LOCAL_RESETS: usize = 1024;
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `drain`, then lets open connections finish what they have.
/// Dropping the future cuts them.
pub async fn serve<S, B>(
    listener: TcpListener,
    service: S,
    limits: Limits,
    drain: CancellationToken,
) where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = drain.cancelled() => break,
            // Ended ones are taken off as they end.
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let connection = graceful.watch(connection(stream, peer, service.clone(), limits));
                connections.spawn(async move {
                    if let Err(error) = connection.await {
                        debug!(%peer, %error, "connection ended");
                    }
                });
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Nobody is refused who could still be served elsewhere: the port is closed
    // before the first connection is.
    drop(listener);
    graceful.shutdown().await;
}

fn connection<S, B>(
    stream: TcpStream,
    peer: SocketAddr,
    service: S,
    limits: Limits,
) -> impl hyper_util::server::graceful::GracefulConnection<Error = hyper::Error> + Send
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    // Answers are small and awaited; a socket that refuses the option works too.
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        service.clone().oneshot(request.map(tonic::body::Body::new))
    });
    http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_frame_size(MAX_FRAME)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_LIST)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_LOCAL_RESETS)
        .serve_connection(TokioIo::new(stream), service)
}
