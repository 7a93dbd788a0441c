//! Moving a trajectory off a busy rank: what it costs, and how often it may be.
//!
//! A key moves when the queue here, less the one there, is longer than computing
//! its history anew by a margin. A queue is what prompts in flight have still to
//! compute, by this process's own count: other work of the ranks is unseen. In no
//! minute are there more moves in the fleet than the budget says.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// The budget counts within this.
const MINUTE: Duration = Duration::from_secs(60);

/// When keys move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoveConfig {
    /// The gain must exceed the cost by this.
    pub margin: Duration,
    /// Longer histories never move.
    pub max_context: u32,
    /// One key moves once in so long, to the minute.
    pub cooldown: Duration,
    /// Moves in any minute, in the whole fleet. At most 100,000.
    pub per_minute: u32,
    /// What computing a prompt costs.
    pub cost: PrefillCost,
}

impl Default for MoveConfig {
    fn default() -> Self {
        Self {
            margin: Duration::from_secs(3),
            max_context: 16_384,
            cooldown: Duration::from_secs(300),
            per_minute: 60,
            cost: PrefillCost::default(),
        }
    }
}

/// How long a rank computes a prompt: linear and quadratic in its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillCost {
    /// Seconds a token.
    pub per_token: f64,
    /// Seconds a token squared.
    pub per_token_squared: f64,
}

impl Default for PrefillCost {
    /// Qwen3-8B on one H100: T(L) = (16.4e9 L + 294,912 L^2) / 294.5e12 s.
    fn default() -> Self {
        Self {
            per_token: 16.4e9 / 294.5e12,
            per_token_squared: 294_912.0 / 294.5e12,
        }
    }
}

impl PrefillCost {
    /// Of the first so many tokens.
    pub fn of(&self, tokens: u32) -> Duration {
        let tokens = f64::from(tokens);
        let seconds = tokens * (self.per_token + self.per_token_squared * tokens);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Of a prompt whose first `cached` tokens are there.
    pub fn rest(&self, cached: u32, prompt: u32) -> Duration {
        self.of(prompt).saturating_sub(self.of(cached))
    }
}

/// What a rank's prompts in flight have still to compute.
#[derive(Debug, Default)]
pub struct Queue(AtomicU64);

impl Queue {
    /// So long, by the cost model.
    pub fn length(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

/// A prompt that waits to be computed; it does no longer when this is dropped.
#[derive(Debug, Default)]
pub struct Queued(Option<(Arc<Queue>, u64)>);

impl Queued {
    /// In this queue, for so long.
    pub(super) fn on(queue: &Arc<Queue>, work: Duration) -> Self {
        let micros = u64::try_from(work.as_micros()).unwrap_or(u64::MAX >> 16);
        queue.0.fetch_add(micros, Ordering::Relaxed);
        Self(Some((Arc::clone(queue), micros)))
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if let Some((queue, micros)) = self.0.take() {
            queue.0.fetch_sub(micros, Ordering::Relaxed);
        }
    }
}

/// The moves of the last minute.
#[derive(Debug, Default)]
pub(super) struct Budget(Mutex<VecDeque<Instant>>);

impl Budget {
    /// Whether another move may be; it is counted where `take`.
    pub(super) fn allows(&self, per_minute: u32, now: Instant, take: bool) -> bool {
        let mut moves = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(first) = moves.front()
            && now.saturating_duration_since(*first) >= MINUTE
        {
            moves.pop_front();
        }
        let allowed = moves.len() < per_minute as usize;
        if allowed && take {
            moves.push_back(now);
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_anchors_of_the_cost() {
        let cost = PrefillCost::default();
        for (tokens, seconds) in [(4096, 0.245), (16_384, 1.18), (32_768, 2.9), (65_536, 7.95)] {
            let is = cost.of(tokens).as_secs_f64();
            assert!((is - seconds).abs() < 0.02 * seconds, "{tokens}: {is}");
        }
        assert_eq!(cost.rest(4096, 4096), Duration::ZERO);
        assert_eq!(cost.rest(9, 4), Duration::ZERO, "never negative");
    }

    #[test]
    fn a_queue_is_as_long_as_what_waits_in_it() {
        let queue = Arc::new(Queue::default());
        let first = Queued::on(&queue, Duration::from_millis(3));
        let second = Queued::on(&queue, Duration::from_millis(4));
        assert_eq!(queue.length(), Duration::from_millis(7));
        drop(first);
        assert_eq!(queue.length(), Duration::from_millis(4));
        drop(second);
        assert_eq!(queue.length(), Duration::ZERO);
    }

    proptest! {
        /// In no minute more than the budget, wherever the minute begins.
        #[test]
        fn the_budget_holds_in_every_minute(
            steps in prop::collection::vec(0u64..30_000, 1..200),
            per_minute in 0u32..8,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time().start_paused(true).build().unwrap();
            let moved = runtime.block_on(async {
                let budget = Budget::default();
                let (mut now, mut moved) = (Instant::now(), Vec::new());
                for step in steps {
                    now += Duration::from_millis(step);
                    let asked = budget.allows(per_minute, now, false);
                    assert_eq!(budget.allows(per_minute, now, true), asked, "asking takes nothing");
                    if asked {
                        moved.push(now);
                    }
                }
                moved
            });
            for (i, first) in moved.iter().enumerate() {
                let within = moved[i..].iter().filter(|m| **m - *first < MINUTE).count();
                prop_assert!(within <= per_minute as usize);
            }
        }
    }
}
