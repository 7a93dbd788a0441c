//! The two things that the standard library does not say plainly about disks.

use std::{fs::File, io, path::Path};

/// Makes the names in a directory survive a power loss.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Bytes that this process may still write to the file system of `dir`.
pub(super) fn free_space(dir: &Path) -> io::Result<u64> {
    let space = rustix::fs::statvfs(dir)?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}
