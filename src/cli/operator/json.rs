//! The API's messages as JSON for machines: the names of the proto's fields in
//! snake case, enums by their lower-case names, lengths of time as numbers of
//! seconds (`*_seconds`), points in time as RFC 3339. Keys may be added.

use serde_json::{Value, json};

use super::{health, seconds};
use crate::proto;

pub(in crate::cli) fn replica(r: &proto::Replica) -> Value {
    let accelerator = r.accelerator.as_ref().map(|a| {
        json!({
            "name": a.name,
            "memory_bytes": a.memory_bytes,
            "count": a.count,
        })
    });
    let adapters: Vec<Value> = r
        .adapters
        .iter()
        .map(|a| json!({"name": a.name, "load_id": a.load_id, "resident": a.resident}))
        .collect();
    json!({
        "replica_id": r.replica_id,
        "incarnation": r.incarnation,
        "boot_id": r.boot_id,
        "health": health(r),
        "health_reason": r.health_reason,
        "endpoint": r.endpoint,
        "engine": engine(r),
        "engine_version": r.engine_version,
        "model": r.model,
        "context_length": r.context_length,
        "vocab_size": r.vocab_size,
        "page_size": r.page_size,
        "accelerator": accelerator,
        "capabilities": r.capabilities.as_ref().map(capabilities),
        "adapters": adapters,
        "labels": r.labels.iter().collect::<std::collections::BTreeMap<_, _>>(),
        "registered_at": r.registered_at.as_ref().map(ToString::to_string),
        "heartbeat_age_seconds": seconds(r.heartbeat_age.as_ref()),
        "drain": r.drain.as_ref().map(drain),
        "ranks": r.ranks.iter().map(rank).collect::<Vec<_>>(),
    })
}

pub(in crate::cli) fn engine(r: &proto::Replica) -> &'static str {
    match r.engine() {
        proto::EngineKind::Unspecified => "unknown",
        proto::EngineKind::Sglang => "sglang",
        proto::EngineKind::Vllm => "vllm",
    }
}

fn drain(d: &proto::Drain) -> Value {
    json!({
        "by_operator": d.by_operator,
        "by_sidecar": d.by_sidecar,
        "grace_left_seconds": seconds(d.grace_left.as_ref()),
        "hold": d.hold,
        "since": d.since.as_ref().map(ToString::to_string),
    })
}

fn capabilities(c: &proto::Capabilities) -> Value {
    json!({
        "tokenizer": c.tokenizer,
        "output_logprobs": c.output_logprobs,
        "prompt_logprobs": c.prompt_logprobs,
        "seed": c.seed,
        "routed_experts": c.routed_experts,
        "structured_output": c.structured_output,
        "priority": c.priority,
        "incremental_streaming": c.incremental_streaming,
        "max_top_logprobs": c.max_top_logprobs,
        "more_follow": c.more_follow,
    })
}

fn rank(r: &proto::FleetRank) -> Value {
    let reported = r.reported.as_ref().map(|s| {
        json!({
            "healthy": s.healthy,
            "running": s.running,
            "waiting": s.waiting,
            "waiting_uncached_tokens": s.waiting_uncached_tokens,
            "kv_used_tokens": s.kv_used_tokens,
            "weight_version": s.weight_version,
            "paused": s.paused,
        })
    });
    json!({
        "rank": r.rank,
        "routable": r.routable,
        "not_routable": r.not_routable,
        "weight_version": r.weight_version,
        "kv_capacity_tokens": r.kv_capacity_tokens,
        "live_pins": r.live_pins,
        "live_pin_tokens": r.live_pin_tokens,
        "in_flight": r.in_flight,
        "reported": reported,
        "affinity": affinity(r),
        "wrong_rank": r.wrong_rank,
        "cached_tokens_expected": r.cached_tokens_expected,
        "cached_tokens_found": r.cached_tokens_found,
        "recent_found_percent": r.recent_found_percent,
    })
}

/// Whether pins hold there.
pub(in crate::cli) fn affinity(r: &proto::FleetRank) -> &'static str {
    match r.affinity() {
        proto::RankAffinity::Unspecified => "unknown",
        proto::RankAffinity::Holds => "holds",
        proto::RankAffinity::IgnoresPins => "ignores_pins",
        proto::RankAffinity::LosesCache => "loses_cache",
    }
}

pub(in crate::cli) fn pin(p: &proto::Pin) -> Value {
    json!({
        "replica_id": p.replica_id,
        "incarnation": p.incarnation,
        "rank": p.rank,
        "tokens": p.tokens,
        "idle_seconds": seconds(p.idle.as_ref()),
        "live": p.live,
    })
}

pub(in crate::cli) fn stats(s: &proto::GetStatsResponse) -> Value {
    json!({
        "version": s.version,
        "uptime_seconds": seconds(s.uptime.as_ref()),
        "pins": s.pins,
        "in_flight": s.in_flight,
        "watchers": s.watchers,
        "counters": s.counters.iter().collect::<std::collections::BTreeMap<_, _>>(),
    })
}
