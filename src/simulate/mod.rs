//! Routing policies compared on one workload, in virtual time.
//!
//! The router is the one that serves, over the snapshots that it has there; the
//! ranks are those of the simulated engine: its scheduler, radix cache and step
//! times, over sequences that know where tokens come from instead of the tokens
//! ([`outline`]). What is left out is the network, and the time that a dead rank
//! takes to be noticed: its port refuses, so that is none.
//!
//! The same trace, setup and policies give the same report to the byte.

mod chart;
pub mod events;
mod fleet;
pub mod generate;
mod happen;
mod lane;
pub mod oracle;
pub mod outcome;
pub mod outline;
pub mod policy;
mod random;
pub mod read;
pub mod report;
mod table;
pub mod trace;
mod turns;
mod world;

use std::{
    num::NonZeroUsize,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

pub use fleet::Shape;
pub use lane::Work;
pub use policy::Policy;
pub use report::Report;
pub use world::{Stuck, run};

use crate::engine::sim::{
    scheduler::RankConfig,
    timing::Timing,
    tokens::{DEFAULT_EOS, Eos},
};
use events::Event;
use oracle::Reachable;
use trace::Trace;

/// Virtual time is counted in nanoseconds, and does not run out.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

/// When sessions begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// One after the other, so far apart.
    Every(Duration),
    /// So many at once; the next one begins when one ends, in the trace's order.
    Live(usize),
    /// As the trace says.
    Recorded,
}

/// Everything but the workload and the policy.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The fleet.
    pub shape: Shape,
    /// How long a rank's steps take.
    pub timing: Timing,
    /// Prompt tokens that a rank computes in one step.
    pub chunk: usize,
    /// When sessions begin.
    pub arrival: Arrival,
    /// Names the sessions and requests, and so decides what hashes decide.
    pub seed: u64,
    /// What happens to the fleet.
    pub events: Vec<Event>,
}

impl Setup {
    /// One rank of it.
    fn rank(&self) -> RankConfig {
        RankConfig {
            // Nothing is generated, so nothing ends but by its length.
            vocab: 2,
            eos: Eos {
                id: DEFAULT_EOS,
                one_in: 0,
            },
            page: self.shape.page,
            kv_tokens: self.shape.kv_tokens,
            max_running: self.shape.max_running,
            max_queued: None,
            chunk: self.chunk,
            priorities: false,
            timing: self.timing,
        }
    }

    /// Whether `trace` can run on it.
    ///
    /// # Errors
    /// All that is wrong, in a sentence each.
    pub fn check(&self, trace: &Trace) -> Result<(), String> {
        let shape = &self.shape;
        let faults = [
            (
                !(1..=4096).contains(&shape.replicas) || !(1..=1024).contains(&shape.ranks),
                "there are 1 to 4096 replicas of 1 to 1024 ranks",
            ),
            (
                shape.replicas.saturating_mul(shape.ranks) > 65_536,
                "there are at most 65536 ranks in all",
            ),
            (
                !(1..=4096).contains(&shape.page),
                "a page has 1 to 4096 tokens",
            ),
            (
                self.chunk < shape.page,
                "a chunk of a prompt is at least a page",
            ),
            (shape.max_running == 0, "a rank runs at least 1 request"),
            (
                self.arrival == Arrival::Live(0),
                "at least one session is live",
            ),
            (
                matches!(self.arrival, Arrival::Every(gap)
                    if gap.saturating_mul(u32::try_from(trace.sessions.len()).unwrap_or(u32::MAX))
                        > LONGEST),
                "sessions begin within ten years",
            ),
            (
                trace.sessions.is_empty() || trace.sessions.iter().any(|s| s.turns.is_empty()),
                "there is at least one session, and each has a turn",
            ),
            (
                self.arrival == Arrival::Recorded
                    && trace.sessions.iter().any(|s| s.starts.is_none()),
                "the trace does not say when its sessions begin",
            ),
            (
                trace
                    .sessions
                    .iter()
                    .flat_map(|s| &s.turns)
                    .any(|t| t.prompt() == 0 || t.output == 0),
                "every turn has a prompt and generates a token",
            ),
        ];
        let mut faults: Vec<String> = faults
            .iter()
            .filter(|(wrong, _)| *wrong)
            .map(|(_, what)| (*what).to_owned())
            .collect();
        // One place more than the tokens: the KV of the next one needs it.
        let room = shape.kv_tokens - shape.kv_tokens % shape.page.max(1);
        if trace.longest() + 1 > room as u64 {
            faults.push(format!(
                "the longest request has {} tokens with its output; a rank's KV cache holds {room}",
                trace.longest()
            ));
        }
        let unknown = self
            .events
            .iter()
            .filter(|event| event.what.replica().is_some_and(|r| r >= shape.replicas));
        faults.extend(unknown.map(|event| {
            let last = shape.replicas.saturating_sub(1);
            format!("`{event}`: replicas are numbered 0 to {last}")
        }));
        if faults.is_empty() {
            Ok(())
        } else {
            Err(faults.join("; "))
        }
    }
}

/// Why there is no comparison.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    /// The trace does not fit the setup.
    #[error("{0}")]
    Setup(String),
    /// A run has no end.
    #[error("policy {policy}: {why}")]
    Run {
        /// Which.
        policy: String,
        /// Why.
        why: Stuck,
    },
}

/// Runs every policy over the trace, `threads` of them at a time, and reports
/// them in their order.
///
/// # Errors
/// When the trace does not fit the setup or a run has no end.
pub fn compare(
    trace: &Trace,
    setup: &Setup,
    policies: &[Policy],
    threads: NonZeroUsize,
) -> Result<Report, Failed> {
    setup.check(trace).map_err(Failed::Setup)?;
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let mut reachable = None;
    std::thread::scope(|scope| {
        for _ in 0..threads.get().min(policies.len()) {
            scope.spawn(|| {
                while let Some(policy) = policies.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run(trace, setup, policy);
                    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                    results.push((policy.name.as_str(), outcome));
                }
            });
        }
        reachable = Some(Reachable::of(trace));
    });
    let reachable = reachable.unwrap_or_else(|| Reachable::of(trace));
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut rows = Vec::with_capacity(policies.len());
    for policy in policies {
        let at = results.iter().position(|(name, _)| *name == policy.name);
        let Some((_, outcome)) = at.map(|at| results.swap_remove(at)) else {
            continue;
        };
        let outcome = outcome.map_err(|why| Failed::Run {
            policy: policy.name.clone(),
            why,
        })?;
        rows.push(report::PolicyReport::new(policy, &outcome, &reachable));
    }
    Ok(Report::new(trace, setup, &reachable, rows))
}
