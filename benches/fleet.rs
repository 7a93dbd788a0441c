//! What a change of the fleet costs, against the ranks that are known: how long a
//! replica of eight ranks takes to register and to tell news, and how long a page of
//! the list takes.
//!
//! `cargo bench --bench fleet` prints one table. Times are of one thread that does
//! nothing else.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a bench"
)]

use std::sync::Arc;

use berth::{
    call::LogprobMode,
    fleet::{
        Beat, Fleet, FleetConfig,
        facts::{
            Accelerator, Capabilities, EngineKind, RankFacts, RankReport, ReplicaFacts,
            ReportedState,
        },
    },
    ids::{BootId, Incarnation, ReplicaId},
    store::memory::MemoryStore,
};
use tokio::time::Instant;

const RANKS_OF_A_REPLICA: u32 = 8;
const ROUNDS: usize = 50;

fn facts(id: &str) -> ReplicaFacts {
    let url: Arc<str> = "http://127.0.0.1:30000".into();
    let ranks = (0..RANKS_OF_A_REPLICA).map(|rank| RankFacts {
        rank,
        url: Arc::clone(&url),
        engine_rank: rank,
        gpu_uuids: Vec::new(),
        kv_capacity: 375_000,
        max_running: 0,
    });
    ReplicaFacts {
        id: ReplicaId::new(id),
        boot: BootId::new("boot"),
        url: Arc::clone(&url),
        engine: EngineKind::Sglang,
        engine_version: String::new(),
        model: "m".into(),
        vocab_size: None,
        context_length: 16_384,
        weight_version: "1".into(),
        adapters: Vec::new(),
        capabilities: Capabilities::default(),
        accelerator: Accelerator {
            name: String::new(),
            memory_bytes: 0,
            count: 8,
        },
        ranks: ranks.collect(),
        page_size: 1,
        logprob_mode: LogprobMode::Processed,
        labels: std::collections::BTreeMap::default(),
        engine_start: None,
    }
}

/// Every rank pauses, or none: news to routing.
fn beat(id: &str, incarnation: Incarnation, sequence: u64, paused: bool) -> Beat {
    let ranks = (0..RANKS_OF_A_REPLICA).map(|rank| RankReport {
        rank,
        healthy: true,
        running: 0,
        waiting: 0,
        waiting_uncached_tokens: 0,
        kv_used_tokens: 0,
        weight_version: "1".into(),
        paused,
    });
    Beat {
        replica: ReplicaId::new(id),
        incarnation,
        sequence,
        state: ReportedState::Ready,
        drain_grace: None,
        ranks: ranks.collect(),
        adapters: None,
    }
}

/// The median of microseconds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Row {
    ranks: usize,
    all: f64,
    new: f64,
    again: f64,
    news: f64,
    page: f64,
}

async fn row(ranks: usize) -> Row {
    let config = FleetConfig {
        max_ranks: 65_536,
        ..FleetConfig::default()
    };
    let fleet = Fleet::new(config, Arc::new(MemoryStore::default()));
    let begun = Instant::now();
    for n in 0..ranks / RANKS_OF_A_REPLICA as usize {
        fleet
            .register(facts(&format!("replica-{n}")))
            .await
            .unwrap();
    }
    let all = begun.elapsed().as_secs_f64();
    let (mut new, mut again, mut news, mut page) = (vec![], vec![], vec![], vec![]);
    for round in 0..ROUNDS {
        let id = format!("another-{round}");
        let begun = Instant::now();
        let me = fleet.register(facts(&id)).await.unwrap().incarnation;
        new.push(begun.elapsed().as_secs_f64() * 1e6);
        let begun = Instant::now();
        fleet.register(facts(&id)).await.unwrap();
        again.push(begun.elapsed().as_secs_f64() * 1e6);
        for (sequence, paused) in [(1, true), (2, false)] {
            let beat = beat(&id, me, sequence, paused);
            let begun = Instant::now();
            fleet.beat(beat).unwrap();
            news.push(begun.elapsed().as_secs_f64() * 1e6);
        }
        let begun = Instant::now();
        assert_eq!(fleet.list_after(None, 64).len(), 64);
        page.push(begun.elapsed().as_secs_f64() * 1e6);
        fleet.deregister(&ReplicaId::new(id), me);
    }
    Row {
        ranks,
        all,
        new: median(new),
        again: median(again),
        news: median(news),
        page: median(page),
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    println!(
        "ranks known | all registered, s | one more, us | again, us | a beat with news, us | 64 listed, us"
    );
    for ranks in [512, 2048, 8192] {
        let row = runtime.block_on(row(ranks));
        println!(
            "{:>11} | {:>17.3} | {:>12.0} | {:>9.1} | {:>20.0} | {:>14.0}",
            row.ranks, row.all, row.new, row.again, row.news, row.page
        );
    }
}
