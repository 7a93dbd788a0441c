//! `sampling_params`: the keys that there are, and what their values may be.

use serde::Deserialize;
use serde_json::{Number, Value};

use crate::engine::sim::flight::Sampling;

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

impl SamplingParams {
    pub(super) fn max_new(&self) -> Option<i64> {
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

    /// What applies where nothing is said.
    pub(super) fn usual() -> Self {
        Self {
            max_new_tokens: Self::usual_max_new(),
            ..Self::default()
        }
    }

    /// Sequences asked for.
    pub(super) fn n(&self) -> usize {
        usize::try_from(self.n.unwrap_or(1))
            .unwrap_or(1)
            .clamp(1, 256)
    }

    /// As a rank needs it.
    pub(super) fn sampling(&self) -> Sampling {
        Sampling {
            max_new: self.max_new().map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
            stop_ids: self
                .stop_token_ids
                .iter()
                .flatten()
                .filter_map(|&id| u32::try_from(id).ok())
                .collect(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            min_new: 0,
            stops_past_eos: false,
            compute_from: None,
            seed: self.sampling_seed.unwrap_or(0).cast_unsigned(),
            stream_interval: self
                .stream_interval
                .and_then(|n| u32::try_from(n).ok())
                .filter(|&n| n > 0),
        }
    }

    /// The value of every parameter. All but the words for temperature, top_k,
    /// stop and min_new_tokens are inferred.
    pub(super) fn check(&self) -> Result<(), String> {
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
