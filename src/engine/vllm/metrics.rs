//! What `/metrics` says of each engine behind a vLLM server, in Prometheus' text
//! format. Only the few series that are used are looked at; lines of another form
//! are skipped, so that a new metric breaks nothing. The work is linear in the
//! text and what is kept is bounded by the number of engines.

use std::collections::BTreeMap;

use super::facts::{FactsError, MAX_RANKS};
use crate::engine::facts::wrong;

const PATH: &str = "/metrics";

/// What one scrape says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// By the label `engine`.
    pub engines: BTreeMap<u32, EngineMetrics>,
    /// When the server's process began, in seconds since 1970; servers of several
    /// processes do not tell.
    pub process_start: Option<f64>,
}

/// What it says of one engine, which is one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// Requests.
    pub running: u32,
    /// Requests.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Its weights are not in memory: new requests would hang.
    pub asleep: bool,
    /// Of its cache, where it tells.
    pub cache: Option<Cache>,
}

/// The KV cache of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Tokens of a block.
    pub block_size: u32,
    /// Tokens of this engine.
    pub tokens: Option<u64>,
    /// Blocks of all engines of the server together.
    pub blocks: Option<u64>,
    /// Prefixes are kept and found again.
    pub prefix_caching: bool,
}

/// Reads a scrape.
///
/// # Errors
/// Text that is none, or engines beyond the limit.
pub fn parse(body: &[u8]) -> Result<Metrics, FactsError> {
    let text = std::str::from_utf8(body).map_err(|_| wrong(PATH, "not text"))?;
    let mut metrics = Metrics::default();
    for line in text.lines() {
        if line.starts_with('#') {
            continue;
        }
        let Some(series) = Series::of(line) else {
            continue;
        };
        if series.name == "process_start_time_seconds" {
            metrics.process_start = Some(series.value);
            continue;
        }
        let known = matches!(
            series.name,
            "vllm:num_requests_running"
                | "vllm:num_requests_waiting"
                | "vllm:kv_cache_usage_perc"
                | "vllm:engine_sleep_state"
                | "vllm:cache_config_info"
        );
        if !known {
            continue;
        }
        let Some(engine) = series.label("engine").and_then(|e| e.parse::<u32>().ok()) else {
            continue;
        };
        if !metrics.engines.contains_key(&engine) && metrics.engines.len() >= MAX_RANKS {
            return Err(wrong(PATH, format!("more than {MAX_RANKS} engines")));
        }
        let of_engine = metrics.engines.entry(engine).or_default();
        match series.name {
            "vllm:num_requests_running" => of_engine.running = count(series.value),
            "vllm:num_requests_waiting" => of_engine.waiting = count(series.value),
            "vllm:kv_cache_usage_perc" => {
                of_engine.kv_usage = if series.value.is_finite() {
                    series.value.clamp(0.0, 1.0)
                } else {
                    0.0
                };
            }
            "vllm:engine_sleep_state" if series.label("sleep_state") == Some("awake") => {
                of_engine.asleep = series.value < 0.5;
            }
            "vllm:cache_config_info" => of_engine.cache = cache(&series),
            _ => {}
        }
    }
    Ok(metrics)
}

fn cache(series: &Series<'_>) -> Option<Cache> {
    let number = |name| series.label(name).and_then(|n| n.parse::<u64>().ok());
    Some(Cache {
        block_size: number("block_size")
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n > 0)?,
        tokens: number("kv_cache_size_tokens").filter(|n| *n > 0),
        blocks: number("num_gpu_blocks").filter(|n| *n > 0),
        prefix_caching: series.label("enable_prefix_caching") != Some("False"),
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "clamped to the range; what is no number becomes 0"
)]
fn count(value: f64) -> u32 {
    value.clamp(0.0, f64::from(u32::MAX)) as u32
}

