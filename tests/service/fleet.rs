//! Replicas that come, go and are looked at.

use std::time::Duration;

use berth::{
    engine::sim::{Dialect, SimConfig, SimEngine, SimHandle},
    fleet::facts::EngineKind,
    proto::{
        Adapter, DeregisterReplicaRequest, GetPinRequest, GetReplicaRequest, GetStatsRequest,
        HeartbeatRequest, ListReplicasRequest, Logprobs, Rank, RegisterReplicaRequest,
        ReplicaHealth, SampleRequest, fleet_service_client::FleetServiceClient,
        register_replica_request::Address, replica_service_client::ReplicaServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig, SidecarError, Status},
};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::cluster::{Cluster, VOCAB, eventually, ids, instant, keyed, reason, refused, request};

#[tokio::test]
async fn an_operator_sees_what_a_replica_is() {
    let engine = berth::engine::sim::SimConfig {
        ranks: 2,
        ..instant()
    };
    let cluster = Cluster::start(1, engine).await;
    cluster.sample(keyed("t", &ids(1, 100), 11)).await.unwrap();
    let list = cluster
        .operator()
        .list_replicas(ListReplicasRequest::default())
        .await
        .unwrap()
        .into_inner()
        .replicas;
    assert_eq!(list.len(), 1);
    let replica = &list[0];
    assert_eq!(replica.replica_id, "r0");
    assert_eq!(replica.health(), ReplicaHealth::Healthy);
    assert_eq!(replica.model, "Qwen/Qwen3-8B");
    assert_eq!(
        (replica.vocab_size, replica.context_length),
        (151_936, 16_384)
    );
    assert_eq!(
        replica.accelerator.as_ref().unwrap().name,
        "NVIDIA H100 80GB HBM3"
    );
    assert_eq!(replica.ranks.len(), 2);
    assert!(
        replica
            .ranks
            .iter()
            .all(|r| r.routable && r.kv_capacity_tokens == 375_000)
    );
    assert_eq!(replica.ranks.iter().map(|r| r.live_pins).sum::<u64>(), 1);
    assert_eq!(
        replica.ranks.iter().map(|r| r.live_pin_tokens).sum::<u64>(),
        110
    );
    let none = cluster
        .operator()
        .list_replicas(ListReplicasRequest {
            model: Some("other".to_owned()),
            ..ListReplicasRequest::default()
        })
        .await
        .unwrap();
    assert!(none.into_inner().replicas.is_empty());
    let status = cluster
        .operator()
        .get_replica(GetReplicaRequest {
            replica_id: "nobody".to_owned(),
        })
        .await
        .unwrap_err();
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::NotFound, "REPLICA_NOT_FOUND")
    );
    cluster.stop().await;
}

#[tokio::test]
async fn an_engine_that_dies_leaves_routing_and_comes_back_as_a_new_incarnation() {
    let cluster = Cluster::with(2, instant(), |c| {
        c.fleet.lease.interval = std::time::Duration::from_millis(100);
    })
    .await;
    let before = cluster
        .playground
        .server()
        .parts()
        .fleet
        .get(&"r0".into_id())
        .unwrap();
    cluster.engine("r0").kill().await;
    // Every request succeeds, whoever notices first.
    for i in 0..8 {
        cluster.sample(request(&ids(i, 32), 4)).await.unwrap();
    }
    let revived = cluster.engine("r0").restart().await.unwrap();
    let fleet = &cluster.playground.server().parts().fleet;
    eventually("it is back as a new start", async || {
        fleet.get(&"r0".into_id()).is_some_and(|now| {
            now.incarnation > before.incarnation && now.ranks.iter().all(|r| r.routable())
        })
    })
    .await;
    // Of equals one is drawn: none of eight fell to it once in 256 runs.
    let mut salt = 8;
    eventually("it is used again", async || {
        salt += 1;
        cluster.sample(request(&ids(salt, 32), 4)).await.unwrap();
        revived.counters().finished > 0
    })
    .await;
    revived.stop().await;
    cluster.stop().await;
}

