//! What happens to pins beside decisions: they grow, end, idle and are restored.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Router, weights_name};
use crate::{
    fleet::snapshot::{RankSlot, Snapshot},
    routing::{
        config::HINT_TTL,
        line::{Begun, InLine},
        pins::{Came, Pin, PinKey, PinView, Pinned},
        request::Siblings,
    },
};

impl Router {
    /// A turn of `key` was answered by the rank in `slot`, which now holds the KV
    /// of `tokens` tokens of it, made with `adapter`. Without effect when the key is
    /// pinned elsewhere.
    pub fn grown(
        &self,
        fleet: &Snapshot,
        key: PinKey,
        slot: RankSlot,
        tokens: u32,
        adapter: Option<&str>,
        now: Instant,
    ) {
        let mut shard = self.pins.shard(key);
        let Some(pin) = shard.get_mut(key).filter(|pin| pin.at.slot == slot) else {
            return;
        };
        let shrunk = pin.resize(tokens);
        if let Some(rank) = fleet.rank(slot) {
            pin.at.adapter = rank.adapter_load(adapter);
            pin.at.weights = weights_name(&rank.weight_version);
            pin.touch(now, &rank.load, 0);
        }
        shard.changed(key);
        drop(shard);
        if shrunk {
            self.lines.room();
        }
    }

    /// A request of `group` was answered by the rank in `slot`, which now holds the
    /// group's prompt.
    pub fn group_answered(&self, group: Siblings, slot: RankSlot, now: Instant) {
        self.groups.answered(group.key, slot, now);
    }

    /// The rank in `slot` now holds what these blocks name.
    pub fn prefix_seen(&self, blocks: &[u64], slot: RankSlot, now: Instant) {
        self.prefixes.seen(blocks, slot, now);
    }

    /// Blocks of prompts that are remembered.
    pub fn prefix_blocks(&self) -> usize {
        self.prefixes.len()
    }

    /// The trajectory is over. Returns whether it was pinned.
    pub fn finish(&self, key: PinKey) -> bool {
        let there = self.pins.shard(key).remove(key);
        if there {
            self.lines.room();
        }
        there
    }

    /// A place in the line of those who wait for room among the ranks of `model`:
    /// after [`NoRoute::KvFull`](super::NoRoute::KvFull). While anybody stands in
    /// it, others get in line behind; a `key` that has a pin stands before those
    /// that have none.
    pub fn wait_for_room(&self, model: &Arc<str>, key: Option<PinKey>) -> InLine {
        let begun = match self.pinned(key) {
            Some(_) => Begun::Yes,
            None => Begun::No,
        };
        self.lines.join(model, begun)
    }

    /// Where `key` lives.
    pub fn pin(&self, key: PinKey, now: Instant) -> Option<PinView> {
        self.pins.shard(key).get(key).map(|pin| PinView {
            slot: pin.at.slot,
            tokens: pin.at.tokens,
            adapter: pin.at.adapter,
            idle: now.saturating_duration_since(pin.last_used()),
            live: pin.is_live(),
        })
    }

    /// Pins in all.
    pub fn pins(&self) -> usize {
        self.pins.len()
    }

    /// Frees the load of trajectories that are idle. To be called every now and
    /// then.
    pub fn sweep(&self, now: Instant) {
        let ttl = self.config.pin_ttl;
        self.pins.sweep(now, ttl, HINT_TTL.max(ttl));
        self.groups.sweep(now, ttl);
        // Also for room that comes in other ways: a pin that left for another, a key
        // that moved.
        self.lines.room();
    }

    /// Keys whose pins were bound, have grown or are gone since they were last
    /// asked for; at most about `most`. Each is told once.
    pub fn changed_pins(&self, most: usize) -> Vec<PinKey> {
        self.pins.take_changed(most)
    }

    /// A change of this pin could not be kept: it is told again.
    pub fn pin_changed(&self, key: PinKey) {
        self.pins.shard(key).changed(key);
    }

    /// Until a key is pinned.
    pub async fn pin_bound(&self) {
        self.pins.bound().await;
    }

    /// A pin of an earlier process, idle since then for `past.idle`. Without effect
    /// where the key has one by now, or the table is full.
    pub fn restore(&self, fleet: &Snapshot, key: PinKey, past: PinView, now: Instant) {
        let Some(last_used) = now.checked_sub(past.idle) else {
            return;
        };
        let at = Pinned {
            slot: past.slot,
            tokens: past.tokens,
            counted: 0,
            weights: 0,
            came: Came::default(),
            adapter: past.adapter,
        };
        let mut pin = Pin::new(at, last_used);
        let live = past.live && past.idle < self.config.pin_ttl;
        if let Some(rank) = fleet.rank(past.slot).filter(|_| live) {
            pin.touch(last_used, &rank.load, 0);
        }
        self.pins.restore(key, pin);
    }
}
