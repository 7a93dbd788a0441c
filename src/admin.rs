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

use std::{convert::Infallible, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use futures_util::stream;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
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
    /// Free to be made and sent.
    pages: Arc<Semaphore>,
}

/// Pages of metrics that are made and sent at once: of a large fleet each is some
/// megabytes, until it is taken.
const PAGES: usize = 4;
/// Within so long a page is taken, or its connection is cut.
const TAKEN_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of a page that are handed to a connection at once.
const PIECE: usize = 64 << 10;

impl Page {
    /// Not ready from `drain` on.
    pub fn new(registry: Registry, store: Arc<dyn Store>, drain: CancellationToken) -> Self {
        Self {
            registry: Arc::new(registry),
            store,
            drain,
            pages: Arc::new(Semaphore::new(PAGES)),
        }
    }
}

/// Ends the connection of a request.
#[derive(Clone)]
struct Cut(CancellationToken);

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
    let cut = CancellationToken::new();
    let to_cut = cut.clone();
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        request.extensions_mut().insert(Cut(to_cut.clone()));
        app.clone().oneshot(request.map(axum::body::Body::new))
    });
    let most = usize::try_from(limits.header_bytes).unwrap_or(usize::MAX);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.first_request)
        .max_buf_size(most.max(LEAST_BUFFER))
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    tokio::select! {
        ended = timeout(AGE, connection.as_mut()) => if let Ok(ended) = ended {
            return ended;
        },
        () = cut.cancelled() => return Ok(()),
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

async fn metrics(
    State(page): State<Page>,
    cut: Option<Extension<Cut>>,
    headers: HeaderMap,
) -> Response {
    let Ok(place) = Arc::clone(&page.pages).try_acquire_owned() else {
        let why = format!("{PAGES} pages of metrics are being sent: ask again\n");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok());
    let Ok((kind, text)) = text::page(&page.registry, accept) else {
        tracing::error!("the metrics cannot be written");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let taken = CancellationToken::new();
    let until = taken.clone();
    tokio::spawn(async move {
        if timeout(TAKEN_WITHIN, until.cancelled()).await.is_err()
            && let Some(Extension(Cut(cut))) = cut
        {
            cut.cancel();
        }
    });
    let length = text.len();
    // Both are given back when the last piece is taken, or the connection is gone.
    let left = (Bytes::from(text), place, taken.drop_guard());
    let pieces = stream::unfold(left, |(mut left, place, taken)| async move {
        if left.is_empty() {
            return None;
        }
        let piece = left.split_to(left.len().min(PIECE));
        Some((Ok::<_, Infallible>(piece), (left, place, taken)))
    });
    let head = [
        (header::CONTENT_TYPE, kind.to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
    ];
    (head, axum::body::Body::from_stream(pieces)).into_response()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use prometheus_client::metrics::{counter::Counter, family::Family};

    use super::*;
    use crate::store::memory::MemoryStore;

    fn page() -> Page {
        let mut registry = Registry::default();
        let family = Family::<Vec<(String, String)>, Counter>::default();
        for n in 0..20_000 {
            let label = vec![("n".to_owned(), n.to_string())];
            family.get_or_create(&label).inc();
        }
        registry.register("some", "Many", family);
        let store = Arc::new(MemoryStore::default());
        Page::new(registry, store, CancellationToken::new())
    }

    async fn ask(page: &Page, cut: &CancellationToken) -> Response {
        let cut = Some(Extension(Cut(cut.clone())));
        metrics(State(page.clone()), cut, HeaderMap::new()).await
    }

    #[tokio::test(start_paused = true)]
    async fn pages_that_nobody_takes_are_few_and_are_cut() {
        let page = page();
        let cuts: Vec<CancellationToken> = (0..=PAGES).map(|_| CancellationToken::new()).collect();
        let mut asked = Vec::new();
        for cut in &cuts {
            asked.push(ask(&page, cut).await);
        }
        let refused = asked.pop().unwrap();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        // One that is taken gives its place to the next.
        let taken = asked.remove(0);
        let length = taken.headers()[header::CONTENT_LENGTH].clone();
        let text = taken.into_body().collect().await.unwrap().to_bytes();
        assert!(text.len() > 2 * PIECE, "{}", text.len());
        assert_eq!(length, text.len().to_string());
        assert!(text.ends_with(b"\n"));
        let next = ask(&page, &cuts[PAGES]).await;
        assert_eq!(next.status(), StatusCode::OK);
        drop(next);
        tokio::time::sleep(TAKEN_WITHIN + Duration::from_secs(1)).await;
        let cut: Vec<bool> = cuts.iter().map(CancellationToken::is_cancelled).collect();
        assert_eq!(cut, [false, true, true, true, false]);
    }
}
