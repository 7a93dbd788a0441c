//! How replicas come and go: by a registration, by a leave, by another start of
//! the same replica.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use super::{
    Fleet, FleetConfig, Registered, State,
    drain::Stage,
    entry::Entry,
    facts::ReplicaFacts,
    lease::Liveness,
    snapshot::{RankLoad, RankSlot},
};
use crate::{
    audit,
    error::{Error, Reason},
    ids::{BootId, Incarnation, ReplicaId},
};

impl Fleet {
    /// Announces one start of a replica. Repeated, it gives the same incarnation
    /// and takes the facts as they are now.
    ///
    /// # Errors
    /// INCARNATION_DEAD when this very start was declared dead,
    /// STALE_INCARNATION when a newer one is known, FLEET_FULL when as many replicas
    /// live as are allowed, in all or of one principal, and what the store says.
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
        mut facts: ReplicaFacts,
        principal: Option<Arc<str>>,
    ) -> Result<Registered, Error> {
        // Before the store keeps anything: a stranger must not fill it.
        {
            let state = self.lock();
            state.permits(&facts.id, principal.as_deref())?;
            if let Some(boot) = state.name_of_start(&facts) {
                facts.boot = boot;
            }
            state.whose_place(&facts.id, principal.as_deref(), &self.config)?;
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
                known.lease.heard(now, &self.config.lease);
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
        if let Place::Of(gone) = state.whose_place(&facts.id, principal.as_deref(), &self.config)? {
            state.bury(&gone, &self.config);
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

    pub(super) fn registered(&self, incarnation: Incarnation) -> Registered {
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

    /// The principal whose it is, if it lives and is anybody's.
    pub fn owner(&self, replica: &ReplicaId) -> Option<Arc<str>> {
        let state = self.lock();
        let entry = state.replicas.get(replica);
        let living = entry.filter(|entry| entry.lease.liveness() != Liveness::Dead);
        living.and_then(|entry| entry.owner.clone())
    }

    /// This principal is gone: if the replica is its own, it is nobody's from now on.
    pub fn disown(&self, replica: &ReplicaId, gone: &str) {
        if let Some(entry) = self.lock().replicas.get_mut(replica) {
            entry.owner.take_if(|owner| **owner == *gone);
        }
    }

    /// This principal has spoken for a replica: if it was nobody's, it is that one's
    /// from now on.
    pub fn spoken_for(&self, replica: &ReplicaId, principal: &Arc<str>) {
        if let Some(entry) = self.lock().replicas.get_mut(replica) {
            entry.owner.get_or_insert_with(|| Arc::clone(principal));
        }
    }

    /// A replica leaves. Unknown and older ones are left as they are.
    pub fn deregister(&self, replica: &ReplicaId, incarnation: Incarnation) {
        self.end(replica, incarnation, DEREGISTERED);
    }

    pub(super) fn end(&self, replica: &ReplicaId, incarnation: Incarnation, reason: &'static str) {
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

    pub(super) fn evicted(&self, replica: &ReplicaId, incarnation: Incarnation, why: &str) {
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
}

impl State {
    /// See [`Fleet::permits`].
    pub(super) fn permits(
        &self,
        replica: &ReplicaId,
        principal: Option<&str>,
    ) -> Result<(), Error> {
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

    /// The name under which the start that these facts are of is registered and
    /// lives, where the engine's word shows that it is the same.
    fn name_of_start(&self, facts: &ReplicaFacts) -> Option<BootId> {
        let start = facts.engine_start.as_ref()?;
        let known = self.replicas.get(&facts.id)?;
        let same = known.lease.liveness() != Liveness::Dead
            && known.facts().engine_start.as_ref() == Some(start);
        same.then(|| known.facts().boot.clone())
    }

    /// Where a replica that registers is put. A principal beyond its own bound takes
    /// the place of one of its own.
    ///
    /// # Errors
    /// FLEET_FULL.
    fn whose_place(
        &self,
        replica: &ReplicaId,
        principal: Option<&str>,
        config: &FleetConfig,
    ) -> Result<Place, Error> {
        let known = self.replicas.get(replica);
        if let Some(principal) = principal {
            // What was nobody's is not new: an upgrade and a restart refuse nobody.
            let new = known
                .is_none_or(|entry| entry.owner.as_deref().is_some_and(|own| own != principal));
            let of_principal = |entry: &Entry| entry.owner.as_deref() == Some(principal);
            let most = config.max_replicas_per_principal;
            if new && self.replicas.values().filter(|e| of_principal(e)).count() >= most {
                let dead = self.longest_dead(of_principal);
                return dead
                    .map(Place::Of)
                    .ok_or_else(|| full_of_principal(principal, most));
            }
        }
        if known.is_some() || self.replicas.len() < config.max_replicas {
            return Ok(Place::Free);
        }
        let dead = self.longest_dead(|_| true);
        dead.map(Place::Of).ok_or_else(|| full(config))
    }

    /// Of the dead, those go last whose next start an operator has drained beforehand.
    fn longest_dead(&self, of: impl Fn(&Entry) -> bool) -> Option<ReplicaId> {
        let dead = self.replicas.iter().filter_map(|(replica, entry)| {
            let died_at = entry.died_at.filter(|_| of(entry))?;
            Some((entry.drains.holds(), died_at, replica))
        });
        dead.min().map(|(_, _, replica)| replica.clone())
    }

    pub(super) fn is_buried(&self, replica: &ReplicaId, incarnation: Incarnation) -> bool {
        self.buried
            .iter()
            .any(|(other, dead)| other == replica && *dead >= incarnation)
    }
}

/// Where a replica is put.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// It has one, or there is one.
    Free,
    /// That of this one, which has been dead for longest.
    Of(ReplicaId),
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

fn full_of_principal(principal: &str, most: usize) -> Error {
    Error::new(
        Reason::FleetFull,
        format!(
            "{most} replicas that {principal} registered live, as many as one principal may \
             have: start the control plane with a higher max-replicas-per-principal, give \
             other sidecars credentials of another principal, or end replicas that are not \
             wanted; this one may register as soon as one of them has left or is dead"
        ),
    )
}

/// Why an entry is dead that took its leave.
const DEREGISTERED: &str = "it deregistered";

pub(super) type Slot = (RankSlot, Arc<RankLoad>);

/// Gives new slots to the ranks of one start that have none.
pub(super) fn fill_slots(next: &mut u32, slots: Vec<Option<Slot>>) -> Vec<Slot> {
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

pub(super) fn stale(replica: &ReplicaId, is: Incarnation, newest: Incarnation) -> Error {
    Error::new(
        Reason::StaleIncarnation,
        format!("incarnation {is} of {replica} is over: {newest} is registered"),
    )
}

pub(super) fn dead(replica: &ReplicaId, incarnation: Incarnation) -> Error {
    Error::new(
        Reason::IncarnationDead,
        format!(
            "incarnation {incarnation} of {replica} was declared dead, which is final: \
             register with a new boot id"
        ),
    )
}
