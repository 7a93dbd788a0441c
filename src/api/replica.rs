//! `ReplicaService`.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::{fleet::time, register, write};
use crate::{
    engine::egress::Egress,
    fleet::{Beat, Fleet},
    ids::{Incarnation, ReplicaId},
    listen::Peer,
    proto::{self, replica_service_server::ReplicaService},
};

/// The service.
pub struct Replicas {
    fleet: Arc<Fleet>,
    egress: Arc<Egress>,
    rules: register::Rules,
}

impl Replicas {
    /// Over this fleet.
    pub fn new(fleet: Arc<Fleet>, egress: Arc<Egress>, allow_unknown_vocabulary: bool) -> Self {
        Self {
            fleet,
            egress,
            rules: register::Rules {
                allow_unknown_vocabulary,
            },
        }
    }
}

#[tonic::async_trait]
impl ReplicaService for Replicas {
    async fn register_replica(
        &self,
        request: Request<proto::RegisterReplicaRequest>,
    ) -> Result<Response<proto::RegisterReplicaResponse>, Status> {
        let caller = request.extensions().get::<Peer>().map(|peer| peer.0);
        let facts = register::facts(request.into_inner(), caller, &self.rules)?;
        register::reachable(&facts, &self.egress).await?;
        let registered = self.fleet.register(facts).await?;
        Ok(Response::new(proto::RegisterReplicaResponse {
            incarnation: registered.incarnation.0,
            lease_ttl: write::duration(registered.lease_ttl),
            heartbeat_interval: write::duration(registered.heartbeat_interval),
            epoch: registered.epoch,
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        let message = request.into_inner();
        let beat = Beat {
            replica: ReplicaId::new(message.replica_id.clone()),
            incarnation: Incarnation(message.incarnation),
            sequence: message.sequence,
            state: register::reported_state(message.state()),
            drain_grace: time("drain_grace", message.drain_grace)?,
            ranks: register::reports(message.ranks)?,
            adapters: message.adapters.map(register::adapters).transpose()?,
        };
        let heard = self.fleet.beat(beat)?;
        let directive = if heard.drain {
            proto::Directive::Drain
        } else {
            proto::Directive::Continue
        };
        Ok(Response::new(proto::HeartbeatResponse {
            directive: directive.into(),
            in_flight: heard.in_flight,
        }))
    }

    async fn deregister_replica(
        &self,
        request: Request<proto::DeregisterReplicaRequest>,
    ) -> Result<Response<proto::DeregisterReplicaResponse>, Status> {
        let message = request.into_inner();
        self.fleet.deregister(
            &ReplicaId::new(message.replica_id),
            Incarnation(message.incarnation),
        );
        Ok(Response::new(proto::DeregisterReplicaResponse {}))
    }
}
