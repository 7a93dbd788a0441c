//! Opening the store's directory, whatever state a crash, a power loss or a bad
//! disk has left it in.
//!
//! ```text
//! DIR/lock            held while the store is open
//! DIR/high-water      see `high_water`
//! DIR/sled/           sled's own files
//! DIR/retry/          a copy that a second try is made on
//! DIR/quarantine-N/   files that did not open, kept for a person
//! ```
//!
//! Snapshots that sled had not finished are removed first. A first try is made
//! in place; if sled refuses or panics, or if the scan finds a loss, a second
//! one is made on a copy without `snap.*`, which sled then builds anew from its
//! log. What does not open either way is put into quarantine. A loss is never passed over: the store refuses
//! to start and says what to do, until it is told to accept the loss; that is
//! counted and begins a new epoch.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    super::fresh_epoch,
    clock::to_ms,
    disk::{free_space, sync_dir},
    fault::{Fault, guarded},
    frame::Kind,
    high_water::{self, Found, HighWater, Mark},
    layout::{self, DueKey, RecordKey},
    options::SledOptions,
    record::{self, Identity},
    scan::{Scan, scan},
    sequence::GapChange,
};

/// Why the store cannot be opened. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("the store at {0} is in use by another process; stop it or choose another directory")]
    InUse(PathBuf),
    /// The directory cannot be read or written.
    #[error(
        "the store at {dir} cannot be opened: {reason}; the data was not touched: mend that and start again"
    )]
    Unusable {
        /// Where.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// sled's files do not open. They were put aside.
    #[error(
        "the store at {dir} is damaged: {reason}. Its files were moved to {quarantine}. Restore a \
         backup of {dir}, or start with accept_loss to begin with an empty store: finished results \
         are then forgotten, and requests whose keys they had are generated again"
    )]
    Quarantined {
        /// Where.
        dir: PathBuf,
        /// What sled said.
        reason: String,
        /// Where the files are now.
        quarantine: PathBuf,
    },
    /// It opens, but acknowledged records are missing.
    #[error(
        "the store at {dir} has lost records: {reason}. Restore a backup of {dir}, or start with \
         accept_loss to go on with what is left: requests whose results are missing are then \
         generated again"
    )]
    Loss {
        /// Where.
        dir: PathBuf,
        /// What is missing.
        reason: String,
    },
}

/// An open store.
pub(super) struct Opened {
    pub(super) db: ::sled::Db,
    /// Of our own on sled's log, for fdatasync.
    pub(super) log: File,
    pub(super) scan: Scan,
    pub(super) high_water: HighWater,
    /// A loss was accepted and declared.
    pub(super) loss: Option<String>,
}

/// The paths of one store.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    pub(super) dir: PathBuf,
}

impl Paths {
    fn lock(&self) -> PathBuf {
        self.dir.join("lock")
    }
    pub(super) fn high_water(&self) -> PathBuf {
        self.dir.join("high-water")
    }
    fn sled(&self) -> PathBuf {
        self.dir.join("sled")
    }
    fn retry(&self) -> PathBuf {
        self.dir.join("retry")
    }

    fn free_quarantine(&self) -> PathBuf {
        (1u64..)
            .map(|n| self.dir.join(format!("quarantine-{n}")))
            .find(|path| !path.exists())
            .unwrap_or_else(|| self.dir.join("quarantine"))
    }

