//! The gRPC listener: HTTP/2 over TCP with every limit set.
//!
//! Not tonic's own server, for one reason above all: that one enforces
//! `grpc-timeout` outside every layer and answers CANCELLED, and a client must
//! hear DEADLINE_EXCEEDED. Here the stack's own deadline is the only one.

mod accept;
mod control;
pub mod descriptors;
mod frames;
mod life;
pub mod limits;
pub mod request;
mod shaken;
mod watched;

use std::{convert::Infallible, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite},
    net::TcpListener,
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tower::{BoxError, Service, ServiceExt};
use tracing::debug;

pub(crate) use self::accept::Acceptor;
use self::{
    frames::{ENHANCE_YOUR_CALM, goaway},
    life::{Answer, Life},
    limits::{Counts, Limit, Limits, Port},
    shaken::Handshakes,
    watched::Watched,
};
use crate::{
    audit::Audit,
    auth::tls::{ClientName, ServerTls},
};

/// Where a request comes from, as an extension of it.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// 1 MiB frames: 40 % faster than the default 16 KiB for prompts of 128k tokens.
const MAX_FRAME: u32 = 1 << 20;
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Resets of our own that a client may provoke: more end the connection.
const MAX_LOCAL_RESETS: usize = 1024;
/// What every HTTP/2 client says first (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// From the connection to the end of HTTP/2's preface, by which a client begins.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until `drain`, then lets open connections finish what they have. Clients
/// whose certificates are refused are told to `audit`. Dropping the future cuts them.
pub async fn serve<S, B>(
    listener: TcpListener,
    service: S,
    limits: Limits,
    tls: Option<Arc<ServerTls>>,
    counts: Arc<Counts>,
    audit: Audit,
    drain: CancellationToken,
) where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let refusal = if tls.is_none() { refusal() } else { Vec::new() };
    let mut acceptor = Acceptor::new(
        listener,
        Port::Grpc,
        limits.connections,
        Arc::clone(&counts),
    );
    let handshakes = Arc::new(Handshakes::new(Arc::clone(&counts), audit));
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer, place) = tokio::select! {
            biased;
            () = drain.cancelled() => break,
            // Ended ones are taken off as they end.
            Some(_) = connections.join_next() => continue,
            accepted = acceptor.next(&refusal) => accepted,
        };
        let (service, tls, drain) = (service.clone(), tls.clone(), drain.clone());
        let (counts, handshakes) = (Arc::clone(&counts), Arc::clone(&handshakes));
        connections.spawn(async move {
            let _place = place;
            let opened = async {
                let (io, client) = match &tls {
                    None => (Box::new(stream) as Box<dyn Io>, None),
                    Some(tls) => match tls.accept(stream).await {
                        Ok((stream, client)) => (Box::new(stream) as Box<dyn Io>, client),
                        Err(unshaken) => {
                            handshakes.failed(peer, &unshaken);
                            return Ok(None);
                        }
                    },
                };
                let io = greeted(io, limits.first_request, &counts).await?;
                Ok(Some((io, client)))
            };
            let ended = match drain.run_until_cancelled(opened).await {
                Some(Ok(Some((io, client)))) => {
                    let aged = async {
                        match (&tls, &client) {
                            (Some(tls), Some(_)) => tls.aged().await,
                            _ => std::future::pending().await,
                        }
                    };
                    let life = Life::new();
                    let io = Watched::new(io, &limits, Arc::clone(&life), Arc::clone(&counts));
                    let who = (Peer(peer), client.clone());
                    let connection = connection(io, who, service, limits, Arc::clone(&life));
                    let ended = until(connection, &life, &limits, &counts, &drain, aged);
                    ended.await.map_err(io::Error::other)
                }
                Some(Err(error)) => Err(error),
                Some(Ok(None)) | None => Ok(()),
            };
            if let Err(error) = ended {
                debug!(%peer, %error, "connection ended");
            }
        });
    }
    // Nobody is refused who could still be served elsewhere: the port is closed
    // before the first connection is.
    drop(acceptor);
    while connections.join_next().await.is_some() {}
}

/// What a connection without a place is told: an empty SETTINGS, which is what a
/// server says first, and why it ends.
fn refusal() -> Vec<u8> {
    let settings = frames::write(4, 0, 0, &[]);
    let why = goaway(0, ENHANCE_YOUR_CALM, "too many connections");
    [settings, why].concat()
}

/// Runs a connection. From the drain on, once it is old, or when nothing was asked
/// on it for too long, it takes no new request and ends with its last one.
async fn until<C: GracefulConnection>(
    connection: C,
    life: &Life,
    limits: &Limits,
    counts: &Counts,
    drain: &CancellationToken,
    aged: impl Future<Output = ()>,
) -> Result<(), C::Error> {
    let mut connection = pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended.map(drop),
        () = drain.cancelled() => {}
        () = aged => {}
        limit = life.too_long(limits) => counts.limits(Port::Grpc, limit),
    }
    connection.as_mut().graceful_shutdown();
    life.close(connection).await
}

