//! Reads a request as the real front does, and refuses it in its words. Words that
//! no recording shows are marked "inferred".

use std::borrow::Cow;

use axum::response::Response;
use serde::{Deserialize, Deserializer, de::IgnoredAny};
use serde_json::{Value, json};

use crate::engine::sim::{
    adapters::Adapters, config::SimConfig, flight::Sampling, generate::json_reply,
};

/// Most alternatives that may be asked for.
const MAX_LOGPROBS: i64 = 20;

/// A refusal: of a field, or of a value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Fault {
    status: u16,
    kind: &'static str,
    message: String,
    param: Option<Cow<'static, str>>,
    /// It is found once the reply may have begun: a stream ends with it.
    pub(super) late: bool,
}

impl Fault {
    pub(super) fn validation(param: impl Into<Cow<'static, str>>, item: &str) -> Self {
        Self {
            status: 400,
            kind: "Bad Request",
            message: format!("1 validation error:\n  {item}"),
            param: Some(param.into()),
            late: false,
        }
    }

    fn value(param: Option<&'static str>, message: String) -> Self {
        Self {
            status: 400,
            kind: "BadRequestError",
            message,
            param: param.map(Cow::Borrowed),
            late: false,
        }
    }

    /// Of a change of what is loaded.
    pub(super) fn input(status: u16, message: String) -> Self {
        Self {
            status,
            kind: if status == 404 {
                "NotFoundError"
            } else {
                "InvalidUserInput"
            },
            ..Self::value(None, message)
        }
    }

    fn late(message: String) -> Self {
        Self {
            late: true,
            ..Self::value(None, message)
        }
    }

    /// Inferred.
    pub(super) fn busy(message: &str) -> Self {
        Self {
            status: 503,
            kind: "ServiceUnavailableError",
            message: message.into(),
            param: None,
            late: true,
        }
    }

    /// The engine behind the front is dead.
    pub(super) fn dead() -> Self {
        Self {
            status: 500,
            kind: "InternalServerError",
            message: "EngineCore encountered an issue. See stack trace (above) for the root cause."
                .into(),
            param: None,
            late: true,
        }
    }

    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }})
    }

    pub(super) fn reply(&self) -> Response {
        json_reply(self.status, &self.body())
    }
}

/// A request, as far as it is looked at. Everything else is ignored.
#[derive(Deserialize)]
pub(super) struct Request {
    pub(super) request_id: Option<String>,
    model: Option<String>,
    pub(super) token_ids: Vec<i64>,
    #[serde(default, deserialize_with = "given")]
    sampling_params: Option<Params>,
    #[serde(default)]
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub(super) cache_salt: Option<String>,
    pub(super) priority: Option<i64>,
    #[serde(default)]
    pub(super) return_token_ids: Option<bool>,
}

fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Params>, D::Error> {
    Params::deserialize(deserializer).map(Some)
}

#[derive(Clone, Copy, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Params {
    n: Option<usize>,
    max_tokens: Option<i64>,
    min_tokens: Option<u32>,
    temperature: Option<f64>,
    seed: Option<i64>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: bool,
    logprobs: Option<i64>,
    prompt_logprobs: Option<i64>,
}

/// How the reply is written.
#[derive(Clone, Copy)]
pub(super) struct Style {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    pub(super) return_token_ids: bool,
    /// Alternatives of each generated token.
    pub(super) logprobs: Option<usize>,
    /// Alternatives of each prompt token.
    pub(super) prompt_logprobs: Option<usize>,
}

/// JSON, and what must be there.
pub(super) fn parse(body: &[u8]) -> Result<Request, Fault> {
    if let Err(error) = serde_json::from_slice::<IgnoredAny>(body) {
        let at = error.column();
        return Err(Fault::validation(
            format!("body.{at}"),
            &format!(
                "{{'type': 'json_invalid', 'loc': 'body.{at}', 'msg': 'JSON decode error', \
                 'input': '<dict of 0 items>', 'ctx': {{'error': \"Expecting ',' delimiter\"}}}}"
            ),
        ));
    }
    let request: Request = serde_json::from_slice(body)
        // Inferred.
        .map_err(|error| Fault::validation("body", &error.to_string()))?;
    if request.sampling_params.is_none() {
        return Err(Fault::validation(
            "body.sampling_params",
            "{'type': 'missing', 'loc': 'body.sampling_params', 'msg': 'Field required', 'input': \
             '<dict of 2 items>'}",
        ));
    }
    if request.token_ids.is_empty() {
        return Err(Fault::validation(
            "body.token_ids",
            "{'type': 'too_short', 'loc': 'body.token_ids', 'msg': 'List should have at least 1 \
             item after validation, not 0', 'input': '<list of 0 items>', 'ctx': {'field_type': \
             'List', 'min_length': 1, 'actual_length': 0}}",
        ));
    }
    if request.token_ids.iter().any(|id| *id < 0) {
        return Err(Fault::validation(
            "body.token_ids",
            &format!(
                "{{'type': 'value_error', 'loc': 'body.token_ids', 'msg': 'Value error, token_ids \
                 must not contain negative values', 'input': '<list of {} items>', 'ctx': \
                 {{'error': ValueError('token_ids must not contain negative values')}}}}",
                request.token_ids.len()
            ),
        ));
    }
    Ok(request)
}

