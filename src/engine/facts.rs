//! What an engine says about itself, whatever it speaks: what a sidecar needs to
//! register it and to report its load.

use serde::Deserialize;
use serde_json::Value;

use crate::{call::LogprobMode, fleet::facts::EngineKind};

/// Ranks of one replica at most: the limit of registration.
pub const MAX_RANKS: usize = 1024;

/// What does not change while a server runs, except for the weight version and
/// the adapters.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct Facts {
    /// Which API it speaks.
    pub kind: EngineKind,
    /// The engine's version.
    pub version: String,
    /// The name that requests use.
    pub model: String,
    /// Where the model lies on the engine's machine.
    pub model_path: Option<String>,
    /// Where the engine tells.
    pub vocab_size: Option<u32>,
    /// Prompt and output together, in tokens, as the engine accepts them: the
    /// model's length, or less where one rank's KV cache is smaller.
    pub context_length: u32,
    /// The weights that it serves now; empty where it does not tell.
    pub weight_version: String,
    /// LoRA adapters.
    pub adapters: Vec<AdapterFact>,
    /// Adapters can be loaded and unloaded while it runs, and it tells which are.
    pub lora: bool,
    /// Text can be given and is returned.
    pub tokenizer: bool,
    /// Log probabilities can be returned.
    pub logprobs: bool,
    /// What they are taken from.
    pub logprob_mode: LogprobMode,
    /// Alternatives that it returns at each position, at most.
    pub max_top_logprobs: u32,
    /// Experts can be returned.
    pub routed_experts: bool,
    /// Outputs can be constrained.
    pub structured_output: bool,
    /// Greater priorities are served earlier.
    pub priority: bool,
    /// Streams carry deltas.
    pub incremental_streaming: bool,
    /// Sampling is repeatable.
    pub deterministic: bool,
    /// Schedulers publish nothing while they have nothing to do, so that a
    /// timestamp that stands still says nothing about an idle rank.
    pub sleeps_when_idle: bool,
    /// Tokens per page of the KV cache.
    pub page_size: u32,
    /// In order of their number.
    pub ranks: Vec<RankFact>,
    /// Which devices it uses.
    pub devices: Devices,
    /// Differs between two starts of the server; `None` where nothing in its
    /// answers does.
    pub start: Option<String>,
    /// An answer is still awaited: what only that tells is taken for absent until
    /// then (what it can do beyond plain requests, its start, devices and limits).
    pub pending: bool,
}

/// A LoRA adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterFact {
    /// As requests name it.
    pub name: String,
    /// Where it was loaded from.
    pub root: String,
}

/// One data-parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankFact {
    /// The number that Berth gives it, distinct within the replica.
    pub rank: u32,
    /// The number that the engine wants for it.
    pub engine_rank: u32,
    /// Where it listens, if that is not where the replica does.
    pub endpoint: Option<String>,
    /// In tokens.
    pub kv_capacity_tokens: u64,
    /// 0 is unknown.
    pub max_running_requests: u32,
}

/// How ranks map to the devices of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Devices {
    /// Devices of one rank.
    pub per_rank: u32,
    /// The first.
    pub base: u32,
    /// From one to the next.
    pub step: u32,
    /// All ranks share them (attention data parallelism).
    pub shared: bool,
}

/// Load of one rank, as its engine tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankLoad {
    /// The number that Berth gives it.
    pub rank: u32,
    /// When its scheduler said so, on the engine's clock. Stands still when the
    /// scheduler is dead, and while generation is paused.
    pub timestamp: Option<f64>,
    /// Requests.
    pub running: u32,
    /// Requests.
    pub waiting: u32,
    /// Prompt tokens of the waiting that no cache holds.
    pub waiting_uncached_tokens: u64,
    /// Tokens.
    pub kv_used_tokens: u64,
    /// Tokens.
    pub kv_capacity_tokens: u64,
    /// Requests; 0 is unknown.
    pub max_running_requests: u32,
}

/// A body that does not say what it must.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {what}")]
pub struct FactsError {
    /// Of the body.
    pub path: &'static str,
    /// What is wrong.
    pub what: String,
}

