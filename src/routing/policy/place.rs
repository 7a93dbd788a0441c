//! The rules for what has no home: a new or moved key, a group, a request without a
//! key. Each narrows the field; the ring's order of the key, or of the request's
//! id, decides among what is left.

use std::time::Duration;

use tokio::time::Instant;

use super::{Act, Plan, Router, expected_cached};
use crate::{
    call::RouteReason,
    fleet::snapshot::RankView,
    routing::{
        config::KvAdmission,
        field::{Field, Out, as_f64},
        groups::Share,
        moves::MoveConfig,
        pins::{PinKey, Seen},
        prefix::BLOCK,
        request::{NoRoute, RouteRequest, Siblings},
    },
};

/// A rank that has the adapter in memory is preferred with up to so much on it,
/// however idle others are.
const ADAPTER_QUEUE: u64 = 4;

/// Ranks are taken for a group's sake while their load, the request's included, is
/// within this factor of the mean.
const GROUP_BOUND: f64 = 1.25;

/// A refuge is left while its load is above this many times the mean: never, where
/// one of two ranks is lost and comes back, or one of many.
const REFUGE_BOUND: f64 = 2.0;

/// And only while it is so much more, in trajectories: few are no crowd.
const REFUGE_LEAST: f64 = 8.0;

/// A detour takes the same rank again with up to so many samples in flight there,
/// or twice the mean of all.
const DETOUR_QUEUE: u64 = 4;

/// A rank is followed for a prefix with up to so many samples in flight, or twice
/// the mean of all.
const PREFIX_QUEUE: u64 = 4;

impl Router {
    /// A new key waits while no rank has room for it, or others wait before it.
    pub(super) fn admit(
        &self,
        field: &mut Field<'_>,
        request: &RouteRequest<'_>,
    ) -> Result<(), NoRoute> {
        let Some(admission) = self.config.kv_admission else {
            return Ok(());
        };
        if admission.is_over(request.hints.waited) {
            return Ok(());
        }
        let others = self.gets_in_line(request, None);
        let room = |rank: &RankView| has_room(rank, request, admission.entry());
        if others || !field.left().any(|(rank, _)| room(rank)) {
            field.pass_over(Out::KvFull, |rank, _| others || !room(rank));
            return Err(NoRoute::KvFull);
        }
        Ok(())
    }

