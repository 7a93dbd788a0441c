//! Drains: a replica prepares to leave, and its trajectories with it.
//!
//! Either an operator asks for one, or the sidecar says that its engine is about
//! to go. Both may be on at once; the sooner end of grace counts.
//!
//! ```text
//!           an operator's, a sidecar's         the grace is over
//!   ┌──────┐ ───────────────────────▶ ┌───────┐ ──────────────▶ ┌──────┐
//!   │ None │                          │ Grace │                 │ Over │
//!   └──────┘ ◀─────────────────────── └───────┘                 └──────┘
//!       ▲         resumed, and the sidecar says that it is ready    │
//!       └───────────────────────────────────────────────────────────┘
//! ```
//!
//! | stage | new keys and requests without key | keys that live there         |
//! |-------|-----------------------------------|------------------------------|
//! | None  | yes                               | stay                         |
//! | Grace | no                                | stay                         |
//! | Over  | no                                | move, each at its next turn  |
//!
//! Turns in flight finish in every stage. A drain is of one start of the replica
//! and survives its repeated registration; a new start begins without, unless the
//! operator's drain holds. Repeated, a drain may end its grace sooner and never
//! later, so that a retry changes nothing.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::{
    Fleet, ReplicaStatus,
    facts::{ReplicaFacts, ReportedState},
    lease::Liveness,
    restart::{instant_of, wall_of},
    snapshot::{RankState, RankView},
};
use crate::{
    error::{Error, Reason, Violation},
    ids::ReplicaId,
    store::notes::DrainNote,
};

/// The longest grace that can be asked for.
pub const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

/// What an operator asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainOrder {
    /// So long pinned keys may stay, at most [`MAX_GRACE`]. `None`: as configured.
    pub grace: Option<Duration>,
    /// A new start of the replica is drained as well.
    pub hold: bool,
    /// Even where nobody else serves what it serves.
    pub allow_last: bool,
}

/// A drain that is on, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainStatus {
    /// An operator asked for it.
    pub by_operator: bool,
    /// The sidecar says so by itself.
    pub by_sidecar: bool,
    /// Until pinned keys move; zero: they do.
    pub grace_left: Duration,
    /// A new start is drained as well.
    pub hold: bool,
    /// When it began.
    pub since: SystemTime,
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// There is none.
    #[default]
    None,
    /// Pinned keys stay.
    Grace,
    /// They move.
    Over,
}

#[derive(Clone, Copy, Debug)]
struct Drain {
    until: Instant,
    since: SystemTime,
}

impl Drain {
    fn new(now: Instant, grace: Duration) -> Self {
        Self {
            until: now + grace.min(MAX_GRACE),
            since: SystemTime::now(),
        }
    }

    /// Begins one, or lets the one that is on end sooner.
    fn begin(slot: &mut Option<Self>, now: Instant, grace: Duration) {
        let new = Self::new(now, grace);
        match slot {
            Some(drain) => drain.until = drain.until.min(new.until),
            None => *slot = Some(new),
        }
    }
}

/// The drains of one start of a replica.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drains {
    operator: Option<Drain>,
    hold: bool,
    sidecar: Option<Drain>,
    /// The sidecar was told of the operator's drain and has not said since that it
    /// is ready: when it says that it drains, it may only repeat that.
    told: bool,
    stage: Stage,
}

impl Drains {
    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    pub(super) fn holds(&self) -> bool {
        self.hold
    }

    /// An operator asked for it.
    pub(super) fn ordered(&self) -> bool {
        self.operator.is_some()
    }

    /// Whether the sidecar is to be told to drain; it counts as told.
    pub(super) fn tell(&mut self) -> bool {
        self.told |= self.ordered();
        self.ordered()
    }

    /// Time has passed. Returns whether the stage changed.
    pub(super) fn pass(&mut self, now: Instant) -> bool {
        let before = self.stage;
        self.stage = match self.until() {
            None => Stage::None,
            Some(until) if now < until => Stage::Grace,
            Some(_) => Stage::Over,
        };
        self.stage != before
    }

