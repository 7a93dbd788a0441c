//! `ReplicaService`.

use std::{net::SocketAddr, sync::Arc};

use tonic::{Request, Response, Status};

use super::{register, write};
use crate::{
    auth::{Caller, Role},
    engine::egress::Egress,
    error::{Error, Reason, Violation},
    fleet::{Fleet, Registered},
    ids::{Incarnation, ReplicaId, Target},
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

fn peer<T>(request: &Request<T>) -> Option<SocketAddr> {
    request.extensions().get::<Peer>().map(|peer| peer.0)
}

impl Replicas {
    async fn register(
        &self,
        message: proto::RegisterReplicaRequest,
        peer: Option<SocketAddr>,
        caller: &Caller,
    ) -> Result<Registered, Error> {
        let facts = register::facts(message, peer, &self.rules)?;
        register::reachable(&facts, &self.egress).await?;
        self.disown(caller, &facts.id);
        let principal = caller.known_as().cloned();
        self.fleet.register_by(facts, principal).await
    }

    /// A replica is its principal's; an operator speaks for every one.
    fn may_speak(&self, caller: &Caller, replica: &ReplicaId) -> Result<(), Error> {
        if caller.roles.has(Role::Admin) {
            return Ok(());
        }
        self.disown(caller, replica);
        self.fleet.permits(replica, &caller.principal)
    }

    /// A principal that has no credentials any more owns nothing: nobody could speak
    /// for what is its own.
    fn disown(&self, caller: &Caller, replica: &ReplicaId) {
        if let (Some(principal), Some(owner)) = (caller.known_as(), self.fleet.owner(replica))
            && owner != *principal
            && !caller.knows(&owner)
        {
            self.fleet.disown(replica, &owner);
        }
    }
}

#[tonic::async_trait]
impl ReplicaService for Replicas {
    async fn register_replica(
        &self,
        request: Request<proto::RegisterReplicaRequest>,
    ) -> Result<Response<proto::RegisterReplicaResponse>, Status> {
        let (caller, peer) = (Caller::of(&request), peer(&request));
        let id = request.get_ref().replica_id.clone();
        let registered = self.register(request.into_inner(), peer, &caller).await;
        caller.did("register", &id, &registered);
        let registered = registered?;
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
        let caller = Caller::of(&request);
        let message = request.into_inner();
        if !register::is_id(&message.replica_id) {
            // It is repeated to whoever speaks for one that is not known.
            let fault = Violation::new("replica_id", register::ID_RULE);
            return Err(Error::invalid(Reason::InvalidRequest, vec![fault]).into());
        }
        let replica = ReplicaId::new(message.replica_id.clone());
        self.may_speak(&caller, &replica)
            .inspect_err(|error| caller.was_refused("heartbeat", replica.as_str(), error))?;
        let incarnation = Incarnation(message.incarnation);
        let heard = self.fleet.beat(register::beat(message)?)?;
        if let Some(principal) = caller.known_as() {
            self.fleet.spoken_for(&replica, principal);
        }
        if let Some(rank) = heard.unwell {
            self.fleet.unreachable(&Target {
                replica,
                incarnation,
                rank,
            });
        }
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
        let caller = Caller::of(&request);
        let message = request.into_inner();
        let id = ReplicaId::new(message.replica_id);
        let may = self.may_speak(&caller, &id);
        if may.is_ok() {
            self.fleet.deregister(&id, Incarnation(message.incarnation));
        }
        caller.did("deregister", id.as_str(), &may);
        may?;
        Ok(Response::new(proto::DeregisterReplicaResponse {}))
    }
}
