//! `/metrics`, as far as a client may look at it. A real server has some hundred
//! more.

use std::{fmt::Write as _, sync::Arc};

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use crate::engine::sim::engine::Engine;

pub(super) async fn metrics(State(engine): State<Arc<Engine>>) -> Response {
    (
        [(
            header::CONTENT_TYPE,
            "text/plain; version=1.0.0; charset=utf-8",
        )],
        text(&engine),
    )
        .into_response()
}

fn text(engine: &Engine) -> String {
    let mut text = String::new();
    let model = &engine.config.model;
    let loads: Vec<_> = engine
        .ranks
        .iter()
        .map(|link| link.snapshot.lock().load.clone())
        .collect();
    let mut gauge = |name: &str, help: &str, of: &dyn Fn(usize) -> f64| {
        let _ = writeln!(text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} gauge");
        for rank in 0..loads.len() {
            let _ = writeln!(
                text,
                "vllm:{name}{{engine=\"{rank}\",model_name=\"{model}\"}} {:?}",
                of(rank)
            );
        }
    };
    let capacity = engine.config.kv_capacity();
    gauge(
        "num_requests_running",
        "Number of requests in model execution batches.",
        &|rank| loads[rank].running as f64,
    );
    gauge(
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        &|rank| loads[rank].waiting as f64,
    );
    gauge(
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        &|rank| (loads[rank].used as f64 / capacity as f64).min(1.0),
    );
    text.push_str(
        "# HELP vllm:engine_sleep_state Engine sleep state.\n# TYPE vllm:engine_sleep_state gauge\n",
    );
    for rank in 0..loads.len() {
        let _ = writeln!(
            text,
            "vllm:engine_sleep_state{{engine=\"{rank}\",model_name=\"{model}\",sleep_state=\"awake\"}} \
             1.0"
        );
    }
    text.push_str(
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE \
         vllm:cache_config_info gauge\n",
    );
    let block = engine.config.page_size;
    // The blocks of all engines, the tokens of one.
    let blocks = capacity / block * loads.len();
    for rank in 0..loads.len() {
        let _ = writeln!(
            text,
            "vllm:cache_config_info{{block_size=\"{block}\",enable_prefix_caching=\"True\",\
             engine=\"{rank}\",kv_cache_size_tokens=\"{capacity}\",num_gpu_blocks=\"{blocks}\"}} 1.0"
        );
    }
    text
}
