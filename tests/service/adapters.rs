//! LoRA adapters: asked for by name, found where they are, and told apart in the
//! cache.

use std::time::Duration;

use berth::{
    engine::sim::SimConfig,
    proto::{AttemptFailure, RouteReason, SampleRequest},
};
use tonic::Code;

use crate::cluster::{
    Cluster, cached, eventually, home, ids, instant, keyed, only, refused, request, route,
};

fn with(adapters: &[&str]) -> SimConfig {
    let adapters = adapters
        .iter()
        .map(|name| ((*name).to_owned(), format!("/{name}/1")));
    SimConfig {
        adapters: Some(adapters.collect()),
        ..instant()
    }
}

async fn cluster(replicas: &[&[&str]], interval: Duration) -> Cluster {
    let mut cluster = Cluster::with(0, instant(), |c| c.fleet.lease.interval = interval).await;
    for (i, adapters) in replicas.iter().enumerate() {
        cluster
            .playground
            .add_with(&format!("r{i}"), with(adapters), |_| {})
            .await
            .unwrap();
    }
    cluster
}

const SOON: Duration = Duration::from_millis(100);
/// Beats say nothing within a test.
const LATE: Duration = Duration::from_secs(30);

fn of(adapter: &str, request: SampleRequest) -> SampleRequest {
    SampleRequest {
        adapter: Some(adapter.to_owned()),
        ..request
    }
}

fn load_id(cluster: &Cluster, replica: &str, adapter: &str) -> Option<String> {
    let snapshot = cluster.playground.server().parts().fleet.snapshot();
    let mut ranks = snapshot.ranks.iter();
    let rank = ranks.find(|r| r.target.replica.as_str() == replica)?;
    let adapters = &rank.replica.facts.adapters;
    let found = adapters.iter().find(|a| *a.name == *adapter)?;
    Some(found.load_id.clone())
}

#[tokio::test]
async fn an_adapter_goes_where_it_is_and_nowhere_else() {
    let cluster = cluster(&[&["a"], &["a", "b"], &[]], SOON).await;
    for i in 0..12 {
        let asked = of("b", keyed(&format!("b{i}"), &ids(i, 32), 4));
        assert_eq!(home(only(&cluster.sample(asked).await.unwrap())).0, "r1");
        let asked = of("a", request(&ids(i, 32), 4));
        assert_ne!(home(only(&cluster.sample(asked).await.unwrap())).0, "r2");
    }
    let status = refused(
        cluster.sample(of("c", request(&ids(1, 32), 4))).await,
        Code::FailedPrecondition,
        "NOT_SUPPORTED",
    );
    assert!(status.message().contains("serves the adapter"), "{status}");
    cluster.stop().await;
}

#[tokio::test]
async fn what_is_loaded_and_unloaded_is_known_by_the_next_beat() {
    let cluster = cluster(&[&[], &[]], SOON).await;
    let asked = || of("a", request(&ids(1, 32), 4));
    let status = refused(
        cluster.sample(asked()).await,
        Code::FailedPrecondition,
        "NOT_SUPPORTED",
    );
    assert!(status.message().contains("serves the adapter"), "{status}");
    cluster.engine("r1").load_adapter("a", "/a/1");
    eventually("it is known", async || {
        load_id(&cluster, "r1", "a").is_some()
    })
    .await;
    assert_eq!(home(only(&cluster.sample(asked()).await.unwrap())).0, "r1");
    cluster.engine("r1").unload_adapter("a");
    eventually("that too", async || load_id(&cluster, "r1", "a").is_none()).await;
    assert!(cluster.sample(asked()).await.is_err());
    cluster.stop().await;
}

/// The registry is behind: the engine's refusal tells, and another serves.
#[tokio::test]
async fn an_adapter_that_is_gone_behind_our_back_costs_one_attempt() {
    let cluster = cluster(&[&["a"], &["a"]], LATE).await;
    cluster.engine("r0").unload_adapter("a");
    let mut met = 0;
    for i in 0..8 {
        let asked = of("a", request(&ids(i, 32), 4));
        let response = cluster.sample(asked).await.unwrap();
        assert_eq!(home(only(&response)).0, "r1");
        let attempts = &route(only(&response)).attempts;
        if attempts.len() > 1 {
            assert_eq!(attempts[0].failure(), AttemptFailure::Adapter);
            met += 1;
        }
    }
    assert_eq!(met, 1, "known after the first");
    cluster.engine("r1").unload_adapter("a");
    refused(
        cluster.sample(of("a", request(&ids(9, 32), 4))).await,
        Code::FailedPrecondition,
        "NOT_SUPPORTED",
    );
    cluster.stop().await;
}

/// KV that another adapter made is another model's.
#[tokio::test]
async fn adapters_share_no_cache_and_no_pin() {
    let cluster = cluster(&[&["a", "b"]], SOON).await;
    let prompt = ids(1, 64);
    let turn = async |adapter: Option<&str>| {
        let mut asked = keyed("t", &prompt, 4);
        asked.adapter = adapter.map(str::to_owned);
        only(&cluster.sample(asked).await.unwrap()).clone()
    };
    for adapter in [Some("a"), Some("b"), None] {
        let first = turn(adapter).await;
        assert_eq!(route(&first).reason(), RouteReason::NewKey, "{adapter:?}");
        assert_eq!(cached(&first), 0, "{adapter:?}");
    }
    for adapter in [Some("a"), Some("b"), None] {
        let second = turn(adapter).await;
        assert_eq!(route(&second).reason(), RouteReason::Pinned, "{adapter:?}");
        assert_eq!(cached(&second), 63, "{adapter:?}");
        assert_eq!(route(&second).expected_cached_tokens, 63);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_reloaded_adapter_is_expected_cold_and_is() {
    let cluster = cluster(&[&["a"]], SOON).await;
    let prompt = ids(1, 64);
    let turn = async || {
        let asked = of("a", keyed("t", &prompt, 4));
        let sample = only(&cluster.sample(asked).await.unwrap()).clone();
        let expected = route(&sample).expected_cached_tokens;
        assert_eq!(cached(&sample), expected, "as expected");
        (route(&sample).reason(), expected)
    };
    assert_eq!(turn().await, (RouteReason::NewKey, 0));
    assert_eq!(turn().await, (RouteReason::Pinned, 63));
    cluster.engine("r0").load_adapter("a", "/a/2");
    eventually("the new load is known", async || {
        load_id(&cluster, "r0", "a").as_deref() == Some("/a/2")
    })
    .await;
    assert_eq!(
        turn().await,
        (RouteReason::Pinned, 0),
        "its cache is another's"
    );
    assert_eq!(turn().await, (RouteReason::Pinned, 63));
    cluster.stop().await;
}
