//! Registration, heartbeats and leases, under paused time.

use tokio_util::sync::CancellationToken;

use super::{
    facts::{
        RankFacts, ReplicaFacts,
        tests::{plain, plain_rank},
    },
    *,
};
use crate::{ids::BootId, store::memory::MemoryStore};

fn fleet() -> Arc<Fleet> {
    Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()))
}

fn facts(id: &str, boot: &str) -> ReplicaFacts {
    ReplicaFacts {
        ranks: vec![plain_rank(0), plain_rank(1)],
        ..plain(id, boot)
    }
}

/// As a sidecar says it that was started anew beside the same engine, or another.
#[tokio::test(start_paused = true)]
async fn the_same_start_keeps_its_incarnation_under_another_boot_id() {
    let fleet = Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()));
    let of_start = |boot, start: Option<&str>| ReplicaFacts {
        engine_start: start.map(str::to_owned),
        ..facts("a", boot)
    };
    let register = async |boot, start| {
        let registered = fleet.register(of_start(boot, start)).await;
        registered.unwrap().incarnation.0
    };
    // Nothing was known of its start at first.
    assert_eq!(register("u1", None).await, 1);
    assert_eq!(register("u1", Some("s1")).await, 1);
    assert_eq!(register("s1", Some("s1")).await, 1);
    let boot = || fleet.get(&ReplicaId::new("a")).unwrap().facts.boot;
    assert_eq!(boot(), BootId::new("u1"));
    assert_eq!(register("s2", Some("s2")).await, 2);
    // That start is dead: whoever comes now is another, whatever it calls itself.
    fleet.deregister(&ReplicaId::new("a"), Incarnation(2));
    assert_eq!(register("u3", Some("s2")).await, 3);
    assert_eq!(register("u4", None).await, 4);
    assert_eq!(register("u5", None).await, 5, "unknown is not the same");
}

fn beat(id: &str, incarnation: Incarnation, sequence: u64) -> Beat {
    Beat {
        replica: ReplicaId::new(id),
        incarnation,
        sequence,
        state: ReportedState::Ready,
        drain_grace: None,
        ranks: Vec::new(),
        adapters: None,
    }
}

fn report(rank: u32, healthy: bool) -> RankReport {
    RankReport {
        rank,
        healthy,
        running: 0,
        waiting: 0,
        waiting_uncached_tokens: 0,
        kv_used_tokens: 0,
        weight_version: "1".into(),
        paused: false,
    }
}

fn states(fleet: &Fleet) -> Vec<RankState> {
    let snapshot = fleet.snapshot();
    snapshot.ranks.iter().map(|r| r.state.clone()).collect()
}

fn reason(result: Result<impl Sized, Error>) -> Reason {
    result.err().expect("refused").reason
}

