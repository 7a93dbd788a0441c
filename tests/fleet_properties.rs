//! A fleet under whatever may happen to it, against a model of its own: replicas
//! that register, beat, miss beats, die, restart, drain, hang and are probed, a
//! control plane that stalls, and zombies that speak late.
//!
//! `BERTH_FLEET_STEPS` sets how many steps are taken (4,000 by default; 100,000 is
//! the long form).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use berth::{
    call::{LogprobMode, RouteReason, RoutingPolicy},
    fleet::{
        Beat, Fault, Fleet, FleetConfig, Health,
        facts::{
            Accelerator, Capabilities, EngineKind, RankFacts, RankReport, ReplicaFacts,
            ReportedState,
        },
        health::{Probe, Standing},
        signs::Flight,
        snapshot::RankSlot,
    },
    ids::{BootId, Incarnation, ReplicaId, Target},
    routing::{Hints, Needs, PinKey, RouteRequest, Router, RouterConfig},
    store::memory::MemoryStore,
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::time::Instant;

const REPLICAS: u8 = 6;
const RANKS: u32 = 2;
const KEYS: u8 = 12;
const STEPS_A_CASE: usize = 250;
const INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
enum Step {
    /// Again under the same boot id.
    Register(u8),
    Restart(u8),
    Leave(u8),
    Beat(u8, Say),
    /// All that are not dead beat, well.
    AllBeat,
    Pass(u16),
    /// Long enough for the dead to be forgotten.
    Age,
    /// Our own process stood still.
    Stall(u16),
    /// A failed request of this prompt.
    Fail(u8, u8, u8),
    Succeed(u8, u8),
    /// A request that gets nothing.
    Hang(u8, u8),
    /// All that hang are given a sign.
    Sign,
    /// The probes that are due end so.
    Probe(bool),
    /// An older start speaks.
    Zombie(u8),
    Route(u8),
    RouteKeyless(u8),
}

#[derive(Clone, Copy, Debug)]
enum Say {
    Well,
    RankIll(u8),
    RankPaused(u8),
    Unhealthy,
    Draining,
}

fn step() -> impl Strategy<Value = Step> {
    let replica = || 0..REPLICAS;
    let rank = || 0..(RANKS as u8);
    let say = prop_oneof![
        4 => Just(Say::Well),
        1 => rank().prop_map(Say::RankIll),
        1 => rank().prop_map(Say::RankPaused),
        1 => Just(Say::Unhealthy),
        1 => Just(Say::Draining),
    ];
    prop_oneof![
        2 => replica().prop_map(Step::Register),
        2 => replica().prop_map(Step::Restart),
        1 => replica().prop_map(Step::Leave),
        6 => (replica(), say).prop_map(|(r, s)| Step::Beat(r, s)),
        6 => Just(Step::AllBeat),
        8 => (1_u16..5000).prop_map(Step::Pass),
        1 => Just(Step::Age),
        1 => (1000_u16..60_000).prop_map(Step::Stall),
        6 => (replica(), rank(), 0_u8..4).prop_map(|(r, k, p)| Step::Fail(r, k, p)),
        1 => (replica(), rank()).prop_map(|(r, k)| Step::Succeed(r, k)),
        2 => (replica(), rank()).prop_map(|(r, k)| Step::Hang(r, k)),
        1 => Just(Step::Sign),
        3 => any::<bool>().prop_map(Step::Probe),
        2 => replica().prop_map(Step::Zombie),
        14 => (0..KEYS).prop_map(Step::Route),
        4 => any::<u8>().prop_map(Step::RouteKeyless),
    ]
}

/// What the model knows of the current start of one replica.
struct Known {
    incarnation: Incarnation,
    boot: u32,
    sequence: u64,
    dead: bool,
    last_beat: Instant,
    suspect: bool,
    good_beats: u32,
    state: ReportedState,
    ranks: [Rank; RANKS as usize],
}

