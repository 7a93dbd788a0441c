//! Drains, under paused time.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{super::drain::DrainOrder, *};
use crate::fleet::{drain::MAX_GRACE, facts::AdapterFacts};

const SECOND: Duration = Duration::from_secs(1);

fn id(name: &str) -> ReplicaId {
    ReplicaId::new(name)
}

fn order(seconds: u64) -> DrainOrder {
    DrainOrder {
        grace: Some(Duration::from_secs(seconds)),
        ..DrainOrder::default()
    }
}

/// Two replicas, `a` and `b`, and the first one's incarnation.
async fn two() -> (Arc<Fleet>, Incarnation) {
    let fleet = fleet();
    let a = fleet.register(facts("a", "boot1")).await.unwrap();
    fleet.register(facts("b", "boot1")).await.unwrap();
    (fleet, a.incarnation)
}

fn state(fleet: &Fleet, replica: &str) -> RankState {
    let snapshot = fleet.snapshot();
    let mut ranks = snapshot
        .ranks
        .iter()
        .filter(|r| r.target.replica.as_str() == replica);
    let first = ranks.next().unwrap().state.clone();
    assert!(ranks.all(|r| r.state == first), "a drain is of all ranks");
    first
}

fn pass(fleet: &Fleet) {
    fleet.tick(Instant::now(), Duration::ZERO);
}

fn draining(incarnation: Incarnation, sequence: u64, grace: Option<Duration>) -> Beat {
    Beat {
        state: ReportedState::Draining,
        drain_grace: grace,
        ..beat("a", incarnation, sequence)
    }
}

#[tokio::test(start_paused = true)]
async fn an_operators_drain_has_a_grace_then_lets_nobody_stay_and_can_be_resumed() {
    let (fleet, _) = two().await;
    let status = fleet.drain(&id("a"), order(30)).unwrap();
    assert_eq!(status.health, Health::Draining);
    let drain = status.drain.unwrap();
    assert!(drain.by_operator && !drain.by_sidecar && !drain.hold);
    assert_eq!(drain.grace_left, 30 * SECOND);
    assert_eq!(state(&fleet, "a"), RankState::PinnedOnly);
    assert_eq!(state(&fleet, "b"), RankState::Open);

    tokio::time::advance(Duration::from_millis(29_900)).await;
    // Its heartbeats came meanwhile.
    fleet.register(facts("a", "boot1")).await.unwrap();
    fleet.register(facts("b", "boot1")).await.unwrap();
    pass(&fleet);
    assert_eq!(state(&fleet, "a"), RankState::PinnedOnly);
    tokio::time::advance(Duration::from_millis(100)).await;
    let mut changes = fleet.changes();
    pass(&fleet);
    assert!(changes.has_changed().unwrap(), "who waits is told");
    assert_eq!(state(&fleet, "a"), RankState::Drained);
    changes.borrow_and_update();
    pass(&fleet);
    assert!(!changes.has_changed().unwrap(), "once");
    let drain = fleet.get(&id("a")).unwrap().drain.unwrap();
    assert_eq!(drain.grace_left, Duration::ZERO);

    let resumed = fleet.resume(&id("a")).unwrap();
    assert_eq!((resumed.health, resumed.drain), (Health::Healthy, None));
    assert_eq!(state(&fleet, "a"), RankState::Open);
    // Repeated.
    assert_eq!(
        fleet.resume(&id("a")).unwrap().health,
        Health::Healthy,
        "resuming what does not drain changes nothing"
    );
}

