//! What the data path tells the fleet: answers, failures, silence, refused ports,
//! and the probes that bring an ejected rank back.
//!
//! What it guarantees: one failure, one reset connection or one failed probe
//! condemns nobody; a word about an older start changes nothing; failures eject at
//! most half of a model's ranks, since a fault that strikes more of them is more
//! likely the requests' than theirs. A server that says of itself that its engine is
//! dead is believed at once, but not for good: probes bring back who was wrong.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    Fleet, State,
    entry::Entry,
    facts::RankFacts,
    health::{Cause, Probe, Standing},
    lease::Liveness,
    probe,
    snapshot::ReplicaView,
};
use crate::ids::Target;

/// What failed on the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection broke, or the engine answered with a failure of its own.
    Lost,
    /// The reply contradicts the request.
    BadReply,
}

/// A rank to be probed by a request.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The rank.
    pub target: Target,
    /// Its facts.
    pub facts: RankFacts,
    /// Its replica's.
    pub replica: Arc<ReplicaView>,
}

impl Fleet {
    /// A rank has answered a request, by weights of this version and with this
    /// adapter.
    pub fn answered(&self, target: &Target, weight_version: Option<&str>, adapter: Option<&str>) {
        let now = Instant::now();
        let mut state = self.lock();
        let Some(entry) = state.current(target) else {
            return;
        };
        entry.lease.succeeded(now);
        if let Some(health) = entry.health_mut(target.rank) {
            health.succeeded();
        }
        let mut changed = weight_version.is_some_and(|v| entry.saw_weights(target.rank, v));
        changed |= adapter.is_some_and(|name| entry.adapter_used(name));
        if changed {
            self.publish(&mut state);
        }
    }

    /// A rank has been seen to serve these weights.
    pub fn serves(&self, target: &Target, weight_version: &str) {
        let mut state = self.lock();
        if state
            .current(target)
            .is_some_and(|entry| entry.saw_weights(target.rank, weight_version))
        {
            self.publish(&mut state);
        }
    }

    /// A replica says that it does not have this adapter. It is believed until it
    /// says otherwise, by a heartbeat or a registration.
    pub fn adapter_missing(&self, target: &Target, adapter: &str) {
        let mut state = self.lock();
        if state
            .current(target)
            .is_some_and(|entry| entry.adapter_missing(adapter))
        {
            // Its name came with a request.
            warn!(%target, "an adapter is not there, whatever was said before");
            self.publish(&mut state);
        }
    }

    /// A request failed at this rank. `evidence` tells requests apart; `None`: it
    /// was none of a caller's.
    pub fn failed(&self, target: &Target, fault: Fault, evidence: Option<u64>) {
        let now = Instant::now();
        let config = &self.config.health;
        let mut state = self.lock();
        let Some(entry) = state.current(target) else {
            return;
        };
        if is_over(entry)
            || !entry
                .health_mut(target.rank)
                .is_some_and(|health| health.failed(evidence, now, config))
        {
            return;
        }
        let model = Arc::clone(&entry.facts().model);
        if !state.may_eject(&model) {
            warn!(%target, ?fault, "rank fails again and again, and stays: too many would be ejected");
            return;
        }
        if let Some(health) = state
            .current(target)
            .and_then(|e| e.health_mut(target.rank))
            && health.eject(Cause::Failures, now, config)
        {
            self.ejections.count(Cause::Failures);
        }
        warn!(%target, ?fault, "rank is ejected");
        self.publish(&mut state);
    }

    /// This rank's server did not answer an abort: an engine that answers none
    /// hangs, whoever asks.
    pub fn unanswered(&self, target: &Target) {
        let now = Instant::now();
        let config = &self.config.health;
        let mut state = self.lock();
        let Some(entry) = state.current(target).filter(|entry| !is_over(entry)) else {
            return;
        };
        let Some(load) = entry.load(target.rank) else {
            return;
        };
        let sign = load.watch().last_heard();
        let Some(health) = entry.health_mut(target.rank) else {
            return;
        };
        if health.unanswered(sign, now, config) {
            if health.eject(Cause::Hangs, now, config) {
                self.ejections.count(Cause::Hangs);
            }
            load.watch().give_up();
            warn!(%target, "rank is ejected: aborts get no answer there");
            self.publish(&mut state);
        }
    }

