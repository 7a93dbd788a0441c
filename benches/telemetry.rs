//! What telemetry costs a whole server at its defaults: requests a second with
//! metrics and a log line for each request, against the same server without
//! either, in ten alternating rounds of one run. Absolute figures differ from
//! machine to machine; the ratio is what counts.
//!
//! Requests are small, so that what is the same for each weighs most: prompts of
//! 1 KiB of packed ids, 32 tokens back, an affinity key, no store on the way. The
//! engine answers at once with bytes made beforehand. Lines are written to
//! `/dev/null`.
//!
//! On a machine that others use the ratio of rounds is rough. With `--count ARM N`
//! (arms: 0 nothing, 1 metrics, 2 metrics and lines, 3 with lines as JSON) the program makes N requests,
//! one after the other, on one thread, and ends: under `valgrind --tool=callgrind`
//! the difference of two such runs counts instructions, the same every time.
//! They are those of client, engine and server together, without the kernel's.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a benchmark that cannot run should say so loudly"
)]

mod support;

#[path = "support/pace.rs"]
mod pace;

use std::{fs::File, sync::Arc};

use berth::{
    config::{Config, LogFormat},
    harness::playground,
    telemetry::logs,
};
use pace::{CALLERS, Pace, ROUNDS, report, round};
use tracing_subscriber::{
    EnvFilter, Layer, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

fn config(measured: bool) -> Config {
    Config {
        measured,
        ..playground::config(None)
    }
}

fn main() {
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    if let Some((arm, requests)) = pace::counted() {
        return tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(count(arm, requests));
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(run());
}

/// This many requests in this arm, for who counts instructions.
async fn count(arm: usize, requests: usize) {
    let form = if arm == 3 {
        LogFormat::Json
    } else {
        LogFormat::Human
    };
    let handle = lines(form);
    let level = if arm > 1 { "info" } else { "off" };
    handle.reload(filter(level)).unwrap();
    let (server, clients) = pace::server(config(arm > 0)).await;
    pace::one_by_one(&clients[0], requests).await;
    server.stop().await.unwrap();
}

fn filter(text: &str) -> EnvFilter {
    EnvFilter::try_new(text).unwrap()
}

type Handle = reload::Handle<EnvFilter, tracing_subscriber::Registry>;

/// Lines to nowhere, off until told otherwise.
fn lines(form: LogFormat) -> Handle {
    let (reloaded, handle) = reload::Layer::new(filter("off"));
    let nowhere = Arc::new(File::create("/dev/null").unwrap());
    let lines = logs::lines(form, nowhere).with_filter(reloaded);
    tracing_subscriber::registry().with(lines).init();
    handle
}

async fn run() {
    let handle = lines(LogFormat::Human);
    let (plain, plain_clients) = pace::server(config(false)).await;
    let (watched, watched_clients) = pace::server(config(true)).await;
    round(&plain_clients).await;
    round(&watched_clients).await;
    let mut paces: [Vec<Pace>; 3] = Default::default();
    for i in 0..ROUNDS {
        // Whoever goes first is last in the next round.
        let mut order = [0, 1, 2];
        if i % 2 == 1 {
            order.reverse();
        }
        for arm in order {
            let lines = if arm == 2 { "info" } else { "off" };
            handle.reload(filter(lines)).unwrap();
            let clients = if arm == 0 {
                &plain_clients
            } else {
                &watched_clients
            };
            paces[arm].push(round(clients).await);
        }
    }
    let [without, metrics, with] = paces;
    println!("{CALLERS} callers, {ROUNDS} rounds; ratios are medians over the rounds:");
    report("metrics alone", &metrics, &without);
    report("metrics and a line each", &with, &without);
    plain.stop().await.unwrap();
    watched.stop().await.unwrap();
}
