//! Replies that contradict the request, or themselves, are not believed.

use std::time::Duration;

use berth::{
    call::MatchedStop,
    engine::{
        ClientConfig, EngineError, EngineEvent, FinishReason, StreamMode, http::HttpClient,
        vllm::VllmClient,
    },
};
use serde_json::{Value, json};

use crate::{
    failure,
    fixtures::{Recorded, recorded},
    outcome, run,
    server::{Answer, Server, chunked, reply},
};

const STREAM: StreamMode = StreamMode::Incremental;

/// The recorded plain reply, changed.
async fn answered(
    name: &str,
    change: impl FnOnce(&mut Value),
) -> Vec<Result<EngineEvent, EngineError>> {
    let rec = recorded(name);
    let mut body: Value = serde_json::from_slice(&rec.body).unwrap();
    change(&mut body);
    let bytes = serde_json::to_vec(&body).unwrap();
    let server = Server::start(vec![Answer::Keep(
        reply(200, "application/json", "", &bytes),
        1 << 20,
    )])
    .await;
    let request = rec.call(&server.url(), StreamMode::Plain);
    run(&VllmClient::default(), request).await
}

async fn changed(name: &str, change: impl FnOnce(&mut Value)) -> EngineError {
    failure(answered(name, change).await)
}

#[tokio::test]
async fn each_contradiction_in_a_reply_is_found() {
    let of = "gen_logprobs_2";
    let scored = "gen_prompt_logprobs_1";
    let not_believed = [
        (
            changed(of, |b| b["request_id"] = json!("generate-tokens-other")).await,
            "another request",
        ),
        (
            // Without the prefix it is not what an abort would meet.
            changed(of, |b| {
                let id = b["request_id"].as_str().unwrap();
                b["request_id"] = json!(id.trim_start_matches("generate-tokens-"));
            })
            .await,
            "another request",
        ),
        (
            changed(of, |b| b["usage"]["completion_tokens"] = json!(5)).await,
            "4 tokens came, 5",
        ),
        (
            changed(of, |b| b["usage"]["prompt_tokens"] = json!(15)).await,
            "16 prompt tokens were sent",
        ),
        (
            changed(of, |b| {
                b["usage"]["prompt_tokens_details"]["cached_tokens"] = json!(17);
            })
            .await,
            "cached",
        ),
        (
            changed(of, |b| b["usage"] = Value::Null).await,
            "nothing was counted",
        ),
        (
            changed(of, |b| b["choices"][0]["token_ids"] = json!([207, 207])).await,
            "4 log probabilities for 2",
        ),
        (
            changed(of, |b| b["choices"][0]["token_ids"][1] = json!(208)).await,
            "another token",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["token_ids"] = json!([1, 2, 3, 4, 5])
            })
            .await,
            "more tokens",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["logprobs"]["content"][2]["logprob"] = Value::Null;
            })
            .await,
            "no log probability",
        ),
        (
            changed(of, |b| b["choices"][0]["logprobs"] = Value::Null).await,
            "0 log probabilities",
        ),
        (
            changed(of, |b| {
                let one = b["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0].clone();
                b["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = json!(vec![one; 3]);
            })
            .await,
            "more alternatives",
        ),
        (
            changed(scored, |b| {
                b["prompt_logprobs"][1] =
                    json!({"1": {"logprob": -1.0, "rank": 1, "decoded_token": null}});
            })
            .await,
            "another prompt token",
        ),
        (
            changed(scored, |b| b["prompt_logprobs"][2] = Value::Null).await,
            "has no log probability",
        ),
        (
            changed(scored, |b| {
                b["prompt_logprobs"].as_array_mut().unwrap().pop();
            })
            .await,
            "5 log probabilities for 6",
        ),
        (
            changed(scored, |b| b["prompt_logprobs"] = Value::Null).await,
            "of the prompt",
        ),
        (
            changed(of, |b| b["choices"][0]["finish_reason"] = Value::Null).await,
            "without a finish",
        ),
        (
            changed(of, |b| b["choices"][0]["finish_reason"] = json!("tired")).await,
            "unknown finish",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["token_ids"] = json!([207, 207, 207]);
                let content = b["choices"][0]["logprobs"]["content"].as_array_mut();
                content.unwrap().pop();
            })
            .await,
            "3 of 4 tokens",
        ),
        (
            changed(of, |b| b["choices"][0]["index"] = json!(1)).await,
            "several",
        ),
        (
            changed(of, |b| b["choices"] = json!([])).await,
            "without a finish",
        ),
        (
            changed(of, |b| b["choices"] = Value::Null).await,
            "no choices",
        ),
        (changed(of, |b| *b = json!([1])).await, "not a reply"),
        (
            changed(of, |b| b["choices"][0]["token_ids"][0] = json!(-1)).await,
            "not a reply",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["weight_versions"] =
                    json!([{"version": "v", "start": 0, "end": 3}]);
            })
            .await,
            "cover",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["weight_versions"] = json!([
                    {"version": "v", "start": 0, "end": 2}, {"version": "w", "start": 3, "end": 4}
                ]);
            })
            .await,
            "cover",
        ),
        (
            changed(of, |b| {
                b["choices"][0]["weight_versions"][0]["version"] = json!("v".repeat(257));
            })
            .await,
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
async fn an_engine_that_failed_midway_has_failed() {
    let error = changed("gen_plain", |b| {
        b["choices"][0]["finish_reason"] = json!("error");
    })
    .await;
    assert!(matches!(error, EngineError::Failed(_)), "{error:?}");
}

#[tokio::test]
async fn weights_that_are_not_told_are_unknown_and_satisfy_nothing() {
    let out = outcome(
        answered("gen_plain", |b| {
            b["choices"][0]["weight_versions"] = Value::Null;
        })
        .await,
    );
    let spans = &out.finish.weight_spans;
    assert_eq!((spans.len(), spans[0].start, spans[0].end), (1, 0, 4));
    assert_eq!(spans[0].version, "");
}

#[tokio::test]
async fn an_end_of_sequence_is_the_last_token() {
    let out = outcome(
        answered("gen_plain", |b| {
            b["choices"][0]["finish_reason"] = json!("stop");
        })
        .await,
    );
    assert_eq!(
        out.finish.reason,
        FinishReason::Stop(Some(MatchedStop::Token(207)))
    );
}

#[tokio::test]
async fn the_most_likely_are_returned_whatever_was_sampled() {
    let of = |id: u32, logprob: f32, rank: u32| json!({"token_id": id, "logprob": logprob, "rank": rank});
    let out = outcome(
        answered("gen_logprobs_2", |b| {
            let content = b["choices"][0]["logprobs"]["content"]
                .as_array_mut()
                .unwrap();
            for position in content {
                // The sampled token is the ninth; it is listed first.
                position["top_logprobs"] = json!([of(207, -9.0, 9), of(4, -0.5, 1)]);
            }
        })
        .await,
    );
    assert_eq!(out.top, [(4, -0.5); 4]);
    // One that has none is padded.
    let out = outcome(
        answered("gen_logprobs_2", |b| {
            b["choices"][0]["logprobs"]["content"][3]["top_logprobs"] = json!([]);
        })
        .await,
    );
    assert!(out.top[3].0 == 0 && out.top[3].1.is_nan());
}

#[tokio::test]
async fn experts_come_as_the_array_that_numpy_saves() {
    use base64::Engine as _;
    let ask = async |experts: Value| {
        let rec = recorded("gen_plain");
        let mut body: Value = serde_json::from_slice(&rec.body).unwrap();
        body["choices"][0]["routed_experts"] = experts;
        let bytes = serde_json::to_vec(&body).unwrap();
        let server = Server::start(vec![Answer::Keep(
            reply(200, "application/json", "", &bytes),
            1 << 20,
        )])
        .await;
        let mut request = rec.call(&server.url(), STREAM);
        request.routed_experts = true;
        run(&VllmClient::default(), request).await
    };
    let header = "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 1, 2), }\n";
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(header.len() as u16).to_le_bytes());
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&[1, 0, 2, 0, 3, 0, 4, 0]);
    let text = base64::engine::general_purpose::STANDARD.encode(&file);
    let out = outcome(ask(json!(text)).await);
    let experts = out.finish.routed_experts.unwrap();
    assert_eq!(experts.dtype, "int16");
    assert_eq!(experts.shape, [2, 1, 2]);
    assert_eq!(&experts.data[..], [1, 0, 2, 0, 3, 0, 4, 0]);
    for none in [Value::Null, json!("AAAA"), json!("?"), json!(3)] {
        let error = failure(ask(none).await);
        assert!(matches!(error, EngineError::BadReply(_)), "{error:?}");
    }
}

