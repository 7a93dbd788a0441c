//! Recorded exchanges, and what it means that an answer is like one.
//!
//! Alike are: status, content type, the keys of every object, the type of every
//! value, the length of every list, the number of frames, and every value but
//! the ones listed in [`FREE`] (times, generated ids, log probabilities).

use serde_json::{Map, Value};

use crate::support::{Got, call};

/// Values that the simulated engine cannot share with a real one: only their
/// types are compared.
const FREE: &[&str] = &[
    "e2e_latency",
    "response_sent_to_client_ts",
    "timestamp",
    "created",
    // Another model on another device.
    "weight_gb",
    "kv_cache_gb",
    "total_prefill_busy_us",
    "gen_throughput",
];

/// Keys that come with `--enable-metrics` only, which two of the recorded
/// servers had and the simulated engine has not.
const METRICS: &[&str] = &[
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
];

/// One recorded exchange.
pub struct Recording {
    pub name: &'static str,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    pub status: Option<u16>,
    content_type: Option<String>,
    pub request: Value,
    raw_request: Option<String>,
    pub response: String,
    metrics: bool,
}

fn folder() -> std::path::PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures/sglang-sim"]
        .iter()
        .collect()
}

/// The names of all recordings here.
pub fn names() -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder())
        .unwrap()
        .filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(".json").map(str::to_owned)
        })
        .collect();
    names.sort();
    names
}

impl Recording {
    pub fn load(name: &'static str) -> Self {
        let read = |name: &str| -> Value {
            let text = std::fs::read_to_string(folder().join(format!("{name}.json")));
            serde_json::from_str(&text.unwrap_or_else(|e| panic!("{name}: {e}"))).unwrap()
        };
        let all = read(name);
        let text = |key: &str| all[key].as_str().map(str::to_owned);
        let mut request = all["request"].clone();
        // Long prompts are written as a sentence.
        if let Some(ids) = request["input_ids"].as_str().map(str::to_owned) {
            if let Some(times) = ids.strip_prefix("[7] repeated ") {
                let times: usize = times.trim_end_matches(" times").parse().unwrap();
                request["input_ids"] = vec![7; times].into();
            } else if let Some(other) = ids.strip_prefix("SAME_AS ") {
                let other = other.trim_end_matches(".request.json");
                request["input_ids"] = read(other)["request"]["input_ids"].clone();
            }
        }
        let response = text("response").unwrap_or_default();
        Self {
            name,
            method: text("method").unwrap(),
            path: text("path").unwrap(),
            headers: all["request_headers"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned()))
                .collect(),
            status: all["status"].as_u64().map(|s| s as u16),
            content_type: text("content_type"),
            request,
            raw_request: text("request_raw"),
            metrics: response.contains("storage_prefetch_wait"),
            response,
        }
    }

    /// The weight version that its reply names.
    pub fn weight_version(&self) -> Option<String> {
        let rest = self.response.split("\"weight_version\":\"").nth(1)?;
        Some(rest.split('"').next().unwrap().to_owned())
    }

    /// Sends it as it was sent then.
    pub async fn send(&self, url: &str) -> Result<Got, String> {
        let body = match &self.raw_request {
            Some(raw) => raw.clone(),
            None if self.request.is_null() => String::new(),
            None => self.request.to_string(),
        };
        let url = format!("{url}{}", self.path);
        call(&self.method, &url, &self.headers, &body).await
    }

    /// Fails unless `got` is like the recorded answer.
    pub fn assert_like(&self, got: &Got) {
        self.assert_like_but(got, &[]);
    }

    /// The same with further values whose types alone count.
    pub fn assert_like_but(&self, got: &Got, free: &[&str]) {
        assert_eq!(Some(got.status), self.status, "{}: {}", self.name, got.body);
        assert_eq!(got.content_type, self.content_type, "{}", self.name);
        let compare = Compare {
            free,
            metrics: self.metrics,
            ..Compare::default()
        };
        match self.content_type.as_deref() {
            Some("application/json") => {
                let recorded: Value = serde_json::from_str(&self.response).unwrap();
                compare.assert(self.name, &recorded, &got.json());
            }
            Some(kind) if kind.starts_with("text/event-stream") => {
                let (recorded, frames) = (frames(&self.response), frames(&got.body));
                assert_eq!(frames.last().unwrap(), "[DONE]", "{}", self.name);
                if !free.contains(&"frames") {
                    assert_eq!(frames.len(), recorded.len(), "{}: {}", self.name, got.body);
                }
                let last = recorded.len().min(frames.len());
                // Counted from the end: a recording may hold the last ones only.
                for at in 1..=last {
                    let (a, b) = (&recorded[recorded.len() - at], &frames[frames.len() - at]);
                    if a == "[DONE]" {
                        assert_eq!(b, "[DONE]");
                        continue;
                    }
                    let (a, b) = (
                        serde_json::from_str(a).unwrap(),
                        serde_json::from_str(b).unwrap(),
                    );
                    compare.assert(&format!("{} frame -{at}", self.name), &a, &b);
                }
            }
            _ => assert_eq!(got.body, self.response, "{}", self.name),
        }
    }
}

