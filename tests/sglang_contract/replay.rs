//! What the real engine answered, in every chunking.

use berth::{
    call::{MatchedStop, Usage, WeightSpan},
    engine::{EngineClient, EngineError, FinishReason, StreamMode, sglang::SglangClient},
};
use serde_json::{Value, json};

use crate::{
    Outcome, failure,
    fixtures::{Recorded, call, id, recorded},
    outcome, run,
    server::{Answer, Server, chunked, reply},
};

const CUMULATIVE: StreamMode = StreamMode::Cumulative { interval: 1 };

/// The recorded answer in different chunkings.
fn chunkings(rec: &Recorded) -> Vec<Answer> {
    let streams = rec.kind.starts_with("text/event-stream");
    if streams {
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
    let client = SglangClient::default();
    let mut outcomes = Vec::new();
    for _ in 0..count {
        let request = call(&rec.request, &server.url(), mode);
        outcomes.push(outcome(run(&client, request).await));
    }
    for sent in server.take_requests() {
        assert!(
            sent.line.starts_with("POST /generate HTTP/1.1"),
            "{}",
            sent.line
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
    let client = SglangClient::default();
    let mut errors = Vec::new();
    for _ in 0..count {
        errors.push(failure(
            run(&client, call(&rec.request, &server.url(), mode)).await,
        ));
    }
    errors.dedup();
    assert_eq!(errors.len(), 1, "chunking changes nothing: {errors:?}");
    errors.remove(0)
}

/// Every key that was recorded is sent with the same meaning, and nothing else
/// but engine defaults said aloud.
fn same_request(recorded: &Value, sent: &Value) {
    let said_aloud = json!({
        "stream": false, "routed_dp_rank": 0, "return_logprob": false, "logprob_start_len": -1,
        "sampling_params": {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": false,
            "skip_special_tokens": true, "stream_interval": 1,
        },
    });
    for part in ["", "/sampling_params"] {
        let keys = |value: &Value| value.pointer(part).unwrap().as_object().unwrap().clone();
        let (recorded, sent, aloud) = (keys(recorded), keys(sent), keys(&said_aloud));
        for (key, value) in &recorded {
            if key != "sampling_params" {
                assert!(same(&sent[key], value), "{part}/{key}: {}", sent[key]);
            }
        }
        for (key, value) in &sent {
            if !recorded.contains_key(key) {
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
    for out in replayed("gen_plain", StreamMode::Plain).await {
        assert_eq!(out.tokens, [207; 4]);
        assert!(out.logprobs.is_empty() && out.top.is_empty());
        assert_eq!(out.finish.reason, FinishReason::Length);
        assert_eq!(out.finish.usage, usage(16, 0, 4));
        assert_eq!(out.finish.served_rank, None);
        assert_eq!(out.finish.weight_spans, spans(&[("default", 0, 4)]));
        assert_eq!(out.finish.text, None);
        assert!(out.finish.prompt_logprobs.is_none() && out.finish.routed_experts.is_none());
    }
    let second = replayed("gen_turn2_cached", StreamMode::Plain)
        .await
        .remove(0);
    assert_eq!(second.finish.usage, usage(23, 19, 4));
}

#[tokio::test]
async fn the_rank_is_asked_for_and_the_one_that_served_is_told() {
    for (name, cached, rank) in [
        ("dp_small_rank0", 0, 0),
        ("dp_small_rank0_again", 63, 0),
        ("dp_small_rank1", 0, 1),
    ] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.finish.served_rank, Some(rank));
            assert_eq!(out.finish.usage, usage(64, cached, 4));
        }
    }
}

#[tokio::test]
async fn finish_reasons_are_the_engines_own() {
    let stopped = FinishReason::Stop(Some(MatchedStop::Token(207)));
    for (name, mode) in [
        ("gen_stop_token", StreamMode::Plain),
        ("gen_stream_stop", CUMULATIVE),
        ("gen_stream_stop", StreamMode::Incremental),
    ] {
        for out in replayed(name, mode).await {
            assert_eq!(out.tokens, [207]);
            assert_eq!(out.finish.reason, stopped);
        }
    }
    for out in replayed("gen_ignore_eos_length", StreamMode::Plain).await {
        assert_eq!(
            (out.tokens.len(), out.finish.reason),
            (8, FinishReason::Length)
        );
    }
    for out in replayed("gen_max_new_0", StreamMode::Plain).await {
        assert!(out.tokens.is_empty() && out.chunks.is_empty());
        assert_eq!(out.finish.weight_spans, spans(&[("default", 0, 0)]));
    }
}

#[tokio::test]
async fn every_kind_of_sampling_is_sent_as_recorded() {
    for name in [
        "gen_sampled_seed",
        "gen_sampled_seed_logprob",
        "gen_priority",
        "rid_reuse_after_finish",
        "paused_new_reply_retract",
        "queue_priority_hi",
        "sampling_top_k_neg1",
    ] {
        replayed(name, StreamMode::Plain).await;
    }
}

#[tokio::test]
async fn a_cumulative_stream_gives_only_what_is_new() {
    for out in replayed("gen_stream", CUMULATIVE).await {
        assert_eq!(out.tokens, [207; 4]);
        assert_eq!(out.chunks, [1; 4]);
        assert_eq!(out.finish.usage, usage(16, 15, 4));
    }
    for out in replayed("gen_stream_logprobs", CUMULATIVE).await {
        assert_eq!(out.chunks, [1; 4]);
        assert_eq!(
            out.logprobs,
            [-9.104_254, -8.830_202, -8.830_393, -8.885_399]
        );
        assert_eq!(out.top.len(), 4);
        assert_eq!(out.top[3], (207, -8.885_399));
    }
}

#[tokio::test]
async fn an_incremental_stream_gives_the_same() {
    for out in replayed("inc_stream", StreamMode::Incremental).await {
        assert_eq!((out.tokens.len(), out.chunks), (4, vec![1; 4]));
        assert_eq!(out.finish.usage, usage(16, 0, 4));
    }
    for out in replayed("inc_stream_logprobs", StreamMode::Incremental).await {
        assert_eq!(
            out.logprobs,
            [-9.104_254, -8.830_202, -8.830_393, -8.885_399]
        );
        let prompt = out.finish.prompt_logprobs.unwrap();
        assert_eq!(prompt.logprobs.len(), 16);
        assert!(prompt.logprobs[0].is_nan());
        assert_eq!(prompt.top.unwrap().token_ids[1], 28787);
    }
}

#[tokio::test]
async fn log_probabilities_of_prompt_and_output() {
    for out in replayed("gen_logprobs", StreamMode::Plain).await {
        assert_eq!(
            out.logprobs,
            [-9.104_254, -8.830_202, -8.830_393, -8.885_399]
        );
        assert_eq!(out.top.len(), 8);
        let prompt = out.finish.prompt_logprobs.unwrap();
        assert_eq!(prompt.logprobs.len(), 16);
        assert!(prompt.logprobs[0].is_nan());
        assert_eq!(prompt.logprobs[1], -10.537_66);
        let top = prompt.top.unwrap();
        assert_eq!((top.stride, top.token_ids.len()), (2, 32));
        // The first token has no alternatives: padded.
        assert_eq!(top.token_ids[..2], [0, 0]);
        assert!(top.logprobs[..2].iter().all(|p| p.is_nan()));
        assert_eq!(top.token_ids[2..4], [28787, 5713]);
    }
    for out in replayed("gen_logprobs_out_only", StreamMode::Plain).await {
        assert_eq!(out.logprobs.len(), 4);
        assert!(out.finish.prompt_logprobs.is_none());
    }
    for out in replayed("gen_max_new_0_logprob", StreamMode::Plain).await {
        assert!(out.tokens.is_empty());
        assert_eq!(out.finish.prompt_logprobs.unwrap().logprobs.len(), 16);
    }
}

#[tokio::test]
async fn the_larger_number_of_alternatives_is_asked_for_and_cut_down() {
    let rec = recorded("gen_logprobs");
    for (top_k, prompt_top_k) in [(2, 1), (1, 2), (0, 2), (2, 0)] {
        let server = Server::start(vec![chunkings(&rec).remove(0)]).await;
        let mut request = call(&rec.request, &server.url(), StreamMode::Plain);
        request.logprobs.top_k = top_k;
        request.logprobs.prompt_top_k = prompt_top_k;
        let out = outcome(run(&SglangClient::default(), request).await);
        same_request(
            &rec.request,
            &serde_json::from_slice(&server.take_requests()[0].body).unwrap(),
        );
        assert_eq!(out.top.len(), 4 * top_k as usize);
        let prompt = out.finish.prompt_logprobs.unwrap();
        assert_eq!(
            prompt.top.map_or(0, |top| top.token_ids.len()),
            16 * prompt_top_k as usize
        );
    }
}

#[tokio::test]
async fn only_the_prompts_log_probabilities_when_only_they_are_wanted() {
    let rec = recorded("gen_logprobs");
    let server = Server::start(vec![chunkings(&rec).remove(0)]).await;
    let mut request = call(&rec.request, &server.url(), StreamMode::Plain);
    request.logprobs.output = false;
    request.logprobs.top_k = 0;
    let out = outcome(run(&SglangClient::default(), request).await);
    assert!(out.logprobs.is_empty() && out.top.is_empty());
    assert_eq!(out.finish.prompt_logprobs.unwrap().logprobs.len(), 16);
}

#[tokio::test]
async fn a_part_of_the_prompts_log_probabilities_is_not_taken_for_all() {
    let rec = recorded("gen_logprobs_start4");
    let server = Server::start(vec![chunkings(&rec).remove(0)]).await;
    let mut request = call(&rec.request, &server.url(), StreamMode::Plain);
    request.logprobs.prompt = true;
    let error = failure(run(&SglangClient::default(), request).await);
    assert!(matches!(error, EngineError::BadReply(m) if m.contains("4 log probabilities for 8")));
}

#[tokio::test]
async fn weights_that_change_midway_give_two_spans() {
    for (name, want) in [
        (
            "gen_version_changed_midway_in_place",
            [("default", 0, 22), ("w-in_place", 22, 60)],
        ),
        (
            "gen_version_changed_midway_retract",
            [("w-in_place", 0, 24), ("w-retract", 24, 60)],
        ),
    ] {
        for out in replayed(name, StreamMode::Plain).await {
            assert_eq!(out.finish.weight_spans, spans(&want));
            assert_eq!(out.tokens.len(), 60);
        }
    }
    let out = replayed("paused_running_reply_in_place", StreamMode::Plain)
        .await
        .remove(0);
    assert_eq!(
        out.finish.weight_spans,
        spans(&[("default", 0, 48), ("v18", 48, 49)])
    );
    let out = replayed("paused_running_reply_retract", StreamMode::Plain)
        .await
        .remove(0);
    assert_eq!(out.finish.usage, usage(16, 4, 80));
}

#[tokio::test]
async fn an_abort_is_a_finish_with_a_part() {
    for out in replayed("abort_running_reply", StreamMode::Plain).await {
        assert_eq!(out.tokens.len(), 41);
        assert_eq!(out.finish.usage, usage(16, 15, 41));
        assert_eq!(
            out.finish.reason,
            FinishReason::Aborted {
                message: "Aborted".into()
            }
        );
    }
    for out in replayed("abort_running_reply_stream", CUMULATIVE).await {
        // The recording begins with 35 tokens.
        assert_eq!(out.chunks, [35, 1, 1]);
        assert_eq!(out.finish.weight_spans, spans(&[("default", 0, 37)]));
    }
}

#[tokio::test]
async fn a_schedulers_abort_says_little_and_is_understood() {
    for (name, mode) in [
        ("abort_waiting_reply", StreamMode::Plain),
        ("abort_waiting_reply_stream", CUMULATIVE),
        ("abort_waiting_reply_stream", StreamMode::Incremental),
    ] {
        for out in replayed(name, mode).await {
            assert!(out.tokens.is_empty());
            assert_eq!(
                out.finish.reason,
                FinishReason::Aborted {
                    message: "Abort in waiting queue".into()
                }
            );
            assert_eq!(out.finish.usage, usage(16, 0, 0));
            assert_eq!(out.finish.text, None);
        }
    }
}

#[tokio::test]
async fn a_full_queue_is_busy_in_both_forms() {
    let full = EngineError::Busy {
        message: "The request queue is full.".into(),
        retry_after: None,
    };
    assert_eq!(refused("queue_full", StreamMode::Plain).await, full);
    assert_eq!(refused("queue_full_stream", CUMULATIVE).await, full);
    assert_eq!(
        refused("queue_priority_wait2", StreamMode::Plain).await,
        EngineError::Busy {
            message: "The request is aborted by a higher priority request.".into(),
            retry_after: None,
        }
    );
}

#[tokio::test]
async fn what_the_request_is_at_fault_for_is_passed_on() {
    for (name, mode, words) in [
        (
            "err_too_long",
            StreamMode::Plain,
            "The input (40000 tokens) is longer than the model's context length (32768 tokens).",
        ),
        (
            "err_too_long_stream",
            CUMULATIVE,
            "The input (40000 tokens) is longer",
        ),
        (
            "err_prompt_plus_max_new",
            StreamMode::Plain,
            "a total of 34000 tokens: 32000 tokens from",
        ),
        (
            "err_bad_sampling_value",
            StreamMode::Plain,
            "non-negative finite number, got -1.",
        ),
        ("sampling_top_k_0", StreamMode::Plain, "at least 1, got 0."),
        (
            "err_empty_ids",
            StreamMode::Plain,
            "input_ids cannot be empty.",
        ),
        ("err_no_input", StreamMode::Plain, "Either text, input_ids"),
        (
            "err_text_skip_tok",
            StreamMode::Plain,
            "skip_tokenizer_init=True cannot accept text",
        ),
        (
            "gen_min_new_tokens_skip_tok",
            StreamMode::Plain,
            "min_new_tokens=2 is unavailable",
        ),
        (
            "gen_stop_string_skip_tok",
            StreamMode::Plain,
            "stop=... is unavailable",
        ),
    ] {
        match refused(name, mode).await {
            EngineError::Rejected(message) => assert!(message.contains(words), "{name}: {message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn what_may_quote_the_prompt_or_a_path_is_not_passed_on() {
    for name in [
        "err_bad_type",
        "err_bad_json",
        "dp_bad_rank_0",
        "err_bad_sampling_key",
    ] {
        match refused(name, StreamMode::Plain).await {
            EngineError::Rejected(message) => {
                assert!(message.starts_with("status 400;"), "{message}");
                for secret in ["abc", "LAB_DIR", "File", "\"0\""] {
                    assert!(!message.contains(secret), "{message}");
                }
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn what_berth_is_at_fault_for_is_no_refusal_of_the_request() {
    for (name, mode, words) in [
        (
            "err_duplicate_rid",
            StreamMode::Plain,
            "Duplicate request ID",
        ),
        (
            "err_duplicate_rid_stream",
            CUMULATIVE,
            "Duplicate request ID",
        ),
        (
            "err_bad_rank_dp1",
            StreamMode::Plain,
            "routed_dp_rank=1 out of range [0, 1)",
        ),
        (
            "dp_bad_rank_99",
            StreamMode::Plain,
            "routed_dp_rank=99 out of range [0, 2)",
        ),
        ("err_unknown_path", StreamMode::Plain, "status 404"),
        ("err_wrong_method", StreamMode::Plain, "status 405"),
    ] {
        match refused(name, mode).await {
            EngineError::BadReply(message) => assert!(message.contains(words), "{name}: {message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn an_adapter_that_is_not_there_is_told_apart_and_its_name_is_not_repeated() {
    let error = refused("err_unknown_lora", StreamMode::Plain).await;
    assert!(
        matches!(&error, EngineError::AdapterMissing(m) if m.contains("LoRA adapter ... was requested")),
        "{error:?}"
    );
}

#[tokio::test]
async fn several_answers_to_one_request_are_no_answer() {
    for name in ["gen_n2", "gen_batch"] {
        let rec = recorded(name);
        let server = Server::start(chunkings(&rec)).await;
        let mut request = call(&rec.request, &server.url(), StreamMode::Plain);
        request.id = id("fx-b0");
        let error = failure(run(&SglangClient::default(), request).await);
        assert!(matches!(error, EngineError::BadReply(_)), "{error:?}");
    }
}

#[tokio::test]
async fn experts_that_were_asked_for_and_did_not_come_are_missed() {
    let error = refused("gen_routed_experts", StreamMode::Plain).await;
    assert!(matches!(error, EngineError::BadReply(m) if m.contains("experts")));
}

#[tokio::test]
async fn a_stream_that_a_dying_engine_cuts_is_lost_after_its_tokens() {
    let rec = recorded("stream_cut_engine_killed");
    // Cut with the chunk open, and, as a proxy may do it, ended politely.
    let politely = chunked(&rec.kind, &rec.body, 64, false);
    let cut = chunked(&rec.kind, &rec.body, 64, true);
    let server = Server::start(vec![
        Answer::Close(cut.clone(), 1 << 20),
        Answer::Close(cut, 1),
        Answer::Close(politely, 1 << 20),
    ])
    .await;
    let client = SglangClient::default();
    for _ in 0..3 {
        let mut events = run(&client, call(&rec.request, &server.url(), CUMULATIVE)).await;
        let error = events.pop().unwrap().unwrap_err();
        assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
        assert_eq!(events.len(), 2, "8 tokens, then one more");
        assert!(events.iter().all(Result::is_ok));
    }
}

#[tokio::test]
async fn abort_and_ready_are_the_recorded_calls() {
    let server = Server::start(vec![
        Answer::Keep(reply(200, "x", "", b""), 1),
        Answer::Keep(reply(200, "x", "", b""), 1),
        Answer::Keep(reply(503, "x", "retry-after: 3\r\n", b""), 1),
    ])
    .await;
    let client = SglangClient::default();
    client.abort(&server.url(), &id("fx-ab-1")).await.unwrap();
    client.ready(&server.url()).await.unwrap();
    let busy = client.ready(&server.url()).await.unwrap_err();
    assert!(
        matches!(busy, EngineError::Busy { retry_after: Some(wait), .. } if wait.as_secs() == 3)
    );
    let sent = server.take_requests();
    assert!(sent[0].line.starts_with("POST /abort_request "));
    assert_eq!(
        serde_json::from_slice::<Value>(&sent[0].body).unwrap(),
        recorded("abort_request").request
    );
    assert!(
        sent[0]
            .headers
            .to_ascii_lowercase()
            .contains("content-type: application/json")
    );
    assert!(sent[1].line.starts_with("GET /ready "));
}
