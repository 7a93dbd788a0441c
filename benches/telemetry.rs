//! What telemetry costs a whole server at its defaults: requests a second with
//! metrics and a log line for each request, against the same server without
//! either, in ten alternating rounds of one run. Absolute figures differ from
//! machine to machine; the ratio is what counts.
//!
//! Requests are small, so that what is the same for each weighs most: prompts of
//! 1 KiB of packed ids, 32 tokens back, an affinity key, no store on the way. The
//! engine answers at once with bytes made beforehand. Lines are written to
//! `/dev/null`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a benchmark that cannot run should say so loudly"
)]

use std::{fs::File, sync::Arc, time::Duration};

use axum::{Json, Router, response::IntoResponse, routing::post};
use berth::{
    harness::playground,
    proto::{
        Capabilities, EngineKind, OutputEncoding, Rank, RegisterReplicaRequest, SampleRequest,
        Sampling, register_replica_request::Address, replica_service_client::ReplicaServiceClient,
        sample_request::Prompt, sampling_service_client::SamplingServiceClient,
    },
    server::Server,
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
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().route("/generate", post(generate));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

async fn server(measured: bool) -> (Server, Vec<SamplingServiceClient<Channel>>) {
    let mut config = playground::config(None);
    config.fleet.lease.interval = Duration::from_secs(60);
    config.measured = measured;
    let server = Server::start(config).await.unwrap();
    let url = format!("http://{}", server.grpc_address());
    for i in 0..4 {
        ReplicaServiceClient::connect(url.clone())
            .await
            .unwrap()
            .register_replica(RegisterReplicaRequest {
                replica_id: format!("r{i}"),
                boot_id: "b".to_owned(),
                address: Some(Address::Endpoint(engine().await)),
                engine: EngineKind::Sglang.into(),
                model: "m".to_owned(),
                vocab_size: 1000,
                context_length: 16_384,
                page_size: 1,
                capabilities: Some(Capabilities {
                    incremental_streaming: true,
                    ..Capabilities::default()
                }),
                ranks: vec![Rank {
                    kv_capacity_tokens: 375_000,
                    ..Rank::default()
                }],
                ..RegisterReplicaRequest::default()
            })
            .await
            .unwrap();
    }
    let mut clients = Vec::new();
    for _ in 0..CHANNELS {
        let client = SamplingServiceClient::connect(url.clone()).await.unwrap();
        clients.push(client);
    }
    (server, clients)
}

/// Requests a second of all callers.
async fn round(clients: &[SamplingServiceClient<Channel>]) -> f64 {
    let prompt: Vec<u8> = (0..PROMPT_IDS).flat_map(u32::to_le_bytes).collect();
    let prompt = bytes::Bytes::from(prompt);
    let begun = Instant::now();
    let callers: Vec<_> = (0..CALLERS)
        .map(|i| {
            let mut client = clients[i % CHANNELS].clone();
            let request = SampleRequest {
                cache_affinity_key: Some(format!("trajectory-{i}")),
                prompt: Some(Prompt::TokenIdsLe(prompt.clone())),
                sampling: Some(Sampling {
                    max_tokens: Some(TOKENS as u32),
                    ignore_eos: true,
                    ..Sampling::default()
                }),
                output_encoding: OutputEncoding::Packed.into(),
                ..SampleRequest::default()
            };
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
    total as f64 / begun.elapsed().as_secs_f64()
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let upper = values[values.len() / 2];
    let lower = values[(values.len() - 1) / 2];
    f64::midpoint(lower, upper)
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
    let filter = |text: &str| EnvFilter::try_new(text).unwrap();
    let (reloaded, handle) = reload::Layer::new(filter("off"));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_writer(Arc::new(File::create("/dev/null").unwrap()))
        .with_filter(reloaded);
    tracing_subscriber::registry().with(lines).init();

    let (plain, plain_clients) = server(false).await;
    let (watched, watched_clients) = server(true).await;
    round(&plain_clients).await;
    round(&watched_clients).await;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for i in 0..ROUNDS {
        // Whoever goes first goes second in the next round.
        for watched in [i % 2 == 0, i % 2 == 1] {
            handle
                .reload(filter(if watched { "info" } else { "off" }))
                .unwrap();
            if watched {
                with.push(round(&watched_clients).await);
            } else {
                without.push(round(&plain_clients).await);
            }
        }
    }
    let ratios: Vec<f64> = with.iter().zip(&without).map(|(w, o)| w / o).collect();
    let shown: Vec<String> = ratios.iter().map(|r| format!("{r:.3}")).collect();
    println!(
        "{CALLERS} callers, requests/s: {:.0} with telemetry, {:.0} without; ratio {:.3} (of \
         rounds: {})",
        median(&with),
        median(&without),
        median(&ratios),
        shown.join(" ")
    );
    plain.stop().await.unwrap();
    watched.stop().await.unwrap();
}
