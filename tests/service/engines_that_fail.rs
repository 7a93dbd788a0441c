//! Engines that refuse, break off, are full or lie.

use std::time::Duration;

use berth::{
    engine::sim::{Cut, CutWhen, DropStream, Faults, Times},
    proto::{AttemptFailure, OnAbort, OnLost, RouteReason, SampleRequest, StopReason},
};
use tonic::Code;

use crate::cluster::{
    Cluster, cached, eventually, expected, home, ids, instant, keyed, only, refused, request,
    route, stepping,
};

#[tokio::test]
async fn a_replica_killed_between_turns_moves_its_keys_once_and_no_others() {
    let cluster = Cluster::start(4, instant()).await;
    let prompts: Vec<_> = (0..16).map(|i| ids(i, 64)).collect();
    let turn = async |prompts: &[Vec<u32>]| {
        let mut homes = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let response = cluster
                .sample(keyed(&format!("t{i}"), prompt, 8))
                .await
                .unwrap();
            let sample = only(&response).clone();
            assert_eq!(sample.token_ids, expected(prompt, 8));
            homes.push((home(&sample), route(&sample).reason(), cached(&sample)));
        }
        homes
    };
    let before = turn(&prompts).await;
    let victim = before[0].0.0.clone();
    cluster.engine(&victim).kill().await;
    let after = turn(&prompts).await;
    let again = turn(&prompts).await;
    for i in 0..16 {
        if before[i].0.0 == victim {
            assert_ne!(after[i].0.0, victim);
            assert_eq!(after[i].1, RouteReason::ReplicaLost);
        } else {
            assert_eq!(
                (&after[i].0, after[i].1),
                (&before[i].0, RouteReason::Pinned)
            );
            assert_eq!(after[i].2, 63, "warm");
        }
        assert_eq!(
            (&again[i].0, again[i].1),
            (&after[i].0, RouteReason::Pinned)
        );
        assert_eq!(again[i].2, 63, "warm where it went");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_replica_killed_during_a_turn_is_replaced_within_the_turn() {
    let cluster = Cluster::start(2, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let victim = home(only(&first)).0;
    let turn = tokio::spawn({
        let mut client = cluster.client();
        let request = keyed("t", &prompt, 100);
        async move { client.sample(request).await }
    });
    eventually("it runs", async || {
        cluster.engine(&victim).counters().started == 2
    })
    .await;
    cluster.engine(&victim).kill().await;
    let response = turn.await.unwrap().unwrap().into_inner();
    let sample = only(&response);
    assert_eq!(sample.token_ids, expected(&prompt, 100));
    let receipt = route(sample);
    assert_ne!(receipt.replica_id, victim);
    assert_eq!(receipt.reason(), RouteReason::ReplicaLost);
    assert_eq!(receipt.attempts.len(), 2);
    assert_eq!(receipt.attempts[0].failure(), AttemptFailure::Lost);
    assert_eq!(receipt.attempts[0].replica_id, victim);
    assert_eq!(receipt.attempts[1].failure, None);
    cluster.stop().await;
}

#[tokio::test]
async fn a_stream_without_its_end_mark_is_lost_and_resumed_where_asked_for() {
    for (on_lost, kept) in [(OnLost::Restart, 0), (OnLost::Resume, 10)] {
        let cluster = Cluster::start(2, instant()).await;
        for engine in cluster.engines() {
            engine.set_faults(Faults {
                drop_stream: Some(DropStream {
                    times: Times::Next(1),
                    after_tokens: 10,
                }),
                ..Faults::default()
            });
        }
        let prompt = ids(1, 64);
        let mut asked = keyed("t", &prompt, 40);
        asked.on_lost = on_lost.into();
        asked.logprobs = Some(berth::proto::Logprobs {
            output: true,
            ..Default::default()
        });
        let response = cluster.sample(asked).await.unwrap();
        let sample = only(&response);
        assert_eq!(sample.token_ids, expected(&prompt, 40), "{on_lost:?}");
        assert_eq!(sample.logprobs.len(), 40);
        assert_eq!(sample.weight_spans.last().unwrap().end, 40);
        let attempts = &route(sample).attempts;
        assert_eq!(attempts.len(), 3, "both engines drop one");
        assert_eq!(attempts[0].kept_tokens, kept);
        assert_eq!(attempts.iter().map(|a| a.kept_tokens).sum::<u32>(), 40);
        cluster.stop().await;
    }
}

/// CASES 24: a valid request whose connection every engine drops.
#[tokio::test]
async fn a_request_that_every_engine_drops_costs_at_most_three_calls() {
    let cluster = Cluster::start(5, instant()).await;
    for engine in cluster.engines() {
        engine.set_faults(Faults {
            cut: Some(Cut {
                times: Times::Always,
                when: CutWhen::AtOnce,
            }),
            ..Faults::default()
        });
    }
    refused(
        cluster.sample(request(&ids(1, 64), 4)).await,
        Code::Unavailable,
        "REPLICA_LOST",
    );
    assert_eq!(cluster.received(), 3);
    cluster.stop().await;
}

/// CASES 23: 503 is load, not death.
#[tokio::test]
async fn a_full_queue_is_waited_for_at_home() {
    let cluster = Cluster::start(2, instant()).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let at = home(only(&first));
    for faults in [
        Faults {
            unavailable: Some(Times::Next(3)),
            ..Faults::default()
        },
        Faults {
            queue_full: Some(Times::Next(3)),
            ..Faults::default()
        },
    ] {
        cluster.engine(&at.0).set_faults(faults);
        let response = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
        let sample = only(&response);
        assert_eq!(home(sample), at);
        assert_eq!(route(sample).reason(), RouteReason::Pinned);
        assert_eq!(cached(sample), 63, "still warm");
        let busy = &route(sample).attempts[..3];
        assert!(busy.iter().all(|a| a.failure() == AttemptFailure::Busy));
    }
    cluster.stop().await;
}

/// CASES 21: ended early by the engine is told apart from finished.
#[tokio::test]
async fn an_engines_own_abort_is_continued_or_answered_as_asked() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let run = async |on_abort: OnAbort, key: &str| {
        let started = cluster.engine("r0").counters().started;
        let task = tokio::spawn({
            let mut client = cluster.client();
            let request = SampleRequest {
                on_abort: on_abort.into(),
                idempotency_key: Some(key.to_owned()),
                ..request(&prompt, 100)
            };
            async move { client.sample(request).await }
        });
        eventually("it runs", async || {
            cluster.engine("r0").counters().started > started
        })
        .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        cluster.engine("r0").abort_all();
        task.await.unwrap().unwrap().into_inner()
    };
    let response = run(OnAbort::Continue, "a").await;
    let sample = only(&response);
    assert_eq!(sample.token_ids, expected(&prompt, 100));
    assert_eq!(sample.stop_reason(), StopReason::Length);
    let attempts = &route(sample).attempts;
    assert_eq!(attempts.len(), 2);
    assert_eq!(attempts[0].failure(), AttemptFailure::Aborted);
    assert!(attempts[0].kept_tokens > 0);

    let partial = run(OnAbort::ReturnPartial, "b").await;
    let sample = only(&partial);
    assert_eq!(sample.stop_reason(), StopReason::Aborted);
    assert!(!sample.token_ids.is_empty() && sample.token_ids.len() < 100);
    assert_eq!(
        sample.token_ids,
        expected(&prompt, sample.token_ids.len() as u32)
    );
    let again = cluster
        .sample(SampleRequest {
            on_abort: OnAbort::ReturnPartial.into(),
            idempotency_key: Some("b".to_owned()),
            ..request(&prompt, 100)
        })
        .await
        .unwrap();
    assert!(again.replayed);
    assert_eq!(again.samples, partial.samples);
    cluster.stop().await;
}

/// Never two live copies: the copy whose connection broke is stopped by its id.
#[tokio::test]
async fn a_lost_attempt_does_not_run_on_beside_its_successor() {
    let cluster = Cluster::start(2, stepping(Duration::from_millis(5))).await;
    for engine in cluster.engines() {
        engine.set_faults(Faults {
            drop_stream: Some(DropStream {
                times: Times::Next(1),
                after_tokens: 5,
            }),
            ..Faults::default()
        });
    }
    let prompt = ids(1, 64);
    let response = cluster.sample(request(&prompt, 60)).await.unwrap();
    assert_eq!(only(&response).token_ids, expected(&prompt, 60));
    let mut records: Vec<_> = cluster.engines().flat_map(|e| e.history()).collect();
    records.sort_by_key(|r| r.arrived);
    assert_eq!(records.len(), 3);
    for pair in records.windows(2) {
        let overlap = pair[0].overlap(&pair[1]).unwrap_or_default();
        assert!(overlap < Duration::from_secs(1), "{overlap:?}");
    }
    cluster.stop().await;
}
