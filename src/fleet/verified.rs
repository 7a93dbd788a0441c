//! Whether a rank does what pins are for: it serves what it is asked to serve, and
//! its cache holds what earlier turns put there.
//!
//! | state | when |
//! |---|---|
//! | holds | turns are served here and find what they should |
//! | ignores pins | `IN_A_ROW` answers in a row came from another rank than was asked; over after as many right ones |
//! | loses its cache | of the last warm turns, some `WINDOW`, less than `LOW` of what they should have found was there; over above `HIGH` |
//!
//! Engines that do not name the serving rank can only lose their cache. A trainer
//! that rewrites histories finds less than is expected, too: that looks the same.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// Answers in a row that make a judgement.
const IN_A_ROW: u32 = 3;
/// Warm turns that a judgement looks back on, about.
const WINDOW: f64 = 32.0;
/// Warm turns before the first judgement of the cache.
const LEAST_TURNS: f64 = 8.0;
/// Share of the expected tokens below which a cache is lost.
const LOW: f64 = 0.5;
/// And above which it holds again.
const HIGH: f64 = 0.8;

/// The judgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affinity {
    /// Too few turns to tell.
    #[default]
    Unknown,
    /// As it should be.
    Holds,
    /// Other ranks answer.
    IgnoresPins,
    /// Histories are not found.
    LosesCache,
}

/// What an answer tells of its rank.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Another rank than the one that was asked. `None`: the engine does not say.
    pub elsewhere: Option<bool>,
    /// Cached tokens expected and reported, where one can be held against the
    /// other.
    pub cached: Option<(u32, u32)>,
}

/// The account of one rank.
#[derive(Debug, Default)]
pub struct Verified {
    wrong_rank: AtomicU64,
    expected: AtomicU64,
    reported: AtomicU64,
    recent: Mutex<Recent>,
}

/// What is known of one rank, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifiedView {
    /// The judgement.
    pub affinity: Affinity,
    /// Answers of another rank than was asked.
    pub wrong_rank: u64,
    /// Cached tokens that warm turns should have found.
    pub expected: u64,
    /// Of those, the ones that they found.
    pub reported: u64,
    /// Percent of the expected tokens that the last warm turns found.
    pub recent_percent: Option<u32>,
}

#[derive(Debug, Default)]
struct Recent {
    affinity: Affinity,
    wrong_in_a_row: u32,
    right_in_a_row: u32,
    ignores: bool,
    loses: bool,
    /// Decayed: warm turns, and shares of their tokens that were found.
    turns: f64,
    expected: f64,
    found: f64,
}

impl Verified {
    /// Counts an answer. Returns the new judgement where it is another than before.
    pub fn take(&self, answer: Answer) -> Option<Affinity> {
        if answer.elsewhere == Some(true) {
            self.wrong_rank.fetch_add(1, Ordering::Relaxed);
        }
        if let Some((expected, reported)) = answer.cached {
            let found = reported.min(expected);
            self.expected
                .fetch_add(u64::from(expected), Ordering::Relaxed);
            self.reported.fetch_add(u64::from(found), Ordering::Relaxed);
        }
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let before = recent.affinity;
        recent.take(answer);
        (recent.affinity != before).then_some(recent.affinity)
    }

    /// As it is.
    pub fn view(&self) -> VerifiedView {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        VerifiedView {
            affinity: recent.affinity,
            wrong_rank: self.wrong_rank.load(Ordering::Relaxed),
            expected: self.expected.load(Ordering::Relaxed),
            reported: self.reported.load(Ordering::Relaxed),
            recent_percent: recent.percent(),
        }
    }
}

