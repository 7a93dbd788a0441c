//! What is known of one replica.

mod shown;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

pub use self::shown::{Health, RankStatus, ReplicaStatus};
use super::{
    Heard, RankLoad, RankSlot, ReplicaView, Trial,
    drain::Drains,
    facts::{AdapterFacts, RankFacts, RankReport, ReplicaFacts, ReportedState},
    health::{Cause, HealthConfig, RankHealth},
    lease::{Lease, Liveness},
    register::Slot,
};
use crate::{
    ids::{Incarnation, Target},
    store::notes::ReplicaNote,
};

/// A rank whose sidecar says that requests wait there is given so many times the
/// patience: they may wait behind those of others.
const QUEUE_ALLOWANCE: u32 = 4;

/// One start of a replica.
pub(super) struct Entry {
    replica: Arc<ReplicaView>,
    pub(super) incarnation: Incarnation,
    slots: Vec<Slot>,
    pub(super) lease: Lease,
    /// Of the last beat that was taken.
    pub(super) sequence: u64,
    reported: ReportedState,
    reports: BTreeMap<u32, RankReport>,
    health: BTreeMap<u32, RankHealth>,
    /// Weights by rank, from registration, beats and replies; the last word.
    weights: BTreeMap<u32, Arc<str>>,
    registered_at: SystemTime,
    pub(super) died_at: Option<Instant>,
    death: Option<&'static str>,
    pub(super) drains: Drains,
    /// Ranks that took their leave after a drain, of this start or the one before:
    /// keys that lived there have moved, not lost their home.
    departed: Vec<RankSlot>,
    /// Its port is being asked.
    pub(super) probing: bool,
    /// The principal that registered it; `None`: nobody's, until its next word.
    pub(super) owner: Option<Arc<str>>,
}

/// A rank that is found to hang.
pub(super) struct Hanging {
    pub(super) rank: u32,
    /// For so long.
    pub(super) silent: Duration,
    /// It was trusted until now.
    pub(super) ejected: bool,
}

impl Entry {
    pub(super) fn new(
        mut facts: ReplicaFacts,
        incarnation: Incarnation,
        slots: Vec<Slot>,
        now: Instant,
    ) -> Self {
        facts.sort_adapters();
        let weights = facts
            .ranks
            .iter()
            .map(|r| (r.rank, Arc::clone(&facts.weight_version)))
            .collect();
        let health = facts
            .ranks
            .iter()
            .map(|r| (r.rank, RankHealth::new(now)))
            .collect();
        Self {
            health,
            replica: Arc::new(ReplicaView { facts, incarnation }),
            incarnation,
            slots,
            lease: Lease::new(now),
            sequence: 0,
            reported: ReportedState::Ready,
            reports: BTreeMap::new(),
            weights,
            registered_at: SystemTime::now(),
            died_at: None,
            death: None,
            drains: Drains::default(),
            departed: Vec::new(),
            probing: false,
            owner: None,
        }
    }

    /// Whether it lives, and is somebody else's than this principal's.
    pub(super) fn is_of_another(&self, principal: &str) -> bool {
        let other = self.owner.as_deref().is_some_and(|own| own != principal);
        other && self.lease.liveness() != Liveness::Dead
    }

    /// As a note says it, and nobody has verified yet.
    pub(super) fn restored(
        note: ReplicaNote,
        slots: Vec<Slot>,
        now: (Instant, SystemTime),
    ) -> Self {
        let mut entry = Self::new(note.facts, note.incarnation, slots, now.0);
        entry.lease = Lease::unverified(now.0, note.has_beaten);
        entry.owner = note.owner;
        if let Some(drain) = note.drain {
            entry.drains.restore(&drain, now);
        }
        entry
    }

    /// What a restart of the control plane is to find of it.
    pub(super) fn note(&self, now: (Instant, SystemTime)) -> ReplicaNote {
        let mut facts = self.facts().clone();
        let mut weights = facts.ranks.iter().map(|rank| self.weights_of(rank.rank));
        if let Some(first) = weights.next()
            && weights.all(|other| other == first)
        {
            facts.weight_version = first;
        }
        ReplicaNote {
            facts,
            incarnation: self.incarnation,
            drain: self.drains.note(now),
            owner: self.owner.clone(),
            has_beaten: self.lease.has_beaten(),
        }
    }

