//! A control plane that is killed under live trajectories and started again: what
//! it finds, and what its trainers notice.
//!
//! `BERTH_RESTART_TRAJECTORIES=200 cargo test --test restart -- --nocapture` is the
//! long form.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

#[path = "../support/process.rs"]
mod process;
#[path = "../support/trainer.rs"]
mod trainer;

use std::time::Duration;

use berth::{
    engine::sim::{SimConfig, SimEngine, SimHandle},
    proto::{
        DrainReplicaRequest, GetStatsRequest, ListReplicasRequest, ReplicaHealth,
        fleet_service_client::FleetServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use process::Serve;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use trainer::{Tally, Trainer};

struct Fleet {
    serve: Serve,
    engines: Vec<SimHandle>,
    stop: CancellationToken,
}

impl Fleet {
    /// Engines of two ranks that take `step` for a token.
    async fn start(engines: usize, step: Duration) -> Self {
        let mut fleet = Self {
            serve: Serve::start(&[]),
            engines: Vec::new(),
            stop: CancellationToken::new(),
        };
        for i in 0..engines {
            let engine = SimEngine::start(SimConfig {
                ranks: 2,
                step: Some(step),
                time_scale: 1.0,
                incremental_streaming_output: true,
                ..SimConfig::instant()
            })
            .await
            .unwrap();
            let config = SidecarConfig::new(&fleet.serve.url, engine.url(), format!("r{i}"));
            let sidecar = Sidecar::new(config).unwrap();
            tokio::spawn(sidecar.run(fleet.stop.clone()));
            fleet.engines.push(engine);
        }
        fleet.wait_for(engines).await;
        fleet
    }

    fn operator(&self) -> FleetServiceClient<Channel> {
        let channel = Channel::from_shared(self.serve.url.clone()).unwrap();
        FleetServiceClient::new(channel.connect_lazy())
    }

    /// Name and judgement of each replica.
    async fn replicas(&self) -> Vec<(String, ReplicaHealth)> {
        let listed = self
            .operator()
            .list_replicas(ListReplicasRequest::default())
            .await
            .unwrap();
        let replicas = listed.into_inner().replicas;
        replicas
            .iter()
            .map(|r| (r.replica_id.clone(), r.health()))
            .collect()
    }

    async fn wait_for(&self, healthy: usize) {
        let begun = Instant::now();
        loop {
            let replicas = self.replicas().await;
            let well = replicas
                .iter()
                .filter(|(_, h)| *h == ReplicaHealth::Healthy);
            if well.count() == healthy {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{replicas:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn kill_and_start(&mut self, gap: Duration) {
        self.serve.signal("-KILL");
        self.serve.ended().await;
        tokio::time::sleep(gap).await;
        self.serve.restart(&[]);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_trajectory_moves_when_the_control_plane_is_killed_under_it() {
    let trajectories: usize =
        std::env::var("BERTH_RESTART_TRAJECTORIES").map_or(24, |count| count.parse().unwrap());
    let mut fleet = Fleet::start(4, Duration::from_millis(2)).await;
    let trainers: Vec<_> = (0..trajectories)
        .map(|n| {
            // Every other one sends no idempotency keys: its pin is noted too.
            let trainer = Trainer::new(&fleet.serve.url, n, n % 2 == 0);
            tokio::spawn(trainer.run(6))
        })
        .collect();
    // Somewhere in the second or third turn of most.
    let begun = Instant::now();
    loop {
        let stats = fleet.operator().get_stats(GetStatsRequest::default()).await;
        let requests = stats.unwrap().into_inner().pins;
        if requests as usize == trajectories {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(150)).await;
    fleet.kill_and_start(Duration::from_millis(300)).await;
    let mut all = Tally::default();
    for trainer in trainers {
        all.add(&trainer.await.unwrap());
    }
    println!(
        "{trajectories} trajectories, {} turns, {} calls failed and were made again: {} of {} \
         reusable tokens cached ({:.2} %), {} trajectories moved",
        all.turns,
        all.failed_calls,
        all.cached,
        all.reusable,
        100.0 * all.cached as f64 / all.reusable as f64,
        all.moved
    );
    assert!(all.failed_calls > 0, "it was killed when nothing ran");
    assert_eq!(all.moved, 0);
    // 99.5 %.
    assert!(all.cached * 200 >= all.reusable * 199);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_gone_meanwhile_is_not_routed_to_and_what_is_there_serves_at_once() {
    let mut fleet = Fleet::start(3, Duration::ZERO).await;
    let mut trainers: Vec<Trainer> = (0..12)
        .map(|n| Trainer::new(&fleet.serve.url, n, true))
        .collect();
    for trainer in &mut trainers {
        trainer.turn().await;
    }
    fleet.serve.signal("-KILL");
    fleet.serve.ended().await;
    fleet.engines[1].kill().await;
    fleet.serve.restart(&[]);
    // Before any sidecar can have registered anew: each as it was noted.
    let replicas = fleet.replicas().await;
    assert_eq!(replicas.len(), 3, "{replicas:?}");
    for (id, health) in replicas {
        assert_eq!(
            health == ReplicaHealth::Dead,
            id == "r1",
            "{id}: {health:?}"
        );
    }
    for trainer in &mut trainers {
        let lived_on_dead = trainer.home().starts_with("r1/");
        let attempts = trainer.turn().await;
        assert_eq!(attempts, 1, "something was sent where nobody is");
        assert_eq!(trainer.tally().moved > 0, lived_on_dead);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_outlives_a_restart() {
    let mut fleet = Fleet::start(2, Duration::ZERO).await;
    fleet
        .operator()
        .drain_replica(DrainReplicaRequest {
            replica_id: "r0".to_owned(),
            ..DrainReplicaRequest::default()
        })
        .await
        .unwrap();
    // It is noted when it changes, which nobody waits for.
    tokio::time::sleep(Duration::from_millis(500)).await;
    fleet.kill_and_start(Duration::ZERO).await;
    let replicas = fleet.replicas().await;
    assert_eq!(replicas[0].1, ReplicaHealth::Draining, "{replicas:?}");
    for n in 0..8 {
        let mut trainer = Trainer::new(&fleet.serve.url, n, false);
        trainer.turn().await;
        assert!(trainer.home().starts_with("r1/"));
    }
}
