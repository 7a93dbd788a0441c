//! The rules, one by one, on a fleet made by hand.

mod adapters;
mod explain;
mod groups;
mod kv;
mod last_resort;
mod moving;
mod prefixes;
mod refuge;

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    sync::Arc,
};

use super::*;
use crate::routing::{Hints, Needs, Siblings, pins::PinView};
use crate::{
    call::{LogprobMode, WeightsConstraint},
    fleet::{
        facts::{AdapterFacts, RankFacts, ReplicaFacts, tests::plain},
        snapshot::{RankLoad, RankSlot, ReplicaView},
    },
    ids::{Incarnation, ReplicaId, Target},
};

/// A fleet that a test can change.
struct Fleet {
    ranks: Vec<Fake>,
    snapshot: Snapshot,
}

struct Fake {
    slot: u32,
    replica: String,
    incarnation: u64,
    rank: u32,
    capacity: u64,
    state: RankState,
    weights: &'static str,
    adapters: Vec<AdapterFacts>,
    load: Arc<RankLoad>,
}

impl Fake {
    /// Its only rank.
    fn new(slot: u32, replica: String) -> Self {
        Self {
            slot,
            replica,
            incarnation: 1,
            rank: 0,
            capacity: 375_000,
            state: RankState::Open,
            weights: "1",
            adapters: Vec::new(),
            load: Arc::default(),
        }
    }
}

impl Fleet {
    fn new(replicas: u32, ranks: u32) -> Self {
        let ranks = (0..replicas * ranks)
            .map(|i| Fake {
                rank: i % ranks,
                ..Fake::new(i, format!("r{}", i / ranks))
            })
            .collect();
        let mut fleet = Self {
            ranks,
            snapshot: Snapshot::default(),
        };
        fleet.publish();
        fleet
    }

    fn publish(&mut self) {
        let views = self
            .ranks
            .iter()
            .map(|f| {
                let facts = RankFacts {
                    rank: f.rank,
                    url: "http://127.0.0.1:1".into(),
                    engine_rank: f.rank,
                    gpu_uuids: Vec::new(),
                    kv_capacity: f.capacity,
                    max_running: 0,
                };
                RankView {
                    slot: RankSlot(f.slot),
                    target: Target {
                        replica: ReplicaId::new(f.replica.clone()),
                        incarnation: Incarnation(f.incarnation),
                        rank: f.rank,
                    },
                    replica: Arc::new(ReplicaView {
                        facts: ReplicaFacts {
                            adapters: f.adapters.clone(),
                            ..replica_facts(&f.replica, facts.clone())
                        },
                        incarnation: Incarnation(f.incarnation),
                    }),
                    facts,
                    state: f.state.clone(),
                    weight_version: f.weights.into(),
                    load: Arc::clone(&f.load),
                }
            })
            .collect();
        self.snapshot = Snapshot::build(views, HashSet::new(), &self.snapshot);
    }

    fn set(&mut self, slot: u32, change: impl FnOnce(&mut Fake)) {
        change(self.ranks.iter_mut().find(|r| r.slot == slot).unwrap());
        self.publish();
    }

    /// The rank dies; its successor, if any, has another slot.
    fn lose(&mut self, slot: u32) {
        self.ranks.retain(|r| r.slot != slot);
        self.publish();
    }

    fn in_flight(&self) -> Vec<u64> {
        self.ranks.iter().map(|r| r.load.in_flight()).collect()
    }

    fn live_pins(&self) -> Vec<u64> {
        self.ranks.iter().map(|r| r.load.live_pins()).collect()
    }
}

fn replica_facts(id: &str, rank: RankFacts) -> ReplicaFacts {
    ReplicaFacts {
        context_length: 16_384,
        ranks: vec![rank],
        logprob_mode: LogprobMode::Processed,
        ..plain(id, "b")
    }
}

fn needs() -> Needs {
    Needs {
        model: "m".into(),
        context: 100,
        ..Needs::default()
    }
}

fn pin(i: u64) -> PinKey {
    PinKey(xxhash_rust::xxh3::xxh3_128(&i.to_le_bytes()))
}

fn request(needs: &Needs, key: Option<u64>) -> RouteRequest<'_> {
    RouteRequest {
        key: key.map(pin),
        request: xxhash_rust::xxh3::xxh3_128(&key.unwrap_or(7).to_be_bytes()),
        samples: 1,
        prompt_tokens: 50,
        needs,
        policy: RoutingPolicy::Affinity,
        avoid: &[],
        hints: Hints::default(),
    }
}

