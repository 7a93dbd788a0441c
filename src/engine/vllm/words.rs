//! Messages as vLLM 0.32 writes them.

use crate::engine::refusal::{Fault, Words};

pub(super) const WORDS: Words = Words(&[
    (
        "The decoder prompt (length #) is longer than the maximum model length of #. Make sure \
         that `max_model_len` is no smaller than the number of text tokens.",
        Fault::Request,
    ),
    (
        "temperature must be non-negative, got #. (parameter=temperature, value=#)",
        Fault::Request,
    ),
    (
        "temperature must be in [0, 2], got #. (parameter=temperature, value=#)",
        Fault::Request,
    ),
    (
        "max_tokens must be at least 1, got #. (parameter=max_tokens, value=#)",
        Fault::Request,
    ),
    (
        "Requested sample logprobs of #, which is greater than max allowed: # \
         (parameter=logprobs, value=#)",
        Fault::Ours,
    ),
    ("data_parallel_rank # is out of range [#, #).", Fault::Ours),
    // No model is named but an adapter.
    (
        "The model * does not exist. Valid aliases: *.",
        Fault::Adapter,
    ),
    (
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        Fault::Death,
    ),
]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_not_repeated() {
        let (shown, fault) = WORDS
            .known("The model `canary` does not exist. Valid aliases: canary.")
            .unwrap();
        assert_eq!(shown, "The model ... does not exist. Valid aliases: ....");
        assert_eq!(fault, Fault::Adapter);
        let negative = WORDS.known(
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        );
        assert!(negative.is_some_and(|(shown, _)| shown.contains("got -1.0.")));
    }
}
