//! Every route of SGLang's but `/generate`: health, facts, load, aborts, pause,
//! weights; and what all engines have, their own `/sim`.

use std::{sync::Arc, sync::atomic::Ordering};

use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, Query, Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    config::Dialect,
    driver::Selector,
    engine::{End, Engine, PauseMode},
    faults::{Hang, Order},
    generate::{generate, json_reply},
    info,
};

type Shared = State<Arc<Engine>>;

/// The largest body that is read. Four times a prompt of a million ids.
const MOST_BODY: usize = 32 << 20;

pub(super) fn router(engine: Arc<Engine>) -> Router {
    let own = match engine.config.dialect {
        Dialect::Sglang => sglang(),
        Dialect::Vllm => super::vllm::routes(engine.config.dev_mode),
    };
    own.route("/sim/history", get(history))
        .route("/sim/faults", get(faults).post(set_faults))
        .route("/sim/terminate/{how}", post(terminate))
        .fallback(not_found)
        .layer(from_fn_with_state(Arc::clone(&engine), outermost))
        .layer(DefaultBodyLimit::max(MOST_BODY))
        .with_state(engine)
}

fn sglang() -> Router<Arc<Engine>> {
    Router::new()
        .route(
            "/generate",
            post(generate).merge(put(generate)).fallback(wrong_method),
        )
        .route("/abort_request", post(abort_request))
        .route("/health", get(health))
        .route("/health_generate", get(health))
        .route("/ready", get(ready))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/model_info", get(model_info))
        .route("/v1/models", get(models))
        .route("/v1/loads", get(loads))
        .route("/flush_cache", post(flush_cache))
        .route("/pause_generation", post(pause))
        .route("/continue_generation", post(resume))
        .route("/update_weight_version", post(update_weight_version))
        .route("/load_lora_adapter", post(load_adapter))
        .route("/unload_lora_adapter", post(unload_adapter))
}

/// Hangs where that is asked for, and signs the reply as the real server does.
async fn outermost(State(engine): Shared, request: Request, next: Next) -> Response {
    let own = request.uri().path().starts_with("/sim/");
    if !own && engine.faults.lock().hang == Some(Hang::All) {
        std::future::pending::<()>().await;
    }
    let mut response = next.run(request).await;
    response
        .headers_mut()
        .insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    response
}

async fn not_found() -> Response {
    json_reply(404, &json!({"detail": "Not Found"}))
}

async fn wrong_method() -> Response {
    let mut response = json_reply(405, &json!({"detail": "Method Not Allowed"}));
    response
        .headers_mut()
        .insert(header::ALLOW, HeaderValue::from_static("PUT, POST"));
    response
}

/// A reply without body, and without a type for it.
pub(super) fn bare(status: StatusCode) -> Response {
    text(status, "")
}

fn text(status: StatusCode, body: &'static str) -> Response {
    let mut response = (status, body).into_response();
    response.headers_mut().remove(header::CONTENT_TYPE);
    response
}

async fn health(State(engine): Shared) -> Response {
    bare(if engine.healthy().await {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    })
}

async fn ready(State(engine): Shared) -> Response {
    let refuses = *engine.paused.borrow() || engine.draining.load(Ordering::SeqCst);
    bare(if refuses {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    })
}

async fn server_info(State(engine): Shared) -> Response {
    json_reply(200, &info::server(&engine))
}

async fn model_info(State(engine): Shared) -> Response {
    json_reply(200, &info::model(&engine))
}

async fn models(State(engine): Shared) -> Response {
    json_reply(200, &info::models(&engine))
}

#[derive(Deserialize)]
struct LoadsQuery {
    dp_rank: Option<u32>,
    include: Option<String>,
}

async fn loads(State(engine): Shared, query: Query<LoadsQuery>) -> Response {
    match info::loads(&engine, query.dp_rank, query.include.as_deref()) {
        Some(loads) => json_reply(200, &loads),
        None => {
            let mut response =
                (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error").into_response();
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("text/plain; charset=utf-8"),
            );
            response
        }
    }
}

/// What cannot be read as `T` is refused; an empty body is an empty object.
fn read<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, Box<Response>> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| {
        let body = json!({
            "object": "error",
            "message": format!("1 validation error:\n  {error}"),
            "type": "Bad Request",
            "param": null,
            "code": 400,
        });
        Box::new(json_reply(400, &body))
    })
}

#[derive(Deserialize)]
struct AbortBody {
    #[serde(default)]
    rid: Option<String>,
    #[serde(default)]
    abort_all: bool,
}

