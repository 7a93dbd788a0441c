//! What an SGLang server says about itself: parsing only, so that whoever reads
//! the bodies decides about connections and time.
//!
//! Two traps are avoided here. `internal_states` of `/server_info` comes in
//! order of arrival and names no rank: capacities are taken from `/v1/loads`.
//! And what counts as a rank differs between layouts: the number worked out
//! from the arguments must agree with the ranks that `/v1/loads` lists.

use serde::Deserialize;
use serde_json::Value;

/// Ranks of one server at most: the limit of registration.
const MAX_RANKS: usize = 1024;

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

/// What does not change while a server runs, except for the weight version and
/// the adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// SGLang's version.
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
    /// The weights that it serves now.
    pub weight_version: String,
    /// LoRA adapters.
    pub adapters: Vec<AdapterFact>,
    /// Text can be given and is returned.
    pub tokenizer: bool,
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
    /// The engine's number for it.
    pub rank: u32,
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

/// Load of one rank, as `/v1/loads` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankLoad {
    /// The engine's number for it.
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

fn wrong(path: &'static str, what: impl Into<String>) -> FactsError {
    FactsError {
        path,
        what: what.into(),
    }
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
struct Models {
    #[serde(default)]
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    root: Option<String>,
    parent: Option<String>,
    max_model_len: Option<u32>,
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

fn parse<'a, T: Deserialize<'a>>(path: &'static str, body: &'a [u8]) -> Result<T, FactsError> {
    serde_json::from_slice(body).map_err(|e| wrong(path, format!("not as expected: {e}")))
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

/// The number of entries in a vocabulary, from a model's `config.json`.
pub fn vocab_size_of_config(config: &[u8]) -> Option<u32> {
    let config: Value = serde_json::from_slice(config).ok()?;
    [&config["vocab_size"], &config["text_config"]["vocab_size"]]
        .into_iter()
        .find_map(Value::as_u64)
        .and_then(|n| u32::try_from(n).ok())
        .filter(|n| *n > 0)
}

impl Facts {
    /// Puts the four answers together.
    ///
    /// # Errors
    /// The first thing that is missing or contradicts another. A server that is
    /// still starting may say less than it will.
    pub fn parse(bodies: Bodies<'_>) -> Result<Self, FactsError> {
        let server: ServerInfo = parse("/server_info", bodies.server_info)?;
        let info: ModelInfo = parse("/model_info", bodies.model_info)?;
        let models: Models = parse("/v1/models", bodies.models)?;
        let loads = parse_loads(bodies.loads)?;

        let base = models.data.iter().find(|card| card.parent.is_none());
        let model = info
            .served_model_name
            .or(server.served_model_name.clone())
            .or_else(|| base.map(|card| card.id.clone()))
            .ok_or_else(|| wrong("/model_info", "no model name"))?;
        let ranks = ranks(&server, &loads)?;
        let tokenizer = !server.skip_tokenizer_init.unwrap_or(false);
        let shared = server.enable_dp_attention.unwrap_or(false);
        Ok(Self {
            version: shortened(server.version.clone().unwrap_or_default(), 64),
            model,
            model_path: info.model_path.or(server.model_path.clone()),
            vocab_size: info
                .vocab_size
                .or(server.vocab_size)
                .filter(|size| *size > 0),
            context_length: context_length(&server, base)?,
            weight_version: shortened(info.weight_version.unwrap_or_default(), 256),
            adapters: models
                .data
                .iter()
                .filter(|card| card.parent.is_some())
                .map(|card| AdapterFact {
                    name: card.id.clone(),
                    root: card.root.clone().unwrap_or_default(),
                })
                .collect(),
            tokenizer,
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
        })
    }

    /// Whether `other` is the same start of the same server, as far as their
    /// facts tell. Weights and adapters change while a server runs.
    pub fn same_start(&self, other: &Self) -> bool {
        self.start == other.start
            && self.version == other.version
            && self.model == other.model
            && self.model_path == other.model_path
            && self.context_length == other.context_length
            && self.page_size == other.page_size
            && self.ranks == other.ranks
            && self.devices == other.devices
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

fn shortened(mut text: String, max_chars: usize) -> String {
    if let Some((at, _)) = text.char_indices().nth(max_chars) {
        text.truncate(at);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    macro_rules! recorded {
        ($name:literal) => {
            include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/tests/fixtures/sglang/",
                $name,
                ".response.json"
            ))
        };
    }

    fn facts(server: &[u8], loads: &[u8]) -> Result<Facts, FactsError> {
        Facts::parse(Bodies {
            server_info: server,
            model_info: recorded!("model_info"),
            models: recorded!("v1_models"),
            loads,
        })
    }

    fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut server: Value = serde_json::from_slice(recorded!("dp_server_info")).unwrap();
        change(&mut server);
        server.to_string().into_bytes()
    }

    #[test]
    fn the_recorded_server_of_one_rank() {
        let facts = facts(recorded!("server_info"), recorded!("v1_loads")).unwrap();
        assert_eq!(facts.version, "0.5.23");
        assert_eq!(facts.model, "MODEL_DIR");
        assert_eq!(facts.context_length, 32768);
        assert_eq!(facts.weight_version, "default");
        assert_eq!(facts.page_size, 1);
        assert_eq!(
            facts.ranks,
            [RankFact {
                rank: 0,
                kv_capacity_tokens: 32768,
                max_running_requests: 2048
            }]
        );
        assert!(!facts.tokenizer && !facts.structured_output && !facts.priority);
        assert!(!facts.incremental_streaming && !facts.deterministic);
        assert!(facts.start.is_some());
        assert_eq!(facts.vocab_size, None);
    }

    #[test]
    fn the_recorded_server_of_two_ranks() {
        let facts = facts(recorded!("dp_server_info"), recorded!("dp_loads")).unwrap();
        assert_eq!(facts.ranks.len(), 2);
        assert_eq!(facts.ranks[1].rank, 1);
        assert!(!facts.devices.shared);
    }

    #[test]
    fn ranks_are_counted_in_every_layout() {
        for (dp, attention, flag, good) in [
            (2, 1, false, true),
            (1, 2, false, true),
            (1, 2, true, true),
            (2, 2, true, true),
            (2, 2, false, false),
            (1, 1, false, false),
            (4, 1, false, false),
        ] {
            let server = changed(|s| {
                s["dp_size"] = json!(dp);
                s["attn_dp_size"] = json!(attention);
                s["enable_dp_attention"] = json!(flag);
            });
            assert_eq!(
                facts(&server, recorded!("dp_loads")).is_ok(),
                good,
                "{dp} {attention} {flag}"
            );
        }
    }

    #[test]
    fn a_small_kv_cache_bounds_the_context() {
        let server = changed(|s| s["max_req_input_len"] = json!(994));
        let facts = facts(&server, recorded!("dp_loads")).unwrap();
        assert_eq!(facts.context_length, 1000);
    }

    #[test]
    fn another_start_is_told_from_the_same_one() {
        let one = facts(recorded!("dp_server_info"), recorded!("dp_loads")).unwrap();
        let same = facts(recorded!("dp_server_info"), recorded!("dp_loads_busy")).unwrap();
        assert!(one.same_start(&same) && one.same_registration(&same));
        let server = changed(|s| s["startup_time"]["tokenizer_e2e"] = json!(52.015_645_83));
        let other = facts(&server, recorded!("dp_loads")).unwrap();
        assert!(!one.same_start(&other));
        let server = changed(|s| s["incremental_streaming_output"] = json!(true));
        let other = facts(&server, recorded!("dp_loads")).unwrap();
        assert!(!one.same_registration(&other));
        // A fixed seed or a repeated pid alone tells no start.
        let server = changed(|s| s["startup_time"] = Value::Null);
        assert_eq!(facts(&server, recorded!("dp_loads")).unwrap().start, None);
    }

    #[test]
    fn priorities_in_reverse_are_no_priorities() {
        let server = changed(|s| {
            s["enable_priority_scheduling"] = json!(true);
        });
        assert!(facts(&server, recorded!("dp_loads")).unwrap().priority);
        let server = changed(|s| {
            s["enable_priority_scheduling"] = json!(true);
            s["schedule_low_priority_values_first"] = json!(true);
        });
        assert!(!facts(&server, recorded!("dp_loads")).unwrap().priority);
    }

    #[test]
    fn loads_of_a_busy_and_of_a_dead_rank() {
        let busy = parse_loads(recorded!("dp_loads_busy")).unwrap();
        assert_eq!(busy.len(), 2);
        let dead = parse_loads(recorded!("dp_loads_rank1_killed")).unwrap();
        assert_eq!((dead[1].running, dead[1].kv_used_tokens), (1, 35));
        assert!(dead[1].timestamp < dead[0].timestamp);
        let twice = br#"{"loads":[{"dp_rank":0},{"dp_rank":0}]}"#;
        assert!(parse_loads(twice).is_err());
        assert!(parse_loads(b"Internal Server Error").is_err());
    }

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
