//! Checks before belief: one attempt's reply against what was asked. Nothing
//! passes on whose ids, counts, log probabilities or weight spans contradict
//! each other or the request; every such contradiction is
//! [`EngineError::BadReply`].

use super::{
    request,
    wire::{Entry, Frame, Matched, Meta, WireFinish},
    words::WORDS,
};
use crate::{
    call::{
        LogprobsWanted, MatchedStop, Prompt, PromptLogprobs, RoutedExperts, TopLogprobs, Usage,
        WeightSpan,
    },
    engine::{
        EngineError, EngineRequest, Finish, FinishReason, StreamMode, TokenChunk, attempt,
        checks::{self, WireSpan, bad, place},
    },
};

/// What SGLang gives as the matched stop when the model computed no numbers.
const NOT_A_NUMBER: &str = "NaN happened";

/// What has been received of one attempt.
pub(in crate::engine) struct Transcript {
    id: String,
    prompt: Prompt,
    max_tokens: u32,
    wanted: LogprobsWanted,
    top_asked: u32,
    experts: bool,
    /// Frames repeat everything so far.
    cumulative: bool,
    /// All tokens so far where frames are cumulative, to see that none changes.
    tokens: Vec<u32>,
    received: u32,
    text: Option<String>,
    max_text: usize,
    /// The version that each frame named for its new tokens: used where a
    /// scheduler's abort names none for them.
    observed: Vec<WeightSpan>,
    finished: bool,
    /// Held until the end mark.
    finish: Option<Box<Finish>>,
}

impl Transcript {
    pub(super) fn new(asked: &EngineRequest, max_text: usize) -> Self {
        Self {
            id: asked.id.as_str().to_owned(),
            prompt: asked.prompt.clone(),
            max_tokens: asked.max_tokens,
            wanted: asked.logprobs,
            top_asked: request::top_logprobs_num(asked),
            experts: asked.routed_experts,
            cumulative: asked.stream != StreamMode::Incremental,
            tokens: Vec::new(),
            received: 0,
            text: None,
            max_text,
            observed: Vec::new(),
            finished: false,
            finish: None,
        }
    }
}

impl attempt::Transcript for Transcript {
    fn received(&self) -> u32 {
        self.received
    }

    fn finish(&mut self) -> Result<Option<Box<Finish>>, EngineError> {
        Ok(self.finish.take())
    }

    fn accept(&mut self, json: &[u8]) -> Result<Option<TokenChunk>, EngineError> {
        let frame: Frame<'_> =
            serde_json::from_slice(json).map_err(|e| bad(format!("not a reply: {}", place(&e))))?;
        if let Some(error) = frame.error {
            return Err(WORDS.of_frame(error.get().as_bytes()));
        }
        if self.finished {
            return Err(bad("a frame after the finish"));
        }
        let meta = frame.meta_info.ok_or_else(|| bad("no meta_info"))?;
        if meta.id.as_deref() != Some(&*self.id) {
            return Err(bad("the reply is to another request id"));
        }
        let ids = frame.output_ids.unwrap_or_default();
        let thin = is_thin(&meta);
        if let Some(refused) = self.refused(&meta, ids.len()) {
            return Err(refused);
        }
        let chunk = self.new_tokens(ids, &meta, thin)?;
        if !thin {
            self.take_text(frame.text)?;
        }
        if let Some(reason) = &meta.finish_reason {
            let reason = finish_reason(reason)?;
            self.finished = true;
            self.finish = Some(Box::new(self.ended(reason, meta, thin)?));
        }
        Ok(chunk)
    }
}

impl Transcript {
    /// An abort before any token that says with a status why nothing was
    /// taken: in streams SGLang sends a full queue and refusals like this.
    fn refused(&self, meta: &Meta<'_>, ids: usize) -> Option<EngineError> {
        let reason = meta.finish_reason.as_ref()?;
        if reason.kind != "abort" || self.received > 0 || ids > 0 {
            return None;
        }
        let code = reason.status_code.filter(|code| *code >= 400)?;
        Some(WORDS.of_status(code, reason.message.as_deref(), None))
    }