    /// This rank's server answered an abort.
    pub fn aborted(&self, target: &Target) {
        let mut state = self.lock();
        let entry = state.current(target);
        if let Some(health) = entry.and_then(|e| e.health_mut(target.rank)) {
            health.aborted();
        }
    }

    /// The server of this rank says that its engine is dead. Such a server lingers
    /// for many seconds, fails whatever it is sent at once, and looks idle: all ranks
    /// behind it are ejected, however many other servers say the same. When its port
    /// refuses at last, its start is over.
    pub fn said_dead(self: &Arc<Self>, target: &Target) {
        self.unreachable(target);
        let now = Instant::now();
        let config = &self.config.health;
        let mut state = self.lock();
        let Some(entry) = state.current(target).filter(|entry| !is_over(entry)) else {
            return;
        };
        let url = entry.url_of(target.rank);
        let ranks: Vec<u32> = entry.facts().ranks.iter().map(|r| r.rank).collect();
        let mut changed = false;
        for rank in ranks {
            if entry.url_of(rank) == url
                && let Some(health) = entry.health_mut(rank)
            {
                let ejected = health.eject(Cause::Died, now, config);
                changed |= ejected;
                if ejected {
                    self.ejections.count(Cause::Died);
                }
            }
        }
        if changed {
            warn!(%target, "a server says that its engine is dead: its ranks are ejected");
            self.publish(&mut state);
        }
    }

    /// Since when this rank is out because it hangs, if it is.
    pub fn hangs_since(&self, target: &Target) -> Option<Instant> {
        let mut state = self.lock();
        match state.current(target)?.health(target.rank)?.standing() {
            Standing::Ejected { why, since, .. } | Standing::OnTrial { why, since, .. } => {
                (why == Cause::Hangs).then_some(since)
            }
            Standing::Trusted => None,
        }
    }

    /// The standing of a rank.
    pub fn standing(&self, target: &Target) -> Option<Standing> {
        let mut state = self.lock();
        Some(state.current(target)?.health(target.rank)?.standing())
    }

    /// The ranks that are due for a probe; each is answered by
    /// [`probed`](Self::probed).
    pub fn trials(&self) -> Vec<Trial> {
        let mut state = self.lock();
        state
            .replicas
            .values_mut()
            .flat_map(Entry::trials)
            .collect()
    }

    /// A probe ended.
    pub fn probed(&self, target: &Target, probe: Probe) {
        let now = Instant::now();
        let config = &self.config.health;
        let mut state = self.lock();
        let Some(entry) = state.current(target) else {
            return;
        };
        if probe == Probe::Passed {
            entry.lease.succeeded(now);
        }
        if entry
            .health_mut(target.rank)
            .is_some_and(|health| health.probed(probe, now, config))
        {
            info!(%target, "rank is trusted again");
            self.publish(&mut state);
        }
    }

    /// The data path could not reach this rank, or lost it: its port is asked,
    /// and one that refuses is dead at once.
    pub fn unreachable(self: &Arc<Self>, target: &Target) {
        let url = {
            let mut state = self.lock();
            let Some(entry) = state.current(target) else {
                return;
            };
            if is_over(entry) || entry.probing {
                return;
            }
            entry.probing = true;
            entry.url_of(target.rank)
        };
        let (fleet, target) = (Arc::clone(self), target.clone());
        tokio::spawn(async move {
            let refused = probe::port_refuses(&url, &fleet.egress).await;
            if let Some(entry) = fleet.lock().current(&target) {
                entry.probing = false;
            }
            if refused {
                fleet.end(
                    &target.replica,
                    target.incarnation,
                    "its port refuses connections",
                );
            }
        });
    }
}

fn is_over(entry: &Entry) -> bool {
    entry.lease.liveness() == Liveness::Dead
}

impl State {
    /// Whether another rank of this model may be ejected for its failures.
    fn may_eject(&self, model: &str) -> bool {
        let (mut all, mut out) = (0, 0);
        for entry in self.replicas.values() {
            if is_over(entry) || *entry.facts().model != *model {
                continue;
            }
            for (rank, _) in entry.loads() {
                all += 1;
                let standing = entry.health(rank).map(|health| health.standing());
                out += usize::from(standing.is_some_and(|s| s != Standing::Trusted));
            }
        }
        out < (all / 2).max(1)
    }
}
