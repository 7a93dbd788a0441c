//! Where requests go.

use std::collections::{BTreeMap, BTreeSet};

use berth::proto::{FinishTrajectoryRequest, RouteReason, RoutingPolicy, SampleRequest};
use futures_util::future::join_all;

use crate::cluster::{
    Cluster, cached, eventually, expected, home, ids, instant, keyed, only, request, route,
};

#[tokio::test]
async fn a_trajectory_stays_on_its_rank_and_every_warm_turn_finds_its_history() {
    let cluster = Cluster::start(
        2,
        berth::engine::sim::SimConfig {
            ranks: 2,
            ..instant()
        },
    )
    .await;
    let mut prompt = ids(1, 1000);
    let mut first = None;
    for turn in 0..5 {
        let response = cluster.sample(keyed("t", &prompt, 50)).await.unwrap();
        let sample = only(&response);
        assert_eq!(sample.token_ids, expected(&prompt, 50));
        let route = route(sample);
        let reason = if turn == 0 {
            RouteReason::NewKey
        } else {
            RouteReason::Pinned
        };
        assert_eq!(route.reason(), reason);
        assert_eq!(route.served_rank, Some(route.rank));
        assert_eq!(route.attempts.len(), 1);
        let reusable = if turn == 0 {
            0
        } else {
            prompt.len() as u64 - 1
        };
        assert_eq!(cached(sample), reusable, "turn {turn}");
        assert_eq!(route.expected_cached_tokens, reusable, "turn {turn}");
        assert_eq!(*first.get_or_insert_with(|| home(sample)), home(sample));
        prompt.extend(&sample.token_ids);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn an_answer_carries_all_that_was_asked_for() {
    let cluster = Cluster::start(1, instant()).await;
    let prompt = ids(1, 20);
    let mut asked = request(&prompt, 6);
    asked.num_samples = Some(3);
    asked.sampling.as_mut().unwrap().seed = Some(100);
    asked.logprobs = Some(berth::proto::Logprobs {
        output: true,
        top_k: 2,
        prompt: true,
        prompt_top_k: 1,
    });
    let response = cluster.sample(asked.clone()).await.unwrap();
    assert_eq!(response.samples.len(), 3);
    for (i, sample) in response.samples.iter().enumerate() {
        assert_eq!(sample.index, i as u32);
        let seed = 100 + i as u64;
        let tokens = berth::engine::sim::tokens::expected(&prompt, seed, 6, crate::cluster::VOCAB);
        assert_eq!(sample.token_ids, tokens, "sample i has seed + i");
        assert_eq!(sample.logprobs.len(), 6);
        let top = sample.top_logprobs.as_ref().unwrap();
        assert_eq!(
            (top.stride, top.token_ids.len(), top.logprobs.len()),
            (2, 12, 12)
        );
        assert_eq!(sample.weight_spans.len(), 1);
        assert_eq!(
            (sample.weight_spans[0].start, sample.weight_spans[0].end),
            (0, 6)
        );
        assert_eq!(sample.stop_reason(), berth::proto::StopReason::Length);
    }
    let scored = response.prompt_logprobs.as_ref().unwrap();
    assert_eq!(scored.logprobs.len(), 20);
    assert!(scored.logprobs[0].is_nan() && !scored.logprobs[1].is_nan());
    assert_eq!(scored.top_logprobs.as_ref().unwrap().stride, 1);
    let usage = response.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (60, 18));
    assert!(!response.replayed);
    assert!(!response.request_id.is_empty());

    asked.output_encoding = berth::proto::OutputEncoding::Packed.into();
    let packed = cluster.sample(asked).await.unwrap();
    let words: Vec<u32> = packed.samples[0]
        .token_ids_le
        .chunks(4)
        .map(|c| u32::from_le_bytes(c.try_into().unwrap()))
        .collect();
    assert_eq!(words, response.samples[0].token_ids);
    assert_eq!(packed.samples[0].logprobs_le.len(), 24);
    assert!(packed.samples[0].token_ids.is_empty());
    cluster.stop().await;
}

#[tokio::test]
async fn without_a_key_requests_spread_and_no_pin_is_made() {
    let cluster = Cluster::start(
        4,
        crate::cluster::stepping(std::time::Duration::from_millis(5)),
    )
    .await;
    let prompts: Vec<_> = (0..16).map(|i| ids(i, 64)).collect();
    let running = prompts.iter().map(|p| cluster.sample(request(p, 40)));
    let mut counts = BTreeMap::new();
    for response in join_all(running).await {
        let response = response.unwrap();
        assert_eq!(route(only(&response)).reason(), RouteReason::NoKey);
        *counts.entry(home(only(&response))).or_insert(0) += 1;
    }
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [4; 4]);
    assert_eq!(cluster.playground.server().parts().router.pins(), 0);
    cluster.stop().await;
}

