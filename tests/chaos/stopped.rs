//! A control plane that does not run for far longer than a lease: its own stall is
//! nobody else's fault.

use std::time::{Duration, SystemTime};

use berth::{
    engine::sim::{SimConfig, SimEngine},
    proto::{
        SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use futures_util::future::join_all;
use tokio::time::Instant;

use crate::{
    load::{Load, Shape, detours, moves},
    process::Serve,
    sidecar, time,
    watcher::{Watcher, healthy},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_control_plane_calls_nobody_dead_and_moves_no_trajectory() {
    let stopped = time("BERTH_CHAOS_STOP", Duration::from_secs(3));
    let serve = Serve::start(&["--heartbeat-interval", "200ms"]);
    let (mut engines, mut sidecars) = (Vec::new(), Vec::new());
    for i in 0..3 {
        let engine = SimEngine::start(SimConfig {
            step: Some(Duration::from_millis(2)),
            time_scale: 1.0,
            incremental_streaming_output: true,
            ..SimConfig::instant()
        })
        .await
        .unwrap();
        sidecars.push(sidecar(&serve.url, &engine.url(), &format!("r{i}")));
        engines.push(engine);
    }
    healthy(&serve.url, 3).await;
    let watcher = Watcher::start(&serve.url);
    let shape = Shape {
        trainers: 9,
        turns: usize::MAX,
        // Calls are given up while nothing answers, and made again.
        patience: Duration::from_secs(2),
    };
    let load = Load::start(&serve.url, shape);
    load.goes_on(3).await;
    serve.signal("-STOP");
    tokio::time::sleep(stopped).await;
    let before = load.turns().len();
    let (begun, then) = (Instant::now(), SystemTime::now());
    serve.signal("-CONT");
    load.goes_on(1).await;
    let first = load.turns()[before..].iter().map(|turn| turn.ended).min();
    let first = first.unwrap().duration_since(then).unwrap_or_default();
    // As long as it would take to call somebody dead.
    tokio::time::sleep(Duration::from_millis(200) * 9).await;
    load.goes_on(3).await;
    let turns = load.stop().await;
    for (id, seen) in watcher.seen() {
        assert!(seen.dead.is_empty(), "{id}: {seen:?}");
        assert_eq!(seen.incarnations.len(), 1, "{id}: {seen:?}");
    }
    let moves = moves(&turns);
    assert!(moves.is_empty(), "{moves:?}");
    let failed: u64 = turns.iter().map(|turn| turn.failed_calls).sum();
    assert!(failed > 0, "it was stopped for too short a time");
    println!(
        "stopped for {stopped:?} with a lease of 1.2 s: {} turns, {failed} calls given up and \
         made again, {} detours, 0 moves, nobody dead; the first answer {first:.2?} after it went \
         on, {:.2?} until the end",
        turns.len(),
        detours(&turns),
        begun.elapsed()
    );
}

/// Every call that is given up is a reset, and too many resets that nobody has
/// looked at end a connection, with all other calls on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_is_given_up_meanwhile_takes_no_other_call_of_its_channel_with_it() {
    let serve = Serve::start(&[]);
    let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
    let _sidecar = sidecar(&serve.url, &engine.url(), "r0");
    healthy(&serve.url, 1).await;
    let client = SamplingServiceClient::connect(serve.url.clone())
        .await
        .unwrap();
    let call = async |n: u32, patience: Duration| {
        let mut request = tonic::Request::new(SampleRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![n; 8] })),
            sampling: Some(Sampling {
                max_tokens: Some(4),
                ignore_eos: true,
                ..Sampling::default()
            }),
            ..SampleRequest::default()
        });
        request.set_timeout(patience);
        client.clone().sample(request).await
    };
    // So that the server's limits are known to the client.
    call(0, Duration::from_secs(60)).await.unwrap();
    serve.signal("-STOP");
    let given_up = async {
        let batch = (1..400).map(|n| call(n, Duration::from_millis(300)));
        let failed = join_all(batch).await;
        assert!(failed.iter().all(Result::is_err));
        serve.signal("-CONT");
    };
    let (kept, ()) = tokio::join!(call(1000, Duration::from_secs(60)), given_up);
    kept.unwrap();
}
