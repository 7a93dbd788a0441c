//! What a sidecar says of its engine: the registration, and the boot id that
//! names one start.

use super::{
    accelerator::{self, Gpu},
    config::{AcceleratorConfig, SidecarConfig},
    loads::Loads,
};
use crate::{
    call,
    engine::facts::Facts,
    fleet::facts,
    proto::{
        Accelerator, Capabilities, EngineKind, LogprobMode, Rank, RegisterReplicaRequest,
        register_replica_request::Address,
    },
};

/// The name of this start. Where the engine tells its starts apart, the same
/// start has the same name for every sidecar, so that a restarted sidecar does
/// not make the caches of a running engine look lost. `previous` is never
/// returned: it was another start.
pub(super) fn boot_id(replica_id: &str, facts: &Facts, previous: Option<&str>) -> String {
    engine_start(replica_id, facts)
        .filter(|id| previous != Some(id))
        .unwrap_or_else(|| format!("u{}", uuid::Uuid::new_v4().simple()))
}

/// What every sidecar calls this start of the engine, where it says anything that
/// tells its starts apart.
fn engine_start(replica_id: &str, facts: &Facts) -> Option<String> {
    let start = facts.start.as_ref()?;
    let mut hasher = blake3::Hasher::new_derive_key("berth.dev 2026 boot id");
    for part in [replica_id, start, &facts.version] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    Some(format!("s{}", &hasher.finalize().to_hex()[..32]))
}

/// The registration of this start.
pub(super) fn request(
    config: &SidecarConfig,
    facts: &Facts,
    vocab_size: u32,
    boot_id: &str,
    gpus: &[Gpu],
    loads: &Loads,
) -> RegisterReplicaRequest {
    RegisterReplicaRequest {
        replica_id: config.replica_id.clone(),
        boot_id: boot_id.to_owned(),
        address: Some(address(config)),
        engine: match facts.kind {
            facts::EngineKind::Sglang => EngineKind::Sglang,
            facts::EngineKind::Vllm => EngineKind::Vllm,
        }
        .into(),
        engine_version: facts.version.clone(),
        model: config.model.clone().unwrap_or_else(|| facts.model.clone()),
        vocab_size,
        context_length: facts.context_length,
        weight_version: facts.weight_version.clone(),
        adapters: facts.adapters.iter().map(|a| loads.adapter(a)).collect(),
        capabilities: Some(Capabilities {
            tokenizer: facts.tokenizer,
            output_logprobs: facts.logprobs,
            prompt_logprobs: facts.logprobs,
            seed: config.seed.unwrap_or(facts.deterministic),
            routed_experts: facts.routed_experts,
            structured_output: facts.structured_output,
            priority: facts.priority,
            incremental_streaming: facts.incremental_streaming,
            max_top_logprobs: facts.max_top_logprobs,
            more_follow: facts.pending,
        }),
        accelerator: accelerator(&config.accelerator, facts, gpus),
        ranks: facts
            .ranks
            .iter()
            .map(|fact| Rank {
                rank: fact.rank,
                endpoint: fact.endpoint.clone(),
                engine_rank: Some(fact.engine_rank),
                gpu_uuids: accelerator::of_rank(gpus, facts.devices, fact.rank),
                kv_capacity_tokens: fact.kv_capacity_tokens,
                max_running_requests: fact.max_running_requests,
            })
            .collect(),
        page_size: facts.page_size,
        logprob_mode: match facts.logprob_mode {
            call::LogprobMode::Processed => LogprobMode::Processed,
            call::LogprobMode::Raw => LogprobMode::Raw,
            call::LogprobMode::Unknown => LogprobMode::Unspecified,
        }
        .into(),
        labels: config.labels.clone().into_iter().collect(),
        engine_start: engine_start(&config.replica_id, facts).unwrap_or_default(),
    }
}

/// Where the control plane reaches the engine.
fn address(config: &SidecarConfig) -> Address {
    if let Some(url) = &config.advertise_url {
        return Address::Endpoint(url.trim_end_matches('/').to_owned());
    }
    // A loopback address means another machine there than here.
    let port = loopback_port(&config.engine_url);
    match (port, loopback_port(&config.control_plane)) {
        (Some(port), None) => Address::Port(port.into()),
        _ => Address::Endpoint(config.engine_url.trim_end_matches('/').to_owned()),
    }
}

pub(super) fn loopback_port(url: &str) -> Option<u16> {
    let uri: http::Uri = url.parse().ok()?;
    let host = uri.host()?.trim_matches(['[', ']']);
    let loopback = host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback());
    loopback.then(|| uri.port_u16().unwrap_or(80))
}

fn accelerator(config: &AcceleratorConfig, facts: &Facts, gpus: &[Gpu]) -> Option<Accelerator> {
    let first = gpus
        .get(usize::try_from(facts.devices.base).ok()?)
        .or(gpus.first());
    if first.is_none() && config.name.is_none() {
        return None;
    }
    let ranks = if facts.devices.shared {
        1
    } else {
        u32::try_from(facts.ranks.len()).unwrap_or(u32::MAX)
    };
    Some(Accelerator {
        name: config
            .name
            .clone()
            .or_else(|| first.map(|gpu| gpu.name.clone()))
            .unwrap_or_default(),
        memory_bytes: config
            .memory_bytes
            .or_else(|| first.map(|gpu| gpu.memory_bytes))
            .unwrap_or_default(),
        count: config
            .count
            .unwrap_or_else(|| facts.devices.per_rank.saturating_mul(ranks)),
    })
}
