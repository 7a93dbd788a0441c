//! One running generation and those who follow it.
//!
//! The generation is one append-only buffer per sample, bounded by the request;
//! followers read it at their own pace, so a slow one holds up nobody. When the
//! last follower has left, a generation with a key goes on for a grace period (a
//! retry is coming), one without is stopped at once.
//!
//! ```text
//!            all followers gone, grace over; or cancelled
//! Running ─────────────────────────────────────────────▶ Stopping ──▶ Ended
//!    └───────────────────── finished or failed ────────────────────────▲
//! ```
//! A stopping generation takes no new follower: who comes then waits for its end
//! and begins anew, so that two never run at once.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{follow::Progress, partial::Partial};
use crate::{
    call::{Completion, RouteReceipt},
    engine::TokenChunk,
    error::{Error, Reason},
    store::Fingerprint,
};

/// A finished generation.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its result.
    pub completion: Arc<Completion>,
    /// It was generated for an earlier request.
    pub replayed: bool,
    /// It is kept for later ones. Meaningless without a key.
    pub stored: bool,
}

/// How a generation ended.
pub type Outcome = Result<Finished, Error>;

/// One running generation.
#[derive(Debug)]
pub struct Generation {
    /// What was asked for, where there is a key.
    pub fingerprint: Option<Fingerprint>,
    inner: Mutex<Inner>,
    /// Counts changes of the phase and of the followers.
    changed: watch::Sender<u64>,
    /// Counts changes of the samples. Apart from `changed`, so that a caller who
    /// waits for the end is not woken by every token.
    progressed: watch::Sender<u64>,
    /// Tells attempts to stop at their engines.
    stop: CancellationToken,
    max_followers: usize,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    followers: usize,
    samples: Vec<Progress>,
}

#[derive(Debug)]
enum Phase {
    Running,
    Stopping(Error),
    Ended(Outcome),
}

/// Why a generation cannot be followed.
#[derive(Debug, PartialEq, Eq)]
pub enum CannotFollow {
    /// It is being stopped: wait for its end, then begin anew.
    Stopping,
    /// As many as are allowed do already.
    TooMany,
}

impl Generation {
    /// A new one with its first follower.
    pub fn begin(
        fingerprint: Option<Fingerprint>,
        samples: u32,
        max_followers: usize,
    ) -> (Arc<Self>, Ticket) {
        let generation = Arc::new(Self {
            fingerprint,
            inner: Mutex::new(Inner {
                phase: Phase::Running,
                followers: 1,
                samples: vec![Progress::default(); samples as usize],
            }),
            changed: watch::channel(0).0,
            progressed: watch::channel(0).0,
            stop: CancellationToken::new(),
            max_followers,
        });
        let ticket = Ticket::new(Arc::clone(&generation));
        (generation, ticket)
    }

    /// Joins it.
    ///
    /// # Errors
    /// When it is being stopped, or has too many followers.
    pub fn follow(self: &Arc<Self>) -> Result<Ticket, CannotFollow> {
        let mut inner = self.lock();
        match inner.phase {
            Phase::Stopping(_) => return Err(CannotFollow::Stopping),
            Phase::Running if inner.followers >= self.max_followers => {
                return Err(CannotFollow::TooMany);
            }
            Phase::Running | Phase::Ended(_) => inner.followers += 1,
        }
        drop(inner);
        self.notify();
        Ok(Ticket::new(Arc::clone(self)))
    }

    /// What attempts watch to stop at their engines.
    pub fn stop_token(&self) -> &CancellationToken {
        &self.stop
    }

    /// Why it is being stopped; to be asked after the token was cancelled.
    pub fn stop_reason(&self) -> Error {
        match &self.lock().phase {
            Phase::Stopping(error) => error.clone(),
            Phase::Running | Phase::Ended(_) => abandoned(),
        }
    }

