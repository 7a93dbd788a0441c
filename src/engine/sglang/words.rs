//! Messages as SGLang 0.5.23 writes them.

use crate::engine::refusal::{Fault, Words};

pub(super) const WORDS: Words = Words(&[
    (
        "The input (# tokens) is longer than the model's context length (# tokens).",
        Fault::Request,
    ),
    (
        "Requested token count exceeds the model's maximum context length of # tokens. You \
         requested a total of # tokens: # tokens from the input messages and # tokens for the \
         completion. Please reduce the number of tokens in the input messages or the completion \
         to fit within the limit.",
        Fault::Request,
    ),
    ("input_ids cannot be empty.", Fault::Request),
    (
        "Either text, input_ids or input_embeds should be provided.",
        Fault::Request,
    ),
    (
        "temperature must be a non-negative finite number, got #.",
        Fault::Request,
    ),
    (
        "top_k must be -1 (disable) or at least 1, got #.",
        Fault::Request,
    ),
    (
        "min_new_tokens=# is unavailable when skip_tokenizer_init=True (requires tokenizer for \
         eos_token_id).",
        Fault::Request,
    ),
    (
        "stop=* is unavailable when skip_tokenizer_init=True (requires tokenizer to decode \
         tokens to text for matching).",
        Fault::Request,
    ),
    (
        "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. Please \
         provide input_ids or re-initialize the engine with skip_tokenizer_init=False.",
        Fault::Request,
    ),
    ("Duplicate request ID detected: *", Fault::Ours),
    ("routed_dp_rank=# out of range [#, #)", Fault::Ours),
    ("LoRA adapter * was requested, but *", Fault::Adapter),
    // Inferred.
    (
        "The following requested LoRA adapters are not loaded: *",
        Fault::Adapter,
    ),
    ("The request queue is full.", Fault::Ours),
    (
        "The request is aborted by a higher priority request.",
        Fault::Ours,
    ),
    ("Abort in waiting queue", Fault::Ours),
    ("Aborted", Fault::Ours),
]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_and_what_was_quoted_is_not() {
        let shown = |m| WORDS.known(m).map(|(text, _)| text);
        assert_eq!(
            shown("top_k must be -1 (disable) or at least 1, got 0.").unwrap(),
            "top_k must be -1 (disable) or at least 1, got 0."
        );
        assert_eq!(
            shown("temperature must be a non-negative finite number, got -1.5e3.").unwrap(),
            "temperature must be a non-negative finite number, got -1.5e3."
        );
        let stop = shown(
            "stop=['canary'] is unavailable when skip_tokenizer_init=True (requires tokenizer to \
             decode tokens to text for matching).",
        );
        assert!(stop.is_some_and(|s| s.starts_with("stop=... is") && !s.contains("canary")));
        assert_eq!(
            shown("top_k must be -1 (disable) or at least 1, got canary."),
            None
        );
    }
}
