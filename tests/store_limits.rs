//! What bounds the store on disk: expiry, the clocks that rule it, space, and a
//! disk that is full.
//!
//! `BERTH_STORE_SPACE=1000000` runs the space test in its long form.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

#[path = "support/store.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with other tests")]
mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use berth::store::{
    Claim, Commit, Store, StoreError,
    sled::{Clock, SledOptions, SledStore, StoreStats},
};
use support::*;

/// Clocks that a test sets.
#[derive(Debug)]
struct HandClock(Mutex<(SystemTime, Duration)>);

impl HandClock {
    fn new() -> Arc<Self> {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        Arc::new(Self(Mutex::new((start, Duration::ZERO))))
    }

    /// Time passes.
    fn pass(&self, by: Duration) {
        let mut clocks = self.0.lock().unwrap();
        clocks.0 += by;
        clocks.1 += by;
    }

    /// Somebody sets the time of day.
    fn set(&self, by: Duration) {
        self.0.lock().unwrap().0 += by;
    }
}

impl Clock for HandClock {
    fn wall(&self) -> SystemTime {
        self.0.lock().unwrap().0
    }
    fn monotonic(&self) -> Duration {
        self.0.lock().unwrap().1
    }
}

const HOUR: Duration = Duration::from_secs(3600);

fn options(clock: &Arc<HandClock>) -> SledOptions {
    SledOptions {
        clock: Arc::clone(clock) as _,
        tick: Duration::from_millis(5),
        free_space_floor: 0,
        ..SledOptions::default()
    }
}

/// Waits until the store's account is as wanted.
async fn until(store: &SledStore, what: &str, wanted: impl Fn(&StoreStats) -> bool) {
    for _ in 0..4000 {
        if wanted(&store.stats()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never {what}: {:?}", store.stats());
}

#[tokio::test]
async fn keys_expire_a_retention_after_their_last_change() {
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let store = SledStore::open(dir.path(), options(&clock)).unwrap();
    for n in 0..50 {
        generate(&store, n, 100).await;
    }
    clock.pass(12 * HOUR);
    // Touched halfway: lives half a retention longer.
    claimed(&store, request(100, OWNER, 2)).await;
    store
        .dispatch(key(100), OWNER, 0, attempt(1))
        .await
        .unwrap();
    clock.pass(11 * HOUR);
    store
        .dispatch(key(100), OWNER, 1, attempt(1))
        .await
        .unwrap();
    store.release(key(100), OWNER).await.unwrap();
    // In work: not expired however old.
    claimed(&store, request(101, OWNER, 1)).await;
    store
        .dispatch(key(101), OWNER, 0, attempt(1))
        .await
        .unwrap();
    assert!(is_result_of(
        &*done(&store, request(3, OWNER, 1)).await,
        3,
        100
    ));
    clock.pass(2 * HOUR);
    until(&store, "expired", |s| s.expired == 50).await;
    assert!(store.read(key(3)).await.unwrap().is_none());
    clock.pass(14 * HOUR);
    // Key 100 is 16 h old now, though it was opened 27 h ago.
    generate(&store, 200, 10).await;
    assert!(store.read(key(100)).await.unwrap().is_some());
    clock.pass(10 * HOUR);
    until(&store, "expired again", |s| s.expired == 51).await;
    let late = store
        .commit(key(101), OWNER, 0, 1, sample(101, 0, 1, 5))
        .await;
    assert_eq!(late, Ok(Commit::Stored), "still owned");
    clock.pass(49 * HOUR);
    until(&store, "empty", |s| s.expired == 53 && s.used_bytes == 0).await;
    assert_eq!(store.stats().gaps, 1, "everything below the low-water mark");
    store.close().await.unwrap();
    let store = SledStore::open(dir.path(), options(&clock)).unwrap();
    assert_eq!(store.stats().losses, 0, "expiry is no loss");
    claimed(&store, request(3, OWNER, 1)).await;
}

#[tokio::test]
async fn a_wall_clock_that_was_set_expires_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let store = SledStore::open(dir.path(), options(&clock)).unwrap();
    generate(&store, 1, 10).await;
    clock.set(100 * HOUR);
    until(&store, "stopped", |s| s.expiry_stopped).await;
    for n in 2..20 {
        generate(&store, n, 10).await;
    }
    assert_eq!(store.stats().expired, 0);
    done(&store, request(1, OWNER, 1)).await;
}

#[tokio::test]
async fn a_small_correction_of_the_clock_is_no_reason_to_stop() {
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let store = SledStore::open(dir.path(), options(&clock)).unwrap();
    generate(&store, 1, 10).await;
    clock.set(Duration::from_secs(50));
    clock.pass(25 * HOUR);
    until(&store, "expired", |s| s.expired == 1 && !s.expiry_stopped).await;
}

fn size_of(dir: &Path) -> u64 {
    let mut size = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let meta = entry.metadata().unwrap();
        size += if meta.is_dir() {
            size_of(&entry.path())
        } else {
            meta.len()
        };
    }
    size
}