    fn unusable(&self, reason: impl ToString) -> OpenError {
        OpenError::Unusable {
            dir: self.dir.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Takes the lock of the store and opens it. Blocks; on a large store for
/// seconds.
pub(super) fn open(paths: &Paths, options: &SledOptions) -> Result<(Opened, File), OpenError> {
    fs::create_dir_all(&paths.dir).map_err(|e| paths.unusable(e))?;
    let lock = lock(paths)?;
    Ok((open_locked(paths, options)?, lock))
}

/// The same for who holds the lock.
pub(super) fn open_locked(paths: &Paths, options: &SledOptions) -> Result<Opened, OpenError> {
    let io = |e: io::Error| paths.unusable(e);
    if paths.retry().exists() && !paths.sled().exists() {
        // sled's files are moved away only when the copy is whole: the exchange
        // was interrupted between its two steps.
        fs::rename(paths.retry(), paths.sled()).map_err(io)?;
    }
    let found = high_water::look(&paths.high_water()).map_err(io)?;
    let (db, scan, broken) = match first_good(paths, options, &found)? {
        Tried::Opened(db, scan) => (db, *scan, None),
        Tried::Broken(fault) => {
            let quarantine = paths.free_quarantine();
            fs::rename(paths.sled(), &quarantine).map_err(io)?;
            sync_dir(&paths.dir).map_err(io)?;
            if !options.accept_loss {
                return Err(OpenError::Quarantined {
                    dir: paths.dir.clone(),
                    reason: fault.to_string(),
                    quarantine,
                });
            }
            let (db, scan) = try_open(&paths.sled(), options).map_err(|f| paths.unusable(f))?;
            let reason = format!("{fault}; its files are in {}", quarantine.display());
            (db, scan, Some(reason))
        }
    };
    let loss = broken.or_else(|| missing(&found, &scan));
    if let Some(reason) = &loss {
        if !options.accept_loss {
            return Err(OpenError::Loss {
                dir: paths.dir.clone(),
                reason: reason.clone(),
            });
        }
        tracing::error!(reason, "starting although records of the store are lost");
        let (db, scan) = rebuild(paths, options, db)?;
        return settle(paths, options, db, scan, &found, loss);
    }
    settle(paths, options, db, scan, &found, loss)
}

fn lock(paths: &Paths) -> Result<File, OpenError> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(paths.lock())
        .map_err(|e| paths.unusable(e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(OpenError::InUse(paths.dir.clone())),
        Err(fs::TryLockError::Error(e)) => Err(paths.unusable(e)),
    }
}

/// What the marks and the scan say is missing, for a person.
fn missing(found: &Found, scan: &Scan) -> Option<String> {
    let mut reasons = Vec::new();
    if !scan.holes.is_empty() {
        reasons.push(format!("{} records are missing", scan.missing()));
    }
    if scan.damaged_replicas > 0 {
        reasons.push(format!(
            "the starts of {} replicas are unreadable",
            scan.damaged_replicas
        ));
    }
    match found {
        Found::Mark(mark) => {
            let last = scan.sequence.next() - 1;
            if mark.seq > last {
                reasons.push(format!(
                    "it ends at record {last}, but record {} was acknowledged",
                    mark.seq
                ));
            }
            match scan.identity {
                Some(identity) if identity.store != mark.store => {
                    reasons.push("it is not the store that its high-water file names".into());
                }
                None if mark.seq > 0 => reasons.push("its identity is missing".into()),
                _ => {}
            }
        }
        // It is written before the first record: a first start that did not get
        // that far leaves an empty store.
        Found::Missing if !scan.is_empty() => {
            reasons.push("its high-water file is missing".into());
        }
        Found::Missing => {}
        Found::Damaged => reasons.push("its high-water file is damaged".into()),
    }
    (!reasons.is_empty()).then(|| reasons.join("; "))
}

enum Tried {
    Opened(::sled::Db, Box<Scan>),
    Broken(Fault),
}

/// With less free space than this, a failure to open is laid to the disk and
/// not to the files.
const ROOM_TO_OPEN: u64 = 1 << 20;

/// The first try that loses nothing; else the one that loses least.
fn first_good(paths: &Paths, options: &SledOptions, found: &Found) -> Result<Tried, OpenError> {
    let lost = |scan: &Scan| match missing(found, scan) {
        None => 0,
        Some(_) => {
            let acknowledged = match found {
                Found::Mark(mark) => mark.seq,
                Found::Missing | Found::Damaged => 0,
            };
            let cut = (acknowledged + 1).saturating_sub(scan.sequence.next());
            1 + scan.missing() + cut
        }
    };
    remove_unfinished(&paths.sled()).map_err(|e| paths.unusable(e))?;
    let (lost_first, fault) = match try_open(&paths.sled(), options) {
        Ok((db, scan)) => match lost(&scan) {
            0 => return Ok(Tried::Opened(db, Box::new(scan))),
            some => {
                // Nothing may write to the files while they are copied.
                close(db).map_err(|fault| paths.unusable(fault))?;
                (some, None)
            }
        },
        Err(fault @ (Fault::DiskFull | Fault::InUse | Fault::Io(_))) => {
            return Err(paths.unusable(fault));
        }
        Err(fault) => {
            if free_space(&paths.dir).map_err(|e| paths.unusable(e))? < ROOM_TO_OPEN {
                return Err(paths.unusable(Fault::DiskFull));
            }
            (u64::MAX, Some(fault))
        }
    };
    tracing::warn!(?fault, "the store did not open whole; trying on a copy");
    let copied = copy_without_snapshots(&paths.sled(), &paths.retry())
        .map_err(|e| paths.unusable(format!("a copy to try on cannot be made: {e}")))?;
    if copied > 0
        && let Ok((db, scan)) = try_open(&paths.retry(), options)
    {
        let lost_now = lost(&scan);
        if close(db).is_ok() && lost_now < lost_first {
            let quarantine = paths.free_quarantine();
            fs::rename(paths.sled(), &quarantine)
                .and_then(|()| fs::rename(paths.retry(), paths.sled()))
                .and_then(|()| sync_dir(&paths.dir))
                .map_err(|e| paths.unusable(e))?;
            tracing::warn!(
                quarantine = %quarantine.display(),
                "the store opened without sled's snapshot; the old files are kept"
            );
        }
    }
    remove_all(&paths.retry());
    match try_open(&paths.sled(), options) {
        Ok((db, scan)) => Ok(Tried::Opened(db, Box::new(scan))),
        Err(fault @ (Fault::DiskFull | Fault::InUse | Fault::Io(_))) => Err(paths.unusable(fault)),
        Err(again) => Ok(Tried::Broken(fault.unwrap_or(again))),
    }
}

/// Closes sled, which panics when a last sync fails.
pub(super) fn close(db: ::sled::Db) -> Result<(), Fault> {
    guarded(|| {
        drop(db);
        Ok(())
    })
}

fn try_open(dir: &Path, options: &SledOptions) -> Result<(::sled::Db, Scan), Fault> {
    let mut tries = 0;
    loop {
        let opened = guarded(|| {
            let db = ::sled::Config::new()
                .path(dir)
                .cache_capacity(options.cache_bytes)
                // The committer decides when: a flush of its own would sync late.
                .flush_every_ms(None)
                .open()?;
            let scan = scan(&db)?;
            Ok((db, scan))
        });
        // We hold the lock of the whole store, so a handle of our own that was
        // just closed holds this one: sled's threads let go of it in a moment.
        match opened {
            Err(Fault::InUse) if tries < 500 => {
                tries += 1;
                std::thread::park_timeout(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

/// Copies what is left into new files, and keeps the old ones: sled may lose
/// more of a log that it has once misread.
fn rebuild(
    paths: &Paths,
    options: &SledOptions,
    old: ::sled::Db,
) -> Result<(::sled::Db, Scan), OpenError> {
    let fail = |fault: Fault| paths.unusable(fault);
    remove_all(&paths.retry());
    let (new, _) = try_open(&paths.retry(), options).map_err(fail)?;
    let copied = guarded(|| {
        for item in old.iter() {
            let (key, value) = item?;
            new.insert(key, value)?;
        }
        Ok(())
    });
    if let Err(fault @ (Fault::DiskFull | Fault::InUse | Fault::Io(_))) = copied {
        return Err(fail(fault));
    }
    // Where sled cannot read on, what was copied until then is what is left.
    guarded(|| new.flush().map(drop)).map_err(fail)?;
    close(new).map_err(fail)?;
    let _ = close(old);
    let quarantine = paths.free_quarantine();
    File::open(paths.retry().join("db"))
        .and_then(|log| log.sync_all())
        .and_then(|()| sync_dir(&paths.retry()))
        .and_then(|()| fs::rename(paths.sled(), &quarantine))
        .and_then(|()| fs::rename(paths.retry(), paths.sled()))
        .and_then(|()| sync_dir(&paths.dir))
        .map_err(|e| paths.unusable(e))?;
    tracing::warn!(quarantine = %quarantine.display(), "the damaged files are kept");
    try_open(&paths.sled(), options).map_err(fail)
}

/// Removes snapshots that sled had not finished writing, which would keep it
/// from opening for ever. It writes them under this name and renames them when
/// they are whole, so nothing is lost with them.
fn remove_unfinished(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("snap.") && name.ends_with(".generating") {
            tracing::warn!(name, "removing a snapshot that sled had not finished");
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Copies sled's files, except its snapshots; says how many of those there are.
fn copy_without_snapshots(from: &Path, to: &Path) -> io::Result<usize> {
    remove_all(to);
    fs::create_dir(to)?;
    let mut put_aside = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            put_aside += copy_without_snapshots(&entry.path(), &to.join(&name))?;
        } else if name.to_string_lossy().starts_with("snap.") {
            put_aside += 1;
        } else {
            fs::copy(entry.path(), to.join(&name))?;
            File::open(to.join(&name))?.sync_all()?;
        }
    }
    sync_dir(to)?;
    Ok(put_aside)
}

fn remove_all(dir: &Path) {
    // It may not be there, and what is left is overwritten or refused later.
    let _ = fs::remove_dir_all(dir);
}

/// Brings marks and records in line, durable before this returns.
fn settle(
    paths: &Paths,
    options: &SledOptions,
    db: ::sled::Db,
    mut scan: Scan,
    found: &Found,
    loss: Option<String>,
) -> Result<Opened, OpenError> {
    let io = |e: io::Error| paths.unusable(e);
    let fresh = fresh_epoch(options.clock.wall());
    let last = scan.sequence.next() - 1;
    let old = match found {
        Found::Mark(mark) => Some(*mark),
        Found::Missing | Found::Damaged => None,
    };
    let mark = match (old, &loss) {
        (Some(mark), None) => mark,
        (old, loss) => {
            let epoch = old.map_or(fresh, |mark| fresh.max(mark.epoch + 1));
            let floor = old.map_or(0, |mark| mark.incarnation_floor);
            Mark {
                turn: 0,
                store: scan
                    .identity
                    .map(|identity| identity.store)
                    .unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0),
                epoch,
                // Incarnations may be among what is lost: those given from now
                // on are greater than any that were counted up from one.
                incarnation_floor: if loss.is_some() {
                    floor.max(epoch / 1000)
                } else {
                    floor
                },
                // Raised below, once the disk holds what it claims.
                seq: last.min(old.map_or(last, |mark| mark.seq)),
            }
        }
    };
    let mut batch = ::sled::Batch::default();
    let mut changes = Vec::new();
    for (start, end) in std::mem::take(&mut scan.holes) {
        scan.sequence.retire_range(start, end, &mut changes);
    }
    if let Some(old) = old {
        let next = scan.sequence.next();
        scan.sequence.retire_range(next, old.seq + 1, &mut changes);
        scan.sequence.raise(old.seq + 1);
    }
    let mut retired = Vec::new();
    for key in &std::mem::take(&mut scan.leftovers) {
        batch.remove(key.as_slice());
        if let Some(place) = RecordKey::decode(key) {
            retired.push(place.seq);
        }
    }
    changes.extend(scan.sequence.retire(retired));
    let damaged = |_| paths.unusable("a record cannot be encoded");
    for change in changes {
        put_gap(&mut batch, change).map_err(damaged)?;
    }
    let due_at = to_ms(options.clock.wall() + options.retention);
    for hash in std::mem::take(&mut scan.without_due) {
        put_due(
            &mut batch,
            DueKey {
                at_ms: due_at,
                hash,
            },
        )
        .map_err(damaged)?;
    }
    let identity = Identity { store: mark.store };
    if scan.identity != Some(identity) {
        let value = record::encode(Kind::Identity, layout::IDENTITY, &identity).map_err(damaged)?;
        batch.insert(layout::IDENTITY, value);
    }

    // The file first: records without it count as a loss.
    let mut high_water = if old == Some(mark) {
        HighWater::resume(&paths.high_water(), mark).map_err(io)?
    } else {
        HighWater::create(&paths.high_water(), mark).map_err(io)?
    };
    let log = File::open(paths.sled().join("db")).map_err(io)?;
    guarded(|| {
        db.apply_batch(batch)?;
        db.flush()?;
        Ok(())
    })
    .map_err(|fault| paths.unusable(fault))?;
    log.sync_all().map_err(io)?;
    for name in ["conf", "blobs"] {
        match File::open(paths.sled().join(name)) {
            Ok(file) => file.sync_all().map_err(io)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(io(e)),
        }
    }
    sync_dir(&paths.sled()).map_err(io)?;
    sync_dir(&paths.dir).map_err(io)?;
    high_water
        .advance(scan.sequence.next() - 1)
        .and_then(|()| high_water.sync())
        .map_err(io)?;
    Ok(Opened {
        db,
        log,
        scan,
        high_water,
        loss,
    })
}

pub(super) fn put_gap(
    batch: &mut ::sled::Batch,
    change: GapChange,
) -> Result<(), super::frame::Damaged> {
    match change {
        GapChange::Put { start, end } => {
            let key = layout::gap_key(start);
            let value = record::encode(Kind::Gap, &key, &end)?;
            batch.insert(key, value);
        }
        GapChange::Remove { start } => batch.remove(layout::gap_key(start)),
    }
    Ok(())
}

pub(super) fn put_due(batch: &mut ::sled::Batch, due: DueKey) -> Result<(), super::frame::Damaged> {
    let key = due.encode();
    let value = super::frame::encode(Kind::Due, &key, &[])?;
    batch.insert(key, value);
    Ok(())
}
