//! What the real engine answered, in every chunking.

use berth::{
    call::{MatchedStop, Usage, WeightSpan},
    engine::{EngineClient, EngineError, FinishReason, StreamMode, vllm::VllmClient},
};
use serde_json::{Value, json};

use crate::{
    Outcome, failure,
    fixtures::{Recorded, id, prompt, recorded},
    outcome, run,
    server::{Answer, Server, chunked, reply},
};

const STREAM: StreamMode = StreamMode::Incremental;

/// The recorded answer in different chunkings.
fn chunkings(rec: &Recorded) -> Vec<Answer> {
    if rec.kind.starts_with("text/event-stream") {
        vec![
            Answer::Keep(
                chunked(&rec.kind, &rec.body, rec.body.len(), false),
                1 << 20,
            ),
            Answer::Keep(chunked(&rec.kind, &rec.body, 1, false), 1 << 20),
            Answer::Keep(chunked(&rec.kind, &rec.body, 7, false), 1),
        ]
    } else {
        let whole = reply(rec.status, &rec.kind, "", &rec.body);
        vec![Answer::Keep(whole.clone(), 1 << 20), Answer::Keep(whole, 1)]
    }
}

/// Replays `name` in every chunking and checks what was sent each time.
async fn replayed(name: &str, mode: StreamMode) -> Vec<Outcome> {
    let rec = recorded(name);
    let answers = chunkings(&rec);
    let count = answers.len();
    let server = Server::start(answers).await;
    let client = VllmClient::default();
    let mut outcomes = Vec::new();
    let mut rank = 0;
    for _ in 0..count {
        let request = rec.call(&server.url(), mode);
        rank = request.rank;
        outcomes.push(outcome(run(&client, request).await));
    }
    for sent in server.take_requests() {
        assert!(
            sent.line
                .starts_with("POST /inference/v1/generate HTTP/1.1"),
            "{}",
            sent.line
        );
        let headers = sent.headers.to_ascii_lowercase();
        assert!(
            headers.contains(&format!("x-data-parallel-rank: {rank}\r\n")),
            "{headers}"
        );
        same_request(&rec.request, &serde_json::from_slice(&sent.body).unwrap());
    }
    outcomes
}

async fn refused(name: &str, mode: StreamMode) -> EngineError {
    let rec = recorded(name);
    let answers = chunkings(&rec);
    let count = answers.len();
    let server = Server::start(answers).await;
    let client = VllmClient::default();
    let mut errors = Vec::new();
    for _ in 0..count {
        errors.push(failure(run(&client, rec.call(&server.url(), mode)).await));
    }
    errors.dedup();
    assert_eq!(errors.len(), 1, "chunking changes nothing: {errors:?}");
    errors.remove(0)
}

/// Every key that was recorded is sent with the same meaning, and nothing else
/// but what else the engine would take for granted.
fn same_request(recorded: &Value, sent: &Value) {
    let mut recorded = recorded.clone();
    recorded["token_ids"] = json!(prompt(&recorded["token_ids"]));
    // The only model of the server needs no name; the recorder let the engine make
    // most ids, and asked in one case for alternatives that are not wanted.
    let not_compared = ["model", "request_id", "sampling_params", "logprobs"];
    let said_aloud = json!({
        "stream": false, "stream_options": {"include_usage": true},
        "sampling_params": {
            "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
            "ignore_eos": false, "detokenize": false,
        },
    });
    for part in ["", "/sampling_params"] {
        let keys = |value: &Value| value.pointer(part).unwrap().as_object().unwrap().clone();
        let (recorded, sent, aloud) = (keys(&recorded), keys(sent), keys(&said_aloud));
        for (key, value) in &recorded {
            if !not_compared.contains(&&**key) && key != "stream_options" {
                assert!(same(&sent[key], value), "{part}/{key}: {}", sent[key]);
            }
        }
        for (key, value) in &sent {
            if !recorded.contains_key(key) && !not_compared.contains(&&**key) {
                assert!(
                    aloud.get(key).is_some_and(|known| same(known, value)),
                    "{part}/{key}: {value} was not recorded"
                );
            }
        }
    }
}

fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() < 1e-6,
        _ => a == b,
    }
}

