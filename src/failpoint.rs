//! Named points at which the process can be made to die, for the harness that
//! kills the control plane between every two steps of a sample's life
//! (`tests/crash`).
//!
//! `BERTH_FAILPOINT=name:n` ends the process at the n-th passage of the point of
//! that name, as kill -9 does: no destructor runs, nothing is flushed. Without
//! the variable a point costs one relaxed load of an atomic.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

/// The variable.
pub const VARIABLE: &str = "BERTH_FAILPOINT";

/// From the sending of a request until [`Point::Sent`]: it has left, and an
/// engine that takes a moment to parse it has not.
const LEFT: Duration = Duration::from_millis(3);

/// A point between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Point {
    /// A key is about to be claimed.
    Claim,
    /// It is claimed, and nobody knows.
    Claimed,
    /// A rank is chosen, and nothing is written.
    Routed,
    /// An attempt is about to be written down.
    Dispatch,
    /// It is written down, and no byte of it has left.
    Dispatched,
    /// Its request has left, and the engine may not have parsed it.
    Sent,
    /// Tokens came.
    Token,
    /// The engine is done, and nothing is written.
    Ended,
    /// A finished sample is durable, and nobody was told.
    Committed,
    /// All samples are, and no caller was told.
    Told,
    /// An attempt is about to be aborted.
    Abort,
    /// It is aborted, and that is not written down.
    Aborted,
    /// It is about to be aborted for the second time.
    AbortAgain,
    /// It is fenced on disk, and no new one was begun.
    Fenced,
    /// A key is about to be given up.
    GiveUp,
    /// It is given up on disk, and nobody was told.
    GivenUp,
}

impl Point {
    /// All of them, in the order of a sample's life.
    pub const ALL: [Self; 16] = [
        Self::Claim,
        Self::Claimed,
        Self::Routed,
        Self::Dispatch,
        Self::Dispatched,
        Self::Sent,
        Self::Token,
        Self::Ended,
        Self::Committed,
        Self::Told,
        Self::Abort,
        Self::Aborted,
        Self::AbortAgain,
        Self::Fenced,
        Self::GiveUp,
        Self::GivenUp,
    ];

    /// Its name in the variable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Claimed => "claimed",
            Self::Routed => "routed",
            Self::Dispatch => "dispatch",
            Self::Dispatched => "dispatched",
            Self::Sent => "sent",
            Self::Token => "token",
            Self::Ended => "ended",
            Self::Committed => "committed",
            Self::Told => "told",
            Self::Abort => "abort",
            Self::Aborted => "aborted",
            Self::AbortAgain => "abort-again",
            Self::Fenced => "fenced",
            Self::GiveUp => "give-up",
            Self::GivenUp => "given-up",
        }
    }

    /// A number that is no other point's, and not 0.
    const fn tag(self) -> u32 {
        self as u32 + 1
    }
}

/// The tag of the point that is armed; 0: none. Set before anything is served.
static ARMED: AtomicU32 = AtomicU32::new(0);

/// Passages until the end, the last one included.
static LEFT_TO_PASS: AtomicU64 = AtomicU64::new(0);

/// Arms what the variable says.
///
/// # Errors
/// When it says nothing that can be.
pub fn arm(said: &str) -> Result<(), String> {
    let (point, passages) = parse(said).ok_or_else(|| {
        let names: Vec<&str> = Point::ALL.iter().map(|point| point.name()).collect();
        format!(
            "{VARIABLE}={said:?} is not of the form name:n with n from 1 and a name of {}",
            names.join(", ")
        )
    })?;
    LEFT_TO_PASS.store(passages, Ordering::Relaxed);
    ARMED.store(point.tag(), Ordering::Release);
    tracing::warn!(point = point.name(), passages, "this process is set to die");
    Ok(())
}

fn parse(said: &str) -> Option<(Point, u64)> {
    let (name, passages) = said.split_once(':')?;
    let point = Point::ALL.into_iter().find(|point| point.name() == name)?;
    let passages = passages.parse().ok().filter(|n| *n > 0)?;
    Some((point, passages))
}

/// The point is passed.
#[inline]
pub fn pass(point: Point) {
    if ARMED.load(Ordering::Relaxed) == point.tag() {
        count_down();
    }
}

/// The point is passed in a moment: see [`Point::Sent`]. Within a runtime only.
#[inline]
pub fn pass_soon(point: Point) {
    if ARMED.load(Ordering::Relaxed) == point.tag() {
        tokio::spawn(async {
            tokio::time::sleep(LEFT).await;
            count_down();
        });
    }
}

#[cold]
fn count_down() {
    if LEFT_TO_PASS.fetch_sub(1, Ordering::Relaxed) == 1 {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_point_is_refused() {
        assert_eq!(parse("sent:3"), Some((Point::Sent, 3)));
        for bad in ["", "sent", "sent:", "sent:0", "sent:x", "nowhere:1"] {
            assert!(arm(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_point_has_a_name_and_a_tag_of_its_own() {
        for (i, a) in Point::ALL.iter().enumerate() {
            assert_eq!(parse(&format!("{}:1", a.name())), Some((*a, 1)));
            for b in &Point::ALL[i + 1..] {
                assert!(a.name() != b.name() && a.tag() != b.tag());
            }
        }
    }
}
