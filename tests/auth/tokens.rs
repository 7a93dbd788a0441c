//! Tokens and roles.

use std::time::Duration;

use berth::{
    auth::{Reflection, client::Access, token::Token},
    proto::{
        DrainReplicaRequest, ExplainRouteRequest, GetSampleRequest, HeartbeatRequest,
        ListReplicasRequest, RegisterReplicaRequest, RoutingPolicy, SampleRequest,
        WatchFleetRequest,
    },
};
use tonic::{Code, Status};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::world::{Load, World, eventually, finish, keyed, line, reason, replace, request, why};

#[tokio::test]
async fn a_role_does_what_is_its_own_and_nothing_else() {
    let world = World::start(1, |_| {}).await;
    // Each as far as it gets: what is refused later than by the role is let in.
    let may = async |who: &str| {
        let sampled = world.sample(who, request(1, 2)).await.map(drop);
        let explained = ExplainRouteRequest {
            request: Some(request(1, 2)),
        };
        let explained = world.sampling(who).explain_route(explained).await.map(drop);
        let registered = RegisterReplicaRequest::default();
        let registered = world.replicas(who).register_replica(registered).await;
        let beat = HeartbeatRequest::default();
        let beat = world.replicas(who).heartbeat(beat).await.map(drop);
        let listed = ListReplicasRequest::default();
        let listed = world.fleet(who).list_replicas(listed).await.map(drop);
        let drained = DrainReplicaRequest {
            replica_id: "nobody".to_owned(),
            ..DrainReplicaRequest::default()
        };
        let drained = world.fleet(who).drain_replica(drained).await.map(drop);
        [
            sampled,
            explained,
            registered.map(drop),
            beat,
            listed,
            drained,
        ]
        .map(|result| match result {
            Err(status) if reason(&status) == "ROLE_MISSING" => {
                assert_eq!(status.code(), Code::PermissionDenied);
                false
            }
            _ => true,
        })
    };
    assert_eq!(
        may("trainer-a").await,
        [true, true, false, false, false, false]
    );
    assert_eq!(
        may("sidecars").await,
        [false, false, true, true, false, false]
    );
    assert_eq!(may("ops").await, [false, true, false, false, true, true]);
    assert_eq!(may("bench").await, [true, true, false, false, true, true]);
    let refused = |principal, object| {
        world.audited(&[
            ("event", "refused"),
            ("principal", principal),
            ("object", object),
            ("outcome", "ROLE_MISSING"),
        ])
    };
    assert!(refused("trainer-a", "/berth.v1.FleetService/DrainReplica"));
    assert!(refused("sidecars", "/berth.v1.SamplingService/Sample"));
    assert!(world.audited(&[
        ("event", "register"),
        ("principal", "sidecars"),
        ("object", "r0"),
        ("outcome", "OK"),
        ("roles", "replica"),
    ]));
    assert!(world.audited(&[
        ("event", "drain"),
        ("principal", "ops"),
        ("outcome", "REPLICA_NOT_FOUND"),
    ]));
    world.stop().await;
}

#[tokio::test]
async fn who_is_not_known_is_told_so_and_written_down() {
    let world = World::start(0, |_| {}).await;
    let nobody = world.sample("nobody", request(1, 2)).await;
    let status = nobody.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(reason(&status), "NO_CREDENTIALS");

    let stranger = Token::mint().unwrap();
    std::fs::write(world.path("stranger"), stranger.expose()).unwrap();
    let status = world.sample("stranger", request(1, 2)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(reason(&status), "CREDENTIALS_REFUSED");
    assert!(!status.message().contains(stranger.expose()));
    for outcome in ["NO_CREDENTIALS", "CREDENTIALS_REFUSED"] {
        assert!(world.audited(&[("event", "refused"), ("outcome", outcome)]));
    }
    let audit = std::fs::read_to_string(world.path("audit")).unwrap();
    assert!(!audit.contains(&stranger.expose()[6..]));
    assert!(!audit.contains(&stranger.hash().to_string()));

    // A probe needs no credentials.
    let mut health = HealthClient::new(world.wire("nobody"));
    let health = health.check(HealthCheckRequest::default()).await;
    assert!(health.is_ok());
    world.stop().await;
}

async fn reflects(world: &World, who: &str) -> Result<(), Status> {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    };
    let mut client = ServerReflectionClient::new(world.wire(who));
    let asked = tokio_stream::iter([ServerReflectionRequest::default()]);
    client.server_reflection_info(asked).await.map(drop)
}

