//! What is a tenant's own.

use berth::proto::{
    CancelSampleRequest, GetPinRequest, GetSampleRequest, Pin, PurgeTenantRequest, RouteReason,
    SampleRequest, TokenIds, WeightsConstraint, sample_request::Prompt,
    weights_constraint::Constraint,
};

use berth::engine::sim::SimConfig;

use crate::world::{World, eventually, finish, keyed, named, request, why};

#[tokio::test]
async fn an_idempotency_key_is_a_tenants_own() {
    let world = World::start(1, |_| {}).await;
    let received = || world.engine().counters().received;
    let first = world.sample("trainer-a", named("k")).await.unwrap();
    assert!(!first.replayed);
    // To the other tenant the key is unknown, in every way of asking.
    let get = || GetSampleRequest {
        idempotency_key: "k".to_owned(),
        ..GetSampleRequest::default()
    };
    let cancel = || CancelSampleRequest {
        idempotency_key: "k".to_owned(),
    };
    let mut b = world.sampling("trainer-b");
    assert_eq!(why(b.get_sample(get()).await), "KEY_NOT_FOUND");
    assert_eq!(why(b.cancel_sample(cancel()).await), "KEY_NOT_FOUND");
    // Used with other parameters it is no conflict, as it would be within one.
    let mut other = named("k");
    other.sampling.as_mut().unwrap().max_tokens = Some(5);
    let second = world.sample("trainer-b", other.clone()).await.unwrap();
    assert!(!second.replayed);
    assert_eq!(received(), 2, "each tenant has a generation of its own");
    let conflict = world.sample("trainer-a", other).await;
    assert_eq!(why(conflict), "IDEMPOTENCY_KEY_REUSED");
    assert!(
        world
            .sample("trainer-a", named("k"))
            .await
            .unwrap()
            .replayed
    );
    // Another principal of the same tenant has the same keys.
    assert!(world.sample("bench", named("k")).await.unwrap().replayed);
    assert_eq!(received(), 2);
    world.stop().await;
}

#[tokio::test]
async fn an_affinity_key_is_a_tenants_own() {
    let world = World::start(2, |_| {}).await;
    let reason = async |who: &str| {
        let response = world.sample(who, keyed("t")).await.unwrap();
        response.samples[0].route.as_ref().unwrap().reason()
    };
    assert_eq!(reason("trainer-a").await, RouteReason::NewKey);
    assert_eq!(reason("trainer-a").await, RouteReason::Pinned);
    // Whether another tenant used it is not seen from hit or miss.
    assert_eq!(reason("trainer-b").await, RouteReason::NewKey);

    let pin = async |tenant: &str| -> Option<Pin> {
        let asked = GetPinRequest {
            cache_affinity_key: "t".to_owned(),
            tenant: Some(tenant.to_owned()),
            ..GetPinRequest::default()
        };
        let answer = world.fleet("ops").get_pin(asked).await.unwrap();
        answer.into_inner().pin
    };
    let (a, b) = (pin("a").await.unwrap(), pin("b").await.unwrap());
    assert_ne!(a.replica_id, b.replica_id, "two trajectories, two ranks");
    assert!(pin("c").await.is_none());
    // Its end is its own tenant's to say.
    let mut client = world.sampling("trainer-b");
    assert!(
        client
            .finish_trajectory(finish("t"))
            .await
            .unwrap()
            .into_inner()
            .unpinned
    );
    assert!(pin("b").await.is_none());
    assert!(pin("a").await.is_some());
    assert_eq!(reason("trainer-a").await, RouteReason::Pinned);
    world.stop().await;
}

