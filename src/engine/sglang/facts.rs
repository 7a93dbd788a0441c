//! What an SGLang server says about itself: parsing only, so that whoever reads
//! the bodies decides about connections and time.
//!
//! Two traps are avoided here. `internal_states` of `/server_info` comes in
//! order of arrival and names no rank: capacities are taken from `/v1/loads`.
//! And what counts as a rank differs between layouts: the number worked out
//! from the arguments must agree with the ranks that `/v1/loads` lists.

use serde::Deserialize;
use serde_json::Value;

use crate::{
    call::LogprobMode,
    engine::facts::{ModelCard, Models, parse, shortened, wrong},
    fleet::facts::EngineKind,
};

pub use crate::engine::facts::{
    AdapterFact, Devices, Facts, FactsError, MAX_RANKS, RankFact, RankLoad,
};

/// SGLang returns as many alternatives as asked for; the API asks for 20 at
/// most.
const MAX_TOP_LOGPROBS: u32 = 20;

/// The bodies that facts are read from.
#[derive(Clone, Copy, Debug)]
pub struct Bodies<'a> {
    /// `/server_info`.
    pub server_info: &'a [u8],
    /// `/model_info`.
    pub model_info: &'a [u8],
    /// `/v1/models`.
    pub models: &'a [u8],
    /// `/v1/loads?include=core`.
    pub loads: &'a [u8],
}

#[derive(Deserialize)]
struct ServerInfo {
    version: Option<String>,
    model_path: Option<String>,
    served_model_name: Option<String>,
    #[serde(default)]
    skip_tokenizer_init: Option<bool>,
    context_length: Option<u32>,
    vocab_size: Option<u32>,
    enable_priority_scheduling: Option<bool>,
    schedule_low_priority_values_first: Option<bool>,
    enable_return_routed_experts: Option<bool>,
    enable_deterministic_inference: Option<bool>,
    incremental_streaming_output: Option<bool>,
    sleep_on_idle: Option<bool>,
    enable_lora: Option<bool>,
    grammar_backend: Option<String>,
    page_size: Option<u32>,
    dp_size: Option<u32>,
    attn_dp_size: Option<u32>,
    enable_dp_attention: Option<bool>,
    tp_size: Option<u32>,
    pp_size: Option<u32>,
    base_gpu_id: Option<u32>,
    gpu_id_step: Option<u32>,
    max_total_num_tokens: Option<u64>,
    max_req_input_len: Option<u32>,
    startup_time: Option<Value>,
    scheduler_pids: Option<Value>,
}

#[derive(Deserialize)]
struct ModelInfo {
    served_model_name: Option<String>,
    model_path: Option<String>,
    vocab_size: Option<u32>,
    weight_version: Option<String>,
}

#[derive(Deserialize)]
struct Loads {
    loads: Vec<WireLoad>,
}

#[derive(Deserialize)]
struct WireLoad {
    dp_rank: Option<u32>,
    timestamp: Option<f64>,
    num_running_reqs: Option<u32>,
    num_waiting_reqs: Option<u32>,
    num_waiting_uncached_tokens: Option<u64>,
    num_used_tokens: Option<u64>,
    max_total_num_tokens: Option<u64>,
    max_running_requests: Option<u32>,
}

/// Loads of all ranks, in order of their number, each once.
///
/// # Errors
/// A body that is none.
pub fn parse_loads(body: &[u8]) -> Result<Vec<RankLoad>, FactsError> {
    const PATH: &str = "/v1/loads";
    let wire: Loads = parse(PATH, body)?;
    if wire.loads.len() > MAX_RANKS {
        return Err(wrong(PATH, format!("more than {MAX_RANKS} ranks")));
    }
    let mut loads: Vec<RankLoad> = wire
        .loads
        .iter()
        .map(|load| RankLoad {
            // A server of one rank need not name it.
            rank: load.dp_rank.unwrap_or(0),
            timestamp: load.timestamp,
            running: load.num_running_reqs.unwrap_or(0),
            waiting: load.num_waiting_reqs.unwrap_or(0),
            waiting_uncached_tokens: load.num_waiting_uncached_tokens.unwrap_or(0),
            kv_used_tokens: load.num_used_tokens.unwrap_or(0),
            kv_capacity_tokens: load.max_total_num_tokens.unwrap_or(0),
            max_running_requests: load.max_running_requests.unwrap_or(0),
        })
        .collect();
    loads.sort_by_key(|load| load.rank);
    if loads.windows(2).any(|pair| pair[0].rank == pair[1].rank) {
        return Err(wrong(PATH, "a rank is listed twice"));
    }
    Ok(loads)
}

/// The weight version of `/model_info`.
///
/// # Errors
/// A body that is none.
pub fn parse_weight_version(body: &[u8]) -> Result<String, FactsError> {
    let info: ModelInfo = parse("/model_info", body)?;
    Ok(shortened(info.weight_version.unwrap_or_default(), 256))
}

/// The adapters of `/v1/models`, by name.
///
/// # Errors
/// A body that is none.
pub fn parse_adapters(body: &[u8]) -> Result<Vec<AdapterFact>, FactsError> {
    parse("/v1/models", body).map(|models: Models| models.adapters())
}

