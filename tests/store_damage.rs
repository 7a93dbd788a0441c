//! What the store on disk makes of files that somebody or something has
//! changed: it serves what is right, refuses what is not, and never forgets or
//! invents anything without saying so.
//!
//! `BERTH_STORE_FLIPS=500` is the long form of the random part.
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
    fs,
    path::{Path, PathBuf},
};

use berth::{
    ids::{BootId, ReplicaId},
    store::{
        Claim, Store, StoreError,
        sled::{OpenError, SledOptions, SledStore},
    },
};
use support::*;

const KEYS: u64 = 160;
/// A key, like the one before it, with four records: the opening with the
/// attempt, the commit, and two chunks. Key 0 is small: it has two, and its
/// result lies behind the commit.
const LARGE: u64 = 16;
/// Starts of the replica in a filled store.
const BOOTS: u64 = 2;

fn tokens_of(n: u64) -> usize {
    20 + (n as usize * 53) % 900
}

fn open(dir: &Path, accept_loss: bool) -> Result<SledStore, OpenError> {
    SledStore::open(
        dir,
        SledOptions {
            accept_loss,
            free_space_floor: 0,
            // Small, so that most lies in sled and some does not.
            redo_bytes: 64 << 10,
            ..SledOptions::default()
        },
    )
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// A store with [`KEYS`] results and [`BOOTS`] starts of a replica; as it lies on
/// disk while it is open, or after it was closed.
async fn filled(dir: &Path, closed: bool) -> PathBuf {
    let base = dir.join("base");
    let work = dir.join("work");
    let mut store = open(&work, false).unwrap();
    for n in 0..KEYS {
        generate(&store, n, tokens_of(n)).await;
        if n % 100 == 50 {
            let boot = BootId::new(format!("boot-{n}"));
            store.incarnation(ReplicaId::new("r"), boot).await.unwrap();
            // So that there is a snapshot, and a log after it.
            store.close().await.unwrap();
            store = open(&work, false).unwrap();
        }
    }
    if closed {
        store.close().await.unwrap();
    }
    copy(&work, &base);
    base
}

/// Every key is served right or refused; `forgotten` counts those that are
/// unknown. A wrong result fails.
async fn forgotten(store: &SledStore) -> (u64, u64) {
    let (mut forgotten, mut refused) = (0, 0);
    for n in 0..KEYS {
        match store.read(key(n)).await {
            Ok(Some(Claim::Done(replay))) => {
                assert!(
                    is_result_of(&replay, n, tokens_of(n)),
                    "key {n}: wrong result"
                );
            }
            Ok(Some(Claim::DataLoss)) | Err(StoreError::Damaged(_)) => refused += 1,
            Ok(None | Some(Claim::Claimed(_))) => forgotten += 1,
            other => panic!("key {n}: {other:?}"),
        }
    }
    (forgotten, refused)
}

fn files(dir: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            files(&entry.path(), found);
        } else {
            found.push((entry.path(), entry.metadata().unwrap().len()));
        }
    }
}

/// What one damaged store ended as.
#[derive(Debug, Default)]
struct Tally {
    whole: u64,
    refused_keys: u64,
    quarantined: u64,
    declared: u64,
}

/// Opens a damaged store and checks all that it may and may not do.
async fn examine(dir: &Path, tally: &mut Tally, what: &str) {
    let epoch = match open(dir, false) {
        Ok(store) => {
            let (forgotten, refused) = forgotten(&store).await;
            assert_eq!(forgotten, 0, "{what}: lost and nothing said");
            if refused == 0 {
                tally.whole += 1;
            } else {
                tally.refused_keys += 1;
            }
            let boot = BootId::new("next");
            if let Ok(grant) = store.incarnation(ReplicaId::new("r"), boot).await {
                assert!(grant.incarnation.0 > BOOTS, "{what}");
            }
            store.close().await.unwrap();
            return;
        }
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("--accept-loss") && text.contains("backup"),
                "{what}: does not say what to do: {text}"
            );
            match error {
                OpenError::Quarantined { quarantine, .. } => {
                    tally.quarantined += 1;
                    assert!(quarantine.join("db").exists(), "{what}: nothing kept");
                }
                OpenError::Loss { .. } => tally.declared += 1,
                other => panic!("{what}: {other}"),
            }
            0
        }
    };
    // Starting again and again changes nothing, and never passes it over.
    for _ in 0..2 {
        let again = open(dir, false);
        assert!(
            matches!(
                again,
                Err(OpenError::Loss { .. } | OpenError::Quarantined { .. })
            ),
            "{what}: {:?}",
            again.err()
        );
    }
    let store = open(dir, true).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(store.stats().losses, 1, "{what}");
    assert_ne!(store.epoch(), epoch);
    forgotten(&store).await;
    let boot = BootId::new("next");
    let grant = store.incarnation(ReplicaId::new("r"), boot).await.unwrap();
    assert!(grant.incarnation.0 > BOOTS, "{what}: {grant:?}");
    store.close().await.unwrap();
    // Declared once, not again.
    let store = open(dir, false).unwrap_or_else(|e| panic!("{what}: {e}"));
    generate(&store, 5000, 10).await;
    store.close().await.unwrap();
}

