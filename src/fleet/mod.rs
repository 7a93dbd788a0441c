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
pub mod restart;
pub mod signs;
pub mod snapshot;
pub mod verified;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use drain::Stage;
use entry::{Entry, Hanging};
pub use entry::{Health, RankStatus, ReplicaStatus};
use facts::{AdapterFacts, RankReport, ReplicaFacts, ReportedState};
use health::{Cause, HealthConfig};
use lease::{LeaseConfig, Liveness};
pub use passive::{Fault, Trial};
use snapshot::{RankLoad, RankSlot, RankState, RankView, ReplicaView, Snapshot};

use crate::{
    audit::{self, Audit},
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

/// What a heartbeat is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// An operator drains the replica.
    pub drain: bool,
    /// Samples sent there, or about to be, and not yet answered.
    pub in_flight: u64,
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
    /// So many fell silent at once that none of them is called dead.
    sparing: bool,
}

/// Fewer replicas than this that fall silent are not many.
const SPARE_FROM: usize = 3;
/// In a smaller fleet nobody is spared.
const SPARE_IN: usize = 5;
/// More than this part of the fleet, in percent, is too many.
const SPARE_ABOVE: usize = 30;

/// Ticks between two looks at the port of a silent replica.
const LOOK_EVERY: u32 = 8;

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

    /// Announces one start of a replica. Repeated, it gives the same incarnation
    /// and takes the facts as they are now.
    ///
    /// # Errors
    /// INCARNATION_DEAD when this very start was declared dead,
    /// STALE_INCARNATION when a newer one is known, FLEET_FULL when as many replicas
    /// live as are allowed, and what the store says.
    pub async fn register(&self, facts: ReplicaFacts) -> Result<Registered, Error> {
        self.register_by(facts, None).await
    }

    /// As [`Fleet::register`], by this principal: while the replica lives it is that
    /// one's, and no other may take its place or speak for it.
    ///
    /// # Errors
    /// As [`Fleet::register`]; REPLICA_TAKEN where it is another's.
    pub async fn register_by(
        &self,
        facts: ReplicaFacts,
        principal: Option<Arc<str>>,
    ) -> Result<Registered, Error> {
        // Before the store keeps anything: a stranger must not fill it.
        {
            let state = self.lock();
            state.permits(&facts.id, principal.as_deref())?;
            if state.whose_place(&facts.id, &self.config) == Place::None {
                return Err(full(&self.config));
            }
        }
        let grant = self
            .store
            .incarnation(facts.id.clone(), facts.boot.clone())
            .await
            .map_err(Error::from)?;
        if grant.latest > grant.incarnation {
            // Known from before a restart of the control plane as well.
            return Err(stale(&facts.id, grant.incarnation, grant.latest));
        }
        let now = Instant::now();
        let mut state = self.lock();
        // Another may have been first meanwhile.
        state.permits(&facts.id, principal.as_deref())?;
        if let Some(known) = state.replicas.get_mut(&facts.id) {
            if known.incarnation > grant.incarnation {
                return Err(stale(&facts.id, grant.incarnation, known.incarnation));
            }
            if known.incarnation == grant.incarnation {
                if known.lease.liveness() == Liveness::Dead {
                    return Err(dead(&facts.id, grant.incarnation));
                }
                known.lease.beat(now, &self.config.lease);
                known.owner = principal.or(known.owner.take());
                if known.facts() != &facts {
                    let slots = known.slots_for(&facts.ranks);
                    let slots = fill_slots(&mut state.next_slot, slots);
                    if let Some(known) = state.replicas.get_mut(&facts.id) {
                        known.replace_facts(facts, slots, now);
                    }
                }
                self.publish(&mut state);
                return Ok(self.registered(grant.incarnation));
            }
        }
        if state.is_buried(&facts.id, grant.incarnation) {
            return Err(dead(&facts.id, grant.incarnation));
        }
        // Again: others may have come meanwhile.
        match state.whose_place(&facts.id, &self.config) {
            Place::Free => {}
            Place::Of(gone) => state.bury(&gone, &self.config),
            Place::None => return Err(full(&self.config)),
        }
        info!(
            replica = %facts.id,
            incarnation = %grant.incarnation,
            model = %facts.model,
            ranks = facts.ranks.len(),
            url = %facts.url,
            "replica registered"
        );
        let slots = vec![None; facts.ranks.len()];
        let slots = fill_slots(&mut state.next_slot, slots);
        let id = facts.id.clone();
        let mut entry = Entry::new(facts, grant.incarnation, slots, now);
        entry.owner = principal;
        if let Some(before) = state.replicas.get(&id) {
            entry.follow(before, now);
        }
        state.replicas.insert(id, entry);
        self.publish(&mut state);
        Ok(self.registered(grant.incarnation))
    }

    fn registered(&self, incarnation: Incarnation) -> Registered {
        Registered {
            incarnation,
            lease_ttl: self.config.lease.ttl(),
            heartbeat_interval: self.config.lease.interval,
            epoch: self.store.epoch(),
        }
    }

    /// Whether this principal may speak for a replica, as far as it lives and is
    /// somebody's.
    ///
    /// # Errors
    /// REPLICA_TAKEN.
    pub fn permits(&self, replica: &ReplicaId, principal: &str) -> Result<(), Error> {
        self.lock().permits(replica, Some(principal))
    }

    /// This principal has spoken for a replica that is known from before a restart:
    /// it is that one's from now on.
    pub fn spoken_for(&self, replica: &ReplicaId, principal: &Arc<str>) {
        if let Some(entry) = self.lock().replicas.get_mut(replica) {
            entry.owner.get_or_insert_with(|| Arc::clone(principal));
        }
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
        Ok(heard.unwrap_or_default())
    }

    /// A replica leaves. Unknown and older ones are left as they are.
    pub fn deregister(&self, replica: &ReplicaId, incarnation: Incarnation) {
        self.end(replica, incarnation, DEREGISTERED);
    }

    fn end(&self, replica: &ReplicaId, incarnation: Incarnation, reason: &'static str) {
        let mut state = self.lock();
        if let Some(entry) = state.replicas.get_mut(replica)
            && entry.incarnation == incarnation
            && entry.lease.liveness() != Liveness::Dead
        {
            if reason == DEREGISTERED && entry.drains.stage() != Stage::None {
                entry.depart();
            }
            entry.die(reason, Instant::now());
            info!(%replica, %incarnation, reason, "replica is dead");
            self.publish(&mut state);
            drop(state);
            // Who deregisters is written down as the one who does.
            if reason != DEREGISTERED {
                self.evicted(replica, incarnation, reason);
            }
        }
    }

    fn evicted(&self, replica: &ReplicaId, incarnation: Incarnation, why: &str) {
        self.audit.write(&audit::Entry {
            event: "evict",
            principal: None,
            tenant: None,
            roles: None,
            peer: None,
            object: Some(replica.as_str()),
            outcome: "OK",
            detail: Some(&format!("start {incarnation}: {why}")),
        });
    }

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
        let spare = state.spare(now, lease);
        for (replica, entry) in &mut state.replicas {
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
    /// See [`Fleet::permits`].
    fn permits(&self, replica: &ReplicaId, principal: Option<&str>) -> Result<(), Error> {
        let (Some(principal), Some(entry)) = (principal, self.replicas.get(replica)) else {
            return Ok(());
        };
        if !entry.is_of_another(principal) {
            return Ok(());
        }
        Err(Error::new(
            Reason::ReplicaTaken,
            format!(
                "replica {replica} lives and was registered by another principal than \
                 {principal}: wait until it is dead, or take another id"
            ),
        ))
    }

    /// Forgets who has been dead for long. Returns whether anybody was.
    fn forget(&mut self, now: Instant, config: &FleetConfig) -> bool {
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
    fn bury(&mut self, replica: &ReplicaId, config: &FleetConfig) {
        let Some(entry) = self.replicas.remove(replica) else {
            return;
        };
        self.buried.retain(|(other, _)| other != replica);
        self.buried.push_back((replica.clone(), entry.incarnation));
        let more = self.buried.len().saturating_sub(config.max_replicas);
        self.buried.drain(..more);
    }

    /// Where a replica that registers is put. Of the dead, those go last whose next
    /// start an operator has drained beforehand.
    fn whose_place(&self, replica: &ReplicaId, config: &FleetConfig) -> Place {
        if self.replicas.contains_key(replica) || self.replicas.len() < config.max_replicas {
            return Place::Free;
        }
        let dead = self.replicas.iter().filter_map(|(replica, entry)| {
            let died_at = entry.died_at?;
            Some((entry.drains.holds(), died_at, replica))
        });
        dead.min()
            .map_or(Place::None, |(_, _, replica)| Place::Of(replica.clone()))
    }

    fn is_buried(&self, replica: &ReplicaId, incarnation: Incarnation) -> bool {
        self.buried
            .iter()
            .any(|(other, dead)| other == replica && *dead >= incarnation)
    }

    /// Whether nobody is to be called dead for missing beats: a good part of the
    /// fleet is silent at once, so that the fault is more likely here.
    fn spare(&mut self, now: Instant, lease: &LeaseConfig) -> bool {
        let living = |e: &&Entry| e.lease.liveness() != Liveness::Dead;
        let fleet = self.replicas.values().filter(living).count();
        let silent = self
            .replicas
            .values()
            .filter(|e| e.lease.is_silent(now, lease))
            .count();
        let spare = fleet >= SPARE_IN && silent >= SPARE_FROM && silent * 100 > fleet * SPARE_ABOVE;
        if spare != self.sparing {
            self.sparing = spare;
            if spare {
                warn!(
                    silent,
                    fleet,
                    "too many replicas fell silent at once: none is called dead for it while \
                     this lasts"
                );
            } else {
                info!(silent, fleet, "silent replicas are called dead again");
            }
        }
        spare
    }

    /// The entry that `target` speaks of, if that start is the current one.
    fn current(&mut self, target: &Target) -> Option<&mut Entry> {
        self.replicas
            .get_mut(&target.replica)
            .filter(|e| e.incarnation == target.incarnation)
    }
}

/// Where a replica is put.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// It has one, or there is one.
    Free,
    /// That of this one, which has been dead for longest.
    Of(ReplicaId),
    /// Nowhere: all live.
    None,
}

