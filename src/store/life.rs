//! The life of a key as a pure state machine: no I/O, no clock, no locks. Both
//! stores drive this very code, and `tests/life_exploration.rs` walks through
//! every state that it can reach together with a model of its callers.
//!
//! A command is decided against the record and gives a reply and at most one
//! event; the event alone changes the record. A store that writes the events
//! of a key in their order therefore finds the same record again by
//! [`Record::replay`], except for its owner, which never outlives the process.

mod words;

use std::time::SystemTime;

pub use self::words::{Applied, Command, Event, Rejection, Reply};
use super::{AttemptRecord, Fingerprint, OwnerId};
use crate::{error::Error, ids::Tenant};

/// Samples that one key can have. Validation keeps requests far below it; this
/// bounds what a damaged or foreign record can make a reader allocate.
pub const MAX_SAMPLES: u32 = 4096;

/// What is known of one key. `R` stands for a finished sample: the sample
/// itself, or where it lies on disk.
///
/// ```text
///             claim                       all samples DONE
///   (none) ---------> owned ------------------------------------> finished
///                     |  ^   \------- fail --------------------> failed
///             release |  | claim
///          or a crash v  |
///                     unowned      (forgotten at once if nothing was dispatched)
/// ```
///
/// `finished` and `failed` are final: no command changes them any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record<R> {
    /// Whose quota it counts against.
    pub tenant: Tenant,
    /// What was asked for.
    pub fingerprint: Fingerprint,
    /// Who generates it now. `None`: nobody, or the key is finished or failed.
    pub owner: Option<OwnerId>,
    /// When the key was first claimed.
    pub started_at: SystemTime,
    /// The failure that every retry would meet.
    pub failed: Option<Error>,
    /// By index; never empty.
    pub samples: Vec<SampleState<R>>,
}

/// The life of one sample within a key.
///
/// ```text
///                 dispatch n (n > last)              commit n
///   INTENT{last} -----------------------> DISPATCHED(n) ------> DONE{n}
///        ^                                   |
///        +------------- fence n -------------+
/// ```
///
/// There is no way from DISPATCHED to DISPATCHED: the old attempt is fenced
/// first. A commit whose attempt is not the dispatched one is stale, and a
/// second commit of the same attempt is too: what is stored counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleState<R> {
    /// Nothing of it runs.
    Intent {
        /// The greatest attempt number so far; 0 for none.
        last: u32,
    },
    /// This attempt was sent, or is about to be.
    Dispatched(AttemptRecord),
    /// Finished by this attempt.
    Done {
        /// Its number.
        attempt: u32,
        /// The finished sample.
        result: R,
    },
}

/// Applies a command to what is known of a key. On `Err` nothing has changed.
pub fn apply<R: Clone>(
    slot: &mut Option<Record<R>>,
    command: Command<R>,
) -> Result<Applied<R>, Rejection> {
    let Some(record) = slot else {
        let Command::Claim {
            owner,
            tenant,
            fingerprint,
            num_samples,
            now,
        } = command
        else {
            return Err(Rejection::NotOwner);
        };
        let mut record = Record::new(tenant, fingerprint, num_samples, now)?;
        record.owner = Some(owner);
        *slot = Some(record);
        return Ok(Applied {
            reply: Reply::Claimed,
            event: None,
        });
    };
    let release = matches!(command, Command::Release { .. });
    let applied = record.apply(command)?;
    if release && record.is_blank() {
        *slot = None;
    }
    Ok(applied)
}

impl<R> Record<R> {
    /// A key nobody has worked on yet.
    pub fn new(
        tenant: Tenant,
        fingerprint: Fingerprint,
        num_samples: u32,
        started_at: SystemTime,
    ) -> Result<Self, Rejection> {
        if num_samples == 0 || num_samples > MAX_SAMPLES {
            return Err(Rejection::SampleCount);
        }
        Ok(Self {
            tenant,
            fingerprint,
            owner: None,
            started_at,
            failed: None,
            samples: (0..num_samples)
                .map(|_| SampleState::Intent { last: 0 })
                .collect(),
        })
    }

