//! Listener and connections: what makes an engine refuse, fall silent or die
//! in mid-sentence.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{Router, body::Body, response::Response};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{
    config::SimConfig,
    control,
    driver::{Selector, parking::Mutex},
    engine::{End, Engine, PauseMode},
    faults::Faults,
    history::{Counters, Record},
};

/// Connections at once; more are closed as they come.
const MOST_CONNECTIONS: usize = 65_536;

/// The connection that a request came on.
#[derive(Clone, Debug)]
pub(super) struct Connection(CancellationToken);

impl Connection {
    /// Closes it without another byte.
    pub(super) async fn cut(&self, engine: &Engine) -> Response {
        engine.history.lock().counters.cut += 1;
        self.0.cancel();
        std::future::pending().await
    }
}

/// A running simulated engine. Clones are the same one; it ends by
/// [`SimHandle::stop`], [`SimHandle::kill`], its own crash or with the runtime,
/// and not when handles are dropped.
#[derive(Clone, Debug)]
pub struct SimHandle {
    engine: Arc<Engine>,
    address: SocketAddr,
    /// The port, kept after the engine's end so that nobody else takes it: to a
    /// client it refuses.
    held: Arc<Mutex<Option<TcpSocket>>>,
}

/// A simulated engine.
#[derive(Debug)]
pub struct SimEngine;

impl SimEngine {
    /// Listens and serves on the current runtime.
    ///
    /// # Errors
    /// A configuration that cannot be, or an address that cannot be bound.
    pub async fn start(config: SimConfig) -> io::Result<SimHandle> {
        config
            .check()
            .map_err(|fault| io::Error::new(io::ErrorKind::InvalidInput, fault))?;
        let listener = TcpListener::bind((config.host, config.port)).await?;
        let address = listener.local_addr()?;
        let engine = Engine::start(SimConfig {
            port: address.port(),
            ..config
        });
        let held = Arc::new(Mutex::new(None));
        let router = control::router(Arc::clone(&engine));
        engine.tasks.spawn(accept(
            Arc::clone(&engine),
            listener,
            address,
            router,
            Arc::clone(&held),
        ));
        engine.tasks.close();
        Ok(SimHandle {
            engine,
            address,
            held,
        })
    }
}

async fn accept(
    engine: Arc<Engine>,
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    held: Arc<Mutex<Option<TcpSocket>>>,
) {
    let mut refuse = engine.refuse.subscribe();
    let mut listener = Some(listener);
    // Those who are told to finish what they have and close.
    let mut leave = CancellationToken::new();
    loop {
        let refusing = *refuse.borrow_and_update();
        match (&listener, refusing) {
            (Some(_), true) => {
                listener = None;
                *held.lock() = hold(address);
                leave.cancel();
                leave = CancellationToken::new();
            }
            (None, false) => {
                held.lock().take();
                match TcpListener::bind(address).await {
                    Ok(bound) => listener = Some(bound),
                    Err(error) => {
                        tracing::warn!(%address, %error, "cannot listen again");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        continue;
                    }
                }
            }
            _ => {}
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = engine.root.cancelled() => break,
            changed = refuse.changed() => if changed.is_err() { break },
            accepted = accepted => match accepted {
                Ok((stream, _)) if engine.tasks.len() < MOST_CONNECTIONS => {
                    let serving = serve(stream, router.clone(), engine.root.child_token(), leave.clone());
                    engine.tasks.spawn(serving);
                }
                Ok(_) => {}
                // Out of descriptors, most likely: they come back.
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            },
        }
    }
    drop(listener);
    let mut held = held.lock();
    if held.is_none() {
        *held = hold(address);
    }
    drop(held);
    engine.history.lock().died();
}

/// Keeps a port without listening on it.
fn hold(address: SocketAddr) -> Option<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }
    .ok()?;
    socket.set_reuseaddr(true).ok()?;
    socket.bind(address).ok()?;
    Some(socket)
}

