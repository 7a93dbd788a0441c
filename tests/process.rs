//! The binary as an operator runs it: configuration, signals, exit codes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

#[path = "support/process.rs"]
mod process;

use std::{os::unix::fs::PermissionsExt, process::Stdio, time::Duration};

use berth::{
    engine::sim::{SimConfig, SimEngine, SimHandle},
    proto::{
        ListReplicasRequest, SampleRequest, Sampling, TokenIds,
        fleet_service_client::FleetServiceClient, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, transport::Channel};

use process::{Process, Serve, berth, check};

async fn client(serve: &Serve) -> SamplingServiceClient<Channel> {
    SamplingServiceClient::connect(serve.url.clone())
        .await
        .unwrap()
}

/// An engine of 10 ms a token with its sidecar, registered.
async fn engine(serve: &Serve) -> (SimHandle, CancellationToken) {
    let engine = SimEngine::start(SimConfig {
        step: Some(Duration::from_millis(10)),
        ..SimConfig::instant()
    })
    .await
    .unwrap();
    let sidecar = Sidecar::new(SidecarConfig::new(&serve.url, engine.url(), "r")).unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(sidecar.run(stop.clone()));
    let mut client = client(serve).await;
    for _ in 0..500 {
        if client.sample(request(1)).await.is_ok() {
            return (engine, stop);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it never registered");
}

fn request(tokens: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1, 2, 3] })),
        sampling: Some(Sampling {
            max_tokens: Some(tokens),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}

/// A driver may take seconds to tell its GPUs, and may never: its ranks serve
/// meanwhile, and what it tells later is registered.
#[tokio::test]
async fn a_slow_driver_holds_no_rank_up() {
    let serve = Serve::start(&[]);
    let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
    let bin = tempfile::tempdir().unwrap();
    let driver = bin.path().join("nvidia-smi");
    let tells = bin.path().join("tells");
    let script = format!(
        "#!/bin/sh\nuntil [ -e {} ]; do [ -d {} ] || exit; sleep 0.02; done\necho 'NVIDIA H200, 143771, GPU-7'\n",
        tells.display(),
        bin.path().display()
    );
    std::fs::write(&driver, script).unwrap();
    std::fs::set_permissions(&driver, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!(
        "{}:{}",
        bin.path().display(),
        std::env::var("PATH").unwrap()
    );
    let sidecar = berth()
        .args(["sidecar", "--control-plane", &serve.url])
        .args(["--engine-url", &engine.url(), "--replica-id", "r"])
        .env("PATH", path)
        .spawn()
        .unwrap();
    let _sidecar = Process(sidecar);
    let mut client = client(&serve).await;
    let mut fleet = FleetServiceClient::connect(serve.url.clone())
        .await
        .unwrap();
    let mut told = false;
    for _ in 0..1000 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        if client.sample(request(1)).await.is_err() {
            continue;
        }
        let asked = fleet.list_replicas(ListReplicasRequest::default()).await;
        let replica = asked.unwrap().into_inner().replicas.remove(0);
        let gpu = replica.accelerator.unwrap().name;
        if !gpu.is_empty() {
            assert!(told, "before the driver said so");
            assert_eq!((gpu.as_str(), replica.incarnation), ("NVIDIA H200", 1));
            return;
        }
        if !told {
            std::fs::write(&tells, "").unwrap();
            told = true;
        }
    }
    panic!("it serves: {told}; and its GPU was never told");
}

#[test]
fn the_configuration_is_checked_whole_and_nothing_is_bound() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("berth.toml");
    std::fs::write(&file, "max-pins = 7\nmax-streams = 8\n").unwrap();
    let (ok, text) = check(
        berth()
            .args(["serve", "--check-config", "--max-pins", "9", "--config"])
            .arg(&file)
            .env("BERTH_MAX_STREAMS", "5"),
    );
    assert!(ok, "{text}");
    assert!(
        text.contains("max-pins = 9\n") && text.contains("max-streams = 5\n"),
        "{text}"
    );

    std::fs::write(&file, "max-pin = 7\nmax-streams = \"x\"\nload-factor = 0.5").unwrap();
    let (ok, text) = check(
        berth()
            .args([
                "serve",
                "--check-config",
                "--audit-log",
                "/nonexistent/x",
                "--config",
            ])
            .arg(&file)
            .env("BERTH_MAX_PIN", "7"),
    );
    assert!(!ok, "{text}");
    for fault in [
        "BERTH_MAX_PIN: ",
        "max-pin: ",
        "max-streams: ",
        "load-factor: ",
        "audit-log: /nonexistent/x: No such file",
    ] {
        assert!(text.contains(fault), "{fault} in {text}");
    }

    let (ok, text) = check(berth().args([
        "serve",
        "--check-config",
        "--listen",
        "0.0.0.0:7700",
        "--load-factor",
        "0",
    ]));
    assert!(
        !ok && text.contains("credentials") && text.contains("load-factor"),
        "{text}"
    );
}

