//! What time does: leases run out, ranks that hang are ejected, terms end, the dead
//! are forgotten.
//!
//! Self-preservation spares who falls silent with too many others. Nobody can have it
//! spare the replicas of others: of one principal's replicas, or of all without those
//! of any single principal, too many must be silent. And only who has beaten counts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    Fleet, FleetConfig, State,
    entry::{Entry, Hanging},
    health::Cause,
    lease::{LeaseConfig, Liveness},
};
use crate::ids::{ReplicaId, Target};

/// Fewer replicas than this that fall silent are not many.
const SPARE_FROM: usize = 3;
/// In a smaller fleet nobody is spared.
const SPARE_IN: usize = 5;
/// More than this part of the fleet, in percent, is too many.
const SPARE_ABOVE: usize = 30;

/// Ticks between two looks at the port of a silent replica.
const LOOK_EVERY: u32 = 8;

impl Fleet {
    /// Lets time pass: leases run out, silent ranks are ejected, terms end, dead
    /// replicas are forgotten. `stall` is how long this process itself did not run
    /// since the last call. Returns a rank of each replica that is silent: its port
    /// should be asked.
    pub fn tick(&self, now: Instant, stall: Duration) -> Vec<Target> {
        let lease = &self.config.lease;
        let mut state = self.lock();
        let mut changed = false;
        let (mut silent, mut dead) = (Vec::new(), Vec::new());
        for entry in state.replicas.values_mut() {
            entry.lease.extend(stall, now);
            if entry.drains.pass(now) && entry.lease.liveness() != Liveness::Dead {
                info!(replica = %entry.facts().id, incarnation = %entry.incarnation, "the drain's grace is over");
                changed = true;
            }
            if entry.lease.liveness() == Liveness::Dead {
                continue;
            }
            let (news, hanging) = entry.tick_ranks(now, stall, lease.ttl(), &self.config.health);
            changed |= news;
            for Hanging {
                rank,
                silent: lasts,
                ejected,
            } in hanging
            {
                if ejected {
                    self.ejections.count(Cause::Hangs);
                }
                warn!(
                    replica = %entry.facts().id, incarnation = %entry.incarnation, rank, ?lasts,
                    "rank gives no answer to any request: what was sent there is given up"
                );
            }
        }
        let spared = state.spare(now, lease);
        for (replica, entry) in &mut state.replicas {
            let spare = spared.contains(&entry.owner);
            if entry.lease.tick(now, lease, spare) {
                changed = true;
                let incarnation = entry.incarnation;
                match entry.lease.liveness() {
                    Liveness::Dead => {
                        entry.die("its heartbeats stopped", now);
                        // Nobody there has shown a sign of life for as long.
                        for (_, load) in entry.loads() {
                            load.watch().give_up();
                        }
                        warn!(%replica, %incarnation, "replica is dead: its heartbeats stopped");
                        dead.push((replica.clone(), incarnation));
                    }
                    Liveness::Suspect { .. } => {
                        warn!(
                            %replica, %incarnation,
                            "replica is suspect: heartbeats are missing; it gets requests only \
                             where no other takes them"
                        );
                    }
                    Liveness::Held => {
                        warn!(
                            %replica, %incarnation,
                            "replica is silent, and spared; it gets requests only where no \
                             other takes them"
                        );
                    }
                    Liveness::Alive | Liveness::Unverified => {}
                }
            }
            if entry.lease.is_silent(now, lease)
                && let Some(rank) = entry.facts().ranks.first()
            {
                silent.push(Target {
                    replica: replica.clone(),
                    incarnation: entry.incarnation,
                    rank: rank.rank,
                });
            }
        }
        let forgotten = state.forget(now, &self.config);
        if changed || forgotten {
            self.publish(&mut state);
        }
        drop(state);
        for (replica, incarnation) in dead {
            self.evicted(&replica, incarnation, "its heartbeats stopped");
        }
        silent
    }