impl Request {
    fn params(&self) -> Result<&Params, Fault> {
        let missing = || Fault::validation("body.sampling_params", "missing");
        self.sampling_params.as_ref().ok_or_else(missing)
    }

    /// Samples of the prompt.
    pub(super) fn n(&self) -> usize {
        let n = self.sampling_params.as_ref().and_then(|p| p.n);
        n.unwrap_or(1).clamp(1, 256)
    }

    pub(super) fn style(&self) -> Style {
        let options = self.stream_options;
        let count = |n: Option<i64>| n.map(|n| usize::try_from(n).unwrap_or(0));
        let params = self.sampling_params.as_ref();
        let include_usage = options.and_then(|o| o.include_usage).unwrap_or(false);
        Style {
            stream: self.stream.unwrap_or(false),
            include_usage,
            continuous_usage: include_usage
                && options
                    .and_then(|o| o.continuous_usage_stats)
                    .unwrap_or(false),
            return_token_ids: self.return_token_ids.unwrap_or(false),
            logprobs: count(params.and_then(|p| p.logprobs)),
            prompt_logprobs: count(params.and_then(|p| p.prompt_logprobs)),
        }
    }

    /// The adapter that is asked for.
    pub(super) fn adapter(&self, config: &SimConfig) -> Option<&str> {
        self.model.as_deref().filter(|model| *model != config.model)
    }

    /// What is found before the reply begins.
    pub(super) fn check(&self, config: &SimConfig, adapters: &Adapters) -> Result<(), Fault> {
        if let Some(model) = self.adapter(config)
            && !adapters.is_loaded(model)
        {
            return Err(Fault {
                status: 404,
                kind: "NotFoundError",
                message: format!(
                    "The model `{model}` does not exist. Valid aliases: {}.",
                    config.model
                ),
                param: Some("model".into()),
                late: false,
            });
        }
        let params = self.params()?;
        if let Some(temperature) = params.temperature
            && !(0.0..=2.0).contains(&temperature)
        {
            let what = if temperature < 0.0 {
                "be non-negative"
            } else {
                "be in [0, 2]"
            };
            return Err(Fault::value(
                Some("temperature"),
                format!(
                    "temperature must {what}, got {temperature:?}. (parameter=temperature, \
                     value={temperature:?})"
                ),
            ));
        }
        if let Some(most) = params.max_tokens.filter(|n| *n < 1) {
            return Err(Fault::value(
                Some("max_tokens"),
                format!(
                    "max_tokens must be at least 1, got {most}. (parameter=max_tokens, \
                     value={most})"
                ),
            ));
        }
        if let Some(wanted) = params.logprobs.filter(|n| *n > MAX_LOGPROBS) {
            return Err(Fault::value(
                Some("logprobs"),
                format!(
                    "Requested sample logprobs of {wanted}, which is greater than max allowed: \
                     {MAX_LOGPROBS} (parameter=logprobs, value={wanted})"
                ),
            ));
        }
        Ok(())
    }

    /// The rank that the header names. What is no number is ignored.
    pub(super) fn rank(header: Option<&str>, ranks: u32) -> Result<Option<u32>, Fault> {
        let Some(rank) = header.and_then(|h| h.trim().parse::<i64>().ok()) else {
            return Ok(None);
        };
        match u32::try_from(rank) {
            Ok(rank) if rank < ranks => Ok(Some(rank)),
            _ => Err(Fault::late(format!(
                "data_parallel_rank {rank} is out of range [0, {ranks})."
            ))),
        }
    }

    /// What is found by the engine, and how it samples.
    pub(super) fn sampling(&self, config: &SimConfig) -> Result<Sampling, Fault> {
        let (len, most) = (self.token_ids.len(), config.context_length as usize);
        if len > most {
            return Err(Fault::late(format!(
                "The decoder prompt (length {len}) is longer than the maximum model length of \
                 {most}. Make sure that `max_model_len` is no smaller than the number of text \
                 tokens."
            )));
        }
        if len == most {
            // Inferred.
            return Err(Fault::late(format!(
                "The decoder prompt (length {len}) plus the number of requested output tokens (at \
                 least 1) is longer than the maximum model length of {most}."
            )));
        }
        let params = self.params()?;
        let room = u32::try_from(most - len).unwrap_or(u32::MAX);
        let asked = params.max_tokens.and_then(|n| u32::try_from(n).ok());
        Ok(Sampling {
            max_new: Some(asked.unwrap_or(room).min(room)),
            min_new: params.min_tokens.unwrap_or(0),
            stop_ids: params.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: params.ignore_eos,
            stops_past_eos: true,
            seed: params.seed.unwrap_or(0).cast_unsigned(),
            stream_interval: None,
            // Of a prompt that is scored nothing is taken from the cache.
            compute_from: params.prompt_logprobs.map(|_| 0),
        })
    }
}
