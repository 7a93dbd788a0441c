//! The tokens of one sample so far, over all its attempts.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    call::{PromptLogprobs, TopLogprobs, WeightSpan},
    engine::{Finish, TokenChunk},
};

/// What a sample has so far. What is in it is kept: an attempt that starts anew
/// starts from an empty one.
#[derive(Clone, Debug, Default)]
pub struct Partial {
    /// Generated ids.
    pub tokens: Vec<u32>,
    /// One per token, where asked for.
    pub logprobs: Option<Vec<f32>>,
    /// Alternatives, where asked for.
    pub top_logprobs: Option<TopLogprobs>,
    /// Which weights generated which tokens.
    pub weight_spans: Vec<WeightSpan>,
    /// Of the prompt, where asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// From the first attempt's start to the first token.
    pub first_token: Option<Duration>,
}

impl Partial {
    /// Appends what an engine sent.
    pub fn push(&mut self, chunk: TokenChunk, started: Instant) {
        if self.first_token.is_none() && !chunk.tokens.is_empty() {
            self.first_token = Some(started.elapsed());
        }
        let before = self.len();
        let added = len(&chunk.tokens);
        self.tokens.extend(chunk.tokens);
        if let Some(more) = chunk.logprobs {
            self.logprobs.get_or_insert_default().extend(more);
        }
        if let Some(more) = chunk.top_logprobs {
            append_top(self.top_logprobs.get_or_insert_default(), more);
        }
        if let Some(version) = chunk.weight_version {
            self.add_span(version, before, before + added);
        }
    }

    /// Takes what an engine said at the end of an attempt that began at token
    /// `base`.
    pub fn finish(&mut self, base: u32, finish: &Finish) {
        // The last word on the versions of this attempt's tokens.
        self.weight_spans.retain_mut(|span| {
            span.end = span.end.min(base);
            span.start < span.end
        });
        for span in &finish.weight_spans {
            self.add_span(span.version.clone(), base + span.start, base + span.end);
        }
        // A resumed attempt scores the kept tokens as part of its prompt.
        if self.prompt_logprobs.is_none() && base == 0 {
            self.prompt_logprobs = finish.prompt_logprobs.clone();
        }
    }

    /// Tokens so far.
    pub fn len(&self) -> u32 {
        len(&self.tokens)
    }

    /// There is nothing yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    fn add_span(&mut self, version: String, start: u32, end: u32) {
        if start >= end {
            return;
        }
        match self.weight_spans.last_mut() {
            Some(last) if last.version == version && last.end == start => last.end = end,
            _ => self.weight_spans.push(WeightSpan {
                version,
                start,
                end,
            }),
        }
    }
}

fn len(tokens: &[u32]) -> u32 {
    // Replies are bounded far below.
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

/// Appends positions; one stride for all, the wider one.
fn append_top(all: &mut TopLogprobs, more: TopLogprobs) {
    if all.stride == more.stride || all.token_ids.is_empty() {
        all.stride = more.stride;
        all.token_ids.extend(more.token_ids);
        all.logprobs.extend(more.logprobs);
        return;
    }
    let stride = all.stride.max(more.stride);
    let mut widened = TopLogprobs {
        stride,
        ..TopLogprobs::default()
    };
    for part in [&*all, &more] {
        let width = part.stride.max(1) as usize;
        for (ids, logprobs) in part
            .token_ids
            .chunks(width)
            .zip(part.logprobs.chunks(width))
        {
            let padding = stride as usize - ids.len();
            widened.token_ids.extend_from_slice(ids);
            widened.token_ids.extend(std::iter::repeat_n(0, padding));
            widened.logprobs.extend_from_slice(logprobs);
            widened
                .logprobs
                .extend(std::iter::repeat_n(f32::NAN, padding));
        }
    }
    *all = widened;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{call::Usage, engine::FinishReason};

    fn span(version: &str, start: u32, end: u32) -> WeightSpan {
        WeightSpan {
            version: version.to_owned(),
            start,
            end,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_resumed_attempt_appends_and_shifts_its_spans() {
        let started = Instant::now();
        let mut partial = Partial::default();
        partial.push(
            TokenChunk {
                tokens: vec![1, 2],
                weight_version: Some("7".to_owned()),
                ..TokenChunk::default()
            },
            started,
        );
        let base = partial.len();
        partial.push(
            TokenChunk {
                tokens: vec![3, 4, 5],
                weight_version: Some("8".to_owned()),
                ..TokenChunk::default()
            },
            started,
        );
        partial.finish(
            base,
            &Finish {
                reason: FinishReason::Length,
                usage: Usage::default(),
                served_rank: None,
                weight_spans: vec![span("7", 0, 1), span("8", 1, 3)],
                prompt_logprobs: None,
                text: None,
                routed_experts: None,
            },
        );
        assert_eq!(partial.tokens, [1, 2, 3, 4, 5]);
        assert_eq!(partial.weight_spans, [span("7", 0, 3), span("8", 3, 5)]);
    }

    #[test]
    fn strides_are_widened() {
        let mut all = TopLogprobs {
            stride: 1,
            token_ids: vec![1, 2],
            logprobs: vec![-1.0, -2.0],
        };
        append_top(
            &mut all,
            TopLogprobs {
                stride: 2,
                token_ids: vec![3, 4],
                logprobs: vec![-3.0, -4.0],
            },
        );
        assert_eq!(all.stride, 2);
        assert_eq!(all.token_ids, [1, 0, 2, 0, 3, 4]);
        assert!(all.logprobs[1].is_nan());
    }
}
