//! The store on disk, on sled. It keeps what it has acknowledged through kill -9
//! and power loss, tells loss and damage instead of passing them over, and is
//! bounded in memory by the keys in work and in space by retention and quotas.
//!
//! A key's life is written as the events of [`super::life`]; the bodies of
//! finished samples lie behind them, or in chunks of at most 4 KiB. What is told
//! is durable in a redo log, and moves into sled later. INTENT is not written. Ownership is not written either: whatever is found on disk belongs
//! to a process that is gone.

mod apply;
mod clock;
mod committer;
mod decide;
mod disk;
mod fault;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod high_water;
mod known;
mod layout;
mod mover;
mod notes;
mod open;
mod options;
mod overlay;
mod pending;
mod purge;
mod record;
mod recover;
mod redo;
mod replicas;
mod salvage;
mod scan;
mod sequence;
mod upkeep;
mod write;
mod writes;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
};

use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

pub use self::{
    clock::{Clock, SystemClock},
    open::OpenError,
    options::{Durability, Observer, SledOptions, Step},
};
use self::{
    committer::{AnswerTo, Committer, Queued, Request, Shared},
    fault::Fault,
    frame::Damaged,
    open::Paths,
    pending::PendingClaim,
    record::{BodyRef, Lookup, Progress},
};
use super::account::Account;
pub use super::account::StoreStats;
use super::{
    AttemptRecord, Claim, ClaimRequest, Claimed, Commit, FinishedSample, IncarnationGrant, KeyHash,
    OwnerId, Purged, Store, StoreError,
    life::Command,
    notes::{Note, Recalled},
};
use crate::{
    error::Error,
    ids::{BootId, ReplicaId, Tenant},
};

/// Memory that queued requests may take together, in KiB.
const QUEUE_KIB: u32 = 128 << 10;
/// What a request is counted as at least.
const REQUEST_KIB: u32 = 2;
/// Bodies that are read at once.
const READERS: usize = 8;
/// A larger result is encoded off the runtime's workers.
const INLINE_BYTES: u64 = 256 << 10;
/// The longest name in a request, and the longest message of a stored failure.
const MAX_NAME: usize = 512;
const MAX_MESSAGE: usize = 2048;

/// See the module.
pub struct SledStore {
    shared: Arc<Shared>,
    queue: Sender<Queued>,
    room: Arc<Semaphore>,
    readers: Arc<Semaphore>,
    max_result_bytes: u64,
    thread: Option<JoinHandle<()>>,
}