/// A stream of these frames, with its end mark.
async fn streamed(frames: &[Value]) -> Vec<Result<EngineEvent, EngineError>> {
    let mut body = String::new();
    for frame in frames {
        body.push_str(&format!("data: {frame}\n\n"));
    }
    body.push_str("data: [DONE]\n\n");
    let bytes = chunked("text/event-stream", body.as_bytes(), 50, false);
    let server = Server::start(vec![Answer::Keep(bytes, 1 << 20)]).await;
    let rec = Recorded {
        request: json!({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}),
        headers: Value::Null,
        status: 200,
        kind: String::new(),
        body: Vec::new(),
    };
    run(&VllmClient::default(), rec.call(&server.url(), STREAM)).await
}

fn frame(tokens: &[u32], reason: Option<&str>) -> Value {
    json!({
        "request_id": "generate-tokens-unnamed",
        "choices": [{"index": 0, "finish_reason": reason, "token_ids": tokens}],
    })
}

fn counted(completion: u32) -> Value {
    json!({
        "request_id": "generate-tokens-unnamed", "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": completion},
    })
}

fn bad(events: Vec<Result<EngineEvent, EngineError>>, words: &str) {
    match failure(events) {
        EngineError::BadReply(message) => assert!(message.contains(words), "{words}: {message}"),
        other => panic!("{words}: {other:?}"),
    }
}

