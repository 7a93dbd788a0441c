//! A registration becomes facts, or every fault that it has. A replica's word is
//! a stranger's word: everything is bounded and checked.

mod address;
mod beat;

use std::{collections::BTreeSet, net::SocketAddr, num::NonZeroU32, sync::Arc};

use self::address::address;
pub(super) use self::{address::reachable, beat::beat};
#[cfg(any(test, feature = "fuzzing"))]
pub(super) use crate::engine::url::base_url;
use crate::{
    call::LogprobMode,
    error::{Error, Reason, Violation},
    fleet::facts::{Accelerator, AdapterFacts, Capabilities, EngineKind, RankFacts, ReplicaFacts},
    ids::{BootId, ReplicaId},
    proto,
};

const MAX_ID: usize = 128;
const MAX_NAME: usize = 256;
const MAX_RANKS: usize = 1024;
const MAX_ADAPTERS: usize = 1024;
const MAX_LABELS: usize = 32;
const MAX_GPUS: usize = 64;

/// What a server allows.
pub(super) struct Rules {
    pub(super) allow_unknown_vocabulary: bool,
}

#[derive(Default)]
struct Faults(Vec<Violation>);

impl Faults {
    fn add(&mut self, field: impl Into<std::borrow::Cow<'static, str>>, what: impl Into<String>) {
        self.0.push(Violation::new(field, what));
    }

    fn check(&mut self, ok: bool, field: &'static str, what: &str) {
        if !ok {
            self.add(field, what);
        }
    }

    /// What was read, where nothing is wrong with it.
    fn or<T>(self, read: Option<T>) -> Result<T, Error> {
        match read {
            Some(read) if self.0.is_empty() => Ok(read),
            _ => Err(Error::invalid(Reason::InvalidRequest, self.0)),
        }
    }
}

pub(super) const ID_RULE: &str = "must have 1 to 128 characters of [A-Za-z0-9._:-]";

pub(super) fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._:-".contains(&b))
}

/// A name that requests use: as in `SampleRequest`.
fn is_name(text: &str) -> bool {
    !text.trim().is_empty() && text.chars().count() <= MAX_NAME && is_plain(text)
}

