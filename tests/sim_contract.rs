//! The simulated engine against recordings of a real SGLang 0.5.23: every
//! recorded request is sent to it in the state in which it was recorded, and
//! its answer must be like the recorded one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    unreachable_pub,
    reason = "a failed assumption is a failed test"
)]

#[path = "sim_contract/recording.rs"]
mod recording;
#[path = "sim_support/mod.rs"]
mod support;
#[path = "sim_contract/table.rs"]
mod table;

use std::{collections::BTreeSet, time::Duration};

use berth::engine::sim::{
    DropStream, Faults, PauseMode, Profile, SimConfig, SimEngine, SimHandle, Times,
    tokens::expected,
};
use recording::{Compare, Recording, frames};
use serde_json::{Value, json};
use support::{Got, get, until, within};
use table::{LEFT_OUT, SITTING, STAGED};

#[test]
fn every_recording_is_sent_or_left_out_with_a_reason() {
    let here: BTreeSet<String> = recording::names().into_iter().collect();
    let named: Vec<&str> = SITTING.iter().chain(STAGED).copied().collect();
    let once: BTreeSet<String> = named.iter().map(ToString::to_string).collect();
    assert_eq!(once.len(), named.len(), "a recording is named twice");
    assert_eq!(once, here);
    for (name, reason) in LEFT_OUT {
        assert!(!here.contains(*name) && !reason.is_empty(), "{name}");
    }
}

/// The recorded server: a vocabulary of 32,000 and a context of 32,768.
fn config() -> SimConfig {
    SimConfig {
        model: "MODEL_DIR".into(),
        vocab_size: 32_000,
        context_length: 32_768,
        kv_tokens: Some(32_768),
        max_running_requests: 2048,
        profile: Profile::Instant,
        time_scale: 0.01,
        ..SimConfig::default()
    }
}

/// The same with steps slow enough to do something meanwhile.
fn slow() -> SimConfig {
    SimConfig {
        step: Some(Duration::from_millis(2)),
        time_scale: 1.0,
        ..config()
    }
}

async fn start(config: SimConfig) -> SimHandle {
    SimEngine::start(config).await.unwrap()
}

async fn check(name: &'static str, url: &str) -> Got {
    let recording = Recording::load(name);
    let got = within(name, recording.send(url)).await.unwrap();
    recording.assert_like(&got);
    got
}

/// Sends a recording in the background.
fn begin(name: &'static str, url: &str) -> tokio::task::JoinHandle<(Recording, Got)> {
    let url = url.to_owned();
    tokio::spawn(async move {
        let recording = Recording::load(name);
        let got = recording.send(&url).await.unwrap();
        (recording, got)
    })
}

async fn ended(name: &str, task: tokio::task::JoinHandle<(Recording, Got)>) -> (Recording, Got) {
    within(name, task).await.unwrap()
}

/// Sends a request of our own in the background and does not look at its reply.
fn occupy(engine: &SimHandle, rid: &str) -> tokio::task::JoinHandle<Got> {
    let (url, rid) = (engine.url(), rid.to_owned());
    tokio::spawn(async move {
        let body = json!({
            "input_ids": [11, 12, 13], "rid": rid,
            "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": true},
        });
        support::post(&url, "/generate", body).await.unwrap()
    })
}

async fn runs(engine: &SimHandle, rid: &str) {
    until(&format!("{rid} runs"), || {
        engine
            .history()
            .iter()
            .any(|r| &*r.rid == rid && r.started.is_some())
    })
    .await;
}

async fn waits(engine: &SimHandle, rid: &str) {
    until(&format!("{rid} waits"), || {
        engine
            .history()
            .iter()
            .any(|r| &*r.rid == rid && r.queued.is_some())
    })
    .await;
}

/// Known to the engine, and held back from any rank.
async fn is_held(engine: &SimHandle, rid: &str) {
    until(&format!("{rid} is held"), || {
        engine
            .history()
            .iter()
            .any(|r| &*r.rid == rid && r.queued.is_none())
    })
    .await;
}

/// At least so many KV tokens are in use.
async fn holds(url: &str, tokens: u64) {
    within("it has got so far", async {
        loop {
            let loads = get(url, "/v1/loads").await.unwrap().json();
            if loads["loads"][0]["num_used_tokens"].as_u64().unwrap() >= tokens {
                return;
            }
        }
    })
    .await;
}

/// Values of a reply that was cut short at some token.
const PARTIAL: &[&str] = &["output_ids", "completion_tokens", "end", "start", "frames"];

/// What is true of any whole reply, however many tokens it has.
fn assert_consistent(reply: &Value) {
    let meta = &reply["meta_info"];
    let n = meta["completion_tokens"].as_u64().unwrap();
    assert_eq!(reply["output_ids"].as_array().unwrap().len() as u64, n);
    let mut at = 0;
    for span in meta["weight_versions"].as_array().unwrap() {
        assert_eq!(span["start"], at);
        at = span["end"].as_u64().unwrap();
    }
    assert_eq!(at, n);
}

