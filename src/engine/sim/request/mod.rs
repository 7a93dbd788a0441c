//! Reads a `/generate` request as the real engine does, and refuses it in the
//! real engine's words.
//!
//! Three gates stand one behind the other. The first reads JSON and the shape
//! of `input_ids`; the second knows types and the keys of `sampling_params`
//! (unknown keys elsewhere are ignored); what both refuse is always a plain
//! 400. The third looks at values: what it refuses is a 400, or for a stream a
//! 200 with an error frame. Words that no recording shows are marked "inferred".

mod body;
mod sampling;

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use self::{
    body::{Body, Ids},
    sampling::SamplingParams,
};
use super::{config::SimConfig, flight::Sampling};

/// A request that the first two gates let through.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) stream: bool,
    /// One for every prompt where given.
    pub(super) rids: Option<Vec<String>>,
    pub(super) rank: Option<i64>,
    pub(super) prompts: Option<Vec<Vec<i64>>>,
    /// The reply is a list.
    pub(super) list: bool,
    pub(super) text: bool,
    /// One for all prompts, or one for each.
    sampling: Vec<SamplingParams>,
    pub(super) return_logprob: bool,
    pub(super) logprob_start: i64,
    pub(super) top_logprobs: usize,
    pub(super) lora: Option<String>,
    pub(super) namespace: String,
    pub(super) priority: i64,
}

/// A refusal.
#[derive(Debug, PartialEq)]
pub(super) enum Fault {
    /// Of one of the first two gates: a plain 400.
    Plain(Value),
    /// Of a value: 400, or an error frame.
    Message(String),
}

impl Fault {
    pub(super) fn body(&self) -> Value {
        match self {
            Self::Plain(body) => body.clone(),
            Self::Message(message) => json!({"error": {"message": message}}),
        }
    }

    pub(super) fn frame(&self) -> Value {
        match self {
            Self::Plain(body) => body.clone(),
            Self::Message(message) => json!({"error": {
                "message": message,
                "type": "invalid_request_error",
                "code": StatusCode::BAD_REQUEST.as_u16(),
                "retryable": false,
            }}),
        }
    }