    /// The event that stands before all others of this key.
    pub fn opened(&self) -> Event<R> {
        Event::Opened {
            tenant: self.tenant.clone(),
            fingerprint: self.fingerprint,
            num_samples: u32::try_from(self.samples.len()).unwrap_or(u32::MAX),
            started_at: self.started_at,
        }
    }

    /// Every sample is done.
    pub fn is_finished(&self) -> bool {
        self.samples
            .iter()
            .all(|s| matches!(s, SampleState::Done { .. }))
    }

    /// Finished or failed: no command changes it any more.
    pub fn is_final(&self) -> bool {
        self.failed.is_some() || self.is_finished()
    }

    /// Nothing was ever dispatched and nothing is decided: a record that may be
    /// forgotten.
    pub fn is_blank(&self) -> bool {
        self.failed.is_none()
            && self
                .samples
                .iter()
                .all(|s| matches!(s, SampleState::Intent { last: 0 }))
    }

    /// Attempts that may still run at an engine, by sample.
    pub fn dispatched(&self) -> impl Iterator<Item = (u32, &AttemptRecord)> {
        (0u32..)
            .zip(&self.samples)
            .filter_map(|(index, sample)| match sample {
                SampleState::Dispatched(attempt) => Some((index, attempt)),
                _ => None,
            })
    }

    /// The greatest attempt number of each sample; 0 for none.
    pub fn last_attempts(&self) -> Vec<u32> {
        self.samples.iter().map(SampleState::last_attempt).collect()
    }

    /// What a claim finds, by whatever owner, without taking anything.
    pub fn view(&self, fingerprint: Fingerprint, num_samples: u32) -> Reply {
        if self.fingerprint != fingerprint || self.samples.len() as u64 != u64::from(num_samples) {
            return Reply::Mismatch;
        }
        self.state()
    }

    /// The same for whoever asks for the right thing.
    pub fn state(&self) -> Reply {
        if self.failed.is_some() {
            Reply::Failed
        } else if self.is_finished() {
            Reply::Finished
        } else if let Some(owner) = self.owner {
            Reply::Running(owner)
        } else {
            Reply::Claimed
        }
    }

    fn claim(&mut self, owner: OwnerId, fingerprint: Fingerprint, num_samples: u32) -> Reply {
        let reply = self.view(fingerprint, num_samples);
        if reply == Reply::Claimed {
            self.owner = Some(owner);
        }
        reply
    }

    fn require(&self, owner: OwnerId) -> Result<(), Rejection> {
        if self.owner == Some(owner) {
            Ok(())
        } else {
            Err(Rejection::NotOwner)
        }
    }

    fn sample(&self, index: u32) -> Result<&SampleState<R>, Rejection> {
        self.samples
            .get(index as usize)
            .ok_or(Rejection::NoSuchSample)
    }

    /// The same as [`apply`] for a key that is known, except that a released
    /// record which [`Self::is_blank`] is not forgotten.
    pub fn apply(&mut self, command: Command<R>) -> Result<Applied<R>, Rejection>
    where
        R: Clone,
    {
        let (reply, event) = match command {
            // The two that only change who owns the key.
            Command::Claim {
                owner,
                fingerprint,
                num_samples,
                ..
            } => (self.claim(owner, fingerprint, num_samples), None),
            Command::Release { owner } => {
                self.require(owner)?;
                self.owner = None;
                (Reply::Accepted, None)
            }
            other => self.decide(other)?,
        };
        if let Some(event) = &event {
            self.replay(event.clone())?;
        }
        Ok(Applied { reply, event })
    }

