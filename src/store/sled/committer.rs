//! The one thread that writes. It takes what has queued up, decides each
//! request by `life`, and makes all of it durable with one batch, one flush and
//! one fdatasync before any of it is answered:
//!
//! ```text
//! take -> decide -> redo log -> fdatasync -> high-water -> answer
//!                      '-> overlay ... sled: apply_batch -> flush -> fdatasync
//! ```
//!
//! What is durable in the redo log lies in memory, over the tree, until a half
//! of the log is full; another thread then moves it into sled. sled's own flush
//! does not survive a power loss, so the sync is done on a descriptor of our own.
//! Only requests that change nothing, about keys that nothing in the batch
//! changes, are answered without waiting.
//!
//! With relaxed durability there is no redo log: sled takes each batch itself,
//! flushed to the kernel, and is synced every tick.
//!
//! When the disk fails or sled panics, everything in the batch is answered with
//! an error, sled is closed, and the store is opened anew, at once or at a
//! later tick. Owners keep their keys over it; their records are read back.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::Duration,
};

use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use super::{
    super::{
        ClaimRequest, Commit, IncarnationGrant, KeyHash, OwnerId, Purged, StoreError,
        account::{StoreStats, Timings},
        life::{Command, Record, Reply},
        notes::{Note, Recalled},
    },
    clock::Watch,
    decide::refuse,
    fault::{Fault, guarded},
    high_water::HighWater,
    known::Known,
    mover::Mover,
    open::{Opened, Paths},
    options::{SledOptions, Step},
    overlay::{Overlay, View},
    record::{BodyRef, Lookup, StoredReplica},
    redo::Redo,
    salvage::close,
    sequence::Sequence,
    writes::Writes,
};
use crate::ids::{BootId, ReplicaId, Tenant};

/// Where an answer goes.
pub(super) type AnswerTo<T> = tokio::sync::oneshot::Sender<Result<T, StoreError>>;

/// What the thread is asked for.
pub(super) enum Request {
    Claim(ClaimRequest, AnswerTo<Lookup>),
    Read(KeyHash, AnswerTo<Lookup>),
    Write(KeyHash, Command<BodyRef>, AnswerTo<Reply>),
    Commit {
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        /// `None`: larger than any key may keep.
        body: Option<Vec<u8>>,
        answer: AnswerTo<Commit>,
    },
    Incarnation(ReplicaId, BootId, AnswerTo<IncarnationGrant>),
    Purge(Tenant, Option<Vec<u8>>, AnswerTo<Purged>),
    Note(Vec<Note>, AnswerTo<()>),
    Recall(AnswerTo<Recalled>),
    Close(AnswerTo<()>),
}

/// A request with the room that it takes in the queue.
pub(super) struct Queued {
    pub(super) request: Request,
    pub(super) bytes: usize,
    pub(super) room: Option<OwnedSemaphorePermit>,
}

/// What the thread shares with those that ask.
#[derive(Default)]
pub(super) struct Shared {
    /// `None` while the store is down or closed.
    pub(super) db: RwLock<Option<::sled::Db>>,
    /// Over what is in it. Never held while sled is waited for.
    pub(super) overlay: RwLock<Overlay>,
    pub(super) epoch: AtomicU64,
    pub(super) stats: Mutex<StoreStats>,
    pub(super) timings: Timings,
}

