//! vLLM's reply and stream frame, as JSON. Parsing only: `transcript` checks.

use std::collections::BTreeMap;

use crate::engine::checks::WireSpan;

use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;

/// A reply, or one frame of a stream.
#[derive(Deserialize)]
pub(super) struct Frame<'a> {
    pub(super) request_id: Option<String>,
    pub(super) choices: Option<Vec<Choice<'a>>>,
    pub(super) usage: Option<WireUsage>,
    #[serde(borrow)]
    pub(super) prompt_logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    pub(super) index: u32,
    pub(super) finish_reason: Option<String>,
    pub(super) stop_reason: Option<StopReason>,
    pub(super) token_ids: Option<Vec<u32>>,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) weight_versions: Option<Vec<WireSpan>>,
    #[serde(borrow)]
    pub(super) routed_experts: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum StopReason {
    Token(u32),
    Text(String),
    Other(IgnoredAny),
}

#[derive(Deserialize)]
pub(super) struct Logprobs {
    pub(super) content: Option<Vec<Position>>,
}

/// One generated token.
#[derive(Deserialize)]
pub(super) struct Position {
    pub(super) token_id: u32,
    pub(super) logprob: Option<f32>,
    #[serde(default)]
    pub(super) top_logprobs: Vec<Candidate>,
}

#[derive(Clone, Copy, Deserialize)]
pub(super) struct Candidate {
    pub(super) token_id: u32,
    pub(super) logprob: Option<f32>,
    /// 1 is the most likely.
    pub(super) rank: Option<u32>,
}

/// One position of a prompt: by token id.
pub(super) type PromptPosition = Option<BTreeMap<u32, PromptCandidate>>;

#[derive(Clone, Copy, Deserialize)]
pub(super) struct PromptCandidate {
    pub(super) logprob: Option<f32>,
    pub(super) rank: Option<u32>,
}

#[derive(Clone, Copy, Deserialize)]
pub(super) struct WireUsage {
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: Option<u32>,
    pub(super) prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Deserialize)]
pub(super) struct Details {
    pub(super) cached_tokens: Option<u32>,
}
