//! One sample on its way: attempt after attempt, until one comes to its end or
//! there is no other try.
//!
//! | attempt           | next                                                        |
//! |-------------------|-------------------------------------------------------------|
//! | refused           | elsewhere; nothing was sent, so it is not counted as lost   |
//! | busy              | with a key the same rank after a pause, else another        |
//! | lost, bad reply   | elsewhere, at most `max_attempts` in all                    |
//! | its engine died   | the same, on no rank of that replica                        |
//! | ended by engine   | from the tokens so far, or answered as it is if so asked    |
//! | rejected, stopped | none                                                        |
//!
//! An attempt that may live on is fenced before the next one is sent; one whose
//! engine died with it makes its prompt suspect, see [`poison`](super::poison).

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use tower::Service;

use super::{
    affinity::{Affinity, AttemptDone, Chosen, RoutedAttempt, pin_key, prompt_tokens},
    dispatch::{AttemptFailed, Failure},
    fence::Fenced,
    journal::Journal,
    partial::Partial,
    poison::{PromptHash, SuspectTurn},
    resolve::ResolvedWork,
};
use crate::{
    call::{
        AttemptFailure, AttemptReceipt, OnAbort, OnLost, RouteReason, RouteReceipt, SampleOutput,
        StopReason, Usage,
    },
    engine::{Finish, FinishReason},
    error::{Error, Reason},
    failpoint::{self, Point},
    fleet::snapshot::RankSlot,
    ids::{EngineRequestId, Target},
    store::FinishedSample,
};

/// Ranks that may refuse one sample before it is given up.
const MAX_REFUSALS: usize = 16;

/// Times that an engine may end one sample early and have it continued.
const MAX_CONTINUATIONS: u32 = 16;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// One sample on its way over as many ranks as it takes.
pub(super) struct SampleRun<'a, S> {
    layer: &'a Affinity<S>,
    resolved: &'a ResolvedWork,
    prompt: PromptHash,
    index: u32,
    number: u32,
    attempts: Vec<AttemptReceipt>,
    /// Ranks where it failed.
    avoid: Vec<RankSlot>,
    /// Of those, the ones where nobody listens.
    refused: Vec<RankSlot>,
    losses: u32,
    continuations: u32,
    pause: Duration,
    last: Option<Error>,
}

/// What a failed attempt may have left at its engine.
#[derive(Clone, Copy)]
enum Left {
    /// It was never sent.
    Unsent,
    /// Nothing: it was not taken, or the engine itself has ended it.
    Nothing,
    /// A copy that runs on, unless the engine is gone.
    Copy {
        /// The engine broke off, it was not told to.
        broken: bool,
    },
    /// Nothing: the engine is dead, and says so.
    Dead,
}

impl Left {
    fn by(failure: &Failure) -> Self {
        match failure {
            Failure::Lost(_) | Failure::BadReply(_) => Self::Copy { broken: true },
            Failure::Stopped => Self::Copy { broken: false },
            Failure::Died(_) => Self::Dead,
            Failure::Refused(_)
            | Failure::Busy { .. }
            | Failure::Rejected(_)
            | Failure::Aborted(_) => Self::Nothing,
            Failure::Fatal(_) => Self::Unsent,
        }
    }
}

/// What to do after a failed attempt.
enum Next {
    /// Give up.
    Fail(Error),
    /// Choose again.
    Again {
        /// From these tokens.
        kept: Partial,
        /// After so long.
        pause: Duration,
    },
    /// Answer with what there is.
    Accept(Box<AttemptDone>),
}

