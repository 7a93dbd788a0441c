//! The admin listener: plain HTTP for probes.

use axum::{Router, extract::State, http::StatusCode, routing::get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves until `stop`; not ready from `drain` on.
pub async fn serve(listener: TcpListener, drain: CancellationToken, stop: CancellationToken) {
    let app = Router::new()
        .route("/livez", get(async || StatusCode::OK))
        .route("/readyz", get(ready))
        .with_state(drain);
    let served =
        axum::serve(listener, app).with_graceful_shutdown(async move { stop.cancelled().await });
    if let Err(error) = served.await {
        tracing::error!(%error, "the admin listener failed");
    }
}

async fn ready(State(drain): State<CancellationToken>) -> (StatusCode, &'static str) {
    if drain.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}
