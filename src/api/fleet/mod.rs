//! `FleetService`.

mod message;
mod pages;
mod purge;
mod watch;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::StreamExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use self::{
    message::replica,
    watch::{WatchStream, Watchers},
};
use super::{sampling::trajectory, write};
use crate::{
    auth::{Caller, Role},
    error::{Error, Reason, Violation},
    fleet::drain::{DrainOrder, MAX_GRACE, not_found},
    ids::{ReplicaId, Tenant},
    proto::{self, fleet_service_server::FleetService},
    stack::Parts,
};

/// The service.
pub struct FleetView {
    parts: Parts,
    started: Instant,
    watchers: Arc<Watchers>,
    /// Cancelled when the server drains: watchers would hold it up.
    drain: CancellationToken,
}

impl FleetView {
    /// Over these parts, until `drain` is cancelled.
    pub fn new(parts: Parts, drain: CancellationToken) -> Self {
        Self {
            parts,
            started: Instant::now(),
            watchers: Arc::default(),
            drain,
        }
    }
}

/// A length of time from a message.
///
/// # Errors
/// INVALID_REQUEST when it is negative, malformed or beyond 24 h.
pub(super) fn time(
    field: &'static str,
    told: Option<prost_types::Duration>,
) -> Result<Option<Duration>, Error> {
    told.map(|told| {
        // Others are made into some length of time that nobody has meant.
        let formed = (0..1_000_000_000).contains(&told.nanos);
        Duration::try_from(told)
            .ok()
            .filter(|time| formed && *time <= MAX_GRACE)
            .ok_or_else(|| {
                Error::invalid(
                    Reason::InvalidRequest,
                    vec![Violation::new(field, "must be from 0 s to 24 h")],
                )
            })
    })
    .transpose()
}

#[tonic::async_trait]
impl FleetService for FleetView {
    async fn list_replicas(
        &self,
        request: Request<proto::ListReplicasRequest>,
    ) -> Result<Response<proto::ListReplicasResponse>, Status> {
        let page = pages::list(&self.parts.fleet, request.into_inner())?;
        Ok(Response::new(page))
    }

    async fn get_replica(
        &self,
        request: Request<proto::GetReplicaRequest>,
    ) -> Result<Response<proto::GetReplicaResponse>, Status> {
        let id = ReplicaId::new(request.into_inner().replica_id);
        let status = self.parts.fleet.get(&id).ok_or_else(not_found)?;
        Ok(Response::new(proto::GetReplicaResponse {
            replica: Some(replica(status)),
        }))
    }

    async fn drain_replica(
        &self,
        request: Request<proto::DrainReplicaRequest>,
    ) -> Result<Response<proto::DrainReplicaResponse>, Status> {
        let caller = Caller::of(&request);
        let message = request.into_inner();
        let id = ReplicaId::new(message.replica_id);
        let drained = time("grace", message.grace).and_then(|grace| {
            let order = DrainOrder {
                grace,
                hold: message.hold,
                allow_last: message.allow_last,
            };
            self.parts.fleet.drain(&id, order)
        });
        caller.did("drain", id.as_str(), &drained);
        let status = drained?;
        Ok(Response::new(proto::DrainReplicaResponse {
            replica: Some(replica(status)),
        }))
    }

    async fn resume_replica(
        &self,
        request: Request<proto::ResumeReplicaRequest>,
    ) -> Result<Response<proto::ResumeReplicaResponse>, Status> {
        let caller = Caller::of(&request);
        let id = ReplicaId::new(request.into_inner().replica_id);
        let resumed = self.parts.fleet.resume(&id);
        caller.did("resume", id.as_str(), &resumed);
        let status = resumed?;
        Ok(Response::new(proto::ResumeReplicaResponse {
            replica: Some(replica(status)),
        }))
    }

    type WatchFleetStream = WatchStream;

