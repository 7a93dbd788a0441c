//! Whose a replica is.

use std::time::Duration;

use berth::{
    auth::token::Token,
    config::Config,
    engine::sim::{SimConfig, SimEngine},
    proto::{
        DeregisterReplicaRequest, GetReplicaRequest, HeartbeatRequest, RegisterReplicaRequest,
        ReplicaHealth,
    },
};
use tonic::{Code, Status};

use crate::{
    addresses::registration,
    world::{World, eventually, line, reason, why},
};

const REPLICA: &str = "stranger";

struct Owned {
    world: World,
    engine: String,
}

/// Replicas live as long as a test does.
fn patient(config: &mut Config) {
    config.fleet.lease.interval = Duration::from_secs(60);
}

/// A control plane that knows another one who may register.
async fn others(engine: String, change: impl FnOnce(&mut Config)) -> Owned {
    let world = World::start(0, |config| {
        patient(config);
        change(config);
    })
    .await;
    let token = Token::mint().unwrap();
    std::fs::write(world.path("others"), token.expose()).unwrap();
    world.credentials(&line("others", "role=replica", &token), None);
    let owned = Owned { world, engine };
    eventually("the new token is known", async || {
        let refused = owned.beat("others", 1).await.unwrap_err();
        refused.code() != Code::Unauthenticated
    })
    .await;
    owned
}

impl Owned {
    async fn register(&self, who: &str, boot: &str) -> Result<u64, Status> {
        self.register_as(REPLICA, who, boot).await
    }

    async fn register_as(&self, id: &str, who: &str, boot: &str) -> Result<u64, Status> {
        let asked = RegisterReplicaRequest {
            replica_id: id.to_owned(),
            boot_id: boot.to_owned(),
            ..registration(self.engine.clone())
        };
        let registered = self.world.replicas(who).register_replica(asked).await;
        registered.map(|r| r.into_inner().incarnation)
    }

    async fn beat(&self, who: &str, incarnation: u64) -> Result<(), Status> {
        let beat = HeartbeatRequest {
            replica_id: REPLICA.to_owned(),
            incarnation,
            sequence: 1,
            ..HeartbeatRequest::default()
        };
        self.world.replicas(who).heartbeat(beat).await.map(drop)
    }

    async fn leave(&self, who: &str, incarnation: u64) -> Result<(), Status> {
        let leave = DeregisterReplicaRequest {
            replica_id: REPLICA.to_owned(),
            incarnation,
        };
        self.world
            .replicas(who)
            .deregister_replica(leave)
            .await
            .map(drop)
    }

    fn audited(&self, event: &str, principal: &str, outcome: &str) -> bool {
        self.world.audited(&[
            ("event", event),
            ("principal", principal),
            ("object", REPLICA),
            ("outcome", outcome),
        ])
    }
}

#[tokio::test]
async fn a_replica_is_its_principals_while_it_lives() {
    let world = others("http://127.0.0.1:30000".to_owned(), |_| {}).await;
    let first = world.register("sidecars", "b1").await.unwrap();

    // Neither its place may be taken, by its own start's name or another, nor may be
    // spoken for it.
    for boot in ["b1", "b2"] {
        let status = world.register("others", boot).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied);
        assert_eq!(reason(&status), "REPLICA_TAKEN");
        assert!(status.message().contains("another principal"), "{status}");
        assert!(!status.message().contains("sidecars"), "whose is not said");
    }
    assert_eq!(why(world.beat("others", first).await), "REPLICA_TAKEN");
    assert_eq!(why(world.leave("others", first).await), "REPLICA_TAKEN");
    for event in ["register", "heartbeat", "deregister"] {
        assert!(world.audited(event, "others", "REPLICA_TAKEN"), "{event}");
    }
    assert_eq!(why(world.leave("trainer-a", first).await), "ROLE_MISSING");

    // Its own principal's goes on, and starts anew.
    world.beat("sidecars", first).await.unwrap();
    let second = world.register("sidecars", "b2").await.unwrap();
    assert!(second > first);

    // An operator may evict it; then its id is free.
    world.leave("ops", second).await.unwrap();
    assert!(world.audited("deregister", "ops", "OK"));
    let third = world.register("others", "b3").await.unwrap();
    assert!(third > second);
    let status = world.register("sidecars", "b4").await;
    assert_eq!(why(status), "REPLICA_TAKEN");
    world.world.stop().await;
}

#[tokio::test]
async fn a_restart_does_not_change_whose_a_replica_is() {
    let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
    let mut world = others(engine.url(), |_| {}).await;
    let first = world.register("sidecars", "b1").await.unwrap();
    // Stopped before its first beat, so that the note of the registration counts.
    world.world = world.world.restart(patient).await;
    let mut ops = world.world.fleet("ops");
    let shown = ops.get_replica(GetReplicaRequest {
        replica_id: REPLICA.to_owned(),
    });
    let shown = shown.await.unwrap().into_inner().replica.unwrap();
    assert_eq!(shown.incarnation, first);
    assert_eq!(shown.health(), ReplicaHealth::Healthy, "its engine answers");

    assert_eq!(why(world.beat("others", first).await), "REPLICA_TAKEN");
    for boot in ["b1", "b2"] {
        let taken = world.register("others", boot).await;
        assert_eq!(why(taken), "REPLICA_TAKEN", "{boot}");
    }
    world.beat("sidecars", first).await.unwrap();

    // Of whom no credentials speak any more nothing is.
    world.world.credentials("", Some("principal=sidecars "));
    eventually("its principal is gone", async || {
        let beat = world.beat("sidecars", first).await;
        beat.is_err_and(|status| status.code() == Code::Unauthenticated)
    })
    .await;
    world.beat("others", first).await.unwrap();
    world.register("others", "b2").await.unwrap();
    world.world.stop().await;
}

#[tokio::test]
async fn a_principal_registers_as_many_replicas_as_it_may() {
    let world = others("http://127.0.0.1:30000".to_owned(), |config| {
        config.fleet.max_replicas_per_principal = 2;
    })
    .await;
    let first = world.register_as("r1", "sidecars", "b").await.unwrap();
    world.register_as("r2", "sidecars", "b").await.unwrap();
    let full = world.register_as("r3", "sidecars", "b").await.unwrap_err();
    assert_eq!(full.code(), Code::ResourceExhausted);
    assert_eq!(reason(&full), "FLEET_FULL");
    assert!(full.message().contains("per-principal"), "{full}");
    assert!(world.world.audited(&[
        ("event", "register"),
        ("principal", "sidecars"),
        ("object", "r3"),
        ("outcome", "FLEET_FULL"),
    ]));
    world.register_as("r3", "others", "b").await.unwrap();
    // One that leaves makes room.
    let leave = DeregisterReplicaRequest {
        replica_id: "r1".to_owned(),
        incarnation: first,
    };
    let mut sidecars = world.world.replicas("sidecars");
    sidecars.deregister_replica(leave).await.unwrap();
    world.register_as("r4", "sidecars", "b").await.unwrap();
    world.world.stop().await;
}