    fn until(&self) -> Option<Instant> {
        let drains = [self.operator, self.sidecar];
        drains.iter().flatten().map(|drain| drain.until).min()
    }

    fn order(&mut self, now: Instant, grace: Duration, hold: bool) {
        Drain::begin(&mut self.operator, now, grace);
        self.hold |= hold;
        self.pass(now);
    }

    fn resume(&mut self, now: Instant) {
        self.operator = None;
        self.hold = false;
        self.pass(now);
    }

    /// What a beat says. A sidecar that drains by its own will says for how long
    /// keys may stay; one that says nothing of that and was told to drain, and be
    /// it a moment before the operator changed their mind, repeats it. Returns
    /// whether the stage changed.
    pub(super) fn reported(
        &mut self,
        state: ReportedState,
        grace: Option<Duration>,
        default: Duration,
        now: Instant,
    ) -> bool {
        match state {
            ReportedState::Ready => (self.sidecar, self.told) = (None, false),
            // It has said nothing of its plans.
            ReportedState::Unhealthy => {}
            ReportedState::Draining => {
                let repeats = grace.is_none() && (self.told || self.ordered());
                if !repeats {
                    // Without a word of the grace, the first word's counts.
                    let grace = grace.or(self.sidecar.is_none().then_some(default));
                    if let Some(grace) = grace {
                        Drain::begin(&mut self.sidecar, now, grace);
                    }
                }
            }
        }
        self.pass(now)
    }

    /// An operator's drain, for a restart of the control plane: a sidecar repeats
    /// its own.
    pub(super) fn note(&self, now: (Instant, SystemTime)) -> Option<DrainNote> {
        self.operator.map(|drain| DrainNote {
            until: wall_of(drain.until, now),
            hold: self.hold,
        })
    }

    pub(super) fn restore(&mut self, note: &DrainNote, now: (Instant, SystemTime)) {
        let until = instant_of(note.until, now, MAX_GRACE);
        self.order(now.0, until.saturating_duration_since(now.0), note.hold);
        // The sidecar may have been told before.
        self.told = true;
    }

    /// Those of the start after this one. Nothing lives there yet.
    pub(super) fn of_next_start(&self, now: Instant) -> Self {
        let mut next = Self::default();
        if self.hold {
            next.order(now, Duration::ZERO, true);
            next.operator.iter_mut().for_each(|drain| {
                drain.since = self.operator.map_or(drain.since, |held| held.since);
            });
        }
        next
    }

    pub(super) fn status(&self, now: Instant) -> Option<DrainStatus> {
        let until = self.until()?;
        let since = [self.operator, self.sidecar]
            .iter()
            .flatten()
            .map(|drain| drain.since)
            .min()?;
        Some(DrainStatus {
            by_operator: self.operator.is_some(),
            by_sidecar: self.sidecar.is_some(),
            grace_left: until.saturating_duration_since(now),
            hold: self.hold,
            since,
        })
    }
}

impl DrainStatus {
    /// In one sentence.
    pub(super) fn sentence(&self) -> String {
        let who = match (self.by_operator, self.by_sidecar) {
            (true, true) => "an operator and its sidecar drain it",
            (true, false) => "an operator drains it",
            (false, _) => "its sidecar says that it drains",
        };
        let keys = if self.grace_left.is_zero() {
            "the keys that live there move at their next turn".to_owned()
        } else {
            format!(
                "the keys that live there may stay for {:.1} s more",
                self.grace_left.as_secs_f64()
            )
        };
        let hold = if self.hold {
            "; a new start is drained as well"
        } else {
            ""
        };
        format!("{who}: {keys}{hold}")
    }
}