/// `name{label="value",...} value`.
struct Series<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Series<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let line = line.trim();
        let (name, labels, rest) = match line.find('{') {
            Some(open) => {
                let (name, rest) = line.split_at(open);
                let close = closing(&rest[1..])?;
                (name, &rest[1..=close], &rest[close + 2..])
            }
            None => {
                let (name, rest) = line.split_once(' ')?;
                (name, "", rest)
            }
        };
        // A time stamp may follow.
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self {
            name,
            labels,
            value,
        })
    }

    /// The value of a label. Values with an escape in them are none of ours.
    fn label(&self, wanted: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once("=\"")?;
            let end = quoted(after)?;
            if name.trim_start_matches(',').trim() == wanted {
                return Some(&after[..end]);
            }
            rest = &after[end + 1..];
        }
    }
}

/// Where the brace closes that stands outside every quoted value.
fn closing(labels: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        let next = labels.get(at..)?.find(['"', '}'])? + at;
        if labels.as_bytes()[next] == b'}' {
            return Some(next);
        }
        at = next + 1 + quoted(&labels[next + 1..])? + 1;
    }
}

/// Where the quotation mark stands that ends a value.
fn quoted(value: &str) -> Option<usize> {
    let mut escaped = false;
    value.bytes().position(|b| match b {
        _ if escaped => {
            escaped = false;
            false
        }
        b'\\' => {
            escaped = true;
            false
        }
        b => b == b'"',
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_recorded_servers() {
        let one = parse(include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/vllm/metrics.response.txt"
        )))
        .unwrap();
        assert_eq!(one.engines.len(), 1);
        assert_eq!(
            one.engines[&0].cache,
            Some(Cache {
                block_size: 128,
                tokens: Some(262_144),
                blocks: Some(2048),
                prefix_caching: true,
            })
        );
        assert!(!one.engines[&0].asleep);
        let two = parse(include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/vllm/dp_metrics.response.txt"
        )))
        .unwrap();
        assert_eq!(two.engines.keys().collect::<Vec<_>>(), [&0, &1]);
        // The blocks of both engines, the tokens of one.
        let cache = two.engines[&1].cache.unwrap();
        assert_eq!((cache.blocks, cache.tokens), (Some(4096), Some(262_144)));
    }

    #[test]
    fn values_and_labels_in_every_spelling() {
        let metrics = parse(
            b"# HELP x y\n\
              vllm:num_requests_running{model_name=\"a\\\"}b\",engine=\"3\"} 7.0 1700000000\n\
              vllm:num_requests_waiting{engine=\"3\",model_name=\"m\",} 2\n\
              vllm:kv_cache_usage_perc{engine=\"3\"} 1.5e-1\n\
              vllm:engine_sleep_state{engine=\"3\",sleep_state=\"awake\"} 0\n\
              vllm:engine_sleep_state{engine=\"3\",sleep_state=\"discard_all\"} 1\n\
              process_start_time_seconds 1.7e9\n",
        )
        .unwrap();
        let engine = &metrics.engines[&3];
        assert_eq!((engine.running, engine.waiting), (7, 2));
        assert!((engine.kv_usage - 0.15).abs() < 1e-9 && engine.asleep);
        assert_eq!(metrics.process_start, Some(1.7e9));
    }

    #[test]
    fn nonsense_is_skipped_and_numbers_are_bounded() {
        let metrics = parse(
            b"vllm:num_requests_running{engine=\"0\"} NaN\n\
              vllm:num_requests_waiting{engine=\"0\"} -5\n\
              vllm:kv_cache_usage_perc{engine=\"0\"} +Inf\n\
              vllm:num_requests_running{engine=\"x\"} 1\n\
              vllm:num_requests_running{engine=\"1} 1\n\
              vllm:num_requests_running 1\n\
              {\n}\n\"\n",
        )
        .unwrap();
        assert_eq!(metrics.engines.len(), 1);
        assert_eq!(metrics.engines[&0], EngineMetrics::default());
        let many: String = (0..2000)
            .map(|n| format!("vllm:num_requests_running{{engine=\"{n}\"}} 1\n"))
            .collect();
        assert!(parse(many.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(vllm:num_requests_running)?[ -~\n]{0,60}") {
            let _ = parse(text.as_bytes());
        }
    }
}