#[tokio::test(start_paused = true)]
async fn registration_is_idempotent_and_incarnations_only_grow() {
    let fleet = fleet();
    let first = fleet.register(facts("a", "boot1")).await.unwrap();
    let again = fleet.register(facts("a", "boot1")).await.unwrap();
    assert_eq!(first, again);
    assert_eq!(fleet.list().len(), 1);
    let slots: Vec<_> = fleet.snapshot().ranks.iter().map(|r| r.slot).collect();

    let restarted = fleet.register(facts("a", "boot2")).await.unwrap();
    assert!(restarted.incarnation > first.incarnation);
    assert_eq!(fleet.list().len(), 1);
    assert!(
        fleet
            .snapshot()
            .ranks
            .iter()
            .all(|r| !slots.contains(&r.slot)),
        "pins of the old start point at nothing"
    );
    // A zombie's word changes nothing.
    assert_eq!(
        reason(fleet.beat(beat("a", first.incarnation, 99))),
        Reason::StaleIncarnation
    );
    assert_eq!(
        reason(fleet.register(facts("a", "boot1")).await),
        Reason::StaleIncarnation
    );
    fleet.deregister(&ReplicaId::new("a"), first.incarnation);
    assert_eq!(fleet.snapshot().ranks.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_beat_from_nobody_is_told_to_register() {
    let fleet = fleet();
    assert_eq!(
        reason(fleet.beat(beat("a", Incarnation(1), 1))),
        Reason::Reregister
    );
}

#[tokio::test(start_paused = true)]
async fn silence_closes_then_kills_and_the_dead_are_told() {
    let fleet = fleet();
    let stop = CancellationToken::new();
    tokio::spawn(fleet.clone().keep(stop.clone()));
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);

    tokio::time::sleep(Duration::from_millis(6600)).await;
    assert_eq!(states(&fleet)[0], RankState::Suspect);
    fleet.beat(beat("a", me, 1)).unwrap();
    assert_eq!(
        states(&fleet)[0],
        RankState::Suspect,
        "one beat is not enough"
    );
    fleet.beat(beat("a", me, 2)).unwrap();
    assert_eq!(states(&fleet)[0], RankState::Open);

    tokio::time::sleep(Duration::from_millis(12_600)).await;
    assert!(states(&fleet).is_empty());
    assert_eq!(fleet.list()[0].health, Health::Dead);
    assert_eq!(
        reason(fleet.beat(beat("a", me, 3))),
        Reason::IncarnationDead
    );
    assert_eq!(
        reason(fleet.register(facts("a", "boot1")).await),
        Reason::IncarnationDead
    );
    assert!(fleet.register(facts("a", "boot2")).await.is_ok());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn nothing_lives_on_the_dead() {
    let fleet = fleet();
    let me = fleet.register(facts("a", "boot1")).await.unwrap();
    let load = Arc::clone(&fleet.snapshot().ranks[0].load);
    load.pin(50);
    let living = || {
        let rank = fleet.list()[0].ranks[0].clone();
        (rank.live_pins, rank.live_tokens)
    };
    assert_eq!(living(), (1, 50));
    fleet.deregister(&ReplicaId::new("a"), me.incarnation);
    assert_eq!(living(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_dead_are_forgotten_in_the_end() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    fleet.deregister(&ReplicaId::new("a"), me);
    assert_eq!(fleet.list().len(), 1);
    assert!(fleet.snapshot().lost_models.contains("m"));
    fleet.tick(Instant::now() + Duration::from_secs(601), Duration::ZERO);
    assert!(fleet.list().is_empty());
    assert!(fleet.snapshot().lost_models.is_empty());
    // And stay dead all the same.
    assert_eq!(reason(fleet.beat(beat("a", me, 1))), Reason::Reregister);
    assert_eq!(
        reason(fleet.register(facts("a", "boot1")).await),
        Reason::IncarnationDead
    );
    assert!(fleet.register(facts("a", "boot2")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_stall_of_the_control_plane_kills_nobody() {
    let fleet = fleet();
    fleet.register(facts("a", "boot1")).await.unwrap();
    let late = Instant::now() + Duration::from_secs(60);
    fleet.tick(late, Duration::from_secs(59));
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test(start_paused = true)]
async fn an_old_beat_is_ignored_and_ranks_close_one_by_one() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    let report = |rank, healthy, paused| RankReport {
        weight_version: "2".into(),
        paused,
        ..report(rank, healthy)
    };
    let with = |sequence, ranks| Beat {
        ranks,
        ..beat("a", me, sequence)
    };
    // Rank 9 does not exist.
    fleet
        .beat(with(
            5,
            vec![report(0, true, true), report(9, false, false)],
        ))
        .unwrap();
    assert_eq!(states(&fleet), [RankState::Paused, RankState::Open]);
    assert_eq!(&*fleet.snapshot().ranks[0].weight_version, "2");
    assert_eq!(&*fleet.snapshot().ranks[1].weight_version, "1");
    fleet.beat(with(4, vec![report(0, true, false)])).unwrap();
    assert_ne!(states(&fleet)[0], RankState::Open, "sequence 4 is old");
    fleet.beat(with(6, vec![report(0, true, false)])).unwrap();
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test]
async fn a_port_that_refuses_is_dead_at_once() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Arc<str> = format!("http://{}", listener.local_addr().unwrap()).into();
    let fleet = fleet();
    let mut facts = facts("a", "boot1");
    facts.url = Arc::clone(&url);
    for rank in &mut facts.ranks {
        rank.url = Arc::clone(&url);
    }
    fleet.register(facts).await.unwrap();
    let target = fleet.snapshot().ranks[0].target.clone();

    let mut changes = fleet.changes();
    fleet.unreachable(&target);
    // Somebody listens: not dead.
    let (accepted, _) = listener.accept().await.unwrap();
    drop(accepted);
    assert_eq!(fleet.snapshot().ranks.len(), 2);

    drop(listener);
    loop {
        fleet.unreachable(&target);
        if tokio::time::timeout(Duration::from_millis(50), changes.changed())
            .await
            .is_ok()
            && fleet.snapshot().ranks.is_empty()
        {
            break;
        }
    }
    assert_eq!(fleet.list()[0].reason, "its port refuses connections");
}

/// Five replicas of two ranks, which have beaten; the fleet's own clock is the test's to move.
async fn five() -> (Arc<Fleet>, Vec<Incarnation>) {
    let fleet = fleet();
    let mut incarnations = Vec::new();
    for id in ["a", "b", "c", "d", "e"] {
        let me = fleet.register(facts(id, "boot")).await.unwrap().incarnation;
        fleet.beat(beat(id, me, 1)).unwrap();
        incarnations.push(me);
    }
    (fleet, incarnations)
}

/// Time passes as [`Fleet::keep`] lets it, with beats of these.
async fn pass(fleet: &Fleet, seconds: u64, beating: &[(&str, Incarnation)], sequence: &mut u64) {
    for _ in 0..seconds {
        tokio::time::advance(Duration::from_secs(1)).await;
        *sequence += 1;
        for (id, incarnation) in beating {
            fleet.beat(beat(id, *incarnation, *sequence)).unwrap();
        }
        fleet.tick(Instant::now(), Duration::ZERO);
    }
}

fn health(fleet: &Fleet, id: &str) -> Health {
    fleet.get(&ReplicaId::new(id)).unwrap().health
}

fn target(fleet: &Fleet, id: &str, rank: u32) -> Target {
    Target {
        replica: ReplicaId::new(id),
        incarnation: fleet.get(&ReplicaId::new(id)).unwrap().incarnation,
        rank,
    }
}

fn state_of(fleet: &Fleet, target: &Target) -> RankState {
    fleet.snapshot().find(target).unwrap().state.clone()
}

#[tokio::test(start_paused = true)]
async fn one_silent_replica_of_five_dies_alone() {
    let (fleet, incarnations) = five().await;
    let beating: Vec<_> = ["a", "b", "c", "d"].into_iter().zip(incarnations).collect();
    pass(&fleet, 13, &beating, &mut 0).await;
    assert_eq!(health(&fleet, "e"), Health::Dead);
    assert_eq!(health(&fleet, "a"), Health::Healthy);
}

#[tokio::test(start_paused = true)]
async fn when_a_good_part_falls_silent_at_once_nobody_is_called_dead() {
    let (fleet, incarnations) = five().await;
    let mut sequence = 0;
    let all: Vec<_> = ["a", "b", "c", "d", "e"]
        .into_iter()
        .zip(incarnations)
        .collect();
    pass(&fleet, 60, &all[..2], &mut sequence).await;
    for id in ["c", "d", "e"] {
        assert_eq!(health(&fleet, id), Health::Suspect);
        assert_eq!(state_of(&fleet, &target(&fleet, id, 0)), RankState::Held);
    }
    assert!(
        fleet
            .get(&ReplicaId::new("c"))
            .unwrap()
            .reason
            .contains("fell silent with it"),
        "it says so"
    );
    // Two come back; the one that is left is not many.
    pass(&fleet, 1, &all[..4], &mut sequence).await;
    assert_eq!(health(&fleet, "c"), Health::Suspect);
    pass(&fleet, 1, &all[..4], &mut sequence).await;
    assert_eq!(health(&fleet, "c"), Health::Healthy);
    assert_eq!(health(&fleet, "e"), Health::Dead);
}

#[tokio::test]
async fn a_refused_port_overrides_self_preservation() {
    let fleet = fleet();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Arc<str> = format!("http://{}", listener.local_addr().unwrap()).into();
    drop(listener);
    for id in ["a", "b", "c", "d", "e"] {
        let mut facts = facts(id, "boot");
        facts.url = Arc::clone(&url);
        for rank in &mut facts.ranks {
            rank.url = Arc::clone(&url);
        }
        let me = fleet.register(facts).await.unwrap().incarnation;
        fleet.beat(beat(id, me, 1)).unwrap();
    }
    let silent = fleet.tick(Instant::now() + Duration::from_secs(13), Duration::ZERO);
    assert_eq!(silent.len(), 5);
    assert!(fleet.list().iter().all(|r| r.health == Health::Suspect));
    let mut changes = fleet.changes();
    for target in &silent {
        fleet.unreachable(target);
    }
    while !fleet.list().iter().all(|r| r.health == Health::Dead) {
        changes.changed().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_generation_keeps_a_lease_whose_beats_are_missing() {
    let fleet = fleet();
    fleet.register(facts("a", "boot")).await.unwrap();
    let at = target(&fleet, "a", 1);
    let flight = {
        let snapshot = fleet.snapshot();
        let watch = snapshot.find(&at).unwrap().load.watch();
        watch.begin(Duration::from_secs(60))
    };
    for _ in 0..30 {
        flight.sign();
        pass(&fleet, 1, &[], &mut 0).await;
    }
    assert_eq!(health(&fleet, "a"), Health::Suspect);
    pass(&fleet, 12, &[], &mut 0).await;
    assert_eq!(health(&fleet, "a"), Health::Dead);
    // Whoever waited there is told.
    flight.given_up().await;
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_answers_nothing_is_ejected_and_no_other() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot"))
        .await
        .unwrap()
        .incarnation;
    let (hung, other) = (target(&fleet, "a", 0), target(&fleet, "a", 1));
    let begin = |target: &Target| {
        let snapshot = fleet.snapshot();
        let watch = snapshot.find(target).unwrap().load.watch();
        watch.begin(Duration::from_secs(20))
    };
    let (first, second, living) = (begin(&hung), begin(&hung), begin(&other));
    let mut sequence = 0;
    for _ in 0..19 {
        living.sign();
        pass(&fleet, 1, &[("a", me)], &mut sequence).await;
        assert_eq!(state_of(&fleet, &hung), RankState::Open);
    }
    pass(&fleet, 1, &[("a", me)], &mut sequence).await;
    assert!(matches!(state_of(&fleet, &hung), RankState::Ejected(_)));
    assert_eq!(state_of(&fleet, &other), RankState::Open);
    first.given_up().await;
    second.given_up().await;
    assert_eq!(fleet.hangs_since(&hung), Some(Instant::now()));
    assert_eq!(fleet.hangs_since(&other), None);

    assert!(fleet.trials().is_empty(), "its term runs");
    drop((first, second));
    living.sign();
    pass(&fleet, 5, &[("a", me)], &mut sequence).await;
    let due = fleet.trials();
    assert_eq!(due.len(), 1);
    assert_eq!(due[0].target, hung);
    fleet.probed(&hung, health::Probe::Passed);
    assert!(matches!(state_of(&fleet, &hung), RankState::Ejected(_)));
    assert_eq!(fleet.trials().len(), 1);
    fleet.probed(&hung, health::Probe::Passed);
    assert_eq!(state_of(&fleet, &hung), RankState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_paused_rank_does_not_hang_and_neither_does_one_whose_queue_others_fill() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot"))
        .await
        .unwrap()
        .incarnation;
    let at = target(&fleet, "a", 0);
    let snapshot = fleet.snapshot();
    let watch = Arc::clone(snapshot.find(&at).unwrap().load.watch());
    let _flight = watch.begin(Duration::from_secs(10));
    let mut sequence = 0;
    let mut pass = async |seconds: u32, waiting: u32, paused: bool| {
        for _ in 0..seconds {
            tokio::time::advance(Duration::from_secs(1)).await;
            sequence += 1;
            let report = RankReport {
                waiting,
                paused,
                ..report(0, true)
            };
            let ranks = vec![report];
            fleet
                .beat(Beat {
                    ranks,
                    ..beat("a", me, sequence)
                })
                .unwrap();
            fleet.tick(Instant::now(), Duration::ZERO);
        }
    };
    pass(60, 0, true).await;
    assert_eq!(fleet.hangs_since(&at), None, "paused");
    pass(30, 1, false).await;
    assert_eq!(fleet.hangs_since(&at), None, "behind others");
    pass(10, 1, false).await;
    assert!(fleet.hangs_since(&at).is_some(), "but not for ever");
}

#[tokio::test(start_paused = true)]
async fn a_stall_of_the_control_plane_ejects_nobody() {
    let fleet = fleet();
    fleet.register(facts("a", "boot")).await.unwrap();
    let at = target(&fleet, "a", 0);
    let snapshot = fleet.snapshot();
    let _flight = snapshot
        .find(&at)
        .unwrap()
        .load
        .watch()
        .begin(Duration::from_secs(10));
    tokio::time::advance(Duration::from_secs(60)).await;
    fleet.tick(Instant::now(), Duration::from_secs(59));
    assert_eq!(fleet.hangs_since(&at), None);
    assert_eq!(health(&fleet, "a"), Health::Healthy);
}

#[tokio::test(start_paused = true)]
async fn failures_eject_at_most_half_of_a_models_ranks() {
    let (fleet, _) = five().await;
    let mut out = 0;
    for id in ["a", "b", "c", "d", "e"] {
        for rank in [0, 1] {
            let at = target(&fleet, id, rank);
            for evidence in 0..20 {
                tokio::time::advance(Duration::from_millis(200)).await;
                fleet.failed(&at, Fault::Lost, Some(evidence));
            }
            out += usize::from(state_of(&fleet, &at) != RankState::Open);
        }
    }
    assert_eq!(out, 5);
}

/// Hundreds of calls are given up at once, after this process itself stood still,
/// say: some of their aborts are late, and the engine is at work all the time.
#[tokio::test(start_paused = true)]
async fn aborts_that_are_late_at_an_engine_that_works_or_answers_others_condemn_nobody() {
    let fleet = fleet();
    fleet.register(facts("a", "boot")).await.unwrap();
    let at = target(&fleet, "a", 0);
    let load = Arc::clone(&fleet.snapshot().ranks[0].load);
    for _ in 0..20 {
        for _ in 0..4 {
            tokio::time::advance(Duration::from_secs(1)).await;
            fleet.unanswered(&at);
        }
        load.watch().sign();
        for _ in 0..4 {
            tokio::time::advance(Duration::from_secs(1)).await;
            fleet.unanswered(&at);
        }
        fleet.aborted(&at);
        for _ in 0..4 {
            tokio::time::advance(Duration::from_secs(1)).await;
            fleet.unanswered(&at);
        }
        load.watch().excuse();
    }
    assert_eq!(fleet.standing(&at), Some(health::Standing::Trusted));
    for _ in 0..5 {
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.unanswered(&at);
    }
    assert!(fleet.hangs_since(&at).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_ill_rank_is_not_probed_since_a_message_to_a_dead_scheduler_hangs_all() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot"))
        .await
        .unwrap()
        .incarnation;
    let at = target(&fleet, "a", 0);
    for _ in 0..5 {
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.unanswered(&at);
    }
    assert!(fleet.hangs_since(&at).is_some());
    let say = |sequence, healthy| Beat {
        ranks: vec![report(0, healthy)],
        ..beat("a", me, sequence)
    };
    fleet.beat(say(1, false)).unwrap();
    tokio::time::advance(Duration::from_secs(5)).await;
    fleet.tick(Instant::now(), Duration::ZERO);
    assert!(fleet.trials().is_empty());
    fleet.beat(say(2, true)).unwrap();
    fleet.beat(say(3, true)).unwrap();
    assert_eq!(fleet.trials().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_zombies_late_heartbeat_and_late_reply_change_nothing() {
    let fleet = fleet();
    let old = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    let late = target(&fleet, "a", 0);
    let new = fleet
        .register(facts("a", "boot2"))
        .await
        .unwrap()
        .incarnation;
    assert!(new > old);
    let version = fleet.changes().borrow().to_owned();
    let shown = || {
        let mut list = fleet.list();
        for replica in &mut list {
            replica.heartbeat_age = Duration::ZERO;
        }
        format!("{list:?}")
    };
    let before = shown();

    let zombie = Beat {
        state: ReportedState::Draining,
        ranks: vec![report(0, false)],
        adapters: Some(Vec::new()),
        ..beat("a", old, 1_000_000)
    };
    assert_eq!(reason(fleet.beat(zombie)), Reason::StaleIncarnation);
    fleet.answered(&late, Some("99"), Some("x"));
    fleet.serves(&late, "99");
    fleet.adapter_missing(&late, "x");
    for i in 0..100 {
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.failed(&late, Fault::Lost, Some(i));
    }
    fleet.probed(&late, health::Probe::Failed);
    fleet.deregister(&late.replica, old);
    assert_eq!(fleet.changes().borrow().to_owned(), version);
    assert_eq!(shown(), before);
    assert!(fleet.is_over(&late));
    assert_eq!(&*fleet.snapshot().ranks[0].weight_version, "1");
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test(start_paused = true)]
async fn weights_are_known_by_rank_from_registration_beats_and_replies() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot"))
        .await
        .unwrap()
        .incarnation;
    let versions = || -> Vec<String> {
        let snapshot = fleet.snapshot();
        let ranks = snapshot.ranks.iter();
        ranks.map(|r| r.weight_version.to_string()).collect()
    };
    assert_eq!(versions(), ["1", "1"]);
    let report = RankReport {
        weight_version: "2".into(),
        ..report(1, true)
    };
    fleet
        .beat(Beat {
            ranks: vec![report],
            ..beat("a", me, 1)
        })
        .unwrap();
    assert_eq!(versions(), ["1", "2"]);
    fleet.answered(&target(&fleet, "a", 0), Some("3"), None);
    assert_eq!(versions(), ["3", "2"]);
    fleet.serves(&target(&fleet, "a", 1), "4");
    assert_eq!(versions(), ["3", "4"]);
}

#[tokio::test(start_paused = true)]
async fn adapters_are_known_from_registration_beats_and_replies() {
    let fleet = fleet();
    let adapter = |name: &str, load_id: &str, resident| AdapterFacts {
        name: name.into(),
        load_id: load_id.to_owned(),
        resident,
    };
    let mut registered = facts("a", "boot");
    registered.adapters = vec![adapter("x", "1", false), adapter("y", "1", true)];
    let me = fleet.register(registered).await.unwrap().incarnation;
    let at = target(&fleet, "a", 0);
    let seen = |name: &str| {
        let snapshot = fleet.snapshot();
        let rank = snapshot.find(&at).unwrap();
        (rank.holds(Some(name)), rank.adapter_load(Some(name)))
    };
    assert!(!seen("x").0 && seen("y").0 && !seen("z").0);
    assert_eq!(seen("z").1, 0);
    fleet.answered(&at, None, Some("x"));
    assert!(seen("x").0);
    let first = seen("x").1;
    let tell = |sequence, adapters| Beat {
        adapters,
        ..beat("a", me, sequence)
    };
    fleet.beat(tell(1, None)).unwrap();
    assert!(seen("y").0, "says nothing of adapters");
    fleet
        .beat(tell(2, Some(vec![adapter("x", "2", true)])))
        .unwrap();
    assert!(!seen("y").0);
    assert_ne!(seen("x").1, first, "loaded anew");
    fleet.adapter_missing(&at, "x");
    assert!(fleet.snapshot().ranks[0].replica.facts.adapters.is_empty());
}

#[tokio::test(start_paused = true)]
async fn strangers_cannot_fill_the_registry() {
    let fleet = Fleet::new(
        FleetConfig {
            max_replicas: 2,
            ..FleetConfig::default()
        },
        Arc::new(MemoryStore::default()),
    );
    fleet.register(facts("a", "boot")).await.unwrap();
    fleet.register(facts("b", "boot")).await.unwrap();
    let full = fleet.register(facts("c", "boot")).await.unwrap_err();
    assert_eq!(full.reason, Reason::FleetFull);
    assert!(full.message.contains("max-replicas"), "{}", full.message);
    assert!(fleet.register(facts("b", "boot2")).await.is_ok());
}

/// Ids that come and go, as of pods, are no reason to refuse who lives.
#[tokio::test(start_paused = true)]
async fn a_newcomer_takes_the_place_of_who_has_been_dead_for_longest() {
    let fleet = Fleet::new(
        FleetConfig {
            max_replicas: 3,
            ..FleetConfig::default()
        },
        Arc::new(MemoryStore::default()),
    );
    let mut starts = Vec::new();
    for id in ["a", "b", "c"] {
        starts.push(fleet.register(facts(id, "boot")).await.unwrap().incarnation);
    }
    for (id, start) in [("b", starts[1]), ("a", starts[0])] {
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.deregister(&ReplicaId::new(id), start);
    }
    let ids = || -> Vec<String> {
        let all = fleet.list().into_iter();
        all.map(|r| r.facts.id.as_str().to_owned()).collect()
    };
    fleet.register(facts("d", "boot")).await.unwrap();
    assert_eq!(ids(), ["a", "c", "d"]);
    // Dead is final, also for who made room.
    assert_eq!(
        reason(fleet.register(facts("b", "boot")).await),
        Reason::IncarnationDead
    );
    assert_eq!(
        ids(),
        ["a", "c", "d"],
        "nobody makes room for who is refused"
    );
    fleet.register(facts("b", "boot2")).await.unwrap();
    assert_eq!(ids(), ["b", "c", "d"]);
    assert_eq!(
        reason(fleet.register(facts("e", "boot")).await),
        Reason::FleetFull
    );
}

#[tokio::test(start_paused = true)]
async fn incarnations_do_not_run_backwards_over_a_restart() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let before = Fleet::new(FleetConfig::default(), Arc::clone(&store));
    before.register(facts("a", "boot1")).await.unwrap();
    before.register(facts("a", "boot2")).await.unwrap();
    let after = Fleet::new(FleetConfig::default(), store);
    assert_eq!(
        reason(after.register(facts("a", "boot1")).await),
        Reason::StaleIncarnation
    );
    assert!(after.register(facts("a", "boot2")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_replica_is_its_principals_until_it_is_dead() {
    use super::restart::Found;
    use crate::store::notes::ReplicaNote;

    let before = fleet();
    let stop = CancellationToken::new();
    tokio::spawn(before.clone().keep(stop.clone()));
    let (mine, other): (Arc<str>, Arc<str>) = ("mine".into(), "other".into());
    let id = ReplicaId::new("a");
    let register = async |fleet: &Fleet, boot: &str, who: &Arc<str>| {
        fleet
            .register_by(facts("a", boot), Some(Arc::clone(who)))
            .await
    };
    let first = register(&before, "boot1", &mine).await.unwrap();
    assert_eq!(
        reason(register(&before, "boot2", &other).await),
        Reason::ReplicaTaken
    );
    before.permits(&id, &mine).unwrap();
    assert_eq!(reason(before.permits(&id, &other)), Reason::ReplicaTaken);
    before.permits(&ReplicaId::new("b"), &other).unwrap();
    let noted = before.notes();

    // Silence ends it, and what it was in the way of.
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(before.list()[0].health, Health::Dead);
    register(&before, "boot2", &other).await.unwrap();
    assert_eq!(reason(before.permits(&id, &mine)), Reason::ReplicaTaken);
    stop.cancel();

    // It is so after a restart too, until it is dead.
    let after = Fleet::new(FleetConfig::default(), Arc::clone(&before.store));
    let stop = CancellationToken::new();
    tokio::spawn(after.clone().keep(stop.clone()));
    after
        .restore(noted.clone(), |_| async { Found::Answers })
        .await;
    after.spoken_for(&id, &other);
    assert_eq!(after.owner(&id).as_deref(), Some("mine"));
    after.permits(&id, &mine).unwrap();
    assert_eq!(reason(after.permits(&id, &other)), Reason::ReplicaTaken);
    assert_eq!(
        reason(register(&after, "boot2", &other).await),
        Reason::ReplicaTaken
    );
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(after.list()[0].health, Health::Dead);
    assert_eq!(after.owner(&id), None);
    register(&after, "boot2", &other).await.unwrap();
    stop.cancel();

    // What is nobody's is whose who speaks for it first.
    let older = fleet();
    let noted = noted.into_iter().map(|note| ReplicaNote {
        owner: None,
        ..note
    });
    older
        .restore(noted.collect(), |_| async { Found::Answers })
        .await;
    older.permits(&id, &other).unwrap();
    older.beat(beat("a", first.incarnation, 1)).unwrap();
    older.spoken_for(&id, &mine);
    older.spoken_for(&id, &other);
    older.permits(&id, &mine).unwrap();
    assert_eq!(reason(older.permits(&id, &other)), Reason::ReplicaTaken);
    // And nobody's again once its principal is gone.
    older.disown(&id, &other);
    assert_eq!(reason(older.permits(&id, &other)), Reason::ReplicaTaken);
    older.disown(&id, &mine);
    older.permits(&id, &other).unwrap();
}

mod drain;
mod ghosts;
mod last_resort;
mod probing;
mod restart;
mod said_dead;
