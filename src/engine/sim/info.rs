//! What an engine says about itself. The keys are the real one's, with its
//! names and types; of `/server_info` and `/model_info` only those that a
//! client may ask for.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{driver::Snapshot, engine::Engine};

/// The version of the engine that the recordings are of.
const VERSION: &str = "0.5.23";
/// Bytes of KV of one token of Qwen3-8B.
const KV_BYTES: f64 = 147_456.0;

/// `/server_info`.
pub(super) fn server(engine: &Engine) -> Value {
    let mut all = arguments(engine);
    let states: Vec<Value> = (0..engine.ranks.len())
        // In the order of arrival, and without a rank: as it was recorded.
        .rev()
        .map(|rank| state(engine, rank))
        .collect();
    let config = &engine.config;
    let more = json!({
        "status": "ready",
        "max_total_num_tokens": config.kv_capacity(),
        "max_req_input_len": config.max_req_input_len(),
        "internal_states": states,
        "version": VERSION,
        // No two starts have the same: a sidecar tells a restart by it.
        "startup_time": { "tokenizer_e2e": engine.startup },
    });
    extend(&mut all, more);
    Value::Object(all)
}

fn extend(all: &mut Map<String, Value>, more: Value) {
    if let Value::Object(more) = more {
        all.extend(more);
    }
}

/// The command line as the engine understood it.
fn arguments(engine: &Engine) -> Map<String, Value> {
    let config = &engine.config;
    let mut all = Map::new();
    extend(
        &mut all,
        json!({
            "model_path": config.model,
            "tokenizer_path": config.model,
            "served_model_name": config.model,
            "skip_tokenizer_init": true,
            "dtype": "auto",
            "quantization": null,
            "kv_cache_dtype": "auto",
            "context_length": null,
            "revision": null,
            "max_running_requests": null,
            "max_queued_requests": config.max_queued_requests,
            "max_total_tokens": config.kv_capacity(),
            "chunked_prefill_size": config.chunked_prefill_size,
            "max_prefill_tokens": 16_384,
            "schedule_policy": "fcfs",
            "enable_priority_scheduling": config.priority_scheduling,
            "page_size": config.page_size,
            "radix_eviction_policy": "lru",
            "disable_radix_cache": false,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": config.ranks,
            "attn_dp_size": 1,
            "enable_dp_attention": false,
            "load_balance_method": "round_robin",
        }),
    );
    extend(
        &mut all,
        json!({
            "nnodes": 1,
            "node_rank": 0,
            "base_gpu_id": 0,
            "gpu_id_step": 1,
            "device": "cuda",
            "host": config.host.to_string(),
            "port": config.port,
            "weight_version": engine.version(),
            "enable_cache_report": true,
            "stream_interval": config.stream_interval,
            "incremental_streaming_output": config.incremental_streaming_output,
            "enable_metrics": false,
            "enable_lora": engine.adapters.lock().enabled().then_some(true),
            "disable_cuda_graph": !config.cuda_graphs,
            "disable_overlap_schedule": true,
            "enable_return_routed_experts": false,
            "enable_deterministic_inference": true,
            "speculative_algorithm": null,
            "random_seed": 0,
            "load_snapshot_publish_interval": 15,
        }),
    );
    all
}

fn state(engine: &Engine, rank: usize) -> Value {
    let config = &engine.config;
    let snapshot = snapshot(engine, rank);
    let mut all = arguments(engine);
    let capacity = config.kv_capacity();
    extend(
        &mut all,
        json!({
            "world_size": config.ranks,
            "effective_max_running_requests_per_dp": config.max_running_requests,
            "last_gen_throughput": snapshot.throughput,
            "memory_usage": {
                "weight": 16.4,
                "kvcache": gigabytes(capacity),
                "token_capacity": capacity,
                "token_capacity_swa": null,
            },
        }),
    );
    Value::Object(all)
}

fn gigabytes(tokens: usize) -> f64 {
    (tokens as f64 * KV_BYTES / 1e7).round() / 100.0
}

/// `/model_info`.
pub(super) fn model(engine: &Engine) -> Value {
    json!({
        "model_path": engine.config.model,
        "served_model_name": engine.config.model,
        "tokenizer_path": engine.config.model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": engine.version(),
        "load_format": "auto",
        "reasoning_parser": null,
        "tool_call_parser": null,
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        // Not the real one's: there it stands in the model's config.json, which a
        // simulated model has not.
        "vocab_size": engine.config.vocab_size,
    })
}

/// `/v1/models`.
pub(super) fn models(engine: &Engine) -> Value {
    let name = &engine.config.model;
    let created = whole_seconds(engine.clock.now());
    let mut data = vec![json!({
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": name,
        "parent": null,
        "max_model_len": engine.config.context_length,
    })];
    // Inferred: an adapter's card names its path and the model below it.
    data.extend(engine.adapters.lock().all().map(|(adapter, loaded)| {
        json!({
            "id": adapter,
            "object": "model",
            "created": created,
            "owned_by": "sglang",
            "root": loaded.path,
            "parent": name,
            "max_model_len": null,
        })
    }));
    json!({"object": "list", "data": data})
}

