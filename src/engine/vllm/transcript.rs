//! Checks before belief: one attempt's reply against what was asked. Nothing
//! passes on whose ids, counts, log probabilities or weight spans contradict
//! each other or the request; every such contradiction is
//! [`EngineError::BadReply`].
//!
//! A stream says how it ended in one frame and what it counted in another: the
//! finish is put together at the end mark.

use super::{
    ID_PREFIX, npy, request,
    wire::{Candidate, Choice, Frame, Position, PromptPosition, StopReason, WireUsage},
    words::WORDS,
};
use crate::{
    call::{
        LogprobsWanted, MatchedStop, Prompt, PromptLogprobs, RoutedExperts, TopLogprobs, Usage,
        WeightSpan,
    },
    engine::{
        EngineError, EngineRequest, Finish, FinishReason, TokenChunk, attempt,
        checks::{self, WireSpan, bad, place},
    },
};

/// The version of tokens of which the engine tells none. No condition on weights
/// is satisfied by it.
const UNKNOWN: &str = "";

/// What has been received of one attempt.
pub(in crate::engine) struct Transcript {
    id: String,
    prompt: Prompt,
    max_tokens: u32,
    wanted: LogprobsWanted,
    experts: bool,
    received: u32,
    last_token: Option<u32>,
    usage: Option<WireUsage>,
    end: Option<End>,
}

/// What the last frame of a choice said.
struct End {
    reason: FinishReason,
    spans: Option<Vec<WireSpan>>,
    prompt_logprobs: Option<PromptLogprobs>,
    routed_experts: Option<RoutedExperts>,
}

impl Transcript {
    pub(super) fn new(asked: &EngineRequest) -> Self {
        Self {
            id: format!("{ID_PREFIX}{}", asked.id.as_str()),
            prompt: asked.prompt.clone(),
            max_tokens: asked.max_tokens,
            wanted: asked.logprobs,
            experts: asked.routed_experts,
            received: 0,
            last_token: None,
            usage: None,
            end: None,
        }
    }
}

impl attempt::Transcript for Transcript {
    fn received(&self) -> u32 {
        self.received
    }

    fn accept(&mut self, json: &[u8]) -> Result<Option<TokenChunk>, EngineError> {
        let frame: Frame<'_> =
            serde_json::from_slice(json).map_err(|e| bad(format!("not a reply: {}", place(&e))))?;
        if let Some(error) = frame.error {
            return Err(WORDS.of_frame(error.get().as_bytes()));
        }
        if frame.request_id.as_deref() != Some(&*self.id) {
            return Err(bad("the reply is to another request id"));
        }
        if let Some(usage) = frame.usage {
            self.usage = Some(usage);
        }
        let mut choices = frame.choices.ok_or_else(|| bad("no choices"))?;
        let Some(choice) = choices.pop() else {
            // The usage at the end of a stream.
            return Ok(None);
        };
        if !choices.is_empty() || choice.index != 0 {
            return Err(bad("several answers to one request"));
        }
        if self.end.is_some() {
            return Err(bad("a frame after the finish"));
        }
        self.choice(choice, frame.prompt_logprobs)
    }

    fn finish(&mut self) -> Result<Option<Box<Finish>>, EngineError> {
        let Some(end) = self.end.take() else {
            return Ok(None);
        };
        let usage = self.usage.ok_or_else(|| bad("nothing was counted"))?;
        if usage.completion_tokens.unwrap_or(0) != self.received {
            return Err(bad(format!(
                "{} tokens came, {} were counted",
                self.received,
                usage.completion_tokens.unwrap_or(0)
            )));
        }
        if self.prompt.token_count() != usize::try_from(usage.prompt_tokens).ok() {
            return Err(bad(format!(
                "{} prompt tokens were sent, {} were counted",
                self.prompt.token_count().unwrap_or(0),
                usage.prompt_tokens
            )));
        }
        let cached_tokens = usage
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens)
            .unwrap_or(0);
        if cached_tokens > usage.prompt_tokens {
            return Err(bad("more tokens cached than the prompt has"));
        }
        Ok(Some(Box::new(Finish {
            weight_spans: self.spans(end.spans)?,
            reason: end.reason,
            usage: Usage {
                prompt_tokens: usage.prompt_tokens,
                cached_tokens,
                completion_tokens: self.received,
            },
            // It does not tell.
            served_rank: None,
            prompt_logprobs: end.prompt_logprobs,
            text: None,
            routed_experts: end.routed_experts,
        })))
    }
}

