//! What idempotency costs a whole server: requests a second of 64 callers with
//! idempotency keys, on a store that syncs, against the same server without keys;
//! and what one caller waits longer, beside the disk's own fdatasync. Ratios
//! within one run; absolute figures differ from machine to machine.
//!
//! Prompts are 1 KiB of packed ids, results 512 tokens with log probabilities;
//! the engine answers at once with bytes made beforehand.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a benchmark that cannot run should say so loudly"
)]

mod support;

use std::{
    fs::File,
    io::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{Json, Router, extract::State, response::IntoResponse, routing::post};
use berth::{
    harness::playground,
    proto::{
        Capabilities, Logprobs, OutputEncoding, SampleRequest, Sampling, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
    server::Server,
};
use tokio::time::Instant;
use tonic::transport::Channel;

const TOKENS: usize = 512;
const PROMPT_IDS: usize = 256;
const CALLERS: usize = 64;
const CHANNELS: usize = 8;
const ROUND: Duration = Duration::from_secs(3);
const ROUNDS: usize = 5;

/// The ids and log probabilities of every answer, as JSON.
struct Answer {
    ids: String,
    logprobs: String,
}

async fn generate(
    State(answer): State<Arc<Answer>>,
    Json(request): Json<serde_json::Value>,
) -> impl IntoResponse {
    let rid = request["rid"].as_str().unwrap_or_default();
    let logprobs = if request["return_logprob"] == true {
        format!(
            r#","input_token_logprobs":[],"output_token_logprobs":{}"#,
            answer.logprobs
        )
    } else {
        String::new()
    };
    let ids = &answer.ids;
    (
        [("content-type", "text/event-stream")],
        format!(
            "data: {{\"output_ids\":{ids},\"meta_info\":{{\"id\":\"{rid}\",\"finish_reason\":\
             {{\"type\":\"length\",\"length\":{TOKENS}}},\"prompt_tokens\":{PROMPT_IDS},\
             \"completion_tokens\":{TOKENS},\"cached_tokens\":0,\"weight_version\":\"1\",\
             \"weight_versions\":[{{\"version\":\"1\",\"start\":0,\"end\":{TOKENS}}}],\
             \"dp_rank\":null{logprobs}}}}}\n\ndata: [DONE]\n\n"
        ),
    )
}

fn engine() -> Router {
    let ids: Vec<usize> = (0..TOKENS).collect();
    let logprobs: Vec<String> = ids
        .iter()
        .map(|id| format!("[-{}.5,{id},null]", id % 7))
        .collect();
    let answer = Arc::new(Answer {
        ids: serde_json::to_string(&ids).unwrap(),
        logprobs: format!("[{}]", logprobs.join(",")),
    });
    Router::new()
        .route("/generate", post(generate))
        .with_state(answer)
}

async fn server(dir: &std::path::Path) -> (Server, Vec<SamplingServiceClient<Channel>>) {
    let config = playground::config(Some(dir.join("store")));
    let capabilities = Capabilities {
        output_logprobs: true,
        incremental_streaming: true,
        ..Capabilities::default()
    };
    support::serve(config, capabilities, engine(), CHANNELS).await
}

fn request(key: Option<u64>) -> SampleRequest {
    let prompt: Vec<u8> = (0..PROMPT_IDS as u32).flat_map(u32::to_le_bytes).collect();
    SampleRequest {
        idempotency_key: key.map(|k| format!("bench-{k}")),
        prompt: Some(Prompt::TokenIdsLe(prompt.into())),
        sampling: Some(Sampling {
            max_tokens: Some(TOKENS as u32),
            ignore_eos: true,
            ..Sampling::default()
        }),
        logprobs: Some(Logprobs {
            output: true,
            ..Logprobs::default()
        }),
        output_encoding: OutputEncoding::Packed.into(),
        ..SampleRequest::default()
    }
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

async fn call(client: &mut SamplingServiceClient<Channel>, keyed: bool) {
    let key = keyed.then(|| NEXT_KEY.fetch_add(1, Ordering::Relaxed));
    let response = client.sample(request(key)).await.unwrap().into_inner();
    assert_eq!(response.samples[0].token_ids_le.len(), TOKENS * 4);
    assert!(!response.replayed && !response.not_stored);
}

/// Requests a second of all callers.
async fn round(clients: &[SamplingServiceClient<Channel>], keyed: bool) -> f64 {
    let end = Instant::now() + ROUND;
    let callers: Vec<_> = (0..CALLERS)
        .map(|i| {
            let mut client = clients[i % CHANNELS].clone();
            tokio::spawn(async move {
                let mut count = 0u64;
                while Instant::now() < end {
                    call(&mut client, keyed).await;
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut total = 0;
    for caller in callers {
        total += caller.await.unwrap();
    }
    total as f64 / ROUND.as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Milliseconds of one caller's request.
async fn latency(client: &mut SamplingServiceClient<Channel>, keyed: bool) -> f64 {
    let mut times = Vec::new();
    for _ in 0..400 {
        let begun = Instant::now();
        call(client, keyed).await;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    median(times)
}

fn fdatasync(dir: &std::path::Path) -> f64 {
    let mut file = File::create(dir.join("probe")).unwrap();
    let mut times = Vec::new();
    for _ in 0..400 {
        file.write_all(&[7; 4096]).unwrap();
        let begun = Instant::now();
        file.sync_data().unwrap();
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    median(times)
}

fn main() {
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(run());
}

async fn run() {
    // Beside the build, not in a memory file system: a sync must cost something.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (server, clients) = server(dir.path()).await;
    round(&clients, true).await;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        without.push(round(&clients, false).await);
        with.push(round(&clients, true).await);
    }
    let ratios: Vec<f64> = with.iter().zip(&without).map(|(w, o)| w / o).collect();
    println!(
        "{CALLERS} callers, requests/s: {:.0} with keys, {:.0} without; ratio {:.2} (of rounds: {})",
        median(with),
        median(without),
        median(ratios.clone()),
        ratios
            .iter()
            .map(|r| format!("{r:.2}"))
            .collect::<Vec<_>>()
            .join(" ")
    );
    let mut one = clients[0].clone();
    let (off, on) = (
        latency(&mut one, false).await,
        latency(&mut one, true).await,
    );
    let sync = fdatasync(dir.path());
    println!(
        "1 caller, p50: {on:.2} ms with a key, {off:.2} ms without: {:.2} ms more; fdatasync p50 \
         {sync:.2} ms, so the bound of twice that and 1 ms is {:.2} ms",
        on - off,
        2.0 * sync + 1.0
    );
    server.stop().await.unwrap();
}
