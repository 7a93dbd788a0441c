//! A store that lives as long as its process: for tests, demos and benches.
//! It keeps the same contract as the others, except that nothing outlives it.
//! Bounded by retention and by each tenant's quota.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;

use super::{
    AttemptRecord, Claim, ClaimRequest, Claimed, Commit, FinishedSample, IncarnationGrant, KeyHash,
    OwnerId, Purged, Store, StoreError, fresh_epoch,
    life::{self, Command, Event, Record, Reply, SampleState},
    notes::{Note, PinNote, Recalled, ReplicaNote},
};
use crate::{
    error::Error,
    ids::{BootId, Incarnation, ReplicaId, Tenant},
};

/// Limits of a [`MemoryStore`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// How long a key is kept after its last change. A key that somebody owns
    /// is kept longer.
    pub retention: Duration,
    /// Bytes that one tenant may keep before its new keys are refused.
    pub tenant_quota: u64,
    /// Bytes that one key may keep; a sample beyond is not stored.
    pub max_result_bytes: u64,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self {
            retention: Duration::from_secs(24 * 60 * 60),
            tenant_quota: 1 << 30,
            max_result_bytes: 16 << 20,
        }
    }
}

/// See the module.
pub struct MemoryStore {
    options: MemoryOptions,
    epoch: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: HashMap<KeyHash, Entry>,
    /// Every key of `keys` by its last change, oldest first.
    by_age: BTreeSet<(Instant, KeyHash)>,
    used: HashMap<Tenant, u64>,
    incarnations: HashMap<ReplicaId, Vec<(BootId, Incarnation)>>,
    pins: BTreeMap<u128, PinNote>,
    replicas: BTreeMap<ReplicaId, ReplicaNote>,
    condemned: BTreeMap<[u8; 16], SystemTime>,
}

struct Entry {
    record: Record<Arc<FinishedSample>>,
    changed: Instant,
    bytes: u64,
    /// Trajectories that its attempts bound.
    pins: BTreeSet<u128>,
}

/// What a key costs beside its results.
const KEY_BYTES: u64 = 256;

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new(MemoryOptions::default())
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new(options: MemoryOptions) -> Self {
        Self {
            options,
            epoch: fresh_epoch(SystemTime::now()),
            state: Mutex::default(),
        }
    }

    /// Every owner is gone, as after a crash of the control plane: what is
    /// finished or dispatched stays, keys with neither are forgotten.
    pub fn lose_owners(&self) {
        let mut state = self.lock();
        let mut blank = Vec::new();
        for (key, entry) in &mut state.keys {
            entry.record.owner = None;
            if entry.record.is_blank() {
                blank.push(*key);
            }
        }
        for key in blank {
            state.forget(key);
        }
    }

    /// Expired keys are gone before anything is looked at.
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock cannot leave a record half changed: events are
        // taken whole.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.expire(self.options.retention);
        state
    }

    fn claim_now(&self, request: ClaimRequest) -> Result<Claim, StoreError> {
        let mut state = self.lock();
        let key = request.key;
        if !state.keys.contains_key(&key) {
            let used = state.used.get(&request.tenant).copied().unwrap_or(0);
            if used >= self.options.tenant_quota {
                return Err(StoreError::over_quota(
                    &request.tenant,
                    used,
                    self.options.tenant_quota,
                ));
            }
        }
        let reply = state.apply(key, request.into_command(SystemTime::now()))?;
        match state.keys.get(&key) {
            Some(entry) => Ok(as_claim(&entry.record, reply)),
            None => Err(StoreError::Failed("a claimed key is missing".into())),
        }
    }

    fn commit_now(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> Result<Commit, StoreError> {
        let bytes = finished.encoded_len()?;
        let mut state = self.lock();
        let kept = state.keys.get(&key).map_or(0, |entry| entry.bytes);
        let too_large = kept.saturating_add(bytes) > self.options.max_result_bytes;
        let command = if too_large {
            Command::Discard {
                owner,
                sample,
                attempt,
            }
        } else {
            Command::Commit {
                owner,
                sample,
                attempt,
                result: Arc::new(finished),
            }
        };
        Ok(match state.apply(key, command)? {
            Reply::Stale => Commit::Stale,
            _ if too_large => Commit::TooLarge,
            _ => {
                state.charge(key, bytes);
                Commit::Stored
            }
        })
    }

    fn incarnation_now(&self, replica: ReplicaId, boot: BootId) -> IncarnationGrant {
        let mut state = self.lock();
        let boots = state.incarnations.entry(replica).or_default();
        if let Some((_, incarnation)) = boots.iter().find(|(known, _)| *known == boot) {
            return IncarnationGrant {
                incarnation: *incarnation,
                new: false,
                latest: boots.last().map_or(*incarnation, |(_, last)| *last),
            };
        }
        let incarnation = Incarnation(boots.last().map_or(0, |(_, last)| last.0) + 1);
        boots.push((boot, incarnation));
        if boots.len() > super::BOOTS_REMEMBERED {
            boots.remove(0);
        }
        IncarnationGrant {
            incarnation,
            new: true,
            latest: incarnation,
        }
    }
}

