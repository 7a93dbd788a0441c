//! A prompt that kills engines must not kill the fleet.

use std::time::Duration;

use berth::{
    engine::sim::{SimConfig, SimEngine, SimHandle},
    proto::{AttemptFailure, SampleRequest},
};
use futures_util::future::join_all;
use tonic::Code;

use crate::cluster::{Cluster, eventually, instant, only, refused, request, route, stepping};

/// An id that the engines' vocabulary does not have, though they were registered
/// as if it had: stands for any prompt that ends an engine.
const DEADLY: u32 = 5000;

/// Engines with a vocabulary of 1,000 that are registered with a larger one, and
/// no sidecar that would know better.
async fn liars(cluster: &Cluster, count: u32) -> Vec<SimHandle> {
    let mut engines = Vec::new();
    for i in 0..count {
        let engine = SimEngine::start(SimConfig {
            vocab_size: 1000,
            step: Some(Duration::from_millis(1)),
            ..instant()
        })
        .await
        .unwrap();
        cluster.register(&format!("liar{i}"), &engine).await;
        engines.push(engine);
    }
    engines
}

fn alive(engines: &[SimHandle]) -> usize {
    engines.iter().filter(|e| e.is_alive()).count()
}

#[tokio::test]
async fn a_prompt_that_kills_engines_is_condemned_after_the_second() {
    let cluster = Cluster::start(0, instant()).await;
    let engines = liars(&cluster, 5).await;
    let deadly = |key: &str| SampleRequest {
        idempotency_key: Some(key.to_owned()),
        ..request(&[1, DEADLY, 3], 4)
    };
    let first = cluster.sample(deadly("a")).await;
    refused(first, Code::FailedPrecondition, "PROMPT_CONDEMNED");
    assert_eq!(alive(&engines), 3);
    // Under its key for ever, under any other key for a time.
    for key in ["a", "b"] {
        let again = cluster.sample(deadly(key)).await;
        refused(again, Code::FailedPrecondition, "PROMPT_CONDEMNED");
    }
    let keyless = cluster.sample(request(&[1, DEADLY, 3], 4)).await;
    refused(keyless, Code::FailedPrecondition, "PROMPT_CONDEMNED");
    assert_eq!(alive(&engines), 3);
    cluster.sample(request(&[1, 2, 3], 4)).await.unwrap();
    cluster.stop().await;
}

/// Those that were in flight beside it are answered by another engine.
#[tokio::test]
async fn the_innocent_beside_it_are_answered() {
    let cluster = Cluster::start(0, instant()).await;
    let engines = liars(&cluster, 4).await;
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| vec![i, i + 1, i + 2]).collect();
    let innocent = join_all(prompts.iter().map(|p| cluster.sample(request(p, 400))));
    let guilty = async {
        eventually("all run", async || {
            engines.iter().map(|e| e.counters().started).sum::<u64>() == 8
        })
        .await;
        cluster.sample(request(&[1, DEADLY, 3], 4)).await
    };
    let (innocent, guilty) = tokio::join!(innocent, guilty);
    refused(guilty, Code::FailedPrecondition, "PROMPT_CONDEMNED");
    assert_eq!(alive(&engines), 2);
    for (prompt, response) in prompts.iter().zip(innocent) {
        let response = response.unwrap();
        let sample = only(&response);
        let tokens = berth::engine::sim::tokens::expected(prompt, 0, 400, 1000);
        assert_eq!(sample.token_ids, tokens);
        let failed = route(sample)
            .attempts
            .iter()
            .filter_map(|a| a.failure.map(|_| a.failure()));
        assert!(failed.clone().all(|f| f == AttemptFailure::Lost));
        assert!(failed.count() <= 2);
    }
    cluster.stop().await;
}

/// A crowd is counted on the replica, which dies as a whole: one after the other,
/// a few on each of many ranks would wait for minutes.
#[tokio::test]
async fn few_on_each_rank_are_a_crowd_on_their_replica() {
    const EACH: usize = 8;
    let engine = SimConfig {
        ranks: 4,
        ..stepping(Duration::from_millis(50))
    };
    let cluster = Cluster::start(2, engine).await;
    let running = |replica: &str| {
        let history = cluster.engine(replica).history();
        history.iter().filter(|r| r.ended.is_none()).count()
    };
    let prompts: Vec<Vec<u32>> = (1..=64).map(|i| vec![i, i + 1, i + 2]).collect();
    let all = join_all(prompts.iter().map(|p| cluster.sample(request(p, 120))));
    let deadly = async {
        eventually("all run", async || {
            running("r0") == 4 * EACH && running("r1") == 4 * EACH
        })
        .await;
        cluster.engine("r0").kill().await;
        // In single file there would be one more at a time.
        eventually("most run at once", async || running("r1") > 6 * EACH).await;
    };
    let (all, ()) = tokio::join!(all, deadly);
    for response in all {
        assert_eq!(only(&response.unwrap()).token_ids.len(), 120);
    }
    cluster.stop().await;
}
