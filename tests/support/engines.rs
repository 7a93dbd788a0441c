//! Simulated engines as most tests want them.

use std::time::Duration;

use berth::engine::sim::SimConfig;

/// Engines whose steps take no time.
pub fn instant() -> SimConfig {
    SimConfig {
        incremental_streaming_output: true,
        ..SimConfig::instant()
    }
}

/// Engines that take `step` for each token.
pub fn stepping(step: Duration) -> SimConfig {
    SimConfig {
        step: Some(step),
        time_scale: 1.0,
        ..instant()
    }
}
