//! Drives one rank's scheduler in real time.
//!
//! Commands are taken between steps, as the real scheduler does. The end of a
//! step is an absolute deadline counted from when the rank became busy, so
//! that a late timer (tokio's tick at 1 ms) does not add up: a driver that has
//! fallen behind goes on without sleeping until it has caught up.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    history::{Clock, History, How, RecordId},
    scheduler::{Ended, Event, Job, JobId, Load, Rank, Refusal},
};

pub(super) mod parking {
    //! A lock whose holder never panics, so that it is never poisoned in a way
    //! that matters.

    use std::sync::{MutexGuard, PoisonError};

    #[derive(Debug, Default)]
    pub(in crate::engine::sim) struct Mutex<T>(std::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(in crate::engine::sim) fn new(value: T) -> Self {
            Self(std::sync::Mutex::new(value))
        }

        pub(in crate::engine::sim) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

/// What a rank is told.
#[derive(Debug)]
pub(super) enum Command {
    /// Jobs that came together.
    Submit(Vec<Submission>),
    /// End these.
    Abort(Selector),
    /// Stop stepping.
    Pause { retract: bool },
    /// Step again.
    Continue,
    /// Empty the cache; whether that could be done.
    Flush(oneshot::Sender<bool>),
    /// New weights.
    Version(Arc<str>),
    /// Steps take this many times as long.
    Slow(f64),
    /// Never step again and take no further command.
    Die,
}

/// Whom an abort means.
#[derive(Clone, Debug)]
pub(super) enum Selector {
    All,
    /// Every id that begins so.
    Prefix(Arc<str>),
    /// These ids and no others.
    Exact(Arc<[Arc<str>]>),
    Job(JobId),
}

/// A job and who waits for it.
#[derive(Debug)]
pub(super) struct Submission {
    pub(super) job: Job,
    pub(super) waiter: Waiter,
}

/// Where a job's events go.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) rid: Arc<str>,
    /// Tells the jobs of one call apart.
    pub(super) index: usize,
    /// When the engine got it.
    pub(super) since: Instant,
    pub(super) events: mpsc::UnboundedSender<(usize, Event)>,
    pub(super) record: Option<RecordId>,
}

/// What `/v1/loads` shows of a rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    pub(super) load: Load,
    /// Tokens a second.
    pub(super) throughput: f64,
    /// When it was taken, in seconds since 1970.
    pub(super) at: f64,
    /// The rank is idle: its entry is always of this moment.
    pub(super) fresh: bool,
}

/// Steps between two snapshots of a busy rank.
const SNAPSHOT_STEPS: u64 = 15;
/// Steps over which the throughput is taken.
const THROUGHPUT_STEPS: u64 = 40;
/// Half a tick of tokio's timer, which rounds up: deadlines are missed by as
/// much to one side as to the other.
const HALF_TICK: Duration = Duration::from_micros(500);
/// Steps without a sleep after which others get a turn.
const STEPS_A_TURN: u32 = 16;

pub(super) struct Driver {
    pub(super) rank: Rank,
    pub(super) time_scale: f64,
    pub(super) snapshot: Arc<Mutex<Snapshot>>,
    pub(super) history: Arc<Mutex<History>>,
    pub(super) clock: Clock,
    /// Jobs of all ranks.
    pub(super) dispatched: Arc<AtomicUsize>,
    /// Ends the engine.
    pub(super) crash: Arc<dyn Fn() + Send + Sync>,
    pub(super) jobs: HashMap<JobId, Waiter>,
    pub(super) slow: f64,
    pub(super) paused: bool,
    pub(super) dead: bool,
    /// When the work that is about to begin was there. Steps are counted from
    /// then: what this process takes to read a request and to wake up is no time
    /// of the engine's.
    pub(super) anchor: Option<Instant>,
    /// When the last work ended, by its own deadlines.
    pub(super) idle_since: Instant,
}