    /// What `ids` adds to the tokens so far, with its log probabilities.
    fn new_tokens(
        &mut self,
        ids: Vec<u32>,
        meta: &Meta<'_>,
        thin: bool,
    ) -> Result<Option<TokenChunk>, EngineError> {
        // A scheduler's abort repeats nothing of what was sent before.
        if thin && ids.is_empty() {
            return Ok(None);
        }
        let from = if self.cumulative {
            self.tokens.len()
        } else {
            0
        };
        if ids.len() < from || (self.cumulative && ids[..from] != self.tokens[..]) {
            return Err(bad("tokens that were sent before are gone or changed"));
        }
        let fresh = &ids[from..];
        let total = u32::try_from(fresh.len())
            .ok()
            .and_then(|n| self.received.checked_add(n))
            .filter(|n| *n <= self.max_tokens)
            .ok_or_else(|| bad("more tokens than were asked for"))?;

        let logprobs = if self.wanted.output || self.wanted.prompt {
            self.output_logprobs(meta, &ids, from)?
        } else {
            None
        };
        let top_logprobs = if self.wanted.output && self.wanted.top_k > 0 {
            Some(self.output_top(meta, ids.len(), from)?)
        } else {
            None
        };
        if fresh.is_empty() {
            return Ok(None);
        }
        if let Some(version) = &meta.weight_version {
            self.observe(version, total);
        }
        self.received = total;
        let tokens = fresh.to_vec();
        if self.cumulative {
            self.tokens = ids;
        }
        Ok(Some(TokenChunk {
            tokens,
            logprobs,
            top_logprobs,
            weight_version: meta.weight_version.clone(),
        }))
    }

    /// One log probability per token, of that very token.
    fn output_logprobs(
        &self,
        meta: &Meta<'_>,
        ids: &[u32],
        from: usize,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        let entries = meta.output_token_logprobs.as_deref().unwrap_or_default();
        if entries.len() != ids.len() {
            return Err(bad(format!(
                "{} log probabilities for {} tokens",
                entries.len(),
                ids.len()
            )));
        }
        if entries.iter().zip(ids).any(|(entry, id)| entry.id != *id) {
            return Err(bad("a log probability of another token"));
        }
        if !self.wanted.output {
            return Ok(None);
        }
        entries[from..]
            .iter()
            .map(|entry| entry.logprob)
            .collect::<Option<Vec<f32>>>()
            .map(Some)
            .ok_or_else(|| bad("a generated token has no log probability"))
    }

    fn output_top(
        &self,
        meta: &Meta<'_>,
        count: usize,
        from: usize,
    ) -> Result<TopLogprobs, EngineError> {
        let rows = meta.output_top_logprobs.as_deref().unwrap_or_default();
        if rows.len() != count {
            return Err(bad(format!(
                "alternatives for {} positions of {count}",
                rows.len()
            )));
        }
        self.flatten(&rows[from..], self.wanted.top_k)
    }

    /// Cuts every position down to `stride` candidates and pads it up to it.
    fn flatten(
        &self,
        rows: &[Option<Vec<Entry>>],
        stride: u32,
    ) -> Result<TopLogprobs, EngineError> {
        let width = stride as usize;
        let mut flat = TopLogprobs {
            stride,
            token_ids: Vec::with_capacity(rows.len() * width),
            logprobs: Vec::with_capacity(rows.len() * width),
        };
        for (index, row) in rows.iter().enumerate() {
            let row = row.as_deref().unwrap_or_default();
            if row.len() > self.top_asked as usize {
                return Err(bad("more alternatives than were asked for"));
            }
            for entry in row.iter().take(width) {
                flat.token_ids.push(entry.id);
                // A token that a grammar rules out comes without a number.
                flat.logprobs.push(entry.logprob.unwrap_or(f32::NAN));
            }
            flat.token_ids.resize((index + 1) * width, 0);
            flat.logprobs.resize((index + 1) * width, f32::NAN);
        }
        Ok(flat)
    }

