//! What the events of a setup do to the fleet. Each ends with a fleet that the
//! router sees as it would see a real one after the same event.

use std::{sync::Arc, time::Duration};

use super::world::{Plan, Stuck, World, nanos};
use crate::fleet::snapshot::{RankSlot, RankState};

/// How the fleet calls a rank whose weights are being loaded.
const PAUSED: RankState = RankState::Closed("generation is paused");

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
        self.drains[replica] += 1;
        if !self.fleet.back(replica) {
            return;
        }
        self.pauses[replica] += 1;
        let Some(weights) = self.fleet.weights(replica).cloned() else {
            return;
        };
        for lane in self.lanes_of(replica) {
            self.lanes[lane].restart(Arc::clone(&weights));
            self.returned.insert(lane);
        }
    }

    pub(super) fn drain(&mut self, replica: usize, grace: Option<Duration>) {
        if !self.fleet.is_up(replica) {
            return;
        }
        self.drains[replica] += 1;
        self.fleet.set_state(replica, RankState::PinnedOnly);
        if let Some(grace) = grace {
            let drain = self.drains[replica];
            let at = self.clock().saturating_add(nanos(grace));
            self.plan(at, Plan::Grace { replica, drain });
        }
    }

    pub(super) fn grace_over(&mut self, replica: usize, drain: u64) {
        if self.drains[replica] == drain && self.fleet.is_up(replica) {
            self.fleet.set_state(replica, RankState::Drained);
        }
    }

    /// Running requests are computed again under the new weights, whose KV no
    /// cache has. A dead replica will start with them.
    pub(super) fn load(&mut self, version: &Arc<str>, only: Option<usize>, pause: Duration) {
        for replica in 0..self.setup.shape.replicas {
            if only.is_some_and(|only| only != replica) {
                continue;
            }
            self.fleet.set_weights(replica, version);
            if !self.fleet.is_up(replica) {
                continue;
            }
            self.pauses[replica] += 1;
            for lane in self.lanes_of(replica) {
                self.lanes[lane].load(Arc::clone(version));
                self.lanes[lane].paused = pause > Duration::ZERO;
                self.woken.insert(lane);
            }
            if pause > Duration::ZERO {
                if self.fleet.state(replica) == Some(&RankState::Open) {
                    self.fleet.set_state(replica, PAUSED);
                }
                let pauses = self.pauses[replica];
                let at = self.clock().saturating_add(nanos(pause));
                let plan = Plan::Resume {
                    replica,
                    pause: pauses,
                };
                self.plan(at, plan);
            } else {
                self.reopen(replica);
            }
        }
    }

    pub(super) fn resume(&mut self, replica: usize, pause: u64) {
        if self.pauses[replica] != pause || !self.fleet.is_up(replica) {
            return;
        }
        for lane in self.lanes_of(replica) {
            self.lanes[lane].paused = false;
            self.woken.insert(lane);
        }
        self.reopen(replica);
    }

    /// A drain that has begun meanwhile stays.
    fn reopen(&mut self, replica: usize) {
        if self.fleet.state(replica) == Some(&PAUSED) {
            self.fleet.set_state(replica, RankState::Open);
        }
    }
}
