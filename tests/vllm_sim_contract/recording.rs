//! Recorded exchanges, and what it means that an answer is like one.
//!
//! Alike are: status, content type, the keys of every object, the type of every
//! value, the length of every list, the number of frames, and every value but the
//! ones listed in [`FREE`].

use serde_json::{Map, Value};

use crate::support::{Got, call};

/// Values that the simulated engine cannot share with a real one: only their
/// types are compared.
const FREE: &[&str] = &[
    "created", "logprob", "rank", "token_id", // Of the model's card.
    "root",
];

/// One recorded exchange.
pub struct Recording {
    pub name: &'static str,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    status: Option<u16>,
    content_type: Option<String>,
    pub request: Value,
    raw_request: String,
    pub response: String,
}

fn folder() -> std::path::PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/fixtures/vllm"]
        .iter()
        .collect()
}

fn index() -> Map<String, Value> {
    let text = std::fs::read_to_string(folder().join("index.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The names of all recordings.
pub fn names() -> Vec<String> {
    index().keys().cloned().collect()
}

fn request(name: &str) -> String {
    std::fs::read_to_string(folder().join(format!("{name}.request.json"))).unwrap_or_default()
}

impl Recording {
    pub fn load(name: &'static str) -> Self {
        let entry = index().remove(name).expect(name);
        let text = |key: &str| entry[key].as_str().map(str::to_owned);
        let raw_request = request(name);
        let mut request: Value = serde_json::from_str(&raw_request).unwrap_or(Value::Null);
        if let Some(sentence) = request["token_ids"].as_str().map(str::to_owned) {
            request["token_ids"] = match sentence.strip_prefix("[7] repeated ") {
                Some(times) => {
                    let times: usize = times.trim_end_matches(" times").parse().unwrap();
                    vec![7; times].into()
                }
                None => {
                    let other = sentence.strip_prefix("SAME_AS ").unwrap();
                    let other = self::request(other.trim_end_matches(".request.json"));
                    serde_json::from_str::<Value>(&other).unwrap()["token_ids"].clone()
                }
            };
        }
        Self {
            name,
            method: text("method").unwrap(),
            path: text("path").unwrap(),
            headers: entry["headers"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(k, v)| (k.clone(), v.as_str().unwrap().to_owned()))
                .collect(),
            status: entry["status"].as_u64().map(|s| s as u16),
            content_type: text("type"),
            request,
            raw_request,
            response: text("body")
                .map(|file| std::fs::read_to_string(folder().join(file)).unwrap())
                .unwrap_or_default(),
        }
    }

    /// The first weight version that its reply names.
    pub fn weight_version(&self) -> Option<String> {
        let rest = self.response.split("[{\"version\":\"").nth(1)?;
        Some(rest.split('"').next().unwrap().to_owned())
    }

    /// Sends it as it was sent then.
    pub async fn send(&self, url: &str) -> Result<Got, String> {
        let body = if self.request.is_null() {
            self.raw_request.clone()
        } else {
            self.request.to_string()
        };
        let url = format!("{url}{}", self.path);
        call(&self.method, &url, &self.headers, &body).await
    }

    /// Fails unless `got` is like the recorded answer; of the values of `free` only
    /// the types count.
    pub fn assert_like(&self, got: &Got, free: &[&str]) {
        assert_eq!(Some(got.status), self.status, "{}: {}", self.name, got.body);
        assert_eq!(got.content_type, self.content_type, "{}", self.name);
        let compare = Compare {
            free,
            subset: self.name == "server_info",
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
                // Counted from the end: a recording may hold the last ones only.
                for at in 2..=recorded.len().min(frames.len()) {
                    let (a, b) = (&recorded[recorded.len() - at], &frames[frames.len() - at]);
                    compare.assert(
                        &format!("{} frame -{at}", self.name),
                        &serde_json::from_str(a).unwrap(),
                        &serde_json::from_str(b).unwrap(),
                    );
                }
            }
            _ => assert_eq!(got.body, self.response, "{}", self.name),
        }
    }
}

/// The data of every frame.
fn frames(body: &str) -> Vec<String> {
    body.split("\n\n")
        .filter(|frame| !frame.trim().is_empty())
        .map(|frame| frame.trim().strip_prefix("data: ").unwrap().to_owned())
        .collect()
}

struct Compare<'a> {
    free: &'a [&'a str],
    /// Keys of the recording that may be missing, and others that may be there.
    subset: bool,
}

impl Compare<'_> {
    fn assert(&self, what: &str, recorded: &Value, ours: &Value) {
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
            (Value::String(a), Value::String(b)) if key == "request_id" => {
                let made = |id: &str| {
                    id.strip_prefix("generate-tokens-").is_some_and(|id| {
                        id.len() == 16 && id.bytes().all(|b| b.is_ascii_hexdigit())
                    })
                };
                if a != b && !(made(a) && made(b)) {
                    faults.push(format!("{at}: {b}, recorded {a}"));
                }
            }
            (Value::String(a), Value::String(b)) if a.starts_with("modelperm-") => {
                if !b.starts_with("modelperm-") {
                    faults.push(format!("{at}: {b}"));
                }
            }
            (Value::Array(a), Value::Array(b)) => {
                if a.len() != b.len() {
                    faults.push(format!("{at}: {} entries, not {}", b.len(), a.len()));
                }
                if key == "token_ids" {
                    if !b.iter().all(Value::is_u64) {
                        faults.push(format!("{at}: not ids"));
                    }
                } else if key == "prompt_logprobs" {
                    for (i, (a, b)) in a.iter().zip(b).enumerate() {
                        prompt_position(&format!("{at}.{i}"), a, b, faults);
                    }
                } else {
                    for (i, (a, b)) in a.iter().zip(b).enumerate() {
                        self.value(&format!("{at}.{i}"), a, b, faults);
                    }
                }
            }
            (Value::Object(a), Value::Object(b)) => {
                for (key, value) in a {
                    let path = format!("{at}.{key}");
                    match b.get(key) {
                        Some(ours) => self.value(&path, value, ours, faults),
                        None if self.subset => {}
                        None => faults.push(format!("{path}: missing")),
                    }
                }
                for key in b.keys() {
                    if !a.contains_key(key) && !self.subset {
                        faults.push(format!("{at}.{key}: not recorded"));
                    }
                }
            }
            _ if recorded == ours => {}
            _ => faults.push(format!("{at}: {ours}, recorded {recorded}")),
        }
    }
}

/// By token id: the prompt's own, which the recorded one lists first, and as many
/// alternatives.
fn prompt_position(at: &str, recorded: &Value, ours: &Value, faults: &mut Vec<String>) {
    let alike = match (recorded, ours) {
        (Value::Object(a), Value::Object(b)) => {
            let entry = |v: &Value| {
                v["logprob"].is_f64() && v["rank"].is_u64() && v["decoded_token"].is_null()
            };
            a.len() == b.len() && b.values().all(entry) && a.keys().any(|id| b.contains_key(id))
        }
        (a, b) => a.is_null() && b.is_null(),
    };
    if !alike {
        faults.push(format!("{at}: {ours}, recorded {recorded}"));
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
