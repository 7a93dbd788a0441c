//! The fleet: which replicas there are, how they are, and what of that routing
//! may use.
//!
//! Changes happen under one short lock and end by publishing a new immutable
//! [`Snapshot`]; readers never take a lock. Nothing slow is done under it: the
//! store is asked before, ports are probed outside. Incarnations come from the
//! store and only grow, so a late word of an older start changes nothing.
//!
//! A replica has a [`lease`], which its heartbeats keep; each of its ranks has a
//! [`health`], which the data path and the sidecar's words make. What the data
//! path tells comes in through `passive`.

pub mod drain;
mod entry;
pub mod facts;
pub mod health;
pub mod lease;
mod passive;
pub(crate) mod probe;
mod register;
pub mod restart;
mod room;
pub mod signs;
pub mod snapshot;
mod sweep;
pub mod verified;

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::{sync::watch, time::Instant};
use tracing::info;

use entry::Entry;
pub use entry::{Health, RankStatus, ReplicaStatus};
use facts::{AdapterFacts, RankReport, ReportedState};
use health::{Cause, HealthConfig};
use lease::{LeaseConfig, Liveness};
pub use passive::{Fault, Trial};
use register::{dead, stale};
use snapshot::{RankLoad, RankSlot, RankState, RankView, ReplicaView, Snapshot};

use crate::{
    audit::Audit,
    engine::egress::Egress,
    error::{Error, Reason},
    ids::{Incarnation, ReplicaId, Target},
    store::Store,
};

/// How the fleet is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetConfig {
    /// Leases.
    pub lease: LeaseConfig,
    /// What the data path makes of ranks.
    pub health: HealthConfig,
    /// A dead replica is shown for so long, then forgotten.
    pub forget_after: Duration,
    /// Replicas known at once, dead ones included. A newcomer beyond takes the place
    /// of the one that has been dead for longest; where all live it is refused.
    pub max_replicas: usize,
    /// Of those, the ones that one principal registered, dead ones included: its
    /// newcomers beyond take the place of its own dead.
    pub max_replicas_per_principal: usize,
    /// Ranks of all replicas that are known, dead ones included.
    pub max_ranks: usize,
    /// Of those, the ones of replicas that one principal registered.
    pub max_ranks_per_principal: usize,
    /// So long pinned keys may stay at a replica that drains, where neither the
    /// operator nor the sidecar says it. At most [`drain::MAX_GRACE`].
    pub drain_grace: Duration,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            lease: LeaseConfig::default(),
            health: HealthConfig::default(),
            forget_after: Duration::from_secs(600),
            max_replicas: 4096,
            // One principal's mistake or malice leaves room for the others.
            max_replicas_per_principal: 1024,
            max_ranks: 8192,
            // Who takes them all and comes and goes costs milliseconds each time.
            max_ranks_per_principal: 2048,
            drain_grace: Duration::from_secs(30),
        }
    }
}

/// What a registration is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Of this start.
    pub incarnation: Incarnation,
    /// Without a heartbeat for this long it is dead.
    pub lease_ttl: Duration,
    /// How often to beat.
    pub heartbeat_interval: Duration,
    /// Of the store.
    pub epoch: u64,
}

/// One heartbeat.
#[derive(Clone, Debug)]
pub struct Beat {
    /// Who.
    pub replica: ReplicaId,
    /// Which start.
    pub incarnation: Incarnation,
    /// Greater than that of the beat before, else the beat is ignored.
    pub sequence: u64,
    /// The sidecar's view.
    pub state: ReportedState,
    /// Where it drains: so long pinned keys may still stay, from now on.
    pub drain_grace: Option<Duration>,
    /// Of each rank.
    pub ranks: Vec<RankReport>,
    /// The adapters that it can serve now. `None`: as before.
    pub adapters: Option<Vec<AdapterFacts>>,
}

impl Beat {
    fn unwell(&self) -> Option<u32> {
        let all = self.state == ReportedState::Unhealthy;
        let ill = self.ranks.iter().find(|rank| all || !rank.healthy);
        ill.map(|rank| rank.rank)
    }
}

/// What a heartbeat is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// An operator drains the replica.
    pub drain: bool,
    /// Samples sent there, or about to be, and not yet answered.
    pub in_flight: u64,
    /// A rank that this beat calls unwell. Its port should be asked: of an engine
    /// that is gone nobody has to wait for a lease.
    pub unwell: Option<u32>,
}

/// The fleet.
pub struct Fleet {
    config: FleetConfig,
    store: Arc<dyn Store>,
    egress: Arc<Egress>,
    audit: Audit,
    state: Mutex<State>,
    snapshot: ArcSwap<Snapshot>,
    changed: watch::Sender<u64>,
    ejections: Ejections,
}

/// Ranks that were trusted until they were ejected, by cause, since the start.
#[derive(Debug, Default)]
struct Ejections([AtomicU64; Cause::ALL.len()]);