fn whole_seconds(at: f64) -> u64 {
    Duration::try_from_secs_f64(at)
        .unwrap_or_default()
        .as_secs()
}

/// Parts of `/v1/loads` that may be asked for. The real one has entries for
/// `lora` and `spec` too where those are in use.
const SECTIONS: [&str; 7] = ["core", "memory", "spec", "lora", "disagg", "queues", "all"];

/// `/v1/loads`. Unset: a part that there is not, which the real one answers
/// with 500.
pub(super) fn loads(engine: &Engine, rank: Option<u32>, include: Option<&str>) -> Option<Value> {
    let sections: Vec<&str> = include.unwrap_or("all").split(',').map(str::trim).collect();
    if sections.iter().any(|s| !SECTIONS.contains(s)) {
        return None;
    }
    let has = |section| sections.contains(&"all") || sections.contains(&section);
    let entries: Vec<Value> = (0..engine.ranks.len())
        .filter(|&at| rank.is_none_or(|rank| rank as usize == at))
        .map(|at| {
            let snapshot = snapshot(engine, at);
            let mut entry = core(engine, at, &snapshot);
            let capacity = engine.config.kv_capacity();
            if has("memory") {
                extend(
                    &mut entry,
                    json!({"memory": {
                        "weight_gb": 16.4,
                        "kv_cache_gb": gigabytes(capacity),
                        "graph_gb": 0.0,
                        "token_capacity": capacity,
                    }}),
                );
            }
            if has("disagg") {
                extend(
                    &mut entry,
                    json!({"disaggregation": {
                        "mode": "null",
                        "prefill_bootstrap_queue_reqs": 0,
                        "prefill_inflight_queue_reqs": 0,
                        "decode_prealloc_queue_reqs": 0,
                        "decode_transfer_queue_reqs": 0,
                        "decode_retracted_queue_reqs": 0,
                        "kv_transfer_speed_gb_s": 0.0,
                        "kv_transfer_latency_ms": 0.0,
                    }}),
                );
            }
            if has("queues") {
                extend(
                    &mut entry,
                    json!({"queues": {
                        "waiting": snapshot.load.waiting,
                        "grammar": 0,
                        "paused": 0,
                        "retracted": 0,
                        "prealloc_ready": 0,
                    }}),
                );
            }
            Value::Object(entry)
        })
        .collect();
    Some(json!({
        "timestamp": iso(engine.clock.now()),
        "version": VERSION,
        "accelerator": null,
        "num_accelerators": 1,
        "loads": entries,
    }))
}

/// A rank as it was last seen; an idle one as it is now.
fn snapshot(engine: &Engine, rank: usize) -> Snapshot {
    let mut snapshot = engine.ranks[rank].snapshot.lock().clone();
    if snapshot.fresh {
        snapshot.at = engine.clock.now();
    }
    snapshot
}

fn core(engine: &Engine, rank: usize, snapshot: &Snapshot) -> Map<String, Value> {
    let config = &engine.config;
    let load = &snapshot.load;
    let capacity = config.kv_capacity();
    let total = load.used + load.waiting_tokens;
    let share = load.used as f64 / capacity as f64;
    let mut entry = Map::new();
    extend(
        &mut entry,
        json!({
            "timestamp": snapshot.at,
            "dp_rank": rank,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_waiting_uncached_tokens": load.waiting_uncached,
            "num_used_tokens": load.used,
            "num_total_tokens": total,
            "num_active_tokens": total,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": capacity,
            "max_running_requests": config.max_running_requests,
            "token_usage": (share * 1e4).round() / 1e4,
            "gen_throughput": (snapshot.throughput * 100.0).round() / 100.0,
            "cache_hit_rate": (load.cache_hit_rate * 1e4).round() / 1e4,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": load.totals.prefilled,
            "total_prefill_busy_us": load.totals.prefill_us,
            "decode_moments": load.totals.decode_moments,
        }),
    );
    entry
}

/// Seconds since 1970 as `2026-11-29T19:55:15.775787+00:00`.
fn iso(at: f64) -> String {
    let at = Duration::try_from_secs_f64(at).unwrap_or_default();
    let (days, second) = (at.as_secs() / 86_400, at.as_secs() % 86_400);
    // Days since 0000-03-01 in eras of 400 years, so that leap days end years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = (shifted_month + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:06}+00:00",
        second / 3600,
        second / 60 % 60,
        second % 60,
        at.subsec_micros()
    )
}

#[cfg(test)]
mod tests {
    use super::iso;

    #[test]
    fn times_are_written_as_recorded() {
        // A recording's own two timestamps.
        assert_eq!(iso(1_795_982_519.25), "2026-11-29T20:01:59.250000+00:00");
        assert_eq!(iso(951_782_400.0), "2000-02-29T00:00:00.000000+00:00");
        assert_eq!(iso(0.0), "1970-01-01T00:00:00.000000+00:00");
    }
}