impl SledStore {
    /// Opens the store in `dir`, which is made where it is missing. Waits for
    /// the disk: on a large store for seconds. Call it off the runtime's
    /// workers, or before there is a load.
    pub fn open(dir: impl AsRef<Path>, options: SledOptions) -> Result<Self, OpenError> {
        let dir: PathBuf = dir.as_ref().into();
        let paths = Paths { dir: dir.clone() };
        let (opened, lock) = open::open(&paths, &options)?;
        let shared = Arc::new(Shared::default());
        let max_result_bytes = options.max_result_bytes;
        let committer = Committer::new(paths, options, Arc::clone(&shared), opened, lock);
        let (queue, requests) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || committer.run(&requests))
            .map_err(|e| OpenError::Unusable {
                dir,
                reason: format!("its thread cannot be started: {e}"),
            })?;
        Ok(Self {
            shared,
            queue,
            room: Arc::new(Semaphore::new(QUEUE_KIB as usize)),
            readers: Arc::new(Semaphore::new(READERS)),
            max_result_bytes,
            thread: Some(thread),
        })
    }

    /// The store's own account.
    pub fn stats(&self) -> StoreStats {
        self.shared.stats(|stats| stats.clone())
    }

    async fn ask<T>(
        &self,
        kib: u32,
        request: impl FnOnce(AnswerTo<T>) -> Request,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.send(kib, request(answer)).await?;
        answered.await.map_err(|_| gone())?
    }

    async fn send(&self, kib: u32, request: Request) -> Result<(), StoreError> {
        let room = self.room(kib).await?;
        let queued = Queued {
            request,
            bytes: kib as usize * 1024,
            room: Some(room),
        };
        self.queue.send(queued).map_err(|_| gone())
    }

    async fn room(&self, kib: u32) -> Result<OwnedSemaphorePermit, StoreError> {
        let kib = kib.clamp(REQUEST_KIB, QUEUE_KIB);
        let room = Arc::clone(&self.room).acquire_many_owned(kib).await;
        room.map_err(|_| gone())
    }

    async fn write(&self, key: KeyHash, command: Command<BodyRef>) -> Result<(), StoreError> {
        self.ask(REQUEST_KIB, |answer| Request::Write(key, command, answer))
            .await
            .map(drop)
    }

    /// Reads finished samples, off the runtime's workers. `None`: they cannot
    /// be read.
    async fn bodies(
        &self,
        key: KeyHash,
        bodies: Vec<(u32, BodyRef)>,
    ) -> Result<Option<Vec<(u32, FinishedSample)>>, StoreError> {
        if bodies.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let reader = Arc::clone(&self.readers).acquire_owned().await;
        let shared = Arc::clone(&self.shared);
        let read = move || {
            let _reader = reader;
            let read = bodies.into_iter().map(|(index, body)| {
                let bytes = shared
                    .read(|view| record::load_body(view, key, body))
                    .map_err(|fault| match fault {
                        fault if fault == Fault::closed() => gone(),
                        fault => StoreError::Failed(fault.to_string()),
                    })?;
                Ok(bytes.and_then(|bytes| {
                    let sample = postcard::from_bytes(&bytes).map_err(|_| Damaged)?;
                    Ok((index, sample))
                }))
            });
            let read: Result<Vec<_>, StoreError> = read.collect();
            Ok(read?.into_iter().collect::<Result<Vec<_>, Damaged>>().ok())
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|e| StoreError::Failed(format!("a read failed: {e}")))?
    }

    /// What a lookup found, its bodies read. `None`: they cannot be read.
    async fn complete(&self, key: KeyHash, lookup: Lookup) -> Result<Option<Claim>, StoreError> {
        Ok(Some(match lookup {
            Lookup::Open(progress) => {
                let Progress {
                    started_at,
                    finished,
                    orphans,
                    last_attempts,
                } = *progress;
                let Some(finished) = self.bodies(key, finished).await? else {
                    return Ok(None);
                };
                Claim::Claimed(Claimed {
                    started_at,
                    finished,
                    orphans,
                    last_attempts,
                })
            }
            Lookup::Finished(progress) => {
                let Some(finished) = self.bodies(key, progress.finished).await? else {
                    return Ok(None);
                };
                let samples: Vec<FinishedSample> = finished.into_iter().map(|(_, s)| s).collect();
                Claim::Done(Arc::new(FinishedSample::assemble(
                    progress.started_at,
                    &samples,
                )))
            }
            Lookup::Running(owner) => Claim::Running { owner },
            Lookup::Failed(error) => Claim::Failed(error),
            Lookup::Mismatch => Claim::Mismatch,
            Lookup::DataLoss | Lookup::Unknown => Claim::DataLoss,
        }))
    }

    async fn claim_key(&self, request: ClaimRequest) -> Result<Claim, StoreError> {
        if request.tenant.as_str().len() > MAX_NAME {
            return Err(too_long("the tenant's name"));
        }
        // A body that cannot be read may have expired since it was looked up;
        // if it is looked up once more, it is damaged.
        for _ in 0..2 {
            let (answer, answered) = oneshot::channel();
            let (key, owner) = (request.key, request.owner);
            self.send(REQUEST_KIB, Request::Claim(request.clone(), answer))
                .await?;
            let mut pending = PendingClaim::new(&self.queue, key, owner, answered);
            let lookup = pending.answer().await?;
            if let Some(claim) = self.complete(key, lookup).await? {
                pending.received();
                return Ok(claim);
            }
        }
        Ok(Claim::DataLoss)
    }

    async fn read_key(&self, key: KeyHash) -> Result<Option<Claim>, StoreError> {
        for _ in 0..2 {
            let lookup = self
                .ask(REQUEST_KIB, |answer| Request::Read(key, answer))
                .await?;
            if matches!(lookup, Lookup::Unknown) {
                return Ok(None);
            }
            if let Some(claim) = self.complete(key, lookup).await? {
                return Ok(Some(claim));
            }
        }
        Ok(Some(Claim::DataLoss))
    }

    async fn commit_sample(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> Result<Commit, StoreError> {
        let len = finished.encoded_len()?;
        let body = if len > self.max_result_bytes {
            None
        } else if len > INLINE_BYTES {
            let encoded = tokio::task::spawn_blocking(move || encode(&finished)).await;
            Some(encoded.map_err(|e| StoreError::Failed(e.to_string()))??)
        } else {
            Some(encode(&finished)?)
        };
        let bytes = body.as_ref().map_or(0, Vec::len);
        let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
        self.ask(kib.saturating_add(REQUEST_KIB), |answer| Request::Commit {
            key,
            owner,
            sample,
            attempt,
            body,
            answer,
        })
        .await
    }
}

