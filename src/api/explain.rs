//! `ExplainRoute`: the question that a request would ask the router, asked without
//! effect.

use tokio::time::Instant;

use super::write;
use crate::{
    call::SampleCall,
    error::{Error, Reason},
    proto,
    routing::{Candidate, Outcome},
    stack::{Parts, affinity::no_route, asked::Asked, resolve, validate::ValidCall},
};

/// What would become of this call.
///
/// # Errors
/// As for the request itself: INVALID_REQUEST, and what is wrong with it for this
/// fleet or beyond this server's limits. That no rank can do it now is an answer.
pub(super) fn explain(
    parts: &Parts,
    call: SampleCall,
) -> Result<proto::ExplainRouteResponse, Error> {
    let call = ValidCall::check(call)?;
    let fleet = parts.fleet.snapshot();
    let needs = match resolve::resolve(&fleet, call.call()) {
        // Each rank's sentence says what it lacks.
        Err(error)
            if matches!(
                error.reason,
                Reason::NotSupported | Reason::WeightsNotServed
            ) =>
        {
            resolve::wanted(&fleet, call.call())?
        }
        resolved => resolved?,
    };
    parts.admission.may_ever_enter(call.params())?;
    let asked = Asked::new(call.call(), &needs, &parts.router);
    let samples = call.params().num_samples;
    let request = asked.request(samples, &[], None);
    let explanation = parts.router.explain(&fleet, &request, Instant::now());
    let (route, none) = match explanation.outcome {
        Ok(outcome) => (Some(route(&outcome)), None),
        Err(none) => (None, Some(no_route(none))),
    };
    let why = none.as_ref();
    Ok(proto::ExplainRouteResponse {
        route,
        candidates: explanation.candidates.into_iter().map(candidate).collect(),
        no_route: why.map(ToString::to_string).unwrap_or_default(),
        no_route_reason: why.map(|e| e.reason.name().to_owned()).unwrap_or_default(),
    })
}

fn route(outcome: &Outcome) -> proto::Route {
    proto::Route {
        replica_id: outcome.target.replica.as_str().to_owned(),
        incarnation: outcome.target.incarnation.0,
        rank: outcome.target.rank,
        reason: write::route_reason(outcome.reason).into(),
        expected_cached_tokens: outcome.expected_cached_tokens.into(),
        ..proto::Route::default()
    }
}

fn candidate(candidate: Candidate) -> proto::Candidate {
    proto::Candidate {
        replica_id: candidate.target.replica.as_str().to_owned(),
        incarnation: candidate.target.incarnation.0,
        rank: candidate.target.rank,
        chosen: candidate.chosen,
        why: candidate.why,
        live_pins: candidate.live_pins,
        in_flight: candidate.in_flight,
        load: candidate.load,
        kv_live_tokens: candidate.live_tokens,
        kv_capacity_tokens: candidate.kv_capacity,
        eligible: candidate.eligible,
    }
}
