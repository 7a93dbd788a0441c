//! Rules of routing that cross layers: groups, admission, prefixes, what is shown
//! of a decision, and what is seen of an engine that does not play along.

use std::{collections::BTreeSet, time::Duration};

use berth::{
    engine::sim::{Faults, SimConfig},
    proto::{
        ExplainRouteRequest, ExplainRouteResponse, FinishTrajectoryRequest, FleetRank, Group,
        ListReplicasRequest, RankAffinity, RouteReason, RoutingPolicy, SampleRequest,
        sampling_service_client::SamplingServiceClient,
    },
    routing::KvAdmission,
};
use futures_util::future::join_all;
use tonic::Code;

use crate::cluster::{
    Cluster, cached, eventually, home, ids, instant, keyed, only, refused, request, route, stepping,
};

async fn explain(cluster: &Cluster, request: SampleRequest) -> ExplainRouteResponse {
    let request = ExplainRouteRequest {
        request: Some(request),
    };
    let response = cluster.client().explain_route(request).await;
    response.unwrap().into_inner()
}

async fn counter(cluster: &Cluster, name: &str) -> u64 {
    let request = berth::proto::GetStatsRequest {};
    let stats = cluster.operator().get_stats(request).await.unwrap();
    stats.into_inner().counters[name]
}

async fn ranks(cluster: &Cluster) -> Vec<FleetRank> {
    let request = ListReplicasRequest::default();
    let list = cluster.operator().list_replicas(request).await.unwrap();
    let replicas = list.into_inner().replicas;
    replicas.into_iter().flat_map(|r| r.ranks).collect()
}

#[tokio::test]
async fn what_is_explained_is_what_happens_and_nothing_is_left_of_it() {
    let cluster = Cluster::start(4, instant()).await;
    let prompt = ids(1, 64);
    for turn in 0..3 {
        let asked = keyed("t", &prompt, 4);
        let shown = explain(&cluster, asked.clone()).await;
        let again = explain(&cluster, asked.clone()).await;
        assert_eq!(shown, again);
        let pins = cluster.playground.server().parts().router.pins();
        assert_eq!(pins, usize::from(turn > 0), "nothing is pinned by it");
        let there = shown.route.unwrap();
        let response = cluster.sample(asked).await.unwrap();
        let is = route(only(&response));
        assert_eq!(
            (
                &there.replica_id,
                there.incarnation,
                there.rank,
                there.reason()
            ),
            (&is.replica_id, is.incarnation, is.rank, is.reason())
        );
        assert_eq!(there.expected_cached_tokens, is.expected_cached_tokens);
        assert_eq!(shown.candidates.len(), 4);
        let chosen: Vec<_> = shown.candidates.iter().filter(|c| c.chosen).collect();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].replica_id, is.replica_id);
        assert!(
            shown
                .candidates
                .iter()
                .all(|c| !c.why.is_empty() && c.eligible)
        );
    }
    assert_eq!(cluster.received(), 3, "nothing was sent by it");
    cluster.stop().await;
}

#[tokio::test]
async fn why_nobody_takes_it_is_an_answer_and_a_bad_request_an_error() {
    let cluster = Cluster::start(2, instant()).await;
    let asked = SampleRequest {
        return_routed_experts: true,
        ..request(&ids(1, 16), 4)
    };
    // No simulated engine of this kind has an adapter.
    let asked = SampleRequest {
        adapter: Some("none".to_owned()),
        ..asked
    };
    let shown = explain(&cluster, asked).await;
    assert!(shown.route.is_none());
    assert!(shown.no_route.contains("adapter"), "{}", shown.no_route);
    assert_eq!(shown.no_route_reason, "NOT_SUPPORTED");
    assert_eq!(shown.candidates.len(), 2);
    for candidate in &shown.candidates {
        // All of it, not the first alone.
        assert_eq!(
            candidate.why,
            "it does not serve the adapter; it cannot do routed experts"
        );
        assert!(!candidate.eligible);
    }
    let mut client = cluster.client();
    let bad = client.explain_route(ExplainRouteRequest::default()).await;
    refused(
        bad.map(|_| Default::default()),
        Code::InvalidArgument,
        "INVALID_REQUEST",
    );
    let other = ExplainRouteRequest {
        request: Some(SampleRequest {
            model: Some("other".to_owned()),
            ..request(&ids(1, 16), 4)
        }),
    };
    let unknown = client.explain_route(other).await;
    refused(
        unknown.map(|_| Default::default()),
        Code::NotFound,
        "MODEL_NOT_FOUND",
    );
    cluster.stop().await;
}

