//! The ranks of one model as one decision sees them: each judged once, its load
//! read once, and what it was passed over for written beside it. A decision narrows
//! the field, step by step, to those among which the ring's order decides; what is
//! left beside each rank is the explanation.

use std::sync::Arc;

use super::request::RouteRequest;
use crate::fleet::snapshot::{ModelView, RankSlot, RankState, RankView, Snapshot};

/// Why a rank was passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Out {
    /// It takes no such requests now.
    State,
    /// Its heartbeats are missing, and others take requests.
    Suspect,
    /// This request has just failed there.
    Avoided,
    /// It cannot serve this.
    Lacks,
    /// Others have the adapter in memory.
    NoAdapter,
    /// With this one, its KV cache would be overcommitted.
    KvFull,
    /// Others have less load.
    Busier,
    /// Others are as busy, and more of their KV cache is free.
    Fuller,
    /// The group's prompt is in the cache of others.
    NoGroupPrompt,
    /// Others have fewer of the group, or all of it.
    Group,
    /// Moving there would not pay.
    NoGain,
    /// Longer prefixes were seen elsewhere.
    Prefix,
    /// As good, and later in the key's order.
    Order,
    /// The key lives elsewhere.
    Pinned,
}

/// What counts as load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// Live pins and samples in flight.
    Live,
    /// Samples in flight.
    InFlight,
}

impl Measure {
    fn of(self, rank: &RankView) -> u64 {
        match self {
            Self::Live => rank.load.live_pins() + rank.load.in_flight(),
            Self::InFlight => rank.load.in_flight(),
        }
    }
}

/// One rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    /// By the measure, as it was read.
    pub(super) count: u64,
    /// Over the rank's weight.
    pub(super) load: f64,
    /// `None`: it is in.
    pub(super) out: Option<Out>,
}

/// All of them, in the order of the model's ranks.
pub(super) struct Field<'f> {
    fleet: &'f Snapshot,
    model: &'f ModelView,
    seats: Vec<Seat>,
    /// Of the eligible ones.
    count: u64,
    weight: f64,
    eligible: u64,
    /// Nobody takes requests, so that those are in that only lack heartbeats.
    last_resort: bool,
}

impl<'f> Field<'f> {
    /// Judges every rank of the model for this request.
    pub(super) fn survey(
        fleet: &'f Snapshot,
        model: &'f ModelView,
        request: &RouteRequest<'_>,
        measure: Measure,
    ) -> Self {
        let mut field = Self {
            fleet,
            model,
            seats: Vec::with_capacity(model.ranks.len()),
            count: 0,
            weight: 0.0,
            eligible: 0,
            last_resort: false,
        };
        let mut judged = None;
        let mut suspects = false;
        for &index in &model.ranks {
            let rank = &fleet.ranks[index];
            // Ranks of one replica follow each other and can the same.
            let able = match judged {
                Some((replica, able)) if replica == Arc::as_ptr(&rank.replica) => able,
                _ => {
                    let able = request.needs.permanent_lack(rank).is_none();
                    judged = Some((Arc::as_ptr(&rank.replica), able));
                    able
                }
            };
            let out = if !able || !request.needs.admits_weights(rank) {
                Some(Out::Lacks)
            } else if rank.state.is_last_resort() && !request.avoid.contains(&rank.slot) {
                suspects = true;
                Some(Out::Suspect)
            } else if rank.state != RankState::Open && !rank.state.is_last_resort() {
                Some(Out::State)
            } else if request.avoid.contains(&rank.slot) {
                Some(Out::Avoided)
            } else {
                None
            };
            let count = measure.of(rank);
            if out.is_none() {
                field.let_in(rank, count);
            }
            field.seats.push(Seat {
                count,
                load: as_f64(count) / rank.weight(),
                out,
            });
        }
        if suspects && field.eligible == 0 {
            field.turn_to_suspects();
        }
        field
    }

    fn let_in(&mut self, rank: &RankView, count: u64) {
        self.count += count;
        self.weight += rank.weight();
        self.eligible += 1;
    }

    /// Better somebody of whom nobody has heard for a while than nobody.
    fn turn_to_suspects(&mut self) {
        self.last_resort = true;
        for member in 0..self.seats.len() {
            let rank = self.rank(member);
            if let Some(seat) = self.seats.get_mut(member)
                && seat.out == Some(Out::Suspect)
            {
                seat.out = None;
                let count = seat.count;
                self.let_in(rank, count);
            }
        }
    }

