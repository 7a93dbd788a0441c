//! The admin listener: plain HTTP for probes and for Prometheus.
//!
//! | path | answers |
//! |---|---|
//! | `/livez`, `/healthz` | 200 as long as the process serves: what else is wrong, a restart would not mend |
//! | `/readyz` | 200 while new calls are welcome; 503 from the drain on, and while the store does not work |
//! | `/metrics` | what [`telemetry`](crate::telemetry) counts |
//!
//! Ready does not depend on replicas: they register through the same port, and
//! could not if none but ready servers were sent calls.

use std::{net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::debug;

use crate::{
    auth::{self, Gate},
    listen::{
        Acceptor, Peer,
        limits::{AdminLimits, Counts, Limit, Port},
    },
    store::Store,
    telemetry::text,
};

/// What the listener tells of.
#[derive(Clone)]
pub struct Page {
    registry: Arc<Registry>,
    store: Arc<dyn Store>,
    drain: CancellationToken,
}

impl Page {
    /// Not ready from `drain` on.
    pub fn new(registry: Registry, store: Arc<dyn Store>, drain: CancellationToken) -> Self {
        Self {
            registry: Arc::new(registry),
            store,
            drain,
        }
    }
}

/// A connection is made anew after so long, so none that is not read from, or never
/// ends its requests, stays.
const AGE: Duration = Duration::from_secs(600);
/// A connection that was told to end is cut after so long.
const CLOSING: Duration = Duration::from_secs(5);
/// What hyper wants for its buffer at least.
const LEAST_BUFFER: usize = 8 << 10;

/// Serves until `stop`, which cuts what is open: nothing here is worth a wait.
pub async fn serve(
    listener: TcpListener,
    gate: Arc<Gate>,
    page: Page,
    limits: AdminLimits,
    counts: Arc<Counts>,
    stop: CancellationToken,
) {
    let app = Router::new()
        .route("/livez", get(alive))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(page)
        .layer(middleware::from_fn_with_state(gate, auth::admin::guard));
    let mut acceptor = Acceptor::new(
        listener,
        Port::Admin,
        limits.connections,
        Arc::clone(&counts),
    );
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer, place) = tokio::select! {
            () = stop.cancelled() => return,
            Some(_) = connections.join_next() => continue,
            accepted = acceptor.next(REFUSAL) => accepted,
        };
        let (app, counts) = (app.clone(), Arc::clone(&counts));
        connections.spawn(async move {
            let _place = place;
            if let Err(error) = connection(stream, peer, app, limits).await {
                if error.is_timeout() {
                    counts.limits(Port::Admin, Limit::FirstRequest);
                }
                debug!(%peer, %error, "admin connection ended");
            }
        });
    }
}

/// What a connection without a place is told.
const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\
    content-length: 21\r\n\r\ntoo many connections\n";

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    app: Router,
    limits: AdminLimits,
) -> Result<(), hyper::Error> {
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        app.clone().oneshot(request.map(axum::body::Body::new))
    });
    let most = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.first_request)
        .max_buf_size(most.max(LEAST_BUFFER))
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    if let Ok(ended) = timeout(AGE, connection.as_mut()).await {
        return ended;
    }
    connection.as_mut().graceful_shutdown();
    timeout(CLOSING, connection).await.unwrap_or(Ok(()))
}

async fn alive() -> &'static str {
    "alive\n"
}

async fn ready(State(page): State<Page>) -> (StatusCode, &'static str) {
    let store_is_down = || {
        let account = page.store.account();
        account.is_some_and(|account| account.stats.down.is_some())
    };
    if page.drain.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    } else if store_is_down() {
        (StatusCode::SERVICE_UNAVAILABLE, "the store is down\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

async fn metrics(State(page): State<Page>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok());
    match text::page(&page.registry, accept) {
        Ok((kind, text)) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        Err(_) => {
            tracing::error!("the metrics cannot be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