    pub(super) fn facts(&self) -> &ReplicaFacts {
        &self.replica.facts
    }

    /// The slots that these ranks have already, by number.
    pub(super) fn slots_for(&self, ranks: &[RankFacts]) -> Vec<Option<Slot>> {
        ranks
            .iter()
            .map(|rank| {
                self.facts()
                    .ranks
                    .iter()
                    .position(|known| known.rank == rank.rank)
                    .map(|i| self.slots[i].clone())
            })
            .collect()
    }

    pub(super) fn replace_facts(&mut self, facts: ReplicaFacts, slots: Vec<Slot>, now: Instant) {
        if facts.weight_version != self.facts().weight_version {
            for rank in &facts.ranks {
                self.weights
                    .insert(rank.rank, Arc::clone(&facts.weight_version));
            }
        }
        self.slots = slots;
        let known = std::mem::take(&mut self.health);
        self.health = facts
            .ranks
            .iter()
            .map(|r| {
                let health = known.get(&r.rank).copied();
                (r.rank, health.unwrap_or_else(|| RankHealth::new(now)))
            })
            .collect();
        self.set_facts(facts);
    }

    fn set_facts(&mut self, mut facts: ReplicaFacts) {
        facts.sort_adapters();
        self.replica = Arc::new(ReplicaView {
            facts,
            incarnation: self.incarnation,
        });
    }

    /// The adapters that it can serve now. Returns whether that is news.
    pub(super) fn take_adapters(&mut self, adapters: Vec<AdapterFacts>) -> bool {
        let news = self.facts().adapters != adapters;
        if news {
            self.set_facts(ReplicaFacts {
                adapters,
                ..self.facts().clone()
            });
        }
        news
    }

    /// It has answered a request for this adapter: it holds it. Returns whether
    /// that is news.
    pub(super) fn adapter_used(&mut self, name: &str) -> bool {
        // Every answer comes by here, and nearly none is news.
        if self
            .facts()
            .adapter(name)
            .is_none_or(|known| known.resident)
        {
            return false;
        }
        let mut adapters = self.facts().adapters.clone();
        for known in adapters.iter_mut().filter(|a| *a.name == *name) {
            known.resident = true;
        }
        self.take_adapters(adapters)
    }

    /// It says that it does not have this adapter, whatever was said before.
    /// Returns whether that is news.
    pub(super) fn adapter_missing(&mut self, name: &str) -> bool {
        let mut adapters = self.facts().adapters.clone();
        adapters.retain(|a| *a.name != *name);
        self.take_adapters(adapters)
    }

    pub(super) fn health(&self, rank: u32) -> Option<&RankHealth> {
        self.health.get(&rank)
    }

    pub(super) fn health_mut(&mut self, rank: u32) -> Option<&mut RankHealth> {
        self.health.get_mut(&rank)
    }

    /// Its ranks' numbers and loads.
    pub(super) fn loads(&self) -> impl Iterator<Item = (u32, &Arc<RankLoad>)> {
        let ranks = self.facts().ranks.iter().map(|r| r.rank);
        ranks.zip(self.slots.iter().map(|(_, load)| load))
    }

    pub(super) fn load(&self, rank: u32) -> Option<Arc<RankLoad>> {
        let mut loads = self.loads();
        loads
            .find(|(of, _)| *of == rank)
            .map(|(_, load)| Arc::clone(load))
    }

    fn is_paused(&self, rank: u32) -> bool {
        self.reports.get(&rank).is_some_and(|r| r.paused)
    }

    /// Whether a probe of this rank would harm nobody and could pass.
    fn may_be_probed(&self, rank: u32) -> bool {
        self.lease.liveness() == Liveness::Alive
            && self.reported != ReportedState::Unhealthy
            && !self.is_paused(rank)
            && self.health(rank).is_some_and(RankHealth::may_be_probed)
    }

    /// Its ranks that are due for a probe, which is then under way.
    pub(super) fn trials(&mut self) -> Vec<Trial> {
        let replica = Arc::clone(&self.replica);
        let mut due = Vec::new();
        for facts in &replica.facts.ranks {
            if self.may_be_probed(facts.rank)
                && self.health_mut(facts.rank).is_some_and(RankHealth::ask)
            {
                due.push(Trial {
                    target: Target {
                        replica: replica.facts.id.clone(),
                        incarnation: self.incarnation,
                        rank: facts.rank,
                    },
                    facts: facts.clone(),
                    replica: Arc::clone(&replica),
                });
            }
        }
        due
    }

