//! What must outlive a crash, behind one narrow trait: idempotency records and
//! incarnations now; pins, registrations and condemned prompts lie behind it too
//! as they become durable.
//!
//! The trait is shaped for several control planes over one store: a claim says
//! who owns a running generation, and owners have identities.

pub mod account;
pub mod life;
pub mod memory;
pub mod notes;
pub mod sled;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use crate::{
    call::{Completion, LogprobMode, PromptLogprobs, SampleOutput},
    error::Error,
    ids::{BootId, EngineRequestId, IdempotencyKey, Incarnation, ReplicaId, Target, Tenant},
};

/// An idempotency key as the store knows it: a hash over tenant and key. The
/// key itself is never on disk or in a log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// Of `key` within `tenant`.
    pub fn of(tenant: &Tenant, key: &IdempotencyKey) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("berth.dev 2026 idempotency key");
        // The tenant's length first, so that no two pairs give one input.
        hasher.update(&(tenant.as_str().len() as u64).to_le_bytes());
        hasher.update(tenant.as_str().as_bytes());
        hasher.update(key.as_str().as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..6] {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// What was asked for under a key, as a hash: see `stack::fingerprint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

/// One run of one control plane. A record whose owner is not alive belongs to a
/// crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OwnerId(pub u64);

impl OwnerId {
    /// A new one, for this run.
    pub fn mint() -> Self {
        Self(uuid::Uuid::new_v4().as_u64_pair().0)
    }
}

/// One try of one sample, as it is written before the first byte leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptRecord {
    /// 1 for the first of its sample; only growing, over crashes too.
    pub number: u32,
    /// Its name at the engine, by which it can be aborted.
    pub id: EngineRequestId,
    /// Where it was sent.
    pub target: Target,
    /// The engine's base URL.
    pub url: String,
    /// The trajectory that it binds to this target, as `routing::PinKey`: written
    /// in the same batch, so that whoever reads records after a restart knows
    /// where each trajectory lived.
    pub binds: Option<u128>,
}

/// One finished sample, with what the whole result takes from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FinishedSample {
    /// The sample.
    pub output: SampleOutput,
    /// Of the prompt; from any one sample.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// What its log probabilities are taken from.
    pub logprob_mode: LogprobMode,
    /// When it was finished.
    pub finished_at: SystemTime,
    /// From the generation's start to its first token.
    pub first_token: Option<Duration>,
}

impl FinishedSample {
    /// The whole result, from its samples in order of their index. A pure
    /// function of what is stored, so a replay gives the same bytes.
    pub fn assemble(started_at: SystemTime, samples: &[Self]) -> Completion {
        let produced_at = samples
            .iter()
            .map(|s| s.finished_at)
            .max()
            .unwrap_or(started_at);
        Completion {
            prompt_logprobs: samples.iter().find_map(|s| s.prompt_logprobs.clone()),
            logprob_mode: samples.first().map(|s| s.logprob_mode).unwrap_or_default(),
            produced_at,
            total: produced_at.duration_since(started_at).unwrap_or_default(),
            first_token: samples.iter().filter_map(|s| s.first_token).min(),
            samples: samples.iter().map(|s| s.output.clone()).collect(),
        }
    }
}

impl FinishedSample {
    /// Its size as it is stored, in bytes.
    fn encoded_len(&self) -> Result<u64, StoreError> {
        postcard::serialize_with_flavor(self, postcard::ser_flavors::Size::default())
            .map(|bytes| bytes as u64)
            .map_err(|e| StoreError::Failed(format!("a result cannot be encoded: {e}")))
    }
}

/// Start ids that a store remembers for one replica: a start that comes again
/// after this many others counts as a new one.
const BOOTS_REMEMBERED: usize = 16;

/// An epoch that is greater than those of stores that were begun or lost
/// something earlier: milliseconds of the wall clock.
fn fresh_epoch(now: SystemTime) -> u64 {
    now.duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|age| u64::try_from(age.as_millis()).ok())
        .unwrap_or(1)
}

/// A request for ownership of a key.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The key.
    pub key: KeyHash,
    /// Whose quota it counts against.
    pub tenant: Tenant,
    /// What is asked for.
    pub fingerprint: Fingerprint,
    /// Samples that make it whole.
    pub num_samples: u32,
    /// Who asks.
    pub owner: OwnerId,
}

impl ClaimRequest {
    /// As the state machine takes it, at this time of the store's clock.
    fn into_command<R>(self, now: SystemTime) -> life::Command<R> {
        life::Command::Claim {
            owner: self.owner,
            tenant: self.tenant,
            fingerprint: self.fingerprint,
            num_samples: self.num_samples,
            now,
        }
    }
}

/// What a claim finds.
#[derive(Clone, Debug)]
pub enum Claim {
    /// The key is the claimant's to generate.
    Claimed(Claimed),
    /// Another owner generates it now.
    Running {
        /// Who.
        owner: OwnerId,
    },
    /// Finished: the whole result.
    Done(Arc<Completion>),
    /// Failed in a way that every retry would.
    Failed(Error),
    /// The key was used for something else. Nothing of it is told.
    Mismatch,
    /// The record is damaged: neither served nor generated anew.
    DataLoss,
}