    fn observe(&mut self, version: &str, end: u32) {
        match self.observed.last_mut() {
            Some(last) if last.version == version => last.end = end,
            _ => self.observed.push(WeightSpan {
                version: version.to_owned(),
                start: self.received,
                end,
            }),
        }
    }

    fn take_text(&mut self, text: Option<String>) -> Result<(), EngineError> {
        let Some(text) = text else { return Ok(()) };
        if self.cumulative {
            self.text = Some(text);
        } else {
            self.text.get_or_insert_default().push_str(&text);
        }
        if self.text.as_ref().is_some_and(|t| t.len() > self.max_text) {
            return Err(bad("too much text"));
        }
        Ok(())
    }

    fn ended(
        &mut self,
        reason: FinishReason,
        mut meta: Meta<'_>,
        thin: bool,
    ) -> Result<Finish, EngineError> {
        let aborted = matches!(reason, FinishReason::Aborted { .. });
        if !thin && meta.completion_tokens != Some(self.received) {
            return Err(bad(format!(
                "{} tokens came, {} were counted",
                self.received,
                meta.completion_tokens.unwrap_or(0)
            )));
        }
        let known_prompt = self
            .prompt
            .token_count()
            .and_then(|n| u32::try_from(n).ok());
        let prompt_tokens = match (meta.prompt_tokens, known_prompt) {
            (Some(counted), Some(sent)) if counted != sent => {
                return Err(bad(format!(
                    "{sent} prompt tokens were sent, {counted} were counted"
                )));
            }
            (Some(counted), _) => counted,
            (None, known) if thin => known.unwrap_or(0),
            (None, _) => return Err(bad("the prompt's tokens are not counted")),
        };
        let cached_tokens = meta.cached_tokens.unwrap_or(0);
        if cached_tokens > prompt_tokens {
            return Err(bad("more tokens cached than the prompt has"));
        }
        let weight_spans = self.spans(
            meta.weight_versions.take(),
            meta.weight_version.take(),
            thin,
        )?;
        // What was cut short may lack what comes with the end.
        let prompt_logprobs = match (self.wanted.prompt, meta.input_token_logprobs) {
            (false, _) => None,
            (true, None) if aborted => None,
            (true, _) => Some(self.prompt_logprobs(&meta, prompt_tokens)?),
        };
        let routed_experts = match (self.experts, meta.routed_experts) {
            (false, _) => None,
            (true, None) if aborted => None,
            (true, None) => return Err(bad("no routed experts, though asked for")),
            (true, Some(raw)) => Some(experts(raw.get())?),
        };
        Ok(Finish {
            reason,
            usage: Usage {
                prompt_tokens,
                cached_tokens,
                completion_tokens: self.received,
            },
            served_rank: meta.dp_rank,
            weight_spans,
            prompt_logprobs,
            text: self.text.take(),
            routed_experts,
        })
    }

    /// The weights of every token, without gap or overlap.
    fn spans(
        &mut self,
        spans: Option<Vec<WireSpan>>,
        version: Option<String>,
        thin: bool,
    ) -> Result<Vec<WeightSpan>, EngineError> {
        let named = spans.as_deref().unwrap_or_default();
        checks::versions(named.iter().map(|span| &span.version).chain(&version))?;
        let whole = checks::cover(named, self.received);
        match (spans, version) {
            (Some(spans), _) if whole && !spans.is_empty() => Ok(checks::spans(spans)),
            (_, version) if thin => {
                if self.observed.last().map_or(0, |span| span.end) == self.received
                    && self.observed.first().map_or(0, |span| span.start) == 0
                    && self.received > 0
                {
                    return Ok(std::mem::take(&mut self.observed));
                }
                match version {
                    Some(version) => Ok(vec![self.one_span(version)]),
                    None if self.received == 0 => Ok(Vec::new()),
                    None => Err(bad("tokens without a weight version")),
                }
            }
            (None, Some(version)) => Ok(vec![self.one_span(version)]),
            (None, None) => Err(bad("no weight version")),
            (Some(_), _) => Err(checks::uncovered()),
        }
    }

