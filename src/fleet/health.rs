//! One rank's health beyond its replica's lease: what the data path sees, and
//! what the sidecar says. Pure: time comes in as an argument, always tokio's.
//!
//! ```text
//!     failures in a row, silence, its own word        the term is over
//!  ┌─────────┐ ───────────────────────▶ ┌─────────┐ ─────────────────▶ ┌─────────┐
//!  │ Trusted │                          │ Ejected │                    │ OnTrial │
//!  └─────────┘ ◀──┐                     └─────────┘ ◀───────────────── └─────────┘
//!                 │                        a probe fails: a longer term     │
//!                 └──────────────────── probes pass in a row ───────────────┘
//! ```
//!
//! The term doubles with every ejection of one incarnation; one that stays
//! trusted for long is forgiven, and a new incarnation starts clean.
//!
//! ```text
//!            the sidecar says so                 for as long as a lease
//!  ┌──────┐ ────────────────────▶ ┌─────────────┐ ────────────────▶ ┌──────────────┐
//!  │ Well │                       │ Ill, closed │                   │ Ill, given up│
//!  └──────┘ ◀──────────────────── └─────────────┘                   └──────────────┘
//!      ▲         good beats in a row                                       │
//!      └───────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Closed: the keys that live there make a detour. Given up, or ejected: they
//! move at their next turn.

mod config;

use std::time::Duration;

use tokio::time::Instant;

pub use self::config::HealthConfig;

/// Failures closer to each other than this have one cause: a burst of broken
/// connections is one failure.
const ONE_CAUSE: Duration = Duration::from_millis(200);

/// A streak in which nothing happened for so long is over.
const STREAK_ENDS: Duration = Duration::from_secs(600);

/// Why a rank is closed on its sidecar's word.
const ILL: &str = "its sidecar reports it unhealthy: its engine does not answer, or was busy and \
                   said nothing of this rank for the sidecar's --frozen-after";
/// Why it is given up.
const LONG_ILL: &str = "its sidecar has reported it unhealthy (see the sidecar's --frozen-after) \
                        for as long as a lease lasts (by the server's --heartbeat-interval)";

/// Why a rank was ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its answers are failures.
    Failures,
    /// It gives no answer.
    Hangs,
    /// Its server says that its engine is dead.
    Died,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Failures, Self::Hangs, Self::Died];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failures => "failures",
            Self::Hangs => "hangs",
            Self::Died => "died",
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Failures => "ejected: request after request fails there",
            Self::Hangs => "ejected: it takes requests and answers none",
            Self::Died => "ejected: its server says that its engine is dead",
        }
    }
}

/// What the data path makes of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It serves.
    Trusted,
    /// It takes nothing.
    Ejected {
        /// Why.
        why: Cause,
        /// When, in the first place.
        since: Instant,
        /// It is not probed before.
        until: Instant,
    },
    /// It takes nothing but probes.
    OnTrial {
        /// Why it was ejected.
        why: Cause,
        /// When, in the first place.
        since: Instant,
        /// A probe is under way.
        asked: bool,
        /// Probes that passed, in a row.
        passed: u32,
    },
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// A token came.
    Passed,
    /// It is full, which is no fault: asked again.
    Busy,
    /// None came.
    Failed,
}

/// What the sidecar makes of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Well,
    Ill {
        since: Instant,
        good_beats: u32,
        given_up: bool,
    },
}

/// One rank's health.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankHealth {
    standing: Standing,
    word: Word,
    streak: Streak,
    /// Aborts that got no answer, likewise.
    unanswered: Streak,
    ejections: u32,
    trusted_since: Instant,
}

#[derive(Clone, Copy, Debug, Default)]
struct Streak {
    failures: u32,
    first: Option<Instant>,
    last: Option<Instant>,
    /// The first failure's request.
    evidence: Option<u64>,
    /// Of more than one.
    many: bool,
}

impl Streak {
    /// One more. Returns whether these are enough.
    fn grow(&mut self, evidence: Option<u64>, now: Instant, config: &HealthConfig) -> bool {
        match self.last.map(|at| now.saturating_duration_since(at)) {
            Some(gap) if gap >= STREAK_ENDS => *self = Self::default(),
            Some(gap) if gap < ONE_CAUSE => return false,
            _ => {}
        }
        self.failures += 1;
        self.first = self.first.or(Some(now));
        self.last = Some(now);
        // What fails again and again by one request's doing says nothing of the
        // rank.
        self.many |= evidence.is_none() || self.evidence.is_some_and(|e| Some(e) != evidence);
        self.evidence = self.evidence.or(evidence);
        self.failures >= config.eject_after && self.many
    }
}

