//! Everything as processes of its own: the control plane, two simulated vLLM
//! servers of two ranks each, and a sidecar beside each.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    reason = "a failed assumption is a failed test"
)]

#[path = "sim_support/mod.rs"]
#[allow(dead_code, reason = "shared with tests that use all of it")]
mod support;

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use berth::{
    engine::sim::tokens,
    proto::{
        AttemptFailure, CancelSampleRequest, EngineKind, ListReplicasRequest, RouteReason,
        SampleRequest, SampleResult, Sampling, TokenIds, fleet_service_client::FleetServiceClient,
        sample_request::Prompt, sampling_service_client::SamplingServiceClient,
    },
};
use serde_json::Value;
use tonic::{Code, transport::Channel};

const VOCAB: u32 = 32_000;

fn berth(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// Killed when it is dropped.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The control plane, and where it listens.
fn serve(dir: &std::path::Path) -> (Process, String) {
    let mut child = berth(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--log-format",
        "json",
        "--data-dir",
    ])
    .arg(dir.join("store"))
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    let url = loop {
        line.clear();
        assert_ne!(log.read_line(&mut line).unwrap(), 0, "it ended");
        let entry: Value = serde_json::from_str(&line).unwrap();
        if let Some(grpc) = entry["grpc"].as_str() {
            break format!("http://{grpc}");
        }
    };
    // Read on, so that it never blocks on a full pipe.
    std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
    (Process(child), url)
}

/// A vLLM of two ranks with 16 tokens a block and 8 ms a token, and where it
/// listens.
fn engine() -> (Process, String) {
    let mut child = berth(&[
        "sim-engine",
        "--dialect",
        "vllm",
        "--ranks",
        "2",
        "--model",
        "tiny",
        "--vocab-size",
        "32000",
        "--eos-one-in",
        "0",
    ])
    .stdout(Stdio::piped())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut url)
        .unwrap();
    (Process(child), url.trim().to_owned())
}

fn sidecar(control: &str, engine: &str, id: &str) -> Process {
    let child = berth(&[
        "sidecar",
        "--engine",
        "vllm",
        "--control-plane",
        control,
        "--engine-url",
        engine,
        "--replica-id",
        id,
        "--vocab-size",
        "32000",
    ])
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    Process(child)
}

/// What the engine has seen.
async fn history(engine: &str) -> Vec<Value> {
    let seen = support::get(engine, "/sim/history").await.unwrap().json();
    seen["entries"].as_array().unwrap().clone()
}

async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..3000 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never: {what}");
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 7919 + i * 31) % VOCAB).collect()
}

fn request(key: &str, prompt: &[u32], output: u32) -> SampleRequest {
    SampleRequest {
        cache_affinity_key: Some(key.to_owned()),
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(Sampling {
            max_tokens: Some(output),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}

async fn sample(client: &mut SamplingServiceClient<Channel>, asked: SampleRequest) -> SampleResult {
    let mut response = client.sample(asked).await.unwrap().into_inner();
    response.samples.remove(0)
}

#[tokio::test]
async fn two_replicas_of_two_ranks_behind_a_control_plane() {
    let dir = tempfile::tempdir().unwrap();
    let (_serve, control) = serve(dir.path());
    let mut engines = BTreeMap::new();
    let mut sidecars = Vec::new();
    for id in ["a", "b"] {
        let (process, url) = engine();
        sidecars.push(sidecar(&control, &url, id));
        engines.insert(id.to_owned(), (process, url));
    }
    let channel = Channel::from_shared(control)
        .unwrap()
        .connect()
        .await
        .unwrap();
    let mut client = SamplingServiceClient::new(channel.clone());
    let mut operator = FleetServiceClient::new(channel);
    let mut listed = Vec::new();
    eventually("four ranks are routable", async || {
        let list = operator.list_replicas(ListReplicasRequest::default()).await;
        listed = list.unwrap().into_inner().replicas;
        let ranks = listed.iter().flat_map(|r| &r.ranks);
        ranks.filter(|r| r.routable).count() == 4
    })
    .await;
    assert!(listed.iter().all(|r| r.engine() == EngineKind::Vllm
        && r.model == "tiny"
        && r.vocab_size == VOCAB
        && r.context_length == 16_384));

    // Each of four trajectories has a rank of its own, and keeps it.
    let mut homes = BTreeMap::new();
    for turn in 0..3_u32 {
        for t in 0..4 {
            let key = format!("t{t}");
            let history = prompt(t, 64 + 16 * turn);
            let got = sample(&mut client, request(&key, &history, 4)).await;
            assert_eq!(got.token_ids, tokens::expected(&history, 0, 4, VOCAB));
            let route = got.route.unwrap();
            let here = (route.replica_id.clone(), route.rank);
            assert_eq!(homes.entry(key).or_insert_with(|| here.clone()), &here);
            // Whole blocks of the history that the turn before had.
            let cached = got.usage.unwrap().cached_tokens;
            let held = if turn == 0 {
                0
            } else {
                64 + 16 * (u64::from(turn) - 1)
            };
            assert_eq!(cached, held, "turn {turn}");
        }
    }
    let distinct: BTreeSet<_> = homes.values().collect();
    assert_eq!(distinct.len(), 4, "{homes:?}");
    for (_, url) in engines.values() {
        let seen = history(url).await;
        assert_eq!(seen.len(), 6);
        for entry in seen {
            assert_eq!(entry["asked_rank"], entry["rank"], "{entry}");
        }
    }

    // A cancelled generation ends at its engine.
    let (replica, _) = homes["t0"].clone();
    let url = engines[&replica].1.clone();
    let run = tokio::spawn({
        let mut client = client.clone();
        let mut asked = request("t0", &prompt(0, 64), 10_000);
        asked.idempotency_key = Some("k".to_owned());
        async move { client.sample(asked).await }
    });
    eventually("it runs", async || {
        let last = history(&url).await.pop().unwrap();
        last["how"] == "live" && !last["started"].is_null()
    })
    .await;
    let cancel = CancelSampleRequest {
        idempotency_key: "k".to_owned(),
    };
    client.cancel_sample(cancel).await.unwrap();
    assert_eq!(run.await.unwrap().unwrap_err().code(), Code::Cancelled);
    eventually("it is aborted", async || {
        history(&url).await.pop().unwrap()["how"] == "aborted"
    })
    .await;

    // An engine that is killed midway is replaced within the turn. The others are
    // fast from here on.
    for (id, (_, other)) in &engines {
        if *id == replica {
            continue;
        }
        let faults = serde_json::json!({"slow": 0.0});
        support::post(other, "/sim/faults", faults).await.unwrap();
    }
    let history_of = prompt(0, 64);
    let run = tokio::spawn({
        let mut client = client.clone();
        let asked = request("t0", &history_of, 3000);
        async move { client.sample(asked).await }
    });
    eventually("it runs", async || {
        let last = history(&url).await.pop().unwrap();
        last["how"] == "live" && !last["started"].is_null()
    })
    .await;
    engines.get_mut(&replica).unwrap().0.kill();
    let got = run.await.unwrap().unwrap().into_inner().samples.remove(0);
    assert_eq!(got.token_ids, tokens::expected(&history_of, 0, 3000, VOCAB));
    let route = got.route.unwrap();
    assert_ne!(route.replica_id, replica);
    assert_eq!(route.reason(), RouteReason::ReplicaLost);
    assert_eq!(route.attempts.len(), 2);
    assert_eq!(route.attempts[0].failure(), AttemptFailure::Lost);
}