#[test]
fn faults_of_credentials_and_of_tls_are_told_with_all_others() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name)
    };
    for command in [&["serve", "--check-config"][..], &["serve"]] {
        let (ok, text) = check(
            berth()
                .args(command)
                .args(["--load-factor", "0", "--data-dir"])
                .arg(dir.path().join("store"))
                .arg("--credentials")
                .arg(file("credentials", "principal=a\nprincipal=b role=king\n"))
                .arg("--audit-log")
                .arg(dir.path().join("audit"))
                .arg("--tls-cert")
                .arg(file("cert", "no certificate"))
                .arg("--tls-key")
                .arg(file("key", "no key")),
        );
        assert!(!ok, "{text}");
        let named = |option: &str| {
            let name = option.trim_start_matches("tls-");
            format!("{option}: {}: ", dir.path().join(name).display())
        };
        for fault in [
            "load-factor",
            "line 1: role",
            "line 2: ",
            &named("credentials"),
            &named("tls-cert"),
            &named("tls-key"),
        ] {
            assert!(text.contains(fault), "{fault} in {text}");
        }
        assert!(!dir.path().join("audit").exists(), "nothing is made");
        assert!(!dir.path().join("store").exists(), "nothing is made");
    }
}

#[test]
fn wrong_usage_of_any_command_has_the_exit_code_that_clap_has_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let events = file("events", "later die 1\n");
    let toml = file("berth.toml", "max-pins = \"many\"\n");
    let (ran, out) = (dir.path().join("ran"), dir.path().join("token"));
    let (ran, out) = (ran.to_str().unwrap(), out.to_str().unwrap());
    let small = ["simulate", "--workload", "ablation", "--sessions", "1"];
    let sidecar = ["sidecar", "--engine-url", "http://127.0.0.1:1"];
    for (args, says) in [
        (&["serve", "--load-factor", "0"][..], &["load-factor"][..]),
        (&["serve", "--config", &toml], &["max-pins"]),
        (
            &["serve", "--config", "/nonexistent/c"],
            &["--config", "/nonexistent/c"],
        ),
        (
            &[&sidecar[..], &["--control-plane", "127.0.0.1:7700"]].concat(),
            &["--control-plane", "write http://127.0.0.1:7700"],
        ),
        (
            &[
                &sidecar[..],
                &["--replica-id", "a b", "--token-file", "/nonexistent/t"],
            ]
            .concat(),
            &["--replica-id", "--token-file", "/nonexistent/t"],
        ),
        (
            &["sidecar", "--engine-url", "127.0.0.1:30000"],
            &["--engine-url", "write http://127.0.0.1:30000"],
        ),
        (&[&sidecar[..], &["--log", "a=b=c"]].concat(), &["--log"]),
        (
            &["sim-engine", "--ranks", "0", "--time-scale=-1"],
            &["--ranks", "--time-scale"],
        ),
        (
            &["demo", "--time-scale", "0", "--out", ran],
            &["--time-scale"],
        ),
        (
            &[
                "bench",
                "affinity",
                "--turns",
                "1",
                "--control-plane",
                "x",
                "--out",
                ran,
            ],
            &["--turns", "--control-plane"],
        ),
        (
            &["bench", "affinity", "--token-file", "/nonexistent/t"],
            &["--token-file", "/nonexistent/t"],
        ),
        (
            &[&small[..], &["--policies", "hash,hash"]].concat(),
            &["--policies"],
        ),
        (
            &[&small[..], &["--arrival", "99999999y"]].concat(),
            &["ten years"],
        ),
        (&["stats", "--timeout", "0s"], &["--timeout", "above 0s"]),
        (
            &[
                &sidecar[..],
                &["--drain-timeout", "72h", "--frozen-after", "0s"],
            ]
            .concat(),
            &["--drain-timeout", "--frozen-after"],
        ),
        (&[&small[..], &["--replicas", "0"]].concat(), &["replicas"]),
        (
            &[&small[..], &["--events-file", &events]].concat(),
            &["--events-file", &events],
        ),
        (
            &[
                "token",
                "--principal",
                "a b",
                "--role",
                "king",
                "--out",
                out,
            ],
            &["name=value"],
        ),
        (
            &[
                "token",
                "--principal",
                "a",
                "--role",
                "admin",
                "--valid-for",
                "999y",
                "--out",
                out,
            ],
            &["--valid-for"],
        ),
        (
            &[
                "token",
                "--principal",
                "a",
                "--role",
                "admin",
                "--from-stdin",
            ],
            &["standard input"],
        ),
    ] {
        let ran = berth().args(args).stdin(Stdio::null()).output().unwrap();
        let told = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(2), "{args:?}: {told}");
        for say in says {
            assert!(told.contains(say), "{say} for {args:?}: {told}");
        }
    }
    let made = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(made, 2, "nothing is made");
}