impl Ejections {
    fn count(&self, why: Cause) {
        if let Some(count) = self.0.get(why as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[derive(Default)]
struct State {
    replicas: BTreeMap<ReplicaId, Entry>,
    next_slot: u32,
    /// Starts that were dead when they were forgotten, oldest first: death is
    /// final. As many as replicas may be known.
    buried: VecDeque<(ReplicaId, Incarnation)>,
    /// So many fell silent at once that some are not called dead.
    sparing: bool,
}

impl Fleet {
    /// An empty one.
    pub fn new(config: FleetConfig, store: Arc<dyn Store>) -> Arc<Self> {
        Self::within(config, store, Arc::default(), Audit::default())
    }

    /// One that asks no port but what may be called, and writes down whom it gives
    /// up.
    pub fn within(
        config: FleetConfig,
        store: Arc<dyn Store>,
        egress: Arc<Egress>,
        audit: Audit,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            store,
            egress,
            audit,
            state: Mutex::default(),
            snapshot: ArcSwap::default(),
            changed: watch::channel(0).0,
            ejections: Ejections::default(),
        })
    }

    /// As it was made.
    pub fn config(&self) -> &FleetConfig {
        &self.config
    }

    /// What may be called.
    pub(crate) fn egress(&self) -> &Arc<Egress> {
        &self.egress
    }

    /// Ranks that were ejected since the start, by cause.
    pub fn ejections(&self) -> [(Cause, u64); Cause::ALL.len()] {
        Cause::ALL.map(|why| {
            let count = self.ejections.0.get(why as usize);
            (why, count.map_or(0, |count| count.load(Ordering::Relaxed)))
        })
    }

    /// The fleet as it is.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// Wakes at every change of the snapshot.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// A heartbeat.
    ///
    /// # Errors
    /// REREGISTER for an unknown replica, STALE_INCARNATION for an older start,
    /// INCARNATION_DEAD for one that was declared dead.
    pub fn beat(&self, beat: Beat) -> Result<Heard, Error> {
        let now = Instant::now();
        let mut state = self.lock();
        let Some(entry) = state.replicas.get_mut(&beat.replica) else {
            return Err(Error::new(
                Reason::Reregister,
                format!(
                    "replica {} is not known here (the control plane may have been \
                     restarted): register it again",
                    beat.replica
                ),
            ));
        };
        if entry.incarnation != beat.incarnation {
            return Err(if beat.incarnation > entry.incarnation {
                Error::new(
                    Reason::Reregister,
                    format!(
                        "incarnation {} of {} is not known here: register it again",
                        beat.incarnation, beat.replica
                    ),
                )
            } else {
                stale(&beat.replica, beat.incarnation, entry.incarnation)
            });
        }
        if entry.lease.liveness() == Liveness::Dead {
            return Err(dead(&beat.replica, beat.incarnation));
        }
        if beat.sequence <= entry.sequence {
            return Ok(entry.heard());
        }
        entry.sequence = beat.sequence;
        let returned = entry.lease.beat(now, &self.config.lease);
        if returned && entry.lease.liveness() == Liveness::Alive {
            info!(replica = %beat.replica, incarnation = %beat.incarnation, "replica is back");
        }
        let grace = self.config.drain_grace;
        let drains = &mut entry.drains;
        let moved = drains.reported(beat.state, beat.drain_grace, grace, now);
        if moved {
            info!(replica = %beat.replica, incarnation = %beat.incarnation, stage = ?drains.stage(), "drain");
        }
        let unwell = beat.unwell();
        let mut changed = entry.take_reports(beat.state, beat.ranks, now, &self.config.health);
        if let Some(adapters) = beat.adapters {
            changed |= entry.take_adapters(adapters);
        }
        if returned || changed || moved {
            self.publish(&mut state);
        }
        // Read after the new state is seen by all: what it counts later was chosen
        // before.
        let heard = state.replicas.get_mut(&beat.replica).map(Entry::heard);
        Ok(Heard {
            unwell,
            ..heard.unwrap_or_default()
        })
    }

    /// Whether that start of the replica is known to be over: dead, or followed by
    /// a newer one. False for what is not known at all.
    pub fn is_over(&self, target: &Target) -> bool {
        self.lock()
            .replicas
            .get(&target.replica)
            .is_some_and(|entry| {
                entry.incarnation > target.incarnation
                    || (entry.incarnation == target.incarnation
                        && entry.lease.liveness() == Liveness::Dead)
            })
    }

    /// All replicas, for people.
    pub fn list(&self) -> Vec<ReplicaStatus> {
        let now = Instant::now();
        self.lock()
            .replicas
            .values()
            .map(|e| e.status(now, &self.config.lease))
            .collect()
    }

    /// The first replicas behind this one in order of their ids, so many at most.
    pub fn list_after(&self, after: Option<&ReplicaId>, most: usize) -> Vec<ReplicaStatus> {
        let now = Instant::now();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.lock()
            .replicas
            .range::<ReplicaId, _>((from, Bound::Unbounded))
            .take(most)
            .map(|(_, entry)| entry.status(now, &self.config.lease))
            .collect()
    }

    /// One replica, for people.
    pub fn get(&self, replica: &ReplicaId) -> Option<ReplicaStatus> {
        let now = Instant::now();
        self.lock()
            .replicas
            .get(replica)
            .map(|e| e.status(now, &self.config.lease))
    }

    fn publish(&self, state: &mut State) {
        let previous = self.snapshot.load();
        let ranks = state.replicas.values().flat_map(Entry::views).collect();
        let lost = state
            .replicas
            .values()
            .filter(|e| e.lease.liveness() == Liveness::Dead)
            .map(|e| Arc::clone(&e.facts().model))
            .collect();
        let mut snapshot = Snapshot::build(ranks, lost, &previous);
        snapshot.departed = state.replicas.values().flat_map(Entry::departed).collect();
        self.snapshot.store(Arc::new(snapshot));
        self.changed.send_modify(|version| *version += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The entry that `target` speaks of, if that start is the current one.
    fn current(&mut self, target: &Target) -> Option<&mut Entry> {
        self.replicas
            .get_mut(&target.replica)
            .filter(|e| e.incarnation == target.incarnation)
    }
}

#[cfg(test)]
mod tests;
