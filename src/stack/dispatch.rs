//! One attempt at one engine: written down, sent, followed to its end, checked.
//!
//! What it guarantees: the attempt is in the journal before its first byte
//! leaves; when it is over here its connection is closed; a reply that
//! contradicts the request is not believed.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{StreamExt, future::BoxFuture};
use tower::Service;

use super::{
    Engines, Parts,
    affinity::{AttemptDone, RoutedAttempt},
    partial::Partial,
};
use crate::{
    call::Prompt,
    engine::{
        EngineClient, EngineError, EngineEvent, EngineRequest, Finish, FinishReason, SamplingRef,
        StreamMode,
    },
    error::Error,
    failpoint::{self, Point},
    fleet::health::HealthConfig,
    ids::EngineRequestId,
    routing::moves::Queued,
    store::AttemptRecord,
    telemetry::{
        attempt::{self, About},
        layer::Named,
        metrics::Metrics,
    },
};

/// Frames of a cumulative stream, over a whole generation, at most about this
/// many: each repeats everything before it.
const CUMULATIVE_FRAMES: u32 = 16;

/// Tokens of one frame of an incremental stream: the interval is a flag of the
/// server, and not told; a wider one is covered by what is allowed on top.
const INCREMENTAL_FRAME: u32 = 10;

/// A failed attempt.
#[derive(Debug)]
pub struct AttemptFailed {
    /// How.
    pub failure: Failure,
    /// All tokens of the sample, this attempt's included.
    pub tokens: Partial,
}

/// How an attempt failed.
#[derive(Debug)]
pub enum Failure {
    /// No connection: nothing was sent.
    Refused(String),
    /// The engine has taken nothing.
    Busy {
        /// Its message.
        message: String,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
    /// Broken off.
    Lost(String),
    /// Its engine has died, as what answers for it says.
    Died(String),
    /// The engine ended it early, by itself.
    Aborted(Box<Finish>),
    /// The reply contradicts the request.
    BadReply(String),
    /// Its rank gave no request an answer: it was given up.
    Silent,
    /// Tokens come from other weights than were asked for.
    OtherWeights {
        /// These.
        version: String,
        /// The engine came to its own end.
        ended: bool,
    },
    /// The engine does not have the adapter; it has taken nothing.
    AdapterMissing(String),
    /// The engine says that the request is at fault.
    Rejected(String),
    /// Nobody waits for it any more, or it was cancelled.
    Stopped,
    /// Something of our own is in the way.
    Fatal(Error),
}

impl Named for AttemptFailed {
    fn name(&self) -> &'static str {
        match &self.failure {
            Failure::Refused(_) => "refused",
            Failure::Busy { .. } => "busy",
            Failure::Lost(_) => "lost",
            Failure::Died(_) => "died",
            Failure::Aborted(_) => "ended_early",
            Failure::BadReply(_) => "bad_reply",
            Failure::Silent => "silent",
            Failure::OtherWeights { .. } => "other_weights",
            Failure::AdapterMissing(_) => "without_adapter",
            Failure::Rejected(_) => "rejected",
            Failure::Stopped => "stopped",
            Failure::Fatal(error) => error.reason.name(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(m)
            | Self::Lost(m)
            | Self::Died(m)
            | Self::BadReply(m)
            | Self::AdapterMissing(m)
            | Self::Rejected(m) => f.write_str(m),
            Self::Silent => f.write_str("its rank gave no request an answer for too long"),
            Self::OtherWeights { version, .. } => {
                write!(f, "weights {version:?} made tokens, others were asked for")
            }
            Self::Busy { message, .. } => f.write_str(message),
            Self::Aborted(finish) => match &finish.reason {
                FinishReason::Aborted { message } => f.write_str(message),
                FinishReason::Stop(_) | FinishReason::Length => f.write_str("ended early"),
            },
            Self::Stopped => f.write_str("stopped"),
            Self::Fatal(error) => error.fmt(f),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Refused(m) => Self::Refused(m),
            EngineError::Busy {
                message,
                retry_after,
            } => Self::Busy {
                message,
                retry_after,
            },
            EngineError::Rejected(m) => Self::Rejected(m),
            EngineError::Lost(m) | EngineError::Failed(m) => Self::Lost(m),
            EngineError::Died(m) => Self::Died(m),
            EngineError::BadReply(m) => Self::BadReply(m),
            EngineError::AdapterMissing(m) => Self::AdapterMissing(m),
        }
    }
}

/// The service at the end of the stack.
#[derive(Clone)]
pub struct Dispatch {
    engines: Engines,
    health: HealthConfig,
    metrics: Arc<Metrics>,
}

impl Dispatch {
    /// With these clients, as patient as the fleet's configuration says.
    pub fn new(parts: &Parts) -> Self {
        Self {
            engines: parts.engines.clone(),
            health: parts.fleet.config().health,
            metrics: Arc::clone(&parts.metrics),
        }
    }
}

impl Service<RoutedAttempt> for Dispatch {
    type Response = AttemptDone;
    type Error = AttemptFailed;
    type Future = BoxFuture<'static, Result<AttemptDone, AttemptFailed>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), AttemptFailed>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, attempt: RoutedAttempt) -> Self::Future {
        let kind = attempt.rank.replica.facts.engine;
        let client = Arc::clone(self.engines.client(kind));
        let run = Run {
            client,
            attempt,
            health: self.health,
            metrics: Arc::clone(&self.metrics),
        };
        Box::pin(run.run())
    }
}