    /// Lets time pass over its ranks: signs of life keep its lease, silence
    /// ejects. Returns whether anything changed that routing sees, and the ranks
    /// that are found to hang.
    pub(super) fn tick_ranks(
        &mut self,
        now: Instant,
        stall: Duration,
        ttl: Duration,
        config: &HealthConfig,
    ) -> (bool, Vec<Hanging>) {
        let mut changed = false;
        let mut hanging = Vec::new();
        for (facts, (_, load)) in self.replica.facts.ranks.iter().zip(&self.slots) {
            let watch = load.watch();
            if let Some(sign) = watch.last_sign() {
                self.lease.succeeded(sign);
            }
            let report = self.reports.get(&facts.rank);
            if !stall.is_zero() || report.is_some_and(|r| r.paused) {
                watch.excuse();
            }
            let Some(health) = self.health.get_mut(&facts.rank) else {
                continue;
            };
            changed |= health.tick(now, ttl);
            // A scheduler that is well and has a queue may be at work for others.
            let queued = report.is_some_and(|r| r.healthy && r.waiting > 0);
            let allowance = if queued { QUEUE_ALLOWANCE } else { 1 };
            if let Some(silence) = watch.silence(now)
                && silence.lasts >= silence.patience * allowance
            {
                let ejected = health.eject(Cause::Hangs, now, config);
                changed |= ejected;
                watch.give_up();
                hanging.push(Hanging {
                    rank: facts.rank,
                    silent: silence.lasts,
                    ejected,
                });
            }
        }
        (changed, hanging)
    }

    pub(super) fn url_of(&self, rank: u32) -> Arc<str> {
        self.facts()
            .ranks
            .iter()
            .find(|r| r.rank == rank)
            .map_or_else(|| Arc::clone(&self.facts().url), |r| Arc::clone(&r.url))
    }

    /// Takes a beat's reports; those of unknown ranks are dropped. Returns
    /// whether anything changed that routing sees.
    pub(super) fn take_reports(
        &mut self,
        state: ReportedState,
        ranks: Vec<RankReport>,
        now: Instant,
        config: &HealthConfig,
    ) -> bool {
        let mut changed = self.reported != state;
        self.reported = state;
        for (rank, health) in &mut self.health {
            let ill = ranks.iter().any(|r| r.rank == *rank && !r.healthy);
            changed |= health.heard(state != ReportedState::Unhealthy && !ill, now, config);
        }
        for report in ranks {
            if !self.facts().ranks.iter().any(|r| r.rank == report.rank) {
                continue;
            }
            changed |= self.saw_weights(report.rank, &report.weight_version);
            let before = self.reports.insert(report.rank, report.clone());
            changed |= before.is_none_or(|b| b.paused != report.paused);
        }
        changed
    }

    /// The rank serves this version. Returns whether that is news.
    pub(super) fn saw_weights(&mut self, rank: u32, version: &str) -> bool {
        if version.is_empty() || self.weights.get(&rank).is_some_and(|v| **v == *version) {
            return false;
        }
        self.weights.insert(rank, version.into());
        true
    }

    pub(super) fn die(&mut self, reason: &'static str, now: Instant) {
        self.lease.end();
        self.death = Some(reason);
        self.died_at = Some(now);
    }

    /// What a beat is answered.
    pub(super) fn heard(&mut self) -> Heard {
        Heard {
            drain: self.drains.tell(),
            in_flight: self.slots.iter().map(|(_, load)| load.in_flight()).sum(),
            unwell: None,
        }
    }

    /// It takes its leave after a drain.
    pub(super) fn depart(&mut self) {
        self.departed = self.slots.iter().map(|(slot, _)| *slot).collect();
    }

    /// What is to be known of `before`, the start before this one.
    pub(super) fn follow(&mut self, before: &Self, now: Instant) {
        self.drains = before.drains.of_next_start(now);
        if before.lease.liveness() == Liveness::Dead {
            self.departed.clone_from(&before.departed);
        }
    }

    /// The ranks that left after a drain and are remembered.
    pub(super) fn departed(&self) -> impl Iterator<Item = RankSlot> {
        self.departed.iter().copied()
    }
}
