//! A whole server in rounds: small requests of many callers, and what two arms of one run
//! come to beside each other.

use std::time::Duration;

use axum::{Json, Router, response::IntoResponse, routing::post};
use berth::{
    config::Config,
    proto::{
        Capabilities, OutputEncoding, SampleRequest, Sampling, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
    server::Server,
};
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::support::{self, shown};

const TOKENS: usize = 32;
const PROMPT_IDS: u32 = 256;
pub const CALLERS: usize = 64;
const CHANNELS: usize = 8;
const ROUND: Duration = Duration::from_secs(2);
pub const ROUNDS: usize = 10;

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

/// A server of this configuration with four engines, and clients of it.
pub async fn server(config: Config) -> (Server, Vec<SamplingServiceClient<Channel>>) {
    let capabilities = Capabilities {
        incremental_streaming: true,
        ..Capabilities::default()
    };
    let routes = Router::new().route("/generate", post(generate));
    support::serve(config, capabilities, routes, CHANNELS).await
}

/// What a round came to.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Requests a second.
    pub by_clock: f64,
    /// Requests a second of this process's CPU time: what others do on the machine
    /// changes it less.
    pub by_cpu: f64,
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
pub async fn round(clients: &[SamplingServiceClient<Channel>]) -> Pace {
    let (begun, cpu_before) = (Instant::now(), cpu());
    let callers: Vec<_> = (0..CALLERS)
        .map(|i| {
            let mut client = clients[i % CHANNELS].clone();
            let request = request(i);
            tokio::spawn(async move {
                let mut count = 0u64;
                while begun.elapsed() < ROUND {
                    let response = client
                        .sample(shown(request.clone()))
                        .await
                        .unwrap()
                        .into_inner();
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

pub fn report(what: &str, with: &[Pace], without: &[Pace]) {
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

/// So many requests, one after the other: for who counts instructions.
pub async fn one_by_one(client: &SamplingServiceClient<Channel>, requests: usize) {
    let mut client = client.clone();
    for _ in 0..requests {
        client.sample(shown(request(0))).await.unwrap();
    }
}

/// The two numbers behind `--count`, where it is an argument.
pub fn counted() -> Option<(usize, usize)> {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|a| a == "--count")?;
    let number = |i: usize| arguments[at + i].parse::<usize>().unwrap();
    Some((number(1), number(2)))
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
