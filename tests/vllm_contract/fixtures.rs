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
    pub headers: Value,
    pub status: u16,
    pub kind: String,
    pub body: Vec<u8>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm")
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
        headers: entry["headers"].clone(),
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

/// "[7] repeated 20000 times", "SAME_AS x.request.json", or a list.
pub fn prompt(value: &Value) -> Vec<u32> {
    match value {
        Value::String(sentence) if sentence.contains(" repeated ") => {
            let words: Vec<&str> = sentence.split(' ').collect();
            let token = words[0].trim_matches(['[', ']']).parse().unwrap();
            vec![token; words[2].parse().unwrap()]
        }
        Value::String(sentence) => {
            let other = sentence.strip_prefix("SAME_AS ").unwrap();
            prompt(&recorded(other.trim_end_matches(".request.json")).request["token_ids"])
        }
        list => serde_json::from_value(list.clone()).unwrap_or_else(|_| vec![1, 2, 3]),
    }
}

impl Recorded {
    /// The id that the request had, as the reply tells it: most were made there.
    fn id(&self) -> EngineRequestId {
        let text = String::from_utf8_lossy(&self.body);
        let told = text
            .split("\"request_id\":\"generate-tokens-")
            .nth(1)
            .and_then(|rest| rest.split('"').next());
        id(told.unwrap_or("unnamed"))
    }

    /// The call that Berth makes where the recorder sent the request.
    pub fn call(&self, url: &str, stream: StreamMode) -> EngineRequest {
        let params = &self.request["sampling_params"];
        let uint = |value: &Value| value.as_u64().map(|n| u32::try_from(n).unwrap());
        let sampling = Sampling {
            temperature: params["temperature"].as_f64().map(|n| n as f32),
            ignore_eos: params["ignore_eos"] == true,
            stop_token_ids: serde_json::from_value(params["stop_token_ids"].clone()).ok(),
            ..Sampling::default()
        };
        EngineRequest {
            url: url.into(),
            id: self.id(),
            rank: self.headers["X-data-parallel-rank"]
                .as_str()
                .and_then(|rank| rank.parse().ok())
                .unwrap_or(0),
            prompt: Prompt::Tokens(prompt(&self.request["token_ids"]).into()),
            max_tokens: uint(&params["max_tokens"]).unwrap_or(4),
            sampling: SamplingRef {
                shared: Arc::new(sampling),
                seed: params["seed"].as_u64(),
                min_tokens: uint(&params["min_tokens"]).unwrap_or(0),
            },
            logprobs: LogprobsWanted {
                output: params["logprobs"].is_u64(),
                // One more is asked for than is wanted.
                top_k: uint(&params["logprobs"]).unwrap_or(0).saturating_sub(1),
                prompt: params["prompt_logprobs"].is_u64(),
                prompt_top_k: uint(&params["prompt_logprobs"]).unwrap_or(0),
            },
            adapter: None,
            priority: None,
            routed_experts: false,
            stream,
            traceparent: None,
        }
    }
}
