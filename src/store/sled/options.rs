//! What an operator decides about the store on disk.

use std::{fmt, sync::Arc, time::Duration};

use super::clock::{Clock, SystemClock};

/// What survives what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// An answer is given after fdatasync: it survives a power loss.
    #[default]
    Fsync,
    /// An answer is given once the kernel has the data, which is synced every
    /// [`SledOptions::tick`]: it survives a crash of Berth, but a power loss or
    /// a crash of the kernel takes up to the last tick with it, without a trace.
    Relaxed,
}

/// A point between two steps of the committer. Tests end the process there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Requests were taken from the queue.
    Taken,
    /// They were decided; nothing is written.
    Decided,
    /// The kernel has them, in the redo log.
    Logged,
    /// The disk has them.
    Synced,
    /// The high-water file says so.
    Marked,
    /// Callers were told.
    Told,
    /// The redo log goes on in its other half; nothing of the one that it left
    /// is in sled yet.
    Switched,
    /// sled durably holds that half.
    Moved,
}

impl Step {
    /// In the order of the committer, those of moving last.
    pub const ALL: [Self; 8] = [
        Self::Taken,
        Self::Decided,
        Self::Logged,
        Self::Synced,
        Self::Marked,
        Self::Told,
        Self::Switched,
        Self::Moved,
    ];
}

/// Called at every step.
pub type Observer = Arc<dyn Fn(Step) + Send + Sync>;

/// See the module.
#[derive(Clone)]
pub struct SledOptions {
    /// What an answer promises.
    pub durability: Durability,
    /// Memory for sled's pages, in bytes.
    pub cache_bytes: u64,
    /// Size of the redo log on disk, in bytes; as much memory is taken by what it
    /// holds before sled does. At least 64 KiB. Not used where `durability` is
    /// relaxed.
    pub redo_bytes: u64,
    /// How long a key is kept after its last change.
    pub retention: Duration,
    /// Bytes on disk that one tenant may keep before its new keys are refused.
    pub tenant_quota: u64,
    /// Bytes of results that one key may keep; a sample beyond is not stored.
    pub max_result_bytes: u64,
    /// Free bytes of the file system below which new keys are refused.
    pub free_space_floor: u64,
    /// Keys that may be owned at once.
    pub max_running: usize,
    /// Start although something was lost: the loss is declared (a new epoch, a
    /// count), and what is left is kept.
    pub accept_loss: bool,
    /// How often the store looks after itself: expiry, syncs that may be late,
    /// reopening.
    pub tick: Duration,
    /// Its clocks.
    pub clock: Arc<dyn Clock>,
    /// For tests that end the process between two steps.
    #[doc(hidden)]
    pub observer: Option<Observer>,
}

impl SledOptions {
    pub(super) fn observe(&self, step: Step) {
        if let Some(observer) = &self.observer {
            observer(step);
        }
    }
}

impl Default for SledOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Fsync,
            cache_bytes: 64 << 20,
            redo_bytes: 8 << 20,
            retention: Duration::from_secs(24 * 60 * 60),
            tenant_quota: 8 << 30,
            max_result_bytes: 16 << 20,
            free_space_floor: 512 << 20,
            max_running: 100_000,
            accept_loss: false,
            tick: Duration::from_secs(1),
            clock: Arc::new(SystemClock::default()),
            observer: None,
        }
    }
}

impl fmt::Debug for SledOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SledOptions")
            .field("durability", &self.durability)
            .field("cache_bytes", &self.cache_bytes)
            .field("redo_bytes", &self.redo_bytes)
            .field("retention", &self.retention)
            .field("tenant_quota", &self.tenant_quota)
            .field("max_result_bytes", &self.max_result_bytes)
            .field("free_space_floor", &self.free_space_floor)
            .field("max_running", &self.max_running)
            .field("accept_loss", &self.accept_loss)
            .field("tick", &self.tick)
            .finish_non_exhaustive()
    }
}
