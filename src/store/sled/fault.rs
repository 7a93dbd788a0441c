//! Calls into sled, which may fail or panic on a damaged file. A panic is
//! caught and becomes a fault like any other.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Why a call into sled, or to the disk, did not do its work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// No space is left.
    #[error("the disk is full")]
    DiskFull,
    /// A handle holds sled's lock.
    #[error("sled's files are in use")]
    InUse,
    /// The machine refuses: permissions, a failing disk, a file system that is
    /// not there. The data may be whole.
    #[error("the disk failed: {0}")]
    Io(String),
    /// A sync failed for another reason than space. The kernel may have dropped
    /// what it could not write and now show it as if it were on disk, so nothing
    /// that is read may be trusted until the machine has read it anew.
    #[error(
        "the disk did not take a sync: {0}; nothing is served until Berth is started again, which \
         is best done once the disk is known to be sound"
    )]
    Unsynced(String),
    /// sled does not accept what it finds.
    #[error("{0}")]
    Corrupt(String),
}

impl Fault {
    /// Nothing is open.
    pub(super) fn closed() -> Self {
        Self::Io("the store is closed".into())
    }

    /// Why a sync of the log failed.
    pub(super) fn of_sync(error: io::Error) -> Self {
        match Self::from(error) {
            Self::DiskFull => Self::DiskFull,
            other => Self::Unsynced(other.to_string()),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull,
            // sled tells it by this text alone.
            _ if error.to_string().contains("could not acquire lock") => Self::InUse,
            // sled says so of what it cannot read.
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::Other => Self::Corrupt(error.to_string()),
            _ => Self::Io(error.to_string()),
        }
    }
}

impl From<::sled::Error> for Fault {
    fn from(error: ::sled::Error) -> Self {
        match error {
            ::sled::Error::Io(error) => error.into(),
            other => Self::Corrupt(other.to_string()),
        }
    }
}

/// Runs a call into sled.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, ::sled::Error>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(Fault::from),
        Err(panic) => Err(Fault::Corrupt(format!("sled panicked: {}", text(&*panic)))),
    }
}

fn text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a message")
        .chars()
        .take(300)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_fault_with_its_message() {
        let fault = guarded::<()>(|| panic!("index {} out of bounds", 7)).unwrap_err();
        assert!(matches!(&fault, Fault::Corrupt(text) if text.contains("index 7")));
    }

    #[test]
    fn a_full_disk_is_told_apart_from_damage() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(Fault::from(full), Fault::DiskFull);
        let enospc = ::sled::Error::Io(io::Error::from_raw_os_error(28));
        assert_eq!(Fault::from(enospc), Fault::DiskFull);
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(matches!(Fault::from(denied), Fault::Io(_)));
    }
}
