//! One sample on its way: attempt after attempt, until one comes to its end or
//! there is no other try.
//!
//! | attempt           | next                                                        |
//! |-------------------|-------------------------------------------------------------|
//! | refused           | elsewhere; nothing was sent, so it is not counted as lost   |
//! | busy              | with a key the same rank after a pause, else another        |
//! | lost, bad reply   | elsewhere, at most `max_attempts` in all                    |
//! | its engine died   | the same, on no rank of that replica                        |
//! | silent            | the same, when its rank gave nobody an answer               |
//! | other weights     | the same, from the prompt, by what the rank turned out to   |
//! |                   | serve; where that may be waited for, once somebody serves it |
//! | no adapter        | elsewhere; nothing was taken                                |
//! | ended by engine   | from the tokens so far, or answered as it is if so asked    |
//! | rejected, stopped | none                                                        |
//!
//! An attempt that may live on is fenced before the next one is sent; one whose
//! engine died with it makes its prompt suspect, see [`poison`](super::poison).

mod accept;
mod next;

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tower::Service;

use super::{
    affinity::{Affinity, AttemptDone, Chosen, RoutedAttempt, pin_key},
    dispatch::{AttemptFailed, Failure},
    fence::Fenced,
    journal::Journal,
    partial::Partial,
    poison::{PromptHash, SuspectTurn},
    resolve::ResolvedWork,
};
use crate::{
    call::{AttemptReceipt, RouteReason, RouteReceipt},
    error::Error,
    failpoint::{self, Point},
    fleet::snapshot::RankSlot,
    ids::EngineRequestId,
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
            Failure::Lost(_) | Failure::BadReply(_) | Failure::Silent => {
                Self::Copy { broken: true }
            }
            Failure::Stopped | Failure::OtherWeights { ended: false, .. } => {
                Self::Copy { broken: false }
            }
            Failure::Died(_) => Self::Dead,
            Failure::Refused(_)
            | Failure::Busy { .. }
            | Failure::OtherWeights { ended: true, .. }
            | Failure::AdapterMissing(_)
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
                queued: std::mem::take(&mut chosen.queued),
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
        let turn = self.layer.poison.turn(&self.prompt);
        self.resolved.work.generation.unless_stopped(turn).await
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
        // Before others that were lost with it are off the count.
        let crowd = chosen.ticket.in_flight_together();
        match left {
            Left::Unsent => return Ok(()),
            Left::Nothing => {}
            Left::Dead => {
                let poison = &self.layer.poison;
                poison.said_dead(&self.prompt, &rank.target, crowd, in_turn);
            }
            Left::Copy { broken } => {
                let fence = &self.layer.fence;
                let how = fence.attempt(&rank.target, &rank.url, id).await?;
                match how {
                    Fenced::Aborted => self.layer.counters.attempts_aborted.one(),
                    Fenced::LeftBehind => self.layer.counters.attempts_left_behind.one(),
                    Fenced::Refused | Fenced::Over => {}
                }
                if broken && how == Fenced::Refused {
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
        let pause = tokio::time::sleep(pause);
        self.resolved.work.generation.unless_stopped(pause).await
    }
}