pub(super) fn wrong(path: &'static str, what: impl Into<String>) -> FactsError {
    FactsError {
        path,
        what: what.into(),
    }
}

impl Facts {
    /// Whether `other` is the same start of the same server, as far as their
    /// facts tell. Weights and adapters change while a server runs.
    pub fn same_start(&self, other: &Self) -> bool {
        let told = !self.pending && !other.pending;
        let ranks = self.ranks.len() == other.ranks.len()
            && self.ranks.iter().zip(&other.ranks).all(|(rank, other)| {
                let limit = if told {
                    other.max_running_requests
                } else {
                    rank.max_running_requests
                };
                *rank
                    == RankFact {
                        max_running_requests: limit,
                        ..other.clone()
                    }
            });
        (!told || (self.start == other.start && self.devices == other.devices))
            && self.version == other.version
            && self.model == other.model
            && self.model_path == other.model_path
            && self.context_length == other.context_length
            && self.page_size == other.page_size
            && ranks
    }

    /// Whether a registration with `other` would say anything else. The weight
    /// version is told by every heartbeat.
    pub fn same_registration(&self, other: &Self) -> bool {
        let other = Self {
            weight_version: self.weight_version.clone(),
            ..other.clone()
        };
        *self == other
    }
}

/// The JSON of a body.
pub(super) fn parse<'a, T: Deserialize<'a>>(
    path: &'static str,
    body: &'a [u8],
) -> Result<T, FactsError> {
    serde_json::from_slice(body).map_err(|e| wrong(path, format!("not as expected: {e}")))
}

/// Adapters of one server at most: the limit of registration.
const MAX_ADAPTERS: usize = 1024;

/// The answer to `/v1/models`, as both engines give it.
#[derive(Deserialize)]
pub(super) struct Models {
    #[serde(default)]
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
pub(super) struct ModelCard {
    pub(super) id: String,
    pub(super) root: Option<String>,
    parent: Option<String>,
    pub(super) max_model_len: Option<u32>,
}

impl Models {
    /// The first that is no adapter.
    pub(super) fn base(&self) -> Option<&ModelCard> {
        self.data.iter().find(|card| card.parent.is_none())
    }

    /// The cards that have a parent, by name.
    pub(super) fn adapters(&self) -> Vec<AdapterFact> {
        let mut adapters: Vec<AdapterFact> = self
            .data
            .iter()
            .filter(|card| card.parent.is_some())
            .take(MAX_ADAPTERS)
            .map(|card| AdapterFact {
                name: card.id.clone(),
                root: shortened(card.root.clone().unwrap_or_default(), 256),
            })
            .collect();
        adapters.sort_by(|a, b| a.name.cmp(&b.name));
        adapters.dedup_by(|a, b| a.name == b.name);
        adapters
    }
}

/// The number of entries in a vocabulary, from a model's `config.json`.
pub fn vocab_size_of_config(config: &[u8]) -> Option<u32> {
    let config: Value = serde_json::from_slice(config).ok()?;
    [&config["vocab_size"], &config["text_config"]["vocab_size"]]
        .into_iter()
        .find_map(Value::as_u64)
        .and_then(|n| u32::try_from(n).ok())
        .filter(|n| *n > 0)
}

/// The first characters of a text that has more.
pub(crate) fn shortened(mut text: String, max_chars: usize) -> String {
    if let Some((at, _)) = text.char_indices().nth(max_chars) {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vocabulary_stands_in_either_place_of_a_config() {
        assert_eq!(
            vocab_size_of_config(br#"{"vocab_size": 151936}"#),
            Some(151_936)
        );
        assert_eq!(
            vocab_size_of_config(br#"{"text_config": {"vocab_size": 7}}"#),
            Some(7)
        );
        for none in [
            &b"{}"[..],
            br#"{"vocab_size": 0}"#,
            b"no",
            br#"{"vocab_size": -1}"#,
        ] {
            assert_eq!(vocab_size_of_config(none), None);
        }
    }
}
