//! The body of `POST /generate`. Nothing is left to a default of the engine;
//! what SGLang refuses from servers without a tokenizer is left out where it
//! would change nothing; no key is written that SGLang does not know inside
//! `sampling_params`, where it refuses unknown ones.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use crate::{
    call::{Prompt, Sampling, Structured},
    engine::{EngineError, EngineRequest, StreamMode},
};

#[derive(Serialize)]
struct Body<'a> {
    rid: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    sampling_params: Params<'a>,
    stream: bool,
    /// Always in the body: the header of that purpose is ignored on this route.
    routed_dp_rank: u32,
    return_logprob: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob_start_len: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs_num: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora_path: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    return_routed_experts: bool,
}

#[derive(Serialize)]
struct Params<'a> {
    max_new_tokens: u32,
    temperature: f32,
    top_p: f32,
    /// -1 is off; 0 is refused.
    top_k: i64,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repetition_penalty: f32,
    ignore_eos: bool,
    skip_special_tokens: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_new_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampling_seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: &'a BTreeMap<u32, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    json_schema: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    regex: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ebnf: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_interval: Option<u32>,
}

impl<'a> Params<'a> {
    fn new(request: &EngineRequest, sampling: &'a Sampling) -> Self {
        let structured = sampling.structured.as_ref();
        Self {
            max_new_tokens: request.max_tokens,
            temperature: sampling.temperature.unwrap_or(1.0),
            top_p: sampling.top_p.unwrap_or(1.0),
            top_k: sampling.top_k.map_or(-1, i64::from),
            min_p: sampling.min_p.unwrap_or(0.0),
            frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
            presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
            repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
            ignore_eos: sampling.ignore_eos,
            skip_special_tokens: sampling.skip_special_tokens.unwrap_or(true),
            min_new_tokens: Some(request.sampling.min_tokens).filter(|least| *least > 0),
            sampling_seed: request.sampling.seed,
            stop: sampling.stop.as_deref().filter(|s| !s.is_empty()),
            stop_token_ids: sampling.stop_token_ids.as_deref().filter(|s| !s.is_empty()),
            logit_bias: &sampling.logit_bias,
            json_schema: structured.and_then(|s| match s {
                Structured::JsonSchema(schema) => Some(schema.as_str()),
                _ => None,
            }),
            regex: structured.and_then(|s| match s {
                Structured::Regex(regex) => Some(regex.as_str()),
                _ => None,
            }),
            ebnf: structured.and_then(|s| match s {
                Structured::Ebnf(grammar) => Some(grammar.as_str()),
                _ => None,
            }),
            stream_interval: match request.stream {
                StreamMode::Cumulative { interval } => Some(interval.max(1)),
                StreamMode::Plain | StreamMode::Incremental => None,
            },
        }
    }
}

/// Alternatives per position to ask for: SGLang has one number for prompt and
/// output, so the larger is asked for and the answer cut down.
pub(super) fn top_logprobs_num(request: &EngineRequest) -> u32 {
    let wanted = request.logprobs;
    let output = if wanted.output { wanted.top_k } else { 0 };
    let prompt = if wanted.prompt {
        wanted.prompt_top_k
    } else {
        0
    };
    output.max(prompt)
}

/// Writes the body, 128k ids in about a millisecond.
///
/// # Errors
/// [`EngineError::Rejected`] for what JSON cannot say.
pub(super) fn body(request: &EngineRequest) -> Result<Bytes, EngineError> {
    let wanted = request.logprobs;
    let logprobs = wanted.output || wanted.prompt;
    let top = top_logprobs_num(request);
    let (input_ids, text) = match &request.prompt {
        Prompt::Tokens(ids) => (Some(&**ids), None),
        Prompt::Text(text) => (None, Some(&**text)),
    };
    // An id has up to six digits in today's vocabularies, and a comma.
    let prompt_bytes = input_ids.map_or(0, |ids| ids.len() * 7) + text.map_or(0, str::len);
    let mut bytes = Vec::with_capacity(prompt_bytes + 1024);
    serde_json::to_writer(
        &mut bytes,
        &Body {
            rid: request.id.as_str(),
            input_ids,
            text,
            sampling_params: Params::new(request, &request.sampling.shared),
            stream: request.stream != StreamMode::Plain,
            routed_dp_rank: request.rank,
            return_logprob: logprobs,
            logprob_start_len: logprobs.then_some(if wanted.prompt { 0 } else { -1 }),
            top_logprobs_num: (top > 0).then_some(top),
            lora_path: request.adapter.as_deref(),
            priority: request.priority,
            return_routed_experts: request.routed_experts,
        },
    )
    .map_err(|_| EngineError::Rejected("the request cannot be written as JSON".into()))?;
    Ok(bytes.into())
}
