//! Every route but that which generates.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Bytes,
    extract::{Query, State},
    http::StatusCode,
    response::Response,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{VERSION, generate::PREFIX, request::Fault};
use crate::engine::sim::{
    control::bare, driver::Selector, engine::Engine, engine::PauseMode, generate::json_reply,
};

type Shared = State<Arc<Engine>>;

/// Between looks whether all is done.
const POLL: Duration = Duration::from_millis(5);

/// Whether the engine lives. It generates nothing and is not held up by a pause.
pub(super) async fn health(State(engine): Shared) -> Response {
    bare(if *engine.errored.borrow() {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    })
}

pub(super) async fn version() -> Response {
    json_reply(200, &json!({ "version": VERSION }))
}

/// It counts only where it was told to track.
pub(super) async fn load() -> Response {
    json_reply(200, &json!({ "server_load": 0 }))
}

pub(super) async fn models(State(engine): Shared) -> Response {
    let name = &engine.config.model;
    let created = Duration::try_from_secs_f64(engine.clock.now())
        .unwrap_or_default()
        .as_secs();
    let card = |id: &str, root: &str, parent: Option<&str>, length: Option<u32>| {
        json!({
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": length,
            "permission": [{
                "id": "modelperm-0",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": false,
                "allow_sampling": true,
                "allow_logprobs": true,
                "allow_search_indices": false,
                "allow_view": true,
                "allow_fine_tuning": false,
                "organization": "*",
                "group": null,
                "is_blocking": false,
            }],
        })
    };
    let mut data = vec![card(name, name, None, Some(engine.config.context_length))];
    // Inferred: an adapter's card names its path and the model below it.
    let adapters = engine.adapters.lock();
    data.extend(
        adapters
            .all()
            .map(|(adapter, loaded)| card(adapter, &loaded.path, Some(name), None)),
    );
    drop(adapters);
    json_reply(200, &json!({ "object": "list", "data": data }))
}

/// Of all that the real one tells, what a client may ask for.
pub(super) async fn server_info(State(engine): Shared) -> Response {
    let config = &engine.config;
    let first = || tokio::time::sleep(config.info_delay);
    engine.told.get_or_init(first).await;
    let policy = if config.priority_scheduling {
        "priority"
    } else {
        "fcfs"
    };
    let tokens = config.kv_capacity();
    json_reply(
        200,
        &json!({"vllm_config": {
            "model_config": {
                "model": config.model,
                "seed": 0,
                "max_model_len": config.context_length,
                "max_logprobs": 20,
                // Scored and generated tokens have the same here, whatever the
                // temperature.
                "logprobs_mode": "raw_logprobs",
                "skip_tokenizer_init": true,
                "served_model_name": config.model,
                "enable_sleep_mode": false,
            },
            "cache_config": {
                "block_size": config.page_size,
                "enable_prefix_caching": true,
                "num_gpu_blocks": tokens / config.page_size * engine.ranks.len(),
                "kv_cache_size_tokens": tokens,
            },
            "parallel_config": {
                "pipeline_parallel_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_size": config.ranks,
                "data_parallel_size_local": config.ranks,
                "data_parallel_rank": 0,
                "data_parallel_external_lb": false,
                "data_parallel_hybrid_lb": false,
                "world_size": 1,
                "rank": 0,
                "_api_process_count": 1,
                "_api_process_rank": 0,
            },
            "scheduler_config": {
                "max_num_batched_tokens": config.chunked_prefill_size,
                "max_num_seqs": config.max_running_requests,
                "max_num_queued_reqs": config.max_queued_requests,
                "enable_chunked_prefill": true,
                "policy": policy,
                "stream_interval": config.stream_interval,
            },
            "aux_output_config": { "enable_return_routed_experts": false },
            // Inferred, where adapters are taken.
            "lora_config": engine.adapters.lock().enabled().then(|| {
                json!({ "max_lora_rank": 16, "max_loras": 1, "lora_dtype": "auto" })
            }),
            // A number of its own for each start.
            "instance_id": engine.startup.to_bits().to_string(),
            "shutdown_timeout": 0,
        }}),
    )
}

pub(super) async fn weight_info(State(engine): Shared) -> Response {
    json_reply(200, &json!({ "weight_version": &*engine.version() }))
}

pub(super) async fn world_size(State(engine): Shared) -> Response {
    json_reply(200, &json!({ "world_size": engine.config.ranks }))
}

pub(super) async fn is_paused(State(engine): Shared) -> Response {
    json_reply(200, &json!({ "is_paused": *engine.paused.borrow() }))
}

#[derive(Deserialize)]
pub(super) struct PauseQuery {
    mode: Option<String>,
}

pub(super) async fn pause(State(engine): Shared, query: Query<PauseQuery>) -> Response {
    match query.mode.as_deref().unwrap_or("abort") {
        "keep" => engine.pause(PauseMode::InPlace).await,
        "abort" => {
            engine.paused.send_replace(true);
            engine.abort(&Selector::All);
            drained(&engine).await;
        }
        "wait" => {
            engine.paused.send_replace(true);
            drained(&engine).await;
        }
        other => {
            return Fault::validation(
                "query.mode",
                &format!(
                    "{{'type': 'literal_error', 'loc': 'query.mode', 'msg': \"Input should be \
                     'abort', 'wait' or 'keep'\", 'input': '{other}', 'ctx': {{'expected': \
                     \"'abort', 'wait' or 'keep'\"}}}}"
                ),
            )
            .reply();
        }
    }
    json_reply(200, &json!({ "status": "paused" }))
}

/// Waits until nothing runs, then empties the caches: new weights may come.
async fn drained(engine: &Arc<Engine>) {
    while engine.runs() {
        tokio::time::sleep(POLL).await;
    }
    engine.flush().await;
}

pub(super) async fn resume(State(engine): Shared) -> Response {
    engine.resume();
    json_reply(200, &json!({ "status": "resumed" }))
}

pub(super) async fn reset_prefix_cache(State(engine): Shared) -> Response {
    let success = engine.flush().await;
    json_reply(200, &json!({ "success": success }))
}

#[derive(Deserialize)]
struct VersionBody {
    new_version: String,
}

/// What runs goes on, with another version from here on.
pub(super) async fn update_weight_version(State(engine): Shared, body: Bytes) -> Response {
    match serde_json::from_slice::<VersionBody>(&body) {
        Ok(update) => {
            engine.set_version(&update.new_version, false);
            json_reply(
                200,
                &json!({ "success": true, "new_version": update.new_version }),
            )
        }
        Err(error) => Fault::validation("body", &error.to_string()).reply(),
    }
}

#[derive(Deserialize)]
struct AbortBody {
    #[serde(default)]
    request_ids: Vec<String>,
}

/// Whole ids, as replies name them. It is answered the same way whether or not
/// there is such a request. Without ids: all.
pub(super) async fn abort_requests(State(engine): Shared, body: Bytes) -> Response {
    let Ok(abort) = serde_json::from_slice::<AbortBody>(&body) else {
        return json_reply(400, &json!({ "detail": "Invalid JSON format" }));
    };
    let aborted = abort.request_ids.len();
    let selector = if abort.request_ids.is_empty() {
        Selector::All
    } else {
        // What does not begin as every id does is nobody's.
        let ids = abort.request_ids.into_iter();
        Selector::Exact(
            ids.filter(|id| id.starts_with(PREFIX))
                .map(Arc::from)
                .collect(),
        )
    };
    engine.abort_by_request(&selector);
    let answer: Value = json!({ "status": "aborted", "aborted": aborted });
    json_reply(200, &answer)
}
