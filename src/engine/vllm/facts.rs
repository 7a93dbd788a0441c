//! What vLLM servers say about themselves: parsing only, so that whoever reads
//! the bodies decides about connections and time.
//!
//! A replica has one server, or one for each rank (external load balancing).
//! Every server numbers its own ranks from 0 on, whatever the label of its
//! metrics is: that is the number that requests name. What only a server in
//! development mode tells is taken for absent elsewhere: nothing is promised that
//! might be dropped silently.

use serde::Deserialize;

use super::metrics::{self, Metrics};
use crate::{
    call::LogprobMode,
    engine::facts::{Models, parse, shortened, wrong},
    fleet::facts::EngineKind,
};

pub use crate::engine::facts::{
    AdapterFact, Devices, Facts, FactsError, MAX_RANKS, RankFact, RankLoad,
};

/// What the API asks for at most.
const MAX_TOP_LOGPROBS: u32 = 20;
/// A server's limit where it does not tell.
const USUAL_MAX_LOGPROBS: i64 = 20;

/// The bodies of one server.
#[derive(Clone, Copy, Debug)]
pub struct Bodies<'a> {
    /// Where it listens, if that is not where the replica does.
    pub endpoint: Option<&'a str>,
    /// `/version`.
    pub version: &'a [u8],
    /// `/v1/models`.
    pub models: &'a [u8],
    /// `/metrics`.
    pub metrics: &'a [u8],
    /// `/server_info?config_format=json`, in development mode.
    pub server_info: Option<&'a [u8]>,
    /// That one is still awaited.
    pub pending: bool,
    /// `/weight_info`, in development mode.
    pub weight_info: Option<&'a [u8]>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Paused {
    is_paused: bool,
}