    /// What `work` comes to, unless the generation is stopped before.
    ///
    /// # Errors
    /// Why it is being stopped.
    pub async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(self.stop_reason()),
            done = work => Ok(done),
        }
    }

    /// Waits until nobody has followed it for `grace`, then begins to stop it.
    pub async fn abandon_after(&self, grace: Duration) {
        let mut changed = self.changed.subscribe();
        loop {
            if self.followers() > 0 {
                if changed.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let somebody_came =
                async { while self.followers() == 0 && changed.changed().await.is_ok() {} };
            if tokio::time::timeout(grace, somebody_came).await.is_err()
                && self.stop_if_alone(abandoned())
            {
                return;
            }
        }
    }

    /// Stops it whoever follows, for this reason.
    pub fn cancel(&self, reason: Error) {
        let mut inner = self.lock();
        if matches!(inner.phase, Phase::Running) {
            inner.phase = Phase::Stopping(reason);
            drop(inner);
            self.stop.cancel();
            self.notify();
        }
    }

    fn stop_if_alone(&self, reason: Error) -> bool {
        let mut inner = self.lock();
        if inner.followers > 0 || !matches!(inner.phase, Phase::Running) {
            return false;
        }
        inner.phase = Phase::Stopping(reason);
        drop(inner);
        self.stop.cancel();
        self.notify();
        true
    }

    /// An attempt of a sample begins, from `kept` tokens of those before.
    pub fn attempt(&self, sample: u32, number: u32, kept: &Partial, route: RouteReceipt) {
        self.with_sample(sample, |progress| progress.attempt(number, kept, route));
    }

    /// The sample's attempt got more tokens.
    pub fn push(&self, sample: u32, chunk: &TokenChunk) {
        self.with_sample(sample, |progress| progress.push(chunk));
    }

    /// The sample is finished, on disk too.
    pub fn sample_done(&self, sample: u32) {
        self.with_sample(sample, Progress::done);
    }

    /// Samples that are finished, and samples in all.
    pub fn count(&self) -> (u32, u32) {
        let inner = self.lock();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let done = inner.samples.iter().filter(|p| p.is_done()).count();
        (count(done), count(inner.samples.len()))
    }

    /// Attempts that run now.
    pub fn attempts_running(&self) -> u32 {
        let inner = self.lock();
        let running = inner.samples.iter().filter(|p| p.is_running()).count();
        u32::try_from(running).unwrap_or(u32::MAX)
    }

    /// Reads the samples; not to be held long.
    pub(super) fn read<T>(&self, read: impl FnOnce(&[Progress], Option<&Outcome>) -> T) -> T {
        let inner = self.lock();
        let outcome = match &inner.phase {
            Phase::Ended(outcome) => Some(outcome),
            Phase::Running | Phase::Stopping(_) => None,
        };
        read(&inner.samples, outcome)
    }

    fn with_sample(&self, sample: u32, change: impl FnOnce(&mut Progress)) {
        if let Some(progress) = self.lock().samples.get_mut(sample as usize) {
            change(progress);
        }
        self.progressed.send_modify(|count| *count += 1);
    }

    /// Ends it. Only the first end counts.
    pub fn end(&self, outcome: Outcome) {
        let mut inner = self.lock();
        if !matches!(inner.phase, Phase::Ended(_)) {
            inner.phase = Phase::Ended(outcome);
        }
        drop(inner);
        self.notify();
        self.progressed.send_modify(|count| *count += 1);
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        match &self.lock().phase {
            Phase::Ended(outcome) => Some(outcome.clone()),
            Phase::Running | Phase::Stopping(_) => None,
        }
    }

    /// Waits for its end.
    pub async fn ended(&self) -> Outcome {
        let mut changed = self.changed.subscribe();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            if changed.changed().await.is_err() {
                return Err(Error::new(Reason::Internal, "the generation vanished"));
            }
        }
    }

    fn followers(&self) -> usize {
        self.lock().followers
    }

    fn leave(&self) {
        self.lock().followers -= 1;
        self.notify();
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn abandoned() -> Error {
    Error::new(Reason::Cancelled, "the caller went away")
}

/// One caller's hold on a generation. Dropping it leaves.
#[derive(Debug)]
pub struct Ticket {
    generation: Arc<Generation>,
    deadline: Option<Instant>,
}

impl Ticket {
    fn new(generation: Arc<Generation>) -> Self {
        Self {
            generation,
            deadline: None,
        }
    }

    /// The same with a deadline of its own.
    #[must_use]
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Waits for the result, at most until the deadline. The generation does not
    /// end with the wait: see the module.
    ///
    /// # Errors
    /// What the generation failed with, or DEADLINE.
    pub async fn finished(self) -> Outcome {
        match self.deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, self.generation.ended())
                .await
                .unwrap_or_else(|_| Err(Error::deadline())),
            None => self.generation.ended().await,
        }
    }
}

impl Ticket {
    /// Wakes at every new token and at the end.
    pub(super) fn progress(&self) -> watch::Receiver<u64> {
        self.generation.progressed.subscribe()
    }

    pub(super) fn generation(&self) -> &Generation {
        &self.generation
    }

    /// A look at the generation, for later.
    pub fn follow(&self) -> Follow {
        Follow(Arc::clone(&self.generation))
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

/// A look at a generation that holds nobody's place in it.
#[derive(Debug)]
pub struct Follow(Arc<Generation>);

impl Follow {
    /// Where its first sample was sent last, if it was.
    pub fn last_route(&self) -> Option<RouteReceipt> {
        self.0
            .read(|samples, _| samples.first().and_then(Progress::route).cloned())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.generation.leave();
    }
}

#[cfg(test)]
mod tests;
