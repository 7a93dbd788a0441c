//! SGLang's reply and stream frame, as JSON. Parsing only: `transcript` checks.

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::engine::checks::WireSpan;

/// A reply, or one frame of a stream.
#[derive(Deserialize)]
pub(super) struct Frame<'a> {
    pub(super) output_ids: Option<Vec<u32>>,
    pub(super) text: Option<String>,
    #[serde(borrow)]
    pub(super) meta_info: Option<Meta<'a>>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
}

/// What only the last frame is asked for stays raw: streams repeat the
/// prompt's log probabilities in every frame.
#[derive(Deserialize)]
pub(super) struct Meta<'a> {
    pub(super) id: Option<String>,
    pub(super) finish_reason: Option<WireFinish>,
    pub(super) prompt_tokens: Option<u32>,
    pub(super) completion_tokens: Option<u32>,
    pub(super) cached_tokens: Option<u32>,
    pub(super) weight_version: Option<String>,
    pub(super) weight_versions: Option<Vec<WireSpan>>,
    pub(super) dp_rank: Option<u32>,
    #[serde(borrow)]
    pub(super) input_token_logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) input_top_logprobs: Option<&'a RawValue>,
    pub(super) output_token_logprobs: Option<Vec<Entry>>,
    pub(super) output_top_logprobs: Option<Vec<Option<Vec<Entry>>>>,
    #[serde(borrow)]
    pub(super) routed_experts: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct WireFinish {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) matched: Option<Matched>,
    pub(super) message: Option<String>,
    pub(super) status_code: Option<u16>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Matched {
    Token(u32),
    Text(String),
    Other(IgnoredAny),
}

/// `[logprob or null, id, text or null]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) logprob: Option<f32>,
    pub(super) id: u32,
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("[logprob, id, text]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
                use serde::de::Error as _;
                let logprob = seq
                    .next_element()?
                    .ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let id = seq
                    .next_element()?
                    .ok_or_else(|| A::Error::invalid_length(1, &self))?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Entry { logprob, id })
            }
        }

        deserializer.deserialize_seq(EntryVisitor)
    }
}