struct Run {
    client: Arc<dyn EngineClient>,
    attempt: RoutedAttempt,
    health: HealthConfig,
    metrics: Arc<Metrics>,
}

impl Run {
    async fn run(mut self) -> Result<AttemptDone, AttemptFailed> {
        let mut tokens = self.attempt.kept.clone();
        let queued = std::mem::take(&mut self.attempt.queued);
        match self.follow(&self.attempt.id, queued, &mut tokens).await {
            Ok(finish) => Ok(AttemptDone { tokens, finish }),
            Err(failure) => Err(AttemptFailed { failure, tokens }),
        }
    }

    async fn follow(
        &self,
        id: &EngineRequestId,
        queued: Queued,
        tokens: &mut Partial,
    ) -> Result<Finish, Failure> {
        let mut queued = Some(queued);
        let attempt = &self.attempt;
        let base = tokens.len();
        let request = self.request(id);
        let budget = request.max_tokens;
        let record = AttemptRecord {
            number: attempt.number,
            id: id.clone(),
            target: attempt.rank.target.clone(),
            url: attempt.rank.url.to_string(),
            binds: attempt.pin.map(|pin| pin.0),
        };
        failpoint::pass(Point::Dispatch);
        attempt
            .work
            .journal
            .dispatch(attempt.sample, record)
            .await
            .map_err(Failure::Fatal)?;
        failpoint::pass(Point::Dispatched);

        let stop = attempt.work.generation.stop_token();
        let (first, next) = self.patience(&request);
        let flight = attempt.rank.load.watch().begin(first);
        let mut begun = false;
        let facts = &attempt.rank.replica.facts;
        let about = About {
            model: &facts.model,
            engine: facts.engine,
            target: &attempt.rank.target,
            sample: attempt.sample,
            number: attempt.number,
        };
        let mut events = attempt::generate(&*self.client, request, &about, &self.metrics);
        failpoint::pass_soon(Point::Sent);
        let failure = loop {
            let event = tokio::select! {
                biased;
                () = stop.cancelled() => break Failure::Stopped,
                () = flight.given_up() => break Failure::Silent,
                event = events.next() => event,
            };
            match event {
                Some(Ok(EngineEvent::Tokens(chunk))) => {
                    // The prompt is computed.
                    drop(queued.take());
                    if std::mem::replace(&mut begun, true) {
                        flight.sign();
                    } else {
                        flight.begun(next);
                    }
                    if let Some(wrong) =
                        self.wrong_tokens(&chunk.tokens, tokens.len(), base, budget)
                    {
                        break Failure::BadReply(wrong);
                    }
                    // Unnamed ones are named at the end.
                    if let Some(version) = chunk.weight_version.as_deref()
                        && !version.is_empty()
                        && !self.admits(version)
                    {
                        break Failure::OtherWeights {
                            version: version.to_owned(),
                            ended: false,
                        };
                    }
                    attempt.work.generation.push(attempt.sample, &chunk);
                    tokens.push(chunk, attempt.started);
                    failpoint::pass(Point::Token);
                }
                Some(Ok(EngineEvent::Finished(finish))) => {
                    flight.sign();
                    tokens.finish(base, &finish);
                    if let Some(version) = self.wrong_weights(tokens) {
                        return Err(Failure::OtherWeights {
                            version,
                            ended: true,
                        });
                    }
                    if matches!(finish.reason, FinishReason::Aborted { .. }) {
                        return Err(Failure::Aborted(finish));
                    }
                    failpoint::pass(Point::Ended);
                    return Ok(*finish);
                }
                Some(Err(error)) => break error.into(),
                None => break Failure::Lost("the reply ended without its end".to_owned()),
            }
        };
        // Closes the connection. What may still run there is fenced by who decides
        // about the next attempt.
        drop(events);
        Err(failure)
    }

