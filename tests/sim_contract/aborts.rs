//! Aborts, full queues and priorities.

use berth::engine::sim::SimConfig;
use serde_json::json;

use super::*;

#[tokio::test]
async fn running_requests_are_aborted() {
    let engine = start(slow()).await;
    let url = engine.url();
    // So that the prompt is cached, as it was.
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();

    let running = begin("abort_running_reply", &url);
    runs(&engine, "fx-ab-1").await;
    check("flush_cache_busy", &url).await;
    check("abort_request", &url).await;
    let (recording, got) = ended("abort_running_reply", running).await;
    recording.assert_like_but(&got, PARTIAL);
    assert_consistent(&got.json());

    let running = begin("abort_running_reply_stream", &url);
    // Four frames and more.
    holds(&url, 16 + 10).await;
    support::post(&url, "/abort_request", json!({"rid": "fx-ab-2"}))
        .await
        .unwrap();
    let (recording, got) = ended("abort_running_reply_stream", running).await;
    recording.assert_like_but(&got, PARTIAL);
    let frames = frames(&got.body);
    assert_consistent(&serde_json::from_str(&frames[frames.len() - 2]).unwrap());

    let siblings: Vec<_> = ["fx-pre-1", "fx-pre-10", "fx-other"]
        .map(|rid| occupy(&engine, rid))
        .into();
    for rid in ["fx-pre-1", "fx-pre-10", "fx-other"] {
        runs(&engine, rid).await;
    }
    check("abort_request_prefix", &url).await;
    let mut siblings = siblings.into_iter();
    for _ in 0..2 {
        let got = within("a sibling ends", siblings.next().unwrap())
            .await
            .unwrap();
        assert_eq!(got.json()["meta_info"]["finish_reason"]["type"], "abort");
    }
    assert!(
        engine
            .history()
            .iter()
            .any(|r| &*r.rid == "fx-other" && r.ended.is_none())
    );

    let duplicate = occupy(&engine, "fx-dup");
    runs(&engine, "fx-dup").await;
    check("err_duplicate_rid", &url).await;
    check("err_duplicate_rid_stream", &url).await;
    support::post(&url, "/abort_request", json!({"abort_all": true}))
        .await
        .unwrap();
    within("fx-dup ends", duplicate).await.unwrap();
}

#[tokio::test]
async fn a_full_queue() {
    let engine = start(SimConfig {
        max_running_requests: 1,
        max_queued_requests: Some(1),
        ..slow()
    })
    .await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    occupy(&engine, "long");
    runs(&engine, "long").await;

    let waiting = begin("abort_waiting_reply", &url);
    waits(&engine, "q-wait").await;
    check("queue_full", &url).await;
    check("queue_full_stream", &url).await;
    check("queue_full_health", &url).await;
    let recording = Recording::load("queue_loads");
    let mut got = recording.send(&url).await.unwrap();
    // A busy rank's entry is up to 15 steps old.
    within("the waiting one is shown", async {
        while got.json()["loads"][0]["num_waiting_reqs"] != 1 {
            got = recording.send(&url).await.unwrap();
        }
    })
    .await;
    recording.assert_like_but(
        &got,
        &[
            // Of other requests.
            "num_used_tokens",
            "num_total_tokens",
            "num_active_tokens",
            "num_waiting_uncached_tokens",
            "token_usage",
            "cache_hit_rate",
            "total_prefill_uncached_tokens",
            "decode_moments",
        ],
    );
    check("queue_abort_waiting", &url).await;
    let (recording, got) = ended("abort_waiting_reply", waiting).await;
    recording.assert_like(&got);

    let waiting = begin("abort_waiting_reply_stream", &url);
    waits(&engine, "q-waits").await;
    support::post(&url, "/abort_request", json!({"rid": "q-waits"}))
        .await
        .unwrap();
    let (recording, got) = ended("abort_waiting_reply_stream", waiting).await;
    recording.assert_like(&got);
}

#[tokio::test]
async fn a_full_queue_with_priorities_and_with_samples() {
    let config = SimConfig {
        max_running_requests: 1,
        max_queued_requests: Some(1),
        priority_scheduling: true,
        ..slow()
    };
    let engine = start(config.clone()).await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    occupy(&engine, "long");
    runs(&engine, "long").await;
    let low = begin("queue_priority_wait2", &url);
    waits(&engine, "q-wait2").await;
    let high = begin("queue_priority_hi", &url);
    let (recording, got) = ended("queue_priority_wait2", low).await;
    recording.assert_like(&got);
    support::post(&url, "/abort_request", json!({"rid": "long"}))
        .await
        .unwrap();
    let (recording, got) = ended("queue_priority_hi", high).await;
    recording.assert_like(&got);

    let engine = start(SimConfig {
        incremental_streaming_output: true,
        ..config
    })
    .await;
    check("inc_stream_n2", &engine.url()).await;
}
