//! The decision itself. What a request comes to is planned first, by `Router::plan`,
//! which changes nothing; [`Router::route`] then carries the plan out, and
//! `Router::explain` shows it.

mod home;
mod place;
mod upkeep;

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use tokio::time::Instant;

use self::home::Home;
use super::{
    config::RouterConfig,
    field::{Field, Measure, Out},
    groups::Groups,
    line::Lines,
    moves::{Budget, Queued},
    needs::Lack,
    pins::{Came, Pin, PinKey, PinTable, Pinned, Seen},
    prefix::Prefixes,
    request::{Decision, NoRoute, RouteRequest},
};
use crate::{
    call::{RouteReason, RoutingPolicy},
    fleet::snapshot::{ModelView, RankState, RankView, Snapshot},
};

/// The router: the table of pins and the rules.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    pins: PinTable,
    groups: Groups,
    prefixes: Prefixes,
    budget: Budget,
    lines: Arc<Lines>,
    next: AtomicUsize,
    /// When moves were first looked at.
    born: OnceLock<Instant>,
    /// Makes choosing by load and counting it one step, so that choices made at
    /// the same moment see each other. Not taken for a pinned key, and no pin's
    /// shard is locked while a choice is made.
    placement: Mutex<()>,
}

/// What a request comes to. Nothing has changed yet.
pub(super) struct Plan<'f> {
    pub(super) rank: &'f RankView,
    pub(super) reason: RouteReason,
    pub(super) expected: u32,
    verifiable: bool,
    act: Act,
    /// It counts for its group.
    grouped: bool,
}

/// What becomes of the key's pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Nothing,
    /// It is used.
    Stay,
    /// It is bound to this rank.
    Bind,
    /// Likewise, off a busy rank.
    Move,
}

/// Looks at all ranks of a model, and leaves what it saw in `field`.
struct Survey<'s, 'f> {
    fleet: &'f Snapshot,
    model: &'f ModelView,
    request: &'s RouteRequest<'s>,
    field: &'s mut Option<Field<'f>>,
}

impl<'f> Survey<'_, 'f> {
    fn by(&mut self, measure: Measure) -> Result<&mut Field<'f>, NoRoute> {
        let field = Field::survey(self.fleet, self.model, self.request, measure);
        let none = field.is_empty();
        let field = self.field.insert(field);
        if none {
            return Err(why_none(self.fleet, self.model, self.request));
        }
        Ok(field)
    }

    /// A key's home that only lacks heartbeats, where nobody else takes requests
    /// either: its cache is no colder for that.
    fn last_resort_at(&mut self, pin: Pinned) -> Option<Plan<'f>> {
        let rank = self.fleet.rank(pin.slot)?;
        if !rank.state.is_last_resort() {
            return None;
        }
        let request = self.request;
        let field = self.by(Measure::Live).ok()?;
        if !field.is_last_resort() || !field.left().any(|(other, _)| other.slot == rank.slot) {
            return None;
        }
        field.only(rank.slot, Out::Pinned);
        Some(Plan::warm(rank, request, pin))
    }
}

impl Router {
    /// With no pins.
    pub fn new(config: RouterConfig) -> Self {
        Self {
            pins: PinTable::new(config.max_pins, config.keep_changes),
            groups: Groups::default(),
            prefixes: Prefixes::new(config.max_prefix_blocks),
            budget: Budget::default(),
            lines: Arc::default(),
            config,
            next: AtomicUsize::new(0),
            born: OnceLock::new(),
            placement: Mutex::new(()),
        }
    }

    /// How it decides.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Chooses a rank. A choice for a new or moved key is its pin from then on.
    ///
    /// # Errors
    /// When no rank can take the request now; nothing is pinned then.
    pub fn route(
        &self,
        fleet: &Snapshot,
        request: &RouteRequest<'_>,
        now: Instant,
    ) -> Result<Decision, NoRoute> {
        let key = pinning(request);
        if let Some(key) = key {
            let mut shard = self.pins.shard(key);
            if let Some(pin) = shard.get_mut(key)
                && let Home::Here(plan) = self.home(fleet, request, pin.seen(), now)
            {
                pin.touch(now, &plan.rank.load, request.prompt_tokens);
                return Ok(self.decide(&plan, request));
            }
        }
        let model = model(fleet, request)?;
        let _one_at_a_time = self
            .placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Again: another turn of this key may have been placed meanwhile.
        let plan = self.plan(fleet, model, request, self.pinned(key), now, &mut None);
        if let (Err(NoRoute::KvFull), Some(key)) = (&plan, key) {
            self.park(key);
        }
        let plan = plan?;
        self.commit(&plan, request, key, now);
        Ok(self.decide(&plan, request))
    }