#[derive(Clone, Copy, Default)]
struct Rank {
    ill: bool,
    /// Good beats since it was ill.
    well_beats: u32,
    paused: bool,
    /// It was found to hang, and no two probes have passed since.
    hangs: bool,
    passed: u32,
}

impl Known {
    fn new(incarnation: Incarnation, boot: u32) -> Self {
        Self {
            incarnation,
            boot,
            sequence: 0,
            dead: false,
            last_beat: Instant::now(),
            suspect: false,
            good_beats: 0,
            state: ReportedState::Ready,
            ranks: [Rank::default(); RANKS as usize],
        }
    }

    /// As the lease's words say it: two good beats end a suspicion.
    fn beat(&mut self) {
        self.last_beat = Instant::now();
        if self.suspect {
            self.good_beats += 1;
            if self.good_beats >= 2 {
                self.suspect = false;
            }
        }
    }

    fn tick(&mut self) {
        let silent = self.last_beat.elapsed();
        if silent >= INTERVAL * 3 && !self.suspect {
            (self.suspect, self.good_beats) = (true, 0);
        } else if self.suspect && silent >= INTERVAL * 2 {
            self.good_beats = 0;
        }
    }

    /// Why no request may go to this rank, if none may. A suspect is the last
    /// resort.
    fn closed(&self, rank: u32) -> Option<&'static str> {
        let r = &self.ranks[rank as usize];
        if self.dead {
            Some("dead")
        } else if r.hangs {
            Some("ejected")
        } else if r.ill {
            Some("ill")
        } else if r.paused {
            Some("paused")
        } else {
            None
        }
    }
}

struct World {
    fleet: Arc<Fleet>,
    router: Router,
    known: BTreeMap<u8, Known>,
    boots: HashMap<u8, u32>,
    /// The greatest incarnation of each, dead or alive.
    newest: HashMap<u8, Incarnation>,
    /// Starts that are over.
    over: HashSet<Target>,
    flights: Vec<(Target, Flight)>,
}

fn id(replica: u8) -> ReplicaId {
    ReplicaId::new(format!("r{replica}"))
}

fn facts(replica: u8, boot: u32) -> ReplicaFacts {
    let url: Arc<str> = "http://127.0.0.1:1".into();
    ReplicaFacts {
        id: id(replica),
        boot: BootId::new(format!("b{boot}")),
        url: Arc::clone(&url),
        engine: EngineKind::Sglang,
        engine_version: String::new(),
        model: "m".into(),
        vocab_size: None,
        context_length: 1000,
        weight_version: "1".into(),
        adapters: Vec::new(),
        capabilities: Capabilities::default(),
        accelerator: Accelerator::default(),
        ranks: (0..RANKS)
            .map(|rank| RankFacts {
                rank,
                url: Arc::clone(&url),
                engine_rank: rank,
                gpu_uuids: Vec::new(),
                kv_capacity: 1000,
                max_running: 0,
            })
            .collect(),
        page_size: 1,
        logprob_mode: LogprobMode::Unknown,
        labels: BTreeMap::new(),
        engine_start: None,
    }
}

