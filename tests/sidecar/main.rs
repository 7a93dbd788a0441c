//! The sidecar between an engine that answers with recorded bodies and a
//! control plane that remembers what it hears.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod control;
mod engine;
#[path = "../sim_support/mod.rs"]
#[allow(dead_code, reason = "shared with tests that use all of it")]
mod support;
mod vllm;

use std::{net::SocketAddr, time::Duration};

use berth::{
    proto::{
        Directive, HeartbeatRequest, LogprobMode, ReplicaState, register_replica_request::Address,
    },
    sidecar::{AcceleratorConfig, Sidecar, SidecarConfig, SidecarError, Timing},
};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpSocket},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::{
    control::{FakeControl, Said},
    engine::FakeEngine,
};

/// Longer than anything here takes, on any machine.
const LONG: Duration = Duration::from_secs(60);

fn config(control: &FakeControl, engine: &FakeEngine) -> SidecarConfig {
    config_of(control, &engine.url())
}

fn config_of(control: &FakeControl, engine_url: &str) -> SidecarConfig {
    let mut config = SidecarConfig::new(control.url(), engine_url, "r1");
    config.vocab_size = Some(32_000);
    config.drain_timeout = Duration::from_secs(10);
    config.accelerator = AcceleratorConfig {
        name: Some("NVIDIA H100 80GB HBM3".into()),
        memory_bytes: Some(81_559 << 20),
        count: None,
        ask_driver: false,
    };
    config.timing = Timing {
        probe_timeout: Duration::from_secs(2),
        backoff: Duration::from_millis(10),
        max_backoff: Duration::from_millis(50),
        refused_wait: Duration::from_millis(50),
        reregister_jitter: Duration::from_millis(20),
        frozen_after: Duration::from_millis(200),
        ..Timing::default()
    };
    config
}

/// Keeps a port: bound, so that nobody else gets it, and not listening, so
/// that it refuses.
struct Port(TcpSocket);

