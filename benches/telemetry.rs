//! What telemetry costs a whole server at its defaults: requests a second with
//! metrics and a log line for each request, against the same server without
//! either, in ten alternating rounds of one run. Absolute figures differ from
//! machine to machine; the ratio is what counts.
//!
//! Requests are small, so that what is the same for each weighs most: prompts of
//! 1 KiB of packed ids, 32 tokens back, an affinity key, no store on the way. The
//! engine answers at once with bytes made beforehand. Lines are written to
//! `/dev/null`.
//!
//! On a machine that others use the ratio of rounds is rough. With `--count ARM N`
//! (arms: 0 nothing, 1 metrics, 2 metrics and lines, 3 with lines as JSON) the program makes N requests,
//! one after the other, on one thread, and ends: under `valgrind --tool=callgrind`
//! the difference of two such runs counts instructions, the same every time.
//! They are those of client, engine and server together, without the kernel's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a benchmark that cannot run should say so loudly"
)]

mod support;

use std::{fs::File, sync::Arc, time::Duration};

use axum::{Json, Router, response::IntoResponse, routing::post};
use berth::{
    config::LogFormat,
    harness::playground,
    proto::{
        Capabilities, OutputEncoding, SampleRequest, Sampling, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
    server::Server,
    telemetry::logs,
};
use tokio::time::Instant;
use tonic::transport::Channel;
use tracing_subscriber::{
    EnvFilter, Layer, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

const TOKENS: usize = 32;
const PROMPT_IDS: u32 = 256;
const CALLERS: usize = 64;
const CHANNELS: usize = 8;
const ROUND: Duration = Duration::from_secs(2);
const ROUNDS: usize = 10;

async fn generate(Json(request): Json<serde_json::Value>) -> impl IntoResponse {
    let rid = request["rid"].as_str().unwrap_or_default();
    let ids: Vec<usize> = (0..TOKENS).collect();
    (
        [("content-type", "text/event-stream")],
        format!(
            "data: {{\"output_ids\":{ids:?},\"meta_info\":{{\"id\":\"{rid}\",\"finish_reason\":\
             {{\"type\":\"length\",\"length\":{TOKENS}}},\"prompt_tokens\":{PROMPT_IDS},\
             \"completion_tokens\":{TOKENS},\"cached_tokens\":0,\"weight_version\":\"1\",\
             \"weight_versions\":[{{\"version\":\"1\",\"start\":0,\"end\":{TOKENS}}}],\
             \"dp_rank\":null}}}}\n\ndata: [DONE]\n\n"
        ),
    )
}

async fn engine() -> String {
    support::engine(Router::new().route("/generate", post(generate))).await
}

async fn server(measured: bool) -> (Server, Vec<SamplingServiceClient<Channel>>) {
    let mut config = playground::config(None);
    config.measured = measured;
    let capabilities = Capabilities {
        incremental_streaming: true,
        ..Capabilities::default()
    };
    let engines = [
        engine().await,
        engine().await,
        engine().await,
        engine().await,
    ];
    support::serve(config, capabilities, engines, CHANNELS).await
}

/// What a round came to.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Requests a second.
    by_clock: f64,
    /// Requests a second of this process's CPU time: what others do on the machine
    /// changes it less.
    by_cpu: f64,
}

/// CPU time of this process so far.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Behind the name, which may hold anything: fields 14 and 15, in hundredths.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split(' ').collect();
    let ticks = |field: usize| fields[field].parse::<u64>().unwrap();
    Duration::from_millis((ticks(12) + ticks(13)) * 10)
}

