//! What a running generation writes down, in the order that makes it safe: an
//! attempt before its first byte leaves, a finished sample before anybody sees
//! it. Without an idempotency key there is nothing to write.

use std::sync::Arc;

use crate::{
    error::{Error, Reason},
    failpoint::{self, Point},
    store::{AttemptRecord, Claimed, Commit, FinishedSample, KeyHash, OwnerId, Store},
};

/// Where a generation writes.
#[derive(Clone)]
pub enum Journal {
    /// Nowhere: it has no key.
    None,
    /// Under its key.
    Keyed {
        /// In this store.
        store: Arc<dyn Store>,
        /// As this owner.
        owner: OwnerId,
        /// Under this key.
        key: KeyHash,
    },
}

impl Journal {
    /// An attempt is about to be sent.
    ///
    /// # Errors
    /// What the store says; nothing may be sent then.
    pub async fn dispatch(&self, sample: u32, attempt: AttemptRecord) -> Result<(), Error> {
        match self {
            Self::None => Ok(()),
            Self::Keyed { store, owner, key } => store
                .dispatch(*key, *owner, sample, attempt)
                .await
                .map_err(Error::from),
        }
    }

    /// A sample is finished. Returns whether it is kept.
    ///
    /// # Errors
    /// What the store says, or that the attempt is not the sample's any more: the
    /// result may be told to nobody then.
    pub async fn commit(
        &self,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> Result<bool, Error> {
        match self {
            Self::None => Ok(false),
            Self::Keyed { store, owner, key } => {
                match store
                    .commit(*key, *owner, sample, attempt, finished)
                    .await
                    .map_err(Error::from)?
                {
                    Commit::Stored => {
                        failpoint::pass(Point::Committed);
                        Ok(true)
                    }
                    Commit::TooLarge => Ok(false),
                    Commit::Stale => Err(Error::new(
                        Reason::OutcomeUnknown,
                        "another attempt of this sample has taken over; a retry with the same \
                         idempotency key gets its result",
                    )),
                }
            }
        }
    }

    /// The attempt is over without a result and cannot deliver one any more.
    ///
    /// # Errors
    /// What the store says.
    pub async fn fence(&self, sample: u32, attempt: u32) -> Result<(), Error> {
        match self {
            Self::None => Ok(()),
            Self::Keyed { store, owner, key } => {
                failpoint::pass(Point::Aborted);
                store.fence(*key, *owner, sample, attempt).await?;
                failpoint::pass(Point::Fenced);
                Ok(())
            }
        }
    }

    /// The generation ended without a whole result.
    ///
    /// # Errors
    /// What the store says.
    pub async fn give_up(&self, error: &Error) -> Result<(), Error> {
        match self {
            Self::None => Ok(()),
            Self::Keyed { store, owner, key } => {
                failpoint::pass(Point::GiveUp);
                if error.reason.is_deterministic() {
                    store.fail(*key, *owner, error.clone()).await?;
                } else {
                    store.release(*key, *owner).await?;
                }
                failpoint::pass(Point::GivenUp);
                Ok(())
            }
        }
    }
}

/// Nothing done by anybody before.
pub fn from_scratch(num_samples: u32) -> Claimed {
    Claimed {
        last_attempts: vec![0; num_samples as usize],
        started_at: std::time::SystemTime::now(),
        finished: Vec::new(),
        orphans: Vec::new(),
    }
}