impl World {
    fn new() -> Self {
        Self {
            fleet: Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default())),
            router: Router::new(RouterConfig::default()),
            known: BTreeMap::new(),
            boots: HashMap::new(),
            newest: HashMap::new(),
            over: HashSet::new(),
            flights: Vec::new(),
        }
    }

    fn target(&self, replica: u8, rank: u32) -> Option<Target> {
        self.known.get(&replica).map(|known| Target {
            replica: id(replica),
            incarnation: known.incarnation,
            rank,
        })
    }

    async fn register(&mut self, replica: u8, boot: u32) {
        let answer = self.fleet.register(facts(replica, boot)).await;
        let Ok(registered) = answer else {
            let known = self
                .known
                .get(&replica)
                .expect("only a known start is refused");
            assert!(known.dead && known.boot == boot, "{:?}", answer.err());
            return;
        };
        let newest = self.newest.entry(replica).or_insert(registered.incarnation);
        assert!(registered.incarnation >= *newest, "incarnations only grow");
        match self.known.get_mut(&replica) {
            Some(known) if known.boot == boot => {
                assert_eq!(known.incarnation, registered.incarnation, "idempotent");
                assert!(!known.dead, "dead is final");
                known.beat();
            }
            before => {
                if let Some(before) = before {
                    assert!(registered.incarnation > before.incarnation);
                    for rank in 0..RANKS {
                        self.over.insert(Target {
                            replica: id(replica),
                            incarnation: before.incarnation,
                            rank,
                        });
                    }
                }
                self.known
                    .insert(replica, Known::new(registered.incarnation, boot));
            }
        }
        *newest = registered.incarnation;
    }

    fn beat(&mut self, replica: u8, say: Say) {
        let Some(known) = self.known.get_mut(&replica) else {
            return;
        };
        known.sequence += 1;
        let state = match say {
            Say::Unhealthy => ReportedState::Unhealthy,
            Say::Draining => ReportedState::Draining,
            Say::Well | Say::RankIll(_) | Say::RankPaused(_) => ReportedState::Ready,
        };
        let ranks: Vec<RankReport> = (0..RANKS)
            .map(|rank| RankReport {
                rank,
                healthy: !matches!(say, Say::RankIll(r) if u32::from(r) == rank),
                running: 0,
                waiting: 0,
                waiting_uncached_tokens: 0,
                kv_used_tokens: 0,
                weight_version: "1".into(),
                paused: matches!(say, Say::RankPaused(r) if u32::from(r) == rank),
            })
            .collect();
        let answer = self.fleet.beat(Beat {
            drain_grace: None,
            replica: id(replica),
            incarnation: known.incarnation,
            sequence: known.sequence,
            state,
            ranks: ranks.clone(),
            adapters: None,
        });
        assert_eq!(answer.is_err(), known.dead, "{answer:?}");
        if known.dead {
            return;
        }
        known.beat();
        known.state = state;
        for (rank, report) in known.ranks.iter_mut().zip(ranks) {
            rank.paused = report.paused;
            if state == ReportedState::Unhealthy || !report.healthy {
                (rank.ill, rank.well_beats) = (true, 0);
            } else {
                rank.well_beats += 1;
                rank.ill &= rank.well_beats < 2;
            }
        }
    }

    /// After time has passed and the fleet has been told: who is dead is learnt
    /// from it, and checked against what may be.
    fn learn(&mut self) {
        for (replica, known) in &mut self.known {
            known.tick();
            let status = self.fleet.get(&id(*replica));
            let dead = status.as_ref().is_none_or(|s| s.health == Health::Dead);
            if dead && !known.dead {
                assert!(
                    known.last_beat.elapsed() >= INTERVAL * 6,
                    "nobody dies of fewer than six missed beats"
                );
                known.dead = true;
            }
            assert_eq!(dead, known.dead, "dead is final");
            for rank in 0..RANKS {
                let target = Target {
                    replica: id(*replica),
                    incarnation: known.incarnation,
                    rank,
                };
                if dead {
                    self.over.insert(target);
                } else if self.fleet.hangs_since(&target).is_some() {
                    let rank = &mut known.ranks[rank as usize];
                    if !rank.hangs {
                        (rank.hangs, rank.passed) = (true, 0);
                    }
                }
            }
        }
        // Those who were told to give up do.
        self.flights.retain(|(_, flight)| {
            futures_util::FutureExt::now_or_never(flight.given_up()).is_none()
        });
    }

    fn pass(&mut self, time: Duration, stall: bool) -> impl Future<Output = ()> {
        let stalled = if stall { time } else { Duration::ZERO };
        async move {
            tokio::time::advance(time).await;
            self.fleet.tick(Instant::now(), stalled);
            for known in self.known.values_mut().filter(|k| !k.dead) {
                known.last_beat += stalled;
            }
            self.learn();
        }
    }

    fn route(&self, key: Option<u8>, request: u8) {
        let snapshot = self.fleet.snapshot();
        let needs = Needs {
            model: "m".into(),
            ..Needs::default()
        };
        let key = key.map(|key| PinKey(u128::from(key) * 0x9e37_79b9_7f4a_7c15));
        let pinned = key.and_then(|key| self.router.pin(key, Instant::now()));
        let decision = self.router.route(
            &snapshot,
            &RouteRequest {
                key,
                request: u128::from(request),
                samples: 1,
                prompt_tokens: 10,
                needs: &needs,
                policy: RoutingPolicy::Affinity,
                avoid: &[],
                hints: Hints::default(),
            },
            Instant::now(),
        );
        // Free of every reason, but for missed beats.
        let free = |replica: u8, rank: u32| {
            let known = &self.known[&replica];
            known.closed(rank).is_none()
                && known.state == ReportedState::Ready
                && self.trusted(replica, rank)
        };
        let any = |suspect: bool| {
            let of = |(replica, known): (&u8, &Known)| {
                (known.suspect == suspect)
                    .then(|| (0..RANKS).find(|rank| free(*replica, *rank)))
                    .flatten()
                    .map(|rank| format!("r{replica}/{rank}"))
            };
            self.known.iter().find_map(of)
        };
        let Ok(decision) = decision else {
            let missed = any(false).or_else(|| any(true));
            assert_eq!(missed, None, "could have taken it");
            return;
        };
        let rank = snapshot.rank(decision.slot).expect("a rank that exists");
        let target = &rank.target;
        let (replica, known) = self
            .known
            .iter()
            .find(|(replica, _)| id(**replica) == target.replica)
            .expect("a replica that registered");
        assert_eq!(target.incarnation, self.newest[replica], "fenced");
        assert!(!self.over.contains(target), "over");
        if let Some(why) = known.closed(target.rank) {
            panic!("{target} is {why}, and got a request");
        }
        assert!(self.trusted(*replica, target.rank), "{target} is ejected");
        assert_eq!(decision.last_resort, known.suspect);
        if known.suspect {
            assert_eq!(any(false), None, "open, and {target} is suspect");
            assert_eq!(known.state, ReportedState::Ready, "{target} drains");
            // The home first, where it is one of the suspects.
            let home = pinned.and_then(|pin| snapshot.rank(pin.slot));
            let at_home = home.and_then(|home| {
                let mut ids = self.known.keys();
                let replica = *ids.find(|other| id(**other) == home.target.replica)?;
                Some(free(replica, home.target.rank))
            });
            if at_home == Some(true) {
                assert_eq!(pinned.map(|pin| pin.slot), Some(decision.slot));
            }
        }
        let lived_there = pinned.is_some_and(|pin| pin.slot == decision.slot);
        assert!(
            known.state == ReportedState::Ready || lived_there,
            "{target} drains, and got a new key"
        );
        if let Some(key) = key {
            let pin = self.router.pin(key, Instant::now()).expect("pinned");
            let at_home = pin.slot == decision.slot;
            assert!(at_home || decision.reason == RouteReason::Detour);
            let exists = |slot: RankSlot| snapshot.rank(slot).is_some();
            assert!(exists(pin.slot), "a pin's rank is one that exists");
        }
    }

    fn trusted(&self, replica: u8, rank: u32) -> bool {
        self.target(replica, rank)
            .and_then(|target| self.fleet.standing(&target))
            == Some(Standing::Trusted)
    }

    async fn take(&mut self, step: &Step) {
        match *step {
            Step::Register(replica) => {
                let boot = *self.boots.entry(replica).or_insert(1);
                self.register(replica, boot).await;
            }
            Step::Restart(replica) => {
                let boot = self.boots.entry(replica).or_insert(0);
                *boot += 1;
                let boot = *boot;
                self.register(replica, boot).await;
            }
            Step::Leave(replica) => {
                if let Some(known) = self.known.get_mut(&replica) {
                    self.fleet.deregister(&id(replica), known.incarnation);
                    known.dead = true;
                    self.learn();
                }
            }
            Step::Beat(replica, say) => self.beat(replica, say),
            Step::AllBeat => {
                for replica in 0..REPLICAS {
                    if self.known.get(&replica).is_some_and(|k| !k.dead) {
                        self.beat(replica, Say::Well);
                    }
                }
            }
            Step::Pass(ms) => self.pass(Duration::from_millis(ms.into()), false).await,
            Step::Age => self.pass(Duration::from_secs(700), false).await,
            Step::Stall(ms) => self.pass(Duration::from_millis(ms.into()), true).await,
            Step::Fail(replica, rank, prompt) => {
                if let Some(target) = self.target(replica, rank.into()) {
                    self.fleet.failed(&target, Fault::Lost, Some(prompt.into()));
                }
            }
            Step::Succeed(replica, rank) => {
                if let Some(target) = self.target(replica, rank.into()) {
                    self.fleet.answered(&target, Some("1"), None);
                }
            }
            Step::Hang(replica, rank) => {
                let snapshot = self.fleet.snapshot();
                if let Some(target) = self.target(replica, rank.into())
                    && let Some(view) = snapshot.find(&target)
                {
                    let flight = view.load.watch().begin(Duration::from_secs(5));
                    self.flights.push((target, flight));
                }
            }
            Step::Sign => self.flights.clear(),
            Step::Probe(passes) => {
                for trial in self.fleet.trials() {
                    let target = trial.target;
                    let (_, known) = self
                        .known
                        .iter_mut()
                        .find(|(replica, _)| id(**replica) == target.replica)
                        .unwrap();
                    let rank = &mut known.ranks[target.rank as usize];
                    assert!(!rank.ill && !rank.paused, "a probe that may harm");
                    let probe = if passes { Probe::Passed } else { Probe::Failed };
                    self.fleet.probed(&target, probe);
                    rank.passed = if passes { rank.passed + 1 } else { 0 };
                    let trusted = self.fleet.standing(&target) == Some(Standing::Trusted);
                    assert!(!trusted || rank.passed >= 2 || !rank.hangs);
                    rank.hangs &= !trusted;
                }
            }
            Step::Zombie(replica) => self.zombie(replica),
            Step::Route(key) => self.route(Some(key), key),
            Step::RouteKeyless(request) => self.route(None, request),
        }
    }

    /// Whatever a start that is over says, nothing changes.
    fn zombie(&self, replica: u8) {
        let newest = self.newest.get(&replica);
        let Some(old) = newest.and_then(|n| n.0.checked_sub(1)).map(Incarnation) else {
            return;
        };
        let before = *self.fleet.changes().borrow();
        let target = Target {
            replica: id(replica),
            incarnation: old,
            rank: 0,
        };
        let word = self.fleet.beat(Beat {
            drain_grace: None,
            replica: id(replica),
            incarnation: old,
            sequence: u64::MAX,
            state: ReportedState::Draining,
            ranks: Vec::new(),
            adapters: None,
        });
        assert!(word.is_err());
        self.fleet.answered(&target, Some("9"), None);
        self.fleet.unanswered(&target);
        self.fleet.probed(&target, Probe::Failed);
        self.fleet.deregister(&id(replica), old);
        assert_eq!(*self.fleet.changes().borrow(), before);
    }
}

#[test]
fn no_request_goes_where_none_may() {
    let steps: usize = std::env::var("BERTH_FLEET_STEPS").map_or(4000, |n| n.parse().unwrap());
    let mut runner = TestRunner::new(Config {
        cases: u32::try_from(steps.div_ceil(STEPS_A_CASE)).unwrap(),
        failure_persistence: None,
        ..Config::default()
    });
    let steps = proptest::collection::vec(step(), STEPS_A_CASE);
    runner
        .run(&steps, |steps| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .map_err(|e| TestCaseError::fail(e.to_string()))?;
            runtime.block_on(async {
                let mut world = World::new();
                for replica in 0..REPLICAS {
                    world.take(&Step::Restart(replica)).await;
                }
                for step in &steps {
                    world.take(step).await;
                }
            });
            Ok(())
        })
        .unwrap();
}