#[tokio::test]
async fn one_sitting_in_its_order() {
    let engine = start(config()).await;
    let url = engine.url();
    let mut first_output = Value::Null;
    for &name in SITTING {
        let mut recording = Recording::load(name);
        if let Some(version) = recording.weight_version() {
            engine.set_weight_version(&version, false);
        }
        // The recorded model repeats one token; ours has its own.
        let prompt: Vec<u32> = match recording.request["input_ids"].as_array() {
            Some(ids) => ids
                .iter()
                .filter_map(|i| i.as_u64().map(|i| i as u32))
                .collect(),
            None => Vec::new(),
        };
        let mut free: &[&str] = &[];
        if name == "gen_turn2_cached" {
            let ids = recording.request["input_ids"].as_array_mut().unwrap();
            for (at, id) in first_output.as_array().unwrap().iter().enumerate() {
                ids[16 + at] = id.clone();
            }
        }
        if name.contains("stop") && name != "gen_stop_string_skip_tok" {
            let stop = expected(&prompt, 0, 1, 32_000)[0];
            recording.request["sampling_params"]["stop_token_ids"] = json!([stop]);
            free = &["matched"];
        }
        if matches!(name, "err_bad_json" | "err_bad_type") {
            // The words quote the real server's source paths.
            free = &["message"];
        }
        let got = within(name, recording.send(&url)).await.unwrap();
        if name == "gen_n2_stream" {
            // Which of the two ends first is chance.
            free = &["index"];
        }
        let own = name.starts_with("model_info") || name == "v1_loads_all";
        if own {
            let (recorded, ours) = (
                serde_json::from_str(&recording.response).unwrap(),
                got.json(),
            );
            let free = [
                "total_prefill_uncached_tokens",
                "decode_moments",
                "embedding",
            ];
            Compare {
                free: &free,
                subset: true,
                ..Compare::default()
            }
            .assert(name, &recorded, &ours);
        } else {
            recording.assert_like_but(&got, free);
        }
        if name == "gen_plain" {
            first_output = got.json()["output_ids"].clone();
            assert_eq!(first_output, json!(expected(&prompt, 0, 4, 32_000)));
        }
        if name.contains("stop_token") || name == "gen_stream_stop" {
            let stop = recording.request["sampling_params"]["stop_token_ids"][0].clone();
            assert!(
                got.body.contains(&format!("\"matched\":{stop}")),
                "{}",
                got.body
            );
        }
        if name == "err_bad_json" {
            assert!(got.body.contains("'loc': ('body', 17)"), "{}", got.body);
        }
    }
}

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

#[tokio::test]
async fn incremental_streams() {
    let engine = start(SimConfig {
        incremental_streaming_output: true,
        ..config()
    })
    .await;
    check("inc_stream", &engine.url()).await;
    check("inc_stream_logprobs", &engine.url()).await;
}

#[tokio::test]
async fn three_kinds_of_pause() {
    let engine = start(SimConfig {
        time_scale: 0.5,
        step: Some(Duration::from_millis(60)),
        ..slow()
    })
    .await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    let loads_free = &[
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "token_usage",
        "cache_hit_rate",
        "total_prefill_uncached_tokens",
        "decode_moments",
    ];

    for mode in ["abort", "retract", "in_place"] {
        let name = |what: &str| -> &'static str { Box::leak(format!("{what}_{mode}").into()) };
        let running = begin(name("paused_running_reply"), &url);
        runs(&engine, &format!("fx-p-{mode}")).await;
        check(name("pause_generation"), &url).await;
        assert_eq!(get(&url, "/ready").await.unwrap().status, 503);
        let new = begin(name("paused_new_reply"), &url);
        is_held(&engine, &format!("fx-w-{mode}")).await;
        let recording = Recording::load(name("loads_while_paused"));
        let got = recording.send(&url).await.unwrap();
        recording.assert_like_but(&got, loads_free);
        let first = got.json()["loads"][0]["timestamp"].clone();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let got = recording.send(&url).await.unwrap();
        let frozen = got.json()["loads"][0]["timestamp"] == first;
        assert_eq!(frozen, mode != "abort", "{mode}");
        check(name("flush_cache_while_paused"), &url).await;
        if mode == "in_place" {
            check("update_weight_version", &url).await;
        }
        assert!(!new.is_finished());
        check(name("continue_generation"), &url).await;
        let (recording, got) = ended("paused_running_reply", running).await;
        let free = match mode {
            "retract" => &[][..],
            _ => PARTIAL,
        };
        recording.assert_like_but(&got, free);
        assert_consistent(&got.json());
        let (recording, got) = ended("paused_new_reply", new).await;
        recording.assert_like(&got);
    }
}