    /// A trajectory that its home has no room for: wherever there is some its history
    /// is computed anew, as at home by the time there is room again.
    pub(super) fn room_elsewhere<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        key: PinKey,
        home: &Plan<'f>,
        admission: KvAdmission,
    ) -> Result<Plan<'f>, NoRoute> {
        let home = home.rank.slot;
        field.narrow(Out::KvFull, |rank, _| {
            rank.slot != home && has_room(rank, request, admission.entry())
        });
        self.admit(field, request)?;
        self.place(field, request, key, RouteReason::Overload)
    }

    /// The new-key rule: the least loaded rank, or the key's home while it is not
    /// overloaded. Of ranks that are as busy that one whose KV cache has the most
    /// room: trajectories differ in length, and where the long ones meet, prefixes
    /// are lost. Ties by the ring order of the key, never by index.
    pub(super) fn place<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        key: PinKey,
        reason: RouteReason,
    ) -> Result<Plan<'f>, NoRoute> {
        let rank = self
            .settle(field, request, key.0)
            .ok_or(NoRoute::NoneOpen)?;
        let grouped = request.hints.group.is_some();
        let reason = match reason {
            RouteReason::NewKey if grouped => RouteReason::Group,
            other => other,
        };
        Ok(Plan {
            grouped,
            ..Plan::cold(rank, reason, Act::Bind)
        })
    }

    /// One of a group that has no key of its own.
    pub(super) fn place_keyless<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        group: Siblings,
    ) -> Result<Plan<'f>, NoRoute> {
        prefer_resident(field, request);
        self.by_group(field, request, group);
        let rank = lightest(field, request.request).ok_or(NoRoute::NoneOpen)?;
        Ok(Plan {
            grouped: true,
            ..Plan::cold(rank, RouteReason::Group, Act::Nothing)
        })
    }

    /// Narrows the field to one rank, for a key that lives there from now on.
    fn settle<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        order: u128,
    ) -> Option<&'f RankView> {
        prefer_resident(field, request);
        let factor = self.config.load_factor;
        let shares = request.hints.group.is_some_and(|group| group.share);
        // Plain consistent hashing follows nothing but the hash.
        if factor.is_finite() {
            let share = self.config.kv_admission.map_or(1.0, |a| a.entry());
            field.narrow(Out::KvFull, |rank, _| has_room(rank, request, share));
        }
        if let Some(group) = request.hints.group
            && (shares || factor.is_finite())
        {
            self.by_group(field, request, group);
        }
        if factor > 1.0 {
            // With the new key counted, as in consistent hashing with bounded
            // loads: an idle fleet then has room everywhere.
            let bound = (factor * field.mean_with(request.samples)).max(field.least());
            field.narrow(Out::Busier, |_, seat| seat.load <= bound);
            field.first(order)
        } else {
            field.keep_least(Out::Busier, |_, seat| seat.load);
            field.keep_least(Out::Fuller, |rank, _| kv_held(rank));
            field.first(order)
        }
    }

    /// A group that shares goes where it is. Any other is spread: first to ranks
    /// that hold its prompt and are not busier than most, then to those with the
    /// fewest of it.
    fn by_group(&self, field: &mut Field<'_>, request: &RouteRequest<'_>, group: Siblings) {
        let shares = self.groups.shares(group.key);
        let of = |rank: &RankView| shares.iter().find(|s| s.slot == rank.slot);
        let siblings = |share: Option<&Share>| share.map_or(0, |s| s.siblings);
        if group.share {
            let most = field.left().map(|(rank, _)| siblings(of(rank))).max();
            field.narrow(Out::Group, |rank, _| Some(siblings(of(rank))) == most);
            return;
        }
        let bound = GROUP_BOUND * field.mean_with(request.samples);
        let within = |rank: &RankView, count: u64| {
            as_f64(count + u64::from(request.samples)) / rank.weight() <= bound
        };
        let holds = field.narrow(Out::NoGroupPrompt, |rank, seat| {
            of(rank).is_some_and(|s| s.holds) && within(rank, seat.count)
        });
        if !holds {
            let bound = bound.max(field.least());
            field.narrow(Out::Busier, |_, seat| seat.load <= bound);
        }
        field.keep_least(Out::Group, |rank, _| f64::from(siblings(of(rank))));
    }

    /// A rank where the queue is shorter than at home by more than computing the
    /// history anew costs, if there is one and the budget allows it.
    #[expect(clippy::too_many_arguments, reason = "all that a move depends on")]
    pub(super) fn better_place<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        key: PinKey,
        stay: &Plan<'f>,
        moves: MoveConfig,
        wait: Duration,
        now: Instant,
    ) -> Option<Plan<'f>> {
        let cost = moves.cost.of(stay.expected).saturating_add(moves.margin);
        let longest = wait.saturating_sub(cost);
        let home = stay.rank.slot;
        let gains = field.narrow(Out::NoGain, |rank, _| {
            rank.slot != home && rank.load.queue().length() < longest
        });
        if !gains || !self.budget.allows(moves.per_minute, now, false) {
            field.only(home, Out::NoGain);
            return None;
        }
        let rank = self.settle(field, request, key.0)?;
        Some(Plan::cold(rank, RouteReason::Overload, Act::Move))
    }

    /// For a trajectory whose rank was lost, while its refuge carries much more than
    /// most: where whole fleets restart, the first rank that is back takes in
    /// everybody, and the others come back to nothing. It goes on, once, to where the
    /// new-key rule sends it among those below the mean.
    pub(super) fn leave_refuge<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        key: PinKey,
        stay: &Plan<'f>,
    ) -> Option<Plan<'f>> {
        let (home, mean) = (stay.rank.slot, field.mean_with(request.samples));
        let crowded = field.left().any(|(rank, seat)| {
            let more = (seat.load - mean) * rank.weight();
            rank.slot == home && seat.load > REFUGE_BOUND * mean && more > REFUGE_LEAST
        });
        let better = crowded
            && field.narrow(Out::NoGain, |rank, seat| {
                rank.slot != home && seat.load < mean
            });
        if !better {
            field.only(home, Out::NoGain);
            return None;
        }
        let rank = self.settle(field, request, key.0)?;
        Some(Plan::cold(rank, RouteReason::Overload, Act::Bind))
    }

    /// The rank that has seen the longest beginning of the prompt, where that is
    /// half of it or more and the rank is not much busier than most; else the
    /// least in flight.
    pub(super) fn by_prefix<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
    ) -> Result<Plan<'f>, NoRoute> {
        let twice = 2.0 * field.mean_with(request.samples);
        let follows = |rank: &RankView, count: u64| {
            count <= PREFIX_QUEUE || as_f64(count) / rank.weight() <= twice
        };
        let found = self.prefixes.longest(request.hints.blocks, |slot| {
            let mut left = field.left();
            left.any(|(rank, seat)| rank.slot == slot && follows(rank, seat.count))
        });
        let Some((slot, length)) = found else {
            return self.least_in_flight(field, request, RouteReason::NoKey);
        };
        let tokens = length.saturating_mul(BLOCK);
        if tokens < request.prompt_tokens.div_ceil(2) {
            return self.least_in_flight(field, request, RouteReason::NoKey);
        }
        field.only(slot, Out::Prefix);
        let rank = field.first(request.request).ok_or(NoRoute::NoneOpen)?;
        Ok(Plan {
            expected: expected_cached(tokens, request.prompt_tokens, rank),
            ..Plan::cold(rank, RouteReason::Prefix, Act::Nothing)
        })
    }

    /// For a key whose home does not take it now: the first in the ring's order of
    /// the key that is not much busier than others, so that the turns of one detour
    /// meet on one rank and only the first of them is cold.
    pub(super) fn detour<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        key: PinKey,
        reason: RouteReason,
    ) -> Result<Plan<'f>, NoRoute> {
        prefer_resident(field, request);
        let twice = (2.0 * field.mean_with(request.samples)).max(field.least());
        field.narrow(Out::Busier, |_, seat| {
            seat.count <= DETOUR_QUEUE || seat.load <= twice
        });
        let rank = field.first(key.0).ok_or(NoRoute::NoneOpen)?;
        Ok(Plan::cold(rank, reason, Act::Nothing))
    }

    /// Least in flight over weight; ties by the ring order of the request's id.
    pub(super) fn least_in_flight<'f>(
        &self,
        field: &mut Field<'f>,
        request: &RouteRequest<'_>,
        reason: RouteReason,
    ) -> Result<Plan<'f>, NoRoute> {
        prefer_resident(field, request);
        let rank = lightest(field, request.request).ok_or(NoRoute::NoneOpen)?;
        Ok(Plan::cold(rank, reason, Act::Nothing))
    }
}