#[tokio::test]
async fn a_stream_may_not_go_on_after_its_finish_or_its_limit() {
    let whole = [frame(&[1, 2, 3, 4], Some("length")), counted(4)];
    assert_eq!(outcome(streamed(&whole).await).tokens, [1, 2, 3, 4]);
    let frames = [frame(&[1, 2, 3, 4], Some("length")), frame(&[], None)];
    bad(streamed(&frames).await, "after the finish");
    let frames = [frame(&[1, 2, 3], None), frame(&[4, 5], None)];
    bad(streamed(&frames).await, "more tokens");
    let frames = [frame(&[1, 2, 3, 4], Some("length")), counted(3)];
    bad(streamed(&frames).await, "3 were counted");
}

#[tokio::test]
async fn an_end_mark_without_a_finish_is_lost() {
    for frames in [vec![frame(&[1], None)], vec![counted(0)], vec![]] {
        let error = failure(streamed(&frames).await);
        assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
    }
}

#[tokio::test]
async fn an_error_in_a_stream_is_mapped_by_its_code() {
    for (code, want) in [(Some(503), "busy"), (Some(500), "failed"), (None, "failed")] {
        let frames = [
            frame(&[1], None),
            json!({"error": {"message": "the prompt 'canary'", "type": "x", "code": code}}),
        ];
        let mut events = streamed(&frames).await;
        assert!(events[0].is_ok());
        let error = events.pop().unwrap().unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        assert!(!error.to_string().contains("canary"), "{error}");
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
    let server = Server::start(vec![
        Answer::Hang(chunked("text/event-stream", &stream, 100, true)),
        Answer::Hang(chunked("application/json", &long, 100, true)),
    ])
    .await;
    let client = VllmClient::new(HttpClient::default(), config);
    for mode in [STREAM, StreamMode::Plain] {
        let request = recorded("gen_plain").call(&server.url(), mode);
        let error = failure(run(&client, request).await);
        assert!(
            matches!(&error, EngineError::BadReply(m) if m.contains("large")),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn load_is_not_death_and_neither_is_another_server() {
    for (status, extra, want) in [
        (503, "retry-after: 2\r\n", "busy"),
        (429, "retry-after: 2\r\n", "busy"),
        (500, "", "failed"),
        (502, "", "failed"),
        // Without --enable-scale-out.
        (403, "", "bad reply"),
        (404, "", "bad reply"),
        (302, "location: http://127.0.0.1:1/\r\n", "bad reply"),
    ] {
        let server = Server::start(vec![Answer::Keep(
            reply(status, "text/plain", extra, b"canary"),
            1,
        )])
        .await;
        let request = recorded("gen_plain").call(&server.url(), STREAM);
        let error = failure(run(&VllmClient::default(), request).await);
        assert!(error.to_string().contains(want), "{status}: {error}");
        assert!(!error.to_string().contains("canary"), "{error}");
        if let EngineError::Busy { retry_after, .. } = error {
            assert_eq!(retry_after, Some(Duration::from_secs(2)));
        }
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
    let error = failure(run(&VllmClient::default(), rec.call(&server.url(), STREAM)).await);
    assert!(matches!(error, EngineError::BadReply(_)), "{error:?}");
}
