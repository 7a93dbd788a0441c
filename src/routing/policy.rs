//! The decision itself.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{
    needs::{Lack, Needs},
    pins::{Pin, PinKey, PinTable, PinView},
};
use crate::{
    call::{RouteReason, RoutingPolicy},
    fleet::snapshot::{LoadTicket, ModelView, RankSlot, RankState, RankView, Snapshot},
};

/// A rank that has the adapter in memory is preferred with up to so much on it,
/// however idle others are.
const ADAPTER_QUEUE: u64 = 4;

/// How the router decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// The choice between balance and agreement for new keys, at least 1. 1: the
    /// least loaded rank. Greater: the key's home while its load is within this
    /// factor of the mean (consistent hashing with bounded loads). Infinite:
    /// plain consistent hashing.
    pub load_factor: f64,
    /// A trajectory idle for so long no longer counts as load.
    pub pin_ttl: Duration,
    /// Pins kept at most.
    pub max_pins: usize,
    /// Changes of pins are remembered for [`Router::changed_pins`].
    pub keep_changes: bool,
}

/// A trajectory idle for so long is forgotten: its cache is gone long since.
pub const HINT_TTL: Duration = Duration::from_secs(24 * 3600);

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            load_factor: 1.0,
            // Gaps between turns in real traces: p99 1,914 s.
            pin_ttl: Duration::from_secs(1800),
            max_pins: 1_000_000,
            keep_changes: false,
        }
    }
}

/// What the router is asked.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// The trajectory, where there is one.
    pub key: Option<PinKey>,
    /// A hash of the request's id: breaks ties of requests without a key, and is
    /// what `random` draws from.
    pub request: u128,
    /// What it counts as load.
    pub samples: u32,
    /// Its length, where known; bounds what can be expected from the cache.
    pub prompt_tokens: u32,
    /// What the rank must be able to do.
    pub needs: &'a Needs,
    /// How to choose.
    pub policy: RoutingPolicy,
    /// Ranks where this request has just failed: not chosen, and a pin to one of
    /// them moves.
    pub avoid: &'a [RankSlot],
}

/// A rank for a request.
#[derive(Debug)]
pub struct Decision {
    /// The rank.
    pub slot: RankSlot,
    /// Why.
    pub reason: RouteReason,
    /// Cached tokens that the pin's history lets one expect, rounded down to the
    /// engine's page.
    pub expected_cached_tokens: u32,
    /// The samples count as load until this is dropped.
    pub ticket: LoadTicket,
}

/// No rank can take a request now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// Nobody serves the model.
    NoModel,
    /// No rank that serves it can do what is asked; the distinct lacks.
    Lacking(Vec<Lack>),
    /// Some could, but none takes requests now.
    NoneOpen,
    /// Some could and are paused: they will take requests again soon.
    Paused,
    /// All that could are draining.
    Draining,
}

/// The router: the table of pins and the rules.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    pins: PinTable,
    next: AtomicUsize,
    /// Makes choosing by load and counting it one step, so that choices made at
    /// the same moment see each other. Not taken for a pinned key.
    placement: Mutex<()>,
}

impl Router {
    /// With no pins.
    pub fn new(config: RouterConfig) -> Self {
        Self {
            pins: PinTable::new(config.max_pins, config.keep_changes),
            config,
            next: AtomicUsize::new(0),
            placement: Mutex::new(()),
        }
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
        let model = fleet
            .models
            .get(&request.needs.model)
            .ok_or(NoRoute::NoModel)?;
        match (request.policy, request.key) {
            (RoutingPolicy::Affinity, Some(key)) => self.route_key(fleet, model, request, key, now),
            (RoutingPolicy::Affinity, None) => {
                self.least_in_flight(fleet, model, request, RouteReason::NoKey)
            }
            (RoutingPolicy::LeastLoaded, _) => {
                self.least_in_flight(fleet, model, request, RouteReason::LeastLoaded)
            }
            (RoutingPolicy::Random, _) => {
                let draw = (request.request % u128::from(u64::MAX)) as usize;
                Self::nth(fleet, model, request, draw, RouteReason::Random)
            }
            (RoutingPolicy::RoundRobin, _) => {
                let draw = self.next.fetch_add(1, Ordering::Relaxed);
                Self::nth(fleet, model, request, draw, RouteReason::RoundRobin)
            }
        }
    }

