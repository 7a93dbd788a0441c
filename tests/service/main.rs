//! The service as a trainer sees it: a real server on a real port, simulated
//! engines behind real sidecars.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod ablation;
mod adapters;
mod bad_requests;
mod cluster;
mod drain;
mod duplicates;
mod endpoints;
mod engines_that_fail;
mod fleet;
mod health;
mod poison;
mod policies;
mod routing;
mod streams;
mod vllm;
mod weights;

#[path = "../support/engines.rs"]
mod engines;
#[path = "../support/wait.rs"]
mod wait;
