//! Kill -9: the real `berth serve` on its store on disk dies at every named
//! point of a sample's life and at random times, is started again on the same
//! port and folder, and clients retry until they are answered. Engines and
//! sidecars live here and survive it all. What must hold:
//!
//! - a key that was answered is answered the same to the byte ever after, and
//!   no engine generates it again;
//! - no two copies of a sample run at once for more than a second;
//! - every key is answered in the end, with exactly the tokens that the model
//!   gives.
//!
//! Two of the three engines stand behind a proxy that does not pass on the
//! close of a connection: there an orphan lives until it is aborted. One takes
//! so long to parse a request that an abort right after a restart comes too
//! early.
//!
//! Long form: `BERTH_CRASH_CYCLES=1000 cargo test --test crash -- --nocapture`.
//! `BERTH_CRASH_SEED` chooses other times and counts, `BERTH_CRASH_BINARY`
//! another build of the binary.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod clients;
mod engines;
mod history;
mod plane;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use berth::failpoint::Point;
use tokio::time::{Instant, sleep};

use clients::{Asked, Clients};
use engines::{Engines, Kind};
use history::History;
use plane::Plane;

/// Callers that work at once.
const WORKERS: u64 = 10;

/// A point that is not reached within this is given up for a kill: in the long
/// form, and in the short one, which must reach every point.
const PATIENCE: Duration = Duration::from_millis(1500);
const MUCH_PATIENCE: Duration = Duration::from_secs(4);

/// In the short form a point may miss this often.
const TRIES: u32 = 8;

/// Cycles between calm times, in which long generations can finish.
const CALM_EVERY: u64 = 20;
const CALM: Duration = Duration::from_secs(4);

/// A small generator: reproducible choices are needed, not good ones.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|n| n.parse().unwrap())
}

#[derive(Default)]
struct Kills {
    at: BTreeMap<&'static str, u32>,
    random: u32,
    missed: u32,
}

/// A control plane that dies again and again, and all who live with it.
struct Harness {
    plane: Plane,
    engines: Engines,
    clients: Clients,
    history: Arc<History>,
    kills: Kills,
    rng: Rng,
    cycles: u64,
    /// Time that starts took, in all.
    starts: Duration,
}

impl Harness {
    async fn start(dir: &tempfile::TempDir) -> Self {
        let seed = number("BERTH_CRASH_SEED").unwrap_or(0x5eed).max(1);
        let plane = Plane::new(dir.path(), &mut Rng(u64::from(std::process::id())));
        let history = Arc::new(History::default());
        let engines = Engines::start(
            &plane.url(),
            &[Kind::PLAIN, Kind::PROXIED, Kind::SLOW_TO_PARSE],
        )
        .await;
        let clients = Clients::start(&plane.url(), WORKERS, Arc::clone(&history));
        Self {
            plane,
            engines,
            clients,
            history,
            kills: Kills::default(),
            rng: Rng(seed),
            cycles: 0,
            starts: Duration::ZERO,
        }
    }

    /// One life of the control plane. Returns whether it died at the point.
    async fn cycle(&mut self, aim: Option<Point>, patience: Duration) -> bool {
        self.cycles += 1;
        if self.rng.below(4) == 0 {
            self.engines.misbehave(&mut self.rng);
        }
        // Most often early, and sometimes after a while of work.
        let spread = 1 << self.rng.below(6);
        let passages = 1 + match aim {
            // Many a sample.
            Some(Point::Token) => self.rng.below(8 * spread),
            // Few: of what the life before has left.
            Some(Point::Abort | Point::Aborted | Point::Fenced) => self.rng.below(4),
            Some(Point::AbortAgain) | None => 0,
            Some(_) => self.rng.below(spread),
        };
        self.plane.start(aim.map(|point| (point, passages)));
        // From here on it is the harness's time, not the machine's.
        self.starts += self.plane.listens().await;
        let life = match aim {
            Some(_) => patience,
            None => Duration::from_millis(50 + self.rng.below(900)),
        };
        let hit = self.plane.dies_within(life).await;
        match aim {
            Some(point) if hit => *self.kills.at.entry(point.name()).or_default() += 1,
            Some(_) => self.kills.missed += 1,
            None => self.kills.random += 1,
        }
        if !hit {
            self.plane.kill().await;
        }
        self.history.must_be_sound();
        hit
    }

