//! Getting sled open, and what can be saved when it does not open whole.

use std::{
    fs::{self, File},
    io,
    path::Path,
    time::Duration,
};

use super::{
    disk::{free_space, sync_dir},
    fault::{Fault, guarded},
    frame::Kind,
    high_water::Found,
    layout, mover,
    open::{OpenError, Paths, missing},
    options::SledOptions,
    record::{self, Identity},
    redo::Replay,
    scan::{Scan, scan},
};

/// How the best try ended.
pub(super) enum Tried {
    Opened(::sled::Db, Box<Scan>),
    Broken(Fault),
}

/// With less free space than this, a failure to open is laid to the disk and
/// not to the files.
const ROOM_TO_OPEN: u64 = 1 << 20;

/// The first try that loses nothing; else the one that loses least.
pub(super) fn first_good(
    paths: &Paths,
    options: &SledOptions,
    found: &Found,
    replay: &Replay,
) -> Result<Tried, OpenError> {
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
    let (lost_first, fault) = match try_open(&paths.sled(), options, replay) {
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
        && let Ok((db, scan)) = try_open(&paths.retry(), options, replay)
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
    match try_open(&paths.sled(), options, replay) {
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

/// Opens sled in `dir`, does again what the redo log says, and looks at it all.
pub(super) fn try_open(
    dir: &Path,
    options: &SledOptions,
    replay: &Replay,
) -> Result<(::sled::Db, Scan), Fault> {
    let mut tries = 0;
    loop {
        let opened = guarded(|| {
            ::sled::Config::new()
                .path(dir)
                .cache_capacity(options.cache_bytes)
                // The committer decides when: a flush of its own would sync late.
                .flush_every_ms(None)
                .open()
        })
        .and_then(|db| {
            let missing = redo(&db, dir, replay)?;
            let mut scan = guarded(|| scan(&db))?;
            scan.redo_missing = missing;
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

/// Puts what the redo log says into sled, where it is the same store's. Says how
/// many of its batches are missing.
fn redo(db: &::sled::Db, dir: &Path, replay: &Replay) -> Result<u64, Fault> {
    let stored = guarded(|| db.get(layout::IDENTITY))?;
    let identity: Option<Identity> =
        stored.and_then(|value| record::decode(Kind::Identity, layout::IDENTITY, &value).ok());
    if identity.is_none_or(|identity| identity.store != replay.store) {
        return Ok(0);
    }
    if !replay.writes.is_empty() {
        tracing::info!(
            writes = replay.writes.len(),
            "bringing the store up to date"
        );
        let log = File::open(dir.join("db"))?;
        mover::replay(db, &log, &replay.writes)?;
    }
    Ok(replay.missing)
}

/// Copies what is left into new files, and keeps the old ones: sled may lose
/// more of a log that it has once misread.
pub(super) fn rebuild(
    paths: &Paths,
    options: &SledOptions,
    old: ::sled::Db,
) -> Result<(::sled::Db, Scan), OpenError> {
    let fail = |fault: Fault| paths.unusable(fault);
    remove_all(&paths.retry());
    let nothing = Replay::default();
    let (new, _) = try_open(&paths.retry(), options, &nothing).map_err(fail)?;
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
    try_open(&paths.sled(), options, &nothing).map_err(fail)
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