/// The data of every frame.
pub fn frames(body: &str) -> Vec<String> {
    body.split("\n\n")
        .filter(|frame| !frame.trim().is_empty())
        .map(|frame| frame.trim().strip_prefix("data: ").unwrap().to_owned())
        .collect()
}

/// What a simulated engine says of itself that the recorded one could not: seeds
/// do repeat its sampling, its vocabulary stands in no file, and each start has a
/// time of its own.
const OWN: [&str; 3] = [
    "enable_deterministic_inference",
    "vocab_size",
    "startup_time",
];

#[derive(Default)]
pub struct Compare<'a> {
    pub free: &'a [&'a str],
    pub metrics: bool,
    /// Keys of the recording that may be missing.
    pub subset: bool,
}

impl Compare<'_> {
    pub fn assert(&self, what: &str, recorded: &Value, ours: &Value) {
        let mut faults = Vec::new();
        self.value("", recorded, ours, &mut faults);
        assert!(
            faults.is_empty(),
            "{what}:\n{}\nrecorded {recorded}\nours     {ours}",
            faults.join("\n")
        );
    }

    fn value(&self, at: &str, recorded: &Value, ours: &Value, faults: &mut Vec<String>) {
        let key = at.rsplit('.').next().unwrap();
        if self.free.contains(&key) || FREE.contains(&key) {
            if kind(recorded) != kind(ours) {
                faults.push(format!("{at}: {} is not {}", kind(ours), kind(recorded)));
            }
            return;
        }
        match (recorded, ours) {
            (Value::String(a), Value::String(b)) if key == "id" && is_uuid(a) => {
                if !is_uuid(b) {
                    faults.push(format!("{at}: {b} is not made anew"));
                }
            }
            (Value::Array(a), Value::Array(b)) => {
                if a.len() != b.len() {
                    faults.push(format!("{at}: {} entries, not {}", b.len(), a.len()));
                }
                if key == "output_ids" {
                    if !b.iter().all(Value::is_u64) {
                        faults.push(format!("{at}: not ids"));
                    }
                } else if key.ends_with("logprobs") {
                    logprobs(at, a, b, faults);
                } else {
                    for (i, (a, b)) in a.iter().zip(b).enumerate() {
                        self.value(&format!("{at}.{i}"), a, b, faults);
                    }
                }
            }
            (Value::Object(a), Value::Object(b)) => self.object(at, a, b, faults),
            _ if recorded == ours => {}
            _ => faults.push(format!("{at}: {ours}, recorded {recorded}")),
        }
    }

    fn object(
        &self,
        at: &str,
        recorded: &Map<String, Value>,
        ours: &Map<String, Value>,
        faults: &mut Vec<String>,
    ) {
        for (key, value) in recorded {
            if OWN.contains(&key.as_str()) {
                continue;
            }
            let path = format!("{at}.{key}");
            match ours.get(key) {
                Some(ours) => self.value(&path, value, ours, faults),
                None if self.metrics && METRICS.contains(&key.as_str()) => {}
                // With metrics every last frame says again when the first left.
                None if self.metrics && key == "response_sent_to_client_ts" => {}
                None if self.subset => {}
                None => faults.push(format!("{path}: missing")),
            }
        }
        for key in ours.keys() {
            if !recorded.contains_key(key) && !OWN.contains(&key.as_str()) {
                faults.push(format!("{at}.{key}: not recorded"));
            }
        }
    }
}

/// Entries `[logprob, id, null]` or lists of such, `null` where there is none.
fn logprobs(at: &str, recorded: &[Value], ours: &[Value], faults: &mut Vec<String>) {
    for (i, (a, b)) in recorded.iter().zip(ours).enumerate() {
        let alike = match (a, b) {
            (Value::Array(a), Value::Array(b)) if a.len() == 3 && a[2].is_null() => {
                let prompt = at.contains("input_token");
                kind(&a[0]) == kind(&b[0])
                    && b[1].is_u64()
                    && (!prompt || a[1] == b[1])
                    && b[2].is_null()
                    && b[0].as_f64().is_none_or(|l| l <= 0.0)
            }
            (Value::Array(a), Value::Array(b)) => {
                logprobs(&format!("{at}.{i}"), a, b, faults);
                a.len() == b.len()
            }
            _ => a.is_null() && b.is_null(),
        };
        if !alike {
            faults.push(format!("{at}.{i}: {b}, recorded {a}"));
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit())
}
