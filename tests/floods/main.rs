//! Good traffic while others flood the server: 5,000 idle connections, 500 that
//! send a byte a second, resets, pings.
//!
//! `cargo test --test floods` is the short form: everybody is served through all
//! of it, and memory stays. The long form is for a quiet machine:
//!
//! ```text
//! cargo build --release
//! BERTH_FLOOD_SECONDS=300 BERTH_FLOOD_BINARY=target/release/berth \
//!   cargo test --release --test floods -- --nocapture
//! ```
//!
//! `BERTH_FLOOD_RATE` sets the frames a second of all flooders (pings 20,000, calls
//! that are reset 5,000), `BERTH_FLOOD_OPTIONS` more options of the server,
//! `BERTH_FLOODS` those that are wanted, as "idle,pings".
//!
//! It prints the latencies of good traffic and the server's memory, and fails
//! where the p99 doubles, or memory grows by 200 MB or does not come back.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod flooders;
mod good;

#[path = "../support/process.rs"]
mod process;
#[path = "../support/served.rs"]
mod served;
#[path = "../support/wait.rs"]
mod wait;
#[path = "../support/wire.rs"]
mod wire;

use std::{process::Command, time::Duration};

use flooders::{Flood, Flooder};
use good::{Good, Latencies};
use served::Served;
use tokio::time::Instant;

const MB: u64 = 1 << 20;

/// Of the server's memory, in bytes.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.unwrap().parse::<u64>().unwrap() << 10
}

/// The server's time on the processors so far, in seconds.
fn busy(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks: f64 = [11, 12]
        .map(|i| fields[i].parse::<f64>().unwrap())
        .iter()
        .sum();
    ticks / 100.0
}

/// One part of the run: what it was like for good traffic, and for the server.
struct Part {
    latencies: Latencies,
    peak: u64,
    busy: f64,
}

async fn part(good: &Good, pid: u32, long: Duration) -> Part {
    let (begun, before) = (Instant::now(), busy(pid));
    let watch = async {
        let mut peak = 0;
        loop {
            peak = resident(pid).max(peak);
            tokio::time::sleep(Duration::from_millis(200)).await;
            if good.is_over() {
                return peak;
            }
        }
    };
    let (latencies, peak) = tokio::join!(good.run(long), watch);
    Part {
        latencies,
        peak,
        busy: (busy(pid) - before) / begun.elapsed().as_secs_f64(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn good_traffic_is_served_through_floods() {
    let seconds = std::env::var("BERTH_FLOOD_SECONDS").ok();
    let is_long = seconds.is_some();
    let long = Duration::from_secs(seconds.map_or(1, |text| text.parse().unwrap()));
    // For memory to come back.
    let rest = long.min(Duration::from_secs(40));
    let binary = std::env::var("BERTH_FLOOD_BINARY")
        .unwrap_or_else(|_| env!("CARGO_BIN_EXE_berth").to_owned());
    // What floods leave behind is gone before the rest is over.
    let mut options = vec!["--first-request-timeout", "20s", "--body-timeout", "20s"];
    let more = std::env::var("BERTH_FLOOD_OPTIONS").unwrap_or_default();
    options.extend(more.split_whitespace());
    let server = Served::start(Command::new(binary), &options).await;
    let pid = server.process.0.id();
    // The flood's and good traffic's own sockets.
    berth::listen::descriptors::raise(6000);
    let good = Good::start(server.grpc).await;
    // The first requests fill caches and allocators.
    good.run(long.min(Duration::from_secs(5))).await;

    let before = resident(pid);
    let quiet = part(&good, pid, long).await;
    // What good traffic leaves by itself: results are kept.
    let made = resident(pid).saturating_sub(before) as f64 / long.as_secs_f64();
    println!(
        "quiet: {}, {:.2} of a core; memory {} MB before, {} after",
        quiet.latencies,
        quiet.busy,
        before / MB,
        resident(pid) / MB,
    );
    let mut faults = Vec::new();
    for flood in Flood::ALL.into_iter().filter(|flood| flood.is_wanted()) {
        let before = resident(pid);
        let flooder = Flooder::start(flood, server.grpc, is_long);
        let during = part(&good, pid, long).await;
        let done = flooder.stop();
        let rested = part(&good, pid, rest).await;
        let after = resident(pid);
        let open = wire::metric(server.admin, "berth_connections{port=\"grpc\"}").await;
        let ratio = during.latencies.p99() / quiet.latencies.p99();
        println!(
            "{flood:?} ({done}): {}, {:.2} of a core, p99 x {ratio:.2}; then {}; \
             memory {} MB before, {} at its peak, {} after; {open} connections left",
            during.latencies,
            during.busy,
            rested.latencies,
            before / MB,
            during.peak.max(rested.peak) / MB,
            after / MB,
        );
        let grown = during.peak.max(rested.peak).saturating_sub(before);
        if grown >= 200 * MB {
            faults.push(format!("{flood:?}: memory grew by {} MB", grown / MB));
        }
        if is_long && ratio >= 2.0 {
            faults.push(format!("{flood:?}: the p99 grew {ratio:.2} times"));
        }
        // Half of what it grew by, beside what good traffic left meanwhile: that lies
        // between what goes, so not all pages go.
        let made = (made * (long + rest).as_secs_f64()) as u64;
        let kept = after.saturating_sub(before).saturating_sub(made);
        if is_long && kept >= (grown / 2).max(20 * MB) {
            faults.push(format!("{flood:?}: {} MB did not come back", kept / MB));
        }
    }
    let page = wire::get(server.admin, "/metrics").await;
    let met = page.lines().filter(|line| {
        (line.contains("_limited_total{") || line.contains("_throttled_total"))
            && !line.ends_with(" 0")
    });
    for line in met {
        println!("{line}");
    }
    assert!(faults.is_empty(), "{faults:?}");
}