fn sibling(key: u32, share: bool, group: &str) -> SampleRequest {
    SampleRequest {
        group: Some(Group {
            key: group.to_owned(),
            share,
        }),
        ..keyed(&format!("{group}-{key}"), &ids(1, 256), 8)
    }
}

#[tokio::test]
async fn a_group_spreads_unless_it_shares() {
    let cluster = Cluster::start(4, instant()).await;
    let spread = join_all((0..8).map(|i| cluster.sample(sibling(i, false, "g")))).await;
    let mut homes: Vec<_> = spread
        .iter()
        .map(|r| {
            let sample = only(r.as_ref().unwrap());
            assert_eq!(route(sample).reason(), RouteReason::Group);
            home(sample)
        })
        .collect();
    homes.sort();
    let distinct: BTreeSet<_> = homes.iter().cloned().collect();
    assert_eq!(distinct.len(), 4, "{homes:?}");
    assert!(
        homes
            .iter()
            .all(|h| homes.iter().filter(|o| *o == h).count() <= 3)
    );
    let mut shared = BTreeSet::new();
    for i in 0..6 {
        let response = cluster.sample(sibling(i, true, "together")).await.unwrap();
        shared.insert(home(only(&response)));
        if i > 0 {
            assert_eq!(cached(only(&response)), 255, "the prompt is there");
        }
    }
    assert_eq!(shared.len(), 1);
    assert_eq!(counter(&cluster, "placed_by_group").await, 14);
    cluster.stop().await;
}

