//! A dead scheduler behind a living server: its entry in the loads stays, but
//! its own timestamp stands still. That is the only sign before the first
//! message to it hangs every rank, so it is watched here and taken seriously.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::engine::facts::RankLoad;

/// Beats without news before a rank is taken for dead.
const BEATS: u32 = 3;
/// A rank that stood still this many times as long as it takes to be taken for
/// dead does not come back: one message to it, by whomever, hangs the server.
const GIVE_UP: u32 = 4;

/// What the timestamps say about a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulse {
    /// It moves, or cannot be judged.
    Alive,
    /// It stands still, or the rank is not listed.
    Frozen,
    /// It has stood still for so long that the whole replica is given up.
    Dead,
}

/// Watches the timestamps of all ranks.
#[derive(Debug)]
pub struct FrozenWatch {
    after: Duration,
    ranks: BTreeMap<u32, Seen>,
}

#[derive(Debug)]
struct Seen {
    timestamp: Option<f64>,
    since: Instant,
    beats: u32,
}

impl FrozenWatch {
    /// A rank is frozen when it has stood still for three beats and for
    /// `after`: a long prefill step publishes nothing for a second or two.
    pub fn new(after: Duration) -> Self {
        Self {
            after,
            ranks: BTreeMap::new(),
        }
    }

    /// Forgets everything: the engine is another one, or is paused, when
    /// timestamps stand still with every right.
    pub fn reset(&mut self) {
        self.ranks.clear();
    }

    /// Takes what one beat saw of `rank`. `judge`: false where standing still
    /// means nothing.
    pub fn observe(&mut self, rank: u32, load: Option<&RankLoad>, judge: bool) -> Pulse {
        let now = Instant::now();
        let timestamp = load.and_then(|load| load.timestamp);
        // A server that tells no timestamps cannot be judged; a rank that is
        // not listed any more is as good as standing still.
        if !judge || (load.is_some() && timestamp.is_none()) {
            self.ranks.remove(&rank);
            return Pulse::Alive;
        }
        let seen = self.ranks.entry(rank).or_insert(Seen {
            timestamp,
            since: now,
            beats: 0,
        });
        // Any change is a sign of life: clocks can be set back.
        let moved = load.is_some() && seen.timestamp != timestamp;
        if moved {
            *seen = Seen {
                timestamp,
                since: now,
                beats: 0,
            };
            return Pulse::Alive;
        }
        // The first sight is none of standing still.
        if now > seen.since {
            seen.beats = seen.beats.saturating_add(1);
        }
        let still = now.duration_since(seen.since);
        if seen.beats < BEATS || still < self.after {
            Pulse::Alive
        } else if seen.beats < BEATS * GIVE_UP || still < self.after * GIVE_UP {
            Pulse::Frozen
        } else {
            Pulse::Dead
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: Duration = Duration::from_secs(2);

    fn at(timestamp: f64) -> RankLoad {
        RankLoad {
            timestamp: Some(timestamp),
            ..RankLoad::default()
        }
    }

    async fn beats(watch: &mut FrozenWatch, load: Option<RankLoad>, n: u32) -> Vec<Pulse> {
        let mut pulses = Vec::new();
        for _ in 0..n {
            pulses.push(watch.observe(1, load.as_ref(), true));
            tokio::time::advance(BEAT).await;
        }
        pulses
    }

    #[tokio::test(start_paused = true)]
    async fn a_timestamp_that_stands_still_is_frozen_and_in_the_end_dead() {
        let mut watch = FrozenWatch::new(Duration::from_secs(5));
        let pulses = beats(&mut watch, Some(at(7.0)), 15).await;
        assert_eq!(pulses[..3], [Pulse::Alive; 3]);
        assert_eq!(pulses[3..12], [Pulse::Frozen; 9]);
        assert_eq!(pulses[12..], [Pulse::Dead; 3]);
        // It moves again.
        assert_eq!(watch.observe(1, Some(&at(8.0)), true), Pulse::Alive);
    }

    #[tokio::test(start_paused = true)]
    async fn quick_beats_do_not_hurry_it() {
        let mut watch = FrozenWatch::new(Duration::from_secs(5));
        for _ in 0..49 {
            assert_eq!(watch.observe(0, Some(&at(1.0)), true), Pulse::Alive);
            tokio::time::advance(Duration::from_millis(100)).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_rank_that_disappears_is_frozen_too() {
        let mut watch = FrozenWatch::new(Duration::from_secs(5));
        assert_eq!(beats(&mut watch, Some(at(1.0)), 1).await, [Pulse::Alive]);
        assert_eq!(beats(&mut watch, None, 3).await[2], Pulse::Frozen);
    }

    #[tokio::test(start_paused = true)]
    async fn while_paused_and_without_timestamps_nothing_is_judged() {
        let mut watch = FrozenWatch::new(Duration::from_secs(5));
        for _ in 0..20 {
            assert_eq!(watch.observe(0, Some(&at(1.0)), false), Pulse::Alive);
            let silent = RankLoad::default();
            assert_eq!(watch.observe(1, Some(&silent), true), Pulse::Alive);
            tokio::time::advance(BEAT).await;
        }
        // The time of the pause does not count afterwards.
        assert_eq!(watch.observe(0, Some(&at(1.0)), true), Pulse::Alive);
    }
}
