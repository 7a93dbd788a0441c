//! The store's clocks. Expiry needs the wall clock, which somebody may set: as
//! soon as it has run away from the monotonic one, expiry stops.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::time::Instant;

/// How far the clocks may part.
const MAX_PARTING: Duration = Duration::from_secs(60);

/// Two clocks.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The time of day.
    fn wall(&self) -> SystemTime;
    /// Time since some fixed moment; never goes back.
    fn monotonic(&self) -> Duration;
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    fn monotonic(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Compares the clocks with how they stood when the store was opened.
#[derive(Debug)]
pub(super) struct Watch {
    wall: SystemTime,
    monotonic: Duration,
}

impl Watch {
    pub(super) fn start(clock: &dyn Clock) -> Self {
        Self {
            wall: clock.wall(),
            monotonic: clock.monotonic(),
        }
    }

    /// The wall clock has not been set by more than [`MAX_PARTING`].
    pub(super) fn agree(&self, clock: &dyn Clock) -> bool {
        let expected = self.wall + clock.monotonic().saturating_sub(self.monotonic);
        let now = clock.wall();
        let parting = now
            .duration_since(expected)
            .unwrap_or_else(|behind| behind.duration());
        parting <= MAX_PARTING
    }
}

/// Milliseconds since 1970.
pub(super) fn to_ms(time: SystemTime) -> u64 {
    let age = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}