fn full(config: &FleetConfig) -> Error {
    Error::new(
        Reason::FleetFull,
        format!(
            "{} replicas are registered and live, as many as are allowed: start the control \
             plane with a higher max-replicas, or end replicas that are not wanted; this one \
             may register as soon as one has left or is dead",
            config.max_replicas
        ),
    )
}

/// Why an entry is dead that took its leave.
const DEREGISTERED: &str = "it deregistered";

type Slot = (RankSlot, Arc<RankLoad>);

/// Gives new slots to the ranks of one start that have none.
fn fill_slots(next: &mut u32, slots: Vec<Option<Slot>>) -> Vec<Slot> {
    let known = slots.iter().flatten().next();
    let sibling: Arc<RankLoad> = known.map(|(_, load)| Arc::clone(load)).unwrap_or_default();
    slots
        .into_iter()
        .map(|slot| {
            slot.unwrap_or_else(|| {
                // Four thousand million starts of ranks: never within one process.
                *next = next.wrapping_add(1);
                (RankSlot(*next), Arc::new(sibling.beside()))
            })
        })
        .collect()
}

fn stale(replica: &ReplicaId, is: Incarnation, newest: Incarnation) -> Error {
    Error::new(
        Reason::StaleIncarnation,
        format!("incarnation {is} of {replica} is over: {newest} is registered"),
    )
}

fn dead(replica: &ReplicaId, incarnation: Incarnation) -> Error {
    Error::new(
        Reason::IncarnationDead,
        format!(
            "incarnation {incarnation} of {replica} was declared dead, which is final: \
             register with a new boot id"
        ),
    )
}

#[cfg(test)]
mod tests;