fn router() -> Router {
    Router::new(RouterConfig::default())
}

fn spread(counts: &[u64]) -> u64 {
    counts.iter().max().unwrap() - counts.iter().min().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_pinned_key_stays_whatever_the_load() {
    let (fleet, router, needs) = (Fleet::new(4, 2), router(), needs());
    let now = Instant::now();
    let first = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_eq!(first.reason, RouteReason::NewKey);
    let _burden = fleet.snapshot.rank(first.slot).unwrap().load.take(1000);
    for _ in 0..10 {
        let next = router
            .route(&fleet.snapshot, &request(&needs, Some(1)), now)
            .unwrap();
        assert_eq!((next.slot, next.reason), (first.slot, RouteReason::Pinned));
    }
}

#[tokio::test(start_paused = true)]
async fn two_hundred_sequential_new_keys_on_an_idle_fleet_spread_evenly() {
    let (fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    for key in 0..200 {
        // Each is answered before the next comes.
        drop(router.route(&fleet.snapshot, &request(&needs, Some(key)), Instant::now()));
    }
    assert_eq!(fleet.live_pins(), [25; 8]);
    assert_eq!(fleet.in_flight(), [0; 8]);
}

#[tokio::test(start_paused = true)]
async fn ties_do_not_go_to_the_first_rank() {
    let needs = needs();
    let mut first = HashSet::new();
    for key in 0..64 {
        let (fleet, router) = (Fleet::new(8, 1), router());
        let decision = router
            .route(&fleet.snapshot, &request(&needs, Some(key)), Instant::now())
            .unwrap();
        first.insert(decision.slot);
    }
    assert_eq!(first.len(), 8);
}

#[test]
fn sixty_four_new_keys_at_once_spread_and_two_first_turns_of_one_key_share_a_rank() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    let now = Instant::now();
    let (fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let barrier = std::sync::Barrier::new(16);
    // Every key twice, in two threads at once.
    let chosen: Vec<Vec<Decision>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16u64)
            .map(|t| {
                let (fleet, router, needs, barrier) = (&fleet, &router, &needs, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    (0..8)
                        .map(|i| {
                            let key = (t / 2) * 8 + i;
                            router
                                .route(&fleet.snapshot, &request(needs, Some(key)), now)
                                .unwrap()
                        })
                        .collect()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for pair in chosen.chunks(2) {
        let slots = |d: &[Decision]| d.iter().map(|d| d.slot).collect::<Vec<_>>();
        assert_eq!(slots(&pair[0]), slots(&pair[1]));
    }
    assert_eq!(fleet.live_pins().iter().sum::<u64>(), 64);
    // A second turn that comes between weighs on its rank as well.
    assert!(spread(&fleet.live_pins()) <= 4, "{:?}", fleet.live_pins());
}

#[tokio::test(start_paused = true)]
async fn load_is_weighted_by_capacity_and_by_samples() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    fleet.set(1, |r| r.capacity = 750_000);
    for key in 0..30 {
        drop(router.route(&fleet.snapshot, &request(&needs, Some(key)), Instant::now()));
    }
    assert_eq!(fleet.live_pins(), [10, 20]);

    let (fleet, router) = (Fleet::new(2, 1), self::router());
    let _eight = router
        .route(
            &fleet.snapshot,
            &RouteRequest {
                samples: 8,
                ..request(&needs, None)
            },
            Instant::now(),
        )
        .unwrap();
    let singles: Vec<_> = (0..8)
        .map(|key| {
            router
                .route(&fleet.snapshot, &request(&needs, Some(key)), Instant::now())
                .unwrap()
        })
        .collect();
    let mut counts = fleet.in_flight();
    counts.sort_unstable();
    assert_eq!(counts.iter().sum::<u64>(), 16);
    assert!(counts[0] >= 5, "eight samples weigh as eight: {counts:?}");
    drop(singles);
}

#[tokio::test(start_paused = true)]
async fn a_lost_rank_moves_its_keys_only_and_none_moves_back() {
    let (mut fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let now = Instant::now();
    let home = |fleet: &Fleet, key| {
        router
            .route(&fleet.snapshot, &request(&needs, Some(key)), now)
            .map(|d| (d.slot, d.reason))
            .unwrap()
    };
    let before: Vec<_> = (0..80).map(|k| home(&fleet, k).0).collect();
    fleet.lose(3);
    let after: Vec<_> = (0..80).map(|k| home(&fleet, k)).collect();
    for (was, (is, reason)) in before.iter().zip(&after) {
        if *was == RankSlot(3) {
            assert_ne!(*is, RankSlot(3));
            assert_eq!(*reason, RouteReason::ReplicaLost);
        } else {
            assert_eq!((was, *reason), (is, RouteReason::Pinned));
        }
    }
    // The replica is back as a new incarnation, in a new slot.
    fleet.ranks.push(Fake {
        incarnation: 2,
        ..Fake::new(100, "r3".to_owned())
    });
    fleet.publish();
    for (key, (was, _)) in (0..80).zip(&after) {
        assert_eq!(home(&fleet, key), (*was, RouteReason::Pinned));
    }
    // New keys find it.
    assert_eq!(home(&fleet, 1000).0, RankSlot(100));
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_refused_the_request_loses_the_key_in_the_same_step() {
    let (fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let first = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    let avoid = [first.slot];
    let second = router
        .route(
            &fleet.snapshot,
            &RouteRequest {
                avoid: &avoid,
                ..request(&needs, Some(1))
            },
            now,
        )
        .unwrap();
    assert_ne!(second.slot, first.slot);
    assert_eq!(second.reason, RouteReason::ReplicaLost);
    let third = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_eq!(
        (third.slot, third.reason),
        (second.slot, RouteReason::Pinned)
    );
}

#[tokio::test(start_paused = true)]
async fn a_pause_is_a_detour_and_keeps_the_home() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let home = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap()
        .slot;
    fleet.set(home.0, |r| r.state = RankState::Closed("paused"));
    let away = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_ne!(away.slot, home);
    assert_eq!(away.reason, RouteReason::Detour);
    fleet.set(home.0, |r| r.state = RankState::Open);
    let back = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_eq!((back.slot, back.reason), (home, RouteReason::Pinned));
}

/// The first turn of a detour is cold; the others find its history where it went,
/// though others come and go.
#[tokio::test(start_paused = true)]
async fn the_turns_of_one_detour_meet_on_one_rank() {
    let (mut fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let now = Instant::now();
    let mut homes = Vec::new();
    for key in 0..64 {
        let at = router.route(&fleet.snapshot, &request(&needs, Some(key)), now);
        homes.push(at.unwrap().slot);
    }
    let home = homes[0];
    fleet.set(home.0, |r| r.state = RankState::Paused);
    let mut away: Vec<BTreeSet<RankSlot>> = vec![BTreeSet::new(); 64];
    let mut running = VecDeque::new();
    for turn in 0..2000 {
        let key = turn * 7 % 64;
        let at = router
            .route(&fleet.snapshot, &request(&needs, Some(key)), now)
            .unwrap();
        if homes[key as usize] == home {
            assert_eq!(at.reason, RouteReason::Detour);
            away[key as usize].insert(at.slot);
        }
        running.push_back(at);
        if running.len() > 12 {
            running.pop_front();
        }
    }
    let detours: Vec<_> = away.iter().filter(|ranks| !ranks.is_empty()).collect();
    assert!(detours.len() >= 4);
    assert!(detours.iter().all(|ranks| ranks.len() == 1), "{detours:?}");
    let ranks: BTreeSet<_> = detours.iter().flat_map(|ranks| ranks.iter()).collect();
    assert!(ranks.len() > 1, "all went to one rank");
}

#[tokio::test(start_paused = true)]
async fn a_detour_goes_round_a_busy_rank() {
    let (mut fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let route = |fleet: &Fleet| {
        router
            .route(&fleet.snapshot, &request(&needs, Some(1)), now)
            .unwrap()
    };
    let home = route(&fleet).slot;
    fleet.set(home.0, |r| r.state = RankState::Paused);
    let first = route(&fleet).slot;
    let _busy: Vec<_> = (0..50)
        .map(|_| fleet.ranks[first.0 as usize].load.take(1))
        .collect();
    assert_ne!(route(&fleet).slot, first);
}

#[tokio::test(start_paused = true)]
async fn a_draining_rank_keeps_its_keys_and_takes_no_new_one_until_the_grace_is_over() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let home = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap()
        .slot;
    fleet.set(home.0, |r| r.state = RankState::PinnedOnly);
    let again = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_eq!((again.slot, again.reason), (home, RouteReason::Pinned));
    for key in 10..20 {
        let new = router
            .route(&fleet.snapshot, &request(&needs, Some(key)), now)
            .unwrap();
        assert_ne!(new.slot, home);
    }
    fleet.set(home.0, |r| r.state = RankState::Drained);
    let moved = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_ne!(moved.slot, home);
    assert_eq!(moved.reason, RouteReason::Draining);
}

#[tokio::test(start_paused = true)]
async fn weights_that_the_home_does_not_serve_go_elsewhere_and_keep_the_pin() {
    let (mut fleet, router, mut needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let home = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap()
        .slot;
    let other = RankSlot(1 - home.0);
    fleet.set(other.0, |r| r.weights = "2");
    needs.weights = Some(WeightsConstraint::AtLeast(2));
    let fresh = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    assert_eq!((fresh.slot, fresh.reason), (other, RouteReason::Weights));
    assert_eq!(router.pin(pin(1), now).unwrap().slot, home);
}

#[tokio::test(start_paused = true)]
async fn keyless_requests_go_to_the_least_in_flight_and_leave_no_pin() {
    let (fleet, router, needs) = (Fleet::new(4, 2), router(), needs());
    let decisions: Vec<_> = (0..64u64)
        .map(|i| {
            let request = RouteRequest {
                request: xxhash_rust::xxh3::xxh3_128(&i.to_le_bytes()),
                ..request(&needs, None)
            };
            router
                .route(&fleet.snapshot, &request, Instant::now())
                .unwrap()
        })
        .collect();
    assert_eq!(fleet.in_flight(), [8; 8]);
    assert!(decisions.iter().all(|d| d.reason == RouteReason::NoKey));
    assert_eq!(router.pins(), 0);
    drop(decisions);
    assert_eq!(fleet.in_flight(), [0; 8]);
}

#[tokio::test(start_paused = true)]
async fn random_follows_the_request_id_and_round_robin_goes_round() {
    let (fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let route = |policy, id: u64| {
        let request = RouteRequest {
            policy,
            request: xxhash_rust::xxh3::xxh3_128(&id.to_le_bytes()),
            ..request(&needs, Some(id))
        };
        router
            .route(&fleet.snapshot, &request, Instant::now())
            .unwrap()
            .slot
            .0 as usize
    };
    let mut counts = [0u32; 8];
    for id in 0..8000 {
        let rank = route(RoutingPolicy::Random, id);
        counts[rank] += 1;
        assert_eq!(rank, route(RoutingPolicy::Random, id), "repeatable");
    }
    assert!(counts.iter().all(|c| (850..1150).contains(c)), "{counts:?}");
    let round: Vec<_> = (0..8)
        .map(|id| route(RoutingPolicy::RoundRobin, id))
        .collect();
    assert_eq!(HashSet::<usize>::from_iter(round).len(), 8);
    assert_eq!(router.pins(), 0, "baselines remember nothing");
}

#[tokio::test(start_paused = true)]
async fn an_idle_trajectory_frees_its_load_and_keeps_its_home() {
    let (fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let start = Instant::now();
    let home = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), start)
        .unwrap()
        .slot;
    router.grown(&fleet.snapshot, pin(1), home, 4607, None, start);
    let load = &fleet.snapshot.rank(home).unwrap().load;
    assert_eq!((load.live_pins(), load.live_tokens()), (1, 4607));
    let later = start + RouterConfig::default().pin_ttl;
    router.sweep(later);
    assert_eq!((load.live_pins(), load.live_tokens()), (0, 0));
    let again = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), later)
        .unwrap();
    assert_eq!((again.slot, again.reason), (home, RouteReason::Pinned));
    assert_eq!((load.live_pins(), load.live_tokens()), (1, 4607));
    assert!(router.finish(pin(1)));
    assert!(!router.finish(pin(1)));
    assert_eq!((load.live_pins(), load.live_tokens()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn what_the_cache_should_hold_is_bounded_by_the_prompt_and_the_page() {
    let (fleet, router, needs) = (Fleet::new(1, 1), router(), needs());
    let now = Instant::now();
    let turn = |prompt_tokens| {
        router
            .route(
                &fleet.snapshot,
                &RouteRequest {
                    prompt_tokens,
                    ..request(&needs, Some(1))
                },
                now,
            )
            .unwrap()
            .expected_cached_tokens
    };
    assert_eq!(turn(4096), 0);
    router.grown(&fleet.snapshot, pin(1), RankSlot(0), 4607, None, now);
    assert_eq!(turn(4608), 4607);
    assert_eq!(turn(9000), 4607);
    assert_eq!(turn(100), 99);
}

#[tokio::test(start_paused = true)]
async fn a_larger_load_factor_prefers_the_home_and_infinity_always_takes_it() {
    let needs = needs();
    let homes = |fleet: &Fleet, key| {
        let model = &fleet.snapshot.models["m"];
        let member = model.ring.home(pin(key).0).unwrap();
        fleet.snapshot.ranks[model.ranks[member]].slot
    };
    for (factor, at_least) in [(1.25, 50), (f64::INFINITY, 100)] {
        let fleet = Fleet::new(8, 1);
        let router = Router::new(RouterConfig {
            load_factor: factor,
            ..RouterConfig::default()
        });
        let mut at_home = 0;
        for key in 0..100 {
            let slot = router
                .route(&fleet.snapshot, &request(&needs, Some(key)), Instant::now())
                .unwrap()
                .slot;
            at_home += u32::from(slot == homes(&fleet, key));
        }
        assert!(at_home >= at_least, "{factor}: {at_home} of 100");
        if factor.is_finite() {
            let most = fleet.live_pins().into_iter().max().unwrap();
            assert!(most <= 16, "bounded: {:?}", fleet.live_pins());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_million_keys_fill_no_more_than_the_table() {
    const MOST: usize = 640;
    let (fleet, needs) = (Fleet::new(2, 1), needs());
    let router = Router::new(RouterConfig {
        max_pins: MOST,
        ..RouterConfig::default()
    });
    let now = Instant::now();
    for key in 0..1_000_000 {
        drop(router.route(&fleet.snapshot, &request(&needs, Some(key)), now));
        if key % 1000 == 0 {
            assert!(router.pins() <= MOST);
        }
    }
    assert_eq!(
        fleet.live_pins().iter().sum::<u64>(),
        router.pins() as u64,
        "what was evicted counts no more"
    );
}

#[tokio::test(start_paused = true)]
async fn who_cannot_serve_is_told_apart_from_who_does_not_now() {
    let (mut fleet, router, mut needs) = (Fleet::new(1, 1), router(), needs());
    let now = Instant::now();
    let route = |fleet: &Fleet, needs: &Needs| {
        router
            .route(&fleet.snapshot, &request(needs, None), now)
            .map(|_| ())
            .unwrap_err()
    };
    fleet.set(0, |r| r.state = RankState::Closed("paused"));
    assert_eq!(route(&fleet, &needs), NoRoute::NoneOpen);
    needs.context = 20_000;
    assert_eq!(
        route(&fleet, &needs),
        NoRoute::Lacking(vec![Lack::Context { has: 16_384 }])
    );
    needs.model = "other".into();
    assert_eq!(route(&fleet, &needs), NoRoute::NoModel);
}

#[tokio::test(start_paused = true)]
async fn when_the_grace_is_over_each_key_moves_once_and_stays_there_after_a_resumption() {
    let (mut fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let home = |fleet: &Fleet, key| {
        router
            .route(&fleet.snapshot, &request(&needs, Some(key)), now)
            .map(|d| (d.slot, d.reason))
            .unwrap()
    };
    let before: Vec<_> = (0..40).map(|k| home(&fleet, k).0).collect();
    fleet.set(2, |r| r.state = RankState::PinnedOnly);
    for (key, was) in (0..40).zip(&before) {
        assert_eq!(home(&fleet, key), (*was, RouteReason::Pinned));
    }
    fleet.set(2, |r| r.state = RankState::Drained);
    let after: Vec<_> = (0..40).map(|k| home(&fleet, k)).collect();
    for (was, (is, reason)) in before.iter().zip(&after) {
        if *was == RankSlot(2) {
            assert_ne!(*is, RankSlot(2));
            assert_eq!(*reason, RouteReason::Draining);
        } else {
            assert_eq!((was, *reason), (is, RouteReason::Pinned));
        }
    }
    assert_eq!(fleet.live_pins()[2], 0);
    assert_eq!(fleet.live_pins().iter().sum::<u64>(), 40);
    fleet.set(2, |r| r.state = RankState::Open);
    for (key, (is, _)) in (0..40).zip(&after) {
        assert_eq!(home(&fleet, key), (*is, RouteReason::Pinned), "once");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_without_a_home_there_goes_to_a_draining_rank() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    for state in [RankState::PinnedOnly, RankState::Drained] {
        fleet.set(0, |r| r.state = state);
        for policy in [
            RoutingPolicy::Affinity,
            RoutingPolicy::LeastLoaded,
            RoutingPolicy::Random,
            RoutingPolicy::RoundRobin,
        ] {
            for i in 0..16u64 {
                let request = RouteRequest {
                    request: xxhash_rust::xxh3::xxh3_128(&i.to_le_bytes()),
                    policy,
                    ..request(&needs, None)
                };
                let decision = router.route(&fleet.snapshot, &request, Instant::now());
                assert_eq!(decision.unwrap().slot, RankSlot(1), "{policy:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_rank_left_after_a_drain_has_moved_and_is_not_lost() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let route = |fleet: &Fleet| {
        router
            .route(&fleet.snapshot, &request(&needs, Some(1)), now)
            .unwrap()
    };
    let home = route(&fleet).slot;
    fleet.lose(home.0);
    fleet.snapshot.departed.insert(home);
    assert_eq!(route(&fleet).reason, RouteReason::Draining);
    assert_eq!(route(&fleet).reason, RouteReason::Pinned);
}

#[tokio::test(start_paused = true)]
async fn why_nobody_takes_it_now() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let home = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap()
        .slot;
    let other = RankSlot(1 - home.0);
    let route = |fleet: &Fleet, key, avoid: &[RankSlot]| {
        let request = RouteRequest {
            avoid,
            ..request(&needs, Some(key))
        };
        router
            .route(&fleet.snapshot, &request, now)
            .map(|d| (d.slot, d.reason))
    };
    // The home paused: a detour, or a wait where there is nobody else. The pin
    // stays.
    fleet.set(home.0, |r| r.state = RankState::Paused);
    assert_eq!(route(&fleet, 1, &[]), Ok((other, RouteReason::Detour)));
    fleet.set(other.0, |r| r.state = RankState::Closed("unwell"));
    assert_eq!(route(&fleet, 1, &[]), Err(NoRoute::Paused));
    assert_eq!(router.pin(pin(1), now).unwrap().slot, home);
    // One that has just failed is not waited for.
    assert_eq!(route(&fleet, 1, &[home]), Err(NoRoute::NoneOpen));
    // All drain: the key that lives there goes on, others are told.
    fleet.set(home.0, |r| r.state = RankState::PinnedOnly);
    fleet.set(other.0, |r| r.state = RankState::Drained);
    assert_eq!(route(&fleet, 1, &[]), Ok((home, RouteReason::Pinned)));
    assert_eq!(route(&fleet, 2, &[]), Err(NoRoute::Draining));
    fleet.set(home.0, |r| r.state = RankState::Drained);
    assert_eq!(route(&fleet, 1, &[]), Err(NoRoute::Draining));
    assert_eq!(
        router.pin(pin(1), now).unwrap().slot,
        home,
        "nowhere better"
    );
}

#[tokio::test(start_paused = true)]
async fn the_keys_of_an_ejected_rank_move_and_do_not_come_back() {
    let (mut fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let turn = |fleet: &Fleet| router.route(&fleet.snapshot, &request(&needs, Some(1)), now);
    let home = turn(&fleet).unwrap().slot;
    fleet.set(home.0, |r| r.state = RankState::Ejected("it hangs"));
    let moved = turn(&fleet).unwrap();
    assert_eq!(moved.reason, RouteReason::ReplicaLost);
    assert_ne!(moved.slot, home);
    fleet.set(home.0, |r| r.state = RankState::Open);
    let after = turn(&fleet).unwrap();
    assert_eq!(
        (after.slot, after.reason),
        (moved.slot, RouteReason::Pinned)
    );

    // With nobody else to go to, it waits where it is.
    fleet.lose(home.0);
    fleet.set(moved.slot.0, |r| r.state = RankState::Ejected("it hangs"));
    assert_eq!(turn(&fleet).unwrap_err(), NoRoute::NoneOpen);
    fleet.set(moved.slot.0, |r| r.state = RankState::Open);
    assert_eq!(turn(&fleet).unwrap().reason, RouteReason::Pinned);
}