impl State {
    fn apply(
        &mut self,
        key: KeyHash,
        command: Command<Arc<FinishedSample>>,
    ) -> Result<Reply, StoreError> {
        let now = Instant::now();
        let Some(entry) = self.keys.get_mut(&key) else {
            let mut slot = None;
            let reply = life::apply(&mut slot, command)?.reply;
            if let Some(record) = slot {
                let entry = Entry {
                    record,
                    changed: now,
                    bytes: 0,
                    pins: BTreeSet::new(),
                };
                self.keys.insert(key, entry);
                self.by_age.insert((now, key));
                self.charge(key, KEY_BYTES);
            }
            return Ok(reply);
        };
        // A release is the one command that can forget a record; here that is
        // done by `forget`, which knows what hangs on it.
        let release = matches!(command, Command::Release { .. });
        let applied = entry.record.apply(command)?;
        if let Some(Event::Dispatched { attempt, .. }) = &applied.event
            && let Some(pin) = attempt.binds
        {
            let note = PinNote::bound(attempt.target.clone(), SystemTime::now());
            self.pins.insert(pin, note);
            entry.pins.insert(pin);
        }
        if applied.event.is_some() {
            self.by_age.remove(&(entry.changed, key));
            entry.changed = now;
            self.by_age.insert((now, key));
        }
        if release && entry.record.is_blank() {
            self.forget(key);
        }
        Ok(applied.reply)
    }

    fn charge(&mut self, key: KeyHash, bytes: u64) {
        if let Some(entry) = self.keys.get_mut(&key) {
            entry.bytes += bytes;
            *self.used.entry(entry.record.tenant.clone()).or_default() += bytes;
        }
    }

    fn forget(&mut self, key: KeyHash) {
        if let Some(entry) = self.keys.remove(&key) {
            self.by_age.remove(&(entry.changed, key));
            if let Some(used) = self.used.get_mut(&entry.record.tenant) {
                *used = used.saturating_sub(entry.bytes);
                if *used == 0 {
                    self.used.remove(&entry.record.tenant);
                }
            }
        }
    }

    /// All in one step.
    fn purge(&mut self, tenant: &Tenant) -> Purged {
        let mut purged = Purged::default();
        let mut gone = Vec::new();
        for (key, entry) in &self.keys {
            if entry.record.tenant != *tenant {
                continue;
            }
            if entry.record.owner.is_some() {
                purged.owned += 1;
                continue;
            }
            purged.keys += 1;
            purged.bytes += entry.bytes;
            purged.pins.extend(&entry.pins);
            gone.push(*key);
        }
        for key in gone {
            self.forget(key);
        }
        purged
    }

    fn expire(&mut self, retention: Duration) {
        let now = Instant::now();
        while let Some((changed, key)) = self.by_age.first().copied() {
            if now.duration_since(changed) < retention {
                return;
            }
            match self.keys.get_mut(&key) {
                // Somebody works on it: looked at again a retention later.
                Some(entry) if entry.record.owner.is_some() => {
                    self.by_age.remove(&(changed, key));
                    entry.changed = now;
                    self.by_age.insert((now, key));
                }
                _ => self.forget(key),
            }
        }
    }
}

fn set<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: Option<V>) {
    match value {
        Some(value) => drop(map.insert(key, value)),
        None => drop(map.remove(&key)),
    }
}

