//! What routing and people are shown of a replica: it follows from its entry, and
//! changes nothing.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::{
    super::{
        RankLoad, RankSlot, RankState, RankView,
        drain::{DrainStatus, Stage},
        facts::{RankFacts, RankReport, ReplicaFacts, ReportedState},
        health::{Fitness, RankHealth},
        lease::{LeaseConfig, Liveness},
        verified::VerifiedView,
    },
    Entry,
};
use crate::ids::{Incarnation, Target};

/// A replica as the control plane sees it, for people.
#[derive(Clone, Debug)]
pub struct ReplicaStatus {
    /// Its facts.
    pub facts: ReplicaFacts,
    /// This start.
    pub incarnation: Incarnation,
    /// The judgement.
    pub health: Health,
    /// Why, in one sentence.
    pub reason: String,
    /// When.
    pub registered_at: SystemTime,
    /// Since the last beat.
    pub heartbeat_age: Duration,
    /// In the order of the facts.
    pub ranks: Vec<RankStatus>,
    /// The drain that is on.
    pub drain: Option<DrainStatus>,
}

/// A rank as the control plane sees it, for people.
#[derive(Clone, Debug)]
pub struct RankStatus {
    /// Its facts.
    pub facts: RankFacts,
    /// Trajectories that live there.
    pub live_pins: u64,
    /// Their tokens.
    pub live_tokens: u64,
    /// Samples sent and not yet answered.
    pub in_flight: u64,
    /// Whether pins hold there.
    pub verified: VerifiedView,
    /// The last report.
    pub reported: Option<RankReport>,
    /// Weights, the last word.
    pub weight_version: Arc<str>,
    /// Why no new requests may be sent, in one phrase; `None`: they may.
    pub not_routable: Option<&'static str>,
}

impl RankStatus {
    /// New requests may be sent.
    pub fn routable(&self) -> bool {
        self.not_routable.is_none()
    }
}

/// The judgement of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Takes requests.
    Healthy,
    /// Heartbeats are missing.
    Suspect,
    /// Known from before a restart of the control plane, and not heard of since.
    Unverified,
    /// The sidecar says that the engine does not answer, or none of its ranks is
    /// fit for requests.
    Unhealthy,
    /// No new keys.
    Draining,
    /// Final.
    Dead,
}

impl Entry {
    fn rank_state(&self, rank: u32) -> RankState {
        // Keys leave, however it is.
        if self.drains.stage() == Stage::Over {
            return RankState::Drained;
        }
        let heard = self.rank_state_as_heard(rank);
        // A silent one is a last resort where nothing else speaks against it; of
        // what does, nobody knows whether it still holds.
        match (self.lease.liveness(), &heard) {
            (Liveness::Alive, _) => heard,
            (Liveness::Unverified, _) => {
                RankState::Closed("not heard of since the control plane was restarted")
            }
            (Liveness::Suspect { .. }, RankState::Open) => RankState::Suspect,
            (Liveness::Suspect { .. }, _) => RankState::Closed("heartbeats are missing"),
            (Liveness::Held, RankState::Open) => RankState::Held,
            (Liveness::Held | Liveness::Dead, _) => {
                RankState::Ejected("heartbeats have been missing for long")
            }
        }
    }

    /// By the last word of its sidecar and by the data path, however old that word.
    fn rank_state_as_heard(&self, rank: u32) -> RankState {
        match self.health(rank).map(RankHealth::fitness) {
            Some(Fitness::Out(why)) => return RankState::Ejected(why),
            Some(Fitness::Closed(why)) => return RankState::Closed(why),
            Some(Fitness::Fit) | None => {}
        }
        if self.reported == ReportedState::Unhealthy {
            return RankState::Closed("the engine does not answer");
        }
        match (self.is_paused(rank), self.drains.stage()) {
            (true, Stage::None) => RankState::Paused,
            (true, _) => RankState::Closed("generation is paused"),
            (false, Stage::None) => RankState::Open,
            (false, _) => RankState::PinnedOnly,
        }
    }

