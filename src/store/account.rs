//! What a store tells of itself, for metrics.

use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

/// Counts and sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Batches made durable.
    pub batches: u64,
    /// Writes in them.
    pub writes: u64,
    /// Records that did not decode when the store was opened.
    pub damaged_records: u64,
    /// Losses declared since the store was opened.
    pub losses: u64,
    /// Times the store was opened again after a failure.
    pub reopened: u64,
    /// Keys expired.
    pub expired: u64,
    /// Expiry stands still because the wall clock was set.
    pub expiry_stopped: bool,
    /// Times a half of the redo log was moved into sled.
    pub moves: u64,
    /// Bytes on disk that tenants are charged for.
    pub used_bytes: u64,
    /// Keys owned now.
    pub running: u64,
    /// Ranges of sequence numbers out of use: a measure of the store's order.
    pub gaps: u64,
    /// Why the store does not work now.
    pub down: Option<String>,
}

/// What is measured as it happens. A clone is the same one.
#[derive(Clone, Debug)]
pub struct Timings {
    /// How long the disk took to make a batch durable, in seconds.
    pub sync: Histogram,
    /// Writes of each batch.
    pub batch: Histogram,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            // From a device with its own battery to a disk in trouble.
            sync: Histogram::new([
                0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0,
            ]),
            batch: Histogram::new([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0]),
        }
    }
}

impl Timings {
    pub(super) fn synced(&self, took: Duration) {
        self.sync.observe(took.as_secs_f64());
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a batch has some thousand writes"
    )]
    pub(super) fn batch(&self, writes: u64) {
        self.batch.observe(writes as f64);
    }
}

/// A store's account of itself.
#[derive(Clone, Debug, Default)]
pub struct Account {
    /// Counts and sizes.
    pub stats: StoreStats,
    /// Latencies.
    pub timings: Timings,
}