#[tokio::test(start_paused = true)]
async fn the_keeper_of_the_fleet_ends_the_grace() {
    let (fleet, a) = two().await;
    let stop = CancellationToken::new();
    tokio::spawn(fleet.clone().keep(stop.clone()));
    fleet.drain(&id("a"), order(3)).unwrap();
    tokio::time::sleep(3 * SECOND).await;
    fleet.beat(beat("a", a, 1)).unwrap();
    tokio::time::sleep(SECOND).await;
    assert_eq!(state(&fleet, "a"), RankState::Drained);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_repeated_drain_ends_the_grace_sooner_and_never_later() {
    let (fleet, _) = two().await;
    let left = |order| {
        let status = fleet.drain(&id("a"), order).unwrap();
        status.drain.unwrap().grace_left
    };
    assert_eq!(left(order(60)), 60 * SECOND);
    tokio::time::advance(SECOND).await;
    assert_eq!(left(order(60)), 59 * SECOND, "a retry changes nothing");
    // The server's default.
    assert_eq!(left(DrainOrder::default()), 30 * SECOND);
    assert_eq!(left(order(600)), 30 * SECOND);
    assert_eq!(left(order(0)), Duration::ZERO);
    assert_eq!(state(&fleet, "a"), RankState::Drained);
    assert_eq!(left(order(60)), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_drain_survives_registration_and_ends_with_its_start_unless_it_holds() {
    let (fleet, _) = two().await;
    fleet.drain(&id("a"), order(30)).unwrap();
    fleet.register(facts("a", "boot1")).await.unwrap();
    assert_eq!(state(&fleet, "a"), RankState::PinnedOnly);
    fleet.register(facts("a", "boot2")).await.unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Open);

    let hold = DrainOrder {
        hold: true,
        ..order(30)
    };
    fleet.drain(&id("a"), hold).unwrap();
    // Said once, it stays.
    fleet.drain(&id("a"), order(30)).unwrap();
    fleet.register(facts("a", "boot3")).await.unwrap();
    assert_eq!(
        state(&fleet, "a"),
        RankState::Drained,
        "nothing lives there"
    );
    assert!(fleet.get(&id("a")).unwrap().drain.unwrap().hold);
    fleet.register(facts("a", "boot4")).await.unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Drained);
    fleet.resume(&id("a")).unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Open);
    fleet.register(facts("a", "boot5")).await.unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Open);
}

#[tokio::test(start_paused = true)]
async fn a_dead_replica_needs_no_drain_and_one_that_is_held_is_not_forgotten() {
    let (fleet, a) = two().await;
    fleet.deregister(&id("a"), a);
    let status = fleet.drain(&id("a"), order(30)).unwrap();
    assert_eq!((status.health, status.drain), (Health::Dead, None));
    let hold = DrainOrder {
        hold: true,
        ..order(30)
    };
    let status = fleet.drain(&id("a"), hold).unwrap();
    assert!(status.drain.is_some_and(|d| d.hold));
    let much_later = Instant::now() + 3600 * SECOND;
    fleet.tick(much_later, 3600 * SECOND);
    fleet.register(facts("a", "boot2")).await.unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Drained);

    fleet.resume(&id("a")).unwrap();
    let b = fleet.get(&id("b")).unwrap().incarnation;
    fleet.deregister(&id("b"), b);
    fleet.tick(Instant::now() + 3600 * SECOND, 3600 * SECOND);
    assert!(fleet.get(&id("b")).is_none(), "others are forgotten");
}

