//! Writes replies and frames with the recorded keys.

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value, json};

use super::request::{Fault, Style};
use crate::engine::sim::{
    scheduler::{Done, Ended, Event, Refusal, Span},
    tokens::Rolling,
};

/// One sequence as its reply shows it.
pub(super) struct Sequence {
    index: usize,
    vocab: u32,
    style: Style,
    rolling: Rolling,
    output: Vec<u32>,
    logprobs: Vec<Value>,
    pub(super) cached: u32,
    choice: Option<Value>,
}

/// What an event comes to.
pub(super) enum Said {
    Nothing,
    /// New tokens in a stream, or its end: choices, each a frame of its own.
    Choices(Vec<Value>),
    /// Instead of any result.
    Fault(Fault),
}

impl Sequence {
    pub(super) fn new(index: usize, prompt: &[u32], vocab: u32, style: Style) -> Self {
        Self {
            index,
            vocab,
            style,
            rolling: Rolling::of(prompt),
            output: Vec::new(),
            logprobs: Vec::new(),
            cached: 0,
            choice: None,
        }
    }

    /// Output tokens so far.
    pub(super) fn len(&self) -> usize {
        self.output.len()
    }

    /// Takes an event in.
    pub(super) fn take(&mut self, event: &Event, version: &str) -> Said {
        match event {
            Event::Started { cached, .. } => {
                self.cached = *cached;
                Said::Nothing
            }
            Event::Crashed { .. } => Said::Nothing,
            Event::Progress { tokens, .. } => {
                self.extend(tokens);
                Said::Choices(vec![self.delta(tokens, None)])
            }
            Event::Done { done, .. } => self.done(done),
            Event::Refused { why, tokens, .. } => {
                self.extend(tokens);
                match why {
                    Refusal::AbortedWaiting => {
                        let end = u32::try_from(self.output.len()).unwrap_or(u32::MAX);
                        let spans = json!([{"version": version, "start": 0, "end": end}]);
                        self.ended(&[], json!("abort"), Value::Null, spans)
                    }
                    // Inferred, all three.
                    Refusal::QueueFull | Refusal::Displaced => {
                        Said::Fault(Fault::busy("The request queue is full."))
                    }
                    Refusal::TooLarge => Said::Fault(Fault::busy("The KV cache is too small.")),
                }
            }
        }
    }

    fn done(&mut self, done: &Done) -> Said {
        self.extend(&done.tokens);
        let spans: Vec<Value> = done.spans.iter().map(span).collect();
        let (reason, matched) = match done.ended {
            Ended::Stop(token) => ("stop", json!(token)),
            Ended::Length => ("length", Value::Null),
            Ended::Aborted => ("abort", Value::Null),
        };
        self.ended(&done.tokens, json!(reason), matched, json!(spans))
    }

    fn ended(&mut self, new: &[u32], reason: Value, matched: Value, spans: Value) -> Said {
        let mut frames = Vec::new();
        let mut last = new;
        // An abort comes without tokens.
        if reason == "abort" && !new.is_empty() {
            frames.push(self.delta(new, None));
            last = &[];
        }
        frames.push(self.delta(last, Some((&reason, &matched, &spans))));
        let all = self.output.clone();
        let mut whole = self.delta(&all, Some((&reason, &matched, &spans)));
        if self.style.logprobs.is_some() {
            whole["logprobs"] = json!({ "content": std::mem::take(&mut self.logprobs) });
        }
        self.choice = Some(whole);
        Said::Choices(frames)
    }

    /// A choice with these tokens.
    fn delta(&self, tokens: &[u32], end: Option<(&Value, &Value, &Value)>) -> Value {
        let (reason, matched, spans) = match end {
            Some((reason, matched, spans)) => (reason.clone(), matched.clone(), spans.clone()),
            None => (Value::Null, Value::Null, Value::Null),
        };
        let logprobs = match self.style.logprobs {
            Some(_) if self.style.stream => {
                let from = self.logprobs.len().saturating_sub(tokens.len());
                json!({ "content": self.logprobs[from..] })
            }
            _ => Value::Null,
        };
        json!({
            "index": self.index,
            "finish_reason": reason,
            "stop_reason": matched,
            "token_ids": tokens,
            "routed_experts": null,
            "sampling_mask": null,
            "weight_versions": spans,
            "logprobs": logprobs,
        })
    }

    fn extend(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(count) = self.style.logprobs {
                let logprob = self.rolling.logprob(token);
                let top: Vec<Value> = self
                    .rolling
                    .top(count.max(1), self.vocab, Some(token))
                    .into_iter()
                    .zip(1..)
                    .map(|((logprob, id), rank)| candidate(id, logprob, rank))
                    .collect();
                let mut position = candidate(token, logprob, 1);
                position["top_logprobs"] = json!(top);
                self.logprobs.push(position);
            }
            self.rolling.push(token);
            self.output.push(token);
        }
    }
}

