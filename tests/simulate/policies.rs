//! What the policies come to, where it is known beforehand.

use berth::simulate::{
    Arrival, Report, generate::Workload, outcome::Outcome, report::PolicyReport, run,
};

use super::{all, named, setup, skewed, some};

fn of<'a>(report: &'a Report, name: &str) -> &'a PolicyReport {
    report.policy(name).unwrap()
}

/// The ceiling of the workload that the project started from: 43,001 of 47,104
/// tokens of each trajectory, and the times of an engine that has them.
#[test]
fn the_ablations_ceiling_and_its_times() {
    let mut setup = setup(8);
    setup.arrival = Arrival::Live(1);
    let trace = Workload::Ablation.generate(None, 0);
    let report = all(&trace, &setup);
    for name in ["affinity", "bounded_hash", "hash"] {
        let policy = of(&report, name);
        assert_eq!(policy.cached_tokens, 4 * 43_001, "{name}");
        assert!((policy.hits_of_reachable - 1.0).abs() < 1e-12, "{name}");
        assert_eq!((policy.moves.total, policy.reprefilled_tokens), (0, 0));
        // 4 cold turns of 4.648 s and 28 warm ones of 4.403 s.
        assert!((policy.makespan_seconds / 141.9 - 1.0).abs() < 0.005);
        assert!((policy.latency_seconds.p50 / 4.403 - 1.0).abs() < 0.01);
    }
    // Eight ranks in turn: no turn of a trajectory of eight finds another.
    assert_eq!(of(&report, "round_robin").cached_tokens, 0);
    let random = of(&report, "random");
    assert!((0.1..0.6).contains(&random.hit_rate), "{}", random.hit_rate);
    assert!(random.makespan_seconds > of(&report, "affinity").makespan_seconds);
}

#[test]
fn balance_of_new_keys() {
    let trace = Workload::OneShot.generate(Some(64), 0);
    let mut setup = setup(16);
    setup.arrival = Arrival::Live(64);
    let report = all(&trace, &setup);
    assert!((of(&report, "affinity").balance.sessions - 1.0).abs() < 1e-12);
    assert!(of(&report, "hash").balance.sessions > 1.4);
    let bounded = of(&report, "bounded_hash").balance.sessions;
    assert!((1.0..=1.26).contains(&bounded), "{bounded}");
}

/// Where nothing can be reused, affinity costs nothing.
#[test]
fn without_reuse_affinity_is_least_loaded() {
    let trace = Workload::OneShot.generate(Some(600), 0);
    let setup = setup(8);
    let report = some(&trace, &setup, &named(&["affinity", "least_loaded"]));
    let (affinity, least) = (of(&report, "affinity"), of(&report, "least_loaded"));
    assert_eq!((affinity.cached_tokens, affinity.moves.total), (0, 0));
    assert!((affinity.hits_of_reachable - 1.0).abs() < 1e-12);
    assert!((affinity.makespan_seconds / least.makespan_seconds - 1.0).abs() < 0.01);
    let mean = |policy: &PolicyReport| policy.latency_seconds.mean;
    assert!((mean(affinity) / mean(least) - 1.0).abs() < 0.01);
}

/// Skewed sessions: sticky policies keep what there is to keep, per-request ones
/// do not, and balance is worth time.
#[test]
fn skewed_sessions() {
    let trace = skewed(96);
    let report = all(&trace, &setup(8));
    let hits = |name| of(&report, name).hits_of_reachable;
    for name in ["affinity", "bounded_hash", "hash"] {
        assert!(hits(name) > 0.99, "{name}: {}", hits(name));
        assert_eq!(of(&report, name).moves.total, 0);
    }
    // Without any key: all but the load bound's exceptions find their way back.
    assert!(hits("prefix") > 0.9, "prefix: {}", hits("prefix"));
    for name in ["round_robin", "random", "least_loaded"] {
        assert!(hits(name) < 0.7, "{name}: {}", hits(name));
        let again = of(&report, name).reprefilled_tokens;
        assert!(again >= of(&report, name).moves.reprefilled_tokens && again > 0);
    }
    let p95 = |name| of(&report, name).latency_seconds.p95;
    assert!(
        p95("affinity") <= p95("hash"),
        "{} {}",
        p95("affinity"),
        p95("hash")
    );
    let load = |name| of(&report, name).balance.in_flight;
    assert!(load("affinity") < load("hash"));
}

/// A rank with too little KV for its sessions loses their prefixes, and so does
/// the pool of all ranks.
#[test]
fn finite_caches() {
    let trace = skewed(48);
    let mut setup = setup(4);
    setup.shape.kv_tokens = 40_000;
    let report = some(&trace, &setup, &named(&["affinity", "hash"]));
    for policy in &report.policies {
        assert!(policy.evicted_tokens > 0);
        assert!(
            policy.hits_of_reachable < 0.99,
            "{}",
            policy.hits_of_reachable
        );
        assert!(policy.hits_of_pooled >= policy.hits_of_reachable);
        assert!(policy.hits_of_pooled < 1.1, "{}", policy.hits_of_pooled);
    }
    // Pages waste what does not fill them.
    setup.shape.kv_tokens = 375_000;
    setup.shape.page = 256;
    let paged = some(&trace, &setup, &named(&["affinity"]));
    let share = of(&paged, "affinity").hits_of_reachable;
    assert!((0.9..0.995).contains(&share), "{share}");
}

#[test]
fn siblings_find_their_shared_prompt_on_one_rank() {
    let trace = Workload::Grpo.generate(Some(6), 0);
    let mut one = setup(1);
    one.arrival = Arrival::Live(1);
    let report = some(&trace, &one, &named(&["affinity"]));
    let alone = of(&report, "affinity");
    // The last generated token of each turn has no KV: less than a thousandth.
    assert!(
        alone.hits_of_reachable > 0.999,
        "{}",
        alone.hits_of_reachable
    );
    let spread = some(&trace, &setup(8), &named(&["affinity"]));
    assert!(of(&spread, "affinity").hits_of_reachable < alone.hits_of_reachable);
}

/// Sessions that are live at once, never more than were asked for.
#[test]
fn live_sessions_are_bounded() {
    let trace = skewed(30);
    let mut setup = setup(2);
    setup.arrival = Arrival::Live(5);
    let outcome: Outcome = run(&trace, &setup, &named(&["affinity"])[0]).unwrap();
    let mut marks = Vec::new();
    for session in 0..trace.sessions.len() {
        let turns = outcome.turns.iter().filter(|t| t.session == session);
        let begun = turns.map(|t| t.sent).min().unwrap();
        marks.push((begun, 1));
        marks.push((outcome.sessions[session], -1));
    }
    // An end makes place for a beginning at the same moment.
    marks.sort_unstable();
    let (mut live, mut most) = (0, 0);
    for (_, change) in marks {
        live += change;
        most = most.max(live);
    }
    assert_eq!(most, 5);
}

#[test]
fn replicas_of_several_ranks() {
    let trace = skewed(48);
    let mut many = setup(2);
    many.shape.ranks = 4;
    let report = some(&trace, &many, &named(&["affinity", "round_robin"]));
    assert!(of(&report, "affinity").hits_of_reachable > 0.99);
    let outcome = run(&trace, &many, &named(&["affinity"])[0]).unwrap();
    assert_eq!(outcome.ranks.len(), 8);
    assert!(outcome.ranks.iter().all(|rank| rank.began > 0));
}