fn spans(list: &[(&str, u32, u32)]) -> Vec<WeightSpan> {
    list.iter()
        .map(|&(version, start, end)| WeightSpan {
            version: version.into(),
            start,
            end,
        })
        .collect()
}

fn usage(prompt: u32, cached: u32, completion: u32) -> Usage {
    Usage {
        prompt_tokens: prompt,
        cached_tokens: cached,
        completion_tokens: completion,
    }
}

#[tokio::test]
async fn a_plain_reply_gives_its_tokens_and_its_finish() {
    for name in ["gen_plain", "gen_plain_body_id", "gen_model_absent"] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.tokens, [207; 4]);
            assert!(out.logprobs.is_empty() && out.top.is_empty());
            assert_eq!(out.finish.reason, FinishReason::Length);
            assert_eq!(out.finish.usage, usage(16, 0, 4));
            // It does not tell.
            assert_eq!(out.finish.served_rank, None);
            assert_eq!(out.finish.weight_spans, spans(&[("default", 0, 4)]));
            assert_eq!(out.finish.text, None);
            assert!(out.finish.prompt_logprobs.is_none() && out.finish.routed_experts.is_none());
        }
    }
}

#[tokio::test]
async fn cached_tokens_are_whole_blocks() {
    for (name, want) in [
        ("gen_turn1_big", usage(300, 0, 4)),
        ("gen_turn2_cached", usage(306, 256, 4)),
        ("dp_rank0_first", usage(2000, 0, 4)),
        ("dp_rank0_again", usage(2000, 1920, 4)),
        ("dp_rank1_first", usage(2000, 0, 4)),
        ("dp_rank1_again", usage(2000, 1920, 4)),
    ] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.finish.usage, want, "{name}");
        }
    }
}

#[tokio::test]
async fn finish_reasons_are_the_engines_own() {
    let stopped = FinishReason::Stop(Some(MatchedStop::Token(207)));
    for (name, mode) in [
        ("gen_stop_token", StreamMode::Plain),
        ("gen_stream_stop", STREAM),
    ] {
        for out in replayed(name, mode).await {
            assert_eq!(out.tokens, [207]);
            assert_eq!(out.finish.reason, stopped);
            assert_eq!(out.finish.usage, usage(16, 0, 1));
        }
    }
    for out in replayed("gen_ignore_eos_length", StreamMode::Plain).await {
        assert_eq!(
            (out.tokens.len(), out.finish.reason),
            (8, FinishReason::Length)
        );
    }
}

#[tokio::test]
async fn every_kind_of_sampling_is_sent_as_recorded() {
    for name in ["gen_seed", "gen_min_tokens", "gen_after_version"] {
        replayed(name, StreamMode::Plain).await;
    }
}

#[tokio::test]
async fn a_stream_gives_what_is_new_and_ends_with_what_was_counted() {
    for name in ["gen_stream", "gen_stream_continuous_usage"] {
        for out in replayed(name, STREAM).await {
            assert_eq!(out.tokens, [207; 4]);
            assert_eq!(out.chunks, [1; 4]);
            assert_eq!(out.finish.usage, usage(16, 0, 4));
            assert_eq!(out.finish.weight_spans, spans(&[("default", 0, 4)]));
        }
    }
    for out in replayed("gen_stream_logprobs", STREAM).await {
        assert_eq!(out.logprobs.len(), 4);
        assert_eq!(out.logprobs[0], -9.104_219);
    }
    // Without the count at its end nothing holds the tokens together.
    let error = refused("gen_stream_no_usage", STREAM).await;
    assert!(matches!(error, EngineError::BadReply(m) if m.contains("counted")));
}

