//! One rank at work in virtual time: the simulated engine's scheduler, the step
//! that it is in, and the account of what it did.

use std::{sync::Arc, time::Duration};

use super::outline::{Outline, Prompt};
use crate::engine::sim::scheduler::{Event, Job, JobId, Rank, RankConfig};

/// What a rank did in all its starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// In steps.
    pub busy: Duration,
    /// Nanoseconds that requests spent on it, waiting or running, summed over
    /// the requests.
    pub occupied: u128,
    /// Trajectories that began here.
    pub began: u64,
    /// Prompt tokens computed.
    pub prefilled: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Requests that lost their place in the KV cache.
    pub retractions: u64,
    /// Cached tokens evicted for want of room.
    pub evicted: u64,
}

/// A rank.
pub struct Lane {
    config: RankConfig,
    rank: Rank<Outline>,
    /// Events at the end of the step that it is in.
    step: Option<Vec<Event>>,
    /// Grows when the step that it is in comes to nothing.
    pub epoch: u64,
    /// Its replica lives.
    pub up: bool,
    /// Nothing is computed.
    pub paused: bool,
    in_flight: u64,
    counted_to: u64,
    work: Work,
}

impl Lane {
    /// Up and idle.
    pub fn new(config: RankConfig, weights: Arc<str>) -> Self {
        Self {
            rank: Rank::new(config.clone(), weights),
            config,
            step: None,
            epoch: 0,
            up: true,
            paused: false,
            in_flight: 0,
            counted_to: 0,
            work: Work::default(),
        }
    }

    fn count(&mut self, now: u64) {
        let span = now.saturating_sub(self.counted_to);
        self.work.occupied += u128::from(span) * u128::from(self.in_flight);
        self.counted_to = now;
    }

    /// Takes a request.
    pub fn submit(&mut self, now: u64, id: JobId, prompt: Prompt, output: u32) -> Vec<Event> {
        self.count(now);
        self.in_flight += 1;
        self.rank.submit(Job {
            id,
            prompt,
            max_new: output,
            seed: 0,
            stop_ids: Vec::new(),
            ignore_eos: true,
            stops_past_eos: false,
            min_new: 0,
            compute_from: None,
            namespace: Arc::default(),
            priority: 0,
            notify_every: 0,
            poison: false,
        })
    }

    /// A request has left.
    pub fn left(&mut self, now: u64) {
        self.count(now);
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Begins a step, where it is in none and has something to do. Returns how
    /// long it takes.
    pub fn begin(&mut self) -> Option<Duration> {
        if !self.up || self.paused || self.step.is_some() {
            return None;
        }
        let step = self.rank.step()?;
        self.work.busy += step.took;
        self.step = Some(step.events);
        Some(step.took)
    }

    /// The step is over.
    pub fn end(&mut self) -> Vec<Event> {
        self.step.take().unwrap_or_default()
    }

    /// All that runs is computed again and the cache is empty: new weights.
    pub fn load(&mut self, version: Arc<str>) {
        self.rank.retract_all();
        self.rank.flush();
        self.rank.set_version(version);
    }

    /// It is gone, with all that it held. Whoever had requests here has been told.
    pub fn die(&mut self) {
        self.close_account();
        self.up = false;
        self.paused = false;
        self.step = None;
        self.epoch += 1;
    }

    /// A new start: idle, with an empty cache.
    pub fn restart(&mut self, weights: Arc<str>) {
        self.rank = Rank::new(self.config.clone(), weights);
        self.up = true;
    }

    fn close_account(&mut self) {
        let totals = self.rank.load().totals;
        self.work.prefilled += totals.prefilled;
        self.work.generated += totals.generated;
        self.work.retractions += totals.retractions;
        self.work.evicted += totals.evicted;
    }

    /// A trajectory begins here.
    pub fn begins_trajectory(&mut self) {
        self.work.began += 1;
    }

    /// What it did, all told.
    pub fn finish(mut self) -> Work {
        if self.up {
            self.close_account();
        }
        self.work
    }
}
