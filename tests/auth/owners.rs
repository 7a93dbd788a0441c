//! Whose a replica is.

use std::time::Duration;

use berth::{
    auth::token::Token,
    proto::{DeregisterReplicaRequest, HeartbeatRequest, RegisterReplicaRequest},
};
use tonic::{Code, Status};

use crate::{
    addresses::registration,
    world::{World, eventually, line, reason, why},
};

const REPLICA: &str = "stranger";

struct Owned(World);

impl Owned {
    async fn register(&self, who: &str, boot: &str) -> Result<u64, Status> {
        let asked = RegisterReplicaRequest {
            boot_id: boot.to_owned(),
            ..registration("http://127.0.0.1:30000".to_owned())
        };
        let registered = self.0.replicas(who).register_replica(asked).await;
        registered.map(|r| r.into_inner().incarnation)
    }

    async fn beat(&self, who: &str, incarnation: u64) -> Result<(), Status> {
        let beat = HeartbeatRequest {
            replica_id: REPLICA.to_owned(),
            incarnation,
            sequence: 1,
            ..HeartbeatRequest::default()
        };
        self.0.replicas(who).heartbeat(beat).await.map(drop)
    }

    async fn leave(&self, who: &str, incarnation: u64) -> Result<(), Status> {
        let leave = DeregisterReplicaRequest {
            replica_id: REPLICA.to_owned(),
            incarnation,
        };
        self.0
            .replicas(who)
            .deregister_replica(leave)
            .await
            .map(drop)
    }

    fn audited(&self, event: &str, principal: &str, outcome: &str) -> bool {
        self.0.audited(&[
            ("event", event),
            ("principal", principal),
            ("object", REPLICA),
            ("outcome", outcome),
        ])
    }
}

#[tokio::test]
async fn a_replica_is_its_principals_while_it_lives() {
    let world = World::start(0, |config| {
        // It lives as long as the test does.
        config.fleet.lease.interval = Duration::from_secs(60);
    })
    .await;
    let token = Token::mint().unwrap();
    std::fs::write(world.path("others"), token.expose()).unwrap();
    world.credentials(&line("others", "role=replica", &token), None);
    let world = Owned(world);
    let first = world.register("sidecars", "b1").await.unwrap();
    eventually("the new token is known", async || {
        let refused = world.beat("others", first).await.unwrap_err();
        refused.code() != Code::Unauthenticated
    })
    .await;

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
    world.0.stop().await;
}