#[tokio::test]
async fn log_probabilities_of_prompt_and_output() {
    for out in replayed("gen_logprobs_0", StreamMode::Plain).await {
        assert_eq!(out.logprobs[..2], [-9.104_219, -8.830_171]);
        assert!(out.top.is_empty());
    }
    for out in replayed("gen_logprobs_2", StreamMode::Plain).await {
        assert_eq!(out.logprobs.len(), 4);
        // One is wanted, two were asked for.
        assert_eq!(out.top.len(), 4);
        assert_eq!(out.top[0], (207, -9.104_219));
    }
    for out in replayed("gen_prompt_logprobs_0", StreamMode::Plain).await {
        let prompt = out.finish.prompt_logprobs.unwrap();
        assert_eq!(prompt.logprobs.len(), 6);
        assert!(prompt.logprobs[0].is_nan());
        assert_eq!(prompt.logprobs[1], -10.453_214);
        assert_eq!(prompt.top, None);
    }
    // A stream would leave them out: asked for one, the client wants a reply.
    for out in replayed("gen_prompt_logprobs_1", STREAM).await {
        let top = out.finish.prompt_logprobs.unwrap().top.unwrap();
        assert_eq!((top.stride, top.token_ids.len()), (1, 6));
        assert!(top.token_ids[0] == 0 && top.logprobs[0].is_nan());
        // The most likely one, not the prompt's own.
        assert_eq!(top.token_ids[1], 22_631);
        assert_eq!(top.logprobs[1], -9.213_223);
    }
}

#[tokio::test]
async fn weights_that_change_midway_give_two_spans() {
    for out in replayed("gen_version_changed_midway", StreamMode::Plain).await {
        assert_eq!(
            out.finish.weight_spans,
            spans(&[("v1", 0, 40), ("v2", 40, 60)])
        );
        assert_eq!(out.tokens.len(), 60);
    }
}

#[tokio::test]
async fn an_abort_is_a_finish_with_a_part() {
    for (name, tokens) in [
        // The engine of the other rank was killed.
        ("dp_engine_killed_inflight_rank0", 102),
        ("pause_abort_running_request", 77),
    ] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.tokens.len(), tokens);
            assert!(matches!(out.finish.reason, FinishReason::Aborted { .. }));
            assert_eq!(
                out.finish.weight_spans,
                spans(&[("default", 0, tokens as u32)])
            );
        }
    }
    // The recording has the last of 152 tokens: the others go before them.
    let mut rec = recorded("abort_running_reply_stream");
    let before = json!({
        "request_id": "generate-tokens-st-ab", "usage": null,
        "choices": [{"index": 0, "finish_reason": null, "token_ids": vec![386; 151]}],
    });
    rec.body = [format!("data: {before}\n\n").as_bytes(), &rec.body].concat();
    let server = Server::start(chunkings(&rec)).await;
    for _ in 0..3 {
        let request = rec.call(&server.url(), STREAM);
        let out = outcome(run(&VllmClient::default(), request).await);
        assert_eq!(out.chunks, [151, 1]);
        assert_eq!(out.finish.usage, usage(16, 0, 152));
        assert_eq!(out.finish.weight_spans, spans(&[("v2", 0, 152)]));
    }
}

#[tokio::test]
async fn what_runs_through_a_pause_is_whole() {
    for name in [
        "pause_keep_running_request",
        "pause_wait_running_request",
        "pause_abort_new_request",
        "pause_keep_new_request",
        "pause_wait_new_request",
    ] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.finish.reason, FinishReason::Length, "{name}");
        }
    }
}

