//! Reads a `/generate` request as the real engine does, and refuses it in the
//! real engine's words.
//!
//! Three gates stand one behind the other. The first reads JSON and the shape
//! of `input_ids`; the second knows types and the keys of `sampling_params`
//! (unknown keys elsewhere are ignored); what both refuse is always a plain
//! 400. The third looks at values: what it refuses is a 400, or for a stream a
//! 200 with an error frame. Words that no recording shows are marked [inf].

use std::fmt;

use axum::http::StatusCode;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Number, Value, json};

use super::config::SimConfig;

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
    pub(super) sampling: Vec<SamplingParams>,
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

#[derive(Debug, Default)]
enum Ids {
    #[default]
    Absent,
    One(Vec<i64>),
    Many(Vec<Vec<i64>>),
    /// Its type, as Python names it.
    Wrong(&'static str),
}

/// The body with `input_ids` read straight into numbers: a prompt of 100,000
/// ids must not become 100,000 JSON values first.
#[derive(Default)]
struct Body {
    ids: Ids,
    rest: serde_json::Map<String, Value>,
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Body;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
                let mut body = Body::default();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "input_ids" {
                        body.ids = map.next_value()?;
                    } else {
                        body.rest.insert(key, map.next_value()?);
                    }
                }
                Ok(body)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Shape;
        impl<'de> Visitor<'de> for Shape {
            type Value = Ids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of token ids, or of such lists")
            }

            fn visit_unit<E>(self) -> Result<Ids, E> {
                Ok(Ids::Absent)
            }

            fn visit_str<E>(self, _: &str) -> Result<Ids, E> {
                Ok(Ids::Wrong("str"))
            }

            fn visit_bool<E>(self, _: bool) -> Result<Ids, E> {
                Ok(Ids::Wrong("bool"))
            }

            fn visit_i64<E>(self, _: i64) -> Result<Ids, E> {
                Ok(Ids::Wrong("int"))
            }

            fn visit_u64<E>(self, _: u64) -> Result<Ids, E> {
                Ok(Ids::Wrong("int"))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Ids, E> {
                Ok(Ids::Wrong("float"))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ids, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Ids::Wrong("dict"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Ids, A::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum First {
                    Id(i64),
                    List(Vec<i64>),
                }
                match seq.next_element::<First>()? {
                    None => Ok(Ids::One(Vec::new())),
                    Some(First::Id(first)) => {
                        let mut ids = vec![first];
                        while let Some(id) = seq.next_element()? {
                            ids.push(id);
                        }
                        Ok(Ids::One(ids))
                    }
                    Some(First::List(first)) => {
                        let mut lists = vec![first];
                        while let Some(list) = seq.next_element()? {
                            lists.push(list);
                        }
                        Ok(Ids::Many(lists))
                    }
                }
            }
        }
        deserializer.deserialize_any(Shape)
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

/// All keys that the real engine knows, in its order: the refusal lists them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SamplingParams {
    #[serde(default = "SamplingParams::usual_max_new")]
    max_new_tokens: Option<i64>,
    stop: Option<StopStrings>,
    stop_token_ids: Option<Vec<i64>>,
    stop_regex: Option<Value>,
    temperature: Option<Number>,
    top_p: Option<Number>,
    top_k: Option<i64>,
    min_p: Option<Number>,
    frequency_penalty: Option<Number>,
    presence_penalty: Option<Number>,
    repetition_penalty: Option<Number>,
    min_new_tokens: Option<i64>,
    n: Option<i64>,
    json_schema: Option<Value>,
    regex: Option<Value>,
    ebnf: Option<Value>,
    structural_tag: Option<Value>,
    ignore_eos: Option<bool>,
    skip_special_tokens: Option<bool>,
    spaces_between_special_tokens: Option<bool>,
    no_stop_trim: Option<bool>,
    stream_interval: Option<i64>,
    logit_bias: Option<Value>,
    sampling_seed: Option<i64>,
    custom_params: Option<Value>,
    beam_width: Option<Value>,
    watermark: Option<Value>,
    choice: Option<Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum StopStrings {
    One(String),
    Many(Vec<String>),
}

/// Sampling as a rank needs it.
#[derive(Clone, Debug)]
pub(super) struct Sampling {
    /// Unset: as many as fit.
    pub(super) max_new: Option<u32>,
    pub(super) stop_ids: Vec<u32>,
    pub(super) ignore_eos: bool,
    pub(super) seed: u64,
    pub(super) stream_interval: Option<u32>,
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
        None | Some(Value::Null) => vec![SamplingParams {
            max_new_tokens: SamplingParams::usual_max_new(),
            ..SamplingParams::default()
        }],
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
        let most = self.sampling.iter().filter_map(|s| s.n).max().unwrap_or(1);
        usize::try_from(most).unwrap_or(1).clamp(1, 256)
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
            // [inf]
            return message("The length of rids must be equal to the batch size.");
        }
        if self.sampling.len() != 1 && self.sampling.len() != prompts {
            // [inf]
            return message("The length of sampling_params must be equal to the batch size.");
        }
        Ok(())
    }