#[tokio::test(start_paused = true)]
async fn the_last_that_can_serve_is_not_drained_by_accident() {
    let (fleet, _) = two().await;
    let refused = |replica: &str| {
        let error = fleet.drain(&id(replica), order(30)).unwrap_err();
        assert_eq!(error.reason, Reason::LastReplica);
        error.message
    };
    fleet.drain(&id("a"), order(30)).unwrap();
    let said = refused("b");
    assert!(
        said.contains("last replica") && said.contains("\"m\""),
        "{said}"
    );
    assert_eq!(state(&fleet, "b"), RankState::Open, "nothing was changed");
    // The first one's retry is no news.
    fleet.drain(&id("a"), order(30)).unwrap();
    let all_the_same = DrainOrder {
        allow_last: true,
        ..order(30)
    };
    fleet.drain(&id("b"), all_the_same).unwrap();
    fleet.drain(&id("b"), order(30)).unwrap();
    assert_eq!(state(&fleet, "b"), RankState::PinnedOnly);

    // Another model's replica is no help; one that is paused for a moment is.
    fleet.resume(&id("a")).unwrap();
    let mut other = facts("c", "boot1");
    other.model = "other".into();
    fleet.register(other).await.unwrap();
    refused("a");
    refused("c");
    let d = fleet.register(facts("d", "boot1")).await.unwrap();
    let paused = |paused| {
        let report = |rank| RankReport {
            rank,
            healthy: true,
            running: 0,
            waiting: 0,
            waiting_uncached_tokens: 0,
            kv_used_tokens: 0,
            weight_version: "1".into(),
            paused,
        };
        vec![report(0), report(1)]
    };
    let said = Beat {
        ranks: paused(true),
        ..beat("d", d.incarnation, 1)
    };
    fleet.beat(said).unwrap();
    assert_eq!(state(&fleet, "d"), RankState::Paused);
    fleet.drain(&id("a"), order(30)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_last_that_serves_an_adapter_counts_as_well() {
    let fleet = fleet();
    let mut with = facts("a", "boot1");
    with.adapters = vec![AdapterFacts {
        name: "math".into(),
        load_id: String::new(),
        resident: true,
    }];
    fleet.register(with.clone()).await.unwrap();
    fleet.register(facts("b", "boot1")).await.unwrap();
    let error = fleet.drain(&id("a"), order(30)).unwrap_err();
    assert_eq!(error.reason, Reason::LastReplica);
    assert!(error.message.contains("adapter \"math\""), "{error}");
    with.id = id("c");
    fleet.register(with).await.unwrap();
    fleet.drain(&id("a"), order(30)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_that_serves_nobody_may_be_drained() {
    let fleet = fleet();
    let a = fleet.register(facts("a", "boot1")).await.unwrap();
    let unwell = Beat {
        state: ReportedState::Unhealthy,
        ..beat("a", a.incarnation, 1)
    };
    fleet.beat(unwell).unwrap();
    fleet.drain(&id("a"), order(30)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn nonsense_is_refused() {
    let (fleet, _) = two().await;
    let unknown = fleet.drain(&id("x"), order(1)).unwrap_err();
    assert_eq!(unknown.reason, Reason::ReplicaNotFound);
    assert_eq!(reason(fleet.resume(&id("x"))), Reason::ReplicaNotFound);
    let long = DrainOrder {
        grace: Some(MAX_GRACE + SECOND),
        ..DrainOrder::default()
    };
    let error = fleet.drain(&id("a"), long).unwrap_err();
    assert_eq!(error.violations[0].field, "grace");
}

#[tokio::test(start_paused = true)]
async fn a_sidecar_that_drains_says_for_how_long_and_may_be_ready_again() {
    let (fleet, a) = two().await;
    let heard = fleet.beat(draining(a, 1, Some(10 * SECOND))).unwrap();
    assert!(!heard.drain, "nobody ordered it");
    assert_eq!(state(&fleet, "a"), RankState::PinnedOnly);
    let drain = fleet.get(&id("a")).unwrap().drain.unwrap();
    assert!(drain.by_sidecar && !drain.by_operator);
    assert_eq!(drain.grace_left, 10 * SECOND);
    // Nothing that an operator could end.
    let resumed = fleet.resume(&id("a")).unwrap();
    assert_eq!(resumed.health, Health::Draining);
    // Later words end it sooner only; a word without a grace changes nothing.
    fleet.beat(draining(a, 2, Some(60 * SECOND))).unwrap();
    fleet.beat(draining(a, 3, None)).unwrap();
    assert_eq!(
        fleet.get(&id("a")).unwrap().drain.unwrap().grace_left,
        10 * SECOND
    );
    fleet.beat(draining(a, 4, Some(Duration::ZERO))).unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Drained);
    fleet.beat(beat("a", a, 5)).unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Open);
    // Without a word of the grace: the server's default.
    fleet.beat(draining(a, 6, None)).unwrap();
    assert_eq!(
        fleet.get(&id("a")).unwrap().drain.unwrap().grace_left,
        30 * SECOND
    );
}

#[tokio::test(start_paused = true)]
async fn the_sidecars_echo_of_an_operators_drain_is_no_drain_of_its_own() {
    let (fleet, a) = two().await;
    fleet.drain(&id("a"), order(3600)).unwrap();
    assert!(fleet.beat(beat("a", a, 1)).unwrap().drain);
    assert!(fleet.beat(draining(a, 2, None)).unwrap().drain);
    let drain = fleet.get(&id("a")).unwrap().drain.unwrap();
    assert!(!drain.by_sidecar);
    assert_eq!(drain.grace_left, 3600 * SECOND, "not the default's 30 s");
    fleet.resume(&id("a")).unwrap();
    assert_eq!(state(&fleet, "a"), RankState::Open);
    // It has not heard of that yet.
    assert!(!fleet.beat(draining(a, 3, None)).unwrap().drain);
    assert_eq!(state(&fleet, "a"), RankState::Open);
    fleet.beat(beat("a", a, 4)).unwrap();
    // Resumed before it was heard to repeat what it was told.
    fleet.drain(&id("a"), order(3600)).unwrap();
    assert!(fleet.beat(beat("a", a, 5)).unwrap().drain);
    fleet.resume(&id("a")).unwrap();
    assert!(!fleet.beat(draining(a, 6, None)).unwrap().drain);
    assert_eq!(state(&fleet, "a"), RankState::Open);
    fleet.beat(beat("a", a, 7)).unwrap();
    // By its own will.
    fleet.beat(draining(a, 8, None)).unwrap();
    assert_eq!(state(&fleet, "a"), RankState::PinnedOnly);
}

#[tokio::test(start_paused = true)]
async fn the_sooner_of_two_graces_counts_and_a_drain_of_the_sidecars_outlives_a_resumption() {
    let (fleet, a) = two().await;
    fleet.drain(&id("a"), order(60)).unwrap();
    fleet.beat(draining(a, 1, Some(5 * SECOND))).unwrap();
    let drain = fleet.get(&id("a")).unwrap().drain.unwrap();
    assert!(drain.by_operator && drain.by_sidecar);
    assert_eq!(drain.grace_left, 5 * SECOND);
    let resumed = fleet.resume(&id("a")).unwrap();
    assert_eq!(resumed.health, Health::Draining);
    assert!(resumed.drain.is_some_and(|d| !d.by_operator));
}

#[tokio::test(start_paused = true)]
async fn a_draining_rank_that_is_unwell_or_paused_takes_nothing_and_keeps_its_keys() {
    let (fleet, a) = two().await;
    let report = |healthy, paused| RankReport {
        rank: 0,
        healthy,
        running: 0,
        waiting: 0,
        waiting_uncached_tokens: 0,
        kv_used_tokens: 0,
        weight_version: "1".into(),
        paused,
    };
    fleet.drain(&id("a"), order(30)).unwrap();
    let first = |fleet: &Fleet| fleet.snapshot().ranks[0].state.clone();
    for (sequence, healthy, paused) in [(1, false, false), (2, true, true)] {
        let said = Beat {
            ranks: vec![report(healthy, paused)],
            ..beat("a", a, sequence)
        };
        fleet.beat(said).unwrap();
        assert!(matches!(first(&fleet), RankState::Closed(_)));
    }
    fleet.drain(&id("a"), order(0)).unwrap();
    assert_eq!(first(&fleet), RankState::Drained, "its keys leave");
}

#[tokio::test(start_paused = true)]
async fn a_beat_is_told_what_is_in_flight() {
    let (fleet, a) = two().await;
    let snapshot = fleet.snapshot();
    let of_a = snapshot.ranks[0].load.take(3);
    let _of_the_other_rank = snapshot.ranks[1].load.take(1);
    let _of_b = snapshot.ranks[2].load.take(8);
    let heard = fleet.beat(draining(a, 1, Some(Duration::ZERO))).unwrap();
    assert_eq!(heard.in_flight, 4);
    drop(of_a);
    // An old beat is answered as well.
    let heard = fleet.beat(draining(a, 1, Some(Duration::ZERO))).unwrap();
    assert_eq!(heard.in_flight, 1);
}

#[tokio::test(start_paused = true)]
async fn who_left_after_a_drain_is_told_from_who_was_lost() {
    let (fleet, a) = two().await;
    let slots: Vec<_> = fleet.snapshot().ranks.iter().map(|r| r.slot).collect();
    fleet.beat(draining(a, 1, Some(SECOND))).unwrap();
    fleet.deregister(&id("a"), a);
    let b = fleet.get(&id("b")).unwrap().incarnation;
    fleet.deregister(&id("b"), b);
    let gone: Vec<_> = fleet.snapshot().departed.iter().copied().collect();
    assert!(gone.contains(&slots[0]) && gone.contains(&slots[1]));
    assert_eq!(gone.len(), 2, "b had work for all that is known");
    // Its next start does not make it forgotten, the one after does.
    fleet.register(facts("a", "boot2")).await.unwrap();
    assert_eq!(fleet.snapshot().departed.len(), 2);
    fleet.register(facts("a", "boot3")).await.unwrap();
    assert!(fleet.snapshot().departed.is_empty());
    let a = fleet.get(&id("a")).unwrap().incarnation;
    fleet.beat(draining(a, 1, Some(SECOND))).unwrap();
    fleet.deregister(&id("a"), a);
    assert_eq!(fleet.snapshot().departed.len(), 2);
    fleet.tick(Instant::now() + 601 * SECOND, Duration::ZERO);
    assert!(fleet.snapshot().departed.is_empty(), "forgotten with it");
}