/// What a claimant starts from.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// When the key was first claimed.
    pub started_at: SystemTime,
    /// Samples that an earlier owner finished, by index.
    pub finished: Vec<(u32, FinishedSample)>,
    /// Attempts that an earlier owner left: each must be fenced before its
    /// sample runs again.
    pub orphans: Vec<(u32, AttemptRecord)>,
    /// The greatest attempt number of each sample so far, by index; 0 for none.
    /// The next attempt's number is greater: fenced attempts count too.
    pub last_attempts: Vec<u32>,
}

/// What one step of a purge removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Keys that are gone.
    pub keys: u64,
    /// What they took, in bytes.
    pub bytes: u64,
    /// Keys that stay because somebody generates them now.
    pub owned: u64,
    /// Trajectories that the removed attempts had bound, as `routing::PinKey`. Their
    /// notes are the caller's to remove.
    pub pins: Vec<u128>,
    /// Where the next step begins; `None`: this was the last one.
    pub next: Option<Vec<u8>>,
}

/// Whether a commit took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// It is stored, durably as configured.
    Stored,
    /// The sample's attempt is another one by now: the result is dropped.
    Stale,
    /// Too large to be kept: delivered, but a later retry generates anew. The
    /// attempt counts as fenced.
    TooLarge,
}

/// An incarnation given to a start of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncarnationGrant {
    /// The number.
    pub incarnation: Incarnation,
    /// False: this boot id had it already.
    pub new: bool,
    /// The greatest that any start of this replica was given: greater than
    /// `incarnation` when this start is not the newest.
    pub latest: Incarnation,
}

/// Why the store did not do as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The tenant's quota or the disk is full: only new keys are refused.
    #[error("the store is full: {0}")]
    Full(String),
    /// The caller does not own the key.
    #[error("not the owner of this key")]
    NotOwner,
    /// The life of the key does not allow it: a fault of the caller. Nothing
    /// has changed.
    #[error("refused: {0}")]
    Refused(life::Rejection),
    /// A read found a damaged record.
    #[error("a stored record is damaged: {0}")]
    Damaged(String),
    /// The disk failed or the store is closed. Whether the write took effect is
    /// unknown.
    #[error("the store failed: {0}")]
    Failed(String),
}

impl StoreError {
    fn over_quota(tenant: &Tenant, used: u64, quota: u64) -> Self {
        Self::Full(format!(
            "tenant {tenant} keeps {used} bytes, its quota is {quota}; keys expire by themselves"
        ))
    }
}

impl From<life::Rejection> for StoreError {
    fn from(rejection: life::Rejection) -> Self {
        match rejection {
            life::Rejection::NotOwner => Self::NotOwner,
            other => Self::Refused(other),
        }
    }
}

/// A store. Every write that answers `Ok` is as durable as configured; all of
/// them may be called at once from any task.
pub trait Store: Send + Sync + 'static {
    /// Takes ownership of a key, or says why not. A claim whose future is
    /// dropped before it answers is given back.
    fn claim(&self, request: ClaimRequest) -> BoxFuture<'_, Result<Claim, StoreError>>;

    /// An attempt is about to be sent: durable before this answers. `attempt`
    /// has a greater number than every earlier one of its sample, which are all
    /// fenced.
    fn dispatch(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: AttemptRecord,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// A sample is finished: stored if `attempt` is still its attempt, durable
    /// before this answers.
    fn commit(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> BoxFuture<'_, Result<Commit, StoreError>>;

    /// The attempt is over without a result and cannot deliver one any more.
    /// Without effect where it is over already.
    fn fence(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The generation failed in a way that every retry would.
    fn fail(
        &self,
        key: KeyHash,
        owner: OwnerId,
        error: Error,
    ) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The owner gives the key up: finished samples and attempts stay, the next
    /// claim takes over.
    fn release(&self, key: KeyHash, owner: OwnerId) -> BoxFuture<'_, Result<(), StoreError>>;

    /// The result under a key, as a claim with the right fingerprint would see
    /// it, without taking ownership: `Claimed` is progress that nobody continues
    /// now. `None`: unknown or expired.
    fn read(&self, key: KeyHash) -> BoxFuture<'_, Result<Option<Claim>, StoreError>>;

    /// Removes some of a tenant's keys, durably as configured before this answers;
    /// from the beginning, or from where an earlier step said that the next one
    /// begins. Keys that are new since the first step may be passed over.
    fn purge(
        &self,
        tenant: Tenant,
        from: Option<Vec<u8>>,
    ) -> BoxFuture<'_, Result<Purged, StoreError>>;

    /// The incarnation of this start of a replica: the same for the same boot
    /// id, else one greater than every earlier one of the replica.
    fn incarnation(
        &self,
        replica: ReplicaId,
        boot: BootId,
    ) -> BoxFuture<'_, Result<IncarnationGrant, StoreError>>;

    /// Takes these notes, durably as configured before this answers. Of two about
    /// one thing the later one holds. An attempt that binds a trajectory
    /// ([`AttemptRecord::binds`]) notes its pin by itself, without tokens.
    fn note(&self, notes: Vec<notes::Note>) -> BoxFuture<'_, Result<(), StoreError>>;

    /// All notes.
    fn recall(&self) -> BoxFuture<'_, Result<notes::Recalled, StoreError>>;

    /// Changes when the store declares a loss.
    fn epoch(&self) -> u64;

    /// What it tells of itself, for metrics; nothing where it is not on a disk.
    fn account(&self) -> Option<account::Account> {
        None
    }

    /// Answers what is queued, makes it durable, and closes. Every later call
    /// fails.
    fn close(&self) -> BoxFuture<'_, Result<(), StoreError>>;
}
