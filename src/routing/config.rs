//! What the router may be told.

use std::time::Duration;

use super::moves::MoveConfig;

/// A trajectory idle for so long is forgotten: its cache is gone long since.
pub const HINT_TTL: Duration = Duration::from_secs(24 * 3600);

/// How the router decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterConfig {
    /// The choice between balance and agreement for new keys, at least 1. 1: the
    /// least loaded rank. Greater: the key's home while its load is within this
    /// factor of the mean (consistent hashing with bounded loads). Infinite:
    /// plain consistent hashing.
    pub load_factor: f64,
    /// A trajectory idle for so long no longer counts as load.
    pub pin_ttl: Duration,
    /// Pins kept at most. One costs at most 200 bytes.
    pub max_pins: usize,
    /// Changes of pins are remembered for
    /// [`Router::changed_pins`](super::Router::changed_pins).
    pub keep_changes: bool,
    /// Trajectories wait for room in some rank's KV cache. `None`: they do not.
    pub kv_admission: Option<KvAdmission>,
    /// Keys move off a rank whose queue costs more than their history. `None`:
    /// never.
    pub moves: Option<MoveConfig>,
    /// Requests without a key go where the longest prefix of their prompt was
    /// seen, as under the `prefix` policy.
    pub keyless_prefix: bool,
    /// Blocks of prompts remembered at most for that. One costs at most 100 bytes
    /// and stands for [`prefix::BLOCK`](super::prefix::BLOCK) tokens.
    pub max_prefix_blocks: usize,
}

/// New trajectories are let in up to so much of the share: those that live there
/// are to have room to grow, or some would have to leave at once.
const ENTRY: f64 = 0.9;

/// When trajectories wait for room: new ones, and those whose rank has none left for
/// them beside the others that live there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAdmission {
    /// The contexts of a rank's live trajectories, a new one's included, may fill
    /// so much of its KV capacity; new ones are let in up to nine tenths of that.
    /// Above 0.
    pub share: f64,
    /// A trajectory that has waited for so long is taken all the same: it is late,
    /// never lost.
    pub wait: Duration,
}

impl KvAdmission {
    /// The share up to which new ones are let in.
    pub(super) fn entry(&self) -> f64 {
        ENTRY * self.share
    }

    /// Who has waited so long has waited as long as anybody does.
    pub(super) fn is_over(&self, waited: Option<Duration>) -> bool {
        waited.is_some_and(|waited| waited >= self.wait)
    }
}

impl Default for KvAdmission {
    fn default() -> Self {
        Self {
            share: 1.0,
            // Shorter than the deadline of calls that bring none.
            wait: Duration::from_secs(300),
        }
    }
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            load_factor: 1.0,
            // Gaps between turns in real traces: p90 129 s, p99 1,914 s. An idle pin is
            // followed all the same; one that counts for longer keeps new
            // trajectories from a rank for the sake of some that were abandoned.
            pin_ttl: Duration::from_secs(300),
            max_pins: 1_000_000,
            keep_changes: false,
            kv_admission: None,
            moves: None,
            keyless_prefix: false,
            max_prefix_blocks: 1_000_000,
        }
    }
}