impl Transcript {
    fn choice(
        &mut self,
        choice: Choice<'_>,
        prompt_logprobs: Option<&serde_json::value::RawValue>,
    ) -> Result<Option<TokenChunk>, EngineError> {
        let ids = choice.token_ids.unwrap_or_default();
        let positions = choice.logprobs.and_then(|l| l.content);
        let chunk = self.new_tokens(ids, positions)?;
        let Some(reason) = &choice.finish_reason else {
            return Ok(chunk);
        };
        let reason = self.reason(reason, choice.stop_reason)?;
        let aborted = matches!(reason, FinishReason::Aborted { .. });
        // What was cut short may lack what comes with the end.
        let prompt_logprobs = match (self.wanted.prompt, prompt_logprobs) {
            (false, _) => None,
            (true, None) if aborted => None,
            (true, None) => return Err(bad("no log probabilities of the prompt")),
            (true, Some(raw)) => Some(self.prompt_logprobs(raw.get())?),
        };
        let routed_experts = match (self.experts, choice.routed_experts) {
            (false, _) => None,
            (true, None) if aborted => None,
            (true, None) => return Err(bad("no routed experts, though asked for")),
            (true, Some(raw)) => Some(experts(raw.get())?),
        };
        self.end = Some(End {
            reason,
            spans: choice.weight_versions,
            prompt_logprobs,
            routed_experts,
        });
        Ok(chunk)
    }

    fn reason(
        &self,
        reason: &str,
        matched: Option<StopReason>,
    ) -> Result<FinishReason, EngineError> {
        match reason {
            "length" if self.received == self.max_tokens => Ok(FinishReason::Length),
            // vLLM takes what does not fit its context and cuts it down.
            "length" => Err(bad(format!(
                "cut off after {} of {} tokens: its context is shorter than registered",
                self.received, self.max_tokens
            ))),
            "abort" => Ok(FinishReason::Aborted {
                message: "aborted by the engine".into(),
            }),
            "stop" => Ok(FinishReason::Stop(match matched {
                Some(StopReason::Token(id)) => Some(MatchedStop::Token(id)),
                Some(StopReason::Text(text)) => Some(MatchedStop::Text(text)),
                Some(StopReason::Other(_)) => None,
                // The end of sequence is not named: it is the last token.
                None => self.last_token.map(MatchedStop::Token),
            })),
            "error" => Err(EngineError::Failed("the engine failed midway".into())),
            _ => Err(bad("an unknown finish reason")),
        }
    }

    fn new_tokens(
        &mut self,
        tokens: Vec<u32>,
        positions: Option<Vec<Position>>,
    ) -> Result<Option<TokenChunk>, EngineError> {
        let total = u32::try_from(tokens.len())
            .ok()
            .and_then(|n| self.received.checked_add(n))
            .filter(|n| *n <= self.max_tokens)
            .ok_or_else(|| bad("more tokens than were asked for"))?;
        let (logprobs, top_logprobs) = if self.wanted.output {
            let positions = positions.unwrap_or_default();
            let logprobs = logprobs(&tokens, &positions)?;
            let top = match self.wanted.top_k {
                0 => None,
                top_k => Some(top(&positions, top_k)?),
            };
            (Some(logprobs), top)
        } else {
            (None, None)
        };
        let Some(&last) = tokens.last() else {
            return Ok(None);
        };
        self.received = total;
        self.last_token = Some(last);
        Ok(Some(TokenChunk {
            tokens,
            logprobs,
            top_logprobs,
            // Told at the end; of what is lost before it, nothing is known.
            weight_version: Some(UNKNOWN.into()),
        }))
    }

    /// The weights of every token, without gap or overlap.
    fn spans(&self, spans: Option<Vec<WireSpan>>) -> Result<Vec<WeightSpan>, EngineError> {
        let Some(spans) = spans.filter(|spans| !spans.is_empty()) else {
            // Versions before 0.32 tell none.
            return Ok(vec![WeightSpan {
                version: UNKNOWN.into(),
                start: 0,
                end: self.received,
            }]);
        };
        checks::versions(spans.iter().map(|span| &span.version))?;
        if !checks::cover(&spans, self.received) {
            return Err(checks::uncovered());
        }
        Ok(checks::spans(spans))
    }