    /// Those that are in are so for want of anybody better.
    pub(super) fn is_last_resort(&self) -> bool {
        self.last_resort
    }

    pub(super) fn rank(&self, member: usize) -> &'f RankView {
        &self.fleet.ranks[self.model.ranks[member]]
    }

    /// Every rank with what became of it.
    pub(super) fn seats(&self) -> impl Iterator<Item = (&'f RankView, Seat)> {
        let ranks = self.model.ranks.iter().map(|&i| &self.fleet.ranks[i]);
        ranks.zip(self.seats.iter().copied())
    }

    /// Those that are still in.
    pub(super) fn left(&self) -> impl Iterator<Item = (&'f RankView, Seat)> {
        self.seats().filter(|(_, seat)| seat.out.is_none())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left().next().is_none()
    }

    /// Load of the eligible ranks, with `samples` more, over all their weights.
    pub(super) fn mean_with(&self, samples: u32) -> f64 {
        as_f64(self.count + u64::from(samples)) / self.weight
    }

    /// What the eligible ranks carry together, and how many they are.
    pub(super) fn total(&self) -> (u64, u64) {
        (self.count, self.eligible)
    }

    /// The least load of those that are in.
    pub(super) fn least(&self) -> f64 {
        let loads = self.left().map(|(_, seat)| seat.load);
        loads.fold(f64::INFINITY, f64::min)
    }

    /// Passes over those that `keep` does not want, unless nobody would be left.
    /// Returns whether anybody is wanted.
    pub(super) fn narrow(&mut self, why: Out, keep: impl Fn(&RankView, Seat) -> bool) -> bool {
        if !self.left().any(|(rank, seat)| keep(rank, seat)) {
            return false;
        }
        self.pass_over(why, |rank, seat| !keep(rank, seat));
        true
    }

    /// Passes over all but those of which `measure` gives the least; it is asked once
    /// for each that is in, since loads change meanwhile.
    pub(super) fn keep_least(&mut self, why: Out, measure: impl Fn(&RankView, Seat) -> f64) {
        let is_in = |seat: &Seat| seat.out.is_none();
        let measures: Vec<f64> = self
            .seats()
            .map(|(rank, seat)| {
                if is_in(&seat) {
                    measure(rank, seat)
                } else {
                    f64::INFINITY
                }
            })
            .collect();
        let least = measures.iter().copied().fold(f64::INFINITY, f64::min);
        for (seat, measure) in self.seats.iter_mut().zip(measures) {
            if is_in(seat) && measure > least {
                seat.out = Some(why);
            }
        }
    }

    /// Passes over those that `which` names, whoever is left.
    pub(super) fn pass_over(&mut self, why: Out, which: impl Fn(&RankView, Seat) -> bool) {
        for (seat, &index) in self.seats.iter_mut().zip(&self.model.ranks) {
            if seat.out.is_none() && which(&self.fleet.ranks[index], *seat) {
                seat.out = Some(why);
            }
        }
    }

    /// Of those that are in the first in the key's order; the others are passed
    /// over for it.
    pub(super) fn first(&mut self, key: u128) -> Option<&'f RankView> {
        let mut left = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, s)| s.out.is_none());
        let member = match (left.next(), left.next()) {
            (None, _) => return None,
            // The ring has nothing to decide.
            (Some((only, _)), None) => only,
            _ => {
                let ring = &self.model.ring;
                ring.first(key, |member| self.seats[member].out.is_none())?
            }
        };
        self.take(member)
    }

    /// Of those that are in number `draw`, counted round; likewise.
    pub(super) fn nth(&mut self, draw: usize) -> Option<&'f RankView> {
        let left = self.seats.iter().filter(|s| s.out.is_none()).count();
        let mut members = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, s)| s.out.is_none());
        let member = members.nth(draw.checked_rem(left)?)?.0;
        self.take(member)
    }

    fn take(&mut self, member: usize) -> Option<&'f RankView> {
        let chosen = self.rank(member);
        self.only(chosen.slot, Out::Order);
        Some(chosen)
    }

    /// Nobody else is in.
    pub(super) fn only(&mut self, slot: RankSlot, why: Out) {
        self.pass_over(why, |rank, _| rank.slot != slot);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^52")]
pub(super) fn as_f64(count: u64) -> f64 {
    count as f64
}
