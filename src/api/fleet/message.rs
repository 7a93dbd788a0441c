//! A replica as a message.

use crate::{
    api::write,
    fleet::{
        Health, RankStatus, ReplicaStatus,
        drain::DrainStatus,
        facts::{EngineKind, RankReport},
        verified::Affinity,
    },
    proto,
};

pub(super) fn replica(status: ReplicaStatus) -> proto::Replica {
    let facts = status.facts;
    let has = facts.capabilities;
    proto::Replica {
        replica_id: facts.id.as_str().to_owned(),
        incarnation: status.incarnation.0,
        boot_id: facts.boot.as_str().to_owned(),
        health: match status.health {
            Health::Healthy => proto::ReplicaHealth::Healthy,
            Health::Suspect => proto::ReplicaHealth::Suspect,
            Health::Unverified => proto::ReplicaHealth::Unverified,
            Health::Unhealthy => proto::ReplicaHealth::Unhealthy,
            Health::Draining => proto::ReplicaHealth::Draining,
            Health::Dead => proto::ReplicaHealth::Dead,
        }
        .into(),
        health_reason: status.reason,
        endpoint: facts.url.to_string(),
        engine: match facts.engine {
            EngineKind::Sglang => proto::EngineKind::Sglang,
            EngineKind::Vllm => proto::EngineKind::Vllm,
        }
        .into(),
        engine_version: facts.engine_version,
        model: facts.model.to_string(),
        context_length: facts.context_length,
        vocab_size: facts.vocab_size.map_or(0, std::num::NonZeroU32::get),
        accelerator: Some(proto::Accelerator {
            name: facts.accelerator.name,
            memory_bytes: facts.accelerator.memory_bytes,
            count: facts.accelerator.count,
        }),
        capabilities: Some(proto::Capabilities {
            tokenizer: has.tokenizer,
            output_logprobs: has.output_logprobs,
            prompt_logprobs: has.prompt_logprobs,
            seed: has.seed,
            routed_experts: has.routed_experts,
            structured_output: has.structured_output,
            priority: has.priority,
            incremental_streaming: has.incremental_streaming,
            max_top_logprobs: has.max_top_logprobs,
            more_follow: has.more_follow,
        }),
        ranks: status.ranks.into_iter().map(rank).collect(),
        registered_at: Some(status.registered_at.into()),
        heartbeat_age: write::duration(status.heartbeat_age),
        labels: facts.labels.into_iter().collect(),
        page_size: facts.page_size,
        drain: status.drain.map(drain),
        adapters: facts
            .adapters
            .into_iter()
            .map(|a| proto::Adapter {
                name: a.name.to_string(),
                load_id: a.load_id,
                resident: a.resident,
            })
            .collect(),
    }
}

fn drain(status: DrainStatus) -> proto::Drain {
    proto::Drain {
        by_operator: status.by_operator,
        by_sidecar: status.by_sidecar,
        grace_left: write::duration(status.grace_left),
        hold: status.hold,
        since: Some(status.since.into()),
    }
}

fn rank(status: RankStatus) -> proto::FleetRank {
    let weight_version = status.weight_version.to_string();
    proto::FleetRank {
        rank: status.facts.rank,
        kv_capacity_tokens: status.facts.kv_capacity,
        live_pins: status.live_pins,
        live_pin_tokens: status.live_tokens,
        in_flight: status.in_flight,
        reported: status.reported.map(report),
        routable: status.not_routable.is_none(),
        not_routable: status.not_routable.unwrap_or_default().to_owned(),
        weight_version,
        affinity: match status.verified.affinity {
            Affinity::Unknown => proto::RankAffinity::Unspecified,
            Affinity::Holds => proto::RankAffinity::Holds,
            Affinity::IgnoresPins => proto::RankAffinity::IgnoresPins,
            Affinity::LosesCache => proto::RankAffinity::LosesCache,
        }
        .into(),
        wrong_rank: status.verified.wrong_rank,
        cached_tokens_expected: status.verified.expected,
        cached_tokens_found: status.verified.reported,
        recent_found_percent: status.verified.recent_percent,
    }
}

fn report(report: RankReport) -> proto::RankStatus {
    proto::RankStatus {
        rank: report.rank,
        healthy: report.healthy,
        running: report.running,
        waiting: report.waiting,
        waiting_uncached_tokens: report.waiting_uncached_tokens,
        kv_used_tokens: report.kv_used_tokens,
        weight_version: report.weight_version.to_string(),
        paused: report.paused,
    }
}