#[tokio::test]
async fn reflection_is_for_those_who_may() {
    for (reflection, trainer, admin) in [
        (Reflection::On, None, None),
        (Reflection::Admin, Some("ROLE_MISSING"), None),
        (
            Reflection::Off,
            Some("NOT_IMPLEMENTED"),
            Some("NOT_IMPLEMENTED"),
        ),
    ] {
        let world = World::start(0, |config| config.auth.reflection = reflection).await;
        for (who, refused) in [("trainer-a", trainer), ("ops", admin)] {
            let told = reflects(&world, who)
                .await
                .map_err(|status| reason(&status));
            assert_eq!(told.err().as_deref(), refused, "{reflection:?} {who}");
        }
        assert!(reflects(&world, "nobody").await.is_err());
        world.stop().await;
    }
}

#[tokio::test]
async fn only_an_admin_overrides_the_routing() {
    let world = World::start(1, |_| {}).await;
    let random = || SampleRequest {
        routing_policy: RoutingPolicy::Random.into(),
        ..request(1, 2)
    };
    assert_eq!(
        why(world.sample("trainer-a", random()).await),
        "ROLE_MISSING"
    );
    let streamed = world.sampling("trainer-a").sample_stream(random()).await;
    assert_eq!(why(streamed.map(drop)), "ROLE_MISSING");
    world.sample("bench", random()).await.unwrap();
    // Nor does anybody else ask what another policy would do.
    let explained = async |who| {
        let asked = ExplainRouteRequest {
            request: Some(random()),
        };
        world.sampling(who).explain_route(asked).await
    };
    assert_eq!(why(explained("trainer-a").await), "ROLE_MISSING");
    for who in ["bench", "ops"] {
        let routed = explained(who).await.unwrap().into_inner();
        assert!(routed.route.is_some(), "{who}: {}", routed.no_route);
    }
    world.stop().await;
}

#[tokio::test]
async fn tokens_are_exchanged_under_load_and_no_call_fails() {
    let world = World::start(1, |_| {}).await;
    let old = std::fs::read_to_string(world.path("trainer-a")).unwrap();
    std::fs::write(world.path("old"), &old).unwrap();

    // Trainers that never rest, on one channel that reads its token's file.
    let load = Load::start(&world.wire("trainer-a"));

    // First both count, then the client changes over, then the old one is gone.
    let new = Token::mint().unwrap();
    let old = Token::parse(&old).unwrap();
    world.credentials(&line("trainer-a", "role=sample tenant=a", &new), None);
    std::fs::write(world.path("newer"), new.expose()).unwrap();
    eventually("the new one counts", async || {
        world.sample("newer", request(1, 2)).await.is_ok()
    })
    .await;
    assert!(world.sample("old", request(1, 2)).await.is_ok());
    replace(&world.path("trainer-a"), new.expose());
    // The file is read again for a call once it was read a second ago.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    load.each_goes_on().await;
    world.credentials("", Some(&old.hash().to_string()));
    eventually("the old one is refused", async || {
        let old = world.sample("old", request(1, 2)).await;
        old.is_err_and(|status| reason(&status) == "CREDENTIALS_REFUSED")
    })
    .await;
    load.each_goes_on().await;
    load.stop().await;
    world.stop().await;
}