/// Both ends of a stream.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Waits for the preface within its time.
async fn greeted(
    mut io: Box<dyn Io>,
    first_request: Duration,
    counts: &Counts,
) -> io::Result<Box<dyn Io>> {
    match timeout(PREFACE_TIMEOUT.min(first_request), preface(&mut io)).await {
        Ok(spoken) => spoken?,
        Err(_) => {
            counts.limits(Port::Grpc, Limit::Handshake);
            return Err(io::Error::other("a connection without a word"));
        }
    }
    Ok(io)
}

/// Waits for the preface. hyper waits for it without bound, a drain included: who
/// connects and says nothing (a port scan, a probe of a load balancer) would hold
/// up every shutdown.
async fn preface(io: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    let mut preface = [0; PREFACE.len()];
    io.read_exact(&mut preface).await?;
    if preface[..] != *PREFACE {
        return Err(io::Error::other("it does not speak HTTP/2"));
    }
    Ok(())
}

/// The bound that HTTP/2 itself keeps. Twice what is taken: between them the answer
/// says why.
fn h2_header_bytes(limits: &Limits) -> u32 {
    limits.header_bytes.saturating_mul(2)
}

fn connection<S, B>(
    io: Watched<Box<dyn Io>>,
    (peer, client): (Peer, Option<ClientName>),
    service: S,
    limits: Limits,
    life: Arc<Life>,
) -> impl GracefulConnection<Error = hyper::Error> + Send
where
    S: Service<http::Request<tonic::body::Body>, Response = http::Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(peer);
        if let Some(client) = &client {
            request.extensions_mut().insert(client.clone());
        }
        let stream = life.open();
        let answer = service.clone().oneshot(request.map(tonic::body::Body::new));
        async move {
            let answer = answer.await?;
            Ok::<_, Infallible>(answer.map(|body| Answer::new(body, stream)))
        }
    });
    http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.max_streams)
        .max_frame_size(MAX_FRAME)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(h2_header_bytes(&limits))
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        // Streams that were reset before they were looked at: more end the connection
        // (rapid reset), and with it every other call on the channel. As many as may
        // be open may be given up at once: a trainer does that to a whole batch, and
        // all clients do after a stall of ours. How fast they come is `control`'s.
        .max_pending_accept_reset_streams(usize::try_from(limits.max_streams).ok())
        .max_local_error_reset_streams(MAX_LOCAL_RESETS)
        .serve_connection(TokioIo::new(io), service)
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncWriteExt, net::TcpStream, time::Instant};

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
        let limits = Limits {
            max_streams: 1,
            ..Limits::default()
        };
        let served = serve(
            listener,
            service,
            limits,
            None,
            Arc::default(),
            Audit::default(),
            drain.clone(),
        );
        let served = tokio::spawn(served);
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

    /// How long after the drain a connection ends whose client asked something at once
    /// that takes so long, and then neither hears nor says anything.
    async fn holds_up_the_drain(call: Duration) -> Duration {
        let (mut client, server) = tokio::io::duplex(64 << 10);
        let (limits, counts) = (Limits::default(), Arc::new(Counts::default()));
        let (life, drain) = (Life::new(), CancellationToken::new());
        let service = tower::service_fn(move |_| async move {
            tokio::time::sleep(call).await;
            Ok::<_, Infallible>(http::Response::new(tonic::body::Body::empty()))
        });
        let server: Box<dyn Io> = Box::new(server);
        let io = Watched::new(server, &limits, Arc::clone(&life), Arc::clone(&counts));
        let who = (Peer("192.0.2.7:1".parse().unwrap()), None);
        let connection = connection(io, who, service, limits, Arc::clone(&life));
        let settings = frames::write(4, 0, 0, &[]);
        // GET / with its END_STREAM and END_HEADERS.
        let asked = frames::write(frames::HEADERS, 5, 1, b"\x82\x84\x86");
        client.write_all(&[settings, asked].concat()).await.unwrap();
        let told = async {
            tokio::time::sleep(Duration::from_secs(10)).await;
            drain.cancel();
            Instant::now()
        };
        let aged = std::future::pending();
        let ended = async {
            let ended = until(connection, &life, &limits, &counts, &drain, aged);
            ended.await.unwrap();
            Instant::now()
        };
        let (told, ended) = tokio::join!(told, ended);
        drop(client);
        ended - told
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_hear_the_goodbye_holds_up_a_drain_only_by_its_calls() {
        let idle = holds_up_the_drain(Duration::ZERO).await;
        assert!(idle < Duration::from_millis(1100), "{idle:?}");
        // Ten seconds of it were over, and its answer may be under way for five.
        let busy = holds_up_the_drain(Duration::from_secs(20)).await;
        let most = Duration::from_secs(17);
        assert!(busy >= Duration::from_secs(15) && busy < most, "{busy:?}");
    }
}