#[tokio::test]
async fn what_the_request_is_at_fault_for_is_passed_on() {
    for (name, mode, words) in [
        (
            "err_too_long",
            StreamMode::Plain,
            "The decoder prompt (length 20000) is longer than the maximum model length of 16384.",
        ),
        ("err_too_long_stream", STREAM, "(length 20000) is longer"),
        (
            "err_bad_sampling_value",
            StreamMode::Plain,
            "temperature must be non-negative, got -1.0.",
        ),
        (
            "gen_max_tokens_0",
            StreamMode::Plain,
            "max_tokens must be at least 1, got 0.",
        ),
    ] {
        match refused(name, mode).await {
            EngineError::Rejected(message) => assert!(message.contains(words), "{name}: {message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn what_may_quote_the_request_is_not_passed_on() {
    for name in [
        "err_bad_json",
        "err_empty_ids",
        "err_negative_token",
        "err_no_sampling_params",
    ] {
        match refused(name, StreamMode::Plain).await {
            EngineError::Rejected(message) => {
                assert!(message.starts_with("status 400;"), "{name}: {message}");
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn what_berth_is_at_fault_for_is_no_refusal_of_the_request() {
    for (name, words) in [
        ("dp_bad_rank_2", "data_parallel_rank 2 is out of range"),
        ("dp_bad_rank_neg1", "data_parallel_rank -1 is out of range"),
        ("rank_header_dp1_1", "out of range [0, 1)"),
        ("err_unknown_model", "The model ... does not exist"),
        ("err_logprobs_21", "sample logprobs of 21"),
    ] {
        match refused(name, StreamMode::Plain).await {
            EngineError::BadReply(message) => assert!(message.contains(words), "{name}: {message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_dead_engine_is_told_from_a_failure_and_a_cut_connection_is_lost() {
    let error = refused("err_token_out_of_vocab", StreamMode::Plain).await;
    assert!(matches!(error, EngineError::Died(m) if m.contains("EngineCore")));
    // As the killed rank's request was recorded: closed without a reply. And a
    // stream that ends in the middle, with the chunk open or politely.
    let rec = recorded("gen_stream");
    let half = &rec.body[..rec.body.len() / 2];
    let server = Server::start(vec![
        Answer::Close(Vec::new(), 1),
        Answer::Close(chunked(&rec.kind, half, 64, true), 1 << 20),
        Answer::Close(chunked(&rec.kind, half, 64, false), 1),
    ])
    .await;
    for _ in 0..3 {
        let request = rec.call(&server.url(), STREAM);
        let error = failure(run(&VllmClient::default(), request).await);
        assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
    }
}

#[tokio::test]
async fn a_request_that_was_cut_down_in_silence_is_no_answer() {
    let error = refused("ok_prompt_plus_max_tokens_clamped", StreamMode::Plain).await;
    assert!(
        matches!(&error, EngineError::BadReply(m) if m.contains("4 of 100 tokens")),
        "{error:?}"
    );
}

#[tokio::test]
async fn several_answers_to_one_request_are_no_answer() {
    let error = refused("gen_n2", StreamMode::Plain).await;
    assert!(matches!(error, EngineError::BadReply(m) if m.contains("several")));
}

#[tokio::test]
async fn an_abort_is_the_recorded_call_and_asks_whether_the_engine_lives() {
    let ok = |name: &str| {
        let rec = recorded(name);
        Answer::Keep(reply(rec.status, &rec.kind, "", &rec.body), 1)
    };
    let status = |status| Answer::Keep(reply(status, "application/json", "", b"{}"), 1);
    let server = Server::start(vec![
        ok("abort_requests_prefixed"),
        ok("health"),
        // Without development mode; a later one.
        status(404),
        status(200),
        status(200),
        // Neither: the closed connection is the abort.
        status(404),
        status(405),
        status(200),
        // It answers, and the engine behind it is dead.
        ok("abort_requests_prefixed"),
        status(503),
        // It does not answer.
        status(500),
    ])
    .await;
    let client = VllmClient::default();
    let mut answers = Vec::new();
    for _ in 0..5 {
        answers.push(client.abort(&server.url(), &id("st-ab")).await);
    }
    assert_eq!(answers[..3], [Ok(()), Ok(()), Ok(())]);
    assert!(matches!(answers[3], Err(EngineError::Failed(_))));
    assert!(matches!(answers[4], Err(EngineError::Failed(_))));
    let sent = server.take_requests();
    let lines: Vec<&str> = sent
        .iter()
        .map(|r| r.line.trim_end_matches(" HTTP/1.1"))
        .collect();
    let (dev, later) = ("POST /abort_requests", "POST /inference/v1/abort_requests");
    assert_eq!(
        lines,
        [
            dev,
            "GET /health",
            dev,
            later,
            "GET /health",
            dev,
            later,
            "GET /health",
            dev,
            "GET /health",
            dev
        ]
    );
    assert_eq!(
        serde_json::from_slice::<Value>(&sent[0].body).unwrap(),
        recorded("abort_requests_prefixed").request
    );
    let gone = client.abort("http://127.0.0.1:1", &id("st-ab")).await;
    assert!(matches!(gone, Err(EngineError::Refused(_))));
}

#[tokio::test]
async fn readiness_is_its_health() {
    let server = Server::start(vec![
        Answer::Keep(reply(200, "x", "", b""), 1),
        Answer::Keep(reply(503, "x", "", b""), 1),
    ])
    .await;
    let client = VllmClient::default();
    client.ready(&server.url()).await.unwrap();
    let busy = client.ready(&server.url()).await.unwrap_err();
    assert!(matches!(busy, EngineError::Busy { .. }));
    assert!(server.take_requests()[0].line.starts_with("GET /health "));
}
