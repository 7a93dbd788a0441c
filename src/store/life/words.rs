//! What is asked of a key's record, what happens to it, and what is answered.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use super::{MAX_SAMPLES, Record};
use crate::{
    error::Error,
    ids::Tenant,
    store::{AttemptRecord, Fingerprint, OwnerId},
};

/// What a caller wants to happen.
#[derive(Clone, Debug)]
pub enum Command<R> {
    /// See [`crate::store::Store::claim`]. `now` is the store's clock.
    Claim {
        /// Who asks.
        owner: OwnerId,
        /// Whose quota.
        tenant: Tenant,
        /// What is asked for.
        fingerprint: Fingerprint,
        /// Samples that make it whole.
        num_samples: u32,
        /// When.
        now: SystemTime,
    },
    /// See [`crate::store::Store::dispatch`].
    Dispatch {
        /// Who asks.
        owner: OwnerId,
        /// Index.
        sample: u32,
        /// The attempt.
        attempt: AttemptRecord,
    },
    /// See [`crate::store::Store::commit`].
    Commit {
        /// Who asks.
        owner: OwnerId,
        /// Index.
        sample: u32,
        /// The attempt's number.
        attempt: u32,
        /// The finished sample.
        result: R,
    },
    /// A commit whose result is too large to be kept: decided as a commit is,
    /// but the attempt ends without a result.
    Discard {
        /// Who asks.
        owner: OwnerId,
        /// Index.
        sample: u32,
        /// The attempt's number.
        attempt: u32,
    },
    /// See [`crate::store::Store::fence`].
    Fence {
        /// Who asks.
        owner: OwnerId,
        /// Index.
        sample: u32,
        /// The attempt's number.
        attempt: u32,
    },
    /// See [`crate::store::Store::fail`].
    Fail {
        /// Who asks.
        owner: OwnerId,
        /// The failure.
        error: Error,
    },
    /// See [`crate::store::Store::release`].
    Release {
        /// Who asks.
        owner: OwnerId,
    },
}

/// What happened to a record: all that a store has to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event<R> {
    /// The key exists. Comes before every other event of its key.
    Opened {
        /// Whose quota.
        tenant: Tenant,
        /// What was asked for.
        fingerprint: Fingerprint,
        /// Samples that make it whole.
        num_samples: u32,
        /// When it was first claimed.
        started_at: SystemTime,
    },
    /// An attempt is about to be sent.
    Dispatched {
        /// Index.
        sample: u32,
        /// The attempt.
        attempt: AttemptRecord,
    },
    /// A sample is finished.
    Committed {
        /// Index.
        sample: u32,
        /// The attempt's number.
        attempt: u32,
        /// The finished sample.
        result: R,
    },
    /// An attempt is over without a result.
    Fenced {
        /// Index.
        sample: u32,
        /// The attempt's number.
        attempt: u32,
    },
    /// The key failed for good.
    Failed {
        /// Why.
        error: Error,
    },
}

/// The answer to a command that was accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The claimant owns the key; what it starts from is in the record.
    Claimed,
    /// Somebody owns it.
    Running(OwnerId),
    /// Every sample is in the record.
    Finished,
    /// It failed for good; the error is in the record.
    Failed,
    /// The key stands for something else.
    Mismatch,
    /// The command took effect, or had taken effect before.
    Accepted,
    /// The commit is dropped: what is stored, or another attempt, counts.
    Stale,
}

/// A reply, and the event that must be durable before the reply is told.
#[derive(Clone, Debug)]
pub struct Applied<R> {
    /// The answer.
    pub reply: Reply,
    /// `None`: nothing that outlives the process changed. A claim has none:
    /// INTENT lives in memory, and [`Record::opened`] is written with the first
    /// event of the key.
    pub event: Option<Event<R>>,
}

/// Why a command was not accepted. The record is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// The caller does not own the key.
    #[error("not the owner of this key")]
    NotOwner,
    /// There is no such sample.
    #[error("the key has no such sample")]
    NoSuchSample,
    /// An earlier attempt of the sample is not fenced.
    #[error("an earlier attempt of this sample is not fenced")]
    NotFenced,
    /// The sample is finished.
    #[error("the sample is finished")]
    Finished,
    /// The attempt's number is not greater than every earlier one.
    #[error("the attempt's number does not grow")]
    NumberDoesNotGrow,
    /// The attempt was never dispatched.
    #[error("the attempt was never dispatched")]
    NeverDispatched,
    /// A stored key does not begin with its opening event.
    #[error("the key does not begin with its opening event")]
    NotOpened,
    /// A stored key has two opening events.
    #[error("the key has two opening events")]
    OpenedTwice,
    /// 0 samples, or more than [`MAX_SAMPLES`].
    #[error("the number of samples is out of range")]
    SampleCount,
}