trait IntoId {
    fn into_id(self) -> berth::ids::ReplicaId;
}

impl IntoId for &str {
    fn into_id(self) -> berth::ids::ReplicaId {
        berth::ids::ReplicaId::new(self)
    }
}

#[tokio::test]
async fn incarnations_survive_a_restart_of_the_control_plane() {
    let dir = tempfile::tempdir().unwrap();
    // A restarted control plane asks whether it is still there.
    let engine = berth::engine::sim::SimEngine::start(instant())
        .await
        .unwrap();
    let register = async |boot: &str| {
        let server = berth::server::Server::start(crate::cluster::quick(&dir))
            .await
            .unwrap();
        let url = format!("http://{}", server.grpc_address());
        let mut client = ReplicaServiceClient::connect(url).await.unwrap();
        let answer = client
            .register_replica(RegisterReplicaRequest {
                replica_id: "r".to_owned(),
                boot_id: boot.to_owned(),
                address: Some(berth::proto::register_replica_request::Address::Endpoint(
                    engine.url(),
                )),
                engine: berth::proto::EngineKind::Sglang.into(),
                model: "m".to_owned(),
                vocab_size: 10,
                context_length: 10,
                page_size: 1,
                ranks: vec![berth::proto::Rank {
                    kv_capacity_tokens: 10,
                    ..Default::default()
                }],
                ..Default::default()
            })
            .await
            .unwrap()
            .into_inner();
        drop(client);
        server.stop().await.unwrap();
        answer.incarnation
    };
    let first = register("a").await;
    let same = register("a").await;
    let second = register("b").await;
    assert_eq!(first, same);
    assert!(second > first);
}

/// With what stock clients decode at most.
#[tokio::test]
async fn a_list_comes_page_by_page() {
    let cluster = Cluster::start(0, instant()).await;
    let mut replicas = ReplicaServiceClient::new(cluster.channel.clone());
    let mut operator = FleetServiceClient::new(cluster.channel.clone());
    for n in 0..30 {
        // One that is large, and two that are not.
        let adapters = if n % 3 == 0 { 1024 } else { 0 };
        let adapter = |nth: usize| Adapter {
            name: format!("{nth:0250}"),
            ..Adapter::default()
        };
        let message = RegisterReplicaRequest {
            replica_id: format!("r{n:02}"),
            boot_id: "b".to_owned(),
            address: Some(Address::Endpoint("http://127.0.0.1:9999".to_owned())),
            engine: berth::proto::EngineKind::Sglang.into(),
            model: format!("m{}", n % 2),
            vocab_size: 10,
            context_length: 10,
            page_size: 1,
            adapters: (0..adapters).map(adapter).collect(),
            ranks: vec![Rank {
                kv_capacity_tokens: 10,
                ..Rank::default()
            }],
            ..RegisterReplicaRequest::default()
        };
        replicas.register_replica(message).await.unwrap();
    }
    let mut pages = async |model: Option<&str>, page_size: u32| {
        let mut sizes = Vec::new();
        let mut ids = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListReplicasRequest {
                model: model.map(str::to_owned),
                page_size,
                page_token,
            };
            let page = operator.list_replicas(request).await.unwrap().into_inner();
            sizes.push(page.replicas.len());
            ids.extend(page.replicas.into_iter().map(|r| r.replica_id));
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return (ids, sizes);
            }
        }
    };
    let all: Vec<String> = (0..30).map(|n| format!("r{n:02}")).collect();
    let odd: Vec<String> = all.iter().skip(1).step_by(2).cloned().collect();
    // 2.7 MB do not fit into one.
    let (ids, sizes) = pages(None, 0).await;
    assert_eq!((&ids, sizes.len()), (&all, 2), "{sizes:?}");
    assert_eq!(pages(None, 4000).await, (ids, sizes));
    let (ids, sizes) = pages(None, 7).await;
    assert_eq!((ids, sizes), (all, vec![7, 7, 7, 7, 2]));
    let (ids, sizes) = pages(Some("m1"), 10).await;
    assert_eq!((ids, sizes), (odd, vec![10, 5]));
    assert_eq!(pages(Some("nobody's"), 10).await, (vec![], vec![0]));

    let request = ListReplicasRequest {
        page_token: "no token of ours".to_owned(),
        ..ListReplicasRequest::default()
    };
    let status = operator.list_replicas(request).await.unwrap_err();
    assert_eq!(reason(&status), "INVALID_REQUEST");
    cluster.stop().await;
}

