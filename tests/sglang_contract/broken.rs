//! Replies that contradict the request, or themselves, are not believed.

use std::{sync::Arc, time::Duration};

use berth::{
    call::{Prompt, Sampling},
    engine::{
        ClientConfig, EngineError, EngineEvent, FinishReason, SamplingRef, StreamMode,
        http::HttpClient, sglang::SglangClient,
    },
};
use serde_json::{Value, json};

use crate::{
    failure,
    fixtures::{call, recorded},
    outcome, run,
    server::{Answer, Server, chunked, reply},
};

const CUMULATIVE: StreamMode = StreamMode::Cumulative { interval: 64 };

/// The recorded plain reply with log probabilities, changed.
async fn plain(change: impl FnOnce(&mut Value)) -> EngineError {
    let rec = recorded("gen_logprobs");
    let mut body: Value = serde_json::from_slice(&rec.body).unwrap();
    change(&mut body);
    let bytes = serde_json::to_vec(&body).unwrap();
    let server = Server::start(vec![Answer::Keep(
        reply(200, "application/json", "", &bytes),
        1 << 20,
    )])
    .await;
    let request = call(&rec.request, &server.url(), StreamMode::Plain);
    failure(run(&SglangClient::default(), request).await)
}

#[tokio::test]
async fn each_contradiction_in_a_reply_is_found() {
    let not_believed = [
        (
            plain(|b| b["meta_info"]["id"] = json!("another")).await,
            "another request",
        ),
        (
            plain(|b| b["meta_info"]["completion_tokens"] = json!(5)).await,
            "4 tokens came, 5",
        ),
        (
            plain(|b| b["meta_info"]["prompt_tokens"] = json!(15)).await,
            "16 prompt tokens were sent",
        ),
        (
            plain(|b| b["meta_info"]["cached_tokens"] = json!(17)).await,
            "cached",
        ),
        (
            plain(|b| b["output_ids"] = json!([207, 207, 207])).await,
            "log probabilities for 3",
        ),
        (
            plain(|b| b["output_ids"][1] = json!(208)).await,
            "another token",
        ),
        (
            plain(|b| b["output_ids"] = json!([1, 2, 3, 4, 5])).await,
            "more tokens",
        ),
        (
            plain(|b| b["meta_info"]["output_token_logprobs"][2][0] = Value::Null).await,
            "no log probability",
        ),
        (
            plain(|b| b["meta_info"]["output_token_logprobs"] = Value::Null).await,
            "0 log probabilities",
        ),
        (
            plain(|b| b["meta_info"]["output_top_logprobs"] = json!([])).await,
            "alternatives for 0",
        ),
        (
            plain(|b| b["meta_info"]["input_token_logprobs"][3][1] = json!(1)).await,
            "another prompt token",
        ),
        (
            plain(|b| b["meta_info"]["input_top_logprobs"] = Value::Null).await,
            "of the prompt",
        ),
        (
            plain(|b| b["meta_info"]["finish_reason"] = Value::Null).await,
            "without a finish",
        ),
        (
            plain(|b| b["meta_info"]["finish_reason"]["type"] = json!("tired")).await,
            "unknown finish",
        ),
        (
            plain(|b| b["meta_info"] = Value::Null).await,
            "no meta_info",
        ),
        (plain(|b| *b = json!([1])).await, "not a reply"),
        (
            plain(|b| b["output_ids"][0] = json!(-1)).await,
            "not a reply",
        ),
        (
            plain(|b| {
                b["meta_info"]["weight_versions"] = json!([{"version": "v", "start": 0, "end": 3}])
            })
            .await,
            "cover",
        ),
        (
            plain(|b| {
                b["meta_info"]["weight_versions"] = json!([{"version": "v", "start": 1, "end": 4}])
            })
            .await,
            "cover",
        ),
        (
            plain(|b| {
                b["meta_info"]["weight_versions"] = json!([
                    {"version": "v", "start": 0, "end": 2}, {"version": "w", "start": 3, "end": 4}
                ])
            })
            .await,
            "cover",
        ),
        (
            plain(|b| {
                b["meta_info"]["weight_versions"] = json!([
                    {"version": "v", "start": 0, "end": 6}, {"version": "w", "start": 6, "end": 4}
                ])
            })
            .await,
            "cover",
        ),
        (
            plain(|b| {
                b["meta_info"]["weight_versions"] = Value::Null;
                b["meta_info"]["weight_version"] = Value::Null;
            })
            .await,
            "no weight version",
        ),
        (
            plain(|b| b["meta_info"]["weight_version"] = json!("v".repeat(257))).await,
            "too long",
        ),
    ];
    for (error, words) in not_believed {
        match error {
            EngineError::BadReply(message) => {
                assert!(message.contains(words), "{words}: {message}");
            }
            other => panic!("{words}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_model_that_computed_no_numbers_has_failed() {
    let error = plain(|b| {
        b["meta_info"]["finish_reason"] = json!({"type": "stop", "matched": "NaN happened"});
    })
    .await;
    assert!(matches!(error, EngineError::Failed(_)), "{error:?}");
}

#[tokio::test]
async fn one_version_stands_for_spans_that_are_not_told() {
    let rec = recorded("gen_plain");
    let mut body: Value = serde_json::from_slice(&rec.body).unwrap();
    body["meta_info"]
        .as_object_mut()
        .unwrap()
        .remove("weight_versions");
    let bytes = serde_json::to_vec(&body).unwrap();
    let server = Server::start(vec![Answer::Keep(
        reply(200, "application/json", "", &bytes),
        1 << 20,
    )])
    .await;
    let request = call(&rec.request, &server.url(), StreamMode::Plain);
    let out = outcome(run(&SglangClient::default(), request).await);
    assert_eq!(out.finish.weight_spans.len(), 1);
    assert_eq!(out.finish.weight_spans[0].end, 4);
}

fn frame(tokens: &[u32], version: &str, extra: Value) -> Value {
    let mut frame = json!({
        "output_ids": tokens,
        "meta_info": {
            "id": "unnamed", "finish_reason": null, "prompt_tokens": 3, "cached_tokens": 0,
            "completion_tokens": tokens.len(), "weight_version": version,
        },
    });
    for (key, value) in extra.as_object().unwrap() {
        if key == "text" {
            frame["text"] = value.clone();
        } else {
            frame["meta_info"][key] = value.clone();
        }
    }
    frame
}

fn length() -> Value {
    json!({"finish_reason": {"type": "length", "length": 4}})
}

/// Frames as a stream, with its end mark.
async fn streamed(frames: &[Value], mode: StreamMode) -> Vec<Result<EngineEvent, EngineError>> {
    let mut body = String::new();
    for frame in frames {
        body.push_str(&format!("data: {frame}\n\n"));
    }
    body.push_str("data: [DONE]\n\n");
    let bytes = chunked("text/event-stream", body.as_bytes(), 50, false);
    let server = Server::start(vec![Answer::Keep(bytes, 1 << 20)]).await;
    let request = call(
        &json!({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}),
        &server.url(),
        mode,
    );
    run(&SglangClient::default(), request).await
}

fn bad(events: Vec<Result<EngineEvent, EngineError>>, words: &str) {
    match failure(events) {
        EngineError::BadReply(message) => assert!(message.contains(words), "{words}: {message}"),
        other => panic!("{words}: {other:?}"),
    }
}

#[tokio::test]
async fn a_cumulative_stream_may_not_take_back_or_change_tokens() {
    let none = json!({});
    for second in [vec![7], vec![7, 9, 8], vec![]] {
        let frames = [
            frame(&[7, 8], "v", none.clone()),
            frame(&second, "v", none.clone()),
        ];
        bad(streamed(&frames, CUMULATIVE).await, "gone or changed");
    }
}

#[tokio::test]
async fn a_stream_may_not_go_on_after_its_finish_or_its_limit() {
    let none = json!({});
    let frames = [
        frame(&[1, 2, 3, 4], "v", length()),
        frame(&[1, 2, 3, 4], "v", none.clone()),
    ];
    bad(streamed(&frames, CUMULATIVE).await, "after the finish");
    let frames = [
        frame(&[1, 2, 3], "v", none.clone()),
        frame(&[4, 5], "v", none),
    ];
    bad(
        streamed(&frames, StreamMode::Incremental).await,
        "more tokens",
    );
}

#[tokio::test]
async fn an_end_mark_without_a_finish_is_lost() {
    let frames = [frame(&[1], "v", json!({}))];
    let error = failure(streamed(&frames, CUMULATIVE).await);
    assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
}

#[tokio::test]
async fn an_error_in_a_stream_is_mapped_by_its_code() {
    for (code, want) in [(Some(503), "busy"), (Some(500), "failed"), (None, "failed")] {
        let frames = [
            frame(&[1], "v", json!({})),
            json!({"error": {"message": "the prompt 'canary'", "type": "x", "code": code}}),
        ];
        let mut events = streamed(&frames, CUMULATIVE).await;
        assert!(events[0].is_ok());
        let error = events.pop().unwrap().unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        assert!(!error.to_string().contains("canary"), "{error}");
    }
}

#[tokio::test]
async fn an_abort_with_a_status_before_any_token_is_mapped_by_it() {
    for (code, want) in [(503, "busy"), (400, "refused"), (500, "failed")] {
        let abort = json!({
            "text": "", "output_ids": [],
            "meta_info": {"id": "unnamed", "weight_version": "v", "completion_tokens": 0,
                "finish_reason": {"type": "abort", "status_code": code, "message": "canary"}},
        });
        let error = failure(streamed(&[abort], CUMULATIVE).await);
        assert!(error.to_string().contains(want), "{error}");
        assert!(!error.to_string().contains("canary"), "{error}");
    }
}

#[tokio::test]
async fn a_schedulers_abort_after_tokens_keeps_them_and_their_versions() {
    let abort = json!({
        "text": "", "output_ids": [],
        "meta_info": {"id": "unnamed", "weight_version": "w", "completion_tokens": 0,
            "weight_versions": [{"version": "w", "start": 0, "end": 0}],
            "finish_reason": {"type": "abort", "status_code": 503, "message": "canary"}},
    });
    let cumulative = [
        frame(&[1, 2], "v", json!({})),
        frame(&[1, 2, 3], "w", json!({})),
        abort.clone(),
    ];
    let incremental = [
        frame(&[1, 2], "v", json!({})),
        frame(&[3], "w", json!({})),
        abort,
    ];
    for (frames, mode) in [
        (cumulative, CUMULATIVE),
        (incremental, StreamMode::Incremental),
    ] {
        let out = outcome(streamed(&frames, mode).await);
        assert_eq!(out.tokens, [1, 2, 3]);
        assert_eq!(
            out.finish.reason,
            FinishReason::Aborted {
                message: "aborted by the engine".into()
            }
        );
        let spans: Vec<_> = out
            .finish
            .weight_spans
            .iter()
            .map(|s| (s.version.as_str(), s.start, s.end))
            .collect();
        assert_eq!(spans, [("v", 0, 2), ("w", 2, 3)]);
    }
}

#[tokio::test]
async fn text_is_whole_in_either_kind_of_stream() {
    let finish = |text: &str| {
        let mut extra = length();
        extra["text"] = json!(text);
        extra["completion_tokens"] = json!(4);
        extra
    };
    let cumulative = [
        frame(&[1, 2], "v", json!({"text": "ab"})),
        frame(&[1, 2, 3, 4], "v", finish("abcd")),
    ];
    let incremental = [
        frame(&[1, 2], "v", json!({"text": "ab"})),
        frame(&[3, 4], "v", finish("cd")),
    ];
    for (frames, mode) in [
        (cumulative, CUMULATIVE),
        (incremental, StreamMode::Incremental),
    ] {
        let out = outcome(streamed(&frames, mode).await);
        assert_eq!(out.finish.text.as_deref(), Some("abcd"));
        assert_eq!(out.chunks, [2, 2]);
    }
}

#[tokio::test]
async fn frames_and_replies_beyond_the_limit_end_the_attempt() {
    let config = ClientConfig {
        max_frame_bytes: 2000,
        ..ClientConfig::default()
    };
    let long = vec![b'x'; 4000];
    let stream = [b"data: ".to_vec(), long.clone()].concat();
    let mut announced = reply(200, "application/json", "", &long);
    announced.truncate(announced.len() - 3900);
    let server = Server::start(vec![
        Answer::Hang(chunked("text/event-stream", &stream, 100, true)),
        Answer::Hang(announced),
        Answer::Hang(chunked("application/json", &long, 100, true)),
    ])
    .await;
    let client = SglangClient::new(HttpClient::default(), config);
    for mode in [CUMULATIVE, StreamMode::Plain, StreamMode::Plain] {
        let request = call(&recorded("gen_plain").request, &server.url(), mode);
        let error = failure(run(&client, request).await);
        assert!(
            matches!(&error, EngineError::BadReply(m) if m.contains("large")),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn statuses_that_no_recording_has() {
    for (status, extra, want) in [
        (429, "retry-after: 2\r\n", "busy"),
        (500, "", "failed"),
        (502, "", "failed"),
        (302, "location: http://127.0.0.1:1/\r\n", "bad reply"),
        (401, "", "bad reply"),
    ] {
        let server = Server::start(vec![Answer::Keep(
            reply(status, "text/plain", extra, b"canary"),
            1,
        )])
        .await;
        let request = call(
            &recorded("gen_plain").request,
            &server.url(),
            StreamMode::Plain,
        );
        let error = failure(run(&SglangClient::default(), request).await);
        assert!(error.to_string().contains(want), "{status}: {error}");
        assert!(!error.to_string().contains("canary"), "{error}");
        if let EngineError::Busy { retry_after, .. } = error {
            assert_eq!(retry_after, Some(Duration::from_secs(2)));
        }
        assert_eq!(
            server.take_requests().len(),
            1,
            "redirects are not followed"
        );
    }
}

#[tokio::test]
async fn a_plain_answer_to_a_stream_is_no_stream() {
    let rec = recorded("gen_plain");
    let server = Server::start(vec![Answer::Keep(
        reply(200, "application/json", "", &rec.body),
        1 << 20,
    )])
    .await;
    let request = call(&rec.request, &server.url(), CUMULATIVE);
    let error = failure(run(&SglangClient::default(), request).await);
    assert!(matches!(error, EngineError::BadReply(_)), "{error:?}");
}

#[tokio::test]
async fn a_prompt_of_128k_tokens_is_sent_whole() {
    let ids: Vec<u32> = (0..131_072).map(|n| n % 150_000).collect();
    let server = Server::start(vec![Answer::Close(Vec::new(), 1)]).await;
    let mut request = call(&json!({}), &server.url(), StreamMode::Plain);
    request.prompt = Prompt::Tokens(ids.clone().into());
    request.sampling = SamplingRef {
        shared: Arc::new(Sampling::default()),
        seed: Some(1 << 62),
        min_tokens: 0,
    };
    let _ = run(&SglangClient::default(), request).await;
    let sent: Value = serde_json::from_slice(&server.take_requests()[0].body).unwrap();
    assert_eq!(sent["input_ids"], json!(ids));
    assert_eq!(sent["sampling_params"]["sampling_seed"], json!(1u64 << 62));
}
