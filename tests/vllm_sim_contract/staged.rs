//! Recordings that need a scene: pauses, aborts, ranks, deaths.

use berth::engine::{
    sim::{End, Faults, How},
    vllm::metrics,
};
use tokio::task::JoinHandle;

use super::*;
use crate::support::{get, post, until};

/// Recordings that are sent here.
pub const STAGED: &[&str] = &[
    "abort_running_reply_stream",
    "dup_request_id",
    "gen_version_changed_midway",
    "pause_abort",
    "pause_abort_is_paused",
    "pause_abort_new_request",
    "pause_abort_resume",
    "pause_abort_running_request",
    "pause_keep",
    "pause_keep_is_paused",
    "pause_keep_new_request",
    "pause_keep_resume",
    "pause_keep_running_request",
    "pause_wait",
    "pause_wait_is_paused",
    "pause_wait_new_request",
    "pause_wait_resume",
    "pause_wait_running_request",
    "dp_rank0_first",
    "dp_rank0_again",
    "dp_rank1_first",
    "dp_rank1_again",
    "dp_bad_rank_1.0",
    "dp_bad_rank_2",
    "dp_bad_rank_abc",
    "dp_bad_rank_empty",
    "dp_bad_rank_neg1",
    "dp_no_rank",
    "dp_metrics",
    "dp_engine_killed_inflight_rank0",
    "dp_engine_killed_inflight_rank1",
    "err_token_out_of_vocab",
    "server_info",
    "metrics",
];

/// Values of a reply that was cut short at some token.
const PARTIAL: &[&str] = &[
    "token_ids",
    "completion_tokens",
    "total_tokens",
    "start",
    "end",
    "frames",
];

/// Sends a recording in the background.
fn begin(name: &'static str, url: &str) -> JoinHandle<(Recording, Result<Got, String>)> {
    let url = url.to_owned();
    tokio::spawn(async move {
        let recording = Recording::load(name);
        let got = recording.send(&url).await;
        (recording, got)
    })
}

async fn ended(
    task: JoinHandle<(Recording, Result<Got, String>)>,
) -> (Recording, Result<Got, String>) {
    within("it ends", task).await.unwrap()
}

fn parsed(engine: &SimHandle) -> usize {
    engine.history().len()
}

/// Has generated so many tokens or more.
async fn runs(engine: &SimHandle, requests: u64) {
    until("it runs", || engine.counters().started >= requests).await;
}

#[tokio::test]
async fn three_kinds_of_pause() {
    for [pause, paused, running, new, resume] in [
        [
            "pause_keep",
            "pause_keep_is_paused",
            "pause_keep_running_request",
            "pause_keep_new_request",
            "pause_keep_resume",
        ],
        [
            "pause_abort",
            "pause_abort_is_paused",
            "pause_abort_running_request",
            "pause_abort_new_request",
            "pause_abort_resume",
        ],
        [
            "pause_wait",
            "pause_wait_is_paused",
            "pause_wait_running_request",
            "pause_wait_new_request",
            "pause_wait_resume",
        ],
    ] {
        let engine = start(slow()).await;
        let url = engine.url();
        let first = begin(running, &url);
        runs(&engine, 1).await;
        // `wait` is answered when what runs has ended.
        let pausing = tokio::spawn({
            let url = url.clone();
            async move { check(pause, &url).await }
        });
        within("it is paused", async {
            while get(&url, "/is_paused").await.unwrap().json()["is_paused"] != true {}
        })
        .await;
        if pause == "pause_wait" {
            hurry(&engine);
        }
        within("it has paused", pausing).await.unwrap();
        check(paused, &url).await;
        let held = begin(new, &url);
        until("it is held", || parsed(&engine) == 2).await;
        // It hangs, and its health is good.
        check("health", &url).await;
        assert!(engine.history()[1].queued.is_none());
        hurry(&engine);
        check(resume, &url).await;
        let (recording, got) = ended(first).await;
        let got = got.unwrap();
        let free = if pause == "pause_abort" { PARTIAL } else { &[] };
        recording.assert_like(&got, free);
        let (recording, got) = ended(held).await;
        recording.assert_like(&got.unwrap(), &[]);
    }
}

#[tokio::test]
async fn weights_change_midway() {
    let engine = start(SimConfig {
        weight_version: "v1".into(),
        ..slow()
    })
    .await;
    let url = engine.url();
    let running = begin("gen_version_changed_midway", &url);
    runs(&engine, 1).await;
    post(&url, "/update_weight_version", json!({"new_version": "v2"}))
        .await
        .unwrap();
    hurry(&engine);
    let (recording, got) = ended(running).await;
    recording.assert_like(&got.unwrap(), &["start", "end"]);
}

