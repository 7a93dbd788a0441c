//! `SamplingService`.

use std::{pin::Pin, sync::Arc};

use futures_util::Stream;
use tonic::{Request, Response, Status};
use tower_http::request_id::RequestId;
use tracing::{Instrument, info, info_span};

use super::{
    read::{self, Context},
    write,
};
use crate::{
    error::{Error, Reason},
    ids::{AffinityKey, Tenant},
    proto::{self, sampling_service_server::SamplingService},
    routing::PinKey,
    stack::{self, Parts, Stack, deadline::CallerDeadline, generation::Finished},
};

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
    let request_id = extensions
        .get::<RequestId>()
        .and_then(|id| id.header_value().to_str().ok())
        .unwrap_or_default();
    Context {
        tenant: Tenant::default(),
        request_id: Arc::from(request_id),
        deadline: extensions.get::<CallerDeadline>().map(|d| d.0),
    }
}

/// The line that tells what became of a request: ids, counts and reasons, never
/// a prompt, a completion or a key.
fn log(outcome: &Result<Finished, Error>) {
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

type EventStream = Pin<Box<dyn Stream<Item = Result<proto::SampleStreamResponse, Status>> + Send>>;

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
            log(&outcome);
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
        _request: Request<proto::SampleRequest>,
    ) -> Result<Response<EventStream>, Status> {
        Err(not_yet("SampleStream"))
    }

    async fn get_sample(
        &self,
        _request: Request<proto::GetSampleRequest>,
    ) -> Result<Response<proto::GetSampleResponse>, Status> {
        Err(not_yet("GetSample"))
    }

    async fn cancel_sample(
        &self,
        _request: Request<proto::CancelSampleRequest>,
    ) -> Result<Response<proto::CancelSampleResponse>, Status> {
        Err(not_yet("CancelSample"))
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
        _request: Request<proto::ExplainRouteRequest>,
    ) -> Result<Response<proto::ExplainRouteResponse>, Status> {
        Err(not_yet("ExplainRoute"))
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

/// The answer of what is still to come.
pub(super) fn not_yet(what: &str) -> Status {
    Error::new(
        Reason::NotImplemented,
        format!("{what} is not implemented yet"),
    )
    .into()
}
