//! Faults of networks and processes under live trajectories: partitions, a control
//! plane that is stopped, replicas that are killed again and again. Everything that
//! is cut, stopped or killed is a process of its own.
//!
//! The long forms, each printing its figures with `-- --nocapture`:
//!
//! | variable | short form | long form |
//! |---|---|---|
//! | `BERTH_CHAOS_PARTITION` | 3s | 10s |
//! | `BERTH_CHAOS_STOP` | 3s | 60s |
//! | `BERTH_CHAOS_KILLS` | 4 | 50 |
//! | `BERTH_CHAOS_STARTS` | 5 | 20 |
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod engine;
mod kills;
mod load;
mod partition;
#[path = "../support/process.rs"]
mod process;
mod proxy;
mod restart;
mod starts;
mod stopped;
#[path = "../support/trainer.rs"]
mod trainer;
mod watcher;

use std::{str::FromStr, time::Duration};

use process::{Process, berth};

/// A sidecar as a process of its own.
fn sidecar(control_plane: &str, engine: &str, replica: &str) -> Process {
    let child = berth()
        .args(["sidecar", "--control-plane", control_plane])
        .args(["--engine-url", engine, "--replica-id", replica])
        .args(["--log", "error"])
        .spawn()
        .unwrap();
    Process(child)
}

/// A variable of the long forms.
fn variable<T: FromStr>(name: &str, short: T) -> T {
    std::env::var(name).map_or(short, |said| {
        said.parse()
            .unwrap_or_else(|_| panic!("{name}={said} cannot be read"))
    })
}

fn time(name: &str, short: Duration) -> Duration {
    std::env::var(name).map_or(short, |said| humantime::parse_duration(&said).unwrap())
}

/// Waits until `condition` holds.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let begun = tokio::time::Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
