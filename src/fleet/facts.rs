//! What a replica says about itself when it registers, checked. Nothing later
//! in the code looks at a registration message again.

use std::{collections::BTreeMap, num::NonZeroU32, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    call::LogprobMode,
    ids::{BootId, ReplicaId},
};

/// The facts of one start of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaFacts {
    /// Stable over restarts.
    pub id: ReplicaId,
    /// This start.
    pub boot: BootId,
    /// Base URL, `http://host:port`.
    pub url: Arc<str>,
    /// Which HTTP API it speaks.
    pub engine: EngineKind,
    /// As the engine reports it.
    pub engine_version: String,
    /// The name that requests use.
    pub model: Arc<str>,
    /// Token ids are below this. `None`: unknown, and the server allows that.
    pub vocab_size: Option<NonZeroU32>,
    /// Prompt and output together, in tokens.
    pub context_length: u32,
    /// Weights at registration.
    pub weight_version: Arc<str>,
    /// LoRA adapters it can serve.
    pub adapters: Vec<AdapterFacts>,
    /// What it can honour.
    pub capabilities: Capabilities,
    /// What it runs on.
    pub accelerator: Accelerator,
    /// Its ranks, by number, distinct.
    pub ranks: Vec<RankFacts>,
    /// Tokens per page of the KV cache, at least 1.
    pub page_size: u32,
    /// What its log probabilities are taken from.
    pub logprob_mode: LogprobMode,
    /// For people.
    pub labels: BTreeMap<String, String>,
    /// What tells this start from others, by the engine's own word.
    // Stored behind all the others: `store::sled::notes`.
    #[serde(skip)]
    pub engine_start: Option<String>,
}

impl ReplicaFacts {
    /// What is known of this adapter, where there is one of that name. Every request
    /// that names one asks this of every rank.
    pub fn adapter(&self, name: &str) -> Option<&AdapterFacts> {
        let at = self.adapters.binary_search_by(|a| (*a.name).cmp(name));
        at.ok().and_then(|at| self.adapters.get(at))
    }

    /// Puts them in the order in which they are looked up.
    pub(super) fn sort_adapters(&mut self) {
        self.adapters.sort_by(|a, b| a.name.cmp(&b.name));
    }
}

/// Which HTTP API an engine speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineKind {
    /// SGLang's `/generate`.
    Sglang,
    /// vLLM's `/inference/v1/generate`.
    Vllm,
}

/// A LoRA adapter that a replica can serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterFacts {
    /// The name that requests use.
    pub name: Arc<str>,
    /// Changes when it is loaded anew.
    pub load_id: String,
    /// In the engine's memory now.
    pub resident: bool,
}

/// What requests a replica can honour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "documented where users read it: replica.proto")]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Capabilities {
    pub tokenizer: bool,
    pub output_logprobs: bool,
    pub prompt_logprobs: bool,
    pub seed: bool,
    pub routed_experts: bool,
    pub structured_output: bool,
    pub priority: bool,
    pub incremental_streaming: bool,
    pub max_top_logprobs: u32,
    // Likewise.
    #[serde(skip)]
    pub more_follow: bool,
}

/// What a replica runs on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// As NVML prints it.
    pub name: String,
    /// Of one device.
    pub memory_bytes: u64,
    /// Devices of the whole replica.
    pub count: u32,
}

/// One data-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFacts {
    /// The number in Berth's routing.
    pub rank: u32,
    /// Base URL of this rank: the replica's, or its own.
    pub url: Arc<str>,
    /// The number that the engine wants.
    pub engine_rank: u32,
    /// Its devices.
    pub gpu_uuids: Vec<String>,
    /// Size of its KV cache in tokens, at least 1.
    pub kv_capacity: u64,
    /// Requests it runs at once; 0 is unknown.
    pub max_running: u32,
}

/// Health and load of one rank, as a heartbeat says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankReport {
    /// The rank's number.
    pub rank: u32,
    /// It makes progress.
    pub healthy: bool,
    /// Requests.
    pub running: u32,
    /// Requests.
    pub waiting: u32,
    /// Prompt tokens of the waiting that no cache holds.
    pub waiting_uncached_tokens: u64,
    /// Tokens.
    pub kv_used_tokens: u64,
    /// Weights it serves.
    pub weight_version: Arc<str>,
    /// New requests would hang.
    pub paused: bool,
}

/// The sidecar's view of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportedState {
    /// Serving.
    Ready,
    /// Finishes what it has.
    Draining,
    /// Does not answer, or is not ready yet.
    Unhealthy,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A replica of one rank, of which nothing special is known.
    pub(crate) fn plain(id: &str, boot: &str) -> ReplicaFacts {
        ReplicaFacts {
            id: ReplicaId::new(id),
            boot: BootId::new(boot),
            url: "http://127.0.0.1:1".into(),
            engine: EngineKind::Sglang,
            engine_version: "0".to_owned(),
            model: "m".into(),
            vocab_size: None,
            context_length: 100,
            weight_version: "1".into(),
            adapters: Vec::new(),
            capabilities: Capabilities::default(),
            accelerator: Accelerator::default(),
            ranks: vec![plain_rank(0)],
            page_size: 1,
            logprob_mode: LogprobMode::Unknown,
            labels: BTreeMap::new(),
            engine_start: None,
        }
    }

    /// One of its ranks.
    pub(crate) fn plain_rank(rank: u32) -> RankFacts {
        RankFacts {
            rank,
            url: "http://127.0.0.1:1".into(),
            engine_rank: rank,
            gpu_uuids: Vec::new(),
            kv_capacity: 1000,
            max_running: 0,
        }
    }
}