#[tokio::test]
async fn what_berth_knows_of_prompts_is_a_tenants_own() {
    let world = World::start(2, |config| config.router.keyless_prefix = true).await;
    // Long enough to be known again by its beginning.
    let long = SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: (1..=1024).collect(),
        })),
        ..request(1, 4)
    };
    let route = async |who: &str, asked: &SampleRequest| {
        let response = world.sample(who, asked.clone()).await.unwrap();
        let route = response.samples[0].route.clone().unwrap();
        (route.reason(), route.expected_cached_tokens)
    };
    assert_eq!(route("trainer-a", &long).await, (RouteReason::NoKey, 0));
    let (reason, expected) = route("trainer-a", &long).await;
    assert_eq!(reason, RouteReason::Prefix);
    assert!(expected > 0);
    // To the other tenant it is new.
    assert_eq!(route("trainer-b", &long).await, (RouteReason::NoKey, 0));
    assert_eq!(route("trainer-b", &long).await.0, RouteReason::Prefix);
    world.stop().await;
}

fn purge(tenant: &str) -> PurgeTenantRequest {
    PurgeTenantRequest {
        tenant: tenant.to_owned(),
    }
}

#[tokio::test]
async fn a_tenant_is_purged_and_the_others_are_not() {
    let world = World::start(1, |_| {}).await;
    let both = |key: &str| SampleRequest {
        cache_affinity_key: Some("t".to_owned()),
        ..named(key)
    };
    for n in 0..3 {
        for who in ["trainer-a", "trainer-b"] {
            world.sample(who, both(&format!("k{n}"))).await.unwrap();
        }
    }
    let mut ops = world.fleet("ops");
    assert_eq!(
        why(world.fleet("trainer-a").purge_tenant(purge("a")).await),
        "ROLE_MISSING"
    );
    let gone = ops.purge_tenant(purge("a")).await.unwrap().into_inner();
    assert_eq!((gone.keys, gone.pins, gone.kept), (3, 1, 0));
    assert!(gone.bytes > 0);
    assert_eq!(why(ops.purge_tenant(purge("a")).await), "TENANT_NOT_FOUND");
    assert_eq!(
        why(ops.purge_tenant(purge("nobody")).await),
        "TENANT_NOT_FOUND"
    );
    assert_eq!(why(ops.purge_tenant(purge("a b")).await), "INVALID_REQUEST");

    // As if it had never been.
    let asked = GetSampleRequest {
        idempotency_key: "k0".to_owned(),
        ..GetSampleRequest::default()
    };
    let known = world.sampling("trainer-a").get_sample(asked.clone()).await;
    assert_eq!(why(known), "KEY_NOT_FOUND");
    let again = world.sample("trainer-a", both("k0")).await.unwrap();
    assert!(!again.replayed);
    let route = again.samples[0].route.as_ref().unwrap();
    assert_eq!(route.reason(), RouteReason::NewKey);
    // The other one's is all there.
    world.sampling("trainer-b").get_sample(asked).await.unwrap();
    let kept = world.sample("trainer-b", keyed("t")).await.unwrap();
    let route = kept.samples[0].route.as_ref().unwrap();
    assert_eq!(route.reason(), RouteReason::Pinned);
    for (object, outcome) in [("a", "OK"), ("nobody", "TENANT_NOT_FOUND")] {
        assert!(world.audited(&[
            ("event", "purge"),
            ("principal", "ops"),
            ("object", object),
            ("outcome", outcome),
        ]));
    }
    world.stop().await;
}

#[tokio::test]
async fn a_tenant_at_work_is_not_purged() {
    let engine = SimConfig {
        step: Some(std::time::Duration::from_millis(50)),
        time_scale: 1.0,
        ..SimConfig::instant()
    };
    let world = World::with(1, engine, |_, _| {}).await;
    world.sample("trainer-a", named("done")).await.unwrap();
    let mut client = world.sampling("trainer-a");
    let mut running = client.sample_stream(request(9, 4_096)).await.unwrap();
    running.get_mut().message().await.unwrap();
    eventually("it runs", async || world.engine().counters().started == 2).await;
    let mut ops = world.fleet("ops");
    assert_eq!(why(ops.purge_tenant(purge("a")).await), "TENANT_ACTIVE");
    drop(running);
    eventually("it has ended", async || {
        ops.purge_tenant(purge("a")).await.is_ok()
    })
    .await;
    world.stop().await;
}