/// Results of 2 KiB come and go with `live` of them kept: the directory does
/// not grow with their number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_is_bounded_by_what_is_live() {
    let total: u64 = std::env::var("BERTH_STORE_SPACE").map_or(6_000, |n| n.parse().unwrap());
    let live = (total / 50).max(300);
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let options = SledOptions {
        retention: Duration::from_secs(live),
        redo_bytes: 1 << 20,
        ..options(&clock)
    };
    let store = Arc::new(SledStore::open(dir.path(), options.clone()).unwrap());
    let callers = 64;
    let mut largest = 0;
    let mut next = 0;
    while next < total {
        let round = (next..(next + callers).min(total)).map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { generate(&*store, n, 270).await })
        });
        for work in round.collect::<Vec<_>>() {
            assert_eq!(work.await.unwrap(), Commit::Stored);
        }
        next += callers;
        clock.pass(Duration::from_secs(callers));
        if (next / callers) % 100 == 0 {
            largest = largest.max(size_of(dir.path()));
            if total > 100_000 && (next / callers) % 1000 == 0 {
                eprintln!("{next}: {} MB, {:?}", largest / 1_000_000, store.stats());
            }
        }
    }
    let oldest_live = total - live / 2;
    until(&store, "expired", |s| {
        s.expired + live + 2 * callers >= total
    })
    .await;
    largest = largest.max(size_of(dir.path()));
    let stats = store.stats();
    let live_bytes = stats.used_bytes;
    println!(
        "{total} results, {live} live: {} MB on disk at most, {} MB live, {} gaps",
        largest / 1_000_000,
        live_bytes / 1_000_000,
        stats.gaps
    );
    // The floor is what sled takes before anything is reused; all that was
    // written is several times more.
    let bound = (5 * live_bytes).max(11_000_000);
    assert!(bound < total * 2_500);
    assert!(largest < bound, "{largest} bytes for {live_bytes} live");
    assert!(largest < 250_000_000);
    store.close().await.unwrap();
    let store = SledStore::open(dir.path(), options).unwrap();
    for n in [oldest_live, total - 1] {
        assert!(is_result_of(
            &*done(&store, request(n, OWNER, 1)).await,
            n,
            270
        ));
    }
}

#[tokio::test]
async fn results_of_a_megabyte_are_kept_in_small_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let store = SledStore::open(dir.path(), options(&clock)).unwrap();
    for n in 0..5 {
        assert_eq!(generate(&store, n, 140_000).await, Commit::Stored);
    }
    for n in 0..5 {
        assert!(is_result_of(
            &*done(&store, request(n, OWNER, 1)).await,
            n,
            140_000
        ));
    }
    let blobs = std::fs::read_dir(dir.path().join("sled/blobs"));
    assert_eq!(blobs.map_or(0, Iterator::count), 0, "sled made blobs");
    assert!(size_of(dir.path()) < 60_000_000, "{}", size_of(dir.path()));
}

#[tokio::test]
async fn below_the_floor_new_keys_are_refused_and_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let clock = HandClock::new();
    let plain = SledStore::open(dir.path(), options(&clock)).unwrap();
    generate(&plain, 1, 10).await;
    claimed(&plain, request(2, OWNER, 1)).await;
    plain.dispatch(key(2), OWNER, 0, attempt(1)).await.unwrap();
    plain.close().await.unwrap();
    let floor = SledOptions {
        free_space_floor: u64::MAX,
        ..options(&clock)
    };
    let store = SledStore::open(dir.path(), floor).unwrap();
    let refused = store.claim(request(3, OWNER, 1)).await;
    assert!(matches!(refused, Err(StoreError::Full(_))));
    done(&store, request(1, OWNER, 1)).await;
    let taken = claimed(&store, request(2, OWNER, 1)).await;
    store
        .fence(key(2), OWNER, 0, taken.last_attempts[0])
        .await
        .unwrap();
    store.dispatch(key(2), OWNER, 0, attempt(2)).await.unwrap();
    let stored = store.commit(key(2), OWNER, 0, 2, sample(2, 0, 2, 5)).await;
    assert_eq!(stored, Ok(Commit::Stored));
}