    /// Why none of its ranks is fit, if none is.
    fn unfit(&self) -> Option<&'static str> {
        let mut why = None;
        for health in self.health.values() {
            match health.fitness() {
                Fitness::Fit => return None,
                Fitness::Closed(w) | Fitness::Out(w) => why = why.or(Some(w)),
            }
        }
        why
    }

    pub(super) fn weights_of(&self, rank: u32) -> Arc<str> {
        self.weights
            .get(&rank)
            .cloned()
            .unwrap_or_else(|| Arc::clone(&self.facts().weight_version))
    }

    /// Its ranks for the snapshot; none when it is dead.
    pub(in super::super) fn views(&self) -> Vec<RankView> {
        if self.lease.liveness() == Liveness::Dead {
            return Vec::new();
        }
        self.facts()
            .ranks
            .iter()
            .zip(&self.slots)
            .map(
                |(facts, (slot, load)): (_, &(RankSlot, Arc<RankLoad>))| RankView {
                    slot: *slot,
                    target: Target {
                        replica: self.facts().id.clone(),
                        incarnation: self.incarnation,
                        rank: facts.rank,
                    },
                    facts: facts.clone(),
                    replica: Arc::clone(&self.replica),
                    state: self.rank_state(facts.rank),
                    weight_version: self.weights_of(facts.rank),
                    load: Arc::clone(load),
                },
            )
            .collect()
    }

    pub(in super::super) fn status(&self, now: Instant, config: &LeaseConfig) -> ReplicaStatus {
        let age = now.saturating_duration_since(self.lease.last_beat());
        // A dead one has nothing to drain, unless the drain is for the next start.
        let alive = self.lease.liveness() != Liveness::Dead;
        let drain = self.drains.status(now).filter(|d| alive || d.hold);
        let unfit = self.unfit();
        let (health, reason) = match (self.lease.liveness(), self.reported) {
            (Liveness::Dead, _) => (
                Health::Dead,
                self.death.unwrap_or("it was declared dead").to_owned(),
            ),
            (Liveness::Unverified, _) => (
                Health::Unverified,
                format!(
                    "known from before a restart of the control plane, and neither its sidecar \
                     nor its engine has been heard of for {:.1} s of {:.1} s until it is dead",
                    age.as_secs_f64(),
                    config.ttl().as_secs_f64()
                ),
            ),
            (Liveness::Held, _) => (
                Health::Suspect,
                format!(
                    "no heartbeat for {:.1} s; it is not called dead, because a good part of the \
                     fleet fell silent with it",
                    age.as_secs_f64()
                ),
            ),
            (Liveness::Suspect { good_beats: 0 }, _) => (
                Health::Suspect,
                format!(
                    "no heartbeat for {:.1} s of {:.1} s until it is dead",
                    age.as_secs_f64(),
                    config.ttl().as_secs_f64()
                ),
            ),
            (Liveness::Suspect { good_beats }, _) => (
                Health::Suspect,
                format!(
                    "heartbeats are back: {good_beats} of {} until it is trusted again",
                    config.beats_to_return
                ),
            ),
            (Liveness::Alive, ReportedState::Unhealthy) => (
                Health::Unhealthy,
                "its sidecar says that the engine does not answer".to_owned(),
            ),
            (Liveness::Alive, _) if unfit.is_some() => {
                (Health::Unhealthy, unfit.unwrap_or_default().to_owned())
            }
            (Liveness::Alive, ReportedState::Draining | ReportedState::Ready) => match &drain {
                Some(drain) => (Health::Draining, drain.sentence()),
                None => (Health::Healthy, "heartbeats arrive".to_owned()),
            },
        };
        let ranks = self
            .facts()
            .ranks
            .iter()
            .zip(&self.slots)
            .map(|(facts, (_, load))| RankStatus {
                facts: facts.clone(),
                // What was pinned to a dead one lives nowhere.
                live_pins: if alive { load.live_pins() } else { 0 },
                live_tokens: if alive { load.live_tokens() } else { 0 },
                in_flight: load.in_flight(),
                verified: load.verified().view(),
                reported: self.reports.get(&facts.rank).cloned(),
                weight_version: self.weights_of(facts.rank),
                not_routable: match self.rank_state(facts.rank) {
                    _ if health == Health::Dead => Some("its replica is dead"),
                    RankState::Open => None,
                    state => Some(state.text()),
                },
            })
            .collect();
        ReplicaStatus {
            facts: self.facts().clone(),
            incarnation: self.incarnation,
            health,
            reason,
            registered_at: self.registered_at,
            heartbeat_age: age,
            ranks,
            drain,
        }
    }
}