impl Port {
    fn reserve() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self(socket)
    }

    fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Beside the socket that keeps it. Waits until a listener before this one
    /// is gone.
    async fn listen(&self) -> TcpListener {
        loop {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            if socket.bind(self.address()).is_ok()
                && let Ok(listener) = socket.listen(128)
            {
                return listener;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

struct Running {
    task: JoinHandle<Result<(), SidecarError>>,
    shutdown: CancellationToken,
}

impl Running {
    fn start(config: SidecarConfig) -> Self {
        let shutdown = CancellationToken::new();
        let sidecar = Sidecar::new(config).unwrap();
        Self {
            task: tokio::spawn(Box::pin(sidecar.run(shutdown.clone()))),
            shutdown,
        }
    }

    async fn ends(self) -> Result<(), SidecarError> {
        tokio::time::timeout(LONG, self.task)
            .await
            .expect("it ends")
            .unwrap()
    }

    async fn stops(self) {
        self.shutdown.cancel();
        self.ends().await.unwrap();
    }
}

fn is(state: ReplicaState) -> impl Fn(&HeartbeatRequest) -> bool {
    move |beat| beat.state() == state
}

async fn registered() -> (FakeControl, FakeEngine, Running) {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    let running = Running::start(config(&control, &engine));
    control
        .hears("a beat of a ready engine", |control| {
            control.beats().iter().any(is(ReplicaState::Ready))
        })
        .await;
    (control, engine, running)
}

#[tokio::test]
async fn the_engines_facts_are_registered() {
    let (control, engine, running) = registered().await;
    let told = control.registrations().remove(0);
    assert_eq!(told.replica_id, "r1");
    assert!(!told.boot_id.is_empty());
    assert_eq!(told.address, Some(Address::Endpoint(engine.url())));
    assert_eq!(told.engine_version, "0.5.23");
    assert_eq!(told.model, "MODEL_DIR");
    assert_eq!((told.vocab_size, told.context_length), (32_000, 32_768));
    assert_eq!(
        (told.page_size, told.weight_version.as_str()),
        (1, "default")
    );
    assert_eq!(told.logprob_mode(), LogprobMode::Processed);
    let can = told.capabilities.unwrap();
    assert!(!can.tokenizer && !can.seed && can.output_logprobs && can.prompt_logprobs);
    let accelerator = told.accelerator.unwrap();
    assert_eq!(accelerator.name, "NVIDIA H100 80GB HBM3");
    assert_eq!(accelerator.count, 2);
    let ranks: Vec<_> = told
        .ranks
        .iter()
        .map(|r| {
            (
                r.rank,
                r.engine_rank,
                r.kv_capacity_tokens,
                r.max_running_requests,
            )
        })
        .collect();
    assert_eq!(
        ranks,
        [(0, Some(0), 32_768, 2048), (1, Some(1), 32_768, 2048)]
    );
    running.stops().await;
}

#[tokio::test]
async fn beats_carry_the_load_of_each_rank_and_grow() {
    let (control, engine, running) = registered().await;
    engine.say(|says| {
        let rank = &mut says.loads["loads"][1];
        rank["num_running_reqs"] = json!(5);
        rank["num_waiting_reqs"] = json!(2);
        rank["num_waiting_uncached_tokens"] = json!(900);
        rank["num_used_tokens"] = json!(7000);
        says.model_info["weight_version"] = json!("step-12");
    });
    control
        .hears_beat("the new load", |beat| {
            let rank = &beat.ranks[1];
            beat.ranks[0].running == 0
                && (rank.running, rank.waiting) == (5, 2)
                && (rank.waiting_uncached_tokens, rank.kv_used_tokens) == (900, 7000)
                && beat
                    .ranks
                    .iter()
                    .all(|r| r.weight_version == "step-12" && r.healthy)
        })
        .await;
    control
        .hears("more beats", |control| control.beats().len() > 3)
        .await;
    let sequences: Vec<u64> = control.beats().iter().map(|b| b.sequence).collect();
    assert!(sequences.windows(2).all(|w| w[0] < w[1]), "{sequences:?}");
    // Beats ask only what no scheduler has to answer.
    let asked = engine.say(|says| says.asked.clone());
    assert_eq!(asked.iter().filter(|p| *p == "/server_info").count(), 1);
    engine.say(|says| says.loads["loads"][1]["num_running_reqs"] = json!(0));
    engine.say(|says| says.loads["loads"][1]["num_waiting_reqs"] = json!(0));
    running.stops().await;
}

#[tokio::test]
async fn an_engine_that_is_not_ready_is_waited_for() {
    let control = FakeControl::start().await;
    let mut engine = FakeEngine::start().await;
    engine.stop().await;
    engine.say(|says| says.ready = 503);
    let running = Running::start(config(&control, &engine));
    tokio::time::sleep(Duration::from_millis(100)).await;
    engine.listen().await;
    while engine.say(|says| says.asked.len()) < 3 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(control.said().is_empty(), "nothing is said of it yet");
    engine.say(|says| says.ready = 200);
    control
        .hears("a beat", |control| !control.beats().is_empty())
        .await;
    running.stops().await;
}

#[tokio::test]
async fn a_control_plane_that_comes_late_or_forgets_is_told_again() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    control.refuse_registrations(Some(Status::unavailable("starting")));
    let running = Running::start(config(&control, &engine));
    control
        .hears("several tries", |control| control.registrations().len() > 2)
        .await;
    control.refuse_registrations(None);
    control
        .hears("a beat", |control| !control.beats().is_empty())
        .await;
    let boot = control.registrations().pop().unwrap().boot_id;
    for _ in 0..3 {
        control.clear();
        control.forget();
        control
            .hears("the registration again", |control| {
                control.registrations().len() == 1
                    && control.beats().iter().any(|b| b.incarnation == 1)
            })
            .await;
        assert_eq!(control.registrations()[0].boot_id, boot);
        control.hears_beat("a beat", |_| true).await;
    }
    running.stops().await;
}

#[tokio::test]
async fn a_control_plane_that_is_away_is_beaten_at_until_it_is_back() {
    let (control, _engine, running) = registered().await;
    control.stop();
    control.forget();
    control.clear();
    tokio::time::sleep(Duration::from_millis(200)).await;
    control.listen().await;
    control
        .hears("the registration and a beat", |control| {
            control.registrations().len() == 1 && control.beats().len() > 1
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn refused_facts_are_offered_again_slowly() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    control.refuse_registrations(Some(Status::invalid_argument("vocab_size: unknown")));
    let running = Running::start(config(&control, &engine));
    control
        .hears("two tries", |control| control.registrations().len() > 1)
        .await;
    control.refuse_registrations(None);
    control
        .hears("a beat", |control| !control.beats().is_empty())
        .await;
    running.stops().await;
}

#[tokio::test]
async fn a_directive_to_register_keeps_the_boot_id_and_one_to_drain_is_followed() {
    let (control, _engine, running) = registered().await;
    let boot = control.registrations()[0].boot_id.clone();
    control.clear();
    control.direct(Directive::Reregister);
    assert_eq!(control.hears_registration().await.boot_id, boot);
    control.direct(Directive::Drain);
    control
        .hears_beat("draining, as it was told", |beat| {
            is(ReplicaState::Draining)(beat) && beat.drain_grace.is_none()
        })
        .await;
    control.direct(Directive::Continue);
    control.hears_beat("ready", is(ReplicaState::Ready)).await;
    running.stops().await;
}

#[tokio::test]
async fn a_restarted_engine_is_a_new_start() {
    let (control, mut engine, running) = registered().await;
    let mut boots = vec![control.registrations()[0].boot_id.clone()];
    for n in 2..4 {
        control.clear();
        engine.restart().await;
        control
            .hears("the new start", |control| {
                control.beats().iter().any(|b| b.incarnation == n)
            })
            .await;
        boots.push(control.registrations().pop().unwrap().boot_id);
    }
    boots.sort();
    boots.dedup();
    assert_eq!(boots.len(), 3);
    running.stops().await;
}

#[tokio::test]
async fn an_engine_that_was_gone_is_a_new_start_whatever_it_says() {
    let (control, mut engine, running) = registered().await;
    engine.stop().await;
    control
        .hears_beat("unhealthy", |beat| {
            beat.state() == ReplicaState::Unhealthy
                && beat.ranks.len() == 2
                && beat.ranks.iter().all(|rank| !rank.healthy)
        })
        .await;
    engine.listen().await;
    control
        .hears("a new incarnation", |control| {
            control.beats().iter().any(|b| b.incarnation == 2)
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn an_engine_that_cannot_tell_its_starts_apart_is_judged_by_its_connection() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    engine.say(|says| says.server_info["startup_time"] = Value::Null);
    let running = Running::start(config(&control, &engine));
    control
        .hears("a beat", |control| !control.beats().is_empty())
        .await;
    engine.drop_connections();
    control
        .hears("a new incarnation", |control| {
            control.beats().iter().any(|b| b.incarnation == 2)
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn a_hiccup_of_the_connection_is_no_restart() {
    let (control, engine, running) = registered().await;
    control.clear();
    engine.drop_connections();
    let read_again =
        |says: &mut engine::Says| says.asked.iter().filter(|p| *p == "/server_info").count() > 1;
    while !engine.say(read_again) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let heard = control.beats().len();
    control
        .hears("more beats", |control| control.beats().len() > heard + 2)
        .await;
    assert!(control.registrations().is_empty());
    assert!(control.beats().iter().all(|b| b.incarnation == 1));
    running.stops().await;
}

#[tokio::test]
async fn changed_facts_of_the_same_start_keep_the_boot_id() {
    let (control, engine, running) = registered().await;
    let boot = control.registrations()[0].boot_id.clone();
    control.clear();
    engine.say(|says| {
        says.models["data"]
            .as_array_mut()
            .unwrap()
            .push(json!({"id": "math", "root": "/adapters/math", "parent": "MODEL_DIR"}));
    });
    control.direct(Directive::Reregister);
    control
        .hears("the adapter", |control| {
            control
                .registrations()
                .iter()
                .any(|r| r.adapters.len() == 1 && r.adapters[0].name == "math")
        })
        .await;
    assert!(control.registrations().iter().all(|r| r.boot_id == boot));
    running.stops().await;
}

#[tokio::test]
async fn a_hung_engine_is_reported_and_recovers_under_its_boot_id() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    let mut config = config(&control, &engine);
    config.timing.probe_timeout = Duration::from_millis(300);
    let running = Running::start(config);
    control.hears_beat("ready", is(ReplicaState::Ready)).await;
    control.clear();
    engine.say(|says| says.hung = true);
    control
        .hears_beat("unhealthy", is(ReplicaState::Unhealthy))
        .await;
    engine.say(|says| says.hung = false);
    control
        .hears_beat("ready", |beat| {
            beat.state() == ReplicaState::Ready && beat.incarnation == 1
        })
        .await;
    assert!(control.registrations().is_empty());
    running.stops().await;
}

#[tokio::test]
async fn a_rank_whose_timestamp_stands_still_is_taken_out_and_then_the_replica() {
    let (control, engine, running) = registered().await;
    engine.say(|says| says.frozen = vec![1]);
    control
        .hears_beat("rank 1 unhealthy, rank 0 well", |beat| {
            beat.state() == ReplicaState::Ready && beat.ranks[0].healthy && !beat.ranks[1].healthy
        })
        .await;
    control
        .hears_beat("the replica unhealthy", is(ReplicaState::Unhealthy))
        .await;
    engine.say(|says| says.frozen.clear());
    control
        .hears_beat("all well", |beat| {
            beat.state() == ReplicaState::Ready && beat.ranks.iter().all(|r| r.healthy)
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn a_paused_engine_is_paused_and_not_dead() {
    let (control, engine, running) = registered().await;
    engine.say(|says| {
        (says.ready, says.health) = (503, None);
        says.frozen = vec![0, 1];
    });
    control
        .hears_beat("paused", |beat| beat.ranks.iter().all(|r| r.paused))
        .await;
    control.clear();
    control
        .hears("many beats", |control| control.beats().len() > 15)
        .await;
    for beat in control.beats() {
        assert_eq!(beat.state(), ReplicaState::Ready);
        assert!(beat.ranks.iter().all(|r| r.paused && r.healthy));
    }
    engine.say(|says| {
        (says.ready, says.health) = (200, Some(200));
        says.frozen.clear();
    });
    control
        .hears_beat("resumed", |beat| {
            beat.ranks.iter().all(|r| !r.paused && r.healthy)
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn an_engine_that_was_told_to_end_is_draining() {
    let (control, engine, running) = registered().await;
    engine.say(|says| (says.ready, says.health) = (503, Some(503)));
    control
        .hears_beat("draining, of its own accord", |beat| {
            is(ReplicaState::Draining)(beat) && beat.drain_grace.is_some()
        })
        .await;
    running.stops().await;
}

#[tokio::test]
async fn a_superseded_sidecar_stops_and_says_why() {
    let (control, _engine, running) = registered().await;
    control.supersede("r1");
    let error = running.ends().await.unwrap_err();
    assert!(matches!(error, SidecarError::Stale(_)), "{error:?}");
}

#[tokio::test]
async fn a_superseded_sidecar_whose_engine_restarted_registers_it() {
    let (control, engine, running) = registered().await;
    // The engine is another start, which no broken connection has told.
    engine.say(|says| says.server_info["startup_time"]["tokenizer_e2e"] = json!(1.25));
    control.clear();
    control.supersede("r1");
    control.hears_registration().await;
    running.stops().await;
}

#[tokio::test]
async fn a_start_that_was_declared_dead_for_good_is_registered_as_another() {
    let (control, _engine, running) = registered().await;
    let boot = control.registrations()[0].boot_id.clone();
    control.clear();
    // As the control plane says it.
    let dead = berth::error::Error::new(berth::error::Reason::IncarnationDead, "dead for good");
    control.refuse_beats(Some(dead.into()));
    control
        .hears("another boot id", |control| {
            control.registrations().iter().any(|r| r.boot_id != boot)
        })
        .await;
    control.refuse_beats(None);
    running.stops().await;
}

#[tokio::test]
async fn a_restarted_sidecar_keeps_the_boot_id_of_a_running_engine() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    let mut last = 0;
    for _ in 0..2 {
        let running = Running::start(config(&control, &engine));
        control
            .hears_beat("a beat", |beat| {
                beat.incarnation == 1 && beat.sequence > last
            })
            .await;
        last = control.beats().last().unwrap().sequence;
        // Killed, without a word.
        running.task.abort();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    control.clear();
}

#[tokio::test]
async fn a_shutdown_drains_then_deregisters() {
    let (control, engine, running) = registered().await;
    engine.say(|says| says.loads["loads"][0]["num_running_reqs"] = json!(1));
    control
        .hears_beat("the running request", |beat| beat.ranks[0].running == 1)
        .await;
    control.clear();
    running.shutdown.cancel();
    control
        .hears("draining", |control| {
            control
                .beats()
                .iter()
                .filter(|b| is(ReplicaState::Draining)(b))
                .count()
                > 2
        })
        .await;
    assert!(
        !control.said().iter().any(|s| matches!(s, Said::Leave(_))),
        "not before the request is finished"
    );
    engine.say(|says| says.loads["loads"][0]["num_running_reqs"] = json!(0));
    running.ends().await.unwrap();
    match control.said().pop() {
        Some(Said::Leave(leave)) => {
            assert_eq!((leave.replica_id.as_str(), leave.incarnation), ("r1", 1));
        }
        other => panic!("{other:?}"),
    }
}

fn grace(beat: &HeartbeatRequest) -> Duration {
    beat.drain_grace.unwrap().try_into().unwrap()
}

#[tokio::test]
async fn a_shutdown_tells_a_grace_that_runs_out_while_there_is_work() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    engine.say(|says| says.loads["loads"][0]["num_running_reqs"] = json!(1));
    let mut config = config(&control, &engine);
    config.drain_timeout = Duration::from_secs(6);
    let running = Running::start(config);
    control.hears_beat("a beat", |_| true).await;
    control.clear();
    running.shutdown.cancel();
    control
        .hears("the grace's end", |control| {
            let beats = control.beats();
            beats
                .last()
                .is_some_and(|beat| beat.drain_grace == Some(prost_types::Duration::default()))
        })
        .await;
    let graces: Vec<Duration> = control
        .beats()
        .iter()
        .filter(|beat| is(ReplicaState::Draining)(beat))
        .map(grace)
        .collect();
    assert!(graces[0] > Duration::ZERO && graces[0] <= Duration::from_secs(3));
    assert!(graces.windows(2).all(|w| w[0] >= w[1]), "{graces:?}");
    // The turn in flight may finish all the same.
    assert!(!control.said().iter().any(|s| matches!(s, Said::Leave(_))));
    engine.say(|says| says.loads["loads"][0]["num_running_reqs"] = json!(0));
    running.ends().await.unwrap();
    assert!(matches!(control.said().pop(), Some(Said::Leave(_))));
}

#[tokio::test]
async fn a_shutdown_waits_for_what_is_on_its_way_to_the_engine() {
    let (control, _engine, running) = registered().await;
    control.in_flight(1);
    control.clear();
    running.shutdown.cancel();
    control
        .hears("several beats", |control| control.beats().len() > 5)
        .await;
    let gone = |said: &Said| matches!(said, Said::Leave(_));
    assert!(!control.said().iter().any(gone), "the engine alone is idle");
    assert!(grace(&control.beats()[5]) > Duration::ZERO);
    control.clear();
    control.in_flight(0);
    running.ends().await.unwrap();
    let beats = control.beats();
    let closed = beats.iter().filter(|beat| grace(beat).is_zero()).count();
    // The first shuts the door, the second finds that nobody slipped through.
    assert!(closed >= 2, "{beats:?}");
    assert!(control.said().last().is_some_and(gone));
}

#[tokio::test]
async fn a_shutdown_with_work_left_ends_in_time() {
    let control = FakeControl::start().await;
    let engine = FakeEngine::start().await;
    engine.say(|says| says.loads["loads"][0]["num_running_reqs"] = json!(1));
    let mut config = config(&control, &engine);
    config.drain_timeout = Duration::from_secs(3);
    let running = Running::start(config);
    control
        .hears("a beat", |control| !control.beats().is_empty())
        .await;
    running.stops().await;
    // A beat that the limit cut off may be heard after it.
    assert!(
        control
            .said()
            .iter()
            .any(|said| matches!(said, Said::Leave(_)))
    );
}

#[tokio::test]
async fn a_shutdown_before_anything_is_registered_says_nothing() {
    let control = FakeControl::start().await;
    let mut engine = FakeEngine::start().await;
    engine.stop().await;
    let running = Running::start(config(&control, &engine));
    tokio::time::sleep(Duration::from_millis(30)).await;
    running.stops().await;
    assert!(control.said().is_empty());
}

#[tokio::test]
async fn eight_sidecars_live_in_one_process() {
    let control = FakeControl::start().await;
    let mut engines = Vec::new();
    let mut running = Vec::new();
    for n in 0..8 {
        let engine = FakeEngine::start().await;
        let mut config = config(&control, &engine);
        config.replica_id = format!("r{n}");
        running.push(Running::start(config));
        engines.push(engine);
    }
    control
        .hears("all eight", |control| {
            (0..8).all(|n| {
                let id = format!("r{n}");
                control.beats().iter().any(|b| b.replica_id == id)
            })
        })
        .await;
    for one in running {
        one.stops().await;
    }
    let left = control
        .said()
        .iter()
        .filter(|s| matches!(s, Said::Leave(_)))
        .count();
    assert_eq!(left, 8);
}

#[tokio::test]
async fn nonsense_is_refused_with_all_its_faults() {
    let mut config = SidecarConfig::new("nowhere", "https://x", "a b");
    config.labels.insert(String::new(), String::new());
    let Err(SidecarError::Config(faults)) = Sidecar::new(config).map(|_| ()) else {
        panic!("it must be refused");
    };
    for word in ["nowhere", "--engine-url", "--replica-id", "--label"] {
        assert!(faults.contains(word), "{word}: {faults}");
    }
}
