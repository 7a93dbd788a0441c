//! Opening the store's directory, whatever state a crash, a power loss or a bad
//! disk has left it in.
//!
//! ```text
//! DIR/lock            held while the store is open
//! DIR/high-water      see `high_water`
//! DIR/redo            see `redo`
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
//! counted and begins a new epoch. Each try puts into sled what the redo log says
//! first.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    super::fresh_epoch,
    apply::apply,
    clock::to_ms,
    disk::sync_dir,
    fault::guarded,
    frame::Kind,
    high_water::{self, Found, HighWater, Mark},
    layout::{self, DueKey, RecordKey},
    options::{Durability, SledOptions},
    record::{self, Identity},
    redo::{self, Redo, Replay},
    salvage::{Tried, first_good, rebuild, try_open},
    scan::Scan,
    sequence::GapChange,
    writes::Writes,
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
         backup of {dir}, or start with --accept-loss to begin with an empty store: finished results \
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
         --accept-loss to go on with what is left: requests whose results are missing are then \
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
    pub(super) log: Arc<File>,
    /// `None`: with relaxed durability.
    pub(super) redo: Option<Redo>,
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
    pub(super) fn redo(&self) -> PathBuf {
        self.dir.join("redo")
    }
    pub(super) fn sled(&self) -> PathBuf {
        self.dir.join("sled")
    }
    pub(super) fn retry(&self) -> PathBuf {
        self.dir.join("retry")
    }

    pub(super) fn free_quarantine(&self) -> PathBuf {
        (1u64..)
            .map(|n| self.dir.join(format!("quarantine-{n}")))
            .find(|path| !path.exists())
            .unwrap_or_else(|| self.dir.join("quarantine"))
    }

    pub(super) fn unusable(&self, reason: impl ToString) -> OpenError {
        OpenError::Unusable {
            dir: self.dir.clone(),
            reason: reason.to_string(),
        }
    }
}

/// Makes the folder, for its owner alone. One that others may enter is closed to
/// them: it holds what models were asked and what they answered. The group of a
/// volume keeps its access.
fn make(dir: &Path) -> io::Result<()> {
    use fs::Permissions;
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)?;
    let mode = fs::metadata(dir)?.permissions().mode();
    if mode & 0o007 != 0 {
        let closed = fs::set_permissions(dir, Permissions::from_mode(mode & 0o770));
        match closed {
            Ok(()) => {
                tracing::warn!(dir = %dir.display(), "others could enter the store's folder: closed to them")
            }
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "others may enter the store's folder: chmod o-rwx");
            }
        }
    }
    Ok(())
}

/// Takes the lock of the store and opens it. Blocks; on a large store for
/// seconds.
pub(super) fn open(paths: &Paths, options: &SledOptions) -> Result<(Opened, File), OpenError> {
    make(&paths.dir).map_err(|e| paths.unusable(e))?;
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
    let replay = redo::look(&paths.redo()).map_err(io)?;
    let (db, scan, broken) = match first_good(paths, options, &found, &replay)? {
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
            let opened = try_open(&paths.sled(), options, &Replay::default());
            let (db, scan) = opened.map_err(|f| paths.unusable(f))?;
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
        return settle(paths, options, db, scan, &found, &replay, loss);
    }
    settle(paths, options, db, scan, &found, &replay, loss)
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
pub(super) fn missing(found: &Found, scan: &Scan) -> Option<String> {
    let mut reasons = Vec::new();
    if !scan.holes.is_empty() {
        reasons.push(format!("{} records are missing", scan.missing()));
    }
    if scan.redo_missing > 0 {
        reasons.push(format!(
            "{} batches of the redo log are unreadable",
            scan.redo_missing
        ));
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

/// Brings marks and records in line, durable before this returns.
fn settle(
    paths: &Paths,
    options: &SledOptions,
    db: ::sled::Db,
    mut scan: Scan,
    found: &Found,
    replay: &Replay,
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
    let mut batch = Writes::default();
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
    let log = Arc::new(File::open(paths.sled().join("db")).map_err(io)?);
    let writes = batch.len();
    guarded(|| apply(&db, batch.into_batch(), writes)).map_err(|fault| paths.unusable(fault))?;
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
    let path = paths.redo();
    let redo = match (options.durability, &loss) {
        (Durability::Fsync, None) => {
            Redo::open(&path, replay, mark.store, options.redo_bytes).map(Some)
        }
        // Nothing of what led to it may come back.
        (Durability::Fsync, Some(_)) => {
            Redo::create(&path, replay, mark.store, options.redo_bytes).map(Some)
        }
        (Durability::Relaxed, _) => Redo::remove(&path).map(|()| None),
    };
    let redo = redo.map_err(io)?;
    high_water
        .advance(scan.sequence.next() - 1)
        .and_then(|()| high_water.sync())
        .map_err(io)?;
    Ok(Opened {
        db,
        log,
        redo,
        scan,
        high_water,
        loss,
    })
}

pub(super) fn put_gap(writes: &mut Writes, change: GapChange) -> Result<(), super::frame::Damaged> {
    match change {
        GapChange::Put { start, end } => {
            let key = layout::gap_key(start);
            let value = record::encode(Kind::Gap, &key, &end)?;
            writes.insert(key, value);
        }
        GapChange::Remove { start } => writes.remove(layout::gap_key(start)),
    }
    Ok(())
}

pub(super) fn put_due(writes: &mut Writes, due: DueKey) -> Result<(), super::frame::Damaged> {
    let key = due.encode();
    let value = super::frame::encode(Kind::Due, &key, &[])?;
    writes.insert(key, value);
    Ok(())
}