fn as_claim(record: &Record<Arc<FinishedSample>>, reply: Reply) -> Claim {
    match reply {
        Reply::Running(owner) => Claim::Running { owner },
        Reply::Mismatch => Claim::Mismatch,
        Reply::Finished => Claim::Done(Arc::new(FinishedSample::assemble(
            record.started_at,
            &finished_of(record)
                .map(|(_, sample)| sample.clone())
                .collect::<Vec<_>>(),
        ))),
        Reply::Failed => record.failed.clone().map_or(Claim::DataLoss, Claim::Failed),
        Reply::Claimed | Reply::Accepted | Reply::Stale => Claim::Claimed(Claimed {
            started_at: record.started_at,
            finished: finished_of(record)
                .map(|(index, sample)| (index, sample.clone()))
                .collect(),
            orphans: record
                .dispatched()
                .map(|(index, attempt)| (index, attempt.clone()))
                .collect(),
            last_attempts: record.last_attempts(),
        }),
    }
}

fn finished_of(
    record: &Record<Arc<FinishedSample>>,
) -> impl Iterator<Item = (u32, &FinishedSample)> {
    (0u32..)
        .zip(&record.samples)
        .filter_map(|(index, sample)| match sample {
            SampleState::Done { result, .. } => Some((index, &**result)),
            _ => None,
        })
}

impl Store for MemoryStore {
    fn claim(&self, request: ClaimRequest) -> BoxFuture<'_, Result<Claim, StoreError>> {
        async move { self.claim_now(request) }.boxed()
    }

    fn dispatch(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: AttemptRecord,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let command = Command::Dispatch {
            owner,
            sample,
            attempt,
        };
        async move { self.lock().apply(key, command).map(drop) }.boxed()
    }

    fn commit(
        &self,
        key: KeyHash,
        owner: OwnerId,
        sample: u32,
        attempt: u32,
        finished: FinishedSample,
    ) -> BoxFuture<'_, Result<Commit, StoreError>> {
        async move { self.commit_now(key, owner, sample, attempt, finished) }.boxed()
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
        async move { self.lock().apply(key, command).map(drop) }.boxed()
    }

    fn fail(
        &self,
        key: KeyHash,
        owner: OwnerId,
        error: Error,
    ) -> BoxFuture<'_, Result<(), StoreError>> {
        let command = Command::Fail { owner, error };
        async move { self.lock().apply(key, command).map(drop) }.boxed()
    }

    fn release(&self, key: KeyHash, owner: OwnerId) -> BoxFuture<'_, Result<(), StoreError>> {
        let command = Command::Release { owner };
        async move { self.lock().apply(key, command).map(drop) }.boxed()
    }

    fn read(&self, key: KeyHash) -> BoxFuture<'_, Result<Option<Claim>, StoreError>> {
        async move {
            let state = self.lock();
            let entry = state.keys.get(&key);
            Ok(entry.map(|entry| as_claim(&entry.record, entry.record.state())))
        }
        .boxed()
    }

    fn purge(
        &self,
        tenant: Tenant,
        _from: Option<Vec<u8>>,
    ) -> BoxFuture<'_, Result<Purged, StoreError>> {
        async move { Ok(self.lock().purge(&tenant)) }.boxed()
    }

    fn incarnation(
        &self,
        replica: ReplicaId,
        boot: BootId,
    ) -> BoxFuture<'_, Result<IncarnationGrant, StoreError>> {
        async move { Ok(self.incarnation_now(replica, boot)) }.boxed()
    }

    fn note(&self, notes: Vec<Note>) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let mut state = self.lock();
            for note in notes {
                match note {
                    Note::Pin(key, pin) => set(&mut state.pins, key, pin),
                    Note::Replica(id, note) => {
                        set(&mut state.replicas, id, note.map(|note| *note));
                    }
                    Note::Condemned(prompt, until) => set(&mut state.condemned, prompt, until),
                }
            }
            Ok(())
        }
        .boxed()
    }

    fn recall(&self) -> BoxFuture<'_, Result<Recalled, StoreError>> {
        async move {
            let state = self.lock();
            Ok(Recalled {
                pins: state.pins.iter().map(|(k, v)| (*k, v.clone())).collect(),
                replicas: state.replicas.values().cloned().collect(),
                condemned: state.condemned.iter().map(|(k, v)| (*k, *v)).collect(),
            })
        }
        .boxed()
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn close(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }
}

#[cfg(test)]
mod tests;