    fn request(&self, id: &EngineRequestId) -> EngineRequest {
        let attempt = &self.attempt;
        let params = attempt.work.call.params();
        let facts = &attempt.rank.replica.facts;
        let kept = attempt.kept.len();
        let prompt = match &params.prompt {
            Prompt::Tokens(ids) if kept > 0 => {
                let all: Vec<u32> = ids.iter().chain(&attempt.kept.tokens).copied().collect();
                Prompt::Tokens(all.into())
            }
            same => same.clone(),
        };
        // Sent explicitly: engines' own defaults are 128, or the whole context.
        let max_tokens = match (params.sampling.max_tokens, prompt.token_count()) {
            (Some(max_tokens), _) => max_tokens.saturating_sub(kept),
            (None, Some(length)) => facts
                .context_length
                .saturating_sub(u32::try_from(length).unwrap_or(u32::MAX)),
            // Validation asks for max_tokens with a text prompt.
            (None, None) => 1,
        };
        let stream = if facts.capabilities.incremental_streaming {
            StreamMode::Incremental
        } else {
            StreamMode::Cumulative {
                interval: max_tokens.div_ceil(CUMULATIVE_FRAMES).max(64),
            }
        };
        EngineRequest {
            url: Arc::clone(&attempt.rank.url),
            id: id.clone(),
            rank: attempt.rank.engine_rank,
            prompt,
            max_tokens: max_tokens.max(1),
            sampling: SamplingRef {
                shared: Arc::clone(&params.sampling),
                seed: params
                    .sampling
                    .seed
                    .map(|seed| seed + u64::from(attempt.sample)),
                min_tokens: params.sampling.min_tokens.unwrap_or(0).saturating_sub(kept),
            },
            logprobs: params.logprobs,
            adapter: params.adapter.clone(),
            priority: facts
                .capabilities
                .priority
                .then(|| attempt.work.call.call().priority),
            routed_experts: params.routed_experts,
            stream,
            traceparent: None,
        }
    }

    fn wrong_tokens(&self, new: &[u32], have: u32, base: u32, budget: u32) -> Option<String> {
        let count = u64::from(have - base) + new.len() as u64;
        if count > u64::from(budget) {
            return Some(format!("{count} tokens, {budget} were asked for"));
        }
        let vocab = self.attempt.rank.replica.facts.vocab_size?.get();
        new.iter()
            .any(|id| *id >= vocab)
            .then(|| format!("a token id is not below the vocabulary size of {vocab}"))
    }

    /// How long it is waited for before the first tokens, and between later ones.
    fn patience(&self, request: &EngineRequest) -> (Duration, Duration) {
        let prompt = match &request.prompt {
            Prompt::Tokens(ids) => ids.len(),
            // A token is at least a byte.
            Prompt::Text(text) => text.len(),
        };
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let frame = match request.stream {
            StreamMode::Plain => request.max_tokens,
            StreamMode::Incremental => INCREMENTAL_FRAME,
            StreamMode::Cumulative { interval } => interval,
        }
        .min(request.max_tokens);
        (
            self.health.patience(prompt, frame),
            self.health.patience(0, frame),
        )
    }

    fn admits(&self, version: &str) -> bool {
        let wanted = &self.attempt.work.call.params().weights.constraint;
        wanted.as_ref().is_none_or(|w| w.admits(version))
    }

    /// What was asked for of the weights holds for every token: else the last
    /// version that it does not hold for.
    fn wrong_weights(&self, tokens: &Partial) -> Option<String> {
        let spans = tokens.weight_spans.iter().rev();
        spans
            .map(|span| &span.version)
            .find(|version| !self.admits(version))
            .cloned()
    }
}
