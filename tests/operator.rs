//! The operator's commands, as processes, against a control plane that is one.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

#[path = "support/process.rs"]
mod process;

use std::{
    io::{BufRead, BufReader},
    process::{Output, Stdio},
    time::Duration,
};

use berth::{
    engine::sim::{PauseMode, SimConfig, SimEngine, SimHandle},
    proto::{
        RouteReason, SampleRequest, SampleResponse, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use futures_util::future::join_all;
use serde_json::Value;
use tonic::transport::Channel;

use process::{Process, Serve, berth};

/// A control plane with two engines, of which the sidecars are processes too.
struct Fleet {
    serve: Serve,
    engines: Vec<SimHandle>,
    sidecars: Vec<Process>,
    channel: Channel,
}

/// How a command ended.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Fleet {
    async fn start(step: Duration) -> Self {
        let serve = Serve::start(&[]);
        let channel = Channel::from_shared(serve.url.clone())
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut fleet = Self {
            serve,
            engines: Vec::new(),
            sidecars: Vec::new(),
            channel,
        };
        for id in ["a", "b"] {
            let engine = SimEngine::start(SimConfig {
                step: Some(step),
                time_scale: 1.0,
                incremental_streaming_output: true,
                ..SimConfig::instant()
            })
            .await
            .unwrap();
            let sidecar = berth()
                .args(["sidecar", "--control-plane", &fleet.serve.url])
                .args(["--engine-url", &engine.url(), "--replica-id", id])
                .args(["--drain-timeout", "10s", "--log", "warn"])
                .spawn()
                .unwrap();
            fleet.engines.push(engine);
            fleet.sidecars.push(Process(sidecar));
        }
        fleet
            .until("both are registered", |fleet| {
                let replicas = fleet["replicas"].as_array().unwrap();
                replicas.len() == 2 && replicas.iter().all(|r| r["health"] == "healthy")
            })
            .await;
        fleet
    }

    /// Waits until `berth replicas --json` says so.
    async fn until(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        for _ in 0..600 {
            if condition(&self.json(&["replicas"]).await) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("never: {what}");
    }

    async fn run(&self, args: &[&str]) -> Ran {
        run(&self.serve.url, args).await
    }

    /// What a command that succeeds says with `--json`.
    async fn json(&self, args: &[&str]) -> Value {
        let args = [args, &["--json"]].concat();
        let ran = self.run(&args).await;
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
        serde_json::from_str(&ran.out).unwrap()
    }

    async fn turn(&self, key: &str, tokens: u32) -> (String, RouteReason) {
        let request = SampleRequest {
            cache_affinity_key: Some(key.to_owned()),
            prompt: Some(Prompt::TokenIds(TokenIds {
                ids: (1..40).collect(),
            })),
            sampling: Some(Sampling {
                max_tokens: Some(tokens),
                ignore_eos: true,
                ..Sampling::default()
            }),
            ..SampleRequest::default()
        };
        let mut client = SamplingServiceClient::new(self.channel.clone());
        let response: SampleResponse = client.sample(request).await.unwrap().into_inner();
        let route = response.samples[0].route.as_ref().unwrap();
        assert_eq!(route.attempts.len(), 1, "no attempt failed");
        (route.replica_id.clone(), route.reason())
    }
}

async fn run(url: &str, args: &[&str]) -> Ran {
    let mut command = berth();
    command
        .args(args)
        .env("BERTH_URL", url)
        .stdin(Stdio::null());
    let Output {
        status,
        stdout,
        stderr,
    } = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    Ran {
        code: status.code().unwrap(),
        out: String::from_utf8(stdout).unwrap(),
        err: String::from_utf8(stderr).unwrap(),
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// One line that begins as all do.
fn complaint(ran: &Ran, code: i32) -> &str {
    assert_eq!(ran.code, code, "{}{}", ran.out, ran.err);
    let line = ran.err.trim_end();
    assert!(
        line.starts_with("berth: ") && line.lines().count() == 1,
        "{line}"
    );
    line
}

#[tokio::test]
async fn a_route_is_explained() {
    let fleet = Fleet::start(Duration::from_millis(1)).await;
    let shown = fleet.json(&["explain", "t", "--prompt-tokens", "39"]).await;
    assert_eq!(shown["route"]["reason"], "new_key");
    let (home, _) = fleet.turn("t", 11).await;
    assert_eq!(shown["route"]["replica_id"], home, "as was said");
    let shown = fleet
        .json(&["explain", "t", "--prompt-tokens", "100"])
        .await;
    assert_eq!(shown["route"]["reason"], "pinned");
    assert_eq!(shown["route"]["expected_cached_tokens"], 49);
    assert_eq!(shown["candidates"].as_array().unwrap().len(), 2);

    let page = fleet.run(&["explain", "t"]).await;
    assert_eq!(page.code, 0, "{}", page.err);
    let lines: Vec<&str> = page.out.lines().collect();
    assert!(
        lines[0].starts_with(&format!("{home}/0 (start 1): PINNED")),
        "{}",
        page.out
    );
    let lives = |line: &&&str| line.ends_with("the key lives here");
    assert_eq!(lines.iter().filter(lives).count(), 1, "{}", page.out);

    let none = fleet.run(&["explain", "t", "--weights", "other"]).await;
    // What nobody serves does not come by asking again.
    assert!(complaint(&none, 5).contains("weights"), "{}", none.err);
    assert!(none.out.contains("it serves weights"), "{}", none.out);
    let wrong = fleet.run(&["explain", "t", "--model", "other"]).await;
    complaint(&wrong, 3);
}

#[tokio::test]
async fn the_fleet_is_shown() {
    let fleet = Fleet::start(Duration::from_millis(1)).await;
    let (home, _) = fleet.turn("t", 11).await;

    let table = fleet.run(&["replicas"]).await;
    assert_eq!(table.code, 0);
    let lines: Vec<&str> = table.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", table.out);
    assert_eq!(
        words(lines[0])[..5],
        ["REPLICA", "START", "HEALTH", "MODEL", "WEIGHTS"]
    );
    let weights = fleet.engines[0].config().weight_version.clone();
    let first = words(lines[1]);
    assert_eq!(
        first[..7],
        ["a", "1", "healthy", "Qwen/Qwen3-8B", &weights, "1/1", "0"]
    );
    let none = fleet.run(&["replicas", "--model", "other"]).await;
    let told = "no replica of model other is known\n";
    assert_eq!((none.code, none.out.as_str()), (0, told));

    let one = fleet.run(&["replica", &home]).await;
    assert_eq!(one.code, 0);
    assert!(
        one.out.contains("vocabulary 151936") && one.out.contains("open"),
        "{}",
        one.out
    );
    let one = fleet.json(&["replica", &home]).await;
    assert_eq!(
        (&one["ranks"][0]["live_pins"], &one["drain"]),
        (&1.into(), &Value::Null)
    );
    assert_eq!(one["engine"], "sglang");

    let pin = fleet.run(&["pin", "t", "--model", "Qwen/Qwen3-8B"]).await;
    let row = words(pin.out.lines().nth(1).unwrap());
    assert_eq!(row[..4], [&home, "1", "0", "49"]);
    assert_eq!(fleet.json(&["pin", "t"]).await["live"], true);

    let stats = fleet.run(&["stats"]).await;
    assert!(
        stats.out.lines().any(|l| words(l) == ["samples", "1"]),
        "{}",
        stats.out
    );
    let stats = fleet.json(&["stats"]).await;
    assert_eq!(
        (&stats["pins"], &stats["counters"]["samples"]),
        (&1.into(), &1.into())
    );

    // Which weights live where.
    fleet.engines[1].set_weight_version("step-2", false);
    fleet
        .until("the new weights are seen", |fleet| {
            fleet["replicas"][1]["ranks"][0]["weight_version"] == "step-2"
        })
        .await;
    let table = fleet.run(&["replicas"]).await.out;
    let line = format!("weights of Qwen/Qwen3-8B: {weights} at a/0; step-2 at b/0");
    assert!(table.lines().any(|l| l == line), "{table}");
}

#[tokio::test]
async fn a_replica_is_drained_waited_for_and_resumed() {
    let fleet = Fleet::start(Duration::from_millis(5)).await;
    // A trajectory on each.
    let (home, _) = fleet.turn("t", 2).await;
    let (other, _) = fleet.turn("u", 2).await;
    assert_ne!(home, other);

    let engine = &fleet.engines[usize::from(home == "b")];
    let turn = fleet.turn("t", 400);
    let drained = async {
        while engine.counters().started < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // It runs, and goes on when it is told to.
        engine.pause(PauseMode::InPlace).await;
        let told = fleet.run(&["drain", &home, "--grace", "1h"]).await;
        assert_eq!(told.code, 0, "{}", told.err);
        assert!(
            told.out.contains("is draining") && told.out.contains("1 in flight"),
            "{}",
            told.out
        );
        // What is in flight does not end by itself.
        let late = fleet
            .run(&["drain", &home, "--grace", "0s", "--wait=0s"])
            .await;
        let said = complaint(&late, 6);
        assert!(said.contains("1 in flight"), "{said}");
        engine.resume();
        fleet.run(&["drain", &home, "--wait"]).await
    };
    let (turn, drained) = tokio::join!(turn, drained);
    assert_eq!(turn, (home.clone(), RouteReason::Pinned));
    assert_eq!(drained.code, 0, "{}", drained.err);
    assert!(drained.out.contains("0 in flight"), "{}", drained.out);

    let table = fleet.run(&["replicas"]).await.out;
    assert!(
        table.contains(&format!("{home} drains, 0 s of grace left")),
        "{table}"
    );
    assert_eq!(
        fleet.turn("t", 2).await,
        (other.clone(), RouteReason::Draining)
    );

    // The last one is not drained by accident.
    let last = fleet.run(&["drain", &other]).await;
    let said = complaint(&last, 5);
    assert!(
        said.contains("LAST_REPLICA") && said.contains("--force"),
        "{said}"
    );
    let forced = fleet.json(&["drain", &other, "--force", "--hold"]).await;
    assert_eq!(
        (&forced["health"], &forced["drain"]["hold"]),
        (&"draining".into(), &true.into())
    );

    for replica in [&home, &other] {
        let resumed = fleet.run(&["resume", replica]).await;
        assert_eq!(resumed.code, 0, "{}", resumed.err);
        assert!(
            resumed.out.starts_with(&format!("{replica} is healthy")),
            "{}",
            resumed.out
        );
    }
    // Repeated.
    assert_eq!(fleet.run(&["resume", &home]).await.code, 0);
}

#[tokio::test]
async fn errors_say_what_to_do_in_one_line_and_have_exit_codes() {
    let serve = Serve::start(&[]);
    for args in [["replica", "x"], ["drain", "x"], ["resume", "x"]] {
        let ran = run(&serve.url, &args).await;
        let said = complaint(&ran, 3);
        assert!(said.contains("berth replicas"), "{said}");
    }
    let ran = run(&serve.url, &["pin", "k"]).await;
    let said = complaint(&ran, 4);
    assert!(
        said.contains("NO_REPLICA"),
        "nobody serves any model: {said}"
    );
    let ran = run(&serve.url, &["drain", "x", "--grace", "48h"]).await;
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(ran.err.contains("--grace") && ran.err.contains("24h"));
    // What the control plane finds wrong with what was asked for.
    let ran = run(&serve.url, &["explain", "--num-samples", "0"]).await;
    let said = complaint(&ran, 2);
    assert!(said.contains("num_samples"), "{said}");
    assert_eq!(run(&serve.url, &["drain"]).await.code, 2);
    assert_eq!(
        run(&serve.url, &["drain", "x", "--grace", "soon"])
            .await
            .code,
        2
    );

    let plain = serve.url.trim_start_matches("http://");
    for args in [
        &["replicas"][..],
        &["replica", "r"],
        &["drain", "r"],
        &["resume", "r"],
        &["pin", "k"],
        &["explain"],
        &["stats"],
        &["purge", "--tenant", "t"],
    ] {
        let ran = run(plain, args).await;
        let said = complaint(&ran, 2);
        assert!(
            said.contains("BERTH_URL") && said.contains(&format!("write {}", serve.url)),
            "{said}"
        );
    }
    // A file is what is wrong, not the address.
    let ran = run(&serve.url, &["stats", "--token-file", "/nonexistent/t"]).await;
    let said = complaint(&ran, 2);
    assert!(
        said.contains("--token-file") && said.contains("/nonexistent/t: No such file"),
        "{said}"
    );
    assert!(!said.contains("--url"), "{said}");
    // A port where nobody listens: bound, so that nobody else takes it.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let ran = run(&url, &["stats"]).await;
    let said = complaint(&ran, 4);
    assert!(
        said.contains("cannot be reached") && said.contains("--url"),
        "{said}"
    );
    // One that listens and says nothing.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let ran = run(&url, &["stats", "--timeout", "300ms"]).await;
    let said = complaint(&ran, 4);
    assert!(said.contains("--timeout"), "{said}");
}

#[tokio::test]
async fn a_watch_shows_changes_and_ends_with_the_control_plane() {
    let mut fleet = Fleet::start(Duration::from_millis(1)).await;
    let watch = berth()
        .args(["replicas", "--watch", "--json", "--url", &fleet.serve.url])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut watch = Process(watch);
    let mut lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
    let (sender, mut heard) = tokio::sync::mpsc::channel(100);
    std::thread::spawn(move || {
        while let Some(Ok(line)) = lines.next() {
            let value: Value = serde_json::from_str(&line).unwrap();
            if sender.blocking_send(value).is_err() {
                return;
            }
        }
    });
    let first = heard.recv().await.unwrap();
    assert_eq!(first["snapshot_end"], true);
    assert_eq!(first["replicas"].as_array().unwrap().len(), 2);
    assert_eq!(fleet.run(&["drain", "a"]).await.code, 0);
    loop {
        let change = heard.recv().await.unwrap();
        if change["replicas"][0]["health"] == "draining" {
            break;
        }
    }
    fleet.serve.signal("-TERM");
    assert_eq!(watch.ended().await.code(), Some(4));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut watch.0.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.contains("SHUTTING_DOWN"), "{said}");
    assert!(fleet.serve.ended().await.success());
}

/// Trajectories go on while the sidecar's process is told to end: it drains, takes
/// its leave and ends well, no turn fails, and the keys move once.
#[tokio::test]
async fn sigterm_of_a_sidecar_drains_and_deregisters() {
    let mut fleet = Fleet::start(Duration::from_millis(4)).await;
    let mut leaving = fleet.sidecars.remove(0);
    let over = tokio_util::sync::CancellationToken::new();
    let trajectories = join_all((0..6).map(|i| {
        let (fleet, over) = (&fleet, over.clone());
        async move {
            let mut turns = Vec::new();
            loop {
                let last = over.is_cancelled();
                turns.push(fleet.turn(&format!("t{i}"), 20).await);
                if last {
                    return turns;
                }
            }
        }
    }));
    let driver = async {
        let busy = |engine: &SimHandle| engine.counters().finished > 6;
        while !fleet.engines.iter().all(busy) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        leaving.signal("-TERM");
        assert!(leaving.ended().await.success());
        let gone = fleet.json(&["replica", "a"]).await;
        assert_eq!(
            (&gone["health"], &gone["health_reason"]),
            (&"dead".into(), &"it deregistered".into())
        );
        let history = fleet.engines[0].history();
        assert!(
            history.iter().all(|r| r.ended.is_some()),
            "nothing is cut off"
        );
        fleet.engines[0].stop().await;
        over.cancel();
    };
    let (trajectories, ()) = tokio::join!(trajectories, driver);
    for turns in trajectories {
        let moves: Vec<_> = turns
            .iter()
            .filter(|(_, why)| *why != RouteReason::Pinned)
            .map(|(_, why)| *why)
            .collect();
        let all: &[_] = if turns[0].0 == "a" {
            &[RouteReason::NewKey, RouteReason::Draining]
        } else {
            &[RouteReason::NewKey]
        };
        assert_eq!(moves, all);
        assert_eq!(turns.last().unwrap().0, "b");
    }
}
