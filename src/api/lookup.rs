//! What is known under an idempotency key: `GetSample` and `CancelSample`.

use std::sync::Arc;

use super::{read, write};
use crate::{
    error::{Error, Reason},
    ids::{IdempotencyKey, Tenant},
    proto,
    stack::{
        Parts,
        generation::{Finished, Generation, Outcome},
        validate,
    },
    store::{Claim, KeyHash},
};

/// A key as a request names it.
pub(super) struct Named {
    hash: KeyHash,
    running: Option<Arc<Generation>>,
}

pub(super) fn named(parts: &Parts, tenant: &Tenant, key: String) -> Result<Named, Error> {
    let faults = validate::idempotency_key_faults(&key);
    if !faults.is_empty() {
        return Err(Error::invalid(Reason::InvalidRequest, faults));
    }
    let hash = KeyHash::of(tenant, &IdempotencyKey::new(key));
    let running = parts.running.get(&hash);
    Ok(Named { hash, running })
}

fn unknown() -> Error {
    Error::new(
        Reason::KeyNotFound,
        "nothing is known under this idempotency key: it was never used, or its result has \
         expired",
    )
}

pub(super) async fn get(
    parts: &Parts,
    named: Named,
    encoding: i32,
    request_id: &str,
) -> Result<proto::GetSampleResponse, Error> {
    let mut faults = Vec::new();
    let packed = read::packed_output(encoding, &mut faults);
    if !faults.is_empty() {
        return Err(Error::invalid(Reason::InvalidRequest, faults));
    }
    let ended = named.running.as_ref().and_then(|g| g.outcome());
    if let (Some(generation), None) = (&named.running, &ended) {
        let (samples_done, num_samples) = generation.count();
        return Ok(proto::GetSampleResponse {
            state: proto::GenerationState::Running.into(),
            samples_done,
            num_samples,
            ..proto::GetSampleResponse::default()
        });
    }
    let outcome: Outcome = match parts.store.read(named.hash).await? {
        None | Some(Claim::Mismatch) => return Err(unknown()),
        Some(Claim::Done(completion)) => Ok(Finished {
            completion,
            replayed: true,
            stored: true,
        }),
        Some(Claim::Failed(error)) => Err(error),
        Some(Claim::DataLoss) => {
            return Err(Error::new(
                Reason::DataLoss,
                "the result stored under this idempotency key is damaged",
            ));
        }
        Some(Claim::Running { .. }) => {
            return Ok(proto::GetSampleResponse {
                state: proto::GenerationState::Running.into(),
                ..proto::GetSampleResponse::default()
            });
        }
        Some(Claim::Claimed(progress)) => {
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            return Ok(proto::GetSampleResponse {
                state: proto::GenerationState::Interrupted.into(),
                samples_done: count(progress.finished.len()),
                num_samples: count(progress.last_attempts.len()),
                ..proto::GetSampleResponse::default()
            });
        }
    };
    Ok(match outcome {
        Ok(finished) => {
            let response = write::response(&finished, packed, true, request_id);
            let count = u32::try_from(response.samples.len()).unwrap_or(u32::MAX);
            proto::GetSampleResponse {
                state: proto::GenerationState::Done.into(),
                samples_done: count,
                num_samples: count,
                response: Some(response),
                ..proto::GetSampleResponse::default()
            }
        }
        Err(error) => proto::GetSampleResponse {
            state: proto::GenerationState::Failed.into(),
            failure_reason: error.reason.name().to_owned(),
            failure_message: error.message,
            ..proto::GetSampleResponse::default()
        },
    })
}

pub(super) async fn cancel(
    parts: &Parts,
    named: Named,
) -> Result<proto::CancelSampleResponse, Error> {
    if let Some(generation) = &named.running
        && generation.outcome().is_none()
    {
        let attempts_aborted = generation.attempts_running();
        generation.cancel(Error::new(
            Reason::Cancelled,
            "CancelSample was called for this idempotency key",
        ));
        // Told to the engines before this answers.
        drop(generation.ended().await);
        return Ok(proto::CancelSampleResponse {
            state: proto::GenerationState::Running.into(),
            attempts_aborted,
        });
    }
    let state = match parts.store.read(named.hash).await? {
        None | Some(Claim::Mismatch) => return Err(unknown()),
        Some(Claim::Done(_)) => proto::GenerationState::Done,
        Some(Claim::Failed(_) | Claim::DataLoss) => proto::GenerationState::Failed,
        Some(Claim::Running { .. }) => proto::GenerationState::Running,
        Some(Claim::Claimed(_)) => proto::GenerationState::Interrupted,
    };
    Ok(proto::CancelSampleResponse {
        state: state.into(),
        attempts_aborted: 0,
    })
}