#[test]
fn a_store_that_is_in_use_is_told() {
    let serve = Serve::start(&[]);
    let (ok, text) = check(
        berth()
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--admin-listen",
                "127.0.0.1:0",
            ])
            .arg("--data-dir")
            .arg(serve.dir.path().join("store")),
    );
    assert!(!ok && text.contains("in use"), "{text}");
    assert!(text.contains("data-dir"), "{text}");
}

#[tokio::test]
async fn sigterm_lets_calls_finish_and_takes_no_new_connection() {
    let mut serve = Serve::start(&[]);
    let (_engine, _sidecar) = engine(&serve).await;
    let mut client = client(&serve).await;
    let call = tokio::spawn(async move { client.sample(request(100)).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    serve.signal("-TERM");
    let response = call.await.unwrap().unwrap().into_inner();
    assert_eq!(response.samples[0].token_ids.len(), 100);
    assert!(serve.ended().await.success());
    assert!(
        SamplingServiceClient::connect(serve.url.clone())
            .await
            .is_err()
    );
}

#[tokio::test]
async fn the_drain_is_bounded_and_what_still_runs_is_stopped_at_its_engine() {
    let mut serve = Serve::start(&["--drain-timeout", "300ms"]);
    let (engine, _sidecar) = engine(&serve).await;
    let mut client = client(&serve).await;
    let call = tokio::spawn(async move {
        let keyed = SampleRequest {
            idempotency_key: Some("k".to_owned()),
            ..request(10_000)
        };
        client.sample(keyed).await
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    serve.signal("-TERM");
    assert!(serve.ended().await.success());
    let status = call.await.unwrap().unwrap_err();
    assert!(
        matches!(
            status.code(),
            Code::Unavailable | Code::Unknown | Code::Internal
        ),
        "{status}"
    );
    assert!(engine.history().iter().all(|r| r.ended.is_some()));
}

#[tokio::test]
async fn a_second_sigterm_ends_it_at_once() {
    let mut serve = Serve::start(&["--drain-timeout", "1h"]);
    let (_engine, _sidecar) = engine(&serve).await;
    let mut client = client(&serve).await;
    let call = tokio::spawn(async move { client.sample(request(10_000)).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    serve.signal("-TERM");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!serve.has_ended(), "it drains");
    serve.signal("-TERM");
    assert_eq!(serve.ended().await.code(), Some(130));
    assert!(call.await.unwrap().is_err());
}