    fn validation(item: &str) -> Self {
        let message = format!(
            "1 validation error:\n  {item}\n\n  File \"http_server.py\", line 928, in \
             generate_request\n    POST /generate [{item}]"
        );
        Self::Plain(json!({
            "object": "error",
            "message": message,
            "type": "Bad Request",
            "param": null,
            "code": 400,
        }))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// The first two gates.
pub(super) fn parse(body: &[u8]) -> Result<Parsed, Fault> {
    let Body { ids, mut rest } = serde_json::from_slice(body).map_err(|error| {
        if error.is_data() {
            return Fault::Plain(json!({"error": without_position(&error.to_string())}));
        }
        let what = if error.is_eof() {
            "unexpected end of data".to_owned()
        } else {
            without_position(&error.to_string())
        };
        let at = offset(body, error.line(), error.column());
        Fault::validation(&format!(
            "{{'type': 'json_invalid', 'loc': ('body', {at}), 'msg': 'JSON decode error', \
             'input': {{}}, 'ctx': {{'error': '{what}'}}}}"
        ))
    })?;
    if let Ids::Wrong(kind) = ids {
        let input = match kind {
            "dict" => "{}".to_owned(),
            _ => "...".to_owned(),
        };
        return Err(Fault::validation(&format!(
            "{{'type': 'value_error', 'loc': ('body', 'input_ids'), 'msg': 'Value error, must be \
             list or null; got {kind}', 'input': {input}, 'ctx': {{'error': ValueError('must be \
             list or null; got {kind}')}}}}"
        )));
    }
    let rank = match take::<i64>(&mut rest, "routed_dp_rank")? {
        Some(rank) => Some(rank),
        None => take(&mut rest, "data_parallel_rank")?,
    };
    let sampling = match rest.remove("sampling_params") {
        None | Some(Value::Null) => vec![SamplingParams::usual()],
        Some(Value::Array(list)) => list
            .into_iter()
            .map(typed)
            .collect::<Result<Vec<SamplingParams>, _>>()?,
        Some(one) => vec![typed(one)?],
    };
    let (prompts, list) = match ids {
        Ids::Absent | Ids::Wrong(_) => (None, false),
        Ids::One(ids) => (Some(vec![ids]), false),
        Ids::Many(lists) => (Some(lists), true),
    };
    let key = |rest: &mut serde_json::Map<String, Value>, name| {
        take::<String>(rest, name).map(Option::unwrap_or_default)
    };
    let (extra, salt) = (key(&mut rest, "extra_key")?, key(&mut rest, "cache_salt")?);
    let namespace = if extra.is_empty() && salt.is_empty() {
        String::new()
    } else {
        // The length keeps ("a", "bc") and ("ab", "c") apart.
        format!("{}:{extra}{salt}", extra.len())
    };
    Ok(Parsed {
        stream: take(&mut rest, "stream")?.unwrap_or(false),
        rids: take::<OneOrMany<String>>(&mut rest, "rid")?.map(OneOrMany::into_vec),
        rank,
        prompts,
        list,
        text: rest.get("text").is_some_and(|text| !text.is_null()),
        sampling,
        return_logprob: take(&mut rest, "return_logprob")?.unwrap_or(false),
        logprob_start: take(&mut rest, "logprob_start_len")?.unwrap_or(-1),
        top_logprobs: take(&mut rest, "top_logprobs_num")?.unwrap_or(0),
        lora: take(&mut rest, "lora_path")?,
        namespace,
        priority: take(&mut rest, "priority")?.unwrap_or(0),
    })
}

fn take<T: for<'de> Deserialize<'de>>(
    rest: &mut serde_json::Map<String, Value>,
    name: &str,
) -> Result<Option<T>, Fault> {
    match rest.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => typed(value).map(Some),
    }
}

fn typed<T: for<'de> Deserialize<'de>>(value: Value) -> Result<T, Fault> {
    serde_json::from_value(value).map_err(|error| Fault::Plain(json!({"error": error.to_string()})))
}

fn without_position(message: &str) -> String {
    match message.rfind(" at line ") {
        Some(at) => message[..at].to_owned(),
        None => message.to_owned(),
    }
}

/// Bytes before the fault.
fn offset(body: &[u8], line: usize, column: usize) -> usize {
    let before: usize = body
        .split_inclusive(|&b| b == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    before + column
}

impl Parsed {
    /// How many sequences every prompt asks for.
    pub(super) fn n(&self) -> usize {
        self.sampling
            .iter()
            .map(SamplingParams::n)
            .max()
            .unwrap_or(1)
    }

    /// What is known to be wrong before the request is held back by a pause.
    pub(super) fn check_shape(&self, ranks: u32) -> Result<(), Fault> {
        let message = |text: &str| Err(Fault::Message(text.into()));
        match &self.prompts {
            None if !self.text => {
                return message("Either text, input_ids or input_embeds should be provided.");
            }
            Some(prompts) if prompts.iter().any(Vec::is_empty) => {
                return message("input_ids cannot be empty.");
            }
            _ => {}
        }
        if let Some(rank) = self.rank
            && !(0..i64::from(ranks)).contains(&rank)
        {
            return Err(Fault::Message(format!(
                "routed_dp_rank={rank} out of range [0, {ranks})"
            )));
        }
        let prompts = self.prompts.as_ref().map_or(1, Vec::len);
        if self.rids.as_ref().is_some_and(|r| r.len() != prompts) {
            // Inferred.
            return message("The length of rids must be equal to the batch size.");
        }
        if self.sampling.len() != 1 && self.sampling.len() != prompts {
            // Inferred.
            return message("The length of sampling_params must be equal to the batch size.");
        }
        Ok(())
    }

    /// Everything else, prompt by prompt.
    pub(super) fn check_values(&self, config: &SimConfig) -> Result<(), Fault> {
        let Some(prompts) = &self.prompts else {
            return Err(Fault::Message(
                "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. \
                 Please provide input_ids or re-initialize the engine with \
                 skip_tokenizer_init=False."
                    .into(),
            ));
        };
        for (at, prompt) in prompts.iter().enumerate() {
            let params = self.params(at);
            check_lengths(prompt.len(), params, config).map_err(Fault::Message)?;
            params.check().map_err(Fault::Message)?;
        }
        Ok(())
    }

    fn params(&self, at: usize) -> &SamplingParams {
        self.sampling.get(at).unwrap_or(&self.sampling[0])
    }

    /// How prompt `at` is sampled.
    pub(super) fn sampling(&self, at: usize) -> Sampling {
        self.params(at).sampling()
    }
}

fn check_lengths(len: usize, params: &SamplingParams, config: &SimConfig) -> Result<(), String> {
    let context = config.context_length as usize;
    if len >= context {
        return Err(format!(
            "The input ({len} tokens) is longer than the model's context length ({context} \
             tokens)."
        ));
    }
    if let Some(new) = params.max_new().and_then(|n| usize::try_from(n).ok())
        && len.saturating_add(new) > context
    {
        let total = len.saturating_add(new);
        return Err(format!(
            "Requested token count exceeds the model's maximum context length of {context} \
             tokens. You requested a total of {total} tokens: {len} tokens from the input \
             messages and {new} tokens for the completion. Please reduce the number of tokens in \
             the input messages or the completion to fit within the limit."
        ));
    }
    let most = config.max_req_input_len();
    if len > most {
        // Inferred.
        return Err(format!(
            "Input length ({len} tokens) exceeds the maximum allowed length ({most} tokens). Use a \
             shorter input or enable --allow-auto-truncate."
        ));
    }
    Ok(())
}