    fn route_key(
        &self,
        fleet: &Snapshot,
        model: &ModelView,
        request: &RouteRequest<'_>,
        key: PinKey,
        now: Instant,
    ) -> Result<Decision, NoRoute> {
        let mut shard = self.pins.shard(key);
        let mut reason = RouteReason::NewKey;
        if let Some(pin) = shard.get_mut(key) {
            match Self::at_home(fleet, request, pin) {
                AtHome::Yes(rank) => {
                    pin.touch(now, &rank.load);
                    // KV of another load of the adapter is another adapter's.
                    let same = pin.adapter == rank.adapter_load(request.needs.adapter.as_deref());
                    let held = if same { pin.tokens } else { 0 };
                    let expected = expected_cached(held, request.prompt_tokens, rank);
                    return Ok(Decision {
                        slot: rank.slot,
                        reason: RouteReason::Pinned,
                        expected_cached_tokens: expected,
                        ticket: rank.load.take(request.samples),
                    });
                }
                AtHome::Away(why) => {
                    // Its home will take it again: the pin stays where it is.
                    drop(shard);
                    return self.least_in_flight(fleet, model, request, why);
                }
                AtHome::Gone(why) => reason = why,
            }
        }
        let _one_at_a_time = self
            .placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let rank = self.place(fleet, model, request, key)?;
        let mut pin = Pin {
            slot: rank.slot,
            tokens: 0,
            adapter: rank.adapter_load(request.needs.adapter.as_deref()),
            last_used: now,
            live: None,
        };
        pin.touch(now, &rank.load);
        self.pins.insert(&mut shard, key, pin);
        Ok(Decision {
            slot: rank.slot,
            reason,
            expected_cached_tokens: 0,
            ticket: rank.load.take(request.samples),
        })
    }

    /// Whether a pin's rank takes its key's request.
    fn at_home<'f>(fleet: &'f Snapshot, request: &RouteRequest<'_>, pin: &Pin) -> AtHome<'f> {
        if request.avoid.contains(&pin.slot) {
            return AtHome::Gone(RouteReason::ReplicaLost);
        }
        let Some(rank) = fleet.rank(pin.slot) else {
            return AtHome::Gone(if fleet.departed.contains(&pin.slot) {
                RouteReason::Draining
            } else {
                RouteReason::ReplicaLost
            });
        };
        match rank.state {
            RankState::Drained => AtHome::Gone(RouteReason::Draining),
            RankState::Ejected(_) => AtHome::Gone(RouteReason::ReplicaLost),
            RankState::Closed(_) | RankState::Paused => AtHome::Away(RouteReason::Detour),
            RankState::Open | RankState::PinnedOnly => match request.needs.lack(rank) {
                None => AtHome::Yes(rank),
                Some(Lack::Weights { .. }) => AtHome::Away(RouteReason::Weights),
                Some(_) => AtHome::Away(RouteReason::Detour),
            },
        }
    }

