//! A decision that is shown and not carried out. It is planned by the code that
//! serves, and each rank's sentence is what that code passed it over for.

use tokio::time::Instant;

use super::{
    field::{Field, Measure, Out, Seat},
    policy::{Plan, Router, model, pinning},
    request::{NoRoute, RouteRequest},
};
use crate::{
    call::RouteReason,
    fleet::snapshot::{RankView, Snapshot},
    ids::Target,
};

/// What a request would come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Where it would go, or why nowhere.
    pub outcome: Result<Outcome, NoRoute>,
    /// Every rank of the model, in order of replica and rank.
    pub candidates: Vec<Candidate>,
}

/// Where a request would go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The rank.
    pub target: Target,
    /// Why.
    pub reason: RouteReason,
    /// Cached tokens that may be expected there.
    pub expected_cached_tokens: u32,
    /// See [`Decision`](super::Decision).
    pub last_resort: bool,
}

/// A rank as the decision saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub target: Target,
    /// It would be taken.
    pub chosen: bool,
    /// It could serve this and takes new requests.
    pub eligible: bool,
    /// In one sentence, why it was chosen or passed over.
    pub why: String,
    /// Trajectories that live there.
    pub live_pins: u64,
    /// Samples sent and not yet answered.
    pub in_flight: u64,
    /// What was compared: load by the rule's measure over weight.
    pub load: f64,
    /// Tokens of the trajectories that live there.
    pub live_tokens: u64,
    /// Tokens that fit.
    pub kv_capacity: u64,
}

impl Router {
    /// What [`route`](Self::route) would decide now. Nothing changes.
    pub fn explain(
        &self,
        fleet: &Snapshot,
        request: &RouteRequest<'_>,
        now: Instant,
    ) -> Explanation {
        let model = match model(fleet, request) {
            Ok(model) => model,
            Err(none) => {
                return Explanation {
                    outcome: Err(none),
                    candidates: Vec::new(),
                };
            }
        };
        let pinned = self.pinned(pinning(request));
        let mut field = None;
        let plan = self.plan(fleet, model, request, pinned, now, &mut field);
        let field = field.unwrap_or_else(|| {
            // A pinned key: nobody else was looked at.
            let mut field = Field::survey(fleet, model, request, Measure::Live);
            if let Ok(plan) = &plan {
                field.only(plan.rank.slot, Out::Pinned);
            }
            field
        });
        let candidates = field
            .seats()
            .map(|(rank, seat)| candidate(rank, seat, request, plan.as_ref().ok()))
            .collect();
        Explanation {
            outcome: plan.map(|plan| Outcome {
                target: plan.rank.target.clone(),
                reason: plan.reason,
                expected_cached_tokens: plan.expected,
                last_resort: plan.rank.state.is_last_resort(),
            }),
            candidates,
        }
    }
}

fn candidate(
    rank: &RankView,
    seat: Seat,
    request: &RouteRequest<'_>,
    plan: Option<&Plan<'_>>,
) -> Candidate {
    let chosen = plan.filter(|plan| plan.rank.slot == rank.slot);
    Candidate {
        target: rank.target.clone(),
        chosen: chosen.is_some(),
        eligible: !matches!(
            seat.out,
            Some(Out::State | Out::Suspect | Out::Avoided | Out::Lacks)
        ),
        why: match (chosen, seat.out) {
            (Some(plan), _) if rank.state.is_last_resort() => {
                format!("{}; {LAST_RESORT}", taken(plan.reason))
            }
            (Some(plan), _) => taken(plan.reason).to_owned(),
            (None, Some(out)) => passed_over(out, rank, request, plan),
            (None, None) => "it could be taken".to_owned(),
        },
        live_pins: rank.load.live_pins(),
        in_flight: rank.load.in_flight(),
        load: seat.load,
        live_tokens: rank.load.live_tokens(),
        kv_capacity: rank.facts.kv_capacity,
    }
}

/// Why one is taken of whom nobody has heard for a while.
const LAST_RESORT: &str = "heartbeats are missing here, and no rank that could serve this is open";

fn taken(reason: RouteReason) -> &'static str {
    match reason {
        RouteReason::Pinned => "the key lives here",
        RouteReason::NewKey => {
            "least loaded for a new key, then most KV free, then first in the key's order"
        }
        RouteReason::NoKey => "least in flight, first in the order of the request's id",
        RouteReason::ReplicaLost => {
            "the key's rank is gone; least loaded, first in the key's order"
        }
        RouteReason::Draining => "the key's rank drains; least loaded, first in the key's order",
        RouteReason::Overload => "so much less load here that the move pays",
        RouteReason::Weights => "the key's rank serves other weights; least in flight meanwhile",
        RouteReason::Detour => "the key's rank cannot take this now; least in flight meanwhile",
        RouteReason::Random => "drawn by the request's id",
        RouteReason::RoundRobin => "the next in turn",
        RouteReason::LeastLoaded => "least in flight",
        RouteReason::Group => "placed by the group's rule",
        RouteReason::Prefix => "the longest beginning of the prompt was seen here",
    }
}

fn passed_over(
    out: Out,
    rank: &RankView,
    request: &RouteRequest<'_>,
    plan: Option<&Plan<'_>>,
) -> String {
    let text = match out {
        Out::Lacks => {
            let lacks = request.needs.lacks(rank);
            let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
            return lacks.join("; ");
        }
        Out::State | Out::Suspect => rank.state.text(),
        Out::Avoided => "the request has just failed here",
        Out::NoAdapter => "the adapter is not in memory here, and is elsewhere",
        Out::KvFull => {
            return format!(
                "{} tokens of {} are taken by live trajectories: this one would not fit",
                rank.load.live_tokens(),
                rank.facts.kv_capacity
            );
        }
        Out::Busier => "more load than on others",
        Out::Fuller => "as busy as others, and more of its KV cache is taken",
        Out::NoGroupPrompt => "others hold the group's prompt",
        Out::Group => "others fit the group's rule better",
        Out::NoGain => "moving here would not pay, or the budget of moves is spent",
        Out::Prefix => "a longer beginning of the prompt was seen elsewhere",
        Out::Order if plan.is_some_and(|p| p.reason == RouteReason::RoundRobin) => "not its turn",
        Out::Order if plan.is_some_and(|p| p.reason == RouteReason::Random) => "not drawn",
        Out::Order => "as good, and later in order",
        Out::Pinned => "the key lives elsewhere",
    };
    text.to_owned()
}
