//! Ranks that die, return and drain, and weights that change.

use std::time::Duration;

use berth::simulate::{Setup, Stuck, generate::Workload, report::PolicyReport, run, trace::Trace};

use super::{named, setup, skewed, some};

fn with(events: &[&str], replicas: usize) -> Setup {
    let mut setup = setup(replicas);
    setup.events = events.iter().map(|line| line.parse().unwrap()).collect();
    setup
}

fn affinity(trace: &Trace, setup: &Setup) -> PolicyReport {
    some(trace, setup, &named(&["affinity"])).policies.remove(0)
}

/// Exactly the keys of a rank that dies move, each once, and none goes back when
/// it returns.
#[test]
fn only_the_keys_of_a_dead_rank_move_and_none_returns() {
    let trace = skewed(96);
    let calm = affinity(&trace, &setup(8));
    let setup = with(&["11s die 3", "18s return 3"], 8);
    let report = affinity(&trace, &setup);
    let died = &report.events[0];
    assert!(died.sessions_there > 1, "{died:?}");
    assert!(died.requests_lost > 0, "{died:?}");
    assert_eq!(died.sessions_moved, died.sessions_there);
    assert_eq!(report.moves.total, died.sessions_there);
    assert_eq!(report.moves.by_reason["replica_lost"], report.moves.total);
    assert_eq!(report.moves.to_returned, 0);
    assert!(calm.hit_rate - report.hit_rate < 0.02);
    assert!(report.moves.reprefilled_tokens > 0);

    let outcome = run(&trace, &setup, &named(&["affinity"])[0]).unwrap();
    let on = |session: usize| {
        let turns = outcome.turns.iter().filter(move |t| t.session == session);
        turns.map(|t| (t.sent, t.rank)).collect::<Vec<_>>()
    };
    let mut back = 0;
    for session in 0..trace.sessions.len() {
        let ranks = on(session);
        let moves = ranks.windows(2).filter(|pair| pair[0].1 != pair[1].1);
        for pair in moves {
            assert_eq!(pair[0].1, 3, "session {session} left a rank that lives");
        }
        back += usize::from(ranks[0].1 == 3 && ranks[0].0 > Duration::from_secs(18));
        let dead = Duration::from_secs(11)..Duration::from_secs(18);
        assert!(
            ranks
                .iter()
                .all(|(at, rank)| *rank != 3 || !dead.contains(at))
        );
    }
    assert!(back > 0, "new sessions use it again");
}

/// Consistent hashing sends the keys of new sessions to the rank that came back,
/// and leaves those that moved where they are: pins are sticky in all policies.
#[test]
fn no_sticky_policy_goes_back() {
    let trace = skewed(96);
    let setup = with(&["12s die 1", "15s return 1"], 8);
    let report = some(
        &trace,
        &setup,
        &named(&["hash", "bounded_hash", "least_loaded"]),
    );
    for policy in &report.policies[..2] {
        assert_eq!(policy.moves.to_returned, 0, "{}", policy.policy);
        assert_eq!(policy.moves.total, policy.events[0].sessions_there);
    }
    assert!(report.policies[2].moves.to_returned > 0);
}

#[test]
fn a_drain_moves_nobody_until_its_grace_is_over() {
    let trace = skewed(96);
    let calm = affinity(&trace, &with(&["12s drain 2"], 8));
    assert_eq!(calm.moves.total, 0);
    let outcome = run(&trace, &with(&["12s drain 2"], 8), &named(&["affinity"])[0]).unwrap();
    let first = |session| {
        outcome
            .turns
            .iter()
            .find(|t| t.session == session && t.turn == 0)
    };
    let new = (0..96)
        .filter_map(first)
        .filter(|t| t.sent > Duration::from_secs(12));
    assert!(new.clone().count() > 10 && new.clone().all(|t| t.rank != 2));

    let hurried = affinity(&trace, &with(&["12s drain 2 grace 5s"], 8));
    assert!(hurried.moves.total > 0);
    assert_eq!(hurried.moves.by_reason["draining"], hurried.moves.total);
    assert_eq!(hurried.events[0].requests_lost, 0);
    // A drain that is called off within its grace moves nobody.
    let off = affinity(&trace, &with(&["12s drain 2 grace 5s", "16s return 2"], 8));
    assert_eq!(off.moves.total, 0);
}

/// New weights empty every cache: each session computes its history once more.
#[test]
fn new_weights_make_caches_cold_and_move_nobody() {
    let trace = skewed(96);
    let calm = affinity(&trace, &setup(8));
    let cold = affinity(&trace, &with(&["15s weights v2"], 8));
    assert_eq!(cold.moves.total, 0);
    assert!(cold.reprefilled_tokens > calm.reprefilled_tokens + 10_000);
    assert!(cold.retractions > 0);
    // One replica after the other, paused for its time: turns of its keys go
    // elsewhere meanwhile, and back.
    let rolling = affinity(&trace, &with(&["15s weights v2 on 0 pause 10s"], 8));
    assert!(rolling.reprefilled_tokens < cold.reprefilled_tokens);
    assert_eq!(
        rolling.moves.by_reason.keys().collect::<Vec<_>>(),
        ["detour", "pinned"]
    );
    // Everywhere at once: requests wait, and go home.
    let all = affinity(&trace, &with(&["15s weights v2 pause 10s"], 8));
    assert_eq!(all.moves.total, 0);
    assert!(all.latency_seconds.p99 > calm.latency_seconds.p99);
}

#[test]
fn a_fleet_that_never_comes_back_is_said() {
    let trace = Workload::Ablation.generate(None, 0);
    let policy = &named(&["affinity"])[0];
    let gone = with(&["2s die 0"], 1);
    match run(&trace, &gone, policy) {
        Err(Stuck::NoRank { waiting, .. }) => assert_eq!(waiting, 4),
        other => panic!("{other:?}"),
    }
    // Back in time: all is computed again.
    let outcome = run(&trace, &with(&["2s die 0", "9s return 0"], 1), policy).unwrap();
    assert_eq!(outcome.turns.len(), 32);
    assert_eq!(outcome.turns.iter().filter(|t| t.attempts > 1).count(), 4);
}

#[test]
fn events_must_fit_the_fleet() {
    let trace = Workload::Ablation.generate(None, 0);
    assert!(with(&["1s die 1"], 1).check(&trace).is_err());
    assert!(with(&["1s weights v2 on 8"], 8).check(&trace).is_err());
    let mut small = setup(1);
    small.shape.kv_tokens = 8192;
    let error = small.check(&trace).unwrap_err();
    assert!(error.contains("8192"), "{error}");
    small.shape.kv_tokens = 8193;
    small.check(&trace).unwrap();
    assert!(run(&trace, &small, &named(&["affinity"])[0]).is_ok());
}