#[tokio::test]
async fn what_a_tenant_may_have_in_flight_is_its_own() {
    let engine = SimConfig {
        step: Some(std::time::Duration::from_millis(50)),
        time_scale: 1.0,
        ..SimConfig::instant()
    };
    let world = World::with(1, engine, |_, config| {
        config.stack.admission.tenant_samples = 2;
        config.stack.admission.tenant_queue = 0;
        // A key's generation ends soon after its last caller has gone.
        config.stack.grace = std::time::Duration::from_millis(50);
    })
    .await;
    let two = SampleRequest {
        num_samples: Some(2),
        idempotency_key: Some("joined".to_owned()),
        ..request(9, 4_096)
    };
    let mut client = world.sampling("trainer-a");
    let mut running = client.sample_stream(two.clone()).await.unwrap();
    running.get_mut().message().await.unwrap();
    eventually("both run", async || world.engine().counters().started == 2).await;
    // What would be too much with nothing else in flight waits for nothing.
    let alone = SampleRequest {
        num_samples: Some(3),
        ..request(1, 2)
    };
    let status = world.sample("trainer-a", alone.clone()).await.unwrap_err();
    assert_eq!(why::<()>(Err(status.clone())), "INVALID_REQUEST");
    assert!(
        status.message().contains("--tenant-max-in-flight"),
        "{status}"
    );
    let explained = berth::proto::ExplainRouteRequest {
        request: Some(alone),
    };
    let explained = world.sampling("trainer-a").explain_route(explained).await;
    assert_eq!(why(explained), "INVALID_REQUEST");
    // Who joins what runs takes no place.
    let joined = {
        let mut client = world.sampling("trainer-a");
        let again = client.sample_stream(two).await.unwrap();
        again.into_inner()
    };
    let status = world.sample("trainer-a", request(1, 2)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(why::<()>(Err(status.clone())), "TENANT_BUSY");
    let told = tonic_types::StatusExt::get_details_retry_info(&status);
    assert!(told.unwrap().retry_delay.is_some());
    // Nobody else, and nothing else, waits for that.
    world.sample("trainer-b", request(1, 2)).await.unwrap();
    let mut ops = world.fleet("ops");
    let stats = ops.get_stats(berth::proto::GetStatsRequest {}).await;
    assert_eq!(stats.unwrap().into_inner().counters["joins"], 1);
    drop((running, joined));
    eventually("there is room again", async || {
        world.sample("trainer-a", request(1, 2)).await.is_ok()
    })
    .await;
    world.stop().await;
}

#[tokio::test]
async fn those_who_wait_for_weights_are_as_many_as_may_wait_for_their_turn() {
    let world = World::with(1, SimConfig::instant(), |_, config| {
        config.stack.admission.tenant_queue = 2;
    })
    .await;
    let later = || SampleRequest {
        weights: Some(WeightsConstraint {
            constraint: Some(Constraint::AtLeast(9)),
            wait: true,
        }),
        ..request(1, 2)
    };
    let calls = |who: &'static str, count: usize| {
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..count {
            let mut client = world.sampling(who);
            calls.spawn(async move { client.sample(later()).await });
        }
        calls
    };
    let mut of_a = calls("trainer-a", 5);
    // Three are too many, whichever they are.
    for _ in 0..3 {
        let status = of_a.join_next().await.unwrap().unwrap().unwrap_err();
        assert_eq!(why::<()>(Err(status.clone())), "TENANT_BUSY");
        let told = tonic_types::StatusExt::get_details_retry_info(&status);
        assert!(told.unwrap().retry_delay.is_some());
    }
    // What waits so is in nobody's way.
    world.sample("trainer-a", request(1, 2)).await.unwrap();
    let mut of_b = calls("trainer-b", 3);
    let status = of_b.join_next().await.unwrap().unwrap().unwrap_err();
    assert_eq!(why::<()>(Err(status)), "TENANT_BUSY");

    world.engine().set_weight_version("9", false);
    for served in of_a
        .join_all()
        .await
        .into_iter()
        .chain(of_b.join_all().await)
    {
        served.unwrap();
    }
    // Their places are free again.
    let mut again = calls("trainer-a", 2);
    again.join_next().await.unwrap().unwrap().unwrap();
    world.stop().await;
}
