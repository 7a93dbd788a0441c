//! The body of `POST /inference/v1/generate`. Nothing is left to a default of the
//! engine. vLLM ignores what it does not know, so whatever it cannot honour must
//! not get here: see [`Needs`](crate::routing::Needs).

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use crate::{
    call::{Prompt, Sampling, Structured},
    engine::{EngineError, EngineRequest, StreamMode},
};

#[derive(Serialize)]
struct Body<'a> {
    request_id: &'a str,
    token_ids: &'a [u32],
    sampling_params: Params<'a>,
    /// The model is the one that was registered; a server answers for its only
    /// one where none is named. With an adapter, its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<&'a str>,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i64>,
}

/// Without the usage at the end of a stream nothing could be checked against it.
#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct Params<'a> {
    max_tokens: u32,
    min_tokens: u32,
    temperature: f32,
    top_p: f32,
    /// 0 is off.
    top_k: u32,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repetition_penalty: f32,
    ignore_eos: bool,
    /// Text is not part of the reply.
    detokenize: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    logit_bias: &'a BTreeMap<u32, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<Constraint<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<u32>,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Constraint<'a> {
    Json(&'a str),
    Regex(&'a str),
    Grammar(&'a str),
}

impl<'a> Params<'a> {
    fn new(request: &EngineRequest, sampling: &'a Sampling) -> Self {
        let wanted = request.logprobs;
        Self {
            max_tokens: request.max_tokens,
            min_tokens: request.sampling.min_tokens.min(request.max_tokens),
            temperature: sampling.temperature.unwrap_or(1.0),
            top_p: sampling.top_p.unwrap_or(1.0),
            top_k: sampling.top_k.unwrap_or(0),
            min_p: sampling.min_p.unwrap_or(0.0),
            frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
            presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
            repetition_penalty: sampling.repetition_penalty.unwrap_or(1.0),
            ignore_eos: sampling.ignore_eos,
            detokenize: false,
            seed: request.sampling.seed,
            stop_token_ids: sampling.stop_token_ids.as_deref().filter(|s| !s.is_empty()),
            logit_bias: &sampling.logit_bias,
            structured_outputs: sampling.structured.as_ref().map(|s| match s {
                Structured::JsonSchema(schema) => Constraint::Json(schema),
                Structured::Regex(regex) => Constraint::Regex(regex),
                Structured::Ebnf(grammar) => Constraint::Grammar(grammar),
            }),
            logprobs: wanted.output.then_some(alternatives_asked(wanted.top_k)),
            prompt_logprobs: wanted.prompt.then_some(wanted.prompt_top_k),
        }
    }
}

/// How many alternatives to ask for to get the `top_k` most likely ones: vLLM
/// puts the sampled token first and cuts the list after that, so that where it is
/// not among them the last of them would be missing.
pub(super) fn alternatives_asked(top_k: u32) -> u32 {
    if top_k == 0 { 0 } else { top_k + 1 }
}

/// Whether the answer is a stream. vLLM leaves the log probabilities of the
/// prompt out of streams.
pub(super) fn streams(request: &EngineRequest) -> bool {
    request.stream != StreamMode::Plain && !request.logprobs.prompt && !request.routed_experts
}

/// Writes the body, 128k ids in about a millisecond.
///
/// # Errors
/// [`EngineError::Rejected`] for what this route cannot be asked: text, and
/// strings that end a generation.
pub(super) fn body(request: &EngineRequest) -> Result<Bytes, EngineError> {
    let sampling = &request.sampling.shared;
    let Prompt::Tokens(token_ids) = &request.prompt else {
        return Err(EngineError::Rejected(
            "this route of vLLM takes token ids, not text".into(),
        ));
    };
    if sampling.stop.as_ref().is_some_and(|s| !s.is_empty()) {
        return Err(EngineError::Rejected(
            "this route of vLLM knows no stop strings".into(),
        ));
    }
    let stream = streams(request);
    // An id has up to six digits in today's vocabularies, and a comma.
    let mut bytes = Vec::with_capacity(token_ids.len() * 7 + 1024);
    serde_json::to_writer(
        &mut bytes,
        &Body {
            request_id: request.id.as_str(),
            token_ids,
            sampling_params: Params::new(request, sampling),
            model: request.adapter.as_deref(),
            stream,
            stream_options: stream.then_some(StreamOptions {
                include_usage: true,
            }),
            // Lower is earlier there, greater is earlier here. 0 is what servers
            // without priorities take.
            priority: request.priority.map(|priority| -i64::from(priority)),
        },
    )
    .map_err(|_| EngineError::Rejected("the request cannot be written as JSON".into()))?;
    Ok(bytes.into())
}
