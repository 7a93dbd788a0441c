//! What a generation pays for its idempotency: claim, dispatch and commit on the
//! store on disk, and the disk's own fdatasync beside it.
//!
//! `cargo bench --bench store`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed bench"
)]

#[path = "../tests/support/store.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with the tests")]
mod support;

use std::{io::Write, sync::Arc, time::Duration};

use berth::store::{
    Store,
    memory::MemoryStore,
    sled::{Durability, SledOptions, SledStore},
};
use tokio::time::Instant;

const TOKENS: usize = 512;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The median fdatasync of a small append.
fn fdatasync() -> Duration {
    let mut file = tempfile::tempfile().unwrap();
    let times = (0..300).map(|_| {
        let start = Instant::now();
        file.write_all(&[1; 4096]).unwrap();
        file.sync_data().unwrap();
        start.elapsed()
    });
    median(times.collect())
}

/// Generations with this many callers at once: how many a second, and the
/// median time of one.
async fn run(store: Arc<dyn Store>, callers: u64, total: u64, first: u64) -> (f64, Duration) {
    let start = Instant::now();
    let work: Vec<_> = (0..callers)
        .map(|caller| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let mut times = Vec::new();
                for n in (caller..total).step_by(callers as usize) {
                    let start = Instant::now();
                    support::generate(&*store, first + n, TOKENS).await;
                    times.push(start.elapsed());
                }
                times
            })
        })
        .collect();
    let mut times = Vec::new();
    for work in work {
        times.extend(work.await.unwrap());
    }
    (total as f64 / start.elapsed().as_secs_f64(), median(times))
}

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    println!("fdatasync p50 {:?}", fdatasync());
    for durability in [None, Some(Durability::Relaxed), Some(Durability::Fsync)] {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = match durability {
            None => Arc::new(MemoryStore::default()),
            Some(durability) => {
                let options = SledOptions {
                    durability,
                    ..SledOptions::default()
                };
                Arc::new(SledStore::open(dir.path(), options).unwrap())
            }
        };
        let mut first = 0;
        for (callers, total) in [(1, 1000), (16, 6000), (64, 12_000), (256, 20_000)] {
            let (rate, p50) = runtime.block_on(run(Arc::clone(&store), callers, total, first));
            first += total;
            let name = durability.map_or("memory".into(), |d| format!("{d:?}"));
            println!("{name:>8} {callers:>4} callers: {rate:>8.0} generations/s, p50 {p50:?}");
        }
    }
}