#[derive(Default, Deserialize)]
struct ServerInfo {
    vllm_config: Config,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    instance_id: Option<String>,
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
    scheduler_config: SchedulerConfig,
    aux_output_config: AuxOutputConfig,
    /// Unset: it takes no adapters.
    lora_config: Option<serde::de::IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelConfig {
    max_logprobs: Option<i64>,
    logprobs_mode: Option<String>,
    skip_tokenizer_init: Option<bool>,
    enable_return_routed_experts: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ParallelConfig {
    world_size: Option<u32>,
    #[serde(rename = "_api_process_count")]
    api_process_count: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SchedulerConfig {
    max_num_seqs: Option<u32>,
    policy: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AuxOutputConfig {
    enable_return_routed_experts: Option<bool>,
}

/// Puts the answers of all servers of a replica together.
///
/// # Errors
/// The first thing that is missing or contradicts another. A server that is
/// still starting may say less than it will.
pub fn facts(
    servers: &[Bodies<'_>],
    logprob_mode: Option<LogprobMode>,
) -> Result<Facts, FactsError> {
    let mut all: Option<Facts> = None;
    for bodies in servers {
        let more = one(bodies, logprob_mode)?;
        match &mut all {
            None => all = Some(more),
            Some(all) => join(all, more)?,
        }
    }
    all.ok_or_else(|| wrong("/v1/models", "no server"))
}

/// Adds the ranks of another server of the same replica.
fn join(all: &mut Facts, more: Facts) -> Result<(), FactsError> {
    let same = all.version == more.version
        && all.model == more.model
        && all.context_length == more.context_length
        && all.page_size == more.page_size
        // Where one has not told it yet, nothing is made of the other's.
        && (all.pending || more.pending || all.logprob_mode == more.logprob_mode);
    if !same {
        return Err(wrong("/v1/models", "the servers of the ranks differ"));
    }
    let next = u32::try_from(all.ranks.len()).unwrap_or(u32::MAX);
    for (rank, number) in more.ranks.into_iter().zip(next..) {
        all.ranks.push(RankFact {
            rank: number,
            ..rank
        });
    }
    if all.ranks.len() > MAX_RANKS {
        return Err(wrong("/metrics", format!("more than {MAX_RANKS} ranks")));
    }
    // Conditions on weights and adapters hold for a replica as a whole.
    if all.weight_version != more.weight_version {
        all.weight_version.clear();
    }
    all.adapters = common(std::mem::take(&mut all.adapters), &more.adapters);
    all.lora |= more.lora;
    all.pending |= more.pending;
    all.logprobs &= more.logprobs;
    all.routed_experts &= more.routed_experts;
    all.structured_output &= more.structured_output;
    all.priority &= more.priority;
    all.max_top_logprobs = all.max_top_logprobs.min(more.max_top_logprobs);
    all.start = match (all.start.take(), more.start) {
        (Some(one), Some(other)) => Some(format!("{one} {other}")),
        _ => None,
    };
    Ok(())
}

/// The adapters that all servers of a replica have.
pub fn common(all: Vec<AdapterFact>, more: &[AdapterFact]) -> Vec<AdapterFact> {
    let both = all.into_iter().filter(|adapter| more.contains(adapter));
    both.collect()
}

/// The adapters of `/v1/models`, by name.
///
/// # Errors
/// A body that is none.
pub fn adapters(body: &[u8]) -> Result<Vec<AdapterFact>, FactsError> {
    parse("/v1/models", body).map(|models: Models| models.adapters())
}

fn one(bodies: &Bodies<'_>, logprob_mode: Option<LogprobMode>) -> Result<Facts, FactsError> {
    let version: Version = parse("/version", bodies.version)?;
    let models: Models = parse("/v1/models", bodies.models)?;
    let metrics = metrics::parse(bodies.metrics)?;
    let told = match bodies.server_info {
        Some(body) => Some(parse::<ServerInfo>("/server_info", body)?.vllm_config),
        None => None,
    };
    let weight_version = match bodies.weight_info {
        Some(body) => weight_version(body)?,
        None => String::new(),
    };
    let base = models
        .base()
        .ok_or_else(|| wrong("/v1/models", "no model"))?;
    let config = told.as_ref();
    let model_config = config.map(|c| &c.model_config);
    let mode = model_config.and_then(|m| m.logprobs_mode.as_deref());
    let max_running = config
        .and_then(|c| c.scheduler_config.max_num_seqs)
        .unwrap_or(0);
    let (page_size, ranks) = ranks(&metrics, bodies.endpoint, max_running)?;
    Ok(Facts {
        // A server that does not tell may load some.
        lora: config.is_none_or(|c| c.lora_config.is_some()),
        kind: EngineKind::Vllm,
        version: shortened(version.version, 64),
        model: base.id.clone(),
        model_path: base.root.clone(),
        // It does not tell: the model's config.json does.
        vocab_size: None,
        context_length: base
            .max_model_len
            .filter(|length| *length >= 2)
            .ok_or_else(|| wrong("/v1/models", "no context length"))?,
        weight_version,
        adapters: models.adapters(),
        // This route takes ids and gives ids, whatever the server has.
        tokenizer: false,
        // Logits are no log probabilities.
        logprobs: !bodies.pending && !mode.is_some_and(|mode| mode.ends_with("_logits")),
        logprob_mode: match mode {
            Some("raw_logprobs") => LogprobMode::Raw,
            Some("processed_logprobs") => LogprobMode::Processed,
            _ => logprob_mode.unwrap_or(LogprobMode::Unknown),
        },
        max_top_logprobs: if bodies.pending {
            0
        } else {
            max_top_logprobs(model_config.and_then(|m| m.max_logprobs))
        },
        routed_experts: config.is_some_and(|c| {
            c.aux_output_config
                .enable_return_routed_experts
                .or(c.model_config.enable_return_routed_experts)
                .unwrap_or(false)
        }),
        // Grammars are compiled against the tokenizer's vocabulary.
        structured_output: model_config.is_some_and(|m| m.skip_tokenizer_init == Some(false)),
        priority: config.is_some_and(|c| c.scheduler_config.policy.as_deref() == Some("priority")),
        incremental_streaming: true,
        deterministic: true,
        // There are no timestamps to stand still.
        sleeps_when_idle: true,
        page_size,
        ranks,
        devices: Devices {
            per_rank: config
                .and_then(|c| c.parallel_config.world_size)
                .unwrap_or(1)
                .max(1),
            base: 0,
            step: 1,
            shared: false,
        },
        start: start(&metrics, config),
        pending: bodies.pending,
    })
}

/// One alternative more than wanted has to be asked for.
fn max_top_logprobs(told: Option<i64>) -> u32 {
    match told.unwrap_or(USUAL_MAX_LOGPROBS) {
        // As many as there are tokens.
        -1 => MAX_TOP_LOGPROBS,
        most => u32::try_from(most.saturating_sub(1).max(0))
            .unwrap_or(u32::MAX)
            .min(MAX_TOP_LOGPROBS),
    }
}

/// The ranks of one server, in the order of their labels, and the block size.
fn ranks(
    metrics: &Metrics,
    endpoint: Option<&str>,
    max_running_requests: u32,
) -> Result<(u32, Vec<RankFact>), FactsError> {
    const PATH: &str = "/metrics";
    let engines = metrics.engines.len() as u64;
    let mut block_size = None;
    let ranks = metrics
        .engines
        .values()
        .zip(0..)
        .map(|(engine, number)| {
            let cache = engine.cache.ok_or_else(|| {
                wrong(PATH, format!("engine {number} tells nothing of its cache"))
            })?;
            if *block_size.get_or_insert(cache.block_size) != cache.block_size {
                return Err(wrong(PATH, "engines of different block sizes"));
            }
            let blocks = cache.blocks.map(|blocks| blocks / engines.max(1));
            let kv_capacity_tokens = cache
                .tokens
                .or_else(|| blocks.map(|b| b.saturating_mul(u64::from(cache.block_size))))
                .filter(|tokens| *tokens > 0)
                .ok_or_else(|| wrong(PATH, format!("engine {number} tells no KV capacity")))?;
            Ok(RankFact {
                rank: number,
                engine_rank: number,
                endpoint: endpoint.map(str::to_owned),
                kv_capacity_tokens,
                max_running_requests,
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let block_size = block_size.ok_or_else(|| wrong(PATH, "no engine"))?;
    Ok((block_size, ranks))
}

/// What tells two starts apart: when the process began, or the number that it
/// gave itself. Several processes behind one port have one each: then neither.
fn start(metrics: &Metrics, config: Option<&Config>) -> Option<String> {
    if let Some(began) = metrics.process_start {
        return Some(format!("{began}"));
    }
    let config = config?;
    (config.parallel_config.api_process_count == Some(1))
        .then(|| config.instance_id.clone())
        .flatten()
        .map(|id| shortened(id, 128))
}

/// The weight version of `/weight_info`.
///
/// # Errors
/// A body that is none.
pub fn weight_version(body: &[u8]) -> Result<String, FactsError> {
    let info: WeightInfo = parse("/weight_info", body)?;
    Ok(shortened(info.weight_version.unwrap_or_default(), 256))
}

/// What `/is_paused` says.
///
/// # Errors
/// A body that is none.
pub fn is_paused(body: &[u8]) -> Result<bool, FactsError> {
    Ok(parse::<Paused>("/is_paused", body)?.is_paused)
}

/// The load of the ranks `facts`, which are those of one server in their order.
/// A rank that is not listed any more has none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of a capacity of at most 2^40"
)]
pub fn loads(metrics: &Metrics, facts: &[RankFact]) -> Vec<Option<RankLoad>> {
    let mut engines = metrics.engines.values();
    facts
        .iter()
        .map(|fact| {
            engines.next().map(|engine| RankLoad {
                rank: fact.rank,
                timestamp: None,
                running: engine.running,
                waiting: engine.waiting,
                // It does not tell.
                waiting_uncached_tokens: 0,
                kv_used_tokens: (engine.kv_usage * fact.kv_capacity_tokens as f64) as u64,
                kv_capacity_tokens: fact.kv_capacity_tokens,
                max_running_requests: fact.max_running_requests,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests;