async fn serve(
    stream: TcpStream,
    router: Router,
    cut: CancellationToken,
    leave: CancellationToken,
) {
    // Small frames leave at once.
    let _ = stream.set_nodelay(true);
    let connection = Connection(cut.clone());
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(connection.clone());
        router.clone().oneshot(request.map(Body::new))
    });
    let serving =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    tokio::select! {
        _ = serving.as_mut() => return,
        () = cut.cancelled() => return,
        () = leave.cancelled() => serving.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = serving => {}
        () = cut.cancelled() => {}
    }
}

impl SimHandle {
    /// Its base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where it listens, or listened.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// As it was started, with the port that it got.
    pub fn config(&self) -> &SimConfig {
        &self.engine.config
    }

    /// Cuts every connection and closes the port. When this returns, connects
    /// are refused and nothing of it runs.
    pub async fn kill(&self) {
        self.engine.end(End::Died);
        self.engine.tasks.wait().await;
    }

    /// The same on purpose.
    pub async fn stop(&self) {
        self.engine.end(End::Stopped);
        self.engine.tasks.wait().await;
    }

    /// What a SIGTERM does: health and readiness are refused, running and new
    /// work is served, and it ends 2 s (scaled) after the last call.
    pub fn terminate(&self) {
        self.engine.terminate();
    }

    /// Waits for its end.
    pub async fn ended(&self) -> End {
        self.engine.root.cancelled().await;
        self.engine.tasks.wait().await;
        self.engine.ended()
    }

    /// Whether it still is.
    pub fn is_alive(&self) -> bool {
        !self.engine.root.is_cancelled()
    }

    /// Ends it, if it has not ended, and starts a new one at the same address,
    /// with an empty cache and an empty history.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub async fn restart(&self) -> io::Result<Self> {
        self.stop().await;
        self.held.lock().take();
        SimEngine::start(self.engine.config.clone()).await
    }

    /// The faults in force; counted ones with what is left of them.
    pub fn faults(&self) -> Faults {
        self.engine.faults.lock().clone()
    }

    /// Puts these faults in force, in place of those before.
    pub fn set_faults(&self, faults: Faults) {
        self.engine.set_faults(faults);
    }

    /// No faults, but for dead ranks, which stay dead.
    pub fn clear_faults(&self) {
        self.engine.set_faults(Faults::default());
    }

    /// Aborts everything that runs or waits.
    pub fn abort_all(&self) {
        self.engine.abort(&Selector::All);
    }

    /// New weights; `abort_all` ends what runs, as the route does by default.
    pub fn set_weight_version(&self, version: &str, abort_all: bool) {
        self.engine.set_version(version, abort_all);
    }

    /// Loads an adapter, as `/load_lora_adapter` does; one of that name goes first.
    pub fn load_adapter(&self, name: &str, path: &str) {
        let _ = self.engine.adapters.lock().load_in_place(name, path);
    }

    /// Unloads an adapter, if it is loaded.
    pub fn unload_adapter(&self, name: &str) {
        let _ = self.engine.adapters.lock().unload(name);
    }

    /// Empties the caches of all ranks, as an operator might behind everybody's
    /// back; `false` where one could not be, because requests run there.
    pub async fn flush(&self) -> bool {
        self.engine.flush().await
    }

    /// Pauses generation.
    pub async fn pause(&self, mode: PauseMode) {
        self.engine.pause(mode).await;
    }

    /// Goes on.
    pub fn resume(&self) {
        self.engine.resume();
    }

    /// Whether a message to a dead rank has hung it.
    pub fn is_wedged(&self) -> bool {
        self.engine.wedged.load(Ordering::SeqCst)
    }

    /// The requests that it saw, oldest first, as far back as its ring goes.
    pub fn history(&self) -> Vec<Record> {
        self.engine.history.lock().records()
    }

    /// Totals since the start.
    pub fn counters(&self) -> Counters {
        self.engine.history.lock().counters
    }
}