fn candidate(id: u32, logprob: f32, rank: usize) -> Value {
    json!({ "token_id": id, "logprob": logprob, "rank": rank })
}

fn span(span: &Span) -> Value {
    json!({ "version": &*span.version, "start": span.start, "end": span.end })
}

/// A frame of a stream.
pub(super) fn frame(id: &str, choice: Option<Value>, usage: Value) -> Vec<u8> {
    json!({
        "request_id": id,
        "usage": usage,
        "output_mode": "tokens",
        "choices": choice.into_iter().collect::<Vec<_>>(),
    })
    .to_string()
    .into_bytes()
}

/// What all sequences together have come to.
pub(super) struct Counted {
    pub(super) prompt: usize,
    pub(super) completion: usize,
    pub(super) cached: u32,
}

impl Counted {
    pub(super) fn of(prompt: usize, sequences: &[Sequence]) -> Self {
        Self {
            prompt,
            completion: sequences.iter().map(Sequence::len).sum(),
            cached: sequences.first().map_or(0, |s| s.cached),
        }
    }

    fn counts(&self) -> Map<String, Value> {
        let mut counts = Map::new();
        counts.insert("prompt_tokens".into(), self.prompt.into());
        counts.insert(
            "total_tokens".into(),
            (self.prompt + self.completion).into(),
        );
        counts.insert("completion_tokens".into(), self.completion.into());
        counts
    }

    /// At the end of a stream.
    pub(super) fn at_end(&self) -> Value {
        let mut counts = self.counts();
        counts.insert(
            "prompt_tokens_details".into(),
            json!({ "cached_tokens": self.cached }),
        );
        counts.into()
    }

    /// In every frame.
    pub(super) fn so_far(&self) -> Value {
        let mut counts = self.counts();
        counts.insert("prompt_tokens_details".into(), Value::Null);
        counts.insert("completion_tokens_details".into(), Value::Null);
        counts.into()
    }

    fn plain(&self) -> Value {
        let mut counts = self.counts();
        counts.insert(
            "prompt_tokens_details".into(),
            json!({
                "cached_tokens": self.cached,
                "created_cache_tokens": null,
                "multimodal_tokens": null,
            }),
        );
        counts.insert("completion_tokens_details".into(), Value::Null);
        counts.into()
    }
}

/// A plain reply.
pub(super) fn whole(
    id: &str,
    model: &str,
    now: f64,
    prompt: &[u32],
    sequences: Vec<Sequence>,
    style: Style,
) -> Value {
    let counted = Counted::of(prompt.len(), &sequences);
    let vocab = sequences.first().map_or(1, |s| s.vocab);
    let choices: Vec<Value> = sequences.into_iter().filter_map(|s| s.choice).collect();
    json!({
        "request_id": id,
        "model": model,
        "created": Duration::try_from_secs_f64(now).unwrap_or_default().as_secs(),
        "usage": counted.plain(),
        "prompt_logprobs": style.prompt_logprobs.map(|top| scored(prompt, top, vocab)),
        "prompt_token_id_logprobs": null,
        "prompt_token_ids": style.return_token_ids.then_some(prompt),
        "mm_placeholders": null,
        "metrics": null,
        "kv_transfer_params": null,
        "ec_transfer_params": null,
        "output_mode": "tokens",
        "choices": choices,
    })
}

/// Log probabilities of a prompt: by id at each position, none at the first.
fn scored(prompt: &[u32], top: usize, vocab: u32) -> Vec<Value> {
    let mut rolling = Rolling::default();
    prompt
        .iter()
        .enumerate()
        .map(|(at, &token)| {
            let position = if at == 0 {
                Value::Null
            } else {
                let entry = |logprob: f32, rank: usize| {
                    json!({ "logprob": logprob, "rank": rank, "decoded_token": null })
                };
                let mut position = Map::new();
                for ((logprob, id), rank) in rolling.top(top, vocab, None).into_iter().zip(1..) {
                    position.insert(id.to_string(), entry(logprob, rank));
                }
                // Its own, wherever it stands.
                position.insert(token.to_string(), entry(rolling.logprob(token), top + 1));
                position.into()
            };
            rolling.push(token);
            position
        })
        .collect()
}

/// A request's id, as its reply names it.
pub(super) fn named(prefix: &str, id: &str) -> Arc<str> {
    format!("{prefix}{id}").into()
}