#[tokio::test]
async fn strangers_words_change_nothing() {
    let cluster = Cluster::start(1, instant()).await;
    let mut replicas = ReplicaServiceClient::new(cluster.channel.clone());
    let beat = |replica_id: &str, incarnation| HeartbeatRequest {
        replica_id: replica_id.to_owned(),
        incarnation,
        sequence: 1,
        ..Default::default()
    };
    let unknown = replicas.heartbeat(beat("nobody", 1)).await.unwrap_err();
    assert_eq!(
        (unknown.code(), reason(&unknown).as_str()),
        (Code::NotFound, "REREGISTER")
    );
    let stale = replicas.heartbeat(beat("r0", 0)).await.unwrap_err();
    assert_eq!(
        (stale.code(), reason(&stale).as_str()),
        (Code::FailedPrecondition, "STALE_INCARNATION")
    );
    replicas
        .deregister_replica(DeregisterReplicaRequest {
            replica_id: "r0".to_owned(),
            incarnation: 0,
        })
        .await
        .unwrap();
    let bad = replicas
        .register_replica(RegisterReplicaRequest::default())
        .await
        .unwrap_err();
    assert_eq!(reason(&bad), "INVALID_REQUEST");
    assert!(cluster.sample(request(&ids(1, 8), 1)).await.is_ok());
    cluster.stop().await;
}

#[tokio::test]
async fn pins_and_counters_are_shown() {
    let cluster = Cluster::start(2, instant()).await;
    let prompt = ids(1, 100);
    let mut asked = keyed("t", &prompt, 11);
    asked.idempotency_key = Some("k".to_owned());
    let first = cluster.sample(asked.clone()).await.unwrap();
    cluster.sample(asked).await.unwrap();
    let pin = |key: &str| GetPinRequest {
        cache_affinity_key: key.to_owned(),
        ..GetPinRequest::default()
    };
    let mut operator = cluster.operator();
    let found = operator
        .get_pin(pin("t"))
        .await
        .unwrap()
        .into_inner()
        .pin
        .unwrap();
    let (replica, rank) = crate::cluster::home(crate::cluster::only(&first));
    assert_eq!((found.replica_id, found.rank), (replica, rank));
    assert_eq!((found.tokens, found.live), (110, true));
    assert!(
        operator
            .get_pin(pin("other"))
            .await
            .unwrap()
            .into_inner()
            .pin
            .is_none()
    );

    let stats = operator
        .get_stats(GetStatsRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(stats.pins, 1);
    let count = |name: &str| stats.counters[name];
    assert_eq!(count("generations"), 1);
    assert_eq!(count("replays"), 1);
    assert_eq!(count("attempts"), 1);
    assert_eq!(
        (count("prompt_tokens"), count("completion_tokens")),
        (100, 11)
    );
    cluster.stop().await;
}

#[tokio::test]
async fn health_is_told_by_the_standard_protocol() {
    use tonic_health::pb::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    };
    let cluster = Cluster::start(0, instant()).await;
    let mut health = HealthClient::new(cluster.channel.clone());
    for service in ["", "berth.v1.SamplingService", "berth.v1.ReplicaService"] {
        let answer = health
            .check(HealthCheckRequest {
                service: service.to_owned(),
            })
            .await
            .unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    }
    cluster.stop().await;
}

/// A sidecar of its own beside an engine.
struct Beside {
    run: JoinHandle<Result<(), SidecarError>>,
    status: watch::Receiver<Status>,
    stop: CancellationToken,
}

