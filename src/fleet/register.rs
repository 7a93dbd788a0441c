//! How replicas come and go: by a registration, by a leave, by another start of
//! the same replica.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use super::{
    Fleet, Registered, State,
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
    /// STALE_INCARNATION when a newer one is known, FLEET_FULL when as many replicas or
    /// ranks live as are allowed, in all or of one principal, and what the store says.
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
        // As they are kept, so that the same ones in another order are no news.
        facts.sort_adapters();
        // Before the store keeps anything: a stranger must not fill it.
        {
            let state = self.lock();
            state.permits(&facts.id, principal.as_deref())?;
            if let Some(boot) = state.name_of_start(&facts) {
                facts.boot = boot;
            }
            state.room(&facts, principal.as_deref(), &self.config)?;
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
        if let Some(known) = state.replicas.get(&facts.id) {
            if known.incarnation > grant.incarnation {
                return Err(stale(&facts.id, grant.incarnation, known.incarnation));
            }
            if known.incarnation == grant.incarnation {
                if known.lease.liveness() == Liveness::Dead {
                    return Err(dead(&facts.id, grant.incarnation));
                }
                return self.again(&mut state, facts, grant.incarnation, principal);
            }
        }
        if state.is_buried(&facts.id, grant.incarnation) {
            return Err(dead(&facts.id, grant.incarnation));
        }
        // Again: others may have come meanwhile.
        for gone in state.room(&facts, principal.as_deref(), &self.config)? {
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

    /// The start that is known already says it again, maybe with other facts.
    fn again(
        &self,
        state: &mut State,
        facts: ReplicaFacts,
        incarnation: Incarnation,
        principal: Option<Arc<str>>,
    ) -> Result<Registered, Error> {
        let now = Instant::now();
        let gone = state.room(&facts, principal.as_deref(), &self.config)?;
        let Some(known) = state.replicas.get_mut(&facts.id) else {
            return Ok(self.registered(incarnation));
        };
        let returned = known.lease.heard(now, &self.config.lease);
        known.owner = principal.or(known.owner.take());
        let changed = known.facts() != &facts;
        if changed {
            let slots = known.slots_for(&facts.ranks);
            let slots = fill_slots(&mut state.next_slot, slots);
            known.replace_facts(facts, slots, now);
        }
        for gone in &gone {
            state.bury(gone, &self.config);
        }
        if returned || changed || !gone.is_empty() {
            self.publish(state);
        }
        Ok(self.registered(incarnation))
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

    pub(super) fn is_buried(&self, replica: &ReplicaId, incarnation: Incarnation) -> bool {
        self.buried
            .iter()
            .any(|(other, dead)| other == replica && *dead >= incarnation)
    }
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