/// Whether a rank takes requests, by its own health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fitness {
    Fit,
    /// Not now.
    Closed(&'static str),
    /// Not for long: its keys move.
    Out(&'static str),
}

impl RankHealth {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            standing: Standing::Trusted,
            word: Word::Well,
            streak: Streak::default(),
            unanswered: Streak::default(),
            ejections: 0,
            trusted_since: now,
        }
    }

    pub(super) fn standing(&self) -> Standing {
        self.standing
    }

    pub(super) fn fitness(&self) -> Fitness {
        match (self.standing, self.word) {
            (Standing::Ejected { why, .. } | Standing::OnTrial { why, .. }, _) => {
                Fitness::Out(why.text())
            }
            (Standing::Trusted, Word::Ill { given_up: true, .. }) => Fitness::Out(LONG_ILL),
            (Standing::Trusted, Word::Ill { .. }) => Fitness::Closed(ILL),
            (Standing::Trusted, Word::Well) => Fitness::Fit,
        }
    }

    /// A beat says how it is. Returns whether that changes anything.
    pub(super) fn heard(&mut self, well: bool, now: Instant, config: &HealthConfig) -> bool {
        let before = self.fitness();
        self.word = match (self.word, well) {
            (Word::Well, true) => Word::Well,
            (Word::Well, false) => Word::Ill {
                since: now,
                good_beats: 0,
                given_up: false,
            },
            (Word::Ill { good_beats, .. }, true) if good_beats + 1 >= config.probes_to_return => {
                Word::Well
            }
            (
                Word::Ill {
                    since,
                    good_beats,
                    given_up,
                },
                well,
            ) => Word::Ill {
                since,
                good_beats: if well { good_beats + 1 } else { 0 },
                given_up,
            },
        };
        before != self.fitness()
    }

    /// The sidecar's last word on it is good, so that a probe harms nobody: one
    /// message to a dead scheduler hangs all of its server's ranks.
    pub(super) fn may_be_probed(&self) -> bool {
        self.word == Word::Well
    }

    /// The data path got a whole answer.
    pub(super) fn succeeded(&mut self) {
        self.streak = Streak::default();
        self.unanswered = Streak::default();
    }

    /// It answered an abort.
    pub(super) fn aborted(&mut self) {
        self.unanswered = Streak::default();
    }

    /// The data path got a failure. `evidence` names the request; `None`: it was
    /// none of the caller's doing. Returns whether the rank is to be ejected.
    pub(super) fn failed(
        &mut self,
        evidence: Option<u64>,
        now: Instant,
        config: &HealthConfig,
    ) -> bool {
        self.standing == Standing::Trusted && self.streak.grow(evidence, now, config)
    }

    /// An abort got no answer. `sign`: when any request of the rank last got
    /// something, or when nobody could expect it: a rank that shows a sign of life
    /// is late, not silent. Returns whether it is to be ejected for hanging.
    pub(super) fn unanswered(
        &mut self,
        sign: Option<Instant>,
        now: Instant,
        config: &HealthConfig,
    ) -> bool {
        if self
            .unanswered
            .first
            .is_some_and(|first| sign >= Some(first))
        {
            self.unanswered = Streak::default();
        }
        self.standing == Standing::Trusted && self.unanswered.grow(None, now, config)
    }

    /// Takes it out. Returns whether it was in. One that is out for its failures
    /// may turn out to hang.
    pub(super) fn eject(&mut self, why: Cause, now: Instant, config: &HealthConfig) -> bool {
        match &mut self.standing {
            Standing::Trusted => {}
            Standing::Ejected {
                why: known, since, ..
            }
            | Standing::OnTrial {
                why: known, since, ..
            } => {
                if why == Cause::Hangs && *known != why {
                    (*known, *since) = (why, now);
                }
                return false;
            }
        }
        if now.saturating_duration_since(self.trusted_since) >= config.forgiven_after {
            self.ejections = 0;
        }
        self.out(why, now, now, config);
        true
    }

    fn out(&mut self, why: Cause, since: Instant, now: Instant, config: &HealthConfig) {
        self.standing = Standing::Ejected {
            why,
            since,
            until: now + config.term(self.ejections),
        };
        self.ejections = self.ejections.saturating_add(1);
        self.streak = Streak::default();
        self.unanswered = Streak::default();
    }

    /// Time has passed; `ttl` is a lease's. Returns whether that changes anything.
    pub(super) fn tick(&mut self, now: Instant, ttl: Duration) -> bool {
        let before = self.fitness();
        if let Standing::Ejected { why, since, until } = self.standing
            && now >= until
        {
            self.standing = Standing::OnTrial {
                why,
                since,
                asked: false,
                passed: 0,
            };
        }
        if let Word::Ill {
            since, given_up, ..
        } = &mut self.word
            && now.saturating_duration_since(*since) >= ttl
        {
            *given_up = true;
        }
        before != self.fitness()
    }

    /// Whether a probe is due; it is then under way.
    pub(super) fn ask(&mut self) -> bool {
        match &mut self.standing {
            Standing::OnTrial { asked, .. } if !*asked => {
                *asked = true;
                true
            }
            Standing::Trusted | Standing::Ejected { .. } | Standing::OnTrial { .. } => false,
        }
    }

    /// The probe ended. Returns whether it is trusted again.
    pub(super) fn probed(&mut self, probe: Probe, now: Instant, config: &HealthConfig) -> bool {
        let Standing::OnTrial {
            why, since, passed, ..
        } = self.standing
        else {
            return false;
        };
        match probe {
            Probe::Passed if passed + 1 >= config.probes_to_return => {
                self.standing = Standing::Trusted;
                self.trusted_since = now;
                return true;
            }
            Probe::Passed | Probe::Busy => {
                self.standing = Standing::OnTrial {
                    why,
                    since,
                    asked: false,
                    passed: passed + u32::from(probe == Probe::Passed),
                };
            }
            Probe::Failed => self.out(why, since, now, config),
        }
        false
    }
}

#[cfg(test)]
mod tests;