    /// A life without an end: long generations finish.
    async fn calm(&mut self) {
        self.plane.start(None);
        self.plane.listens().await;
        sleep(CALM).await;
        self.plane.kill().await;
        self.history.look_through(&self.engines.histories());
        self.history.must_be_sound();
    }

    /// Everything is answered, asked again, and looked through.
    async fn finish(mut self) {
        self.plane.start(None);
        self.engines.behave();
        self.clients.finish().await;
        let asked_again = self.clients.ask_all_again().await;
        self.history.must_be_sound();
        let copies = self.history.look_through(&self.engines.histories());
        assert_eq!(copies.strangers, 0, "prompts were run that nobody got");
        self.plane.kill().await;
        self.engines.stop().await;
        let Kills { at, random, missed } = &self.kills;
        println!(
            "{} cycles: {random} killed at random, {missed} did not reach their point, at points: \
             {at:?}",
            self.cycles
        );
        println!("{asked_again} keys answered, all asked again after the last restart");
        println!("{}", self.history.summary());
        println!("{copies}");
        self.history.must_be_sound();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_key_has_one_result_whenever_the_control_plane_dies() {
    let dir = tempfile::tempdir().unwrap();
    let mut harness = Harness::start(&dir).await;
    let begun = Instant::now();
    if let Some(cycles) = number("BERTH_CRASH_CYCLES") {
        while harness.cycles < cycles {
            // Every sixth at random, the others at the points in turn.
            let n = harness.cycles;
            let turn = (n - n / 6) as usize % Point::ALL.len();
            harness
                .cycle((n % 6 != 5).then(|| Point::ALL[turn]), PATIENCE)
                .await;
            if harness.cycles.is_multiple_of(CALM_EVERY) {
                harness.calm().await;
            }
            if harness.cycles.is_multiple_of(100) {
                println!(
                    "{} cycles after {:?}, a start takes {:?}: {}",
                    harness.cycles,
                    begun.elapsed(),
                    std::mem::take(&mut harness.starts) / 100,
                    harness.history.summary()
                );
            }
        }
    } else {
        for point in Point::ALL {
            let mut tries = 0;
            while !harness.cycle(Some(point), MUCH_PATIENCE).await {
                tries += 1;
                assert!(tries < TRIES, "{point:?} is never reached");
            }
        }
        for _ in 0..4 {
            harness.cycle(None, PATIENCE).await;
        }
    }
    harness.finish().await;
}

/// An abort overtakes its request, and the control plane dies before it sends
/// another: the attempt must count as live until somebody has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_between_two_aborts_leaves_no_copy() {
    let dir = tempfile::tempdir().unwrap();
    let mut plane = Plane::new(dir.path(), &mut Rng(u64::from(std::process::id()) << 8 | 1));
    let history = Arc::new(History::default());
    let engines = Engines::start(&plane.url(), &[Kind::SLOW_TO_PARSE]).await;
    plane.start(Some((Point::AbortAgain, 1)));
    plane.listens().await;
    // Three seconds long.
    let asked = Asked::cancelled(400);
    let client = tokio::spawn(clients::cancel_once(
        plane.url(),
        Arc::clone(&history),
        asked.clone(),
    ));
    assert!(plane.dies_within(Duration::from_secs(30)).await);
    plane.start(None);
    client.await.unwrap();
    plane.kill().await;
    let copies = history.look_through(&engines.histories());
    history.must_be_sound();
    engines.stop().await;
    println!("{copies}");
}
