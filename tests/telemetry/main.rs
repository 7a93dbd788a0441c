//! How Berth is seen through: the real `berth serve` as a process, a real
//! collector of traces, simulated engines behind a front that can misbehave.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod canary;
mod collector;
mod front;
mod lines;
mod metrics;
mod page;
mod plane;
mod requests;
mod search;
mod strangers;
mod traces;

#[path = "../support/process.rs"]
mod process;

#[path = "../support/engines.rs"]
mod engines;
#[path = "../support/wait.rs"]
mod wait;
