//! What an engine's error means. Its message can quote the prompt, a file
//! path or a stack: only messages of a known form are passed on, and of those
//! only their fixed words and numbers.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;

use super::EngineError;

/// Longest message looked at, and longest passed on, in bytes.
const MAX_MESSAGE: usize = 500;
/// The longest wait that an engine may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Whose fault a refusal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The request's: it fails the same way everywhere.
    Request,
    /// Not the caller's: Berth sent an id twice, or the engine is not what it
    /// was registered as. Must never be kept as the request's own failure.
    Ours,
    /// The engine has died.
    Death,
    /// The engine's: it does not have the adapter.
    Adapter,
}

/// The forms of messages that an engine is known to write. `#` stands for a
/// number, which is passed on; `*` for anything, which is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words(pub(super) &'static [(&'static str, Fault)]);

impl Words {
    /// The error that an HTTP answer other than success means.
    pub(super) fn of_reply(
        self,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> EngineError {
        let message = message_of(body);
        self.of_status(status.as_u16(), message.as_deref(), retry_after(headers))
    }

    /// Nothing, where the answer is a success.
    pub(super) fn check(
        self,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<(), EngineError> {
        if status.is_success() {
            return Ok(());
        }
        Err(self.of_reply(status, headers, body))
    }

    /// The error that a code means, be it an HTTP status, the code of an error
    /// frame or of an abort.
    pub(super) fn of_status(
        self,
        code: u16,
        message: Option<&str>,
        retry_after: Option<Duration>,
    ) -> EngineError {
        let known = message.and_then(|message| self.known(message));
        let fault = known.as_ref().map_or(Fault::Request, |(_, fault)| *fault);
        let message = known.map_or_else(
            || {
                format!(
                    "status {code}; the engine's message is not repeated here, it may quote the \
                     prompt"
                )
            },
            |(message, _)| message,
        );
        match code {
            429 | 503 => EngineError::Busy {
                message,
                retry_after,
            },
            400 | 413 | 422 if fault == Fault::Request => EngineError::Rejected(message),
            400 | 404 if fault == Fault::Adapter => EngineError::AdapterMissing(message),
            500..=599 if fault == Fault::Death => EngineError::Died(message),
            500..=599 => EngineError::Failed(message),
            _ => EngineError::BadReply(message),
        }
    }

    /// The code and message of an error frame in a stream.
    pub(super) fn of_frame(self, error: &[u8]) -> EngineError {
        #[derive(Deserialize)]
        struct Frame {
            message: Option<String>,
            code: Option<u16>,
        }
        match serde_json::from_slice::<Frame>(error) {
            Ok(frame) => self.of_status(frame.code.unwrap_or(500), frame.message.as_deref(), None),
            Err(_) => EngineError::Failed("the engine sent an error without a code".into()),
        }
    }

    /// An abort's message, as far as it may be shown.
    pub(super) fn abort_message(self, message: Option<&str>) -> String {
        message
            .and_then(|message| self.known(message))
            .map_or_else(|| "aborted by the engine".into(), |(message, _)| message)
    }

    /// The message with everything that a caller may have put into it left out,
    /// if it is of a known form.
    pub(super) fn known(self, message: &str) -> Option<(String, Fault)> {
        let message = message.trim();
        // Bounds the work of matching as well.
        if message.len() > MAX_MESSAGE {
            return None;
        }
        self.0.iter().find_map(|(form, fault)| {
            let mut shown = String::with_capacity(form.len() + 16);
            fit(form, message, &mut shown).then_some((shown, *fault))
        })
    }
}

/// The three forms of an error body, and that of an error frame.
#[derive(Deserialize)]
struct Wire {
    error: Option<WireError>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WireError {
    Text(String),
    Object { message: Option<String> },
    Other(serde::de::IgnoredAny),
}

fn message_of(body: &[u8]) -> Option<String> {
    let wire: Wire = serde_json::from_slice(body).ok()?;
    match wire.error {
        Some(WireError::Text(text)) => Some(text),
        Some(WireError::Object { message }) => message.or(wire.message),
        Some(WireError::Other(_)) | None => wire.message,
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers
        .get(header::RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds).min(MAX_RETRY_AFTER))
}

/// Whether `message` has this form; writes what may be shown of it.
fn fit(form: &str, message: &str, shown: &mut String) -> bool {
    let Some(at) = form.find(['#', '*']) else {
        shown.push_str(form);
        return form == message;
    };
    let (literal, hole) = form.split_at(at);
    let Some(message) = message.strip_prefix(literal) else {
        return false;
    };
    shown.push_str(literal);
    let kept = shown.len();
    let (number, rest_of_form) = (hole.starts_with('#'), &hole[1..]);
    if number {
        // The longest first; shorter where a full stop belongs to the form.
        let digits = message
            .find(|c: char| !(c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e')))
            .unwrap_or(message.len());
        for end in (1..=digits.min(32)).rev() {
            shown.push_str(&message[..end]);
            if fit(rest_of_form, &message[end..], shown) {
                return true;
            }
            shown.truncate(kept);
        }
        return false;
    }
    shown.push_str("...");
    let kept = shown.len();
    for (end, _) in message.char_indices().chain([(message.len(), ' ')]) {
        if fit(rest_of_form, &message[end..], shown) {
            return true;
        }
        shown.truncate(kept);
    }
    false
}

/// Reads an error's body as far as it is worth reading.
pub(super) async fn read_body(body: super::http::ReplyBody) -> Bytes {
    let read = tokio::time::timeout(Duration::from_secs(2), body.collect(64 * 1024));
    match read.await {
        Ok(Ok(bytes)) => bytes,
        // The status says enough.
        Ok(Err(_)) | Err(_) => Bytes::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: Words = Words(&[
        ("got #.", Fault::Request),
        ("stop=* is unavailable (# of #).", Fault::Ours),
    ]);

    #[test]
    fn numbers_are_shown_and_what_was_quoted_is_not() {
        let shown = |m| WORDS.known(m).map(|(text, _)| text);
        assert_eq!(shown("got -1.5e3.").unwrap(), "got -1.5e3.");
        assert_eq!(
            shown("stop=['canary'] is unavailable (1 of 2).").unwrap(),
            "stop=... is unavailable (1 of 2)."
        );
        assert_eq!(shown("got canary."), None);
        assert_eq!(shown("canary"), None);
    }

    #[test]
    fn an_unknown_message_becomes_a_general_one() {
        let error = WORDS.of_status(400, Some("the prompt 'canary' is bad"), None);
        assert!(!error.to_string().contains("canary"), "{error}");
        assert!(matches!(error, EngineError::Rejected(m) if m.contains("400")));
    }

    #[test]
    fn a_long_wait_is_cut_and_nonsense_ignored() {
        let mut headers = HeaderMap::new();
        headers.insert(header::RETRY_AFTER, "86400".parse().unwrap());
        assert_eq!(retry_after(&headers), Some(MAX_RETRY_AFTER));
        headers.insert(header::RETRY_AFTER, "soon".parse().unwrap());
        assert_eq!(retry_after(&headers), None);
    }
}
