//! A sampling request and its result in the domain's own terms. Nothing here
//! knows gRPC or HTTP, so other doors can feed the same stack.

use std::{collections::BTreeMap, fmt, sync::Arc, time::SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{
    error::Violation,
    ids::{AffinityKey, IdempotencyKey, Target, Tenant},
};

/// One request as it came in. Translating a message into it never fails: what
/// cannot be said in these types is a violation in `malformed`, so that
/// validation can report it together with everything else that is wrong.
#[derive(Clone)]
pub struct SampleCall {
    /// Whose it is.
    pub tenant: Tenant,
    /// Its name in logs, and the seed of what is random about its routing.
    pub request_id: Arc<str>,
    /// When its caller gives up; the deadline layer fills in the server's default.
    pub deadline: Option<Instant>,
    /// Names the generation.
    pub idempotency_key: Option<IdempotencyKey>,
    /// What to generate.
    pub params: Arc<SampleParams>,
    /// Overrides the routing policy.
    pub routing_policy: Option<RoutingPolicy>,
    /// Greater is served earlier. -1000 to 1000.
    pub priority: i32,
    /// Faults that the translation met.
    pub malformed: Vec<Violation>,
}

/// What was asked for: all that an idempotency key names, and nothing else.
#[derive(Clone)]
pub struct SampleParams {
    /// Names the trajectory.
    pub affinity_key: Option<AffinityKey>,
    /// The model's name; unset where one is served.
    pub model: Option<Arc<str>>,
    /// A LoRA adapter's name.
    pub adapter: Option<Arc<str>>,
    /// The whole history.
    pub prompt: Prompt,
    /// How to sample.
    pub sampling: Arc<Sampling>,
    /// Completions wanted.
    pub num_samples: u32,
    /// Log probabilities wanted.
    pub logprobs: LogprobsWanted,
    /// Weights wanted.
    pub weights: WeightsWanted,
    /// Requests that share the prompt.
    pub group: Option<Group>,
    /// Return the experts each token was routed to.
    pub routed_experts: bool,
    /// What to do when an engine ends a generation by itself.
    pub on_abort: OnAbort,
    /// What the next attempt starts from when a replica is lost.
    pub on_lost: OnLost,
    /// How numbers are written in the response: part of the bytes that a key
    /// promises.
    pub packed_output: bool,
}

/// The whole history.
#[derive(Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids in order.
    Tokens(Arc<[u32]>),
    /// Text, for an engine with a tokenizer.
    Text(Arc<str>),
}

impl Prompt {
    /// Its length in tokens, where that is known here.
    pub fn token_count(&self) -> Option<usize> {
        match self {
            Self::Tokens(ids) => Some(ids.len()),
            Self::Text(_) => None,
        }
    }
}

impl fmt::Debug for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(ids) => write!(f, "Tokens({})", ids.len()),
            Self::Text(text) => write!(f, "Text({} bytes)", text.len()),
        }
    }
}

/// How to sample. An unset field takes the engine-independent default that the
/// proto states.
#[derive(Clone, Default, PartialEq)]
#[expect(
    missing_docs,
    reason = "documented where users read it: sampling.proto"
)]
pub struct Sampling {
    pub max_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub seed: Option<u64>,
    pub ignore_eos: bool,
    pub stop: Option<Vec<String>>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub logit_bias: BTreeMap<u32, f32>,
    pub structured: Option<Structured>,
    pub skip_special_tokens: Option<bool>,
}

/// A constraint on the output.
#[derive(Clone, PartialEq, Eq)]
pub enum Structured {
    /// A JSON schema as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar.
    Ebnf(String),
}

/// Which log probabilities to return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogprobsWanted {
    /// Of generated tokens.
    pub output: bool,
    /// Alternatives at each generated position, 0 to 20.
    pub top_k: u32,
    /// Of prompt tokens.
    pub prompt: bool,
    /// Alternatives at each prompt position, 0 to 20.
    pub prompt_top_k: u32,
}

/// Which weights may generate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WeightsWanted {
    /// The condition.
    pub constraint: Option<WeightsConstraint>,
    /// Wait for it within the deadline.
    pub wait: bool,
}

/// A condition on the weight version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsConstraint {
    /// An integer version at least this.
    AtLeast(u64),
    /// Exactly this.
    Exact(Arc<str>),
}

impl WeightsConstraint {
    /// Whether `version` satisfies it. A version that is no integer never
    /// satisfies `AtLeast`.
    pub fn admits(&self, version: &str) -> bool {
        match self {
            Self::AtLeast(least) => version.parse::<u64>().is_ok_and(|v| v >= *least),
            Self::Exact(wanted) => version == &**wanted,
        }
    }
}

/// Requests that share a prompt.
#[derive(Clone, PartialEq, Eq)]
pub struct Group {
    /// Their common name.
    pub key: Arc<str>,
    /// On one rank.
    pub share: bool,
}

/// What to do when an engine ends a generation by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnAbort {
    /// Go on from prompt and partial tokens.
    #[default]
    Continue,
    /// Answer with what there is.
    ReturnPartial,
}

/// What the next attempt starts from when a replica is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLost {
    /// The prompt.
    #[default]
    Restart,
    /// The prompt and the partial tokens.
    Resume,
}

/// How a rank is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingPolicy {
    /// By pin, else least loaded.
    #[default]
    Affinity,
    /// By a hash of the request id.
    Random,
    /// Each the next.
    RoundRobin,
    /// Least in flight.
    LeastLoaded,
    /// Where the longest beginning of the prompt was seen, else least in flight.
    Prefix,
}

