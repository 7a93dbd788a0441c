//! What it costs to know who calls: requests a second of a server with a file of
//! credentials, a token with every call, against the same server without. Both get the
//! same bytes; `support/pace.rs` says what a request is. Ten alternating rounds of one
//! run; the ratio is what counts.
//!
//! With `--count ARM N` (arms: 0 everybody may, 1 one token is known) it makes N requests,
//! one after the other, on one thread, for `valgrind --tool=callgrind`: the difference of
//! two such runs counts instructions. Arm 2, where ten thousand tokens are known, counts
//! with them that the file is read again every second, which is most of it there.
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

use std::path::Path;

use berth::{auth::token::Token, config::Config, harness::playground};
use pace::{CALLERS, ROUNDS, report, round};

/// Everybody else that may call.
const OTHERS: [usize; 3] = [0, 0, 10_000];

fn config(dir: &Path, arm: usize) -> Config {
    let mut config = playground::config(None);
    if arm > 0 {
        let line = |principal: String, token: &Token| {
            format!(
                "principal={principal} role=sample,replica tenant=t sha256={}\n",
                token.hash()
            )
        };
        let mut lines = line("bench".to_owned(), &Token::parse(support::TOKEN).unwrap());
        for n in 0..OTHERS[arm] {
            lines.push_str(&line(format!("other-{n}"), &Token::mint().unwrap()));
        }
        let path = dir.join("credentials");
        std::fs::write(&path, lines).unwrap();
        config.auth.credentials = Some(path);
        config.auth.audit_log = Some(dir.join("audit"));
    }
    config
}

fn main() {
    // `cargo test --benches` only wants to know that it starts.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    if let Some((arm, requests)) = pace::counted() {
        return tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                let (server, clients) = pace::server(config(dir.path(), arm)).await;
                pace::one_by_one(&clients[0], requests).await;
                server.stop().await.unwrap();
            });
    }
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(run(dir.path()));
}

async fn run(dir: &Path) {
    let (open, open_clients) = pace::server(config(dir, 0)).await;
    let (known, known_clients) = pace::server(config(dir, 2)).await;
    round(&open_clients).await;
    round(&known_clients).await;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for i in 0..ROUNDS {
        // Whoever goes first is last in the next round.
        if i % 2 == 0 {
            without.push(round(&open_clients).await);
            with.push(round(&known_clients).await);
        } else {
            with.push(round(&known_clients).await);
            without.push(round(&open_clients).await);
        }
    }
    println!("{CALLERS} callers, {ROUNDS} rounds; ratios are medians over the rounds:");
    report("a token each, of 10,001", &with, &without);
    open.stop().await.unwrap();
    known.stop().await.unwrap();
}