    pub(super) fn pinned(&self, key: Option<PinKey>) -> Option<Seen> {
        let key = key?;
        self.pins.shard(key).get(key).map(Pin::seen)
    }

    /// It waits for room: until it has some its KV is for others.
    fn park(&self, key: PinKey) {
        let mut shard = self.pins.shard(key);
        let leaves = shard.get_mut(key).is_some_and(Pin::idle);
        drop(shard);
        if leaves {
            self.lines.room();
        }
    }

    /// What the request comes to. `field` is left as the decision saw it, where it
    /// looked at more than one rank.
    pub(super) fn plan<'f>(
        &self,
        fleet: &'f Snapshot,
        model: &'f ModelView,
        request: &RouteRequest<'_>,
        pinned: Option<Seen>,
        now: Instant,
        field: &mut Option<Field<'f>>,
    ) -> Result<Plan<'f>, NoRoute> {
        let mut survey = Survey {
            fleet,
            model,
            request,
            field,
        };
        match (request.policy, request.key) {
            (RoutingPolicy::Affinity, Some(key)) => {
                let home = pinned.map(|pin| self.home(fleet, request, pin, now));
                if let (Some(Home::Away(_) | Home::Gone(_)), Some(pin)) = (&home, pinned)
                    && let Some(stay) = survey.last_resort_at(pin.at)
                {
                    return Ok(stay);
                }
                match home {
                    Some(Home::Here(plan)) => Ok(plan),
                    Some(Home::Busy(stay, moves, wait)) => {
                        let away = survey.by(Measure::Live).ok().and_then(|field| {
                            self.better_place(field, request, key, &stay, moves, wait, now)
                        });
                        Ok(away.unwrap_or(stay))
                    }
                    Some(Home::Refuge(stay)) => {
                        let away = survey
                            .by(Measure::Live)
                            .ok()
                            .and_then(|field| self.leave_refuge(field, request, key, &stay));
                        Ok(away.unwrap_or(stay))
                    }
                    Some(Home::Full(stay, admission)) => self.room_elsewhere(
                        survey.by(Measure::Live)?,
                        request,
                        key,
                        &stay,
                        admission,
                    ),
                    // Its home will take it again: the pin stays where it is.
                    Some(Home::Away(why)) => {
                        self.detour(survey.by(Measure::InFlight)?, request, key, why)
                    }
                    Some(Home::Gone(why)) => {
                        self.place(survey.by(Measure::Live)?, request, key, why)
                    }
                    None => {
                        let field = survey.by(Measure::Live)?;
                        self.admit(field, request)?;
                        self.place(field, request, key, RouteReason::NewKey)
                    }
                }
            }
            (RoutingPolicy::Affinity, None) => {
                let field = survey.by(Measure::InFlight)?;
                match request.hints.group {
                    Some(group) => self.place_keyless(field, request, group),
                    None if self.config.keyless_prefix => self.by_prefix(field, request),
                    None => self.least_in_flight(field, request, RouteReason::NoKey),
                }
            }
            (RoutingPolicy::Prefix, _) => self.by_prefix(survey.by(Measure::InFlight)?, request),
            (RoutingPolicy::LeastLoaded, _) => {
                let field = survey.by(Measure::InFlight)?;
                self.least_in_flight(field, request, RouteReason::LeastLoaded)
            }
            (RoutingPolicy::Random, _) => {
                let draw = (request.request % u128::from(u64::MAX)) as usize;
                nth(survey.by(Measure::InFlight)?, draw, RouteReason::Random)
            }
            (RoutingPolicy::RoundRobin, _) => {
                let draw = self.next.load(Ordering::Relaxed);
                nth(survey.by(Measure::InFlight)?, draw, RouteReason::RoundRobin)
            }
        }
    }

    /// Carries out what is planned of pins and groups.
    fn commit(
        &self,
        plan: &Plan<'_>,
        request: &RouteRequest<'_>,
        key: Option<PinKey>,
        now: Instant,
    ) {
        if request.policy == RoutingPolicy::RoundRobin {
            self.next.fetch_add(1, Ordering::Relaxed);
        }
        if plan.act == Act::Move
            && let Some(moves) = &self.config.moves
        {
            self.budget.allows(moves.per_minute, now, true);
        }
        if plan.grouped
            && let Some(group) = request.hints.group
        {
            self.groups.placed(group.key, plan.rank.slot, now);
        }
        let Some(key) = key else { return };
        let mut shard = self.pins.shard(key);
        match plan.act {
            Act::Nothing => {}
            Act::Stay => {
                if let Some(pin) = shard.get_mut(key) {
                    pin.touch(now, &plan.rank.load, request.prompt_tokens);
                }
            }
            Act::Bind | Act::Move => {
                let before = shard.get(key).map(|pin| pin.at.came.minute());
                let came = match (plan.act, plan.reason) {
                    (Act::Move, _) => Came::moved(self.minute(now)),
                    (_, RouteReason::ReplicaLost | RouteReason::Draining) => {
                        Came::refuge(self.minute(now))
                    }
                    _ => Came::moved(before.unwrap_or(0)),
                };
                let at = Pinned {
                    slot: plan.rank.slot,
                    tokens: 0,
                    counted: 0,
                    weights: 0,
                    came,
                    adapter: plan.rank.adapter_load(request.needs.adapter.as_deref()),
                };
                let mut pin = Pin::new(at, now);
                pin.touch(now, &plan.rank.load, request.prompt_tokens);
                self.pins.insert(&mut shard, key, pin);
            }
        }
    }

    fn decide(&self, plan: &Plan<'_>, request: &RouteRequest<'_>) -> Decision {
        let load = &plan.rank.load;
        let queued = self.config.moves.map_or_else(Queued::default, |moves| {
            let work = moves.cost.rest(plan.expected, request.prompt_tokens);
            Queued::on(load.queue(), work)
        });
        Decision {
            slot: plan.rank.slot,
            reason: plan.reason,
            expected_cached_tokens: plan.expected,
            last_resort: plan.rank.state.is_last_resort(),
            verifiable: plan.verifiable && plan.expected > 0,
            ticket: load.take(request.samples),
            queued,
        }
    }
}