#[tokio::test]
async fn a_flipped_byte_is_never_passed_over() {
    let flips: u64 = std::env::var("BERTH_STORE_FLIPS").map_or(12, |n| n.parse().unwrap());
    let mut state = 0x1234_5678_9abc_def1_u64;
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % bound
    };
    let mut tally = Tally::default();
    for closed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let base = filled(dir.path(), closed).await;
        let mut all = Vec::new();
        files(&base, &mut all);
        all.retain(|(_, len)| *len > 0);
        for flip in 0..flips / 2 {
            // In the two large files, and in any.
            let named = |name: &str| all.iter().find(|(p, _)| p.ends_with(name)).unwrap();
            let (path, len) = match flip % 4 {
                0 | 1 => named("db").clone(),
                2 => named("redo").clone(),
                _ => all[below(all.len() as u64) as usize].clone(),
            };
            let hurt = dir.path().join(format!("hurt-{flip}"));
            copy(&base, &hurt);
            let name = path.strip_prefix(&base).unwrap();
            let at = below(len);
            let mut bytes = fs::read(&path).unwrap();
            bytes[at as usize] ^= 1 << below(8);
            fs::write(hurt.join(name), bytes).unwrap();
            let what = format!("closed {closed}, flip {flip}: {} at {at}", name.display());
            examine(&hurt, &mut tally, &what).await;
            fs::remove_dir_all(&hurt).unwrap();
        }
    }
    println!("{flips} flipped bits, 0 passed over: {tally:?}");
}

/// Damage that a person or another program does.
#[tokio::test]
async fn files_that_are_gone_or_cut_are_never_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let base = filled(dir.path(), true).await;
    let mut tally = Tally::default();
    let older = dir.path().join("older");
    {
        // A backup of sled's files alone, put back later.
        let store = open(&older, false).unwrap();
        generate(&store, 1, tokens_of(1)).await;
        store.close().await.unwrap();
    }
    type Hurt = (&'static str, Box<dyn Fn(&Path)>);
    let older_sled = older.join("sled");
    let hurts: Vec<Hurt> = vec![
        (
            "log emptied",
            Box::new(|d| fs::write(d.join("sled/db"), b"").unwrap()),
        ),
        (
            "log gone",
            Box::new(|d| fs::remove_file(d.join("sled/db")).unwrap()),
        ),
        (
            "sled gone",
            Box::new(|d| fs::remove_dir_all(d.join("sled")).unwrap()),
        ),
        (
            "high water gone",
            Box::new(|d| fs::remove_file(d.join("high-water")).unwrap()),
        ),
        (
            "high water emptied",
            Box::new(|d| fs::write(d.join("high-water"), b"").unwrap()),
        ),
        (
            "log cut in half",
            Box::new(|d| {
                let bytes = fs::read(d.join("sled/db")).unwrap();
                fs::write(d.join("sled/db"), &bytes[..bytes.len() / 2]).unwrap();
            }),
        ),
        (
            "another store's files",
            Box::new(move |d| {
                fs::remove_dir_all(d.join("sled")).unwrap();
                copy(&older_sled, &d.join("sled"));
            }),
        ),
    ];
    for (what, hurt) in hurts {
        let hurt_dir = dir.path().join("hurt");
        let _ = fs::remove_dir_all(&hurt_dir);
        copy(&base, &hurt_dir);
        hurt(&hurt_dir);
        let before = tally.declared + tally.quarantined;
        examine(&hurt_dir, &mut tally, what).await;
        assert_eq!(
            tally.declared + tally.quarantined,
            before + 1,
            "{what}: not noticed"
        );
    }
}

/// It holds what sled does not have yet, and after a close nothing.
#[tokio::test]
async fn a_redo_log_that_is_gone_is_missed_where_it_was_needed() {
    let mut tally = Tally::default();
    for closed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let base = filled(dir.path(), closed).await;
        fs::remove_file(base.join("redo")).unwrap();
        examine(&base, &mut tally, &format!("closed {closed}")).await;
    }
    assert_eq!((tally.whole, tally.declared), (1, 1), "{tally:?}");
}