/// A file system of its own, of this size.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(dir: &Path, mib: u32) -> Option<Self> {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "berth-test"])
            .arg(dir)
            .status()
            .is_ok_and(|status| status.success());
        mounted.then(|| Self(dir.into()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_loses_nothing_and_heals_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = Tmpfs::mount(dir.path(), 16) else {
        eprintln!("SKIPPED: a small tmpfs cannot be mounted here (needs root)");
        return;
    };
    let options = SledOptions {
        free_space_floor: 4 << 20,
        redo_bytes: 1 << 20,
        tick: Duration::from_millis(50),
        ..SledOptions::default()
    };
    let store = SledStore::open(dir.path().join("store"), options.clone()).unwrap();
    // In order: the floor refuses new keys before the disk is full.
    let mut acknowledged = Vec::new();
    let refused = loop {
        let n = acknowledged.len() as u64;
        match store.claim(request(n, OWNER, 1)).await {
            Ok(_) => {}
            Err(e) => break e,
        }
        store.dispatch(key(n), OWNER, 0, attempt(1)).await.unwrap();
        let finished = sample(n, 0, 1, 1000);
        let commit = store.commit(key(n), OWNER, 0, 1, finished).await;
        assert_eq!(commit, Ok(Commit::Stored), "before the floor");
        acknowledged.push(n);
    };
    assert!(matches!(refused, StoreError::Full(_)), "{refused}");
    // Two keys are in work when somebody else fills the disk to the brim.
    let store_dir = dir.path().join("store");
    let ballast = dir.path().join("ballast");
    store.close().await.unwrap();
    let no_floor = SledOptions {
        free_space_floor: 0,
        ..options
    };
    let store = SledStore::open(&store_dir, no_floor).unwrap();
    for n in [1_000_000, 1_000_001] {
        claimed(&store, request(n, OWNER, 1)).await;
        store.dispatch(key(n), OWNER, 0, attempt(1)).await.unwrap();
    }
    // Fails when nothing is left, which is what is wanted.
    let _ = std::fs::write(&ballast, vec![1u8; 32 << 20]);
    let mut failed = 0;
    for n in 2_000_000..2_001_000 {
        // Every answer that says stored must hold.
        let Ok(Claim::Claimed(_)) = store.claim(request(n, OWNER, 1)).await else {
            failed += 1;
            if failed > 20 {
                break;
            }
            continue;
        };
        if store.dispatch(key(n), OWNER, 0, attempt(1)).await.is_err() {
            failed += 1;
            continue;
        }
        let finished = sample(n, 0, 1, 1000);
        match store.commit(key(n), OWNER, 0, 1, finished).await {
            Ok(commit) => {
                assert_eq!(commit, Commit::Stored);
                acknowledged.push(n);
            }
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 0, "the disk never filled up");
    // Whoever gives a key up now need not do it again.
    let down = store.stats().down.is_some();
    assert_eq!(store.release(key(1_000_001), OWNER).await, Ok(()));
    std::fs::remove_file(&ballast).unwrap();
    let freed = tokio::time::Instant::now();
    let worked = loop {
        if let Ok(Claim::Claimed(_)) = store.claim(request(3_000_000, OWNER, 1)).await
            && store
                .dispatch(key(3_000_000), OWNER, 0, attempt(1))
                .await
                .is_ok()
        {
            break freed.elapsed();
        }
        assert!(
            freed.elapsed() < Duration::from_secs(10),
            "{:?}",
            store.stats()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
        let _ = store.release(key(3_000_000), OWNER).await;
    };
    println!(
        "{} acknowledged, {failed} refused or failed while full, working {worked:?} after",
        acknowledged.len()
    );
    for n in &acknowledged {
        let replay = done(&store, request(*n, OWNER, 1)).await;
        assert!(is_result_of(&replay, *n, 1000), "{n}");
    }
    // The owner kept the key that it did not give up.
    let finished = sample(1_000_000, 0, 1, 1000);
    let commit = store.commit(key(1_000_000), OWNER, 0, 1, finished).await;
    assert_eq!(commit, Ok(Commit::Stored));
    let next = claimed(&store, request(1_000_001, OWNER, 1)).await;
    assert_eq!(next.orphans.len(), 1);
    assert!(down, "the store never noticed");
    assert_eq!(store.stats().losses, 0);
}

#[tokio::test]
async fn the_folder_is_its_owners() {
    use std::{
        fs::{Permissions, metadata, set_permissions},
        os::unix::fs::PermissionsExt as _,
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/store");
    let mode = || metadata(&path).unwrap().permissions().mode() & 0o777;
    let open = || SledStore::open(&path, SledOptions::default()).unwrap();
    open().close().await.unwrap();
    assert_eq!(mode(), 0o700);
    // One that was open to others is closed to them; a volume's group keeps it.
    for (before, after) in [(0o755, 0o750), (0o777, 0o770), (0o770, 0o770)] {
        set_permissions(&path, Permissions::from_mode(before)).unwrap();
        open().close().await.unwrap();
        assert_eq!(mode(), after, "{before:o}");
    }
}
