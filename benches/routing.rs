//! How long a decision takes, against the number of ranks and of pins; what it
//! allocates; what a pin costs.
//!
//! `cargo bench --bench routing` prints three tables. Times are of one thread that
//! does nothing else; the last table has several threads on different keys.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bench"
)]

use std::{
    alloc::System,
    collections::{BTreeMap, HashSet},
    hint::black_box,
    sync::Arc,
    time::Duration,
};

use berth::{
    call::{LogprobMode, RoutingPolicy},
    fleet::{
        facts::{Accelerator, Capabilities, EngineKind, RankFacts, ReplicaFacts},
        snapshot::{RankSlot, RankState, RankView, ReplicaView, Snapshot},
    },
    ids::{BootId, Incarnation, ReplicaId, Target},
    routing::{Hints, Needs, PinKey, RouteRequest, Router, RouterConfig},
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::time::Instant;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const RANKS_OF_A_REPLICA: u32 = 8;
const ROUNDS: u64 = 20_000;

fn fleet(ranks: u32) -> Snapshot {
    let views = (0..ranks)
        .map(|slot| {
            let (replica, rank) = (slot / RANKS_OF_A_REPLICA, slot % RANKS_OF_A_REPLICA);
            let id = ReplicaId::new(format!("replica-{replica}"));
            let facts = RankFacts {
                rank,
                url: "http://127.0.0.1:1".into(),
                engine_rank: rank,
                gpu_uuids: Vec::new(),
                kv_capacity: 375_000,
                max_running: 0,
            };
            (id, rank, slot, facts)
        })
        .collect::<Vec<_>>();
    let mut replicas: BTreeMap<ReplicaId, Arc<ReplicaView>> = BTreeMap::new();
    let views = views
        .into_iter()
        .map(|(id, rank, slot, facts)| {
            let replica = replicas.entry(id.clone()).or_insert_with(|| {
                Arc::new(ReplicaView {
                    facts: replica_facts(&id, &facts),
                    incarnation: Incarnation(1),
                })
            });
            RankView {
                slot: RankSlot(slot),
                target: Target {
                    replica: id,
                    incarnation: Incarnation(1),
                    rank,
                },
                facts,
                replica: Arc::clone(replica),
                state: RankState::Open,
                weight_version: "1".into(),
                load: Arc::default(),
            }
        })
        .collect();
    Snapshot::build(views, HashSet::new(), &Snapshot::default())
}

fn replica_facts(id: &ReplicaId, rank: &RankFacts) -> ReplicaFacts {
    ReplicaFacts {
        id: id.clone(),
        boot: BootId::new("b"),
        url: "http://127.0.0.1:1".into(),
        engine: EngineKind::Sglang,
        engine_version: String::new(),
        model: "m".into(),
        vocab_size: None,
        context_length: 131_072,
        weight_version: "1".into(),
        adapters: Vec::new(),
        capabilities: Capabilities::default(),
        accelerator: Accelerator::default(),
        ranks: vec![rank.clone()],
        page_size: 1,
        logprob_mode: LogprobMode::Processed,
        labels: BTreeMap::new(),
        engine_start: None,
    }
}

fn key(i: u64) -> PinKey {
    PinKey(xxhash_rust::xxh3::xxh3_128(&i.to_le_bytes()))
}

fn request(needs: &Needs, key: PinKey) -> RouteRequest<'_> {
    RouteRequest {
        key: Some(key),
        request: key.0,
        samples: 1,
        prompt_tokens: 4096,
        needs,
        policy: RoutingPolicy::Affinity,
        avoid: &[],
        hints: Hints::default(),
    }
}

/// Percentiles in nanoseconds.
struct Times(Vec<u64>);

impl Times {
    fn of(rounds: u64, mut one: impl FnMut(u64)) -> Self {
        let mut times: Vec<u64> = (0..rounds)
            .map(|round| {
                let begun = Instant::now();
                one(round);
                begun.elapsed().as_nanos() as u64
            })
            .collect();
        times.sort_unstable();
        Self(times)
    }

    fn at(&self, share: f64) -> f64 {
        let place = ((self.0.len() - 1) as f64 * share) as usize;
        self.0[place] as f64 / 1000.0
    }
}

/// Pins that are all live and noted as changed, as while a store keeps them.
fn router(fleet: &Snapshot, needs: &Needs, pins: u64) -> Router {
    let router = Router::new(RouterConfig {
        // Shards fill unevenly: none loses a pin.
        max_pins: (pins + pins / 20 + 20_000) as usize,
        keep_changes: true,
        ..RouterConfig::default()
    });
    let now = Instant::now();
    for i in 0..pins {
        let decision = router.route(fleet, &request(needs, key(i)), now).unwrap();
        let slot = decision.slot;
        drop(decision);
        router.grown(fleet, key(i), slot, 4607, None, now);
    }
    router
}