    /// Everything else, prompt by prompt.
    pub(super) fn check_values(&self, config: &SimConfig) -> Result<(), Fault> {
        if let Some(lora) = &self.lora {
            return Err(Fault::Message(format!(
                "LoRA adapter '{lora}' was requested, but LoRA is not enabled. Please launch the \
                 server with --enable-lora flag and preload adapters using --lora-paths or \
                 /load_lora_adapter endpoint."
            )));
        }
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
        let params = self.params(at);
        Sampling {
            max_new: params
                .max_new()
                .map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
            stop_ids: params
                .stop_token_ids
                .iter()
                .flatten()
                .filter_map(|&id| u32::try_from(id).ok())
                .collect(),
            ignore_eos: params.ignore_eos.unwrap_or(false),
            seed: params.sampling_seed.unwrap_or(0).cast_unsigned(),
            stream_interval: params
                .stream_interval
                .and_then(|n| u32::try_from(n).ok())
                .filter(|&n| n > 0),
        }
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
        // [inf]
        return Err(format!(
            "Input length ({len} tokens) exceeds the maximum allowed length ({most} tokens). Use a \
             shorter input or enable --allow-auto-truncate."
        ));
    }
    Ok(())
}

impl SamplingParams {
    fn max_new(&self) -> Option<i64> {
        self.max_new_tokens
    }

    /// Where it is not said. Where it is null: as many as fit.
    #[expect(
        clippy::unnecessary_wraps,
        reason = "a default of this type is asked for"
    )]
    fn usual_max_new() -> Option<i64> {
        Some(128)
    }

    /// The value of every parameter. All but the words for temperature, top_k,
    /// stop and min_new_tokens are [inf].
    fn check(&self) -> Result<(), String> {
        let number = |n: &Option<Number>, default: f64| {
            n.as_ref().and_then(Number::as_f64).unwrap_or(default)
        };
        let said = |n: &Option<Number>| n.as_ref().map(ToString::to_string).unwrap_or_default();
        if number(&self.temperature, 1.0) < 0.0 {
            return Err(format!(
                "temperature must be a non-negative finite number, got {}.",
                said(&self.temperature)
            ));
        }
        let top_p = number(&self.top_p, 1.0);
        if top_p <= 0.0 || top_p > 1.0 {
            return Err(format!(
                "top_p must be in (0, 1], got {}.",
                said(&self.top_p)
            ));
        }
        if !(0.0..=1.0).contains(&number(&self.min_p, 0.0)) {
            return Err(format!(
                "min_p must be in [0, 1], got {}.",
                said(&self.min_p)
            ));
        }
        let top_k = self.top_k.unwrap_or(-1);
        if top_k < 1 && top_k != -1 {
            return Err(format!(
                "top_k must be -1 (disable) or at least 1, got {top_k}."
            ));
        }
        for (name, value, range) in [
            ("frequency_penalty", &self.frequency_penalty, -2.0..=2.0),
            ("presence_penalty", &self.presence_penalty, -2.0..=2.0),
        ] {
            if !range.contains(&number(value, 0.0)) {
                return Err(format!("{name} must be in [-2, 2], got {}.", said(value)));
            }
        }
        if !(0.0..=2.0).contains(&number(&self.repetition_penalty, 1.0)) {
            return Err(format!(
                "repetition_penalty must be in [0, 2], got {}.",
                said(&self.repetition_penalty)
            ));
        }
        if let Some(new) = self.max_new().filter(|&n| n < 0) {
            return Err(format!("max_new_tokens must be at least 0, got {new}."));
        }
        let least = self.min_new_tokens.unwrap_or(0);
        if least < 0 || self.max_new().is_some_and(|most| least > most) {
            return Err(format!(
                "min_new_tokens must be in [0, max_new_tokens], got {least}."
            ));
        }
        if least > 0 {
            return Err(format!(
                "min_new_tokens={least} is unavailable when skip_tokenizer_init=True (requires \
                 tokenizer for eos_token_id)."
            ));
        }
        let stops = match &self.stop {
            None => &[][..],
            Some(StopStrings::One(one)) if one.is_empty() => &[],
            Some(StopStrings::One(one)) => std::slice::from_ref(one),
            Some(StopStrings::Many(many)) => many,
        };
        if !stops.is_empty() {
            let listed: Vec<String> = stops.iter().map(|s| format!("'{s}'")).collect();
            return Err(format!(
                "stop=[{}] is unavailable when skip_tokenizer_init=True (requires tokenizer to \
                 decode tokens to text for matching).",
                listed.join(", ")
            ));
        }
        Ok(())
    }
}