impl Fleet {
    /// Drains a replica. Repeated, it may end the grace sooner, never later.
    ///
    /// # Errors
    /// REPLICA_NOT_FOUND, INVALID_REQUEST for a grace beyond [`MAX_GRACE`], and
    /// LAST_REPLICA where nobody else takes new work for its model, or for one of
    /// its adapters, and that is not allowed.
    pub fn drain(&self, replica: &ReplicaId, order: DrainOrder) -> Result<ReplicaStatus, Error> {
        let grace = order.grace.unwrap_or(self.config.drain_grace);
        if grace > MAX_GRACE {
            return Err(Error::invalid(
                Reason::InvalidRequest,
                vec![Violation::new("grace", "must be at most 24 h")],
            ));
        }
        let now = Instant::now();
        let mut state = self.lock();
        let entry = state.replicas.get(replica).ok_or_else(not_found)?;
        let alive = entry.lease.liveness() != Liveness::Dead;
        if alive && entry.drains.stage() == Stage::None && !order.allow_last {
            self.others_serve(entry.facts())?;
        }
        let entry = state.replicas.get_mut(replica).ok_or_else(not_found)?;
        // Nothing goes to a dead one; what comes after it may be held.
        if alive || order.hold {
            entry.drains.order(now, grace, order.hold);
            tracing::info!(%replica, incarnation = %entry.incarnation, ?grace, hold = order.hold, "an operator drains the replica");
        }
        let status = entry.status(now, &self.config.lease);
        self.publish(&mut state);
        Ok(status)
    }

    /// Ends an operator's drain. One that the sidecar began goes on: its engine is
    /// about to leave, whatever anybody wants.
    ///
    /// # Errors
    /// REPLICA_NOT_FOUND.
    pub fn resume(&self, replica: &ReplicaId) -> Result<ReplicaStatus, Error> {
        let now = Instant::now();
        let mut state = self.lock();
        let entry = state.replicas.get_mut(replica).ok_or_else(not_found)?;
        if entry.drains.ordered() {
            tracing::info!(%replica, incarnation = %entry.incarnation, "an operator ends the drain");
        }
        entry.drains.resume(now);
        let status = entry.status(now, &self.config.lease);
        self.publish(&mut state);
        Ok(status)
    }

    /// Whether what this replica serves is served elsewhere by ranks that take
    /// new work, or will after a pause. The snapshot is as new as the state: both
    /// change under one lock.
    fn others_serve(&self, leaving: &ReplicaFacts) -> Result<(), Error> {
        let snapshot = self.snapshot();
        let takes = |rank: &&RankView| matches!(rank.state, RankState::Open | RankState::Paused);
        let is_leaving = |rank: &&RankView| rank.replica.facts.id == leaving.id;
        if !snapshot
            .ranks
            .iter()
            .filter(is_leaving)
            .any(|rank| takes(&rank))
        {
            // It serves nobody new as it is.
            return Ok(());
        }
        let staying = || {
            let others = snapshot.ranks.iter().filter(|rank| !is_leaving(rank));
            others.filter(|rank| rank.replica.facts.model == leaving.model && takes(rank))
        };
        let lost: Vec<String> = if staying().next().is_none() {
            vec![format!("model {:?}", leaving.model)]
        } else {
            leaving
                .adapters
                .iter()
                .filter(|adapter| {
                    let name = &adapter.name;
                    !staying().any(|rank| rank.replica.facts.adapter(name).is_some())
                })
                .map(|adapter| format!("adapter {:?}", adapter.name))
                .take(8)
                .collect()
        };
        if lost.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            Reason::LastReplica,
            format!(
                "{} is the last replica that takes new work for {}: add or resume another first, \
                 or say that this one may go all the same (allow_last)",
                leaving.id,
                lost.join(", ")
            ),
        ))
    }
}

/// Of a replica that an operator names.
pub fn not_found() -> Error {
    Error::new(
        Reason::ReplicaNotFound,
        "no replica of this id is known; ListReplicas shows those that are",
    )
}