    fn prompt_logprobs(&self, raw: &str) -> Result<PromptLogprobs, EngineError> {
        let Prompt::Tokens(ids) = &self.prompt else {
            return Err(bad("log probabilities of a text"));
        };
        let positions: Vec<PromptPosition> = serde_json::from_str(raw)
            .map_err(|e| bad(format!("log probabilities: {}", place(&e))))?;
        if positions.len() != ids.len() {
            return Err(bad(format!(
                "{} log probabilities for {} prompt tokens",
                positions.len(),
                ids.len()
            )));
        }
        let stride = self.wanted.prompt_top_k;
        let mut logprobs = Vec::with_capacity(ids.len());
        let mut top = Flat::new(stride, ids.len());
        for (index, (position, id)) in positions.iter().zip(ids.iter()).enumerate() {
            let Some(position) = position else {
                // Nothing comes before the first.
                if index > 0 {
                    return Err(bad("a prompt token has no log probability"));
                }
                logprobs.push(f32::NAN);
                top.push(Vec::new());
                continue;
            };
            // The token itself, besides the most likely ones.
            if position.len() > stride as usize + 1 {
                return Err(bad("more alternatives than were asked for"));
            }
            let own = position
                .get(id)
                .ok_or_else(|| bad("a log probability of another prompt token"))?;
            logprobs.push(own.logprob.unwrap_or(f32::NAN));
            let candidates = position.iter().map(|(&token_id, of)| Candidate {
                token_id,
                logprob: of.logprob,
                rank: of.rank,
            });
            top.push(candidates.collect());
        }
        Ok(PromptLogprobs {
            logprobs,
            top: (stride > 0).then_some(top.0),
        })
    }
}

/// One log probability per token, of that very token.
fn logprobs(tokens: &[u32], positions: &[Position]) -> Result<Vec<f32>, EngineError> {
    if positions.len() != tokens.len() {
        return Err(bad(format!(
            "{} log probabilities for {} tokens",
            positions.len(),
            tokens.len()
        )));
    }
    positions
        .iter()
        .zip(tokens)
        .map(|(position, id)| {
            if position.token_id != *id {
                return Err(bad("a log probability of another token"));
            }
            position
                .logprob
                .ok_or_else(|| bad("a generated token has no log probability"))
        })
        .collect()
}

fn top(positions: &[Position], top_k: u32) -> Result<TopLogprobs, EngineError> {
    let most = request::alternatives_asked(top_k) as usize;
    let mut flat = Flat::new(top_k, positions.len());
    for position in positions {
        if position.top_logprobs.len() > most {
            return Err(bad("more alternatives than were asked for"));
        }
        flat.push(position.top_logprobs.clone());
    }
    Ok(flat.0)
}

/// Positions of one width, each cut down or padded to it.
struct Flat(TopLogprobs);

impl Flat {
    fn new(stride: u32, positions: usize) -> Self {
        let size = positions.saturating_mul(stride as usize);
        Self(TopLogprobs {
            stride,
            token_ids: Vec::with_capacity(size),
            logprobs: Vec::with_capacity(size),
        })
    }

    /// Appends a position: the most likely, best first. The sampled token is
    /// listed wherever it stands.
    fn push(&mut self, mut candidates: Vec<Candidate>) {
        candidates.sort_by(|a, b| {
            let rank = |c: &Candidate| c.rank.unwrap_or(u32::MAX);
            let logprob = |c: &Candidate| c.logprob.unwrap_or(f32::NEG_INFINITY);
            rank(a)
                .cmp(&rank(b))
                .then(logprob(b).total_cmp(&logprob(a)))
        });
        let end = self.0.token_ids.len() + self.0.stride as usize;
        for candidate in candidates.iter().take(self.0.stride as usize) {
            self.0.token_ids.push(candidate.token_id);
            self.0.logprobs.push(candidate.logprob.unwrap_or(f32::NAN));
        }
        self.0.token_ids.resize(end, 0);
        self.0.logprobs.resize(end, f32::NAN);
    }
}

/// Base64 of an array as numpy saves it.
fn experts(raw: &str) -> Result<RoutedExperts, EngineError> {
    let file = checks::base64_bytes(raw, "routed experts")?;
    npy::parse(file).ok_or_else(|| bad("routed experts are no array of integers"))
}
