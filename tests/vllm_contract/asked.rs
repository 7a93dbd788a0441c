//! What is sent: every parameter, and nothing of what this route would ignore.

use std::sync::Arc;

use berth::{
    call::{LogprobsWanted, Prompt, Sampling, Structured},
    engine::{EngineError, EngineRequest, SamplingRef, StreamMode, vllm::VllmClient},
};
use serde_json::{Value, json};

use crate::{
    failure,
    fixtures::id,
    run,
    server::{Answer, Server},
};

fn plain() -> EngineRequest {
    EngineRequest {
        url: "".into(),
        id: id("x"),
        rank: 3,
        prompt: Prompt::Tokens([1, 2, 3].into()),
        max_tokens: 9,
        sampling: SamplingRef {
            shared: Arc::default(),
            seed: None,
            min_tokens: 0,
        },
        logprobs: LogprobsWanted::default(),
        adapter: None,
        priority: None,
        routed_experts: false,
        stream: StreamMode::Plain,
        traceparent: None,
    }
}

/// Headers and body of this request.
async fn sent(request: EngineRequest) -> (String, Value) {
    let server = Server::start(vec![Answer::Close(Vec::new(), 1)]).await;
    let request = EngineRequest {
        url: server.url().into(),
        ..request
    };
    let _ = run(&VllmClient::default(), request).await;
    let sent = server.take_requests().remove(0);
    (
        sent.headers.to_ascii_lowercase(),
        serde_json::from_slice(&sent.body).unwrap(),
    )
}

#[tokio::test]
async fn every_parameter_has_its_key_and_defaults_are_said_aloud() {
    let (headers, body) = sent(plain()).await;
    assert!(headers.contains("x-data-parallel-rank: 3\r\n"), "{headers}");
    assert!(headers.contains("x-request-id: x\r\n"), "{headers}");
    assert_eq!(
        body,
        json!({
            "request_id": "x", "token_ids": [1, 2, 3], "stream": false,
            "sampling_params": {
                "max_tokens": 9, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
                "repetition_penalty": 1.0, "ignore_eos": false, "detokenize": false,
            },
        })
    );
    let sampling = Sampling {
        temperature: Some(0.5),
        top_p: Some(0.25),
        top_k: Some(7),
        min_p: Some(0.125),
        ignore_eos: true,
        stop_token_ids: Some(vec![5, 6]),
        frequency_penalty: Some(-2.0),
        presence_penalty: Some(2.0),
        repetition_penalty: Some(1.5),
        logit_bias: [(8, -100.0)].into(),
        ..Sampling::default()
    };
    let (_, body) = sent(EngineRequest {
        sampling: SamplingRef {
            shared: Arc::new(sampling),
            seed: Some(1 << 62),
            min_tokens: 4,
        },
        adapter: Some("lora".into()),
        priority: Some(7),
        ..plain()
    })
    .await;
    assert_eq!(
        body["sampling_params"],
        json!({
            "max_tokens": 9, "min_tokens": 4, "temperature": 0.5, "top_p": 0.25, "top_k": 7,
            "min_p": 0.125, "frequency_penalty": -2.0, "presence_penalty": 2.0,
            "repetition_penalty": 1.5, "ignore_eos": true, "detokenize": false,
            "seed": 1u64 << 62, "stop_token_ids": [5, 6], "logit_bias": {"8": -100.0},
        })
    );
    // An adapter is asked for as a model. Lower goes first there.
    assert_eq!(
        (&body["model"], &body["priority"]),
        (&json!("lora"), &json!(-7))
    );
}

#[tokio::test]
async fn an_output_is_constrained_in_the_engines_words() {
    for (structured, want) in [
        (
            Structured::JsonSchema("{\"type\":\"object\"}".into()),
            json!({"json": "{\"type\":\"object\"}"}),
        ),
        (Structured::Regex("a+".into()), json!({"regex": "a+"})),
        (
            Structured::Ebnf("root ::= \"a\"".into()),
            json!({"grammar": "root ::= \"a\""}),
        ),
    ] {
        let mut request = plain();
        request.sampling.shared = Arc::new(Sampling {
            structured: Some(structured),
            ..Sampling::default()
        });
        let (_, body) = sent(request).await;
        assert_eq!(body["sampling_params"]["structured_outputs"], want);
    }
}

#[tokio::test]
async fn the_answer_streams_where_all_of_it_would_be_in_the_stream() {
    for mode in [
        StreamMode::Incremental,
        StreamMode::Cumulative { interval: 64 },
    ] {
        let stream = EngineRequest {
            stream: mode,
            ..plain()
        };
        let (_, body) = sent(stream.clone()).await;
        assert_eq!(body["stream"], true);
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
        let experts = EngineRequest {
            routed_experts: true,
            ..stream.clone()
        };
        let scored = EngineRequest {
            logprobs: LogprobsWanted {
                prompt: true,
                prompt_top_k: 20,
                ..LogprobsWanted::default()
            },
            ..stream
        };
        for request in [experts, scored] {
            let (_, body) = sent(request).await;
            assert_eq!(body["stream"], false);
            assert!(body.get("stream_options").is_none());
        }
    }
}

#[tokio::test]
async fn what_this_route_would_ignore_is_not_sent() {
    let mut stops = plain();
    stops.sampling.shared = Arc::new(Sampling {
        stop: Some(vec!["</a>".into()]),
        ..Sampling::default()
    });
    let text = EngineRequest {
        prompt: Prompt::Text("canary".into()),
        ..plain()
    };
    for request in [stops, text] {
        let server = Server::start(vec![Answer::Close(Vec::new(), 1)]).await;
        let request = EngineRequest {
            url: server.url().into(),
            ..request
        };
        let error = failure(run(&VllmClient::default(), request).await);
        assert!(matches!(error, EngineError::Rejected(_)), "{error:?}");
        assert!(!error.to_string().contains("canary"));
        assert!(server.take_requests().is_empty());
    }
    // None at all are no strings.
    let mut none = plain();
    none.sampling.shared = Arc::new(Sampling {
        stop: Some(vec![]),
        stop_token_ids: Some(vec![]),
        ..Sampling::default()
    });
    let (_, body) = sent(none).await;
    assert!(body["sampling_params"].get("stop").is_none());
    assert!(body["sampling_params"].get("stop_token_ids").is_none());
}

#[tokio::test]
async fn a_prompt_of_128k_tokens_is_sent_whole() {
    let ids: Vec<u32> = (0..131_072).map(|n| n % 150_000).collect();
    let (_, body) = sent(EngineRequest {
        prompt: Prompt::Tokens(ids.clone().into()),
        ..plain()
    })
    .await;
    assert_eq!(body["token_ids"], json!(ids));
}
