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

#[path = "sim_contract/aborts.rs"]
mod aborts;
#[path = "sim_contract/ends.rs"]
mod ends;
#[path = "sim_contract/pauses.rs"]
mod pauses;
#[path = "sim_contract/ranks.rs"]
mod ranks;
#[path = "sim_contract/recording.rs"]
mod recording;
#[path = "sim_support/mod.rs"]
mod support;
#[path = "sim_contract/table.rs"]
mod table;

use std::{collections::BTreeSet, time::Duration};

use berth::engine::sim::{Faults, Profile, SimConfig, SimEngine, SimHandle, tokens::expected};
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
async fn incremental_streams() {
    let engine = start(SimConfig {
        incremental_streaming_output: true,
        ..config()
    })
    .await;
    check("inc_stream", &engine.url()).await;
    check("inc_stream_logprobs", &engine.url()).await;
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
