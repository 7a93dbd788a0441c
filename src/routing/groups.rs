//! Which ranks have requests of which group, and which hold its prompt.
//!
//! Bounded: so many groups, the least recently used of some leaves for a new one,
//! and so many ranks of each. A group that is not used for the pins' TTL is
//! forgotten.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::bounded::{Bounded, Used};
use crate::fleet::snapshot::RankSlot;

/// Groups that are remembered at most.
const MOST_GROUPS: usize = 65_536;
/// Ranks of one group that are remembered at most.
const MOST_RANKS: usize = 256;

/// A group on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) slot: RankSlot,
    /// Requests placed there.
    pub(super) siblings: u32,
    /// One of them was answered: the prompt is in the cache.
    pub(super) holds: bool,
}

/// One group.
#[derive(Debug)]
struct Group {
    shares: Vec<Share>,
    used: Instant,
}

impl Used for Group {
    fn used(&self) -> Instant {
        self.used
    }
}

/// All of them.
#[derive(Debug)]
pub(super) struct Groups(Mutex<Bounded<u128, Group>>);

impl Default for Groups {
    fn default() -> Self {
        Self::new(MOST_GROUPS)
    }
}

impl Groups {
    fn new(most: usize) -> Self {
        Self(Mutex::new(Bounded::new(most)))
    }

    /// Where the group is.
    pub(super) fn shares(&self, key: u128) -> Vec<Share> {
        let groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        groups.get(&key).map_or_else(Vec::new, |g| g.shares.clone())
    }

    /// A request of the group goes there.
    pub(super) fn placed(&self, key: u128, slot: RankSlot, now: Instant) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let share = Share {
            slot,
            siblings: 1,
            holds: false,
        };
        let Some(group) = groups.get_mut(&key) else {
            let shares = vec![share];
            groups.insert(key, Group { shares, used: now });
            return;
        };
        group.used = now;
        if let Some(share) = group.shares.iter_mut().find(|s| s.slot == slot) {
            share.siblings = share.siblings.saturating_add(1);
        } else if group.shares.len() < MOST_RANKS {
            group.shares.push(share);
        }
    }

    /// One was answered there.
    pub(super) fn answered(&self, key: u128, slot: RankSlot, now: Instant) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get_mut(&key)
            && let Some(share) = group.shares.iter_mut().find(|s| s.slot == slot)
        {
            group.used = now;
            share.holds = true;
        }
    }

    /// Forgets those that were not used for `ttl`.
    pub(super) fn sweep(&self, now: Instant, ttl: Duration) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| now.saturating_duration_since(group.used) < ttl);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn groups_and_their_ranks_are_bounded_and_forgotten() {
        let groups = Groups::new(100);
        let now = Instant::now();
        for key in 0..1000 {
            groups.placed(key, RankSlot(1), now);
        }
        assert_eq!(groups.len(), 100);
        for slot in 0..600 {
            groups.placed(7000, RankSlot(slot), now);
        }
        assert_eq!(groups.shares(7000).len(), MOST_RANKS);
        let later = now + Duration::from_secs(10);
        groups.placed(8000, RankSlot(3), later);
        groups.placed(8000, RankSlot(3), later);
        groups.answered(8000, RankSlot(3), later);
        groups.answered(8000, RankSlot(4), later);
        groups.sweep(later, Duration::from_secs(10));
        assert_eq!(groups.len(), 1);
        let share = Share {
            slot: RankSlot(3),
            siblings: 2,
            holds: true,
        };
        assert_eq!(groups.shares(8000), [share]);
    }
}
