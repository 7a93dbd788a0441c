//! The table of pins: which rank holds a trajectory, how far it has grown and
//! when it was last used.
//!
//! Sharded, so that no lock is shared by all keys. A pin is *live* while its
//! trajectory was used within the TTL: it then counts as load on its rank. An
//! idle one becomes a *hint*: it no longer counts, and is still followed. Memory
//! is bounded: in a full shard a new pin takes the place of the least recently
//! used of some. Where pins are to survive this process, each shard says which of
//! them changed since it was last asked.
//!
//! A pin costs 72 bytes with its key, and 9 for its place in an index. With the spare
//! room of tables that double, and what is noted of its changes, that is at most
//! 200 bytes (measured by `benches/routing.rs`).

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};
use xxhash_rust::xxh3::Xxh3;

use super::bounded::{Bounded, Used};
use crate::{
    fleet::snapshot::{RankLoad, RankSlot},
    ids::{AffinityKey, Tenant},
};

const SHARDS: usize = 64;

/// A trajectory's name within its tenant, model and adapter, as a hash: keys are
/// told apart by all four, and the table holds no key in clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinKey(pub u128);

impl PinKey {
    /// Of these four. The same in every process.
    pub fn new(tenant: &Tenant, model: &str, adapter: Option<&str>, key: &AffinityKey) -> Self {
        Self::of(tenant, model, adapter, key.as_str())
    }

    pub(super) fn of(tenant: &Tenant, model: &str, adapter: Option<&str>, name: &str) -> Self {
        let mut hasher = Xxh3::new();
        let parts = [tenant.as_str(), model, adapter.unwrap_or_default(), name];
        for part in parts {
            // Lengths, so that no two sets of parts give one input.
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update(&[u8::from(adapter.is_some())]);
        Self(hasher.digest128())
    }
}

/// A [`PinKey`] as the table holds it: a `u128` would have every entry padded to
/// its alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key([u64; 2]);

impl From<PinKey> for Key {
    fn from(key: PinKey) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = key.0.to_le_bytes();
        Self([
            u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            u64::from_le_bytes([i, j, k, l, m, n, o, p]),
        ])
    }
}

impl From<Key> for PinKey {
    fn from(key: Key) -> Self {
        let [low, high] = key.0;
        Self(u128::from(high) << 64 | u128::from(low))
    }
}

/// What a decision sees of a pin.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    pub(super) slot: RankSlot,
    /// Tokens of the history whose KV the rank holds by our count.
    pub(super) tokens: u32,
    /// Tokens that count on its rank while it is live: of its history, or of the
    /// prompt that is being computed.
    pub(super) counted: u32,
    /// Names the weights that made that KV; 0 is unknown.
    pub(super) weights: u16,
    /// How it came to be here.
    pub(super) came: Came,
    /// The load of the adapter that made that KV; 0 without one.
    pub(super) adapter: u64,
}

/// How a trajectory came to its rank, in 16 bits: a pin has no more to spare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Came(u16);

/// Minutes are counted up to here and go round: after eleven days, long after an
/// idle pin is forgotten.
pub(super) const MINUTES: u16 = (1 << 14) - 1;

impl Came {
    const REFUGE: u16 = 1 << 14;

    /// It moved in this minute, from 1 to [`MINUTES`]; 0: never.
    pub(super) fn moved(minute: u16) -> Self {
        Self(minute & MINUTES)
    }

    /// Likewise, since its rank was lost.
    pub(super) fn refuge(minute: u16) -> Self {
        Self(minute & MINUTES | Self::REFUGE)
    }

    /// When it moved for the last time; 0 is never.
    pub(super) fn minute(self) -> u16 {
        self.0 & MINUTES
    }

    /// Its rank was lost, and this one took it in.
    pub(super) fn is_refuge(self) -> bool {
        self.0 & Self::REFUGE != 0
    }
}

/// A pin as a decision sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) at: Pinned,
    /// It counts as load on its rank.
    pub(super) live: bool,
}

/// One pin.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) at: Pinned,
    last_used: Instant,
    /// Set while it counts as load.
    live: Option<Arc<RankLoad>>,
}

impl Used for Pin {
    fn used(&self) -> Instant {
        self.last_used
    }
}

impl Pin {
    /// Not live yet.
    pub(super) fn new(at: Pinned, now: Instant) -> Self {
        Self {
            at: Pinned {
                counted: at.tokens,
                ..at
            },
            last_used: now,
            live: None,
        }
    }

    pub(super) fn last_used(&self) -> Instant {
        self.last_used
    }

    pub(super) fn seen(&self) -> Seen {
        Seen {
            at: self.at,
            live: self.is_live(),
        }
    }

    pub(super) fn is_live(&self) -> bool {
        self.live.is_some()
    }

    /// Used now, for a prompt of so many tokens: counts as load on `load`, its
    /// rank's.
    pub(super) fn touch(&mut self, now: Instant, load: &Arc<RankLoad>, prompt: u32) {
        self.last_used = now;
        self.count(prompt.max(self.at.tokens));
        if self.live.is_none() {
            load.pin(self.at.counted);
            self.live = Some(Arc::clone(load));
        }
    }

    /// No longer counts as load. Returns whether it did.
    pub(super) fn idle(&mut self) -> bool {
        let load = self.live.take();
        if let Some(load) = &load {
            load.unpin(self.at.counted);
        }
        load.is_some()
    }