fn main() {
    // `cargo bench` passes flags that say nothing here.
    let quick = std::env::args().any(|arg| arg == "--quick" || arg == "--test");
    let most: u64 = if quick { 10_000 } else { 1_000_000 };
    let needs = Needs {
        model: "m".into(),
        context: 5000,
        ..Needs::default()
    };
    let clock = Times::of(ROUNDS, |_| ());
    println!(
        "reading the clock twice: p50 {:.3} us (in every figure below)\n",
        clock.at(0.5)
    );
    println!(
        "ranks     pins  pinned p50/p99 us   new key p50/p99 us  no key p50 us  allocations pinned"
    );
    for ranks in [8, 64, 512] {
        let fleet = fleet(ranks);
        for pins in [1000, 100_000, 1_000_000] {
            if pins > most {
                continue;
            }
            let begun = ALLOCATOR.stats();
            let router = router(&fleet, &needs, pins);
            let built = ALLOCATOR.stats() - begun;
            let now = Instant::now();
            let pinned = |round: u64| {
                // Far apart, so that no pin is in the processor's cache.
                let key = key(round.wrapping_mul(7919) % pins);
                black_box(router.route(&fleet, &request(&needs, key), now)).unwrap();
            };
            (0..1000).for_each(pinned);
            let before = ALLOCATOR.stats();
            (0..ROUNDS).for_each(pinned);
            let allocated = (ALLOCATOR.stats() - before).allocations;
            let warm = Times::of(ROUNDS, pinned);
            let new = Times::of(2000, |round| {
                let key = key((1 << 40) + round);
                black_box(router.route(&fleet, &request(&needs, key), now)).unwrap();
            });
            let without = Times::of(2000, |round| {
                let request = RouteRequest {
                    key: None,
                    ..request(&needs, key((1 << 50) + round))
                };
                black_box(router.route(&fleet, &request, now)).unwrap();
            });
            println!(
                "{ranks:>5} {pins:>8}  {:>8.2} / {:<8.2}  {:>8.2} / {:<8.2}  {:>12.2}  {allocated:>8} of {ROUNDS}",
                warm.at(0.5),
                warm.at(0.99),
                new.at(0.5),
                new.at(0.99),
                without.at(0.5),
            );
            if pins >= 100_000 {
                let live = built.bytes_allocated - built.bytes_deallocated;
                println!(
                    "               {:.0} bytes a pin, changes and loads included",
                    live as f64 / pins as f64
                );
            }
            assert_eq!(allocated, 0, "the pinned path allocates");
        }
    }
    threads(&needs, most);
}

/// Decisions of pinned keys by several threads, while another places new ones.
fn threads(needs: &Needs, pins: u64) {
    let fleet = fleet(512);
    let router = router(&fleet, needs, pins / 2);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "\n512 ranks, {} pins, {cores} cores: pinned decisions a second",
        pins / 2
    );
    for workers in [1, 2, 4] {
        for placing in [false, true] {
            let stop = std::sync::atomic::AtomicBool::new(false);
            let load = |o| std::sync::atomic::AtomicBool::load(&stop, o);
            let begun = Instant::now();
            let done: u64 = std::thread::scope(|scope| {
                let placer = placing.then(|| {
                    scope.spawn(|| {
                        let mut round = 1 << 45;
                        while !load(std::sync::atomic::Ordering::Relaxed) {
                            round += 1;
                            let now = Instant::now();
                            black_box(router.route(&fleet, &request(needs, key(round)), now))
                                .unwrap();
                        }
                    })
                });
                let workers: Vec<_> = (0..workers)
                    .map(|worker: u64| {
                        let (fleet, router) = (&fleet, &router);
                        scope.spawn(move || {
                            let (mut round, begun) = (0u64, Instant::now());
                            while begun.elapsed() < Duration::from_millis(500) {
                                let now = Instant::now();
                                for _ in 0..64 {
                                    let at = (round.wrapping_mul(7919) + worker * 13) % (pins / 2);
                                    let request = request(needs, key(at));
                                    black_box(router.route(fleet, &request, now)).unwrap();
                                    round += 1;
                                }
                            }
                            round
                        })
                    })
                    .collect();
                let done = workers.into_iter().map(|w| w.join().unwrap()).sum();
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
                if let Some(placer) = placer {
                    placer.join().unwrap();
                }
                done
            });
            println!(
                "{workers} threads{}: {:.2} million",
                if placing {
                    ", one more places new keys"
                } else {
                    ""
                },
                done as f64 / begun.elapsed().as_secs_f64() / 1e6
            );
        }
    }
}
