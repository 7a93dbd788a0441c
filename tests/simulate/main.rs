//! The comparison of policies in virtual time: small workloads of the project's
//! own making, each with what must come out of it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod command;
mod events;
mod invariants;
mod policies;
mod recorded;
mod traces;

use std::{num::NonZeroUsize, time::Duration};

use berth::{
    engine::sim::timing::Timing,
    simulate::{Arrival, Policy, Report, Setup, Shape, compare, generate::Workload, trace::Trace},
};

/// H100 replicas of one rank; sessions a quarter of a second apart.
pub fn setup(replicas: usize) -> Setup {
    Setup {
        shape: Shape {
            replicas,
            ranks: 1,
            accelerator: "NVIDIA H100 80GB HBM3",
            kv_tokens: 375_000,
            page: 1,
            max_running: 256,
        },
        timing: Timing::h100(),
        chunk: 8192,
        arrival: Arrival::Every(Duration::from_millis(250)),
        seed: 0,
        events: Vec::new(),
    }
}

/// All policies over a trace.
pub fn all(trace: &Trace, setup: &Setup) -> Report {
    some(trace, setup, &Policy::all())
}

/// These policies over a trace.
pub fn some(trace: &Trace, setup: &Setup, policies: &[Policy]) -> Report {
    compare(trace, setup, policies, NonZeroUsize::new(2).unwrap()).unwrap()
}

/// By their names.
pub fn named(names: &[&str]) -> Vec<Policy> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// Skewed sessions with short outputs, so that an unoptimized build is fast too.
pub fn skewed(sessions: usize) -> Trace {
    let mut trace = Workload::Skewed.generate(Some(sessions), 0);
    for session in &mut trace.sessions {
        session.turns.truncate(20);
        let mut cut = 0;
        for turn in &mut session.turns {
            // What is not generated is not in the next turn's history either.
            turn.reuse -= cut.min(turn.reuse);
            let output = turn.output.min(120);
            cut = if turn.reuse == 0 { 0 } else { cut } + turn.output - output;
            turn.output = output;
        }
    }
    trace
}