    /// Its history's KV is so long now. Returns whether it counts for less than
    /// before.
    pub(super) fn resize(&mut self, tokens: u32) -> bool {
        let before = self.at.counted;
        self.at.tokens = tokens;
        self.count(tokens);
        self.at.counted < before
    }

    fn count(&mut self, tokens: u32) {
        if let Some(load) = &self.live
            && tokens != self.at.counted
        {
            load.resize(self.at.counted, tokens);
        }
        self.at.counted = tokens;
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.idle();
    }
}

/// What is known of a pin, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinView {
    /// Its rank.
    pub slot: RankSlot,
    /// Tokens of its history in that rank's cache.
    pub tokens: u32,
    /// The load of the adapter that made that cache; 0 without one.
    pub adapter: u64,
    /// Since its last turn.
    pub idle: Duration,
    /// It counts as load.
    pub live: bool,
}

/// One part of the table.
#[derive(Debug)]
pub(super) struct Shard {
    pins: Bounded<Key, Pin>,
    /// Bound, grown or gone since they were taken. `None`: nobody asks.
    changed: Option<HashSet<PinKey>>,
    /// Changes that are remembered at most.
    most_changed: usize,
}

impl Shard {
    pub(super) fn get(&self, key: PinKey) -> Option<&Pin> {
        self.pins.get(&key.into())
    }

    pub(super) fn get_mut(&mut self, key: PinKey) -> Option<&mut Pin> {
        self.pins.get_mut(&key.into())
    }

    pub(super) fn remove(&mut self, key: PinKey) -> bool {
        let there = self.pins.remove(&key.into()).is_some();
        if there {
            self.changed(key);
        }
        there
    }

    /// A change of this pin is worth keeping.
    pub(super) fn changed(&mut self, key: PinKey) {
        // A bound for when nobody takes them for long: what is left out costs a
        // cold turn after a restart.
        if let Some(changed) = &mut self.changed
            && changed.len() < self.most_changed
        {
            changed.insert(key);
        }
    }
}

/// The table.
#[derive(Debug)]
pub(super) struct PinTable {
    shards: Box<[Mutex<Shard>]>,
    /// Told of every new pin, where changes are kept.
    bound: Notify,
}

impl PinTable {
    /// For at most about so many pins. `keep`: changes are remembered until they
    /// are taken.
    pub(super) fn new(capacity: usize, keep: bool) -> Self {
        let shard_capacity = capacity.div_ceil(SHARDS).max(1);
        let shard = || Shard {
            pins: Bounded::new(shard_capacity),
            changed: keep.then(HashSet::new),
            most_changed: shard_capacity,
        };
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect(),
            bound: Notify::new(),
        }
    }

    /// Until a pin is bound.
    pub(super) async fn bound(&self) {
        self.bound.notified().await;
    }

    /// Keys whose pins changed since they were taken, at most about `most`.
    pub(super) fn take_changed(&self, most: usize) -> Vec<PinKey> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(changed) = &mut shard.changed {
                taken.extend(changed.drain());
            }
            if taken.len() >= most {
                break;
            }
        }
        taken
    }

    /// The shard of `key`, locked. Nothing is done under the lock but look-ups
    /// and arithmetic.
    pub(super) fn shard(&self, key: PinKey) -> MutexGuard<'_, Shard> {
        let index = usize::from(key.0.to_le_bytes()[15]) % SHARDS;
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a pin into its locked shard, in a full one in the place of another.
    pub(super) fn insert(&self, shard: &mut Shard, key: PinKey, pin: Pin) {
        if let Some(gone) = shard.pins.insert(key.into(), pin) {
            shard.changed(gone.into());
        }
        if shard.changed.is_some() {
            shard.changed(key);
            self.bound.notify_one();
        }
    }

    /// Puts a pin of an earlier process into the table, where its key has none.
    pub(super) fn restore(&self, key: PinKey, pin: Pin) {
        let mut shard = self.shard(key);
        if !shard.pins.is_full() && shard.get(key).is_none() {
            shard.pins.insert(key.into(), pin);
        }
    }

    /// Pins in all.
    pub(super) fn len(&self) -> usize {
        self.shards
            .iter()
            .map(|s| {
                let shard = s.lock().unwrap_or_else(PoisonError::into_inner);
                shard.pins.len()
            })
            .sum()
    }

    /// Makes pins that were not used for `ttl` hints, and forgets those that were
    /// not used for `hint_ttl`. One shard is locked at a time.
    pub(super) fn sweep(&self, now: Instant, ttl: Duration, hint_ttl: Duration) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let mut old = Vec::new();
            for (key, pin) in shard.pins.iter_mut() {
                let idle = now.saturating_duration_since(pin.last_used);
                if idle >= ttl {
                    pin.idle();
                }
                if idle >= hint_ttl {
                    old.push(*key);
                }
            }
            for key in old {
                shard.remove(key.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_the_table() {
        for key in [0, 1, u128::MAX, 0x0123_4567_89ab_cdef_fedc_ba98_7654_3210] {
            assert_eq!(PinKey::from(Key::from(PinKey(key))), PinKey(key));
        }
    }

    #[test]
    fn a_pin_is_as_small_as_is_said() {
        assert_eq!(size_of::<(u64, Key, Pin)>(), 72);
    }
}