impl<'f> Plan<'f> {
    /// The key's own rank.
    fn warm(rank: &'f RankView, request: &RouteRequest<'_>, pin: Pinned) -> Self {
        // KV of another load of the adapter is another adapter's.
        let same = pin.adapter == rank.adapter_load(request.needs.adapter.as_deref());
        let held = if same { pin.tokens } else { 0 };
        Self {
            rank,
            reason: RouteReason::Pinned,
            expected: expected_cached(held, request.prompt_tokens, rank),
            verifiable: pin.weights == weights_name(&rank.weight_version),
            act: Act::Stay,
            grouped: false,
        }
    }

    /// A rank that is expected to hold nothing.
    fn cold(rank: &'f RankView, reason: RouteReason, act: Act) -> Self {
        Self {
            rank,
            reason,
            expected: 0,
            verifiable: false,
            act,
            grouped: false,
        }
    }
}

/// The key whose pin is used and remembered.
pub(super) fn pinning(request: &RouteRequest<'_>) -> Option<PinKey> {
    let uses = request.policy == RoutingPolicy::Affinity;
    request.key.filter(|_| uses)
}

pub(super) fn model<'f>(
    fleet: &'f Snapshot,
    request: &RouteRequest<'_>,
) -> Result<&'f ModelView, NoRoute> {
    let model = fleet.models.get(&request.needs.model);
    model.ok_or(NoRoute::NoModel)
}

/// The eligible rank number `draw`, counted round.
fn nth<'f>(field: &mut Field<'f>, draw: usize, reason: RouteReason) -> Result<Plan<'f>, NoRoute> {
    let rank = field.nth(draw).ok_or(NoRoute::NoneOpen)?;
    Ok(Plan::cold(rank, reason, Act::Nothing))
}

fn why_none(fleet: &Snapshot, model: &ModelView, request: &RouteRequest<'_>) -> NoRoute {
    let ranks = || model.ranks.iter().map(|&i| &fleet.ranks[i]);
    let able = || {
        let left = ranks().filter(|rank| !request.avoid.contains(&rank.slot));
        left.filter(|rank| request.needs.lack(rank).is_none())
    };
    if able().any(|rank| rank.state == RankState::Paused) {
        return NoRoute::Paused;
    }
    let drains = |rank: &RankView| matches!(rank.state, RankState::PinnedOnly | RankState::Drained);
    if able().next().is_some() && able().all(drains) {
        return NoRoute::Draining;
    }
    if ranks().any(|rank| request.needs.lack(rank).is_none()) {
        return NoRoute::NoneOpen;
    }
    let mut lacks: Vec<Lack> = ranks()
        .filter_map(|rank| request.needs.lack(rank))
        .collect();
    lacks.sort();
    lacks.dedup();
    NoRoute::Lacking(lacks)
}

/// At most the prompt less one token, which an engine always computes, in whole
/// pages.
fn expected_cached(pin_tokens: u32, prompt_tokens: u32, rank: &RankView) -> u32 {
    let tokens = pin_tokens.min(prompt_tokens.saturating_sub(1));
    tokens - tokens % rank.replica.facts.page_size.max(1)
}

/// Tells weights from other weights; never 0.
fn weights_name(version: &str) -> u16 {
    let [a, b, ..] = xxhash_rust::xxh3::xxh3_64(version.as_bytes()).to_le_bytes();
    u16::from_le_bytes([a, b]).max(1)
}

#[cfg(test)]
mod tests;
