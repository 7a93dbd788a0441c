//! What the events of a setup do to the fleet. Each ends with a fleet that the
//! router sees as it would see a real one after the same event.

use std::{sync::Arc, time::Duration};

use super::world::{Plan, Stuck, World, nanos};
use crate::fleet::snapshot::{RankSlot, RankState};

impl World<'_> {
    fn lanes_of(&self, replica: usize) -> std::ops::Range<usize> {
        let ranks = self.setup.shape.ranks;
        replica * ranks..(replica + 1) * ranks
    }

    /// Its port refuses: the fleet knows at once. What ran there is sent again.
    pub(super) fn die(&mut self, event: usize, replica: usize) -> Result<(), Stuck> {
        if !self.fleet.is_up(replica) {
            return Ok(());
        }
        let slots: Vec<RankSlot> = self.fleet.slots(replica).collect();
        self.effects[event].there = self.living_at(&slots);
        self.gone.extend(slots.iter().map(|slot| (*slot, event)));
        self.fleet.die(replica);
        self.drained_by[replica] = None;
        self.paused_by[replica] = None;
        let lanes = self.lanes_of(replica);
        let lost = self.lose(&lanes);
        for lane in lanes {
            self.lanes[lane].die();
            self.returned.remove(&lane);
        }
        self.effects[event].lost = lost.len() as u64;
        for (session, slot) in lost {
            self.dispatch(session, &[slot])?;
        }
        Ok(())
    }

    /// A dead one starts with an empty cache; a drain ends.
    pub(super) fn back(&mut self, replica: usize) {
        self.drained_by[replica] = None;
        if self.fleet.is_up(replica) {
            self.fleet.set_state(replica, self.open_state(replica));
            return;
        }
        self.paused_by[replica] = None;
        let weights = self.fleet.restart(replica);
        for lane in self.lanes_of(replica) {
            self.lanes[lane].restart(Arc::clone(&weights));
            self.returned.insert(lane);
        }
    }

    /// How a replica that does not drain takes requests.
    fn open_state(&self, replica: usize) -> RankState {
        if self.paused_by[replica].is_some() {
            RankState::Closed("generation is paused")
        } else {
            RankState::Open
        }
    }

    pub(super) fn drain(&mut self, event: usize, replica: usize, grace: Option<Duration>) {
        if !self.fleet.is_up(replica) {
            return;
        }
        self.drained_by[replica] = Some(event);
        self.fleet.set_state(replica, RankState::PinnedOnly);
        if let Some(grace) = grace {
            let at = self.clock.saturating_add(nanos(grace));
            self.plan(at, Plan::Grace(event));
        }
    }

    /// Unless the drain has ended, or another has begun, since.
    pub(super) fn grace_over(&mut self, event: usize) {
        for replica in 0..self.setup.shape.replicas {
            if self.drained_by[replica] == Some(event) && self.fleet.is_up(replica) {
                self.fleet.set_state(replica, RankState::Drained);
            }
        }
    }

    /// Running requests are computed again under the new weights, whose KV no
    /// cache has. A dead replica will start with them.
    pub(super) fn load(
        &mut self,
        event: usize,
        version: &Arc<str>,
        only: Option<usize>,
        pause: Duration,
    ) {
        let paused = pause > Duration::ZERO;
        for replica in 0..self.setup.shape.replicas {
            if only.is_some_and(|only| only != replica) {
                continue;
            }
            self.fleet.set_weights(replica, version);
            if !self.fleet.is_up(replica) {
                continue;
            }
            for lane in self.lanes_of(replica) {
                self.lanes[lane].load(Arc::clone(version));
            }
            self.set_paused(replica, paused.then_some(event));
        }
        if paused {
            let at = self.clock.saturating_add(nanos(pause));
            self.plan(at, Plan::Resume(event));
        }
    }

    /// All of an event's at one moment, unless another pause has begun since.
    pub(super) fn resume(&mut self, event: usize) {
        for replica in 0..self.setup.shape.replicas {
            if self.paused_by[replica] == Some(event) && self.fleet.is_up(replica) {
                self.set_paused(replica, None);
            }
        }
    }

    fn set_paused(&mut self, replica: usize, by: Option<usize>) {
        self.paused_by[replica] = by;
        for lane in self.lanes_of(replica) {
            self.lanes[lane].paused = by.is_some();
            self.woken.insert(lane);
        }
        // Whether it drains weighs more than that it is paused: its pinned keys
        // go on waiting for it.
        if self.drained_by[replica].is_none() {
            self.fleet.set_state(replica, self.open_state(replica));
        }
    }
}