#[tokio::test]
async fn a_new_trajectory_waits_until_there_is_room() {
    let engine = SimConfig {
        kv_tokens: Some(4096),
        ..instant()
    };
    let cluster = Cluster::with(1, engine, |config| {
        config.router.kv_admission = Some(KvAdmission {
            share: 0.5,
            wait: Duration::from_secs(600),
        });
    })
    .await;
    cluster
        .sample(keyed("old", &ids(1, 1800), 8))
        .await
        .unwrap();
    let new = keyed("new", &ids(2, 1000), 8);
    let shown = explain(&cluster, new.clone()).await;
    assert!(shown.no_route.contains("room"), "{}", shown.no_route);
    let waiting = cluster.sample(new.clone());
    let frees = async {
        eventually("it waits", async || {
            counter(&cluster, "waits_for_kv").await == 1
        })
        .await;
        // A turn of one that is there does not.
        let turn = cluster
            .sample(keyed("old", &ids(1, 1800), 8))
            .await
            .unwrap();
        assert_eq!(route(only(&turn)).reason(), RouteReason::Pinned);
        assert_eq!(cluster.received(), 2, "the new one still waits");
        let finish = FinishTrajectoryRequest {
            cache_affinity_key: "old".to_owned(),
            ..FinishTrajectoryRequest::default()
        };
        cluster.client().finish_trajectory(finish).await.unwrap();
    };
    let (response, ()) = tokio::join!(waiting, frees);
    assert_eq!(
        route(only(&response.unwrap())).reason(),
        RouteReason::NewKey
    );
    assert_eq!(counter(&cluster, "waits_for_kv_in_vain").await, 0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_wait_for_room_ends_with_the_deadline_or_its_own_bound() {
    let engine = SimConfig {
        kv_tokens: Some(4096),
        ..instant()
    };
    let cluster = Cluster::with(1, engine, |config| {
        config.router.kv_admission = Some(KvAdmission {
            share: 0.5,
            wait: Duration::from_secs(2),
        });
    })
    .await;
    cluster
        .sample(keyed("old", &ids(1, 1800), 8))
        .await
        .unwrap();
    let mut hasty = tonic::Request::new(keyed("hasty", &ids(2, 1000), 8));
    let header = "300m".parse().unwrap();
    hasty.metadata_mut().insert("grpc-timeout", header);
    // Not tonic's channel, which would enforce the header itself.
    let http = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let origin = cluster.playground.url().parse().unwrap();
    let mut client = SamplingServiceClient::with_origin(http, origin);
    let late = client.sample(hasty).await.map(tonic::Response::into_inner);
    refused(late, Code::DeadlineExceeded, "DEADLINE");
    assert_eq!(cluster.received(), 1, "it was never sent");
    let patient = cluster.sample(keyed("patient", &ids(3, 1000), 8)).await;
    assert!(patient.is_ok(), "late, and not lost");
    assert_eq!(counter(&cluster, "waits_for_kv_in_vain").await, 1);
    cluster.stop().await;
}

#[tokio::test]
async fn turns_without_a_key_follow_their_prompt() {
    let cluster = Cluster::start(4, instant()).await;
    let mut prompt = ids(1, 2048);
    let mut first = None;
    for turn in 0..4 {
        let asked = SampleRequest {
            routing_policy: RoutingPolicy::Prefix.into(),
            ..request(&prompt, 600)
        };
        let response = cluster.sample(asked).await.unwrap();
        let sample = only(&response);
        assert_eq!(*first.get_or_insert_with(|| home(sample)), home(sample));
        if turn > 0 {
            assert_eq!(route(sample).reason(), RouteReason::Prefix);
            assert_eq!(cached(sample), prompt.len() as u64 - 1);
        }
        prompt.extend(&sample.token_ids);
    }
    assert_eq!(cluster.playground.server().parts().router.pins(), 0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_rank_that_ignores_pins_is_shown() {
    let engine = SimConfig {
        ranks: 2,
        ..instant()
    };
    let cluster = Cluster::start(1, engine).await;
    let faults = |ignore_rank| Faults {
        ignore_rank,
        ..Default::default()
    };
    cluster.engine("r0").set_faults(faults(true));
    for i in 0..12 {
        cluster
            .sample(keyed(&format!("t{i}"), &ids(i, 64), 4))
            .await
            .unwrap();
    }
    let shown = ranks(&cluster).await;
    assert!(
        shown
            .iter()
            .any(|r| r.affinity() == RankAffinity::IgnoresPins),
        "{shown:?}"
    );
    let wrong: u64 = shown.iter().map(|r| r.wrong_rank).sum();
    assert_eq!(wrong, counter(&cluster, "wrong_rank").await);
    assert!(wrong > 0);
    cluster.engine("r0").set_faults(faults(false));
    for i in 20..32 {
        cluster
            .sample(keyed(&format!("t{i}"), &ids(i, 64), 4))
            .await
            .unwrap();
    }
    let shown = ranks(&cluster).await;
    assert!(
        shown.iter().all(|r| r.affinity() == RankAffinity::Holds),
        "{shown:?}"
    );
    cluster.stop().await;
}

#[tokio::test]
async fn a_cache_that_is_flushed_behind_our_back_is_shown() {
    let cluster = Cluster::start(1, instant()).await;
    let prompt = ids(1, 512);
    let turn = async || {
        let response = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
        (
            cached(only(&response)),
            route(only(&response)).expected_cached_tokens,
        )
    };
    assert_eq!(turn().await, (0, 0));
    for _ in 0..10 {
        assert_eq!(turn().await, (511, 511));
    }
    let shown = ranks(&cluster).await;
    assert_eq!(shown[0].affinity(), RankAffinity::Holds);
    assert_eq!(shown[0].recent_found_percent, Some(100));
    for _ in 0..24 {
        assert!(cluster.engine("r0").flush().await);
        assert_eq!(turn().await, (0, 511));
    }
    let shown = ranks(&cluster).await;
    assert_eq!(shown[0].affinity(), RankAffinity::LosesCache);
    assert_eq!(shown[0].cached_tokens_expected, 34 * 511);
    assert_eq!(shown[0].cached_tokens_found, 10 * 511);
    assert_eq!(counter(&cluster, "cache_misses").await, 24);
    cluster.stop().await;
}

#[tokio::test]
async fn many_at_once_in_a_busy_group_stay_balanced() {
    let cluster = Cluster::start(4, stepping(Duration::from_millis(2))).await;
    let others: Vec<_> = (0..16)
        .map(|i| keyed(&format!("o{i}"), &ids(i, 32), 20))
        .collect();
    let others = others.into_iter().map(|r| cluster.sample(r));
    let group = (0..16).map(|i| cluster.sample(sibling(i, false, "g")));
    let (others, group) = tokio::join!(join_all(others), join_all(group));
    let mut counts = std::collections::BTreeMap::new();
    for response in others.iter().chain(&group) {
        *counts
            .entry(home(only(response.as_ref().unwrap())))
            .or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 4);
    assert!(counts.values().all(|c| (4..=13).contains(c)), "{counts:?}");
    cluster.stop().await;
}