    /// The new-key rule: the least loaded rank, or the key's home while it is not
    /// overloaded; ties by the ring order of the key, never by index.
    fn place<'f>(
        &self,
        fleet: &'f Snapshot,
        model: &'f ModelView,
        request: &RouteRequest<'_>,
        key: PinKey,
    ) -> Result<&'f RankView, NoRoute> {
        let load =
            |rank: &RankView| as_f64(rank.load.live_pins() + rank.load.in_flight()) / rank.weight();
        let resident = Self::prefers_resident(fleet, model, request);
        let wanted = |rank: &RankView| !resident || rank.holds(request.needs.adapter.as_deref());
        let (least, lightest) = Self::lightest(fleet, model, request, load, wanted)?;
        let bound = if self.config.load_factor > 1.0 {
            // With the new key counted, as in consistent hashing with bounded
            // loads: an idle fleet then has room everywhere.
            let (pins, weight) = Self::eligible(fleet, model, request).fold(
                (u64::from(request.samples), 0.0),
                |(pins, weight), rank| {
                    let here = rank.load.live_pins() + rank.load.in_flight();
                    (pins + here, weight + rank.weight())
                },
            );
            (self.config.load_factor * as_f64(pins) / weight).max(least)
        } else {
            least
        };
        Ok(model
            .ring
            .first(key.0, |member| {
                let rank = &fleet.ranks[model.ranks[member]];
                Self::takes(rank, request) && wanted(rank) && load(rank) <= bound
            })
            .map_or(lightest, |member| &fleet.ranks[model.ranks[member]]))
    }

    /// The least load and a rank that has it. Pinned requests come and go
    /// meanwhile, so when the ring is asked the next moment, no rank may be that
    /// light any more: then this one it is.
    fn lightest<'f>(
        fleet: &'f Snapshot,
        model: &'f ModelView,
        request: &RouteRequest<'_>,
        load: impl Fn(&RankView) -> f64,
        wanted: impl Fn(&RankView) -> bool,
    ) -> Result<(f64, &'f RankView), NoRoute> {
        Self::eligible(fleet, model, request)
            .filter(|rank| wanted(rank))
            .map(|rank| (load(rank), rank))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .ok_or_else(|| Self::why_none(fleet, model, request))
    }

    /// Whether only ranks that have the request's adapter in memory are looked at:
    /// one of them is there, and none of it is so much busier than the others that
    /// loading the adapter there as well costs less than the queue.
    fn prefers_resident(fleet: &Snapshot, model: &ModelView, request: &RouteRequest<'_>) -> bool {
        let Some(adapter) = request.needs.adapter.as_deref() else {
            return false;
        };
        let count = |rank: &RankView| rank.load.live_pins() + rank.load.in_flight();
        let (mut all, mut ranks, mut lightest) = (u64::from(request.samples), 0, None);
        for rank in Self::eligible(fleet, model, request) {
            all += count(rank);
            ranks += 1;
            if rank.holds(Some(adapter)) {
                let least = lightest.unwrap_or(u64::MAX);
                lightest = Some(least.min(count(rank)));
            }
        }
        lightest.is_some_and(|load| load <= ADAPTER_QUEUE || load * ranks <= 2 * all)
    }

    /// Least in flight over weight; ties by the ring order of the request's id.
    fn least_in_flight(
        &self,
        fleet: &Snapshot,
        model: &ModelView,
        request: &RouteRequest<'_>,
        reason: RouteReason,
    ) -> Result<Decision, NoRoute> {
        let load = |rank: &RankView| as_f64(rank.load.in_flight()) / rank.weight();
        let _one_at_a_time = self
            .placement
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let resident = Self::prefers_resident(fleet, model, request);
        let wanted = |rank: &RankView| !resident || rank.holds(request.needs.adapter.as_deref());
        let (least, lightest) = Self::lightest(fleet, model, request, load, wanted)?;
        let rank = model
            .ring
            .first(request.request, |member| {
                let rank = &fleet.ranks[model.ranks[member]];
                Self::takes(rank, request) && wanted(rank) && load(rank) <= least
            })
            .map_or(lightest, |member| &fleet.ranks[model.ranks[member]]);
        Ok(Self::decide(rank, request, reason))
    }

    /// The eligible rank number `draw`, counted round.
    fn nth(
        fleet: &Snapshot,
        model: &ModelView,
        request: &RouteRequest<'_>,
        draw: usize,
        reason: RouteReason,
    ) -> Result<Decision, NoRoute> {
        let count = Self::eligible(fleet, model, request).count();
        if count == 0 {
            return Err(Self::why_none(fleet, model, request));
        }
        Self::eligible(fleet, model, request)
            .nth(draw % count)
            .map(|rank| Self::decide(rank, request, reason))
            .ok_or(NoRoute::NoneOpen)
    }

    fn decide(rank: &RankView, request: &RouteRequest<'_>, reason: RouteReason) -> Decision {
        Decision {
            slot: rank.slot,
            reason,
            expected_cached_tokens: 0,
            ticket: rank.load.take(request.samples),
        }
    }

    fn eligible<'f>(
        fleet: &'f Snapshot,
        model: &'f ModelView,
        request: &RouteRequest<'_>,
    ) -> impl Iterator<Item = &'f RankView> {
        model
            .ranks
            .iter()
            .map(|&i| &fleet.ranks[i])
            .filter(move |rank| Self::takes(rank, request))
    }

    fn takes(rank: &RankView, request: &RouteRequest<'_>) -> bool {
        rank.state == RankState::Open
            && !request.avoid.contains(&rank.slot)
            && request.needs.lack(rank).is_none()
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
        let drains =
            |rank: &RankView| matches!(rank.state, RankState::PinnedOnly | RankState::Drained);
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

    /// A turn of `key` was answered by the rank in `slot`, which now holds the KV
    /// of `tokens` tokens of it, made with `adapter`. Without effect when the key is
    /// pinned elsewhere.
    pub fn grown(
        &self,
        fleet: &Snapshot,
        key: PinKey,
        slot: RankSlot,
        tokens: u32,
        adapter: Option<&str>,
        now: Instant,
    ) {
        let mut shard = self.pins.shard(key);
        if let Some(pin) = shard.get_mut(key)
            && pin.slot == slot
        {
            pin.resize(tokens);
            if let Some(rank) = fleet.rank(slot) {
                pin.adapter = rank.adapter_load(adapter);
                pin.touch(now, &rank.load);
            }
            shard.changed(key);
        }
    }

    /// The trajectory is over. Returns whether it was pinned.
    pub fn finish(&self, key: PinKey) -> bool {
        self.pins.shard(key).remove(key)
    }

    /// Where `key` lives.
    pub fn pin(&self, key: PinKey, now: Instant) -> Option<PinView> {
        self.pins.shard(key).get(key).map(|pin| PinView {
            slot: pin.slot,
            tokens: pin.tokens,
            adapter: pin.adapter,
            idle: now.saturating_duration_since(pin.last_used),
            live: pin.live.is_some(),
        })
    }

    /// Pins in all.
    pub fn pins(&self) -> usize {
        self.pins.len()
    }

    /// Frees the load of trajectories that are idle. To be called every now and
    /// then.
    pub fn sweep(&self, now: Instant) {
        let ttl = self.config.pin_ttl;
        self.pins.sweep(now, ttl, HINT_TTL.max(ttl));
    }

    /// Keys whose pins were bound, have grown or are gone since they were last
    /// asked for; at most about `most`. Each is told once.
    pub fn changed_pins(&self, most: usize) -> Vec<PinKey> {
        self.pins.take_changed(most)
    }

    /// A change of this pin could not be kept: it is told again.
    pub fn pin_changed(&self, key: PinKey) {
        self.pins.shard(key).changed(key);
    }

    /// Until a key is pinned.
    pub async fn pin_bound(&self) {
        self.pins.bound().await;
    }

    /// A pin of an earlier process, idle since then for `past.idle`. Without effect
    /// where the key has one by now, or the table is full.
    pub fn restore(&self, fleet: &Snapshot, key: PinKey, past: PinView, now: Instant) {
        let Some(last_used) = now.checked_sub(past.idle) else {
            return;
        };
        let mut pin = Pin {
            slot: past.slot,
            tokens: past.tokens,
            adapter: past.adapter,
            last_used,
            live: None,
        };
        let live = past.live && past.idle < self.config.pin_ttl;
        if let Some(rank) = fleet.rank(past.slot).filter(|_| live) {
            pin.touch(last_used, &rank.load);
        }
        self.pins.restore(key, pin);
    }
}

/// Whether a pin's rank takes its key's request.
enum AtHome<'f> {
    Yes(&'f RankView),
    /// Not now, and it will again.
    Away(RouteReason),
    /// Never again.
    Gone(RouteReason),
}

/// At most the prompt less one token, which an engine always computes, in whole
/// pages.
fn expected_cached(pin_tokens: u32, prompt_tokens: u32, rank: &RankView) -> u32 {
    let tokens = pin_tokens.min(prompt_tokens.saturating_sub(1));
    tokens - tokens % rank.replica.facts.page_size.max(1)
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^52")]
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