    fn one_span(&self, version: String) -> WeightSpan {
        WeightSpan {
            version,
            start: 0,
            end: self.received,
        }
    }

    fn prompt_logprobs(
        &self,
        meta: &Meta<'_>,
        prompt_tokens: u32,
    ) -> Result<PromptLogprobs, EngineError> {
        let entries: Vec<Entry> = parse(meta.input_token_logprobs)?;
        if entries.len() != prompt_tokens as usize {
            return Err(bad(format!(
                "{} log probabilities for {prompt_tokens} prompt tokens",
                entries.len()
            )));
        }
        if let Prompt::Tokens(ids) = &self.prompt
            && entries
                .iter()
                .zip(ids.iter())
                .any(|(entry, id)| entry.id != *id)
        {
            return Err(bad("a log probability of another prompt token"));
        }
        let top = if self.wanted.prompt_top_k > 0 {
            let rows: Vec<Option<Vec<Entry>>> = parse(meta.input_top_logprobs)?;
            if rows.len() != entries.len() {
                return Err(bad("alternatives for a part of the prompt"));
            }
            Some(self.flatten(&rows, self.wanted.prompt_top_k)?)
        } else {
            None
        };
        Ok(PromptLogprobs {
            logprobs: entries
                .iter()
                .map(|entry| entry.logprob.unwrap_or(f32::NAN))
                .collect(),
            top,
        })
    }
}

/// A scheduler's own abort: no counts of the prompt, no rank, no tokens.
fn is_thin(meta: &Meta<'_>) -> bool {
    meta.prompt_tokens.is_none()
        && meta
            .finish_reason
            .as_ref()
            .is_some_and(|reason| reason.kind == "abort")
}

fn finish_reason(reason: &WireFinish) -> Result<FinishReason, EngineError> {
    match reason.kind.as_str() {
        "length" => Ok(FinishReason::Length),
        "abort" => Ok(FinishReason::Aborted {
            message: WORDS.abort_message(reason.message.as_deref()),
        }),
        "stop" => match &reason.matched {
            // Its tokens are no sample of the model.
            Some(Matched::Text(text)) if text == NOT_A_NUMBER => {
                Err(EngineError::Failed("the model computed no numbers".into()))
            }
            Some(Matched::Text(text)) => {
                Ok(FinishReason::Stop(Some(MatchedStop::Text(text.clone()))))
            }
            Some(Matched::Token(id)) => Ok(FinishReason::Stop(Some(MatchedStop::Token(*id)))),
            Some(Matched::Other(_)) | None => Ok(FinishReason::Stop(None)),
        },
        _ => Err(bad("an unknown finish reason")),
    }
}

/// Base64 of 32-bit numbers. Their shape (tokens, layers, experts) is not on
/// the wire: they are passed on flat.
fn experts(raw: &str) -> Result<RoutedExperts, EngineError> {
    let data = checks::base64_bytes(raw, "routed experts")?;
    let numbers = u32::try_from(data.len() / 4).unwrap_or(u32::MAX);
    if data.len() % 4 != 0 {
        return Err(bad("routed experts are not 32-bit numbers"));
    }
    Ok(RoutedExperts {
        data: data.into(),
        dtype: "int32".into(),
        shape: vec![numbers],
    })
}

fn parse<T: serde::de::DeserializeOwned>(
    raw: Option<&serde_json::value::RawValue>,
) -> Result<Vec<T>, EngineError> {
    let raw = raw.ok_or_else(|| bad("no log probabilities of the prompt"))?;
    serde_json::from_str(raw.get()).map_err(|e| bad(format!("log probabilities: {}", place(&e))))
}
