//! What every engine's reply is checked for in the same way.

use base64::Engine as _;
use serde::Deserialize;

use super::EngineError;
use crate::call::WeightSpan;

/// Characters of a weight version at most.
const MAX_VERSION: usize = 256;

/// Tokens that were made by one version of the weights.
#[derive(Clone, Deserialize)]
pub(super) struct WireSpan {
    pub(super) version: String,
    pub(super) start: u32,
    pub(super) end: u32,
}

/// A contradiction.
pub(super) fn bad(message: impl Into<String>) -> EngineError {
    EngineError::BadReply(message.into())
}

/// Where JSON is wrong, without a value from it.
pub(super) fn place(error: &serde_json::Error) -> String {
    format!("{:?} error at column {}", error.classify(), error.column())
}

/// Base64 in a JSON string, of what the reply is said to hold by `what`.
pub(super) fn base64_bytes(raw: &str, what: &str) -> Result<Vec<u8>, EngineError> {
    let text: &str =
        serde_json::from_str(raw).map_err(|_| bad(format!("{what} are not base64 text")))?;
    base64::engine::general_purpose::STANDARD
        .decode(text)
        .map_err(|_| bad(format!("{what} are not base64")))
}

/// No version is longer than versions are.
pub(super) fn versions<'a>(
    mut versions: impl Iterator<Item = &'a String>,
) -> Result<(), EngineError> {
    if versions.any(|version| version.chars().count() > MAX_VERSION) {
        return Err(bad("a weight version is too long"));
    }
    Ok(())
}

/// Whether the spans cover so many tokens without gap or overlap.
pub(super) fn cover(spans: &[WireSpan], tokens: u32) -> bool {
    let mut at = 0;
    spans.iter().all(|span| {
        let follows = span.start == at && span.end >= span.start;
        at = span.end;
        follows
    }) && at == tokens
}

/// The error of spans that do not.
pub(super) fn uncovered() -> EngineError {
    bad("the weight versions do not cover the tokens")
}

/// Spans as they are told. Weights that made no token are no span, except that an
/// empty output names the weights it would have had.
pub(super) fn spans(spans: Vec<WireSpan>) -> Vec<WeightSpan> {
    let only = spans.len() == 1;
    spans
        .into_iter()
        .filter(|span| only || span.end > span.start)
        .map(|span| WeightSpan {
            version: span.version,
            start: span.start,
            end: span.end,
        })
        .collect()
}
