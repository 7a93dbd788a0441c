//! The ablation harness: the same multi-turn workload against a running control
//! plane, once with affinity and once without, and what the difference is.
//!
//! It speaks the public gRPC API and nothing else, so it measures any control
//! plane that a trainer could use. What it guarantees:
//!
//! - Both arms send the same number of requests with prompts of the same
//!   lengths, and with `ignore_eos` generate the same number of tokens.
//! - No prefix is shared between two trajectories, arms or runs, and no key
//!   between two runs: nothing that was there before can help or replay.
//! - A request that fails fails the run. A report is of the whole workload or
//!   there is none.

pub mod affinity;
pub mod arms;
pub mod chart;
mod client;
mod fleet;
pub mod playground;
pub mod progress;
pub mod report;
pub mod table;
pub mod workload;

pub use affinity::{AffinityBench, run};
pub use arms::Arm;
pub use report::Report;
