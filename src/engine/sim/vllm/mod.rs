//! vLLM's HTTP in front of the same ranks, as the recordings of 0.32 show it.
//!
//! What its front does otherwise than SGLang's: a connection that is closed aborts
//! at once, whatever the reply was to be; ids may be live twice; aborts match whole
//! ids; a prompt with `max_tokens` beyond the context is cut down in silence; when
//! its engine dies it says so and ends. An adapter is asked for as the model, and its
//! KV is found by its name: what another load of that name made is found as well.

mod adapters;
mod control;
mod generate;
mod metrics;
mod reply;
mod request;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post},
};

use super::engine::Engine;

/// The version that the recordings are of.
const VERSION: &str = "0.32.0";

/// All routes; those of development mode where it is on.
pub(super) fn routes(dev_mode: bool) -> Router<Arc<Engine>> {
    let routes = Router::new()
        .route("/inference/v1/generate", post(generate::generate))
        .route("/health", get(control::health))
        .route("/ping", get(control::health))
        .route("/version", get(control::version))
        .route("/load", get(control::load))
        .route("/v1/models", get(control::models))
        .route("/v1/load_lora_adapter", post(adapters::load))
        .route("/v1/unload_lora_adapter", post(adapters::unload))
        .route("/metrics", get(metrics::metrics));
    if !dev_mode {
        return routes;
    }
    routes
        .route("/server_info", get(control::server_info))
        .route("/weight_info", get(control::weight_info))
        .route("/get_world_size", get(control::world_size))
        .route("/is_paused", get(control::is_paused))
        .route("/pause", post(control::pause))
        .route("/resume", post(control::resume))
        .route("/reset_prefix_cache", post(control::reset_prefix_cache))
        .route(
            "/update_weight_version",
            post(control::update_weight_version),
        )
        .route("/abort_requests", post(control::abort_requests))
}