    /// Calls [`tick`](Self::tick) until told to stop.
    pub async fn keep(self: Arc<Self>, stop: CancellationToken) {
        let period = (self.config.lease.interval / 4).max(Duration::from_millis(10));
        let mut last = Instant::now();
        let mut ticks = 0_u32;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(last + period) => {}
            }
            let now = Instant::now();
            // Later than a whole period: the process was stopped or starved, and
            // beats that came meanwhile are still in its sockets.
            let late = now.saturating_duration_since(last + period);
            let stall = if late > period { late } else { Duration::ZERO };
            last = now;
            let silent = self.tick(now, stall);
            // A machine that is there and a process that is not: told by its port.
            ticks = ticks.wrapping_add(1);
            if ticks.is_multiple_of(LOOK_EVERY) {
                for target in &silent {
                    self.unreachable(target);
                }
            }
        }
    }
}

impl State {
    /// Forgets who has been dead for long. Returns whether anybody was.
    pub(super) fn forget(&mut self, now: Instant, config: &FleetConfig) -> bool {
        let lately = |at| now - at < config.forget_after;
        // A hold is for the start that comes, however late.
        let keep = |entry: &Entry| entry.drains.holds() || entry.died_at.is_none_or(lately);
        let gone = self.replicas.iter().filter(|(_, entry)| !keep(entry));
        let gone: Vec<ReplicaId> = gone.map(|(replica, _)| replica.clone()).collect();
        for replica in &gone {
            self.bury(replica, config);
        }
        !gone.is_empty()
    }

    /// Forgets a dead replica, but for that its start is over.
    pub(super) fn bury(&mut self, replica: &ReplicaId, config: &FleetConfig) {
        let Some(entry) = self.replicas.remove(replica) else {
            return;
        };
        self.buried.retain(|(other, _)| other != replica);
        self.buried.push_back((replica.clone(), entry.incarnation));
        let more = self.buried.len().saturating_sub(config.max_replicas);
        self.buried.drain(..more);
    }

    /// The principals of whose replicas none is to be called dead for missing beats: a
    /// good part is silent at once, so that the fault is more likely here.
    fn spare(&mut self, now: Instant, lease: &LeaseConfig) -> BTreeSet<Owner> {
        let mut all = Part::default();
        let mut parts: BTreeMap<&Owner, Part> = BTreeMap::new();
        for entry in self.replicas.values() {
            if entry.lease.liveness() == Liveness::Dead || !entry.lease.has_beaten() {
                continue;
            }
            let silent = usize::from(entry.lease.is_silent(now, lease));
            for part in [&mut all, parts.entry(&entry.owner).or_default()] {
                part.fleet += 1;
                part.silent += silent;
            }
        }
        // Whoever is left out, those of the others say so too.
        let everywhere =
            all.fleet >= SPARE_IN && parts.values().all(|one| all.less(*one).is_too_silent());
        // Of those who are spared: what others have is no part of it.
        let mut meant = Part::default();
        let mut spared = BTreeSet::new();
        for (owner, own) in &parts {
            if everywhere || (own.fleet >= SPARE_IN && own.is_too_silent()) {
                meant = meant.and(*own);
                spared.insert((*owner).clone());
            }
        }
        if spared.is_empty() == self.sparing {
            self.sparing = !spared.is_empty();
            if self.sparing {
                let (principals, Part { silent, fleet }) = (spared.len(), meant);
                warn!(
                    silent,
                    fleet,
                    principals,
                    "too many replicas fell silent at once: none of those is called dead for it \
                     while this lasts"
                );
            } else {
                info!("silent replicas are called dead again");
            }
        }
        spared
    }
}

/// Who registered a replica.
type Owner = Option<Arc<str>>;

/// A part of the fleet: of who has beaten and is not dead.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    fleet: usize,
    silent: usize,
}

impl Part {
    fn and(self, part: Self) -> Self {
        Self {
            fleet: self.fleet + part.fleet,
            silent: self.silent + part.silent,
        }
    }

    fn less(self, part: Self) -> Self {
        Self {
            fleet: self.fleet - part.fleet,
            silent: self.silent - part.silent,
        }
    }

    fn is_too_silent(self) -> bool {
        self.silent >= SPARE_FROM && self.silent * 100 > self.fleet * SPARE_ABOVE
    }
}
