//! What the simulated engine does that no single recording shows: clients that
//! go away, faults on demand, death and restart, time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "a failed assumption is a failed test; the support is shared"
)]

#[path = "sim_support/mod.rs"]
mod support;

use std::time::Duration;

use berth::engine::sim::{
    Cut, CutWhen, Faults, Hang, How, SimConfig, SimEngine, SimHandle, Times, tokens::expected,
};
use serde_json::{Value, json};
use support::{get, open, post, until, within};
use tokio::time::Instant;

const VOCAB: u32 = 151_936;

async fn start(config: SimConfig) -> SimHandle {
    SimEngine::start(config).await.unwrap()
}

/// Steps of 2 ms of wall time, other waits a hundredth of the real ones.
fn stepping() -> SimConfig {
    SimConfig {
        step: Some(Duration::from_millis(200)),
        ..SimConfig::instant()
    }
}

fn body(rid: &str, max_new: u32) -> Value {
    json!({
        "input_ids": [1, 2, 3], "rid": rid,
        "sampling_params": {"max_new_tokens": max_new, "ignore_eos": true},
    })
}

fn long(engine: &SimHandle, body: Value) -> tokio::task::JoinHandle<Result<support::Got, String>> {
    let url = engine.url();
    tokio::spawn(async move { post(&url, "/generate", body).await })
}

async fn started(engine: &SimHandle, n: u64) {
    until("it has started", || engine.counters().started >= n).await;
}

fn how(engine: &SimHandle, rid: &str) -> Option<How> {
    engine
        .history()
        .iter()
        .find(|r| &*r.rid == rid)
        .map(|r| r.how)
}

async fn ends(engine: &SimHandle, rid: &str, as_: How) {
    until(&format!("{rid} ends as {as_:?}"), || {
        how(engine, rid) == Some(as_)
    })
    .await;
}

#[tokio::test]
async fn a_closed_plain_request_runs_on_until_the_look_and_a_closed_stream_stops() {
    let engine = start(SimConfig {
        // A look every 2 s, steps of 2 ms.
        time_scale: 0.5,
        step: Some(Duration::from_millis(4)),
        ..SimConfig::instant()
    })
    .await;
    let plain = long(&engine, body("plain", 16_000));
    started(&engine, 1).await;
    let began = engine.history()[0].parsed;
    plain.abort();
    ends(&engine, "plain", How::Aborted).await;
    let record = &engine.history()[0];
    let lasted = record.ended.unwrap() - began;
    assert!(lasted >= Duration::from_millis(1990), "{lasted:?}");
    assert_eq!(engine.counters().disconnects, 1);

    let mut request = body("stream", 16_000);
    request["stream"] = true.into();
    let url = format!("{}/generate", engine.url());
    let response = open("POST", &url, &[], &request.to_string()).await.unwrap();
    started(&engine, 2).await;
    let closed = Instant::now();
    drop(response);
    ends(&engine, "stream", How::Aborted).await;
    let took = engine.history()[1].ended.unwrap() - closed;
    assert!(
        took < Duration::from_millis(1900),
        "{took:?}: as late as a plain one"
    );
}

#[tokio::test]
async fn an_abort_that_overtakes_its_request_does_nothing() {
    let engine = start(SimConfig {
        parse_delay: Duration::from_secs(1),
        ..stepping()
    })
    .await;
    let url = engine.url();
    let running = long(&engine, body("early", 20));
    until("it has arrived", || engine.counters().received == 1).await;
    let got = post(&url, "/abort_request", json!({"rid": "early"}))
        .await
        .unwrap();
    assert_eq!((got.status, got.body.as_str()), (200, ""));
    assert_eq!(engine.counters().aborts_missed, 1);
    let got = within("it runs to its end", running)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(got.json()["meta_info"]["finish_reason"]["type"], "length");
    // A client that goes before its id is known does not stop it either.
    let gone = long(&engine, body("gone", 20));
    until("it has arrived", || engine.counters().received == 2).await;
    gone.abort();
    until("it has run", || {
        how(&engine, "gone").is_some_and(|h| h != How::Live)
    })
    .await;
}