async fn abort_request(State(engine): Shared, body: Bytes) -> Response {
    let abort: AbortBody = match read(&body) {
        Ok(abort) => abort,
        Err(response) => return *response,
    };
    let selector = match abort.rid {
        _ if abort.abort_all => Selector::All,
        // Inferred: every id begins with an empty one.
        rid => Selector::Prefix(rid.unwrap_or_default().into()),
    };
    engine.abort_by_request(&selector);
    bare(StatusCode::OK)
}

async fn flush_cache(State(engine): Shared) -> Response {
    if engine.flush().await {
        text(
            StatusCode::OK,
            "Cache flushed.\nPlease check backend logs for more details. (When there are running \
             or waiting requests, the operation will not be performed.)\n",
        )
    } else {
        text(StatusCode::BAD_REQUEST, "Flush cache failed.\n")
    }
}

#[derive(Deserialize)]
struct PauseBody {
    #[serde(default = "PauseBody::usual")]
    mode: PauseMode,
}

impl PauseBody {
    fn usual() -> PauseMode {
        PauseMode::Abort
    }
}

async fn pause(State(engine): Shared, body: Bytes) -> Response {
    let pause: PauseBody = match read(&body) {
        Ok(pause) => pause,
        Err(response) => return *response,
    };
    engine.pause(pause.mode).await;
    json_reply(
        200,
        &json!({"message": "Generation paused successfully.", "status": "ok"}),
    )
}

async fn resume(State(engine): Shared) -> Response {
    engine.resume();
    json_reply(
        200,
        &json!({"message": "Generation continued successfully.", "status": "ok"}),
    )
}

#[derive(Deserialize)]
struct VersionBody {
    new_version: String,
    #[serde(default = "VersionBody::usual")]
    abort_all_requests: bool,
}

impl VersionBody {
    fn usual() -> bool {
        true
    }
}

async fn update_weight_version(State(engine): Shared, body: Bytes) -> Response {
    let update: VersionBody = match read(&body) {
        Ok(update) => update,
        Err(response) => return *response,
    };
    engine.set_version(&update.new_version, update.abort_all_requests);
    json_reply(
        200,
        &json!({
            "success": true,
            "message": format!("Weight version updated to {}", update.new_version),
            "new_version": update.new_version,
        }),
    )
}

#[derive(Deserialize)]
struct AdapterBody {
    lora_name: String,
    #[serde(default)]
    lora_path: String,
}

/// Inferred: how it went, and what is loaded now.
fn adapters_now(engine: &Engine, done: &Result<(), String>) -> Response {
    let adapters = engine.adapters.lock();
    let loaded: serde_json::Map<String, Value> = adapters
        .all()
        .map(|(name, loaded)| (name.clone(), json!(loaded.path)))
        .collect();
    let status = if done.is_ok() { 200 } else { 400 };
    json_reply(
        status,
        &json!({
            "success": done.is_ok(),
            "error_message": done.as_ref().err().cloned().unwrap_or_default(),
            "loaded_adapters": loaded,
        }),
    )
}

async fn load_adapter(State(engine): Shared, body: Bytes) -> Response {
    let asked: AdapterBody = match read(&body) {
        Ok(asked) => asked,
        Err(response) => return *response,
    };
    let done = engine
        .adapters
        .lock()
        .load(&asked.lora_name, &asked.lora_path);
    adapters_now(&engine, &done)
}

async fn unload_adapter(State(engine): Shared, body: Bytes) -> Response {
    let asked: AdapterBody = match read(&body) {
        Ok(asked) => asked,
        Err(response) => return *response,
    };
    let done = engine.adapters.lock().unload(&asked.lora_name);
    adapters_now(&engine, &done)
}

async fn history(State(engine): Shared) -> Response {
    let (records, counters) = {
        let history = engine.history.lock();
        (history.records(), history.counters)
    };
    let entries: Vec<Value> = records.iter().map(|r| r.json(&engine.clock)).collect();
    json_reply(200, &json!({"counters": counters, "entries": entries}))
}

async fn faults(State(engine): Shared) -> Response {
    let faults = engine.faults.lock().clone();
    json_reply(200, &json!(faults))
}

async fn set_faults(State(engine): Shared, body: Bytes) -> Response {
    let order: Order = match read(&body) {
        Ok(order) => order,
        Err(response) => return *response,
    };
    engine.set_faults(order.faults());
    if order.abort_all {
        engine.abort(&Selector::All);
    }
    if order.die {
        engine.end(End::Died);
    }
    json_reply(200, &json!(order.faults()))
}

/// `drain`: what a SIGTERM does. `now`: what a SIGKILL does.
async fn terminate(State(engine): Shared, Path(how): Path<String>) -> Response {
    match how.as_str() {
        "drain" => engine.terminate(),
        "now" => engine.end(End::Stopped),
        _ => return not_found().await,
    }
    bare(StatusCode::OK)
}
