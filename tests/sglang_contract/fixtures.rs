//! The recorded exchanges, and the calls that would have made them.

use std::{fs, path::PathBuf, sync::Arc};

use berth::{
    call::{LogprobsWanted, Prompt, Sampling},
    engine::{EngineRequest, SamplingRef, StreamMode},
    ids::EngineRequestId,
};
use serde_json::Value;

pub struct Recorded {
    pub request: Value,
    pub status: u16,
    pub kind: String,
    pub body: Vec<u8>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sglang")
}

pub fn recorded(name: &str) -> Recorded {
    let index: Value =
        serde_json::from_slice(&fs::read(folder().join("index.json")).unwrap()).unwrap();
    let entry = &index[name];
    assert!(entry.is_object(), "no recording {name}");
    Recorded {
        request: fs::read(folder().join(format!("{name}.request.json")))
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or(Value::Null),
        status: u16::try_from(entry["status"].as_u64().unwrap()).unwrap(),
        kind: entry["type"].as_str().unwrap_or("application/json").into(),
        body: entry["body"]
            .as_str()
            .map(|file| fs::read(folder().join(file)).unwrap())
            .unwrap_or_default(),
    }
}

pub fn id(name: &str) -> EngineRequestId {
    serde_json::from_value(Value::from(name)).unwrap()
}

/// "[7] repeated 40000 times", or a list.
pub fn prompt(value: &Value) -> Vec<u32> {
    match value {
        Value::String(sentence) if sentence.contains(" repeated ") => {
            let words: Vec<&str> = sentence.split(' ').collect();
            let token = words[0].trim_matches(['[', ']']).parse().unwrap();
            vec![token; words[2].parse().unwrap()]
        }
        list => serde_json::from_value(list.clone()).unwrap_or_else(|_| vec![1, 2, 3]),
    }
}

fn number(value: &Value) -> Option<f32> {
    #[expect(clippy::cast_possible_truncation, reason = "sampling parameters")]
    value.as_f64().map(|n| n as f32)
}

fn uint(value: &Value) -> Option<u32> {
    value.as_u64().map(|n| u32::try_from(n).unwrap())
}

/// The call that Berth makes where the recorder sent `request`.
pub fn call(request: &Value, url: &str, stream: StreamMode) -> EngineRequest {
    let params = &request["sampling_params"];
    let logprobs = request["return_logprob"] == true;
    let of_prompt = logprobs && request["logprob_start_len"] == 0;
    let top = uint(&request["top_logprobs_num"]).unwrap_or(0);
    let sampling = Sampling {
        temperature: number(&params["temperature"]),
        top_p: number(&params["top_p"]),
        top_k: uint(&params["top_k"]),
        ignore_eos: params["ignore_eos"] == true,
        stop: serde_json::from_value(params["stop"].clone()).ok(),
        stop_token_ids: serde_json::from_value(params["stop_token_ids"].clone()).ok(),
        ..Sampling::default()
    };
    EngineRequest {
        url: url.into(),
        id: id(request["rid"].as_str().unwrap_or("unnamed")),
        rank: uint(&request["routed_dp_rank"]).unwrap_or(0),
        prompt: match request["text"].as_str() {
            Some(text) => Prompt::Text(text.into()),
            None => Prompt::Tokens(prompt(&request["input_ids"]).into()),
        },
        max_tokens: uint(&params["max_new_tokens"]).unwrap_or(128),
        sampling: SamplingRef {
            shared: Arc::new(sampling),
            seed: params["sampling_seed"].as_u64(),
            min_tokens: uint(&params["min_new_tokens"]).unwrap_or(0),
        },
        logprobs: LogprobsWanted {
            output: logprobs,
            top_k: top,
            prompt: of_prompt,
            prompt_top_k: if of_prompt { top } else { 0 },
        },
        adapter: request["lora_path"].as_str().map(Into::into),
        priority: request["priority"]
            .as_i64()
            .map(|n| i32::try_from(n).unwrap()),
        routed_experts: request["return_routed_experts"] == true,
        stream,
        traceparent: None,
    }
}
