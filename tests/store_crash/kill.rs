//! Kills at every step of the committer and at random times.

use berth::store::Store as _;
use std::{io::Read, time::Duration};

use berth::store::sled::{SledOptions, SledStore, Step};

use super::{
    Rng, count,
    driver::{History, Plan},
};

/// After so many cycles a new store is begun, so that the last cycles take no
/// longer than the first.
const STORE_CYCLES: u64 = 40;

#[tokio::test]
async fn nothing_acknowledged_is_lost_when_the_process_dies() {
    let cycles = count("BERTH_STORE_CYCLES", 8);
    let dir = tempfile::tempdir().unwrap();
    let (mut results, mut attempts) = (0, 0);
    let mut rng = Rng(0x5eed);
    let mut history = History::default();
    let mut died = 0;
    for cycle in 0..cycles {
        let store_dir = dir.path().join(format!("store-{}", cycle / STORE_CYCLES));
        if cycle % STORE_CYCLES == 0 {
            history = History::default();
        }
        // Three of four at a step, the fourth at some time.
        let step = Step::ALL[(cycle / 4 * 3 + cycle % 4) as usize % Step::ALL.len()];
        // Halves of the redo log are left more rarely than batches are written.
        let often = if matches!(step, Step::Switched | Step::Moved) {
            6
        } else {
            40
        };
        let redo_bytes = (64 << 10) << (2 * (cycle % 3));
        let plan = Plan {
            seed: cycle + 1,
            callers: 6,
            requests: 60,
            // A window that moves: some keys of it are old, some are new.
            first_key: 40 * (cycle % STORE_CYCLES),
            keys: 120,
            die: (cycle % 4 != 3).then(|| (step, 1 + rng.below(often))),
            // Relaxed durability is for power; a kill it survives.
            relaxed: cycle % 5 == 4,
            redo_bytes,
            ..Plan::default()
        };
        let journal = dir.path().join(format!("journal-{cycle}"));
        let mut driver = plan.start(&store_dir, &journal);
        if plan.die.is_none() {
            tokio::time::sleep(Duration::from_millis(20 + rng.below(150))).await;
            driver.kill().unwrap();
        }
        let mut errors = String::new();
        driver
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut errors)
            .unwrap();
        let status = driver.wait().unwrap();
        assert!(!errors.contains("panicked"), "cycle {cycle}: {errors}");
        died += u64::from(!status.success());
        if let Ok(journal) = std::fs::read_to_string(&journal) {
            history.add(&journal);
        }
        // Now with the same redo log, now with a larger one in its place.
        let options = SledOptions {
            redo_bytes: if cycle % 2 == 0 { redo_bytes } else { 1 << 20 },
            ..SledOptions::default()
        };
        let store = SledStore::open(&store_dir, options).unwrap();
        // All of it now and then, and what this cycle can have touched always.
        let last = cycle % STORE_CYCLES == STORE_CYCLES - 1 || cycle + 1 == cycles;
        history
            .check(
                &store,
                if last || cycle % 10 == 0 {
                    0
                } else {
                    plan.first_key
                },
            )
            .await;
        store.close().await.unwrap();
        if last {
            results += history.done.len() as u64;
            attempts += history.sent.len();
        }
    }
    println!(
        "{cycles} cycles, {died} of them killed: {results} results and {attempts} attempts \
         acknowledged, 0 lost"
    );
    assert!(died >= cycles / 2, "only {died} of {cycles} were killed");
    assert!(results > 10 * cycles);
}
