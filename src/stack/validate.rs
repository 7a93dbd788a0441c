//! What can be said of a request without knowing the fleet: keys, ranges,
//! lengths. All that is wrong is said at once, and nothing of it was stored or
//! sent.

use std::{
    ops::RangeInclusive,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::{BoxFuture, Either, Ready, ready};
use tower::Service;

use super::generation::Ticket;
use crate::{
    call::{Prompt, SampleCall, SampleParams, Sampling, Structured, WeightsConstraint},
    error::{Error, Reason, Violation},
};

const MAX_IDEMPOTENCY_KEY: usize = 128;
const MAX_NAME: usize = 256;
const MAX_SAMPLES: u32 = 128;
const MAX_TOKENS: u32 = 1 << 20;
const MAX_TOP_K: u32 = 1 << 20;
const MAX_SEED: u64 = 1 << 62;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
const MAX_STOP_TOKENS: usize = 64;
const MAX_LOGIT_BIAS: usize = 1024;
const MAX_STRUCTURED_BYTES: usize = 65_536;
const MAX_TOP_LOGPROBS: u32 = 20;
const MAX_PRIORITY: i32 = 1000;

/// A call whose every field is in range. Only [`Validate`] makes one.
#[derive(Clone)]
pub struct ValidCall(SampleCall);

impl ValidCall {
    /// The call.
    pub fn call(&self) -> &SampleCall {
        &self.0
    }

    /// What it asks for.
    pub fn params(&self) -> &Arc<SampleParams> {
        &self.0.params
    }

    /// Checks a call.
    ///
    /// # Errors
    /// INVALID_REQUEST with every violation.
    pub fn check(call: SampleCall) -> Result<Self, Error> {
        let violations = violations(&call);
        if violations.is_empty() {
            Ok(Self(call))
        } else {
            Err(Error::invalid(Reason::InvalidRequest, violations))
        }
    }
}

/// The layer.
#[derive(Clone, Debug)]
pub struct Validate<S> {
    inner: S,
}

impl<S> Validate<S> {
    /// Before `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S> Service<SampleCall> for Validate<S>
where
    S: Service<
            ValidCall,
            Response = Ticket,
            Error = Error,
            Future = BoxFuture<'static, Result<Ticket, Error>>,
        >,
{
    type Response = Ticket;
    type Error = Error;
    type Future = Either<Ready<Result<Ticket, Error>>, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, call: SampleCall) -> Self::Future {
        match ValidCall::check(call) {
            Ok(valid) => Either::Right(self.inner.call(valid)),
            Err(error) => Either::Left(ready(Err(error))),
        }
    }
}

/// What is wrong with names that a caller gives outside a sampling request, by
/// the same rules: each 1 to 256 characters and not blank, where it is given.
pub fn names(names: &[(&'static str, Option<&str>)]) -> Vec<Violation> {
    let mut faults = Faults::default();
    for (field, name) in names {
        if let Some(name) = name {
            faults.name(field, name);
        }
    }
    faults.0
}

/// What is wrong with an idempotency key given by itself.
pub fn idempotency_key_faults(key: &str) -> Vec<Violation> {
    let mut faults = Faults::default();
    idempotency_key(&mut faults, "idempotency_key", key);
    faults.0
}

/// Collects violations.
#[derive(Default)]
struct Faults(Vec<Violation>);

impl Faults {
    fn add(&mut self, field: &'static str, description: impl Into<String>) {
        self.0.push(Violation::new(field, description));
    }

    fn name(&mut self, field: &'static str, value: &str) {
        let length = value.chars().take(MAX_NAME + 1).count();
        if length > MAX_NAME {
            self.add(field, format!("is longer than {MAX_NAME} characters"));
        } else if value.trim().is_empty() {
            self.add(field, "is empty or blank: leave it out or fill it in");
        }
    }

    fn float(&mut self, field: &'static str, value: Option<f32>, range: RangeInclusive<f32>) {
        let Some(value) = value else { return };
        if !range.contains(&value) {
            self.add(
                field,
                format!(
                    "is {value}, must be from {} to {}",
                    range.start(),
                    range.end()
                ),
            );
        }
    }

    /// As `float`, with the lower bound itself excluded.
    fn float_above(&mut self, field: &'static str, value: Option<f32>, above: f32, most: f32) {
        let Some(value) = value else { return };
        // Written so that a value that is not a number is a violation too.
        if !(value > above && value <= most) {
            self.add(
                field,
                format!("is {value}, must be greater than {above} and at most {most}"),
            );
        }
    }

    fn count<T: Into<u64> + Copy>(
        &mut self,
        field: &'static str,
        value: Option<T>,
        range: RangeInclusive<u64>,
    ) {
        let Some(value) = value.map(Into::into) else {
            return;
        };
        if !range.contains(&value) {
            self.add(
                field,
                format!(
                    "is {value}, must be from {} to {}",
                    range.start(),
                    range.end()
                ),
            );
        }
    }
}

fn violations(call: &SampleCall) -> Vec<Violation> {
    let mut faults = Faults(call.malformed.clone());
    let params = &call.params;

    if let Some(key) = &call.idempotency_key {
        idempotency_key(&mut faults, "idempotency_key", key.as_str());
    }
    if let Some(key) = &params.affinity_key {
        faults.name("cache_affinity_key", key.as_str());
    }
    if let Some(model) = &params.model {
        faults.name("model", model);
    }
    if let Some(adapter) = &params.adapter {
        faults.name("adapter", adapter);
    }
    prompt(&mut faults, params, call);
    faults.count(
        "num_samples",
        Some(params.num_samples),
        1..=u64::from(MAX_SAMPLES),
    );
    if !(-MAX_PRIORITY..=MAX_PRIORITY).contains(&call.priority) {
        faults.add(
            "priority",
            format!(
                "is {}, must be from -{MAX_PRIORITY} to {MAX_PRIORITY}",
                call.priority
            ),
        );
    }
    logprobs(&mut faults, params);
    if let Some(WeightsConstraint::Exact(version)) = &params.weights.constraint {
        faults.name("weights.exact", version);
    }
    if params.weights.wait && params.weights.constraint.is_none() {
        faults.add(
            "weights.wait",
            "is set without at_least or exact to wait for",
        );
    }
    if let Some(group) = &params.group {
        faults.name("group.key", &group.key);
    }
    sampling(&mut faults, &params.sampling);
    faults.0
}

/// The rule for an idempotency key, wherever one is given.
fn idempotency_key(faults: &mut Faults, field: &'static str, key: &str) {
    if key.is_empty() || key.len() > MAX_IDEMPOTENCY_KEY {
        faults.add(
            field,
            format!("must have 1 to {MAX_IDEMPOTENCY_KEY} characters; leave it out to send none"),
        );
    }
    if !key.bytes().all(|b| b.is_ascii_graphic()) {
        faults.add(
            field,
            "may hold printable ASCII characters only, and no space",
        );
    }
}

fn prompt(faults: &mut Faults, params: &SampleParams, call: &SampleCall) {
    match &params.prompt {
        // An absent or broken prompt is in `malformed` already.
        Prompt::Tokens(ids) if ids.is_empty() => {
            if !call.malformed.iter().any(|v| v.field == "prompt") {
                faults.add("prompt", "is empty: give at least one token id");
            }
        }
        Prompt::Text(text) if text.is_empty() => {
            faults.add("prompt", "is empty: give some text");
        }
        Prompt::Text(_) if params.sampling.max_tokens.is_none() => faults.add(
            "sampling.max_tokens",
            "must be given with a text prompt, whose length in tokens is not known here",
        ),
        Prompt::Tokens(_) | Prompt::Text(_) => {}
    }
}

fn logprobs(faults: &mut Faults, params: &SampleParams) {
    let wanted = &params.logprobs;
    faults.count(
        "logprobs.top_k",
        Some(wanted.top_k),
        0..=u64::from(MAX_TOP_LOGPROBS),
    );
    faults.count(
        "logprobs.prompt_top_k",
        Some(wanted.prompt_top_k),
        0..=u64::from(MAX_TOP_LOGPROBS),
    );
    if wanted.top_k > 0 && !wanted.output {
        faults.add("logprobs.top_k", "needs logprobs.output");
    }
    if wanted.prompt_top_k > 0 && !wanted.prompt {
        faults.add("logprobs.prompt_top_k", "needs logprobs.prompt");
    }
}

fn sampling(faults: &mut Faults, s: &Sampling) {
    faults.count(
        "sampling.max_tokens",
        s.max_tokens,
        1..=u64::from(MAX_TOKENS),
    );
    let most = u64::from(s.max_tokens.unwrap_or(MAX_TOKENS));
    faults.count("sampling.min_tokens", s.min_tokens, 0..=most);
    faults.float("sampling.temperature", s.temperature, 0.0..=100.0);
    faults.float_above("sampling.top_p", s.top_p, 0.0, 1.0);
    faults.count("sampling.top_k", s.top_k, 1..=u64::from(MAX_TOP_K));
    faults.float("sampling.min_p", s.min_p, 0.0..=1.0);
    faults.count("sampling.seed", s.seed, 0..=MAX_SEED);
    faults.float(
        "sampling.frequency_penalty",
        s.frequency_penalty,
        -2.0..=2.0,
    );
    faults.float("sampling.presence_penalty", s.presence_penalty, -2.0..=2.0);
    faults.float_above(
        "sampling.repetition_penalty",
        s.repetition_penalty,
        0.0,
        2.0,
    );
    if let Some(stops) = &s.stop {
        if stops.len() > MAX_STOPS {
            faults.add(
                "sampling.stop",
                format!("has {} strings, {MAX_STOPS} at most", stops.len()),
            );
        }
        if stops
            .iter()
            .any(|s| s.is_empty() || s.len() > MAX_STOP_BYTES)
        {
            faults.add(
                "sampling.stop",
                format!("each string must have 1 to {MAX_STOP_BYTES} bytes"),
            );
        }
    }
    if let Some(ids) = &s.stop_token_ids
        && ids.len() > MAX_STOP_TOKENS
    {
        faults.add(
            "sampling.stop_token_ids",
            format!("has {} ids, {MAX_STOP_TOKENS} at most", ids.len()),
        );
    }
    if s.logit_bias.len() > MAX_LOGIT_BIAS {
        faults.add(
            "sampling.logit_bias",
            format!(
                "has {} entries, {MAX_LOGIT_BIAS} at most",
                s.logit_bias.len()
            ),
        );
    }
    if s.logit_bias.values().any(|b| !(-100.0..=100.0).contains(b)) {
        faults.add("sampling.logit_bias", "each value must be from -100 to 100");
    }
    if let Some(structured) = &s.structured {
        let (field, text) = match structured {
            Structured::JsonSchema(text) => ("sampling.json_schema", text),
            Structured::Regex(text) => ("sampling.regex", text),
            Structured::Ebnf(text) => ("sampling.ebnf", text),
        };
        if text.is_empty() || text.len() > MAX_STRUCTURED_BYTES {
            faults.add(
                field,
                format!("must have 1 to {MAX_STRUCTURED_BYTES} bytes"),
            );
        }
        if let Structured::JsonSchema(text) = structured
            && serde_json::from_str::<serde::de::IgnoredAny>(text).is_err()
        {
            faults.add(field, "is not JSON");
        }
    }
}

#[cfg(test)]
mod tests;
