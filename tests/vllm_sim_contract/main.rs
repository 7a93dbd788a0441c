//! The simulated engine in vLLM's dialect against recordings of a real vLLM
//! 0.32.0: every recorded request is sent to it in the state in which it was
//! recorded, and its answer must be like the recorded one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    unreachable_pub,
    reason = "a failed assumption is a failed test"
)]

mod recording;
mod staged;
#[path = "../sim_support/mod.rs"]
mod support;

use std::{collections::BTreeSet, time::Duration};

use berth::engine::sim::{
    Dialect, Faults, Profile, SimConfig, SimEngine, SimHandle,
    tokens::{Eos, expected},
};
use recording::Recording;
use serde_json::{Value, json};
use staged::STAGED;
use support::{Got, within};

/// Recordings of one server in one sitting, in the order in which they are sent.
const SITTING: &[&str] = &[
    "health",
    "ping",
    "version",
    "load",
    "v1_models",
    "is_paused",
    "world_size",
    "gen_plain",
    "gen_plain_body_id",
    "gen_turn1_big",
    "gen_turn2_cached",
    "gen_logprobs_0",
    "gen_logprobs_2",
    "gen_prompt_logprobs_0",
    "gen_prompt_logprobs_1",
    "gen_stream",
    "gen_stream_no_usage",
    "gen_stream_continuous_usage",
    "gen_stream_logprobs",
    "gen_stream_stop",
    "gen_stop_token",
    "gen_stop_string",
    "gen_ignore_eos_length",
    "gen_return_token_ids",
    "gen_n2",
    "gen_seed",
    "gen_cache_salt",
    "gen_min_tokens",
    "gen_model_absent",
    "gen_max_tokens_0",
    "ok_unknown_sampling_key",
    "ok_unknown_top_key",
    "err_bad_json",
    "err_bad_sampling_value",
    "err_empty_ids",
    "err_logprobs_21",
    "err_negative_token",
    "err_no_sampling_params",
    "err_too_long",
    "err_too_long_stream",
    "err_unknown_model",
    "rank_header_dp1_0",
    "rank_header_dp1_1",
    "rank_header_dp1_abc",
    "pause_bad_mode",
    "abort_requests",
    "abort_requests_prefixed",
    "update_weight_version",
    "weight_info",
    "gen_after_version",
    "ok_prompt_plus_max_tokens_clamped",
    "gen_max_tokens_absent",
    "reset_prefix_cache",
];

#[test]
fn every_recording_is_sent() {
    let here: BTreeSet<String> = recording::names().into_iter().collect();
    let named: Vec<&str> = SITTING.iter().chain(STAGED).copied().collect();
    let once: BTreeSet<String> = named.iter().map(ToString::to_string).collect();
    assert_eq!(once.len(), named.len(), "a recording is named twice");
    assert_eq!(once, here);
}

/// The recorded server: a vocabulary of 32,000, a context of 16,384, blocks of
/// 128 tokens.
fn config() -> SimConfig {
    SimConfig {
        dialect: Dialect::Vllm,
        model: "tiny".into(),
        vocab_size: 32_000,
        context_length: 16_384,
        page_size: 128,
        kv_tokens: Some(262_144),
        max_running_requests: 8,
        profile: Profile::Instant,
        time_scale: 0.01,
        // The recorded model never ends by itself.
        eos: Eos { id: 0, one_in: 0 },
        ..SimConfig::default()
    }
}

/// The same with steps slow enough to do anything meanwhile; [`hurry`] ends that.
fn slow() -> SimConfig {
    SimConfig {
        step: Some(Duration::from_millis(200)),
        time_scale: 1.0,
        ..config()
    }
}

/// From here on steps take no time.
fn hurry(engine: &SimHandle) {
    engine.set_faults(Faults {
        slow: Some(0.0),
        ..Faults::default()
    });
}

async fn start(config: SimConfig) -> SimHandle {
    SimEngine::start(config).await.unwrap()
}

async fn check(name: &'static str, url: &str) -> Got {
    let recording = Recording::load(name);
    let got = within(name, recording.send(url)).await.unwrap();
    recording.assert_like(&got, &[]);
    got
}

#[tokio::test]
async fn one_sitting_in_its_order() {
    let engine = start(config()).await;
    let url = engine.url();
    for &name in SITTING {
        let mut recording = Recording::load(name);
        if let Some(version) = recording.weight_version() {
            engine.set_weight_version(&version, false);
        }
        let mut free: &[&str] = &[];
        if name == "gen_stop_token" || name == "gen_stream_stop" {
            // The recorded model says one token only; ours has its own.
            let prompt: Vec<u32> =
                serde_json::from_value(recording.request["token_ids"].clone()).unwrap();
            let stop = expected(&prompt, 0, 1, 32_000)[0];
            recording.request["sampling_params"]["stop_token_ids"] = json!([stop]);
            free = &["stop_reason"];
        }
        let got = within(name, recording.send(&url)).await.unwrap();
        recording.assert_like(&got, free);
        if name == "gen_plain" {
            let prompt: Vec<u32> =
                serde_json::from_value(recording.request["token_ids"].clone()).unwrap();
            assert_eq!(
                got.json()["choices"][0]["token_ids"],
                json!(expected(&prompt, 0, 4, 32_000))
            );
        }
        if name == "gen_seed" {
            let again = recording.send(&url).await.unwrap();
            assert_eq!(got.json()["choices"], again.json()["choices"]);
        }
    }
}

#[tokio::test]
async fn what_only_development_mode_tells_is_not_there_without_it() {
    let engine = start(SimConfig {
        dev_mode: false,
        ..config()
    })
    .await;
    for name in ["server_info", "weight_info", "is_paused", "abort_requests"] {
        let got = Recording::load(name).send(&engine.url()).await.unwrap();
        assert_eq!(got.status, 404, "{name}");
    }
    check("gen_plain", &engine.url()).await;
}

#[tokio::test]
async fn a_generation_has_at_least_the_tokens_asked_for() {
    // Every token would be the end.
    let engine = start(SimConfig {
        eos: Eos { id: 7, one_in: 1 },
        ..config()
    })
    .await;
    let ask = async |min: u32| -> Value {
        let body = json!({
            "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 10, "min_tokens": min},
        });
        let got = support::post(&engine.url(), "/inference/v1/generate", body).await;
        got.unwrap().json()["choices"][0].clone()
    };
    let choice = ask(0).await;
    assert_eq!(
        (&choice["token_ids"], &choice["stop_reason"]),
        (&json!([7]), &json!(7))
    );
    let choice = ask(3).await;
    let tokens = choice["token_ids"].as_array().unwrap();
    assert_eq!((tokens.len(), &tokens[3]), (4, &json!(7)));
    assert!(!tokens[..3].contains(&json!(7)));
}