/// What is shown in logs and lists stays on its line.
fn is_plain(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

pub(super) fn facts(
    message: proto::RegisterReplicaRequest,
    caller: Option<SocketAddr>,
    rules: &Rules,
) -> Result<ReplicaFacts, Error> {
    let mut faults = Faults::default();
    faults.check(is_id(&message.replica_id), "replica_id", ID_RULE);
    faults.check(
        (1..=MAX_ID).contains(&message.boot_id.len())
            && message.boot_id.bytes().all(|b| b.is_ascii_graphic()),
        "boot_id",
        "must have 1 to 128 printable ASCII characters",
    );
    faults.check(
        message.engine_start.len() <= MAX_ID
            && message.engine_start.bytes().all(|b| b.is_ascii_graphic()),
        "engine_start",
        "may have 128 printable ASCII characters at most",
    );
    let url = address(&message, caller, &mut faults);
    let engine = match message.engine() {
        proto::EngineKind::Sglang => Some(EngineKind::Sglang),
        proto::EngineKind::Vllm => Some(EngineKind::Vllm),
        proto::EngineKind::Unspecified => None,
    };
    faults.check(engine.is_some(), "engine", "must be SGLANG or VLLM");
    let logprob_mode = match proto::LogprobMode::try_from(message.logprob_mode) {
        Ok(proto::LogprobMode::Processed) => LogprobMode::Processed,
        Ok(proto::LogprobMode::Raw) => LogprobMode::Raw,
        Ok(proto::LogprobMode::Unspecified) => LogprobMode::Unknown,
        Err(_) => {
            faults.add(
                "logprob_mode",
                format!(
                    "is {}, which is none that is known: PROCESSED or RAW, or left out where the \
                     engine does not say",
                    message.logprob_mode
                ),
            );
            LogprobMode::Unknown
        }
    };
    faults.check(
        message.engine_version.len() <= 64 && is_plain(&message.engine_version),
        "engine_version",
        "may have 64 bytes at most and hold no control character",
    );
    faults.check(
        is_name(&message.model),
        "model",
        "must have 1 to 256 characters, not be blank and hold no control character",
    );
    let vocab_size = NonZeroU32::new(message.vocab_size);
    faults.check(
        vocab_size.is_some() || rules.allow_unknown_vocabulary,
        "vocab_size",
        "is unknown (0): one token id beyond it ends an engine, so it must be given (the \
         sidecar's --vocab-size), unless the server runs with allow-unknown-vocabulary",
    );
    faults.check(
        message.context_length >= 2,
        "context_length",
        "must be at least 2 tokens",
    );
    faults.check(
        message.weight_version.len() <= MAX_NAME && is_plain(&message.weight_version),
        "weight_version",
        "may have 256 bytes at most and hold no control character",
    );
    check_adapters(&message.adapters, &mut faults);
    faults.check(message.page_size >= 1, "page_size", "must be at least 1");
    labels(&message, &mut faults);
    let accelerator = message.accelerator.clone().unwrap_or_default();
    faults.check(
        accelerator.name.len() <= MAX_NAME && is_plain(&accelerator.name),
        "accelerator.name",
        "may have 256 bytes at most and hold no control character",
    );
    faults.check(
        message
            .ranks
            .iter()
            .all(|r| u64::from(message.page_size) <= r.kv_capacity_tokens.max(1)),
        "page_size",
        "may not be larger than a rank's KV cache",
    );
    let ranks = ranks(&message.ranks, url.as_ref(), &mut faults);

    match (url, engine) {
        (Some(url), Some(engine)) if faults.0.is_empty() => Ok(ReplicaFacts {
            id: ReplicaId::new(message.replica_id),
            boot: BootId::new(message.boot_id),
            url,
            engine,
            engine_version: message.engine_version,
            model: message.model.into(),
            vocab_size,
            context_length: message.context_length,
            weight_version: message.weight_version.into(),
            adapters: sorted(message.adapters),
            capabilities: capabilities(message.capabilities.unwrap_or_default()),
            accelerator: Accelerator {
                name: accelerator.name,
                memory_bytes: accelerator.memory_bytes,
                count: accelerator.count,
            },
            ranks,
            page_size: message.page_size,
            logprob_mode,
            labels: message.labels.into_iter().collect(),
            engine_start: Some(message.engine_start).filter(|start| !start.is_empty()),
        }),
        _ => Err(Error::invalid(Reason::InvalidRequest, faults.0)),
    }
}

fn labels(message: &proto::RegisterReplicaRequest, faults: &mut Faults) {
    faults.check(
        message.labels.len() <= MAX_LABELS,
        "labels",
        "may hold 32 at most",
    );
    faults.check(
        message
            .labels
            .iter()
            .all(|(k, v)| (1..=63).contains(&k.len()) && v.len() <= 255),
        "labels",
        "each key must have 1 to 63 bytes, each value 255 at most",
    );
    faults.check(
        message
            .labels
            .iter()
            .all(|(k, v)| is_plain(k) && is_plain(v)),
        "labels",
        "may hold no control character",
    );
}

fn ranks(ranks: &[proto::Rank], url: Option<&Arc<str>>, faults: &mut Faults) -> Vec<RankFacts> {
    faults.check(
        (1..=MAX_RANKS).contains(&ranks.len()),
        "ranks",
        "must list 1 to 1,024",
    );
    let numbers: BTreeSet<u32> = ranks.iter().map(|r| r.rank).collect();
    faults.check(numbers.len() == ranks.len(), "ranks", "two have one number");
    let at: BTreeSet<_> = ranks
        .iter()
        .map(|r| (&r.endpoint, r.engine_rank.unwrap_or(r.rank)))
        .collect();
    faults.check(
        at.len() == ranks.len(),
        "ranks",
        "two have one engine_rank at one endpoint",
    );
    let mut facts: Vec<RankFacts> = ranks
        .iter()
        .take(MAX_RANKS)
        .enumerate()
        .filter_map(|(i, rank)| {
            if rank.kv_capacity_tokens == 0 || rank.kv_capacity_tokens > 1 << 40 {
                faults.add(
                    format!("ranks[{i}].kv_capacity_tokens"),
                    "must be at least 1 and at most 2^40",
                );
            }
            if rank.gpu_uuids.len() > MAX_GPUS
                || rank.gpu_uuids.iter().any(|u| u.len() > 128 || !is_plain(u))
            {
                faults.add(
                    format!("ranks[{i}].gpu_uuids"),
                    "may list 64 at most, each of 128 bytes at most and without control character",
                );
            }
            let own = match rank.endpoint.as_deref().map(crate::engine::url::base_url) {
                Some(Err(what)) => {
                    faults.add(format!("ranks[{i}].endpoint"), what);
                    None
                }
                Some(Ok(own)) => Some(own),
                None => url.cloned(),
            };
            own.map(|url| RankFacts {
                rank: rank.rank,
                url,
                engine_rank: rank.engine_rank.unwrap_or(rank.rank),
                gpu_uuids: rank.gpu_uuids.clone(),
                kv_capacity: rank.kv_capacity_tokens,
                max_running: rank.max_running_requests,
            })
        })
        .collect();
    facts.sort_by_key(|r| r.rank);
    facts
}

fn check_adapters(adapters: &[proto::Adapter], faults: &mut Faults) {
    faults.check(
        adapters.len() <= MAX_ADAPTERS,
        "adapters",
        "may list 1,024 at most",
    );
    faults.check(
        adapters
            .iter()
            .all(|a| is_name(&a.name) && a.load_id.len() <= MAX_NAME && is_plain(&a.load_id)),
        "adapters",
        "each name must have 1 to 256 characters, each load_id 256 bytes at most, and none a \
         control character",
    );
    let names: BTreeSet<&str> = adapters.iter().map(|a| a.name.as_str()).collect();
    faults.check(
        names.len() == adapters.len(),
        "adapters",
        "two have one name",
    );
}

/// By name, so that the same ones in another order are no news.
fn sorted(adapters: Vec<proto::Adapter>) -> Vec<AdapterFacts> {
    let mut adapters: Vec<AdapterFacts> = adapters.into_iter().map(adapter).collect();
    adapters.sort_by(|a, b| a.name.cmp(&b.name));
    adapters
}

fn adapter(adapter: proto::Adapter) -> AdapterFacts {
    AdapterFacts {
        name: adapter.name.into(),
        load_id: adapter.load_id,
        resident: adapter.resident,
    }
}

fn capabilities(c: proto::Capabilities) -> Capabilities {
    Capabilities {
        tokenizer: c.tokenizer,
        output_logprobs: c.output_logprobs,
        prompt_logprobs: c.prompt_logprobs,
        seed: c.seed,
        routed_experts: c.routed_experts,
        structured_output: c.structured_output,
        priority: c.priority,
        incremental_streaming: c.incremental_streaming,
        max_top_logprobs: c.max_top_logprobs,
        more_follow: c.more_follow,
    }
}

#[cfg(test)]
mod tests;