/// A request that never heard of affinity and one whose key is unset are the
/// same bytes on the wire and are treated the same.
#[tokio::test]
async fn an_unset_key_is_no_key() {
    use prost::Message;
    let cluster = Cluster::start(2, instant()).await;
    let prompt = ids(1, 64);
    let unset = SampleRequest {
        cache_affinity_key: None,
        idempotency_key: Some("one".to_owned()),
        ..request(&prompt, 4)
    };
    let mut old = request(&prompt, 4);
    old.idempotency_key = Some("one".to_owned());
    assert_eq!(unset.encode_to_vec(), old.encode_to_vec());
    let a = cluster.sample(unset).await.unwrap();
    let b = cluster.sample(old).await.unwrap();
    assert!(b.replayed);
    assert_eq!(a.samples, b.samples);
    assert_eq!(route(only(&a)).reason(), RouteReason::NoKey);
    assert_eq!(route(only(&a)).expected_cached_tokens, 0);
    assert_eq!(cluster.playground.server().parts().router.pins(), 0);
    cluster.stop().await;
}

#[tokio::test]
async fn keyless_requests_spread_whatever_their_headers() {
    let cluster = Cluster::start(
        4,
        crate::cluster::stepping(std::time::Duration::from_millis(5)),
    )
    .await;
    let prompts: Vec<_> = (0..16).map(|i| ids(i, 16)).collect();
    let running = prompts.iter().map(|p| {
        let mut request = tonic::Request::new(request(p, 40));
        request
            .metadata_mut()
            .insert("authorization", "Bearer one-and-the-same".parse().unwrap());
        let mut client = cluster.client();
        async move { client.sample(request).await.unwrap().into_inner() }
    });
    let homes: BTreeSet<_> = join_all(running)
        .await
        .iter()
        .map(|r| home(only(r)))
        .collect();
    assert_eq!(homes.len(), 4);
    cluster.stop().await;
}

#[tokio::test]
async fn sixty_four_trajectories_that_start_at_once_spread_evenly() {
    let cluster = Cluster::start(8, instant()).await;
    let prompts: Vec<_> = (0..64).map(|i| ids(i, 32)).collect();
    let running = prompts
        .iter()
        .enumerate()
        .map(|(i, p)| cluster.sample(keyed(&format!("t{i}"), p, 4)));
    let mut counts = BTreeMap::new();
    for response in join_all(running).await {
        *counts.entry(home(only(&response.unwrap()))).or_insert(0) += 1;
    }
    // In-flight samples weigh as pins do, so two that overlap may differ by one
    // or two; an even spread is eight each.
    assert!(counts.values().all(|c| (7..=9).contains(c)), "{counts:?}");
    assert_eq!(counts.len(), 8);
    cluster.stop().await;
}

#[tokio::test]
async fn baselines_neither_use_nor_leave_pins() {
    let cluster = Cluster::start(4, instant()).await;
    let prompt = ids(1, 64);
    let pinned = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let with = |policy: RoutingPolicy, key: &str| SampleRequest {
        routing_policy: policy.into(),
        ..keyed(key, &prompt, 4)
    };
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let response = cluster
            .sample(with(RoutingPolicy::RoundRobin, "t"))
            .await
            .unwrap();
        assert_eq!(route(only(&response)).reason(), RouteReason::RoundRobin);
        seen.insert(home(only(&response)));
    }
    assert_eq!(seen.len(), 4);
    for policy in [RoutingPolicy::Random, RoutingPolicy::LeastLoaded] {
        cluster.sample(with(policy, "other")).await.unwrap();
    }
    assert_eq!(cluster.playground.server().parts().router.pins(), 1);
    let again = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    assert_eq!(home(only(&again)), home(only(&pinned)));
    cluster.stop().await;
}

#[tokio::test]
async fn a_finished_trajectory_frees_its_pin() {
    let cluster = Cluster::start(2, instant()).await;
    cluster.sample(keyed("t", &ids(1, 64), 4)).await.unwrap();
    let finish = |key: &str| FinishTrajectoryRequest {
        cache_affinity_key: key.to_owned(),
        ..FinishTrajectoryRequest::default()
    };
    let mut client = cluster.client();
    assert!(
        client
            .finish_trajectory(finish("t"))
            .await
            .unwrap()
            .into_inner()
            .unpinned
    );
    assert!(
        !client
            .finish_trajectory(finish("t"))
            .await
            .unwrap()
            .into_inner()
            .unpinned
    );
    let blank = client.finish_trajectory(finish("  ")).await.unwrap_err();
    assert_eq!(crate::cluster::reason(&blank), "INVALID_REQUEST");
    cluster.stop().await;
}

#[tokio::test]
async fn an_engine_that_ignores_the_rank_is_seen_in_the_receipt() {
    let engine = berth::engine::sim::SimConfig {
        ranks: 2,
        ..instant()
    };
    let cluster = Cluster::start(1, engine).await;
    cluster.engine("r0").set_faults(berth::engine::sim::Faults {
        ignore_rank: true,
        ..Default::default()
    });
    let response = cluster.sample(keyed("t", &ids(1, 64), 4)).await.unwrap();
    let route = route(only(&response));
    assert_ne!(route.served_rank, Some(route.rank));
    cluster.stop().await;
}

#[tokio::test]
async fn load_is_off_the_count_when_all_is_answered() {
    let cluster = Cluster::start(2, instant()).await;
    let prompts: Vec<_> = (0..20).map(|i| ids(i, 32)).collect();
    join_all(prompts.iter().map(|p| cluster.sample(request(p, 4)))).await;
    eventually("nothing in flight", async || {
        let snapshot = cluster.playground.server().parts().fleet.snapshot();
        snapshot.ranks.iter().all(|r| r.load.in_flight() == 0)
    })
    .await;
    cluster.stop().await;
}