/// A round of all callers.
async fn round(clients: &[SamplingServiceClient<Channel>]) -> Pace {
    let (begun, cpu_before) = (Instant::now(), cpu());
    let callers: Vec<_> = (0..CALLERS)
        .map(|i| {
            let mut client = clients[i % CHANNELS].clone();
            let request = request(i);
            tokio::spawn(async move {
                let mut count = 0u64;
                while begun.elapsed() < ROUND {
                    let response = client.sample(request.clone()).await.unwrap().into_inner();
                    assert_eq!(response.samples[0].token_ids_le.len(), TOKENS * 4);
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
    Pace {
        by_clock: total as f64 / begun.elapsed().as_secs_f64(),
        by_cpu: total as f64 / (cpu() - cpu_before).as_secs_f64(),
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let upper = values[values.len() / 2];
    let lower = values[(values.len() - 1) / 2];
    f64::midpoint(lower, upper)
}

fn report(what: &str, with: &[Pace], without: &[Pace]) {
    for (measure, of) in [
        ("a second", (|pace| pace.by_clock) as fn(&Pace) -> f64),
        ("a second of CPU time", |pace| pace.by_cpu),
    ] {
        let (with, without): (Vec<f64>, Vec<f64>) = (
            with.iter().map(of).collect(),
            without.iter().map(of).collect(),
        );
        let ratios: Vec<f64> = with.iter().zip(&without).map(|(w, o)| w / o).collect();
        let shown: Vec<String> = ratios.iter().map(|r| format!("{r:.3}")).collect();
        println!(
            "{what}: {:.0} requests {measure}, {:.0} without; ratio {:.3} (of rounds: {})",
            median(&with),
            median(&without),
            median(&ratios),
            shown.join(" ")
        );
    }
}

fn main() {
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|a| a == "--count") {
        let number = |i: usize| arguments[at + i].parse::<usize>().unwrap();
        return tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(count(number(1), number(2)));
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(run());
}

/// This many requests in this arm, for who counts instructions.
async fn count(arm: usize, requests: usize) {
    let form = if arm == 3 {
        LogFormat::Json
    } else {
        LogFormat::Human
    };
    let handle = lines(form);
    let level = if arm > 1 { "info" } else { "off" };
    handle.reload(filter(level)).unwrap();
    let (server, clients) = server(arm > 0).await;
    let mut client = clients[0].clone();
    for _ in 0..requests {
        client.sample(request(0)).await.unwrap();
    }
    server.stop().await.unwrap();
}

fn filter(text: &str) -> EnvFilter {
    EnvFilter::try_new(text).unwrap()
}

type Handle = reload::Handle<EnvFilter, tracing_subscriber::Registry>;

/// Lines to nowhere, off until told otherwise.
fn lines(form: LogFormat) -> Handle {
    let (reloaded, handle) = reload::Layer::new(filter("off"));
    let nowhere = Arc::new(File::create("/dev/null").unwrap());
    let lines = logs::lines(form, nowhere).with_filter(reloaded);
    tracing_subscriber::registry().with(lines).init();
    handle
}

fn request(caller: usize) -> SampleRequest {
    let prompt: Vec<u8> = (0..PROMPT_IDS).flat_map(u32::to_le_bytes).collect();
    SampleRequest {
        cache_affinity_key: Some(format!("trajectory-{caller}")),
        prompt: Some(Prompt::TokenIdsLe(prompt.into())),
        sampling: Some(Sampling {
            max_tokens: Some(TOKENS as u32),
            ignore_eos: true,
            ..Sampling::default()
        }),
        output_encoding: OutputEncoding::Packed.into(),
        ..SampleRequest::default()
    }
}

async fn run() {
    let handle = lines(LogFormat::Human);
    let (plain, plain_clients) = server(false).await;
    let (watched, watched_clients) = server(true).await;
    round(&plain_clients).await;
    round(&watched_clients).await;
    let mut paces: [Vec<Pace>; 3] = Default::default();
    for i in 0..ROUNDS {
        // Whoever goes first is last in the next round.
        let mut order = [0, 1, 2];
        if i % 2 == 1 {
            order.reverse();
        }
        for arm in order {
            let lines = if arm == 2 { "info" } else { "off" };
            handle.reload(filter(lines)).unwrap();
            let clients = if arm == 0 {
                &plain_clients
            } else {
                &watched_clients
            };
            paces[arm].push(round(clients).await);
        }
    }
    let [without, metrics, with] = paces;
    println!("{CALLERS} callers, {ROUNDS} rounds; ratios are medians over the rounds:");
    report("metrics alone", &metrics, &without);
    report("metrics and a line each", &with, &without);
    plain.stop().await.unwrap();
    watched.stop().await.unwrap();
}
