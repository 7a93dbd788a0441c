//! What follows a failed attempt: the table of [`attempts`](super), decided.

use std::time::Duration;

use super::{FIRST_PAUSE, LONGEST_PAUSE, MAX_CONTINUATIONS, MAX_REFUSALS, Next, SampleRun};
use crate::{
    call::{AttemptFailure, AttemptReceipt, OnAbort, OnLost},
    engine::{Finish, FinishReason},
    error::{Error, Reason},
    fleet::Fault,
    ids::Target,
    stack::{
        affinity::{AttemptDone, Chosen},
        dispatch::{AttemptFailed, Failure},
        partial::Partial,
    },
};

impl<S> SampleRun<'_, S> {
    pub(super) fn after(&mut self, failed: AttemptFailed, chosen: &Chosen, base: u32) -> Next {
        let params = self.resolved.work.call.params();
        let target = &chosen.rank.target;
        let AttemptFailed { failure, tokens } = failed;
        if let Some(kind) = failure.receipt() {
            self.layer.counters.failed(kind).one();
            self.attempts.push(AttemptReceipt {
                number: self.number,
                target: target.clone(),
                failure: Some(kind),
                kept_tokens: 0,
            });
            tracing::info!(
                request_id = %self.resolved.work.call.call().request_id,
                sample = self.index,
                attempt = self.number,
                %target,
                failure = ?kind,
                why = %failure,
                "attempt failed"
            );
        }
        match failure {
            Failure::Stopped => Next::Fail(self.resolved.work.generation.stop_reason()),
            Failure::Fatal(error) => Next::Fail(error),
            Failure::Rejected(message) => Next::Fail(Error::new(
                Reason::EngineRefused,
                format!("the engine refuses the request: {message}"),
            )),
            Failure::Refused(message) => {
                self.layer.fleet.unreachable(target);
                self.avoid.push(chosen.rank.slot);
                self.refused.push(chosen.rank.slot);
                let error = lost(target, "refuses connections", &message);
                self.last = Some(error.clone());
                if self.refused.len() >= MAX_REFUSALS {
                    return Next::Fail(error);
                }
                let kept = self.keep(tokens, base, base);
                Next::Again {
                    kept,
                    pause: Duration::ZERO,
                }
            }
            Failure::Busy {
                message,
                retry_after,
            } => {
                self.last = Some(Error::new(
                    Reason::EngineBusy,
                    format!("{target} takes no more requests: {message}"),
                ));
                let pause = retry_after.unwrap_or(self.pause).min(LONGEST_PAUSE);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                let kept = self.keep(tokens, base, base);
                Next::Again { kept, pause }
            }
            Failure::Lost(message) => {
                self.layer.fleet.unreachable(target);
                self.blame(target, Fault::Lost);
                self.lose(tokens, base, chosen, lost(target, "was lost", &message))
            }
            Failure::Died(message) => {
                self.layer.fleet.said_dead(target);
                // Nor to its siblings, whose servers may not know it yet.
                let snapshot = self.layer.fleet.snapshot();
                let same_start = |other: &Target| {
                    other.replica == target.replica && other.incarnation == target.incarnation
                };
                let siblings = snapshot.ranks.iter().filter(|r| same_start(&r.target));
                self.avoid.extend(siblings.map(|rank| rank.slot));
                self.lose(tokens, base, chosen, lost(target, "died", &message))
            }
            Failure::Silent => {
                let error = lost(target, "gave no request an answer for too long", "");
                self.lose(tokens, base, chosen, error)
            }
            Failure::OtherWeights { version, .. } => {
                self.layer.fleet.serves(target, &version);
                let error = Error::new(
                    Reason::WeightsNotServed,
                    format!(
                        "{target} made tokens by weights {version:?}, others were asked for; no \
                         other attempt was left or possible"
                    ),
                );
                // None of these tokens is wanted, whatever is to be kept of others.
                self.lose(Partial::default(), base, chosen, error)
            }
            Failure::AdapterMissing(message) => {
                if let Some(adapter) = &params.adapter {
                    self.layer.fleet.adapter_missing(target, adapter);
                }
                self.avoid.push(chosen.rank.slot);
                let error = Error::new(
                    Reason::NotSupported,
                    format!("{target} does not have the adapter: {message}"),
                );
                self.last = Some(error.clone());
                if self.avoid.len() >= MAX_REFUSALS {
                    return Next::Fail(error);
                }
                let kept = self.keep(tokens, base, base);
                Next::Again {
                    kept,
                    pause: Duration::ZERO,
                }
            }
            Failure::BadReply(message) => {
                self.blame(target, Fault::BadReply);
                let error = Error::new(
                    Reason::EngineMisbehaved,
                    format!("{target} gave a reply that cannot be right: {message}"),
                );
                self.lose(Partial::default(), base, chosen, error)
            }
            Failure::Aborted(finish) => {
                let last = tokens.weight_spans.last().map(|span| &*span.version);
                self.layer.fleet.answered(target, last, None);
                if params.on_abort == OnAbort::ReturnPartial {
                    self.attempts.pop();
                    return Next::Accept(Box::new(AttemptDone {
                        tokens,
                        finish: *finish,
                    }));
                }
                self.continuations += 1;
                if self.continuations > MAX_CONTINUATIONS {
                    return Next::Fail(lost(target, "ended the generation again and again", ""));
                }
                let end = tokens.len();
                if let Some(done) = self.complete(&tokens, &finish) {
                    return Next::Accept(Box::new(done));
                }
                let kept = self.keep(tokens, base, end);
                Next::Again {
                    kept,
                    pause: FIRST_PAUSE,
                }
            }
        }
    }

    /// The rank failed this request.
    fn blame(&self, target: &Target, fault: Fault) {
        let evidence = Some(self.prompt.evidence());
        self.layer.fleet.failed(target, fault, evidence);
    }

    /// An engine may end a generation at its very last token: nothing is left to
    /// go on with.
    fn complete(&mut self, tokens: &Partial, finish: &Finish) -> Option<AttemptDone> {
        let most = self.resolved.work.call.params().sampling.max_tokens?;
        (tokens.len() >= most).then(|| {
            self.attempts.pop();
            AttemptDone {
                tokens: tokens.clone(),
                finish: Finish {
                    reason: FinishReason::Length,
                    ..finish.clone()
                },
            }
        })
    }

    /// After an attempt that was lost for good.
    fn lose(&mut self, tokens: Partial, base: u32, chosen: &Chosen, error: Error) -> Next {
        self.avoid.push(chosen.rank.slot);
        self.losses += 1;
        if self.losses >= self.layer.max_attempts {
            return Next::Fail(error);
        }
        self.last = Some(error);
        let params = self.resolved.work.call.params();
        // With the last token there only the end mark was lost, and with it what
        // stands in the end mark: such a sample is generated anew.
        let whole = params
            .sampling
            .max_tokens
            .is_some_and(|m| tokens.len() >= m);
        // With fewer than it began from, what it began from is not wanted either.
        // vLLM names the weights at the end only: of what was lost before it none
        // are known, and no condition on them can be said to hold.
        let unfit = params.weights.constraint.as_ref().is_some_and(|wanted| {
            let mut spans = tokens.weight_spans.iter();
            spans.any(|span| !wanted.admits(&span.version))
        });
        let resumes = params.on_lost == OnLost::Resume && !whole && !unfit && tokens.len() >= base;
        let kept = if resumes {
            let end = tokens.len();
            self.keep(tokens, base, end)
        } else {
            // From the prompt: nothing of any attempt is kept.
            for attempt in &mut self.attempts {
                attempt.kept_tokens = 0;
            }
            Partial::default()
        };
        Next::Again {
            kept,
            pause: Duration::ZERO,
        }
    }

    /// Keeps tokens; those from `base` to `end` are the last attempt's.
    fn keep(&mut self, tokens: Partial, base: u32, end: u32) -> Partial {
        if let Some(last) = self.attempts.last_mut() {
            last.kept_tokens = end.saturating_sub(base);
        }
        tokens
    }
}

fn lost(target: &Target, how: &str, message: &str) -> Error {
    let colon = if message.is_empty() { "" } else { ": " };
    Error::new(
        Reason::ReplicaLost,
        format!("{target} {how}{colon}{message}; no other attempt was left or possible"),
    )
}

impl Failure {
    /// How it stands in the receipt; `None` for what is no failed attempt.
    fn receipt(&self) -> Option<AttemptFailure> {
        match self {
            Self::Refused(_) => Some(AttemptFailure::Refused),
            Self::Busy { .. } => Some(AttemptFailure::Busy),
            Self::Lost(_) | Self::Died(_) => Some(AttemptFailure::Lost),
            Self::Aborted(_) => Some(AttemptFailure::Aborted),
            Self::BadReply(_) => Some(AttemptFailure::BadReply),
            Self::Silent => Some(AttemptFailure::Silent),
            Self::OtherWeights { .. } => Some(AttemptFailure::Weights),
            Self::AdapterMissing(_) => Some(AttemptFailure::Adapter),
            Self::Rejected(_) | Self::Stopped | Self::Fatal(_) => None,
        }
    }
}