    fn decide(&self, command: Command<R>) -> Result<(Reply, Option<Event<R>>), Rejection> {
        match command {
            Command::Dispatch {
                owner,
                sample,
                attempt,
            } => {
                self.require(owner)?;
                self.may_dispatch(sample, attempt.number)?;
                Ok((Reply::Accepted, Some(Event::Dispatched { sample, attempt })))
            }
            Command::Commit {
                owner,
                sample,
                attempt,
                result,
            } => {
                if !self.may_commit(owner, sample, attempt)? {
                    return Ok((Reply::Stale, None));
                }
                let event = Event::Committed {
                    sample,
                    attempt,
                    result,
                };
                Ok((Reply::Accepted, Some(event)))
            }
            Command::Discard {
                owner,
                sample,
                attempt,
            } => {
                if !self.may_commit(owner, sample, attempt)? {
                    return Ok((Reply::Stale, None));
                }
                Ok((Reply::Accepted, Some(Event::Fenced { sample, attempt })))
            }
            Command::Fence {
                owner,
                sample,
                attempt,
            } => {
                self.require(owner)?;
                match self.sample(sample)? {
                    SampleState::Dispatched(current) if current.number == attempt => {
                        Ok((Reply::Accepted, Some(Event::Fenced { sample, attempt })))
                    }
                    state if attempt > state.last_attempt() => Err(Rejection::NeverDispatched),
                    _ => Ok((Reply::Accepted, None)),
                }
            }
            Command::Fail { owner, error } => {
                self.require(owner)?;
                Ok((Reply::Accepted, Some(Event::Failed { error })))
            }
            // Decided by `apply`: they have no event.
            Command::Claim { .. } | Command::Release { .. } => Ok((Reply::Accepted, None)),
        }
    }

    /// The compare of compare-and-swap. False: stale.
    fn may_commit(&self, owner: OwnerId, sample: u32, attempt: u32) -> Result<bool, Rejection> {
        if self.is_final() {
            return Ok(false);
        }
        self.require(owner)?;
        match self.sample(sample)? {
            SampleState::Dispatched(current) if current.number == attempt => Ok(true),
            state if attempt > state.last_attempt() => Err(Rejection::NeverDispatched),
            _ => Ok(false),
        }
    }

    fn may_dispatch(&self, sample: u32, number: u32) -> Result<(), Rejection> {
        match self.sample(sample)? {
            SampleState::Intent { last } if number > *last => Ok(()),
            SampleState::Intent { .. } => Err(Rejection::NumberDoesNotGrow),
            SampleState::Dispatched(_) => Err(Rejection::NotFenced),
            SampleState::Done { .. } => Err(Rejection::Finished),
        }
    }

    /// Takes an event into the record. An event that cannot follow is refused
    /// and changes nothing: on disk it means damage.
    pub fn replay(&mut self, event: Event<R>) -> Result<(), Rejection> {
        if self.is_final() {
            return Err(Rejection::Finished);
        }
        match event {
            // Stands once, at the beginning: see `from_opened`.
            Event::Opened { .. } => return Err(Rejection::OpenedTwice),
            Event::Dispatched { sample, attempt } => {
                self.may_dispatch(sample, attempt.number)?;
                self.set(sample, SampleState::Dispatched(attempt))?;
            }
            Event::Committed {
                sample,
                attempt,
                result,
            } => {
                self.must_be_dispatched(sample, attempt)?;
                self.set(sample, SampleState::Done { attempt, result })?;
            }
            Event::Fenced { sample, attempt } => {
                self.must_be_dispatched(sample, attempt)?;
                self.set(sample, SampleState::Intent { last: attempt })?;
            }
            Event::Failed { error } => self.failed = Some(error),
        }
        if self.is_final() {
            self.owner = None;
        }
        Ok(())
    }

    /// The record that begins with this event.
    pub fn from_opened(event: Event<R>) -> Result<Self, Rejection> {
        match event {
            Event::Opened {
                tenant,
                fingerprint,
                num_samples,
                started_at,
            } => Self::new(tenant, fingerprint, num_samples, started_at),
            _ => Err(Rejection::NotOpened),
        }
    }

    fn must_be_dispatched(&self, sample: u32, attempt: u32) -> Result<(), Rejection> {
        match self.sample(sample)? {
            SampleState::Dispatched(current) if current.number == attempt => Ok(()),
            _ => Err(Rejection::NeverDispatched),
        }
    }

    fn set(&mut self, sample: u32, state: SampleState<R>) -> Result<(), Rejection> {
        *self
            .samples
            .get_mut(sample as usize)
            .ok_or(Rejection::NoSuchSample)? = state;
        Ok(())
    }
}

impl<R> SampleState<R> {
    /// The greatest attempt number so far; 0 for none.
    pub fn last_attempt(&self) -> u32 {
        match self {
            Self::Intent { last } => *last,
            Self::Dispatched(attempt) => attempt.number,
            Self::Done { attempt, .. } => *attempt,
        }
    }
}