/// The finished samples of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    /// In order of their index, as many as were asked for.
    pub samples: Vec<SampleOutput>,
    /// Of the prompt, where asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// What the log probabilities are taken from.
    pub logprob_mode: LogprobMode,
    /// When the last sample was finished.
    pub produced_at: SystemTime,
    /// From the request's arrival to the end of its generation.
    pub total: std::time::Duration,
    /// From the generation's start to its first token, where the engine streams.
    pub first_token: Option<std::time::Duration>,
}

/// One finished sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleOutput {
    /// Generated ids.
    pub tokens: Vec<u32>,
    /// One per generated token, where asked for.
    pub logprobs: Option<Vec<f32>>,
    /// Alternatives, where asked for.
    pub top_logprobs: Option<TopLogprobs>,
    /// The text, from an engine with a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// What ended it, where that is a stop.
    pub matched: Option<MatchedStop>,
    /// Which weights generated which tokens.
    pub weight_spans: Vec<WeightSpan>,
    /// Experts, where asked for.
    pub routed_experts: Option<RoutedExperts>,
    /// Counts.
    pub usage: Usage,
    /// Where and why.
    pub route: RouteReceipt,
}

/// Flat: entry `[position * stride + candidate]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TopLogprobs {
    /// Candidates per position.
    pub stride: u32,
    /// Their ids; padded with 0 where the engine gave fewer.
    pub token_ids: Vec<u32>,
    /// Their log probabilities; padded with NaN.
    pub logprobs: Vec<f32>,
}

/// Log probabilities of a prompt. The first token has none: NaN.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    /// One per prompt token.
    pub logprobs: Vec<f32>,
    /// Alternatives, where asked for.
    pub top: Option<TopLogprobs>,
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// End of sequence or a stop.
    Stop,
    /// max_tokens.
    Length,
    /// Ended early, and that was asked for.
    Aborted,
}

/// What ended a sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MatchedStop {
    /// A token.
    Token(u32),
    /// A string.
    Text(String),
}

/// Tokens `[start, end)` were generated by `version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightSpan {
    /// The version.
    pub version: String,
    /// First token.
    pub start: u32,
    /// One past the last token.
    pub end: u32,
}

/// Expert ids as the engine returns them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedExperts {
    /// The numbers.
    pub data: Bytes,
    /// Their type as numpy writes it.
    pub dtype: String,
    /// Their shape.
    pub shape: Vec<u32>,
}

/// Counts of tokens of one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u32,
    /// Of the prompt, from the rank's cache, as the engine reports it.
    pub cached_tokens: u32,
    /// Generated.
    pub completion_tokens: u32,
}

/// The receipt of a routing decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteReceipt {
    /// The rank that was asked.
    pub target: Target,
    /// The rank that served, as the engine says.
    pub served_rank: Option<u32>,
    /// Why it was chosen.
    pub reason: RouteReason,
    /// Every try; the last one finished.
    pub attempts: Vec<AttemptReceipt>,
    /// Cached tokens that the pin's history lets one expect.
    pub expected_cached_tokens: u32,
}

/// Why a rank was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(
    missing_docs,
    reason = "documented where users read it: sampling.proto"
)]
pub enum RouteReason {
    Pinned,
    NewKey,
    NoKey,
    ReplicaLost,
    Draining,
    Overload,
    Weights,
    Random,
    RoundRobin,
    LeastLoaded,
    Detour,
    Group,
    Prefix,
}

impl RouteReason {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Pinned,
        Self::NewKey,
        Self::NoKey,
        Self::ReplicaLost,
        Self::Draining,
        Self::Overload,
        Self::Weights,
        Self::Random,
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::Detour,
        Self::Group,
        Self::Prefix,
    ];

    /// Its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::NewKey => "new_key",
            Self::NoKey => "no_key",
            Self::ReplicaLost => "replica_lost",
            Self::Draining => "draining",
            Self::Overload => "overload",
            Self::Weights => "weights",
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::Detour => "detour",
            Self::Group => "group",
            Self::Prefix => "prefix",
        }
    }
}

/// One try of one sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptReceipt {
    /// 1 for the first.
    pub number: u32,
    /// Where.
    pub target: Target,
    /// How it failed; unset for the one that finished.
    pub failure: Option<AttemptFailure>,
    /// Its tokens that the result keeps.
    pub kept_tokens: u32,
}

/// How an attempt ended without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AttemptFailure {
    /// Connection refused: nothing was sent.
    Refused,
    /// The engine's queue was full.
    Busy,
    /// The connection broke, or the stream had no end mark.
    Lost,
    /// The engine ended it early.
    Aborted,
    /// The reply contradicted the request.
    BadReply,
    /// The rank gave no request an answer.
    Silent,
    /// Tokens came from other weights than were asked for.
    Weights,
    /// The engine did not have the adapter.
    Adapter,
}

impl AttemptFailure {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Refused,
        Self::Busy,
        Self::Lost,
        Self::Aborted,
        Self::BadReply,
        Self::Silent,
        Self::Weights,
        Self::Adapter,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Busy => "busy",
            Self::Lost => "lost",
            Self::Aborted => "ended_early",
            Self::BadReply => "bad_reply",
            Self::Silent => "silent",
            Self::Weights => "other_weights",
            Self::Adapter => "without_adapter",
        }
    }
}

/// What log probabilities are taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogprobMode {
    /// Not known.
    #[default]
    Unknown,
    /// After temperature and penalties, before top-p and top-k.
    Processed,
    /// The model's own.
    Raw,
}
