//! The table of pins: which rank holds a trajectory, how far it has grown and
//! when it was last used.
//!
//! Sharded, so that no lock is shared by all keys. A pin is *live* while its
//! trajectory was used within the TTL: it then counts as load on its rank. An
//! idle one becomes a *hint*: it no longer counts, and is still followed. Memory
//! is bounded: in a full shard a new pin takes the place of the least recently
//! used of some.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
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

/// One pin. 40 bytes with its key and the table's overhead at full load: about 80.
#[derive(Debug)]
pub(super) struct Pin {
    pub(super) slot: RankSlot,
    /// Tokens of the history whose KV the rank holds by our count.
    pub(super) tokens: u32,
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
    /// Since its last turn.
    pub idle: Duration,
    /// It counts as load.
    pub live: bool,
}

type Shard = HashMap<PinKey, Pin>;

/// The table.
#[derive(Debug)]
pub(super) struct PinTable {
    shards: Box<[Mutex<Shard>]>,
    shard_capacity: usize,
}

impl PinTable {
    /// For at most about so many pins.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            shard_capacity: capacity.div_ceil(SHARDS).max(1),
        }
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
        if shard.len() >= self.shard_capacity && !shard.contains_key(&key) {
            let oldest = shard
                .iter()
                .take(EVICTION_SAMPLE)
                .min_by_key(|(_, pin)| pin.last_used)
                .map(|(key, _)| *key);
            if let Some(oldest) = oldest {
                shard.remove(&oldest);
            }
        }
        shard.insert(key, pin);
    }

    /// Pins in all.
    pub(super) fn len(&self) -> usize {
        self.shards
            .iter()
            .map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).len())
            .sum()
    }

    /// Makes pins that were not used for `ttl` hints. One shard is locked at a
    /// time.
    pub(super) fn sweep(&self, now: Instant, ttl: Duration) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for pin in shard.values_mut() {
                if pin.live.is_some() && now.saturating_duration_since(pin.last_used) >= ttl {
                    pin.idle();
                }
            }
        }
    }
}