impl Recent {
    fn take(&mut self, answer: Answer) {
        match answer.elsewhere {
            Some(true) => {
                self.wrong_in_a_row = self.wrong_in_a_row.saturating_add(1);
                self.right_in_a_row = 0;
            }
            Some(false) => {
                self.right_in_a_row = self.right_in_a_row.saturating_add(1);
                self.wrong_in_a_row = 0;
            }
            None => {}
        }
        if self.wrong_in_a_row >= IN_A_ROW {
            self.ignores = true;
        } else if self.right_in_a_row >= IN_A_ROW {
            self.ignores = false;
        }
        if let Some((expected, reported)) = answer.cached.filter(|(expected, _)| *expected > 0) {
            let keep = 1.0 - 1.0 / WINDOW;
            self.turns = self.turns * keep + 1.0;
            self.expected = self.expected * keep + f64::from(expected);
            self.found = self.found * keep + f64::from(reported.min(expected));
            let share = self.found / self.expected;
            if self.turns >= LEAST_TURNS && share < LOW {
                self.loses = true;
            } else if share >= HIGH {
                self.loses = false;
            }
        }
        self.affinity = match (self.ignores, self.loses) {
            (true, _) => Affinity::IgnoresPins,
            (false, true) => Affinity::LosesCache,
            (false, false) if self.turns >= LEAST_TURNS || self.right_in_a_row >= IN_A_ROW => {
                Affinity::Holds
            }
            (false, false) if self.affinity == Affinity::Unknown => Affinity::Unknown,
            (false, false) => Affinity::Holds,
        };
    }

    fn percent(&self) -> Option<u32> {
        (self.turns >= 1.0).then(|| {
            // Between 0 and 100.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a share of 1"
            )]
            let percent = (100.0 * self.found / self.expected) as u32;
            percent
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(elsewhere: bool) -> Answer {
        Answer {
            elsewhere: Some(elsewhere),
            cached: None,
        }
    }

    fn found(expected: u32, reported: u32) -> Answer {
        Answer {
            elsewhere: None,
            cached: Some((expected, reported)),
        }
    }

    #[test]
    fn one_wrong_answer_is_counted_and_three_in_a_row_are_a_judgement() {
        let rank = Verified::default();
        assert_eq!(rank.take(served(true)), None);
        assert_eq!(rank.take(served(false)), None);
        assert_eq!(rank.view().wrong_rank, 1);
        assert_eq!(rank.take(served(true)), None);
        assert_eq!(rank.take(served(true)), None);
        assert_eq!(rank.take(served(true)), Some(Affinity::IgnoresPins));
        assert_eq!(rank.take(served(false)), None);
        assert_eq!(rank.take(served(false)), None);
        assert_eq!(rank.take(served(false)), Some(Affinity::Holds));
        assert_eq!(rank.view().wrong_rank, 4);
    }

    #[test]
    fn a_cache_that_is_lost_is_seen_and_one_turn_is_none() {
        let rank = Verified::default();
        for _ in 0..20 {
            rank.take(found(1000, 1000));
        }
        assert_eq!(rank.view().affinity, Affinity::Holds);
        assert_eq!(rank.take(found(1000, 0)), None, "one conversation lost it");
        let judged = (0..60)
            .filter_map(|_| rank.take(found(1000, 0)))
            .collect::<Vec<_>>();
        assert_eq!(judged, [Affinity::LosesCache]);
        assert!(rank.view().recent_percent < Some(20), "{:?}", rank.view());
        let judged = (0..90)
            .filter_map(|_| rank.take(found(1000, 1000)))
            .collect::<Vec<_>>();
        assert_eq!(judged, [Affinity::Holds]);
        let view = rank.view();
        assert_eq!((view.expected, view.reported), (171_000, 110_000));
    }

    #[test]
    fn more_than_expected_is_no_credit_and_nothing_expected_no_evidence() {
        let rank = Verified::default();
        for _ in 0..100 {
            rank.take(found(0, 0));
        }
        assert_eq!(rank.view().affinity, Affinity::Unknown);
        for _ in 0..50 {
            rank.take(found(100, 1_000_000));
            rank.take(found(1000, 0));
        }
        assert_eq!(rank.view().affinity, Affinity::LosesCache);
    }
}