impl Driver {
    pub(super) async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        loop {
            // Whoever waits for a command here is idle or paused.
            if self.paused || self.rank.is_idle() {
                if !self.paused {
                    self.publish(0.0, true);
                }
                match commands.recv().await {
                    Some(command) => self.take(command),
                    None => return,
                }
            }
            if self.dead {
                self.snapshot.lock().fresh = false;
                // Whoever waits for an answer of this rank waits for good.
                std::future::pending::<()>().await;
            }
            if !self.paused && !self.rank.is_idle() {
                self.work(&mut commands).await;
            }
        }
    }

    /// Steps until there is nothing to do, or until told not to.
    async fn work(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>) {
        let now = Instant::now();
        let began = self.anchor.take().unwrap_or(now);
        let mut elapsed = 0.0;
        self.idle_since = began;
        let (mut steps, mut unslept) = (0_u64, 0);
        let (mut measured, mut generated) = (now, self.rank.load().totals.generated);
        let mut throughput = 0.0;
        loop {
            while let Ok(command) = commands.try_recv() {
                self.take(command);
            }
            // Set by a job that came while the last step was told: it is part of
            // this work.
            self.anchor = None;
            if self.paused || self.dead {
                return;
            }
            let Some(step) = self.rank.step() else {
                return;
            };
            if steps.is_multiple_of(SNAPSHOT_STEPS) {
                self.publish(throughput, false);
            }
            steps += 1;
            for event in &step.events {
                self.begin(event);
            }
            // Not one byte of this step or of a later one reaches anybody, however
            // soon the connections are cut.
            if step
                .events
                .iter()
                .any(|event| matches!(event, Event::Crashed { .. }))
            {
                self.dead = true;
                return;
            }
            elapsed += step.took.as_secs_f64() * self.slow * self.time_scale;
            let deadline = Duration::try_from_secs_f64(elapsed)
                .ok()
                .and_then(|elapsed| began.checked_add(elapsed));
            self.idle_since = deadline.unwrap_or(began);
            match deadline {
                Some(deadline) if deadline <= Instant::now() + HALF_TICK => {
                    unslept += 1;
                    if unslept >= STEPS_A_TURN {
                        unslept = 0;
                        tokio::task::yield_now().await;
                    }
                }
                Some(deadline) => {
                    unslept = 0;
                    tokio::time::sleep_until(deadline - HALF_TICK).await;
                }
                None => std::future::pending().await,
            }
            for event in step.events {
                self.tell(event);
            }
            if steps.is_multiple_of(THROUGHPUT_STEPS) {
                let total = self.rank.load().totals.generated;
                let seconds = measured.elapsed().as_secs_f64();
                throughput = (total - generated) as f64 / seconds.max(1e-6);
                (measured, generated) = (Instant::now(), total);
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Submit(submissions) => {
                for Submission { job, waiter } in submissions {
                    if self.rank.is_idle() {
                        self.anchor = Some(waiter.since.max(self.idle_since));
                    }
                    let record = waiter.record;
                    self.jobs.insert(job.id, waiter);
                    for event in self.rank.submit(job) {
                        self.tell(event);
                    }
                    if let Some(record) = record {
                        self.history.lock().queued(record);
                    }
                }
            }
            Command::Abort(selector) => self.abort(&selector),
            Command::Pause { retract } => {
                {
                    // A busy rank's entry stays as it was last taken.
                    let mut snapshot = self.snapshot.lock();
                    if snapshot.fresh {
                        snapshot.at = self.clock.now();
                        snapshot.fresh = false;
                    }
                }
                self.paused = true;
                if retract {
                    self.rank.retract_all();
                }
            }
            Command::Continue => {
                self.paused = false;
                // A pause is no time in which work could have begun.
                self.anchor = None;
            }
            Command::Flush(reply) => {
                // What was retracted waits, and does not keep the cache.
                let flushed = (self.paused || self.rank.is_idle()) && self.rank.flush();
                let _ = reply.send(flushed);
            }
            Command::Version(version) => self.rank.set_version(version),
            Command::Slow(factor) => self.slow = factor,
            Command::Die => self.dead = true,
        }
    }

    fn abort(&mut self, selector: &Selector) {
        let mut ids: Vec<JobId> = match selector {
            Selector::Job(id) => vec![*id],
            Selector::All => self.jobs.keys().copied().collect(),
            Selector::Prefix(prefix) => self
                .jobs
                .iter()
                .filter(|(_, waiter)| waiter.rid.starts_with(&**prefix))
                .map(|(id, _)| *id)
                .collect(),
            Selector::Exact(rids) => self
                .jobs
                .iter()
                .filter(|(_, waiter)| rids.contains(&waiter.rid))
                .map(|(id, _)| *id)
                .collect(),
        };
        ids.sort_unstable();
        for id in ids {
            if let Some(event) = self.rank.abort(id) {
                self.tell(event);
            }
        }
    }

    /// What is seen when a step begins.
    fn begin(&self, event: &Event) {
        match event {
            Event::Started { job, cached } => {
                if let Some(record) = self.jobs.get(job).and_then(|w| w.record) {
                    self.history.lock().started(record, *cached);
                }
            }
            Event::Crashed { .. } => (self.crash)(),
            _ => {}
        }
    }

    /// Passes an event on to whoever waits for the job.
    fn tell(&mut self, event: Event) {
        let (job, end) = match &event {
            Event::Started { job, .. } | Event::Progress { job, .. } | Event::Crashed { job } => {
                (*job, None)
            }
            Event::Done { job, done } => {
                let how = match done.ended {
                    Ended::Stop(_) => How::Stop,
                    Ended::Length => How::Length,
                    Ended::Aborted => How::Aborted,
                };
                (*job, Some((how, done.total, done.retractions)))
            }
            Event::Refused { job, why, tokens } => {
                let how = match why {
                    Refusal::QueueFull | Refusal::Displaced => How::QueueFull,
                    Refusal::AbortedWaiting => How::AbortedWaiting,
                    Refusal::TooLarge => How::Rejected,
                };
                let total = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                (*job, Some((how, total, 0)))
            }
        };
        let Some((how, tokens, retractions)) = end else {
            if let Some(waiter) = self.jobs.get(&job) {
                let _ = waiter.events.send((waiter.index, event));
            }
            return;
        };
        if let Some(waiter) = self.jobs.remove(&job) {
            self.dispatched.fetch_sub(1, Ordering::Relaxed);
            if let Some(record) = waiter.record {
                self.history.lock().ended(record, how, tokens, retractions);
            }
            let _ = waiter.events.send((waiter.index, event));
        }
    }

    fn publish(&self, throughput: f64, fresh: bool) {
        *self.snapshot.lock() = Snapshot {
            load: self.rank.load(),
            throughput,
            at: self.clock.now(),
            fresh,
        };
    }
}

#[cfg(test)]
#[path = "driver_test.rs"]
mod tests;