impl<'a, S> SampleRun<'a, S>
where
    S: Service<RoutedAttempt, Response = AttemptDone, Error = AttemptFailed>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    pub(super) fn new(
        layer: &'a Affinity<S>,
        resolved: &'a ResolvedWork,
        prompt: PromptHash,
        index: u32,
    ) -> Self {
        // Numbers go on where an earlier owner of the key left off.
        let last = &resolved.work.start.last_attempts;
        let number = last.get(index as usize).copied().unwrap_or(0);
        Self {
            layer,
            resolved,
            prompt,
            index,
            number,
            attempts: Vec::new(),
            avoid: Vec::new(),
            refused: Vec::new(),
            losses: 0,
            continuations: 0,
            pause: FIRST_PAUSE,
            last: None,
        }
    }

    pub(super) async fn run(mut self, first: Chosen) -> Result<(FinishedSample, bool), Error> {
        let result = self.attempts(first).await;
        if let Err(error) = &result
            && matches!(self.resolved.work.journal, Journal::None)
        {
            // All samples or an error, and nobody can come back for the others.
            self.resolved.work.generation.cancel(error.clone());
        }
        result
    }

    async fn attempts(&mut self, first: Chosen) -> Result<(FinishedSample, bool), Error> {
        self.fence_orphans().await?;
        let started = Instant::now();
        let mut chosen = first;
        let mut kept = Partial::default();
        loop {
            self.number += 1;
            let base = kept.len();
            let id = EngineRequestId::mint();
            let route = RouteReceipt {
                target: chosen.rank.target.clone(),
                served_rank: None,
                reason: chosen.reason,
                attempts: self.attempts.clone(),
                expected_cached_tokens: chosen.expected_cached_tokens,
            };
            let generation = &self.resolved.work.generation;
            generation.attempt(self.index, self.number, &kept, route);
            failpoint::pass(Point::Routed);
            let attempt = RoutedAttempt {
                work: self.resolved.work.clone(),
                sample: self.index,
                number: self.number,
                id: id.clone(),
                rank: chosen.rank.clone(),
                pin: pin_key(self.resolved),
                kept,
                started,
            };
            // Suspects one at a time: when an engine dies now, it is known by whom.
            let suspect = self.suspect_turn().await?;
            self.layer.counters.attempts.one();
            let ended = self.layer.inner.clone().call(attempt).await;
            let next = match ended {
                Ok(done) => Next::Accept(Box::new(done)),
                Err(failed) => {
                    let left = Left::by(&failed.failure);
                    match self.after(failed, &chosen, base) {
                        // The attempt's own end is the sample's.
                        accepted @ Next::Accept(_) => accepted,
                        next => match (
                            next,
                            self.fence(left, suspect.is_some(), &chosen, &id).await,
                        ) {
                            // A reason to give up is told before a copy that may
                            // live on.
                            (Next::Fail(error), _) | (_, Err(error)) => Next::Fail(error),
                            (next, Ok(())) => next,
                        },
                    }
                }
            };
            match next {
                Next::Accept(done) => return self.accept(chosen, *done, base).await,
                Next::Fail(error) => return Err(error),
                Next::Again { kept: from, pause } => {
                    kept = from;
                    let reason = chosen.reason;
                    let slot = chosen.rank.slot;
                    // Off the count before choosing again.
                    drop(chosen);
                    drop(suspect);
                    self.layer.poison.admit(&self.prompt)?;
                    self.wait(pause).await?;
                    chosen = self.again(reason, slot).await?;
                }
            }
        }
    }

    /// Waits for a suspect's turn; others need none.
    async fn suspect_turn(&self) -> Result<Option<SuspectTurn>, Error> {
        let generation = &self.resolved.work.generation;
        tokio::select! {
            biased;
            () = generation.stop_token().cancelled() => Err(generation.stop_reason()),
            turn = self.layer.poison.turn(&self.prompt) => Ok(turn),
        }
    }

    /// Makes sure that a failed attempt runs nowhere, and writes that down.
    async fn fence(
        &self,
        left: Left,
        in_turn: bool,
        chosen: &Chosen,
        id: &EngineRequestId,
    ) -> Result<(), Error> {
        let rank = &chosen.rank;
        match left {
            Left::Unsent => return Ok(()),
            Left::Nothing => {}
            Left::Dead => {
                let crowd = chosen.ticket.in_flight();
                let poison = &self.layer.poison;
                poison.said_dead(&self.prompt, &rank.target, crowd, in_turn);
            }
            Left::Copy { broken } => {
                let fence = &self.layer.fence;
                let how = fence.attempt(&rank.target, &rank.url, id).await?;
                if how == Fenced::Aborted {
                    self.layer.counters.attempts_aborted.one();
                }
                if broken && how == Fenced::Refused {
                    let crowd = chosen.ticket.in_flight();
                    let poison = &self.layer.poison;
                    poison.died(&self.prompt, &rank.target, crowd, in_turn);
                }
            }
        }
        let journal = &self.resolved.work.journal;
        journal.fence(self.index, self.number).await
    }

    /// Makes sure that what an earlier run of the control plane had sent for this
    /// sample runs nowhere.
    async fn fence_orphans(&self) -> Result<(), Error> {
        let work = &self.resolved.work;
        for (sample, orphan) in &work.start.orphans {
            if *sample != self.index {
                continue;
            }
            let url = Arc::from(orphan.url.as_str());
            let how = self
                .layer
                .fence
                .attempt(&orphan.target, &url, &orphan.id)
                .await?;
            tracing::info!(sample, attempt = orphan.number, target = %orphan.target, ?how,
                "fenced an attempt of an earlier run");
            self.layer.counters.orphans_fenced.one();
            work.journal.fence(self.index, orphan.number).await?;
        }
        Ok(())
    }

    /// Chooses a rank for another attempt.
    async fn again(&self, before: RouteReason, slot: RankSlot) -> Result<Chosen, Error> {
        // Where nobody is left who has not failed, one that is there and broke off
        // once is better than none.
        let avoid = [self.avoid.as_slice(), self.refused.as_slice()];
        let mut chosen = self
            .layer
            .choose(self.resolved, 1, &avoid, self.last.clone())
            .await?;
        if chosen.rank.slot == slot {
            // The same rank again: the reason is still the first one.
            chosen.reason = before;
        } else if chosen.reason == RouteReason::Pinned {
            // A sibling sample has moved the pin already.
            chosen.reason = RouteReason::ReplicaLost;
        }
        Ok(chosen)
    }

    async fn wait(&self, pause: Duration) -> Result<(), Error> {
        let generation = &self.resolved.work.generation;
        tokio::select! {
            biased;
            () = generation.stop_token().cancelled() => Err(generation.stop_reason()),
            () = tokio::time::sleep(pause) => Ok(()),
        }
    }

    fn after(&mut self, failed: AttemptFailed, chosen: &Chosen, base: u32) -> Next {
        let params = self.resolved.work.call.params();
        let target = &chosen.rank.target;
        let AttemptFailed { failure, tokens } = failed;
        if let Some(kind) = failure.receipt() {
            self.count(kind);
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
                self.lose(tokens, base, chosen, lost(target, "was lost", &message))
            }
            Failure::Died(message) => {
                self.layer.fleet.unreachable(target);
                // One engine's death is the end of all ranks behind that port.
                let snapshot = self.layer.fleet.snapshot();
                let ranks = snapshot.ranks.iter();
                let siblings = ranks.filter(|rank| rank.target.replica == target.replica);
                self.avoid.extend(siblings.map(|rank| rank.slot));
                self.lose(tokens, base, chosen, lost(target, "died", &message))
            }
            Failure::BadReply(message) => {
                let error = Error::new(
                    Reason::EngineMisbehaved,
                    format!("{target} gave a reply that cannot be right: {message}"),
                );
                self.lose(Partial::default(), base, chosen, error)
            }
            Failure::Aborted(finish) => {
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

    fn count(&self, failure: AttemptFailure) {
        let counters = &self.layer.counters;
        match failure {
            AttemptFailure::Refused => &counters.attempts_refused,
            AttemptFailure::Busy => &counters.attempts_busy,
            AttemptFailure::Lost => &counters.attempts_lost,
            AttemptFailure::Aborted => &counters.attempts_ended_early,
            AttemptFailure::BadReply => &counters.attempts_bad_reply,
        }
        .one();
    }

    fn count_sample(&self, output: &SampleOutput, wrong_rank: bool) {
        let counters = &self.layer.counters;
        let usage = &output.usage;
        counters.samples.one();
        counters.wrong_rank.add(u64::from(wrong_rank));
        let expected = output.route.expected_cached_tokens;
        counters.cached_tokens_expected.add(u64::from(expected));
        counters
            .cached_tokens_reported
            .add(u64::from(usage.cached_tokens));
        counters.prompt_tokens.add(u64::from(usage.prompt_tokens));
        counters
            .completion_tokens
            .add(u64::from(usage.completion_tokens));
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
        // vLLM names the weights at the end only: of what was lost before it none
        // are known, and no condition on them can be said to hold.
        let unfit = params.weights.constraint.as_ref().is_some_and(|wanted| {
            let mut spans = tokens.weight_spans.iter();
            spans.any(|span| !wanted.admits(&span.version))
        });
        let kept = if params.on_lost == OnLost::Resume && !whole && !unfit {
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

    async fn accept(
        &mut self,
        chosen: Chosen,
        done: AttemptDone,
        base: u32,
    ) -> Result<(FinishedSample, bool), Error> {
        let AttemptDone { tokens, finish } = done;
        self.layer.poison.cleared(&self.prompt);
        let completion = tokens.len();
        let target = chosen.rank.target.clone();
        self.attempts.push(AttemptReceipt {
            number: self.number,
            target: target.clone(),
            failure: None,
            kept_tokens: completion - base,
        });
        let prompt = match prompt_tokens(self.resolved) {
            // A text prompt: only the engine knows.
            0 => finish.usage.prompt_tokens,
            known => known,
        };
        let (stop_reason, matched) = match finish.reason {
            FinishReason::Stop(matched) => (StopReason::Stop, matched),
            FinishReason::Length => (StopReason::Length, None),
            FinishReason::Aborted { .. } => (StopReason::Aborted, None),
        };
        let served_rank = finish.served_rank;
        let wrong_rank = served_rank.is_some_and(|served| served != chosen.rank.engine_rank);
        if wrong_rank {
            tracing::warn!(%target, served_rank, "the engine served on another rank than it was told");
        }
        let last_version = tokens
            .weight_spans
            .last()
            .map(|s| s.version.clone())
            .filter(|version| !version.is_empty());
        let snapshot = self.layer.fleet.snapshot();
        if let Some(key) = pin_key(self.resolved)
            && !wrong_rank
        {
            // The last token's KV is not computed.
            let held = (prompt + completion).saturating_sub(1);
            let now = Instant::now();
            self.layer
                .router
                .grown(&snapshot, key, chosen.rank.slot, held, now);
        }
        self.layer.fleet.answered(&target, last_version.as_deref());

        let finished = FinishedSample {
            output: SampleOutput {
                stop_reason,
                matched,
                // Text of a resumed attempt is a part only.
                text: finish.text.filter(|_| base == 0),
                routed_experts: finish.routed_experts,
                usage: Usage {
                    prompt_tokens: prompt,
                    cached_tokens: finish.usage.cached_tokens.min(prompt),
                    completion_tokens: completion,
                },
                route: RouteReceipt {
                    target,
                    served_rank,
                    reason: chosen.reason,
                    attempts: std::mem::take(&mut self.attempts),
                    expected_cached_tokens: chosen.expected_cached_tokens,
                },
                tokens: tokens.tokens,
                logprobs: tokens.logprobs,
                top_logprobs: tokens.top_logprobs,
                weight_spans: tokens.weight_spans,
            },
            prompt_logprobs: tokens.prompt_logprobs,
            logprob_mode: chosen.rank.replica.facts.logprob_mode,
            finished_at: SystemTime::now(),
            first_token: tokens.first_token,
        };
        // On disk before anybody sees it. The rank is done with it: off the count
        // first.
        drop(chosen.ticket);
        let kept = self
            .resolved
            .work
            .journal
            .commit(self.index, self.number, finished.clone())
            .await
            .inspect_err(|error| {
                if error.reason == Reason::OutcomeUnknown {
                    self.layer.counters.late_results.one();
                }
            })?;
        self.count_sample(&finished.output, wrong_rank);
        self.resolved.work.generation.sample_done(self.index);
        Ok((finished, kept))
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
            Self::Rejected(_) | Self::Stopped | Self::Fatal(_) => None,
        }
    }
}