#[tokio::test]
async fn death_cuts_all_connections_and_the_port_refuses_until_a_restart() {
    let engine = start(stepping()).await;
    let running: Vec<_> = (0..3)
        .map(|i| long(&engine, body(&format!("r{i}"), 16_000)))
        .collect();
    started(&engine, 3).await;
    engine.kill().await;
    for running in running {
        assert!(within("cut", running).await.unwrap().is_err());
    }
    assert!(
        get(&engine.url(), "/ready")
            .await
            .unwrap_err()
            .contains("refused")
    );
    assert!(engine.history().iter().all(|r| r.how == How::EngineDied));

    let again = engine.restart().await.unwrap();
    assert_eq!(again.address(), engine.address());
    let got = post(&again.url(), "/generate", body("r0", 2))
        .await
        .unwrap();
    assert_eq!(got.json()["meta_info"]["cached_tokens"], 0);
    assert_eq!(again.history().len(), 1);

    // The same by HTTP.
    let running = long(&again, body("x", 16_000));
    started(&again, 2).await;
    let _ = post(&again.url(), "/sim/faults", json!({"die": true})).await;
    assert!(within("cut", running).await.unwrap().is_err());
    within("it ends", again.ended()).await;
    assert!(!again.is_alive());
}

#[tokio::test]
async fn a_refusing_engine_finishes_what_it_has_and_comes_back() {
    let engine = start(stepping()).await;
    let running = long(&engine, body("running", 30));
    started(&engine, 1).await;
    engine.set_faults(Faults {
        refuse: true,
        ..Faults::default()
    });
    within("it refuses", async {
        while get(&engine.url(), "/ready").await.is_ok() {}
    })
    .await;
    let got = within("what runs ends", running).await.unwrap().unwrap();
    assert_eq!(got.json()["meta_info"]["completion_tokens"], 30);
    engine.clear_faults();
    within("it takes again", async {
        while get(&engine.url(), "/ready").await.is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    assert_eq!(
        post(&engine.url(), "/generate", body("b", 2))
            .await
            .unwrap()
            .status,
        200
    );
}

#[tokio::test]
async fn a_hung_engine_looks_good_and_answers_nothing() {
    let engine = start(SimConfig::instant()).await;
    engine.set_faults(Faults {
        hang: Some(Hang::Generate),
        ..Faults::default()
    });
    let hung = long(&engine, body("hung", 2));
    until("it is received", || engine.counters().received == 1).await;
    assert_eq!(get(&engine.url(), "/health").await.unwrap().status, 200);
    assert_eq!(get(&engine.url(), "/ready").await.unwrap().status, 200);
    assert!(!hung.is_finished());
    assert_eq!(engine.counters().parsed, 0);
    hung.abort();

    engine.set_faults(Faults {
        hang: Some(Hang::All),
        ..Faults::default()
    });
    let url = engine.url();
    let silent = tokio::time::timeout(Duration::from_millis(100), get(&url, "/ready"));
    assert!(silent.await.is_err());
    // Its own routes answer.
    post(&engine.url(), "/sim/faults", json!({})).await.unwrap();
    assert_eq!(
        post(&engine.url(), "/generate", body("b", 2))
            .await
            .unwrap()
            .status,
        200
    );
}

#[tokio::test]
async fn refusals_come_as_often_as_said() {
    let engine = start(SimConfig::instant()).await;
    let url = engine.url();
    let faults = json!({"unavailable": {"next": 2}, "queue_full": {"next": 1}});
    assert_eq!(post(&url, "/sim/faults", faults).await.unwrap().status, 200);
    let mut statuses = Vec::new();
    for i in 0..4 {
        let got = post(&url, "/generate", body(&format!("r{i}"), 2))
            .await
            .unwrap();
        statuses.push(got.status);
    }
    assert_eq!(statuses, [503, 503, 503, 200]);
    assert_eq!(how(&engine, "r2"), Some(How::QueueFull));
    assert_eq!(how(&engine, "r0"), None);
}

#[tokio::test]
async fn cut_replies_have_no_byte_and_tell_nothing_of_what_ran() {
    let engine = start(SimConfig::instant()).await;
    for (rid, when, ran) in [
        ("at once", CutWhen::AtOnce, None),
        ("when done", CutWhen::WhenDone, Some(How::Length)),
    ] {
        engine.set_faults(Faults {
            cut: Some(Cut {
                times: Times::Next(1),
                when,
            }),
            ..Faults::default()
        });
        let error = post(&engine.url(), "/generate", body(rid, 2))
            .await
            .unwrap_err();
        assert!(!error.contains("refused"), "{error}");
        assert_eq!(how(&engine, rid), ran);
        assert_eq!(
            post(&engine.url(), "/generate", body("after", 2))
                .await
                .unwrap()
                .status,
            200
        );
    }
    assert_eq!(engine.counters().cut, 2);
}

#[tokio::test]
async fn an_engine_that_ignores_the_rank_says_which_one_served() {
    let engine = start(SimConfig {
        ranks: 2,
        ..SimConfig::instant()
    })
    .await;
    engine.set_faults(Faults {
        ignore_rank: true,
        ..Faults::default()
    });
    let mut request = body("a", 2);
    request["routed_dp_rank"] = 0.into();
    let got = post(&engine.url(), "/generate", request).await.unwrap();
    assert_eq!(got.json()["meta_info"]["dp_rank"], 1);
    let record = &engine.history()[0];
    assert_eq!((record.asked_rank, record.rank), (Some(0), Some(1)));
}

#[tokio::test]
async fn a_dead_rank_hangs_all_from_the_first_message_on_and_looks_ready() {
    let engine = start(SimConfig {
        ranks: 2,
        ..SimConfig::instant()
    })
    .await;
    let url = engine.url();
    engine.set_faults(Faults {
        dead_ranks: vec![1],
        ..Faults::default()
    });
    let to = |rank: u32, rid: &str| {
        let mut request = body(rid, 2);
        request["routed_dp_rank"] = rank.into();
        request
    };
    for i in 0..3 {
        let got = post(&url, "/generate", to(0, &format!("ok{i}")))
            .await
            .unwrap();
        assert_eq!(got.status, 200);
    }
    assert!(!engine.is_wedged());
    let first = long(&engine, to(1, "first"));
    until("it is wedged", || engine.is_wedged()).await;
    let second = long(&engine, to(0, "second"));
    until("it is known", || how(&engine, "second").is_some()).await;
    assert_eq!(get(&url, "/ready").await.unwrap().status, 200);
    assert_eq!(get(&url, "/v1/loads").await.unwrap().status, 200);
    // 20 s of the engine's own time.
    assert_eq!(get(&url, "/health").await.unwrap().status, 503);
    assert!(!first.is_finished() && !second.is_finished());
    assert_eq!(how(&engine, "second"), Some(How::Live));
}

#[tokio::test]
async fn a_health_probe_of_a_dead_rank_is_such_a_message() {
    let engine = start(SimConfig {
        ranks: 2,
        ..SimConfig::instant()
    })
    .await;
    engine.set_faults(Faults {
        dead_ranks: vec![1],
        ..Faults::default()
    });
    let mut statuses = Vec::new();
    for _ in 0..3 {
        statuses.push(get(&engine.url(), "/health").await.unwrap().status);
    }
    assert_eq!(statuses, [200, 503, 503]);
    assert!(engine.is_wedged());
}

#[tokio::test]
async fn everything_running_is_aborted_on_demand() {
    let engine = start(stepping()).await;
    let running: Vec<_> = (0..3)
        .map(|i| long(&engine, body(&format!("r{i}"), 16_000)))
        .collect();
    started(&engine, 3).await;
    post(&engine.url(), "/sim/faults", json!({"abort_all": true}))
        .await
        .unwrap();
    for running in running {
        let got = within("aborted", running).await.unwrap().unwrap().json();
        assert_eq!(got["meta_info"]["finish_reason"]["type"], "abort");
        let ids: Vec<u32> = serde_json::from_value(got["output_ids"].clone()).unwrap();
        assert_eq!(ids, expected(&[1, 2, 3], 0, ids.len(), VOCAB));
    }
}

#[tokio::test]
async fn a_turn_after_an_abort_goes_on_exactly_where_it_was() {
    let engine = start(stepping()).await;
    let running = long(&engine, body("a", 16_000));
    started(&engine, 1).await;
    post(&engine.url(), "/abort_request", json!({"rid": "a"}))
        .await
        .unwrap();
    let part = within("aborted", running).await.unwrap().unwrap().json();
    let mut ids: Vec<u32> = serde_json::from_value(part["output_ids"].clone()).unwrap();
    let had = ids.len();
    let mut prompt = vec![1, 2, 3];
    prompt.extend(&ids);
    let mut request = body("b", 20);
    request["input_ids"] = json!(prompt);
    let got = post(&engine.url(), "/generate", request)
        .await
        .unwrap()
        .json();
    let rest: Vec<u32> = serde_json::from_value(got["output_ids"].clone()).unwrap();
    ids.extend(rest);
    assert_eq!(ids, expected(&[1, 2, 3], 0, had + 20, VOCAB));
    // All of it but the last token was computed before.
    assert_eq!(got["meta_info"]["cached_tokens"], 3 + had - 1);
    let history = engine.history();
    assert!(history[0].overlap(&history[1]).is_none());
}

#[tokio::test]
async fn seeds_give_outputs_of_their_own_and_the_end_of_sequence_ends() {
    let mut config = SimConfig::instant();
    config.eos.one_in = 20;
    let engine = start(config.clone()).await;
    let mut stops = 0;
    for seed in 0..10_u64 {
        let mut request = body(&format!("s{seed}"), 40);
        request["sampling_params"]["ignore_eos"] = false.into();
        request["sampling_params"]["sampling_seed"] = seed.into();
        let got = post(&engine.url(), "/generate", request)
            .await
            .unwrap()
            .json();
        let ids: Vec<u32> = serde_json::from_value(got["output_ids"].clone()).unwrap();
        let whole =
            berth::engine::sim::tokens::expected_with_eos(&[1, 2, 3], seed, 40, VOCAB, config.eos);
        assert_eq!(ids, whole);
        let finish = &got["meta_info"]["finish_reason"];
        if ids.last() == Some(&config.eos.id) && ids.len() < 40 {
            stops += 1;
            assert_eq!(*finish, json!({"type": "stop", "matched": config.eos.id}));
        } else {
            assert_eq!(*finish, json!({"type": "length", "length": 40}));
        }
    }
    assert!(stops > 0);
}

#[tokio::test]
async fn a_stream_has_a_frame_for_the_first_token_and_for_every_interval() {
    let engine = start(SimConfig {
        stream_interval: 4,
        ..SimConfig::instant()
    })
    .await;
    for (own, counts) in [(None, vec![1, 5, 9, 10]), (Some(3), vec![1, 4, 7, 10])] {
        let mut request = body("s", 10);
        request["stream"] = true.into();
        if let Some(own) = own {
            request["sampling_params"]["stream_interval"] = own.into();
        }
        let got = post(&engine.url(), "/generate", request).await.unwrap();
        let seen: Vec<usize> = got
            .body
            .split("\n\n")
            .filter_map(|frame| frame.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]")
            .map(|data| {
                let frame: Value = serde_json::from_str(data).unwrap();
                frame["output_ids"].as_array().unwrap().len()
            })
            .collect();
        assert_eq!(seen, counts);
    }
}
