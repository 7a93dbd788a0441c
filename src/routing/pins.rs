//! The table of pins: which rank holds a trajectory, how far it has grown and
//! when it was last used.
//!
//! Sharded, so that no lock is shared by all keys. A pin is *live* while its
//! trajectory was used within the TTL: it then counts as load on its rank. An
//! idle one becomes a *hint*: it no longer counts, and is still followed. Memory
//! is bounded: in a full shard a new pin takes the place of the least recently
//! used of some. Where pins are to survive this process, each shard says which of
//! them changed since it was last asked.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    fleet::snapshot::{RankLoad, RankSlot},
    ids::{AffinityKey, Tenant},
};

const SHARDS: usize = 64;

/// Pins looked at for the least recently used one when a shard is full.
const EVICTION_SAMPLE: usize = 32;

/// A trajectory's name within its tenant, model and adapter, as a hash: keys are
/// told apart by all four, and the table holds no key in clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinKey(pub u128);

impl PinKey {
    /// Of these four. The same in every process.
    pub fn new(tenant: &Tenant, model: &str, adapter: Option<&str>, key: &AffinityKey) -> Self {
        let mut hasher = Xxh3::new();
        let parts = [
            tenant.as_str(),
            model,
            adapter.unwrap_or_default(),
            key.as_str(),
        ];
        for part in parts {
            // Lengths, so that no two sets of parts give one input.
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update(&[u8::from(adapter.is_some())]);
        Self(hasher.digest128())
    }
}

/// One pin. 56 bytes with its key; with the table's overhead at full load about 100.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) slot: RankSlot,
    /// Tokens of the history whose KV the rank holds by our count.
    pub(super) tokens: u32,
    /// The load of the adapter that made that KV; 0 without one.
    pub(super) adapter: u64,
    pub(super) last_used: Instant,
    /// Set while it counts as load.
    pub(super) live: Option<Arc<RankLoad>>,
}

impl Pin {
    /// Used now: counts as load on `load`, its rank's.
    pub(super) fn touch(&mut self, now: Instant, load: &Arc<RankLoad>) {
        self.last_used = now;
        if self.live.is_none() {
            load.pin(self.tokens);
            self.live = Some(Arc::clone(load));
        }
    }

    /// No longer counts as load.
    pub(super) fn idle(&mut self) {
        if let Some(load) = self.live.take() {
            load.unpin(self.tokens);
        }
    }

    /// Its history's KV is so long now.
    pub(super) fn resize(&mut self, tokens: u32) {
        if let Some(load) = &self.live {
            load.resize(self.tokens, tokens);
        }
        self.tokens = tokens;
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
#[derive(Debug, Default)]
pub(super) struct Shard {
    pins: HashMap<PinKey, Pin>,
    /// Bound, grown or gone since they were taken. `None`: nobody asks.
    changed: Option<HashSet<PinKey>>,
    /// Changes that are remembered at most.
    most_changed: usize,
}

impl Shard {
    pub(super) fn get(&self, key: PinKey) -> Option<&Pin> {
        self.pins.get(&key)
    }

    pub(super) fn get_mut(&mut self, key: PinKey) -> Option<&mut Pin> {
        self.pins.get_mut(&key)
    }

    pub(super) fn remove(&mut self, key: PinKey) -> bool {
        let there = self.pins.remove(&key).is_some();
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
    shard_capacity: usize,
    /// Told of every new pin, where changes are kept.
    bound: Notify,
}

impl PinTable {
    /// For at most about so many pins. `keep`: changes are remembered until they
    /// are taken.
    pub(super) fn new(capacity: usize, keep: bool) -> Self {
        let shard_capacity = capacity.div_ceil(SHARDS).max(1);
        let shard = || Shard {
            changed: keep.then(HashSet::new),
            most_changed: 2 * shard_capacity,
            ..Shard::default()
        };
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect(),
            shard_capacity,
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
        if shard.pins.len() >= self.shard_capacity && !shard.pins.contains_key(&key) {
            let oldest = shard
                .pins
                .iter()
                .take(EVICTION_SAMPLE)
                .min_by_key(|(_, pin)| pin.last_used)
                .map(|(key, _)| *key);
            if let Some(oldest) = oldest {
                shard.remove(oldest);
            }
        }
        shard.pins.insert(key, pin);
        if shard.changed.is_some() {
            shard.changed(key);
            self.bound.notify_one();
        }
    }

    /// Puts a pin of an earlier process into the table, where its key has none.
    pub(super) fn restore(&self, key: PinKey, pin: Pin) {
        let mut shard = self.shard(key);
        if shard.pins.len() < self.shard_capacity {
            shard.pins.entry(key).or_insert(pin);
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
            for (key, pin) in &mut shard.pins {
                let idle = now.saturating_duration_since(pin.last_used);
                if pin.live.is_some() && idle >= ttl {
                    pin.idle();
                }
                if idle >= hint_ttl {
                    old.push(*key);
                }
            }
            for key in old {
                shard.remove(key);
            }
        }
    }
}