#[tokio::test]
async fn ids_may_be_live_twice_and_are_aborted_whole() {
    let engine = start(slow()).await;
    let url = engine.url();
    let long = |id: &str| {
        let (url, id) = (url.clone(), id.to_owned());
        tokio::spawn(async move {
            let body = json!({
                "token_ids": [1, 2], "request_id": id,
                "sampling_params": {"max_tokens": 10_000, "ignore_eos": true},
            });
            post(&url, "/inference/v1/generate", body).await.unwrap()
        })
    };
    // Four tokens of one request are waited for.
    engine.set_faults(Faults {
        slow: Some(0.1),
        ..Faults::default()
    });
    let (other, longer) = (long("dup-1"), long("dup-12"));
    runs(&engine, 2).await;
    assert!(engine.history().iter().all(|r| r.ended.is_none()));
    check("dup_request_id", &url).await;

    let stream = begin("abort_running_reply_stream", &url);
    runs(&engine, 4).await;
    // Without its prefix an id is nobody's, and answered the same way.
    for name in ["abort_requests", "abort_requests_prefixed"] {
        assert!(
            engine.history().last().unwrap().ended.is_none(),
            "before {name}"
        );
        check(name, &url).await;
    }
    let (recording, got) = ended(stream).await;
    let got = got.unwrap();
    let mut recording = recording;
    recording.response = recording.response.replace("\"v2\"", "\"default\"");
    recording.assert_like(&got, PARTIAL);

    let body = json!({"request_ids": ["generate-tokens-dup-1"]});
    post(&url, "/abort_requests", body).await.unwrap();
    let reply = within("it is aborted", other).await.unwrap().json();
    assert_eq!(reply["choices"][0]["finish_reason"], "abort");
    assert!(!longer.is_finished(), "another id that begins the same way");
    post(&url, "/abort_requests", json!({})).await.unwrap();
    within("all are aborted", longer).await.unwrap();
}

#[tokio::test]
async fn a_closed_connection_aborts_at_once() {
    let engine = start(slow()).await;
    for stream in [false, true] {
        let url = engine.url();
        let before = parsed(&engine);
        let call = tokio::spawn(async move {
            let body = json!({
                "token_ids": [1, 2], "stream": stream,
                "sampling_params": {"max_tokens": 10_000, "ignore_eos": true},
            });
            post(&url, "/inference/v1/generate", body).await
        });
        until("it runs", || {
            engine
                .history()
                .get(before)
                .is_some_and(|r| r.started.is_some())
        })
        .await;
        call.abort();
        until("it is aborted", || {
            engine.history()[before].how == How::Aborted
        })
        .await;
    }
}

#[tokio::test]
async fn two_ranks() {
    let engine = start(SimConfig {
        ranks: 2,
        ..config()
    })
    .await;
    let url = engine.url();
    for name in [
        "dp_rank0_first",
        "dp_rank0_again",
        "dp_rank1_first",
        "dp_rank1_again",
        "dp_no_rank",
        "dp_bad_rank_1.0",
        "dp_bad_rank_2",
        "dp_bad_rank_abc",
        "dp_bad_rank_empty",
        "dp_bad_rank_neg1",
    ] {
        check(name, &url).await;
    }
    let ours = get(&url, "/metrics").await.unwrap();
    let recording = Recording::load("dp_metrics");
    assert_eq!(
        ours.content_type.as_deref(),
        Some("text/plain; version=1.0.0; charset=utf-8")
    );
    assert_eq!(
        metrics::parse(ours.body.as_bytes()).unwrap(),
        metrics::parse(recording.response.as_bytes()).unwrap()
    );
}

#[tokio::test]
async fn facts_are_said_in_the_recorded_words() {
    let engine = start(config()).await;
    let ours = get(&engine.url(), "/metrics").await.unwrap();
    let recording = Recording::load("metrics");
    assert_eq!(
        metrics::parse(ours.body.as_bytes()).unwrap(),
        metrics::parse(recording.response.as_bytes()).unwrap()
    );
    let recording = Recording::load("server_info");
    let got = recording.send(&engine.url()).await.unwrap();
    recording.assert_like(&got, &["model", "instance_id", "max_num_batched_tokens"]);
}

#[tokio::test]
async fn the_engine_of_a_rank_dies() {
    let engine = start(SimConfig { ranks: 2, ..slow() }).await;
    let url = engine.url();
    let survivor = begin("dp_engine_killed_inflight_rank0", &url);
    runs(&engine, 1).await;
    let victim = tokio::spawn({
        let url = url.clone();
        async move {
            let body = json!({
                "token_ids": [1, 2], "sampling_params": {"max_tokens": 10_000, "ignore_eos": true},
            });
            let headers = [("x-data-parallel-rank".to_owned(), "1".to_owned())];
            let url = format!("{url}/inference/v1/generate");
            support::call("POST", &url, &headers, &body.to_string()).await
        }
    });
    runs(&engine, 2).await;
    engine.set_faults(Faults {
        dead_ranks: vec![1],
        ..Faults::default()
    });
    // The other rank's request ends with a part, and says so.
    let (recording, got) = ended(survivor).await;
    recording.assert_like(&got.unwrap(), PARTIAL);
    assert!(!victim.is_finished());
    check("health", &url).await;
    // In the recording the server ended after 11 s; nobody waits for that here.
    assert_eq!(
        Recording::load("dp_engine_killed_inflight_rank1").response,
        ""
    );
    engine.kill().await;
    within("it is cut", victim).await.unwrap().unwrap_err();
}

#[tokio::test]
async fn an_id_outside_the_vocabulary_ends_the_engine_and_then_its_server() {
    let engine = start(slow()).await;
    let url = engine.url();
    let bystander = begin("pause_wait_running_request", &url);
    runs(&engine, 1).await;
    check("err_token_out_of_vocab", &url).await;
    // Whoever else was there is told the same.
    let (_, got) = ended(bystander).await;
    assert_eq!(got.unwrap().status, 500);
    assert_eq!(
        within("it ends", engine.ended()).await,
        End::OutOfVocabulary
    );
    get(&url, "/health").await.unwrap_err();
}
