//! A partition between one sidecar and the control plane, while its engine goes on
//! to serve: the lease is what may suffer, never a turn.

use std::{collections::BTreeSet, time::Duration};

use berth::{
    engine::sim::{SimConfig, SimEngine, SimHandle},
    proto::{
        ReplicaHealth, SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::{
    eventually,
    load::{Load, Shape, detours, moves},
    process::{Process, Serve},
    proxy::{Manner, Proxy},
    sidecar, time,
    trainer::Turn,
    watcher::{Watcher, healthy, operator, replicas},
};

const STEP: Duration = Duration::from_millis(2);

/// Tokens that take minutes.
const LONG: u32 = 100_000;
/// The length of a prompt that no trainer has.
const SHORT: u32 = 8;

/// Three replicas; the network of the first one's sidecar can be cut.
struct Fleet {
    serve: Serve,
    proxy: Proxy,
    watcher: Watcher,
    engines: Vec<SimHandle>,
    _sidecars: Vec<Process>,
}

impl Fleet {
    async fn start(interval: Duration) -> Self {
        let interval = format!("{}ms", interval.as_millis());
        let serve = Serve::start(&["--heartbeat-interval", &interval]);
        let proxy = Proxy::start(&serve.url).await;
        let (mut engines, mut sidecars) = (Vec::new(), Vec::new());
        for i in 0..3 {
            let engine = SimEngine::start(SimConfig {
                step: Some(STEP),
                time_scale: 1.0,
                context_length: 4 * LONG,
                incremental_streaming_output: true,
                ..SimConfig::instant()
            })
            .await
            .unwrap();
            let control_plane = if i == 0 { &proxy.url } else { &serve.url };
            sidecars.push(sidecar(control_plane, &engine.url(), &format!("r{i}")));
            engines.push(engine);
        }
        healthy(&serve.url, 3).await;
        Self {
            watcher: Watcher::start(&serve.url),
            serve,
            proxy,
            engines,
            _sidecars: sidecars,
        }
    }

    fn load(&self) -> Load {
        let shape = Shape {
            trainers: 9,
            turns: usize::MAX,
            patience: Duration::from_secs(30),
        };
        Load::start(&self.serve.url, shape)
    }

    /// After it is healed. Returns how long it takes.
    async fn heals(&self) -> Duration {
        let begun = Instant::now();
        self.proxy.heal();
        healthy(&self.serve.url, 3).await;
        begun.elapsed()
    }

    /// Whatever became of the lease: no turn has failed, nobody else noticed, one
    /// end of a lease makes one new incarnation, and only trajectories whose start
    /// is over have moved. Returns whether the lease has ended.
    fn check(&self, turns: &[Turn]) -> bool {
        assert!(turns.iter().all(|turn| turn.failed_calls == 0));
        let seen = self.watcher.seen();
        for (id, seen) in &seen {
            let expected = seen.dead.len() + 1;
            assert_eq!(seen.incarnations.len(), expected, "{id}: {seen:?}");
            assert!(seen.dead.is_empty() || id == "r0", "{id}: {seen:?}");
        }
        assert!(seen["r0"].dead.len() <= 1, "{seen:?}");
        for (from, to) in moves(turns) {
            assert!(
                seen[&from.replica].dead.contains(&from.incarnation),
                "{from:?} -> {to:?}"
            );
        }
        for engine in &self.engines {
            assert!(engine.is_alive());
        }
        !seen["r0"].dead.is_empty()
    }
}

async fn heartbeats_are_cut(manner: Manner) {
    let partition = time("BERTH_CHAOS_PARTITION", Duration::from_secs(3));
    // Ten seconds at the interval that is the default.
    let interval = (partition / 5).max(Duration::from_millis(750));
    let fleet = Fleet::start(interval).await;
    let load = fleet.load();
    load.goes_on(3).await;
    fleet.proxy.cut(manner);
    tokio::time::sleep(partition).await;
    let took = fleet.heals().await;
    load.goes_on(3).await;
    let turns = load.stop().await;
    let ended = fleet.check(&turns);
    println!(
        "partition of {partition:?}, beats every {interval:?}, {manner:?}: {} turns, 0 failed, {} \
         detours, {} moves; the lease has {}; healthy {took:.2?} after it was healed",
        turns.len(),
        detours(&turns),
        moves(&turns).len(),
        if ended { "ended" } else { "survived" },
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_delays_loses_no_pin_and_fails_no_turn() {
    heartbeats_are_cut(Manner::Delays).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_swallows_connections_loses_no_pin_and_fails_no_turn() {
    heartbeats_are_cut(Manner::Swallows).await;
}

/// A generation that nobody waits for the end of.
async fn long(url: String, n: u32) {
    let channel = Channel::from_shared(url).unwrap().connect_lazy();
    let request = SampleRequest {
        cache_affinity_key: Some(format!("long{n}")),
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: vec![150_000 + n; SHORT as usize],
        })),
        sampling: Some(Sampling {
            max_tokens: Some(LONG),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    };
    let ended = SamplingServiceClient::new(channel).sample(request).await;
    panic!("it ended: {ended:?}");
}

/// Those that an engine has ever been sent, and whether they live.
fn long_ones(engine: &SimHandle) -> Vec<bool> {
    let seen = engine.history().into_iter();
    seen.filter(|r| r.prompt_tokens == SHORT as usize)
        .map(|r| r.started.is_some() && r.ended.is_none())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generation_that_goes_on_keeps_a_lease_through_a_partition_longer_than_it() {
    let partition = time("BERTH_CHAOS_PARTITION", Duration::from_secs(3));
    let interval = partition / 10;
    let fleet = Fleet::start(interval).await;
    // One for each replica, for longer than the partition and what is around it.
    let mut generations = Vec::new();
    for n in 0..3 {
        let url = fleet.serve.url.clone();
        generations.push(tokio::spawn(long(url, n)));
        let begun = fleet.engines.iter();
        let begun = || begun.clone().map(|e| e.counters().started).sum::<u64>();
        eventually("it has begun", async || begun() == u64::from(n) + 1).await;
    }
    let load = fleet.load();
    load.goes_on(2).await;
    fleet.proxy.cut(Manner::Swallows);
    tokio::time::sleep(partition).await;
    let took = fleet.heals().await;
    load.goes_on(2).await;
    let turns = load.stop().await;
    assert!(!fleet.check(&turns), "the lease has ended");
    assert!(moves(&turns).is_empty());
    let seen = fleet.watcher.seen();
    assert!(seen["r0"].suspect, "nothing was cut");
    for (engine, generation) in fleet.engines.iter().zip(generations) {
        // Of each replica its one, all the time.
        assert_eq!(long_ones(engine), [true]);
        assert!(!generation.is_finished());
        generation.abort();
    }
    println!(
        "partition of {partition:?}, a lease of {:?} kept by the data path: {} turns, 0 failed, {} \
         detours; healthy {took:.2?} after it was healed",
        interval * 6,
        turns.len(),
        detours(&turns)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_ends_in_a_partition_makes_one_new_incarnation_and_moves_its_keys_once() {
    let partition = time("BERTH_CHAOS_PARTITION", Duration::from_secs(3));
    let interval = partition / 12;
    let fleet = Fleet::start(interval).await;
    let load = fleet.load();
    load.goes_on(2).await;
    fleet.proxy.cut(Manner::Swallows);
    tokio::time::sleep(partition).await;
    let mut operator = operator(&fleet.serve.url);
    eventually("its lease has ended", async || {
        let replicas = replicas(&mut operator).await;
        replicas
            .iter()
            .any(|r| r.replica_id == "r0" && r.health() == ReplicaHealth::Dead)
    })
    .await;
    load.goes_on(2).await;
    let took = fleet.heals().await;
    load.goes_on(3).await;
    let turns = load.stop().await;
    assert!(fleet.check(&turns));
    let moved = moves(&turns);
    // Those that lived there, each once, and none of them back.
    let keys: BTreeSet<_> = moved.iter().map(|(from, _)| &from.key).collect();
    assert_eq!(keys.len(), moved.len());
    assert!(!moved.is_empty());
    for (from, to) in &moved {
        assert_eq!(from.replica, "r0");
        assert_ne!(to.replica, "r0");
    }
    println!(
        "partition of {partition:?} and more, a lease of {:?}: {} turns, 0 failed, {} detours, {} \
         moves; healthy {took:.2?} after it was healed",
        interval * 6,
        turns.len(),
        detours(&turns),
        moved.len()
    );
}
