//! The figures of `docs/simulation.md`, on recorded traces that are no part of the
//! project. By a person, with a folder that has them:
//!
//! ```text
//! BERTH_TRACES=DIR cargo test --release --test simulate recorded -- --ignored
//! ```

use std::{path::PathBuf, process::Command};

use super::*;
use berth::simulate::{read::read, report::PolicyReport};

/// A compressed trace of that folder.
fn trace(name: &str) -> Trace {
    let dir = std::env::var_os("BERTH_TRACES").expect("BERTH_TRACES names the folder of traces");
    let path = PathBuf::from(dir).join(name);
    let text = Command::new("gzip").arg("-dc").arg(&path).output().unwrap();
    assert!(text.status.success(), "{}: {text:?}", path.display());
    read(name, text.stdout.as_slice(), usize::MAX).unwrap()
}

/// 245 coding sessions at a quarter of their lengths.
fn weka() -> Trace {
    trace("weka_q4.txt.gz")
}

/// At their full length, 64 at once.
fn full(setup: &mut Setup) -> Trace {
    setup.arrival = Arrival::Live(64);
    weka().scaled(4).unwrap()
}

fn of<'a>(report: &'a Report, name: &str) -> &'a PolicyReport {
    report.policies.iter().find(|p| p.policy == name).unwrap()
}

fn hits(report: &Report, name: &str) -> f64 {
    100.0 * of(report, name).hits_of_reachable
}

/// Reachable hits in percent as they were measured elsewhere, in their order.
fn near(report: &Report, theirs: &[(&str, f64)]) {
    for (name, percent) in theirs {
        let ours = hits(report, name);
        assert!((ours - percent).abs() < 5.0, "{name}: {ours} and {percent}");
    }
    for pair in theirs.windows(2) {
        let (less, more) = (hits(report, pair[0].0), hits(report, pair[1].0));
        assert!(less < more, "{} {less}, {} {more}", pair[0].0, pair[1].0);
    }
}

fn within_a_percent_of_the_best(report: &Report) {
    let best = report.policies.iter().map(|p| p.makespan_seconds);
    let best = best.fold(f64::INFINITY, f64::min);
    let ours = of(report, "affinity").makespan_seconds;
    assert!(ours <= 1.01 * best, "{ours} and {best}");
}

#[test]
#[ignore = "needs traces that are no part of the project"]
fn lengths_of_a_quarter_on_h100() {
    let trace = weka();
    for seed in 0..4 {
        let setup = Setup { seed, ..setup(8) };
        let report = all(&trace, &setup);
        assert!(hits(&report, "affinity") >= 95.0);
        within_a_percent_of_the_best(&report);
        let theirs = [
            ("round_robin", 27.7),
            ("hash", 94.0),
            ("bounded_hash", 95.2),
            ("affinity", 95.5),
        ];
        if seed == 0 {
            near(&report, &theirs);
        }
    }
}

#[test]
#[ignore = "needs traces that are no part of the project"]
fn full_lengths_on_h200() {
    let mut setup = setup(8);
    setup.timing = Timing::h200();
    setup.shape.accelerator = "NVIDIA H200";
    setup.shape.kv_tokens = 747_000;
    let trace = full(&mut setup);
    let report = all(&trace, &setup);
    assert!(hits(&report, "affinity") >= 99.5);
    within_a_percent_of_the_best(&report);
    let theirs = [
        ("round_robin", 20.7),
        ("hash", 88.2),
        ("bounded_hash", 98.2),
        ("affinity", 99.9),
    ];
    near(&report, &theirs);
    // A rank dies and returns: its keys move, none back, and little is lost.
    let calm = of(&report, "affinity").hit_rate;
    for rank in 0..8 {
        setup.events = [format!("2000s die {rank}"), format!("2300s return {rank}")]
            .iter()
            .map(|line| line.parse().unwrap())
            .collect();
        let report = some(&trace, &setup, &named(&["affinity"]));
        let died = of(&report, "affinity");
        assert_eq!(died.moves.total, died.events[0].sessions_there);
        assert_eq!(died.moves.to_returned, 0);
        assert!(calm - died.hit_rate < 0.01, "{calm} {}", died.hit_rate);
    }
}

#[test]
#[ignore = "needs traces that are no part of the project"]
fn full_lengths_on_h100_whose_caches_are_too_small() {
    let mut setup = setup(8);
    let report = all(&full(&mut setup), &setup);
    assert!(hits(&report, "kv_admission") >= 90.0);
    let others = report
        .policies
        .iter()
        .filter(|p| p.policy != "kv_admission");
    let best = others
        .map(|p| p.makespan_seconds)
        .fold(f64::INFINITY, f64::min);
    let ours = of(&report, "kv_admission").makespan_seconds;
    assert!(ours <= best, "{ours} and {best}");
}

/// 36.64 % of the blocks of the published conversation trace came before.
#[test]
#[ignore = "needs traces that are no part of the project"]
fn blocks_of_conversations() {
    let trace = trace("mooncake_conversation_trace.jsonl.gz");
    let report = some(&trace, &setup(8), &named(&["prefix"]));
    let percent = 100.0 * report.workload.reachable_block_rate.unwrap();
    assert!((percent - 36.64).abs() < 0.005, "{percent}");
}
