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

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::{IntoResponse, Response},
    routing::get,
};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{self, Gate},
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

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, gate: Arc<Gate>, page: Page, stop: CancellationToken) {
    let app = Router::new()
        .route("/livez", get(alive))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(page)
        .layer(middleware::from_fn_with_state(gate, auth::admin::guard));
    let served =
        axum::serve(listener, app).with_graceful_shutdown(async move { stop.cancelled().await });
    if let Err(error) = served.await {
        tracing::error!(%error, "the admin listener failed");
    }
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