/// sled would refuse to open for ever; nothing of ours is lost with either.
#[tokio::test]
async fn a_bad_or_unfinished_snapshot_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let base = filled(dir.path(), true).await;
    let snapshot = || {
        let entries = fs::read_dir(base.join("sled")).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("snap.")).max()
    };
    let name = snapshot().expect("sled wrote no snapshot");
    for what in ["unfinished", "damaged", "cut"] {
        let hurt = dir.path().join(what);
        copy(&base, &hurt);
        let path = hurt.join("sled").join(&name);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        match what {
            "unfinished" => {
                let next = hurt.join("sled/snap.7FFFFFFFFFFFFFFF.generating");
                fs::write(next, &bytes[..middle]).unwrap();
            }
            "damaged" => {
                bytes[middle] ^= 1;
                fs::write(&path, bytes).unwrap();
            }
            _ => fs::write(&path, &bytes[..middle]).unwrap(),
        }
        let store = open(&hurt, false).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(forgotten(&store).await, (0, 0), "{what}");
        store.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_store_in_use_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), false).unwrap();
    generate(&store, 1, 10).await;
    for accept_loss in [false, true] {
        let second = open(dir.path(), accept_loss);
        assert!(matches!(second, Err(OpenError::InUse(_))));
    }
    done(&store, request(1, OWNER, 1)).await;
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_is_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"not a directory").unwrap();
    let refused = open(&file.join("store"), true);
    assert!(matches!(refused, Err(OpenError::Unusable { .. })));
}

/// Changes what lies in sled itself, past sled's own checksums.
fn tamper(dir: &Path, with: impl FnOnce(&sled::Db)) {
    let db = sled::open(dir.join("sled")).unwrap();
    with(&db);
    db.flush().unwrap();
}

/// The tree keys of the records of key `n`: its events, then its chunks.
fn records_of(db: &sled::Db, n: u64) -> Vec<sled::IVec> {
    let mut prefix = b"r".to_vec();
    prefix.extend_from_slice(&key(n).0);
    db.scan_prefix(prefix).keys().map(Result::unwrap).collect()
}

#[tokio::test]
async fn a_damaged_record_is_refused_for_its_key_alone() {
    let dir = tempfile::tempdir().unwrap();
    let base = filled(dir.path(), true).await;
    for (n, record) in [
        (LARGE, 0),
        (LARGE, 1),
        (LARGE, 2),
        (LARGE, 3),
        (0, 0),
        (0, 1),
    ] {
        let hurt = dir.path().join(format!("hurt-{n}-{record}"));
        copy(&base, &hurt);
        tamper(&hurt, |db| {
            let records = records_of(db, n);
            assert_eq!(records.len(), if n == LARGE { 4 } else { 2 });
            let place = &records[record];
            let mut value = db.get(place).unwrap().unwrap().to_vec();
            let last = value.len() - 1;
            value[last] ^= 1;
            db.insert(place, value).unwrap();
        });
        let store = open(&hurt, false).unwrap();
        assert!(store.stats().damaged_records > 0);
        assert_eq!(forgotten(&store).await, (0, 1), "record {record}");
        for _ in 0..2 {
            let claim = store.claim(request(n, OWNER, 1)).await.unwrap();
            assert!(
                matches!(claim, Claim::DataLoss),
                "record {record}: {claim:?}"
            );
        }
        let refused = store.dispatch(key(n), OWNER, 0, attempt(2)).await;
        assert!(refused.is_err(), "record {record}");
        generate(&store, 9000, 10).await;
    }
}

#[tokio::test]
async fn records_under_each_others_keys_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let base = filled(dir.path(), true).await;
    tamper(&base, |db| {
        let (one, other) = (&records_of(db, LARGE)[3], &records_of(db, LARGE - 1)[3]);
        let (a, b) = (
            db.get(one).unwrap().unwrap(),
            db.get(other).unwrap().unwrap(),
        );
        db.insert(one, b).unwrap();
        db.insert(other, a).unwrap();
    });
    let store = open(&base, false).unwrap();
    assert_eq!(forgotten(&store).await, (0, 2));
}

#[tokio::test]
async fn a_record_that_vanished_is_a_declared_loss() {
    let dir = tempfile::tempdir().unwrap();
    let base = filled(dir.path(), true).await;
    let mut tally = Tally::default();
    for record in 0..4 {
        let hurt = dir.path().join(format!("hurt-{record}"));
        copy(&base, &hurt);
        tamper(&hurt, |db| {
            db.remove(&records_of(db, LARGE)[record]).unwrap();
        });
        examine(&hurt, &mut tally, &format!("record {record} gone")).await;
    }
    let whole_key = dir.path().join("hurt-key");
    copy(&base, &whole_key);
    tamper(&whole_key, |db| {
        for place in records_of(db, LARGE) {
            db.remove(place).unwrap();
        }
    });
    examine(&whole_key, &mut tally, "a whole key gone").await;
    assert_eq!(tally.declared, 5);
}