#[tokio::test]
async fn weights_change_midway() {
    let engine = start(SimConfig {
        step: Some(Duration::from_millis(25)),
        ..slow()
    })
    .await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    for (mode, pause) in [
        ("in_place", PauseMode::InPlace),
        ("retract", PauseMode::Retract),
    ] {
        let name = |what: &str| -> &'static str { Box::leak(format!("{what}_{mode}").into()) };
        let running = begin(name("gen_version_changed_midway"), &url);
        runs(&engine, &format!("fx-ver-{mode}")).await;
        engine.pause(pause).await;
        check(name("update_weight_version_no_abort"), &url).await;
        engine.resume();
        let (recording, got) = ended("gen_version_changed_midway", running).await;
        recording.assert_like_but(&got, &["end", "start"]);
        assert_consistent(&got.json());
        let prompt: Vec<u32> =
            serde_json::from_value(recording.request["input_ids"].clone()).unwrap();
        assert_eq!(
            got.json()["output_ids"],
            json!(expected(&prompt, 0, 60, 32_000))
        );
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
    ] {
        check(name, &url).await;
    }
    // Each in its turn, beginning with rank 0.
    for name in [
        "dp_no_rank",
        "dp_header_rank",
        "dp_old_name",
        "dp_bad_rank_0",
        "dp_bad_rank_1.0",
        "dp_bad_rank_2",
        "dp_bad_rank_99",
        "dp_bad_rank_True",
        "dp_bad_rank_neg1",
        "dp_loads_dp_rank_7",
        "dp_loads_include_bogus",
    ] {
        check(name, &url).await;
    }
    for name in [
        "dp_loads",
        "dp_loads_dp_rank_1",
        "dp_loads_include_all",
        "dp_loads_include_core_memory_queues",
    ] {
        let recording = Recording::load(name);
        let got = recording.send(&url).await.unwrap();
        recording.assert_like_but(&got, &["decode_moments", "total_prefill_uncached_tokens"]);
    }
    // The recording has 5 requests of 2 tokens more behind it; every one of
    // them computed 1 or 3 prompt tokens. What ours did is exact:
    let loads = get(&url, "/v1/loads").await.unwrap().json();
    assert_eq!(
        loads["loads"][0]["total_prefill_uncached_tokens"],
        2000 + 1 + 3
    );
    assert_eq!(
        loads["loads"][1]["total_prefill_uncached_tokens"],
        2000 + 1 + 3 + 1
    );
    for name in [
        "dp_small_rank0",
        "dp_small_rank0_again",
        "dp_small_rank1",
        "dp_pause",
        "dp_continue",
        "dp_flush",
    ] {
        check(name, &url).await;
    }

    let recording = Recording::load("dp_server_info");
    let got = recording.send(&url).await.unwrap();
    compare_info(&recording, &got);
    assert_eq!(got.json()["dp_size"], 2);
    assert_eq!(got.json()["internal_states"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn busy_and_dead_ranks() {
    let engine = start(SimConfig { ranks: 2, ..slow() }).await;
    let url = engine.url();
    let recording = Recording::load("dp_loads_busy");
    for (rid, rank) in [("a", 0), ("b", 0), ("c", 0), ("d", 1)] {
        let url = url.clone();
        tokio::spawn(async move {
            let body = json!({
                "input_ids": [rank, 1, 2], "rid": rid, "routed_dp_rank": rank,
                "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": true},
            });
            support::post(&url, "/generate", body).await
        });
        runs(&engine, rid).await;
    }
    let free = &[
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "token_usage",
        "total_prefill_uncached_tokens",
        "decode_moments",
        "cache_hit_rate",
    ];
    let mut got = recording.send(&url).await.unwrap();
    within("all four are shown", async {
        while got.json()["loads"][0]["num_running_reqs"] != 3
            || got.json()["loads"][1]["num_running_reqs"] != 1
        {
            got = recording.send(&url).await.unwrap();
        }
    })
    .await;
    let alike = {
        let mut got = got.json();
        // The recording was written by another JSON library: only its form differs.
        got["loads"][0]["num_running_reqs"] = 3.into();
        got
    };
    Compare {
        free,
        ..Compare::default()
    }
    .assert(
        "dp_loads_busy",
        &serde_json::from_str(&recording.response).unwrap(),
        &alike,
    );

    engine.set_faults(Faults {
        dead_ranks: vec![1],
        ..Faults::default()
    });
    engine.abort_all();
    let recording = Recording::load("dp_loads_rank1_killed");
    let mut got = recording.send(&url).await.unwrap();
    within("rank 0 is idle", async {
        while got.json()["loads"][0]["num_running_reqs"] != 0 {
            got = recording.send(&url).await.unwrap();
        }
    })
    .await;
    recording.assert_like_but(&got, free);
    let stamp = |got: &Got, rank: usize| got.json()["loads"][rank]["timestamp"].as_f64().unwrap();
    let later = recording.send(&url).await.unwrap();
    assert!(stamp(&later, 0) > stamp(&got, 0));
    assert!((stamp(&later, 1) - stamp(&got, 1)).abs() < 1e-9);
}

fn compare_info(recording: &Recording, got: &Got) {
    let free = [
        "host",
        "port",
        "device",
        "max_total_tokens",
        "max_running_requests",
        "chunked_prefill_size",
        "random_seed",
        "disable_cuda_graph",
        "weight",
        "kvcache",
        "last_gen_throughput",
        "effective_max_running_requests_per_dp",
    ];
    Compare {
        free: &free,
        subset: true,
        ..Compare::default()
    }
    .assert(
        recording.name,
        &serde_json::from_str(&recording.response).unwrap(),
        &got.json(),
    );
}

#[tokio::test]
async fn facts() {
    let engine = start(config()).await;
    let url = engine.url();
    let recording = Recording::load("server_info");
    let got = recording.send(&url).await.unwrap();
    compare_info(&recording, &got);
    assert_eq!(got.json()["max_req_input_len"], 32_762);
    let recording = Recording::load("v1_loads");
    let got = recording.send(&url).await.unwrap();
    recording.assert_like_but(&got, &["decode_moments", "total_prefill_uncached_tokens"]);
}

#[tokio::test]
async fn the_ends_of_an_engine() {
    let engine = start(slow()).await;
    let url = engine.url();
    engine.set_weight_version("v19", false);
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    let running = tokio::spawn({
        let url = url.clone();
        async move {
            let body = json!({
                "input_ids": [1, 2, 3], "rid": "draining",
                "sampling_params": {"max_new_tokens": 800, "ignore_eos": true},
            });
            support::post(&url, "/generate", body).await.unwrap()
        }
    });
    runs(&engine, "draining").await;
    engine.terminate();
    check("sigterm_health", &url).await;
    check("sigterm_ready", &url).await;
    check("sigterm_new_request", &url).await;
    let got = within("it drains", running).await.unwrap();
    assert_eq!(got.json()["meta_info"]["completion_tokens"], 800);
    assert_eq!(
        within("it ends", engine.ended()).await,
        berth::engine::sim::End::Drained
    );

    let engine = start(slow()).await;
    let url = engine.url();
    let other = tokio::spawn({
        let url = url.clone();
        async move {
            let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": true}});
            support::post(&url, "/generate", body).await
        }
    });
    until("the other runs", || engine.counters().started == 1).await;
    let recording = Recording::load("err_token_out_of_vocab");
    assert_eq!(recording.status, None);
    assert!(recording.send(&url).await.is_err());
    assert!(within("the other is cut", other).await.unwrap().is_err());
    let end = within("it ends", engine.ended()).await;
    assert_eq!(end, berth::engine::sim::End::OutOfVocabulary);
    assert!(get(&url, "/health").await.unwrap_err().contains("refused"));
}

#[tokio::test]
async fn a_stream_cut_by_a_dying_engine() {
    let engine = start(slow()).await;
    engine.set_weight_version("w-retract", false);
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    engine.set_faults(Faults {
        drop_stream: Some(DropStream {
            times: Times::Next(1),
            after_tokens: 9,
        }),
        ..Faults::default()
    });
    let recording = Recording::load("stream_cut_engine_killed");
    let body = recording.request.to_string();
    let response = support::open("POST", &format!("{url}/generate"), &[], &body)
        .await
        .unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let mut body = response.into_body();
    let mut seen = Vec::new();
    let broken = within("it breaks", async {
        loop {
            match http_body_util::BodyExt::frame(&mut body).await {
                Some(Ok(frame)) => seen.extend(frame.into_data().unwrap()),
                Some(Err(_)) => break true,
                None => break false,
            }
        }
    })
    .await;
    assert!(broken, "the stream ended as if it were whole");
    let seen = frames(std::str::from_utf8(&seen).unwrap());
    let recorded = frames(&recording.response);
    // All nine; of the recording the last two are kept.
    assert_eq!(seen.len(), 9);
    for at in 1..=recorded.len() {
        Compare::default().assert(
            "stream_cut_engine_killed",
            &serde_json::from_str(&recorded[recorded.len() - at]).unwrap(),
            &serde_json::from_str(&seen[seen.len() - at]).unwrap(),
        );
    }
    until("it is aborted", || {
        engine.history().iter().all(|r| r.ended.is_some())
    })
    .await;
}