impl Drop for SledStore {
    fn drop(&mut self) {
        // The thread ends when the last sender is gone; nobody waits for it
        // here, since this may run on a worker of the runtime.
        drop(self.thread.take());
    }
}

fn encode(finished: &FinishedSample) -> Result<Vec<u8>, StoreError> {
    postcard::to_stdvec(finished)
        .map_err(|e| StoreError::Failed(format!("a result cannot be encoded: {e}")))
}

fn gone() -> StoreError {
    StoreError::Failed("the store is closed".into())
}

fn too_long(what: &str) -> StoreError {
    StoreError::Failed(format!("{what} is too long to be stored"))
}

/// A failure as it is kept: long texts of engines are cut.
fn bounded(mut error: Error) -> Error {
    if error.message.len() > MAX_MESSAGE {
        let mut end = MAX_MESSAGE;
        while !error.message.is_char_boundary(end) {
            end -= 1;
        }
        error.message.truncate(end);
    }
    let violations: usize = error
        .violations
        .iter()
        .map(|v| v.field.len() + v.description.len())
        .sum();
    if violations > MAX_NAME {
        error.violations.clear();
    }
    error
}

impl Store for SledStore {
    fn claim(&self, request: ClaimRequest) -> BoxFuture<'_, Result<Claim, StoreError>> {
        self.claim_key(request).boxed()
    }

    fn dispatch(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: AttemptRecord,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let names = [
                attempt.url.len(),
                attempt.id.as_str().len(),
                attempt.target.replica.as_str().len(),
            ];
            if names.into_iter().any(|len| len > MAX_NAME) {
                return Err(too_long("a name of the attempt"));
            }
            let command = Command::Dispatch {
                owner,
                sample,
                attempt,
            };
            self.write(key, command).await
        }
        .boxed()
    }

    fn commit(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> BoxFuture<'_, Result<Commit, StoreError>> {
        self.commit_sample(key, owner, sample, attempt, finished)
            .boxed()
    }

    fn fence(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let command = Command::Fence {
            owner,
            sample,
            attempt,
        };
        self.write(key, command).boxed()
    }

    fn fail(
        &self,
        key: KeyHash,
        owner: OwnerId,
        error: Error,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let error = bounded(error);
        self.write(key, Command::Fail { owner, error }).boxed()
    }

    fn release(&self, key: KeyHash, owner: OwnerId) -> BoxFuture<'_, Result<(), StoreError>> {
        self.write(key, Command::Release { owner }).boxed()
    }

    fn read(&self, key: KeyHash) -> BoxFuture<'_, Result<Option<Claim>, StoreError>> {
        self.read_key(key).boxed()
    }

    fn purge(
        &self,
        tenant: Tenant,
        from: Option<Vec<u8>>,
    ) -> BoxFuture<'_, Result<Purged, StoreError>> {
        self.ask(REQUEST_KIB, |answer| Request::Purge(tenant, from, answer))
            .boxed()
    }

    fn incarnation(
        &self,
        replica: ReplicaId,
        boot: BootId,
    ) -> BoxFuture<'_, Result<IncarnationGrant, StoreError>> {
        async move {
            if replica.as_str().len() > MAX_NAME || boot.as_str().len() > MAX_NAME / 4 {
                return Err(too_long("the replica's name or boot id"));
            }
            self.ask(REQUEST_KIB, |answer| {
                Request::Incarnation(replica, boot, answer)
            })
            .await
        }
        .boxed()
    }

    fn note(&self, notes: Vec<Note>) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let kib = u32::try_from(notes.len() / 4).unwrap_or(u32::MAX);
            self.ask(kib, |answer| Request::Note(notes, answer)).await
        }
        .boxed()
    }

    fn recall(&self) -> BoxFuture<'_, Result<Recalled, StoreError>> {
        self.ask(REQUEST_KIB, Request::Recall).boxed()
    }

    fn epoch(&self) -> u64 {
        self.shared.epoch.load(Ordering::Acquire)
    }

    fn account(&self) -> Option<Account> {
        Some(Account {
            stats: self.stats(),
            timings: self.shared.timings.clone(),
        })
    }

    /// A store that is dropped closes too, but nobody hears of a failure.
    fn close(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.ask(REQUEST_KIB, Request::Close))
    }
}