/// The least loaded of those that are in.
fn lightest<'f>(field: &mut Field<'f>, order: u128) -> Option<&'f RankView> {
    field.keep_least(Out::Busier, |_, seat| seat.load);
    field.first(order)
}

/// The share of its KV cache that the contexts of living trajectories take; above 1
/// where they do not fit.
fn kv_held(rank: &RankView) -> f64 {
    as_f64(rank.load.live_tokens()) / as_f64(rank.facts.kv_capacity)
}

/// Only ranks that have the request's adapter in memory are looked at, where one of
/// them is not so much busier than the others that loading the adapter there as
/// well costs less than the queue.
fn prefer_resident(field: &mut Field<'_>, request: &RouteRequest<'_>) {
    let Some(adapter) = request.needs.adapter.as_deref() else {
        return;
    };
    let resident = |rank: &RankView| rank.holds(Some(adapter));
    let there = field.left().filter(|(rank, _)| resident(rank));
    let Some(lightest) = there.map(|(_, seat)| seat.count).min() else {
        return;
    };
    let (all, ranks) = field.total();
    let all = all + u64::from(request.samples);
    if lightest <= ADAPTER_QUEUE || lightest * ranks <= 2 * all {
        field.narrow(Out::NoAdapter, |rank, _| resident(rank));
    }
}

/// Whether the rank keeps a trajectory that lives there, or has room again for one
/// that was idle or waited. While the contexts outgrow the cache, those below the
/// mean leave one after the other, each at a turn of its own: they are computed
/// again soonest.
pub(super) fn keeps(
    rank: &RankView,
    request: &RouteRequest<'_>,
    pin: Seen,
    admission: &KvAdmission,
) -> bool {
    let share = if pin.live {
        admission.share
    } else {
        admission.entry()
    };
    let load = &rank.load;
    let mine = if pin.live { pin.at.counted } else { 0 };
    let others = load.live_tokens().saturating_sub(u64::from(mine));
    let wanted = u64::from(request.prompt_tokens.max(pin.at.tokens));
    let fits = as_f64(others + wanted) <= share * as_f64(rank.facts.kv_capacity);
    fits || others == 0 || (pin.live && wanted * load.live_pins() > others + wanted)
}

/// Whether the contexts that live there, with this one, fit into so much of the KV
/// cache. A rank where nothing lives takes whatever comes.
fn has_room(rank: &RankView, request: &RouteRequest<'_>, share: f64) -> bool {
    let held = rank.load.live_tokens() + u64::from(request.prompt_tokens);
    rank.load.live_pins() == 0 || as_f64(held) <= share * as_f64(rank.facts.kv_capacity)
}
