//! Engines behind a trait: what dispatch may ask of one, whatever it speaks.
//!
//! A client translates and checks; it decides nothing about retries. It never
//! reports a generation as finished unless the engine said so: a stream without
//! its end mark is [`EngineError::Lost`].

mod attempt;
mod checks;
pub mod egress;
pub mod facts;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod http;
mod refusal;
pub mod sglang;
pub mod sim;
pub mod sse;
pub mod url;
pub mod vllm;

use std::{sync::Arc, time::Duration};

pub use attempt::ClientConfig;
use futures_util::{future::BoxFuture, stream::BoxStream};

use crate::{
    call::{
        LogprobsWanted, MatchedStop, Prompt, PromptLogprobs, RoutedExperts, Sampling, TopLogprobs,
        Usage, WeightSpan,
    },
    ids::EngineRequestId,
};

/// The events of one attempt, in order: any number of [`EngineEvent::Tokens`],
/// then [`EngineEvent::Finished`], or an error at any point. Nothing follows
/// either. Dropping it closes the connection to the engine, which stops a
/// streamed generation within some 25 ms and a plain one within some 4 s:
/// call [`EngineClient::abort`] as well.
pub type EngineStream = BoxStream<'static, Result<EngineEvent, EngineError>>;

/// What dispatch may ask of an engine.
pub trait EngineClient: Send + Sync + 'static {
    /// Starts one attempt of one sample. Nothing is sent before the stream is
    /// first polled.
    fn generate(&self, request: EngineRequest) -> EngineStream;

    /// Tells the engine to stop this attempt. `Ok` means that the engine has
    /// answered, not that it knew the id: an abort that overtakes its request
    /// is answered the same way and does nothing.
    fn abort(&self, url: &str, id: &EngineRequestId)
    -> BoxFuture<'static, Result<(), EngineError>>;

    /// A cheap question whether the engine takes new work.
    fn ready(&self, url: &str) -> BoxFuture<'static, Result<(), EngineError>>;
}

/// One attempt of one sample, complete: nothing is left to an engine's defaults.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// The engine's own base URL, `http://host:port`.
    pub url: Arc<str>,
    /// Names this attempt at the engine.
    pub id: EngineRequestId,
    /// The number by which the engine knows the rank.
    pub rank: u32,
    /// The whole prompt, with kept tokens of a lost attempt appended.
    pub prompt: Prompt,
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// How to sample.
    pub sampling: SamplingRef,
    /// Log probabilities wanted.
    pub logprobs: LogprobsWanted,
    /// A LoRA adapter's name.
    pub adapter: Option<Arc<str>>,
    /// Greater is served earlier; unset where the engine has no priorities.
    pub priority: Option<i32>,
    /// Return the experts.
    pub routed_experts: bool,
    /// How the answer comes.
    pub stream: StreamMode,
    /// The header by which the engine's own trace joins this one's.
    pub traceparent: Option<::http::HeaderValue>,
}

/// Sampling parameters: those that all samples share, and what is an attempt's
/// own, which goes before the shared `seed`, `min_tokens` and `max_tokens`.
#[derive(Clone)]
pub struct SamplingRef {
    /// As the request has them.
    pub shared: Arc<Sampling>,
    /// This sample's seed.
    pub seed: Option<u64>,
    /// Tokens that this attempt must still generate before a stop counts.
    pub min_tokens: u32,
}

impl std::fmt::Debug for SamplingRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SamplingRef").finish_non_exhaustive()
    }
}

/// How the answer comes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamMode {
    /// One reply at the end.
    Plain,
    /// Frames with what is new.
    Incremental,
    /// Frames with everything so far, one every so many tokens: wide, since a
    /// cumulative frame per token is quadratic in the output.
    Cumulative {
        /// Tokens between frames.
        interval: u32,
    },
}

/// Something that an engine said.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// More tokens.
    Tokens(TokenChunk),
    /// The generation ended.
    Finished(Box<Finish>),
}

/// Tokens that follow those of the chunks before.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenChunk {
    /// Their ids.
    pub tokens: Vec<u32>,
    /// One per token, where asked for.
    pub logprobs: Option<Vec<f32>>,
    /// Alternatives, where asked for.
    pub top_logprobs: Option<TopLogprobs>,
    /// The weights that made them, where the engine says so in each frame.
    pub weight_version: Option<String>,
}

/// How a generation ended. Its tokens came before.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Counts, checked against what was received.
    pub usage: Usage,
    /// The rank that served, where the engine says.
    pub served_rank: Option<u32>,
    /// Which weights generated which tokens; covers all tokens.
    pub weight_spans: Vec<WeightSpan>,
    /// Of the prompt, where asked for.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// From an engine with a tokenizer.
    pub text: Option<String>,
    /// Where asked for.
    pub routed_experts: Option<RoutedExperts>,
}

/// Why a generation ended, in the engine's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End of sequence or a stop.
    Stop(Option<MatchedStop>),
    /// As many tokens as asked for.
    Length,
    /// Ended early by the engine or by an abort. What came before is a part.
    Aborted {
        /// The engine's message.
        message: String,
    },
}

/// Why an attempt gave no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// No connection could be made: nothing was sent.
    #[error("connection refused: {0}")]
    Refused(String),
    /// The engine's queue is full; it has taken nothing.
    #[error("engine busy: {message}")]
    Busy {
        /// The engine's message.
        message: String,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
    /// The engine says that the request is at fault, and always will be.
    #[error("refused by the engine: {0}")]
    Rejected(String),
    /// The engine does not have the adapter; it has taken nothing.
    #[error("no such adapter: {0}")]
    AdapterMissing(String),
    /// The connection broke or the answer ended without its end mark: whether
    /// the engine still runs it is unknown.
    #[error("lost: {0}")]
    Lost(String),
    /// The engine failed (5xx other than busy).
    #[error("engine failed: {0}")]
    Failed(String),
    /// What answers says that the engine behind it has died: nothing runs there any
    /// more, though its port is open still.
    #[error("engine died: {0}")]
    Died(String),
    /// The answer contradicts the request or is no answer.
    #[error("bad reply: {0}")]
    BadReply(String),
}