fn beside(
    cluster: &Cluster,
    engine: &SimHandle,
    id: &str,
    change: impl FnOnce(&mut SidecarConfig),
) -> Beside {
    let mut config = SidecarConfig::new(cluster.playground.url(), engine.url(), id);
    config.accelerator.ask_driver = false;
    change(&mut config);
    let sidecar = Sidecar::new(config).unwrap();
    let (status, stop) = (sidecar.status(), CancellationToken::new());
    Beside {
        run: tokio::spawn(sidecar.run(stop.clone())),
        status,
        stop,
    }
}

impl Beside {
    /// The incarnation that it was given.
    async fn registered(&mut self) -> u64 {
        let status = self.status.wait_for(|status| status.incarnation.is_some());
        status.await.unwrap().incarnation.unwrap()
    }

    async fn killed(self) {
        self.run.abort();
        let _ = self.run.await;
    }
}

/// vLLM takes seconds over its first answer about itself. Until it comes, what needs
/// no more is served; the rest is to be tried again, not given up. And a sidecar that
/// is started anew, which hears everything at once, finds the start again.
#[tokio::test]
async fn an_engine_that_is_slow_to_tell_what_it_can_do_serves_what_it_surely_can() {
    let cluster = Cluster::start(0, instant()).await;
    let engine = SimEngine::start(SimConfig {
        dialect: Dialect::Vllm,
        info_delay: Duration::from_secs(3),
        ..instant()
    })
    .await
    .unwrap();
    let start = || {
        beside(&cluster, &engine, "v", |config| {
            config.engine = EngineKind::Vllm;
            config.vocab_size = Some(VOCAB);
        })
    };
    let fleet = &cluster.playground.server().parts().fleet;
    let incarnation = || fleet.get(&"v".into_id()).map(|v| v.incarnation);
    let with_logprobs = || SampleRequest {
        logprobs: Some(Logprobs {
            output: true,
            ..Logprobs::default()
        }),
        ..request(&ids(1, 16), 2)
    };
    let first_sidecar = start();
    eventually("it serves", async || {
        cluster.sample(request(&ids(0, 16), 2)).await.is_ok()
    })
    .await;
    let first = incarnation().unwrap();
    let status = refused(
        cluster.sample(with_logprobs()).await,
        Code::Unavailable,
        "NO_REPLICA",
    );
    assert!(status.message().contains("told yet"), "{status}");
    eventually("it serves the rest", async || {
        cluster.sample(with_logprobs()).await.is_ok()
    })
    .await;
    assert_eq!(incarnation(), Some(first));
    // Killed, and another beside the same engine.
    first_sidecar.killed().await;
    let mut again = start();
    assert_eq!(again.registered().await, first.0);
    assert_eq!(incarnation(), Some(first), "the same start");
    again.killed().await;
    engine.stop().await;
    cluster.stop().await;
}

/// A sidecar may be restarted beside a living engine as often as it likes, whether
/// it took its leave or was killed.
#[tokio::test]
async fn a_sidecar_restarted_again_and_again_is_taken_each_time() {
    let cluster = Cluster::start(0, instant()).await;
    let engine = SimEngine::start(instant()).await.unwrap();
    let fleet = &cluster.playground.server().parts().fleet;
    for round in 0..4 {
        let mut sidecar = beside(&cluster, &engine, "s", |_| {});
        // Registered by this very sidecar, and routable.
        let incarnation = sidecar.registered().await;
        eventually("it is routable", async || {
            fleet.get(&"s".into_id()).is_some_and(|s| {
                s.incarnation.0 == incarnation && s.ranks.iter().all(|r| r.routable())
            })
        })
        .await;
        cluster.sample(request(&ids(round, 16), 2)).await.unwrap();
        if round % 2 == 0 {
            sidecar.stop.cancel();
            let _ = sidecar.run.await;
        } else {
            sidecar.killed().await;
        }
    }
    engine.stop().await;
    cluster.stop().await;
}