impl Bodies<'_> {
    /// Puts the four answers together.
    ///
    /// # Errors
    /// The first thing that is missing or contradicts another. A server that is
    /// still starting may say less than it will.
    pub fn facts(self) -> Result<Facts, FactsError> {
        let bodies = self;
        let server: ServerInfo = parse("/server_info", bodies.server_info)?;
        let info: ModelInfo = parse("/model_info", bodies.model_info)?;
        let models: Models = parse("/v1/models", bodies.models)?;
        let loads = parse_loads(bodies.loads)?;

        let base = models.base();
        let model = info
            .served_model_name
            .or(server.served_model_name.clone())
            .or_else(|| base.map(|card| card.id.clone()))
            .ok_or_else(|| wrong("/model_info", "no model name"))?;
        let ranks = ranks(&server, &loads)?;
        let tokenizer = !server.skip_tokenizer_init.unwrap_or(false);
        let shared = server.enable_dp_attention.unwrap_or(false);
        Ok(Facts {
            kind: EngineKind::Sglang,
            version: shortened(server.version.clone().unwrap_or_default(), 64),
            model,
            model_path: info.model_path.or(server.model_path.clone()),
            vocab_size: info
                .vocab_size
                .or(server.vocab_size)
                .filter(|size| *size > 0),
            context_length: context_length(&server, base)?,
            weight_version: shortened(info.weight_version.unwrap_or_default(), 256),
            adapters: models.adapters(),
            lora: server.enable_lora.unwrap_or(false),
            tokenizer,
            logprobs: true,
            // After temperature and penalties, before top-p and top-k.
            logprob_mode: LogprobMode::Processed,
            max_top_logprobs: MAX_TOP_LOGPROBS,
            routed_experts: server.enable_return_routed_experts.unwrap_or(false),
            // Grammars are compiled against the tokenizer's vocabulary.
            structured_output: tokenizer
                && server
                    .grammar_backend
                    .as_deref()
                    .is_some_and(|backend| backend != "none"),
            // With the order reversed Berth's priorities would mean the opposite.
            priority: server.enable_priority_scheduling.unwrap_or(false)
                && !server.schedule_low_priority_values_first.unwrap_or(false),
            incremental_streaming: server.incremental_streaming_output.unwrap_or(false),
            deterministic: server.enable_deterministic_inference.unwrap_or(false),
            sleeps_when_idle: server.sleep_on_idle.unwrap_or(false),
            page_size: server.page_size.unwrap_or(1).max(1),
            devices: Devices {
                per_rank: server
                    .tp_size
                    .unwrap_or(1)
                    .saturating_mul(server.pp_size.unwrap_or(1))
                    .max(1),
                base: server.base_gpu_id.unwrap_or(0),
                step: server.gpu_id_step.unwrap_or(1).max(1),
                shared,
            },
            ranks,
            start: start(&server),
            pending: false,
        })
    }
}

/// The ranks that requests can name, with their capacities.
fn ranks(server: &ServerInfo, loads: &[RankLoad]) -> Result<Vec<RankFact>, FactsError> {
    let (dp, attention) = (
        server.dp_size.unwrap_or(1).max(1),
        server.attn_dp_size.unwrap_or(1).max(1),
    );
    // `--dp-size N --enable-dp-attention` sets the attention's size to N; the
    // two numbers then mean the same ranks.
    let expected = if server.enable_dp_attention.unwrap_or(false) && dp == attention {
        dp
    } else {
        dp.saturating_mul(attention)
    };
    if loads.len() as u64 != u64::from(expected) {
        return Err(wrong(
            "/v1/loads",
            format!("{} ranks, /server_info tells of {expected}", loads.len()),
        ));
    }
    loads
        .iter()
        .zip(0..)
        .map(|(load, number)| {
            if load.rank != number {
                return Err(wrong("/v1/loads", format!("rank {number} is missing")));
            }
            let capacity = match load.kv_capacity_tokens {
                0 => server.max_total_num_tokens.unwrap_or(0),
                capacity => capacity,
            };
            if capacity == 0 {
                return Err(wrong(
                    "/v1/loads",
                    format!("rank {number} tells no KV capacity"),
                ));
            }
            Ok(RankFact {
                rank: number,
                engine_rank: number,
                endpoint: None,
                kv_capacity_tokens: capacity,
                max_running_requests: load.max_running_requests,
            })
        })
        .collect()
}

fn context_length(server: &ServerInfo, base: Option<&ModelCard>) -> Result<u32, FactsError> {
    // SGLang takes six tokens off the smaller of context and KV cache to get
    // the longest prompt.
    let by_input = server.max_req_input_len.map(|len| len.saturating_add(6));
    let by_model = base
        .and_then(|card| card.max_model_len)
        .or(server.context_length);
    [by_model, by_input]
        .into_iter()
        .flatten()
        .min()
        .filter(|length| *length >= 2)
        .ok_or_else(|| wrong("/v1/models", "no context length"))
}

/// How long each stage of the start took, to the nanosecond: no two starts have
/// the same. The processes' ids add to it; alone they repeat in containers.
fn start(server: &ServerInfo) -> Option<String> {
    let took = server.startup_time.as_ref()?;
    let frontend = took
        .get("tokenizer_e2e")
        .or_else(|| took.get("scheduler_e2e"))?
        .as_f64()?;
    let pids = server
        .scheduler_pids
        .as_ref()
        .map(Value::to_string)
        .unwrap_or_default();
    Some(format!("{frontend} {pids}"))
}

#[cfg(test)]
mod tests;