impl Shared {
    pub(super) fn stats<T>(&self, with: impl FnOnce(&mut StoreStats) -> T) -> T {
        with(&mut self.stats.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn overlay(&self) -> RwLockWriteGuard<'_, Overlay> {
        self.overlay.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads from what is durable, whether sled has it yet or not.
    pub(super) fn read<T>(
        &self,
        read: impl FnOnce(&View<'_>) -> Result<T, ::sled::Error>,
    ) -> Result<T, Fault> {
        let handle = self.db.read().unwrap_or_else(PoisonError::into_inner);
        let tree = handle.as_deref().ok_or_else(Fault::closed)?;
        let overlay = &self.overlay;
        guarded(|| read(&View { tree, overlay }))
    }
}

/// Most requests in one batch, and bytes of bodies after which it is closed.
const BATCH_REQUESTS: usize = 1024;
const BATCH_BYTES: usize = 8 << 20;

/// What is open while the store works.
pub(super) struct Live {
    pub(super) log: Arc<File>,
    /// `None`: with relaxed durability.
    pub(super) redo: Option<Redo>,
    /// Moves the half of the redo log that was left.
    pub(super) mover: Option<Mover>,
    pub(super) sequence: Sequence,
    /// Bytes by tenant.
    pub(super) used: HashMap<Tenant, u64>,
    /// Where each replica's record lies.
    pub(super) replicas: BTreeMap<u64, KeyHash>,
    /// Keys that may be on the disk.
    pub(super) known: Known,
    pub(super) high_water: HighWater,
    /// Flushed but not synced: `Durability::Relaxed`.
    pub(super) unsynced: bool,
}

/// A key that somebody owns, or that this batch has touched.
pub(super) struct Active {
    pub(super) record: Record<BodyRef>,
    pub(super) on_disk: bool,
}

/// An answer that is held back until the batch is durable or has failed. Returns
/// the claim that its claimant did not get.
pub(super) type Held = Box<dyn FnOnce(Result<(), StoreError>) -> Option<(KeyHash, OwnerId)> + Send>;

/// What one batch gathers.
#[derive(Default)]
pub(super) struct Gathered {
    pub(super) writes: Writes,
    pub(super) retired: Vec<u64>,
    /// Keys with an event in the batch.
    pub(super) dirty: HashSet<KeyHash>,
    /// Keys that may leave memory afterwards.
    pub(super) touched: Vec<KeyHash>,
    pub(super) replicas: HashMap<KeyHash, (u64, StoredReplica)>,
    pub(super) held: Vec<Held>,
    pub(super) unreceived: Vec<(KeyHash, OwnerId)>,
    /// Done when everything else is decided.
    pub(super) purges: Vec<(Tenant, Option<Vec<u8>>, AnswerTo<Purged>)>,
    /// Keys that go with this batch.
    pub(super) removed: HashSet<KeyHash>,
    /// Free bytes of the disk, once they were asked for.
    pub(super) free: Option<u64>,
}

pub(super) struct Committer {
    pub(super) paths: Paths,
    pub(super) options: SledOptions,
    pub(super) shared: Arc<Shared>,
    /// `None`: closed, or the disk has failed.
    pub(super) live: Option<Live>,
    pub(super) active: HashMap<KeyHash, Active>,
    pub(super) watch: Watch,
    pub(super) last_tick: Instant,
    /// Keys may be due for expiry.
    pub(super) expiring: bool,
    /// Opening again has found a loss: a person must decide.
    pub(super) given_up: bool,
    /// As long as this is open, nobody else opens the store.
    _lock: File,
}

impl Committer {
    pub(super) fn new(
        paths: Paths,
        options: SledOptions,
        shared: Arc<Shared>,
        opened: Opened,
        lock: File,
    ) -> Self {
        let watch = Watch::start(&*options.clock);
        let mut committer = Self {
            paths,
            options,
            shared,
            live: None,
            active: HashMap::new(),
            watch,
            last_tick: Instant::now(),
            expiring: false,
            given_up: false,
            _lock: lock,
        };
        committer.go_live(opened);
        committer
    }

    pub(super) fn go_live(&mut self, opened: Opened) {
        let Opened {
            db,
            log,
            redo,
            scan,
            high_water,
            loss,
        } = opened;
        self.shared
            .epoch
            .store(high_water.mark().epoch, Ordering::Release);
        self.shared.stats(|stats| {
            stats.damaged_records = scan.damaged;
            stats.losses += u64::from(loss.is_some());
            stats.used_bytes = scan.used.values().sum();
            stats.down = None;
        });
        if scan.damaged > 0 {
            tracing::error!(
                records = scan.damaged,
                "stored records are damaged; their keys are refused until they expire"
            );
        }
        self.live = Some(Live {
            log,
            redo,
            mover: None,
            sequence: scan.sequence,
            used: scan.used,
            replicas: scan.replicas,
            known: scan.known,
            high_water,
            unsynced: false,
        });
        *self
            .shared
            .db
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(db);
    }

    /// Until the last sender is gone or the store is closed.
    pub(super) fn run(mut self, queue: &Receiver<Queued>) {
        loop {
            let wait = if self.expiring {
                Duration::ZERO
            } else {
                self.options.tick
            };
            let mut requests = Vec::new();
            match queue.recv_timeout(wait) {
                Ok(first) => requests.push(first),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let mut bytes = 0;
            while requests.len() < BATCH_REQUESTS && bytes < BATCH_BYTES {
                let Ok(next) = queue.try_recv() else { break };
                bytes += next.bytes;
                requests.push(next);
            }
            if let Some(close) = self.batch(requests) {
                let closed = self.close();
                // With it the lock: whoever is told may open the store.
                drop(self);
                let _ = close.send(closed);
                return;
            }
        }
        let _ = self.close();
    }

    fn close(&mut self) -> Result<(), StoreError> {
        let moved = self.move_all();
        let Some(mut live) = self.live.take() else {
            return Ok(());
        };
        let db = self
            .shared
            .db
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some(db) = db else { return Ok(()) };
        let closed = moved
            .and_then(|()| guarded(|| db.flush().map(drop)))
            .and_then(|()| live.log.sync_data().map_err(Fault::of_sync))
            .and_then(|()| Ok(live.high_water.advance(live.sequence.next() - 1)?))
            .and_then(|()| Ok(live.high_water.sync()?));
        closed
            .and(close(db))
            .map_err(|fault| StoreError::Failed(fault.to_string()))
    }

    pub(super) fn step(&self, step: Step) {
        self.options.observe(step);
    }

    /// Handles these requests. Returns the one that closes the store.
    fn batch(&mut self, requests: Vec<Queued>) -> Option<AnswerTo<()>> {
        let mut closing = None;
        if !requests.is_empty() {
            self.step(Step::Taken);
        }
        let mut gathered = Gathered::default();
        if let Err(fault) = self.end_move(false) {
            self.fall(fault, Gathered::default());
        }
        self.tick_if_due(&mut gathered);
        let mut rooms = Vec::with_capacity(requests.len());
        for Queued { request, room, .. } in requests {
            rooms.push(room);
            if closing.is_some() {
                refuse(request, StoreError::Failed("the store is closed".into()));
            } else if let Request::Close(answer) = request {
                closing = Some(answer);
            } else if let Some(why) = self.down() {
                self.refuse_while_down(request, why);
            } else if let Err(fault) = self.decide(request, &mut gathered) {
                self.fall(fault, std::mem::take(&mut gathered));
            }
        }
        // The store may be closed only once all of this is answered.
        if self.live.is_some() {
            let expired = self.expire(&mut gathered);
            let purged = expired.and_then(|()| self.purge(&mut gathered));
            let done = purged.and_then(|()| self.write(&mut gathered));
            match done {
                Ok(()) => self.tell(gathered),
                Err(fault) => self.fall(fault, gathered),
            }
        }
        closing
    }

    fn down(&self) -> Option<StoreError> {
        if self.live.is_some() {
            return None;
        }
        let why = self.shared.stats(|stats| stats.down.clone());
        Some(StoreError::Failed(why.unwrap_or_else(|| "closed".into())))
    }

    /// A release is taken all the same: it needs no disk, and whoever gives a
    /// key up may not ask again.
    fn refuse_while_down(&mut self, request: Request, why: StoreError) {
        if let Request::Write(key, Command::Release { owner }, answer) = request {
            self.give_back(&[(key, owner)]);
            let _ = answer.send(Ok(Reply::Accepted));
        } else {
            refuse(request, why);
        }
    }

    /// Nobody received these claims: the keys are nobody's.
    pub(super) fn give_back(&mut self, unreceived: &[(KeyHash, OwnerId)]) {
        for (key, owner) in unreceived {
            if let Some(active) = self.active.get_mut(key)
                && active.record.owner == Some(*owner)
            {
                active.record.owner = None;
            }
        }
    }

    fn tell(&mut self, gathered: Gathered) {
        let told = !gathered.held.is_empty();
        let mut unreceived = gathered.unreceived;
        for held in gathered.held {
            unreceived.extend(held(Ok(())));
        }
        self.give_back(&unreceived);
        let left = gathered
            .touched
            .into_iter()
            .chain(unreceived.into_iter().map(|(key, _)| key));
        for key in left {
            if self
                .active
                .get(&key)
                .is_some_and(|a| a.record.owner.is_none())
            {
                self.active.remove(&key);
            }
        }
        let running = self.active.len() as u64;
        self.shared.stats(|stats| stats.running = running);
        if told {
            self.step(Step::Told);
        }
    }
}
