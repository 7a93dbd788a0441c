//! `FleetService`.

use std::pin::Pin;

use futures_util::Stream;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::{
    sampling::{not_yet, trajectory},
    write,
};
use crate::{
    error::{Error, Reason},
    fleet::{
        Health, RankStatus, ReplicaStatus,
        facts::{EngineKind, RankReport},
    },
    ids::{ReplicaId, Tenant},
    proto::{self, fleet_service_server::FleetService},
    stack::Parts,
};

/// The service.
pub struct FleetView {
    parts: Parts,
    started: Instant,
}

impl FleetView {
    /// Over these parts.
    pub fn new(parts: Parts) -> Self {
        Self {
            parts,
            started: Instant::now(),
        }
    }
}

type WatchStream = Pin<Box<dyn Stream<Item = Result<proto::WatchFleetResponse, Status>> + Send>>;

#[tonic::async_trait]
impl FleetService for FleetView {
    async fn list_replicas(
        &self,
        request: Request<proto::ListReplicasRequest>,
    ) -> Result<Response<proto::ListReplicasResponse>, Status> {
        let model = request.into_inner().model;
        let replicas = self
            .parts
            .fleet
            .list()
            .into_iter()
            .filter(|r| model.as_deref().is_none_or(|m| *r.facts.model == *m))
            .map(replica)
            .collect();
        Ok(Response::new(proto::ListReplicasResponse { replicas }))
    }

    async fn get_replica(
        &self,
        request: Request<proto::GetReplicaRequest>,
    ) -> Result<Response<proto::GetReplicaResponse>, Status> {
        let id = ReplicaId::new(request.into_inner().replica_id);
        let status = self.parts.fleet.get(&id).ok_or_else(|| {
            Error::new(
                Reason::ReplicaNotFound,
                "no replica of this id is known; ListReplicas shows those that are",
            )
        })?;
        Ok(Response::new(proto::GetReplicaResponse {
            replica: Some(replica(status)),
        }))
    }

    async fn drain_replica(
        &self,
        _request: Request<proto::DrainReplicaRequest>,
    ) -> Result<Response<proto::DrainReplicaResponse>, Status> {
        Err(not_yet("DrainReplica"))
    }

    async fn resume_replica(
        &self,
        _request: Request<proto::ResumeReplicaRequest>,
    ) -> Result<Response<proto::ResumeReplicaResponse>, Status> {
        Err(not_yet("ResumeReplica"))
    }

    type WatchFleetStream = WatchStream;

    async fn watch_fleet(
        &self,
        _request: Request<proto::WatchFleetRequest>,
    ) -> Result<Response<WatchStream>, Status> {
        Err(not_yet("WatchFleet"))
    }

    async fn get_pin(
        &self,
        request: Request<proto::GetPinRequest>,
    ) -> Result<Response<proto::GetPinResponse>, Status> {
        let tenant = Tenant::default();
        let message = request.into_inner();
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
        Ok(Response::new(proto::GetStatsResponse {
            counters: all.into_iter().map(|(n, c)| (n.to_owned(), c)).collect(),
            pins: self.parts.router.pins() as u64,
            uptime: write::duration(self.started.elapsed()),
        }))
    }
}

fn replica(status: ReplicaStatus) -> proto::Replica {
    let facts = status.facts;
    let has = facts.capabilities;
    proto::Replica {
        replica_id: facts.id.as_str().to_owned(),
        incarnation: status.incarnation.0,
        boot_id: facts.boot.as_str().to_owned(),
        health: match status.health {
            Health::Healthy => proto::ReplicaHealth::Healthy,
            Health::Suspect => proto::ReplicaHealth::Suspect,
            Health::Unhealthy => proto::ReplicaHealth::Unhealthy,
            Health::Draining => proto::ReplicaHealth::Draining,
            Health::Dead => proto::ReplicaHealth::Dead,
        }
        .into(),
        health_reason: status.reason,
        endpoint: facts.url.to_string(),
        engine: match facts.engine {
            EngineKind::Sglang => proto::EngineKind::Sglang,
            EngineKind::Vllm => proto::EngineKind::Vllm,
        }
        .into(),
        engine_version: facts.engine_version,
        model: facts.model.to_string(),
        context_length: facts.context_length,
        vocab_size: facts.vocab_size.map_or(0, std::num::NonZeroU32::get),
        accelerator: Some(proto::Accelerator {
            name: facts.accelerator.name,
            memory_bytes: facts.accelerator.memory_bytes,
            count: facts.accelerator.count,
        }),
        capabilities: Some(proto::Capabilities {
            tokenizer: has.tokenizer,
            output_logprobs: has.output_logprobs,
            prompt_logprobs: has.prompt_logprobs,
            seed: has.seed,
            routed_experts: has.routed_experts,
            structured_output: has.structured_output,
            priority: has.priority,
            incremental_streaming: has.incremental_streaming,
            max_top_logprobs: has.max_top_logprobs,
        }),
        ranks: status.ranks.into_iter().map(rank).collect(),
        registered_at: Some(status.registered_at.into()),
        heartbeat_age: write::duration(status.heartbeat_age),
        labels: facts.labels.into_iter().collect(),
        page_size: facts.page_size,
        adapters: facts
            .adapters
            .into_iter()
            .map(|a| proto::Adapter {
                name: a.name.to_string(),
                load_id: a.load_id,
                resident: a.resident,
            })
            .collect(),
    }
}

fn rank(status: RankStatus) -> proto::FleetRank {
    let weight_version = status.weight_version.to_string();
    proto::FleetRank {
        rank: status.facts.rank,
        kv_capacity_tokens: status.facts.kv_capacity,
        live_pins: status.live_pins,
        live_pin_tokens: status.live_tokens,
        in_flight: status.in_flight,
        reported: status.reported.map(report),
        routable: status.routable,
        weight_version,
    }
}

fn report(report: RankReport) -> proto::RankStatus {
    proto::RankStatus {
        rank: report.rank,
        healthy: report.healthy,
        running: report.running,
        waiting: report.waiting,
        waiting_uncached_tokens: report.waiting_uncached_tokens,
        kv_used_tokens: report.kv_used_tokens,
        weight_version: report.weight_version.to_string(),
        paused: report.paused,
    }
}