#[tokio::test]
async fn a_file_with_a_fault_changes_nothing_and_is_written_down() {
    let world = World::start(1, |_| {}).await;
    let good = std::fs::read_to_string(world.path("credentials")).unwrap();
    replace(
        &world.path("credentials"),
        "principal=x role=root sha256=1\n",
    );
    let refused = [("event", "credentials-reloaded"), ("outcome", "REFUSED")];
    eventually("it is refused", async || world.audited(&refused)).await;
    world.sample("trainer-a", request(1, 2)).await.unwrap();
    std::fs::remove_file(world.path("credentials")).unwrap();
    let count = || {
        world
            .audit()
            .iter()
            .filter(|l| l["outcome"] == "REFUSED")
            .count()
    };
    eventually("a missing one too", async || count() == 2).await;
    world.sample("trainer-a", request(1, 2)).await.unwrap();
    // And a good one counts again.
    let new = Token::mint().unwrap();
    std::fs::write(world.path("new"), new.expose()).unwrap();
    let new = line("new", "role=sample tenant=c", &new);
    replace(&world.path("credentials"), &format!("{good}{new}"));
    eventually("the new one counts", async || {
        world.sample("new", request(1, 2)).await.is_ok()
    })
    .await;
    assert_eq!(count(), 2, "each fault is told once");
    world.stop().await;
}

#[tokio::test]
async fn nothing_of_a_key_is_in_the_audit_log() {
    let world = World::start(1, |_| {}).await;
    let canary = "canary-in-a-key";
    world.sample("trainer-a", keyed(canary)).await.unwrap();
    let mut client = world.sampling("trainer-a");
    client.finish_trajectory(finish(canary)).await.unwrap();
    let key = GetSampleRequest {
        idempotency_key: canary.to_owned(),
        ..GetSampleRequest::default()
    };
    assert_eq!(why(client.get_sample(key).await), "KEY_NOT_FOUND");
    assert!(world.audited(&[
        ("event", "finish"),
        ("principal", "trainer-a"),
        ("tenant", "a"),
        ("outcome", "OK"),
    ]));
    let audit = std::fs::read_to_string(world.path("audit")).unwrap();
    assert!(!audit.contains(canary));
    world.stop().await;
}

#[tokio::test]
async fn a_client_without_a_readable_token_says_so() {
    let world = World::start(0, |_| {}).await;
    let access = Access {
        token_file: Some(world.path("not-there")),
        ..Access::default()
    };
    let wire = access.wire(&world.playground.url(), |endpoint| endpoint);
    let fault = wire.map(drop).unwrap_err()[0].to_string();
    assert!(
        fault.contains("not-there") && fault.contains("--token-file"),
        "{fault}"
    );
    world.stop().await;
}

#[tokio::test]
async fn a_watch_ends_with_its_credentials() {
    let world = World::start(1, |_| {}).await;
    let ops = std::fs::read_to_string(world.path("ops")).unwrap();
    let hash = Token::parse(&ops).unwrap().hash().to_string();
    let mut watch = world
        .fleet("ops")
        .watch_fleet(WatchFleetRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(watch.message().await.unwrap().is_some());
    world.credentials("", Some(&hash));
    // At the latest with its next sign of life.
    let ended = async {
        loop {
            match watch.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without a word"),
                Err(status) => return status,
            }
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(60), ended).await;
    assert_eq!(reason(&status.unwrap()), "CREDENTIALS_REFUSED");
    world.stop().await;
}

#[tokio::test]
async fn who_is_given_up_is_written_down() {
    let world = World::start(1, |_| {}).await;
    world.engine().kill().await;
    // By a request, or by its sidecar's next beat, whichever comes first.
    eventually("it is found dead", async || {
        let _ = world.sample("trainer-a", request(1, 2)).await;
        world.audited(&[("event", "evict"), ("object", "r0")])
    })
    .await;
    world.stop().await;
}
