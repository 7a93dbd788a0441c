//! The gRPC listener: HTTP/2 over TCP with every limit set.
//!
//! Not tonic's own server, for one reason above all: that one enforces
//! `grpc-timeout` outside every layer and answers CANCELLED, and a client must
//! hear DEADLINE_EXCEEDED. Here the stack's own deadline is the only one.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tower::{BoxError, Service, ServiceExt};
use tracing::{debug, warn};

use crate::auth::tls::{ClientName, ServerTls};

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
/// Resets of our own that a client may provoke: more end the connection.
const MAX_LOCAL_RESETS: usize = 1024;
/// What every HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// From the connection to the end of HTTP/2's preface, by which a client begins.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `drain`, then lets open connections finish what they have.
/// Dropping the future cuts them.
pub async fn serve<S, B>(
    listener: TcpListener,
    service: S,
    limits: Limits,
    tls: Option<Arc<ServerTls>>,
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
                // Answers are small and awaited; a socket that refuses the option
                // works too.
                let _ = stream.set_nodelay(true);
                let (service, tls, drain) = (service.clone(), tls.clone(), drain.clone());
                connections.spawn(async move {
                    if let Some(ended) = drain.run_until_cancelled(open(stream, tls.as_ref())).await
                    {
                        match ended {
                            Ok((io, client)) => {
                                let aged = async {
                                    match (&tls, &client) {
                                        (Some(tls), Some(_)) => tls.aged().await,
                                        _ => std::future::pending().await,
                                    }
                                };
                                let who = (Peer(peer), client.clone());
                                let connection = connection(io, who, service, limits);
                                let ended = until(connection, &drain, aged).await;
                                if let Err(error) = ended {
                                    debug!(%peer, %error, "connection ended");
                                }
                            }
                            Err(error) => debug!(%peer, %error, "connection ended"),
                        }
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
    while connections.join_next().await.is_some() {}
}

/// Runs a connection. From the drain on, or once it is old, it takes no new
/// request and ends with its last one.
async fn until<C: GracefulConnection>(
    connection: C,
    drain: &CancellationToken,
    aged: impl Future<Output = ()>,
) -> Result<(), C::Error> {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended.map(drop),
        () = drain.cancelled() => {}
        () = aged => {}
    }
    connection.as_mut().graceful_shutdown();
    connection.await.map(drop)
}

/// Both ends of a stream.
trait Io: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Io for T {}

/// Shakes hands, where TLS is spoken, and waits for the preface, both within
/// their time.
async fn open(
    stream: TcpStream,
    tls: Option<&Arc<ServerTls>>,
) -> io::Result<(Pin<Box<dyn Io>>, Option<ClientName>)> {
    let late = |_| io::Error::other("a connection without a word");
    let Some(tls) = tls else {
        let (read, write) = stream.into_split();
        let io = timeout(PREFACE_TIMEOUT, preface(read, write));
        return Ok((io.await.map_err(late)??, None));
    };
    let (stream, client) = tls.accept(stream).await?;
    let (read, write) = tokio::io::split(stream);
    let io = timeout(PREFACE_TIMEOUT, preface(read, write));
    Ok((io.await.map_err(late)??, client))
}

/// Waits for the preface and gives a stream that begins with it. hyper waits for
/// it without bound, a drain included: who connects and says nothing (a port
/// scan, a probe of a load balancer) would hold up every shutdown.
async fn preface(
    mut read: impl AsyncRead + Send + Unpin + 'static,
    write: impl AsyncWrite + Send + Unpin + 'static,
) -> io::Result<Pin<Box<dyn Io>>> {
    let mut preface = [0; PREFACE.len()];
    read.read_exact(&mut preface).await?;
    if preface[..] != *PREFACE {
        return Err(io::Error::other("it does not speak HTTP/2"));
    }
    // hyper wants it movable; a stream that is read from two halves is not.
    Ok(Box::pin(tokio::io::join(PREFACE.chain(read), write)))
}

fn connection<S, B>(
    io: Pin<Box<dyn Io>>,
    (peer, client): (Peer, Option<ClientName>),
    service: S,
    limits: Limits,
) -> impl GracefulConnection<Error = hyper::Error> + Send
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(peer);
        if let Some(client) = &client {
            request.extensions_mut().insert(client.clone());
        }
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
        // Streams that were reset before they were looked at: more end the connection
        // (rapid reset), and with it every other call on the channel. As many as may
        // be open may be given up at once: a trainer does that to a whole batch, and
        // all clients do after a stall of ours.
        .max_pending_accept_reset_streams(usize::try_from(limits.max_streams).ok())
        .max_local_error_reset_streams(MAX_LOCAL_RESETS)
        .serve_connection(TokioIo::new(io), service)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn who_says_nothing_does_not_hold_up_the_drain() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let drain = CancellationToken::new();
        let service = tower::service_fn(|_| async {
            Ok::<_, Infallible>(http::Response::new(tonic::body::Body::empty()))
        });
        let limits = Limits { max_streams: 1 };
        let served = tokio::spawn(serve(listener, service, limits, None, drain.clone()));
        let silent = TcpStream::connect(address).await.unwrap();
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(&PREFACE[..7]).await.unwrap();
        // Connections are accepted in order: with an answer here, the others are.
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(PREFACE).await.unwrap();
        let empty_settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        client.write_all(&empty_settings).await.unwrap();
        client.read_exact(&mut [0; 9]).await.unwrap();
        drop(client);
        drain.cancel();
        timeout(SOON, served).await.unwrap().unwrap();
        drop((silent, slow));
    }
}
