//! Writes replies and frames with the recorded keys in the recorded order.

use serde::Serialize;
use tokio::time::Instant;

use super::{
    history::Clock,
    scheduler::{Done, Ended, Event, Refusal, Span},
    tokens::Rolling,
};

/// `[logprob, id, null]`: the null stands where a text would.
type Entry = (Option<f64>, u32, ());

#[derive(Serialize)]
struct Reply<'a> {
    output_ids: &'a [u32],
    meta_info: Meta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    finish_reason: Option<Finish>,
    prompt_tokens: usize,
    weight_version: &'a str,
    num_retractions: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<&'a [Entry]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<&'a [Entry]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<&'a [Option<Vec<Entry>>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<&'a [Option<Vec<Entry>>]>,
    reasoning_tokens: u32,
    completion_tokens: usize,
    cached_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<Vec<Version<'a>>>,
    cached_tokens_details: Option<Details>,
    dp_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_sent_to_client_ts: Option<f64>,
}

#[derive(Serialize)]
struct Details {
    device: u32,
    host: u32,
}

#[derive(Serialize)]
struct Version<'a> {
    version: &'a str,
    start: u32,
    end: u32,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Finish {
    Stop {
        matched: u32,
    },
    Length {
        length: u32,
    },
    Abort {
        message: &'static str,
        status_code: (),
        err_type: (),
    },
}

/// A scheduler's abort: it never ran, or has lost its place.
#[derive(Serialize)]
struct Thin<'a> {
    text: &'static str,
    output_ids: &'a [u32],
    meta_info: ThinMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct ThinMeta<'a> {
    id: &'a str,
    finish_reason: ThinFinish,
    weight_version: &'a str,
    e2e_latency: f64,
    weight_versions: [Version<'a>; 1],
    completion_tokens: usize,
    response_sent_to_client_ts: f64,
}

#[derive(Serialize)]
struct ThinFinish {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status_code: Option<u16>,
    message: &'static str,
}

impl Refusal {
    /// The status of a plain reply, and the message.
    pub(super) fn words(self) -> (Option<u16>, &'static str) {
        match self {
            Self::QueueFull => (Some(503), "The request queue is full."),
            Self::Displaced => (
                Some(503),
                "The request is aborted by a higher priority request.",
            ),
            Self::AbortedWaiting => (None, "Abort in waiting queue"),
            // Inferred.
            Self::TooLarge => (
                Some(400),
                "The input is longer than the KV cache of this rank.",
            ),
        }
    }
}

/// Log probabilities of one sequence.
#[derive(Debug, Default)]
struct Logprobs {
    rolling: Rolling,
    vocab: u32,
    top: usize,
    input: Vec<Entry>,
    input_top: Vec<Option<Vec<Entry>>>,
    output: Vec<Entry>,
    output_top: Vec<Option<Vec<Entry>>>,
}

fn entries(list: Vec<(f32, u32)>) -> Option<Vec<Entry>> {
    let entry = |(logprob, id)| (Some(f64::from(logprob)), id, ());
    Some(list.into_iter().map(entry).collect())
}

impl Logprobs {
    /// Of a prompt, from token `start` on.
    fn of_prompt(prompt: &[u32], start: usize, top: usize, vocab: u32) -> Self {
        let mut this = Self {
            vocab,
            top,
            ..Self::default()
        };
        for (at, &token) in prompt.iter().enumerate() {
            if at == start {
                // Nothing that was computed comes before it.
                this.input.push((None, token, ()));
                this.input_top.push(None);
            } else if at > start {
                let logprob = f64::from(this.rolling.logprob(token));
                this.input.push((Some(logprob), token, ()));
                this.input_top
                    .push(entries(this.rolling.top(top, vocab, None)));
            }
            this.rolling.push(token);
        }
        this
    }

    fn push(&mut self, token: u32) {
        let logprob = f64::from(self.rolling.logprob(token));
        self.output.push((Some(logprob), token, ()));
        let top = self.rolling.top(self.top, self.vocab, Some(token));
        self.output_top.push(entries(top));
        self.rolling.push(token);
    }
}

/// One sequence as its reply shows it.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) rid: std::sync::Arc<str>,
    prompt_tokens: usize,
    output: Vec<u32>,
    logprobs: Option<Logprobs>,
    cached: u32,
    rank: Option<u32>,
    arrived: Instant,
    framed: bool,
}

/// How the reply is written.
#[derive(Clone, Copy)]
pub(super) struct Style<'a> {
    pub(super) clock: &'a Clock,
    pub(super) version: &'a str,
    pub(super) stream: bool,
    pub(super) incremental: bool,
    /// The sequence's place where the call has several.
    pub(super) index: Option<usize>,
}

/// What an event comes to.
pub(super) enum Said {
    /// Nothing yet.
    Nothing,
    /// A frame; with `last` the sequence is over.
    Frame { json: Vec<u8>, last: bool },
    /// In a plain reply, this status and message instead of any result.
    Error(u16, &'static str),
}

impl Sequence {
    /// A sequence for `prompt`. `logprobs`: the first prompt token to score, and
    /// how many alternatives.
    pub(super) fn new(
        rid: std::sync::Arc<str>,
        prompt: &[u32],
        logprobs: Option<(usize, usize)>,
        vocab: u32,
        arrived: Instant,
    ) -> Self {
        Self {
            rid,
            prompt_tokens: prompt.len(),
            output: Vec::new(),
            logprobs: logprobs.map(|(start, top)| Logprobs::of_prompt(prompt, start, top, vocab)),
            cached: 0,
            rank: None,
            arrived,
            framed: false,
        }
    }