    async fn watch_fleet(
        &self,
        request: Request<proto::WatchFleetRequest>,
    ) -> Result<Response<WatchStream>, Status> {
        let caller = Caller::of(&request);
        let load = time("load_interval", request.into_inner().load_interval)?;
        let place = self.watchers.admit()?;
        let fleet = Arc::clone(&self.parts.fleet);
        let stream = watch::stream(fleet, load, place, self.drain.clone());
        // It has no end of its own: it ends with the credentials.
        let known = stream.map(move |message| {
            caller.is_still(Role::Admin)?;
            message
        });
        Ok(Response::new(Box::pin(known)))
    }

    async fn get_pin(
        &self,
        request: Request<proto::GetPinRequest>,
    ) -> Result<Response<proto::GetPinResponse>, Status> {
        let own = Caller::of(&request).tenant;
        let message = request.into_inner();
        let tenant = message.tenant.map_or(own, Tenant::new);
        let key = trajectory(
            &self.parts,
            &tenant,
            message.model.as_deref(),
            message.adapter.as_deref(),
            &message.cache_affinity_key,
        )?;
        let snapshot = self.parts.fleet.snapshot();
        let view = self.parts.router.pin(key, Instant::now());
        // A pin whose rank is gone is as good as none: its next turn is placed anew.
        let pin = view.and_then(|view| {
            let rank = snapshot.rank(view.slot)?;
            Some(proto::Pin {
                replica_id: rank.target.replica.as_str().to_owned(),
                incarnation: rank.target.incarnation.0,
                rank: rank.target.rank,
                tokens: view.tokens.into(),
                idle: write::duration(view.idle),
                live: view.live,
            })
        });
        Ok(Response::new(proto::GetPinResponse { pin }))
    }

    async fn get_stats(
        &self,
        _request: Request<proto::GetStatsRequest>,
    ) -> Result<Response<proto::GetStatsResponse>, Status> {
        let all = self.parts.counters.all();
        let snapshot = self.parts.fleet.snapshot();
        Ok(Response::new(proto::GetStatsResponse {
            counters: all.into_iter().map(|(n, c)| (n.to_owned(), c)).collect(),
            pins: self.parts.router.pins() as u64,
            uptime: write::duration(self.started.elapsed()),
            in_flight: snapshot.ranks.iter().map(|r| r.load.in_flight()).sum(),
            watchers: self.watchers.count.load(Ordering::Relaxed),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }))
    }

    async fn purge_tenant(
        &self,
        request: Request<proto::PurgeTenantRequest>,
    ) -> Result<Response<proto::PurgeTenantResponse>, Status> {
        let caller = Caller::of(&request);
        let tenant = request.into_inner().tenant;
        // It goes on when its caller is gone: half a purge helps nobody.
        let (parts, name) = (self.parts.clone(), tenant.clone());
        let purging = tokio::spawn(async move { purge::purge(&parts, &name).await });
        let purged = purging.await.unwrap_or_else(|_| {
            let why = "the purge failed; the server's log says why";
            Err(Error::new(Reason::Internal, why))
        });
        caller.did("purge", &tenant, &purged);
        Ok(Response::new(purged?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_of_time_is_well_formed_and_not_beyond_a_day() {
        let read = |seconds, nanos| time("grace", Some(prost_types::Duration { seconds, nanos }));
        assert_eq!(time("grace", None), Ok(None));
        assert_eq!(read(1, 5), Ok(Some(Duration::new(1, 5))));
        assert_eq!(read(86_400, 0), Ok(Some(MAX_GRACE)));
        for (seconds, nanos) in [
            (86_400, 1),
            (i64::MAX, 0),
            (-1, 0),
            (0, -1),
            (1, -1),
            (-1, 1_500_000_000),
            (1, 1_000_000_000),
            (0, i32::MIN),
        ] {
            let error = read(seconds, nanos).unwrap_err();
            assert_eq!(error.reason, Reason::InvalidRequest, "{seconds} {nanos}");
            assert_eq!(error.violations[0].field, "grace");
        }
    }
}
