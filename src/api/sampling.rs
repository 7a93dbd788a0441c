//! `SamplingService`.

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status};
use tower_http::request_id::RequestId;
use tracing::{Instrument, info, info_span};

use super::{
    explain, lookup,
    read::{self, Context},
    stream::{self, EventStream, Form},
    write,
};
use crate::{
    error::{Error, Reason},
    ids::{AffinityKey, Tenant},
    proto::{self, sampling_service_server::SamplingService},
    routing::PinKey,
    stack::{self, Parts, Stack, deadline::CallerDeadline, follow::Follower, generation::Finished},
};

/// A stream is silent for at most so long: proxies cut calls that are silent for
/// longer, the strictest after some 15 s.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

/// Characters of a request id that are kept.
const MAX_REQUEST_ID: usize = 256;

/// The service.
pub struct Sampling {
    stack: Stack,
    parts: Parts,
}

impl Sampling {
    /// Over this stack.
    pub fn new(stack: Stack, parts: Parts) -> Self {
        Self { stack, parts }
    }

    async fn sample(&self, call: crate::call::SampleCall) -> Result<Finished, Error> {
        let ticket = stack::open(&self.stack, call).await?;
        ticket.finished().await
    }
}

fn context<T>(request: &Request<T>) -> Context {
    let extensions = request.extensions();
    // A client may bring the id; one that would not stand well in a log line is
    // cut down to what does.
    let request_id: String = extensions
        .get::<RequestId>()
        .and_then(|id| id.header_value().to_str().ok())
        .unwrap_or_default()
        .chars()
        .filter(char::is_ascii_graphic)
        .take(MAX_REQUEST_ID)
        .collect();
    Context {
        tenant: Tenant::default(),
        request_id: Arc::from(request_id),
        deadline: extensions.get::<CallerDeadline>().map(|d| d.0),
    }
}

/// The line that tells what became of a request: ids, counts and reasons, never
/// a prompt, a completion or a key.
pub(super) fn log(outcome: Result<&Finished, &Error>) {
    match outcome {
        Ok(finished) => {
            let samples = &finished.completion.samples;
            let route = samples.first().map(|s| &s.route);
            info!(
                samples = samples.len(),
                prompt_tokens = samples.first().map_or(0, |s| s.usage.prompt_tokens),
                cached_tokens = samples.first().map_or(0, |s| s.usage.cached_tokens),
                completion_tokens = samples.iter().map(|s| s.usage.completion_tokens).sum::<u32>(),
                target = ?route.map(|r| &r.target),
                reason = ?route.map(|r| r.reason),
                attempts = samples.iter().map(|s| s.route.attempts.len()).sum::<usize>(),
                replayed = finished.replayed,
                "sampled"
            );
        }
        Err(error) => info!(reason = error.reason.name(), message = %error, "refused"),
    }
}

#[tonic::async_trait]
impl SamplingService for Sampling {
    async fn sample(
        &self,
        request: Request<proto::SampleRequest>,
    ) -> Result<Response<proto::SampleResponse>, Status> {
        let context = context(&request);
        let request_id = Arc::clone(&context.request_id);
        let span = info_span!("sample", %request_id);
        let call = read::call(request.into_inner(), context);
        let (packed, keyed) = (call.params.packed_output, call.idempotency_key.is_some());
        async {
            let outcome = self.sample(call).await;
            log(outcome.as_ref());
            Ok(Response::new(write::response(
                &outcome?,
                packed,
                keyed,
                &request_id,
            )))
        }
        .instrument(span)
        .await
    }

    type SampleStreamStream = EventStream;

    async fn sample_stream(
        &self,
        request: Request<proto::SampleRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let context = context(&request);
        let request_id = Arc::clone(&context.request_id);
        let span = info_span!("sample_stream", %request_id);
        let call = read::call(request.into_inner(), context);
        let form = Form {
            packed: call.params.packed_output,
            keyed: call.idempotency_key.is_some(),
            request_id,
        };
        let opened = stack::open(&self.stack, call).instrument(span).await;
        let ticket = opened.inspect_err(|error| log(Err(error)))?;
        let follower = Follower::new(ticket, SIGN_OF_LIFE);
        Ok(Response::new(stream::events(follower, form)))
    }

    async fn get_sample(
        &self,
        request: Request<proto::GetSampleRequest>,
    ) -> Result<Response<proto::GetSampleResponse>, Status> {
        let Context {
            tenant, request_id, ..
        } = context(&request);
        let message = request.into_inner();
        let named = lookup::named(&self.parts, &tenant, message.idempotency_key)?;
        let response =
            lookup::get(&self.parts, named, message.output_encoding, &request_id).await?;
        Ok(Response::new(response))
    }

    async fn cancel_sample(
        &self,
        request: Request<proto::CancelSampleRequest>,
    ) -> Result<Response<proto::CancelSampleResponse>, Status> {
        let tenant = context(&request).tenant;
        let key = request.into_inner().idempotency_key;
        let named = lookup::named(&self.parts, &tenant, key)?;
        Ok(Response::new(lookup::cancel(&self.parts, named).await?))
    }

    async fn finish_trajectory(
        &self,
        request: Request<proto::FinishTrajectoryRequest>,
    ) -> Result<Response<proto::FinishTrajectoryResponse>, Status> {
        let tenant = context(&request).tenant;
        let key = trajectory(
            &self.parts,
            &tenant,
            request.get_ref().model.as_deref(),
            request.get_ref().adapter.as_deref(),
            &request.get_ref().cache_affinity_key,
        )?;
        Ok(Response::new(proto::FinishTrajectoryResponse {
            unpinned: self.parts.router.finish(key),
        }))
    }

    async fn explain_route(
        &self,
        request: Request<proto::ExplainRouteRequest>,
    ) -> Result<Response<proto::ExplainRouteResponse>, Status> {
        let context = context(&request);
        let request = request.into_inner().request.unwrap_or_default();
        let call = read::call(request, context);
        Ok(Response::new(explain::explain(&self.parts, call)?))
    }
}

/// The pin that an operator or trainer names.
pub(super) fn trajectory(
    parts: &Parts,
    tenant: &Tenant,
    model: Option<&str>,
    adapter: Option<&str>,
    key: &str,
) -> Result<PinKey, Error> {
    let names = [
        ("cache_affinity_key", Some(key)),
        ("model", model),
        ("adapter", adapter),
    ];
    let violations = stack::validate::names(&names);
    if !violations.is_empty() {
        return Err(Error::invalid(Reason::InvalidRequest, violations));
    }
    let model = stack::resolve::model(&parts.fleet.snapshot(), model)?;
    Ok(PinKey::new(tenant, &model, adapter, &AffinityKey::new(key)))
}