    /// Which rank serves it, where there are several.
    pub(super) fn served_by(&mut self, rank: Option<u32>) {
        self.rank = rank;
    }

    /// Output tokens so far.
    pub(super) fn len(&self) -> usize {
        self.output.len()
    }

    /// Takes an event in.
    pub(super) fn take(&mut self, event: &Event, style: Style<'_>) -> Said {
        match event {
            Event::Started { cached, .. } => {
                self.cached = *cached;
                Said::Nothing
            }
            Event::Crashed { .. } => Said::Nothing,
            Event::Progress {
                tokens,
                retractions,
                ..
            } => {
                self.extend(tokens);
                let json = self.frame(tokens, None, *retractions, style);
                Said::Frame { json, last: false }
            }
            Event::Done { done, .. } => {
                self.extend(&done.tokens);
                let json = self.frame(&done.tokens, Some(done), done.retractions, style);
                Said::Frame { json, last: true }
            }
            Event::Refused { why, tokens, .. } => {
                self.extend(tokens);
                let (status, message) = why.words();
                match status {
                    Some(status) if !style.stream => Said::Error(status, message),
                    _ => Said::Frame {
                        json: self.thin(tokens, status, message, style),
                        last: true,
                    },
                }
            }
        }
    }

    fn extend(&mut self, tokens: &[u32]) {
        self.output.extend_from_slice(tokens);
        if let Some(logprobs) = &mut self.logprobs {
            for &token in tokens {
                logprobs.push(token);
            }
        }
    }

    fn frame(
        &mut self,
        new: &[u32],
        done: Option<&Done>,
        retractions: u32,
        style: Style<'_>,
    ) -> Vec<u8> {
        let now = Instant::now();
        let from = if style.stream && style.incremental {
            self.output.len() - new.len()
        } else {
            0
        };
        let first = !std::mem::replace(&mut self.framed, true);
        let wanted = self.logprobs.as_ref();
        let top = wanted.filter(|l| l.top > 0);
        let reply = Reply {
            output_ids: &self.output[from..],
            meta_info: Meta {
                id: &self.rid,
                finish_reason: done.map(finish),
                prompt_tokens: self.prompt_tokens,
                weight_version: style.version,
                num_retractions: retractions,
                input_token_logprobs: wanted.map(|l| &*l.input),
                output_token_logprobs: wanted.map(|l| &l.output[from..]),
                output_token_logprobs_length: wanted.map(|l| l.output.len()),
                input_top_logprobs: top.map(|l| &*l.input_top),
                output_top_logprobs: top.map(|l| &l.output_top[from..]),
                reasoning_tokens: 0,
                completion_tokens: self.output.len(),
                cached_tokens: self.cached,
                weight_versions: done.map(|done| done.spans.iter().map(version).collect()),
                cached_tokens_details: (self.cached > 0).then_some(Details {
                    device: self.cached,
                    host: 0,
                }),
                dp_rank: self.rank,
                e2e_latency: done.map(|_| (now - self.arrived).as_secs_f64()),
                response_sent_to_client_ts: first.then(|| style.clock.unix(now)),
            },
            index: style.index.filter(|_| style.stream),
        };
        serde_json::to_vec(&reply).unwrap_or_default()
    }

    fn thin(
        &self,
        new: &[u32],
        status_code: Option<u16>,
        message: &'static str,
        style: Style<'_>,
    ) -> Vec<u8> {
        let now = Instant::now();
        let shown = if style.stream && style.incremental {
            new
        } else {
            &self.output[..]
        };
        let end = u32::try_from(self.output.len()).unwrap_or(u32::MAX);
        let reply = Thin {
            text: "",
            output_ids: shown,
            meta_info: ThinMeta {
                id: &self.rid,
                finish_reason: ThinFinish {
                    r#type: "abort",
                    status_code,
                    message,
                },
                weight_version: style.version,
                e2e_latency: (now - self.arrived).as_secs_f64(),
                weight_versions: [Version {
                    version: style.version,
                    start: 0,
                    end,
                }],
                completion_tokens: self.output.len(),
                response_sent_to_client_ts: style.clock.unix(now),
            },
            index: style.index.filter(|_| style.stream),
        };
        serde_json::to_vec(&reply).unwrap_or_default()
    }
}

fn version(span: &Span) -> Version<'_> {
    Version {
        version: &span.version,
        start: span.start,
        end: span.end,
    }
}

fn finish(done: &Done) -> Finish {
    match done.ended {
        Ended::Stop(matched) => Finish::Stop { matched },
        Ended::Length => Finish::Length { length: done.total },
        Ended::Aborted => Finish::Abort {
            message: "Aborted",
            status_code: (),
            err_type: (),
        },
    }
}
