//! What was asked for, as a hash: two requests with one idempotency key must
//! have the same. Field by field over the domain's types, so that the two
//! encodings of token ids are one, and an optional field that is unset adds
//! nothing. Deadline, metadata, priority and routing policy are left out: they
//! change when or where, not what.
//!
//! The version stands in the context of the hash. Changing what is hashed, or
//! how, needs a new version: stored fingerprints would not match any more.

use crate::{
    call::{OnAbort, OnLost, Prompt, SampleParams, Sampling, Structured, WeightsConstraint},
    store::Fingerprint,
};

const CONTEXT: &str = "berth.dev 2026 request fingerprint v1";

struct Writer(blake3::Hasher);

impl Writer {
    /// One field: its number in the proto and its value. The length goes first,
    /// so that no two lists of fields give one input.
    fn field(&mut self, number: u16, value: &[u8]) {
        self.0.update(&number.to_le_bytes());
        self.0.update(&(value.len() as u64).to_le_bytes());
        self.0.update(value);
    }

    fn optional<const N: usize>(&mut self, number: u16, value: Option<[u8; N]>) {
        if let Some(value) = value {
            self.field(number, &value);
        }
    }

    fn flag(&mut self, number: u16, value: bool) {
        if value {
            self.field(number, &[1]);
        }
    }
}

/// The fingerprint of a request.
pub fn of(params: &SampleParams) -> Fingerprint {
    let mut w = Writer(blake3::Hasher::new_derive_key(CONTEXT));
    if let Some(key) = &params.affinity_key {
        w.field(2, key.as_str().as_bytes());
    }
    if let Some(model) = &params.model {
        w.field(3, model.as_bytes());
    }
    if let Some(adapter) = &params.adapter {
        w.field(4, adapter.as_bytes());
    }
    match &params.prompt {
        Prompt::Tokens(ids) => {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            w.field(5, &bytes);
        }
        Prompt::Text(text) => w.field(7, text.as_bytes()),
    }
    sampling(&mut w, &params.sampling);
    w.field(11, &params.num_samples.to_le_bytes());
    let wanted = &params.logprobs;
    w.flag(1201, wanted.output);
    w.field(1202, &wanted.top_k.to_le_bytes());
    w.flag(1203, wanted.prompt);
    w.field(1204, &wanted.prompt_top_k.to_le_bytes());
    match &params.weights.constraint {
        None => {}
        Some(WeightsConstraint::AtLeast(version)) => w.field(1301, &version.to_le_bytes()),
        Some(WeightsConstraint::Exact(version)) => w.field(1302, version.as_bytes()),
    }
    if let Some(group) = &params.group {
        w.field(1401, group.key.as_bytes());
        w.flag(1402, group.share);
    }
    w.flag(16, params.routed_experts);
    w.flag(17, params.on_abort == OnAbort::ReturnPartial);
    w.flag(18, params.on_lost == OnLost::Resume);
    w.flag(19, params.packed_output);
    Fingerprint(*w.0.finalize().as_bytes())
}

fn sampling(w: &mut Writer, s: &Sampling) {
    w.optional(1001, s.max_tokens.map(u32::to_le_bytes));
    w.optional(1002, s.min_tokens.map(u32::to_le_bytes));
    w.optional(1003, s.temperature.map(f32::to_le_bytes));
    w.optional(1004, s.top_p.map(f32::to_le_bytes));
    w.optional(1005, s.top_k.map(u32::to_le_bytes));
    w.optional(1006, s.min_p.map(f32::to_le_bytes));
    w.optional(1007, s.seed.map(u64::to_le_bytes));
    w.flag(1008, s.ignore_eos);
    if let Some(stops) = &s.stop {
        w.field(1009, &(stops.len() as u64).to_le_bytes());
        for stop in stops {
            w.field(1009, stop.as_bytes());
        }
    }
    if let Some(ids) = &s.stop_token_ids {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        w.field(1010, &bytes);
    }
    w.optional(1011, s.frequency_penalty.map(f32::to_le_bytes));
    w.optional(1012, s.presence_penalty.map(f32::to_le_bytes));
    w.optional(1013, s.repetition_penalty.map(f32::to_le_bytes));
    for (token, bias) in &s.logit_bias {
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&token.to_le_bytes());
        entry[4..].copy_from_slice(&bias.to_le_bytes());
        w.field(1014, &entry);
    }
    match &s.structured {
        None => {}
        Some(Structured::JsonSchema(text)) => w.field(1015, text.as_bytes()),
        Some(Structured::Regex(text)) => w.field(1016, text.as_bytes()),
        Some(Structured::Ebnf(text)) => w.field(1017, text.as_bytes()),
    }
    w.optional(1018, s.skip_special_tokens.map(|skip| [u8::from(skip)]));
}

#[cfg(test)]
mod tests;
