//! `SamplingService`.

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status};

use super::{
    explain, lookup,
    read::{self, Context},
    stream::{self, EventStream, Form},
    told::Untold,
    write,
};
use crate::{
    auth::{Caller, Role},
    error::{Error, Reason},
    ids::{AffinityKey, Tenant},
    proto::{self, sampling_service_server::SamplingService},
    routing::PinKey,
    stack::{self, Parts, Stack, deadline::CallerDeadline, follow::Follower},
    telemetry::{method::Method, rpc::request_id},
};

/// A stream is silent for at most so long: proxies cut calls that are silent for
/// longer, the strictest after some 15 s.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

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
}

/// A policy other than the server's is for ablations.
fn may_route(context: &Context, request: &proto::SampleRequest) -> Result<(), Error> {
    if request.routing_policy == i32::from(proto::RoutingPolicy::Unspecified) {
        return Ok(());
    }
    context.caller.must_be(Role::Admin, "routing_policy")
}

fn context<T>(request: &Request<T>) -> Context {
    let extensions = request.extensions();
    Context {
        caller: Caller::of(request),
        request_id: request_id(extensions),
        deadline: extensions.get::<CallerDeadline>().map(|d| d.0),
    }
}

#[tonic::async_trait]
impl SamplingService for Sampling {
    async fn sample(
        &self,
        request: Request<proto::SampleRequest>,
    ) -> Result<Response<proto::SampleResponse>, Status> {
        let context = context(&request);
        may_route(&context, request.get_ref())?;
        let request_id = Arc::clone(&context.request_id);
        let call = read::call(request.into_inner(), context);
        let (packed, keyed) = (call.params.packed_output, call.idempotency_key.is_some());
        let mut untold = Untold::new(&self.parts.fleet, Method::Sample, &call);
        let sampled = async {
            let ticket = stack::open(&self.stack, call).await?;
            untold.follows(ticket.follow());
            ticket.finished().await
        };
        let sampled = sampled.await;
        match &sampled {
            Ok(finished) => untold.answered(finished),
            Err(error) => untold.refused(error),
        }
        let response = write::response(&sampled?, packed, keyed, &request_id);
        Ok(Response::new(response))
    }

    type SampleStreamStream = EventStream;

    async fn sample_stream(
        &self,
        request: Request<proto::SampleRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let context = context(&request);
        may_route(&context, request.get_ref())?;
        let request_id = Arc::clone(&context.request_id);
        let call = read::call(request.into_inner(), context);
        let mut untold = Untold::new(&self.parts.fleet, Method::SampleStream, &call);
        let form = Form {
            packed: call.params.packed_output,
            keyed: call.idempotency_key.is_some(),
            request_id,
        };
        let opened = stack::open(&self.stack, call).await;
        let ticket = opened.inspect_err(|error| untold.refused(error))?;
        untold.follows(ticket.follow());
        let follower = Follower::new(ticket, SIGN_OF_LIFE);
        Ok(Response::new(stream::events(follower, form, untold)))
    }

    async fn get_sample(
        &self,
        request: Request<proto::GetSampleRequest>,
    ) -> Result<Response<proto::GetSampleResponse>, Status> {
        let Context {
            caller, request_id, ..
        } = context(&request);
        let message = request.into_inner();
        let named = lookup::named(&self.parts, &caller.tenant, message.idempotency_key)?;
        let response =
            lookup::get(&self.parts, named, message.output_encoding, &request_id).await?;
        Ok(Response::new(response))
    }

    async fn cancel_sample(
        &self,
        request: Request<proto::CancelSampleRequest>,
    ) -> Result<Response<proto::CancelSampleResponse>, Status> {
        let tenant = Caller::of(&request).tenant;
        let key = request.into_inner().idempotency_key;
        let named = lookup::named(&self.parts, &tenant, key)?;
        Ok(Response::new(lookup::cancel(&self.parts, named).await?))
    }

    async fn finish_trajectory(
        &self,
        request: Request<proto::FinishTrajectoryRequest>,
    ) -> Result<Response<proto::FinishTrajectoryResponse>, Status> {
        let caller = Caller::of(&request);
        let message = request.get_ref();
        let key = trajectory(
            &self.parts,
            &caller.tenant,
            message.model.as_deref(),
            message.adapter.as_deref(),
            &message.cache_affinity_key,
        );
        let shown = key
            .as_ref()
            .map_or_else(|_| String::new(), |key| format!("{:032x}", key.0));
        caller.did("finish", &shown, &key);
        let key = key?;
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
        may_route(&context, &request)?;
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
