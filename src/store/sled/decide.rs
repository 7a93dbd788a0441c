//! How each request is decided, and what it adds to the batch. Nothing here
//! waits for the disk to write.

use super::{
    super::{
        ClaimRequest, Commit, KeyHash, OwnerId, StoreError,
        life::{self, Command, Event, Record, Reply, SampleState},
        notes::PinNote,
    },
    clock::to_ms,
    committer::{Active, AnswerTo, Committer, Gathered, Request},
    disk::free_space,
    fault::Fault,
    frame::{self, Damaged, Kind, MAX_BODY},
    layout::{Class, DueKey, RecordKey},
    notes::bind,
    open::put_due,
    record::{self, BodyRef, Fold, Lookup, StoredEvent},
    scan::charge,
};
use crate::ids::Tenant;

impl Committer {
    pub(super) fn load(&self, key: KeyHash) -> Result<Result<Fold, Damaged>, Fault> {
        self.shared.read(|view| record::load(view, key))
    }

    /// Brings a key that the disk knows into memory. False: it is damaged.
    fn bring(&mut self, key: KeyHash, gathered: &mut Gathered) -> Result<bool, Fault> {
        if self.active.contains_key(&key) {
            return Ok(true);
        }
        let known = self.live.as_ref().is_none_or(|live| live.known.has(key));
        if !known {
            return Ok(true);
        }
        let Ok(fold) = self.load(key)? else {
            return Ok(false);
        };
        if let Some(record) = fold.record {
            let on_disk = true;
            self.active.insert(key, Active { record, on_disk });
            gathered.touched.push(key);
        }
        Ok(true)
    }

    pub(super) fn decide(
        &mut self,
        request: Request,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        match request {
            Request::Claim(request, answer) => self.claim(request, answer, gathered),
            Request::Read(key, answer) => {
                let known = self.bring(key, gathered)?;
                let lookup = match self.active.get(&key) {
                    Some(active) => Lookup::of(&active.record, active.record.state()),
                    None if known => Lookup::Unknown,
                    None => Lookup::DataLoss,
                };
                let dirty = gathered.dirty.contains(&key);
                hold(gathered, dirty, answer, Ok(lookup), |_| None);
                Ok(())
            }
            Request::Write(key, command, answer) => {
                let done = self.apply(key, command, None, gathered)?;
                let waits = gathered.dirty.contains(&key);
                hold(gathered, waits, answer, done, |_| None);
                Ok(())
            }
            Request::Commit {
                key,
                owner,
                sample,
                attempt,
                body,
                answer,
            } => {
                self.bring(key, gathered)?;
                let kept = self.active.get(&key).map_or(0, |a| kept_bytes(&a.record));
                let limit = self.options.max_result_bytes;
                let body = body.filter(|body| kept.saturating_add(body.len() as u64) <= limit);
                let done = match body {
                    Some(body) => {
                        let first = self.live.as_ref().map_or(0, |live| live.sequence.next());
                        let command = Command::Commit {
                            owner,
                            sample,
                            attempt,
                            result: BodyRef::plan(&body, first),
                        };
                        let done = self.apply(key, command, Some(&body), gathered)?;
                        done.map(|reply| match reply {
                            Reply::Stale => Commit::Stale,
                            _ => Commit::Stored,
                        })
                    }
                    None => {
                        let command = Command::Discard {
                            owner,
                            sample,
                            attempt,
                        };
                        let done = self.apply(key, command, None, gathered)?;
                        done.map(|reply| match reply {
                            Reply::Stale => Commit::Stale,
                            _ => Commit::TooLarge,
                        })
                    }
                };
                let waits = gathered.dirty.contains(&key);
                hold(gathered, waits, answer, done, |_| None);
                Ok(())
            }
            Request::Incarnation(replica, boot, answer) => {
                self.grant(replica, boot, answer, gathered)
            }
            Request::Purge(tenant, from, answer) => {
                gathered.purges.push((tenant, from, answer));
                Ok(())
            }
            Request::Note(notes, answer) => self.take_notes(notes, answer, gathered),
            Request::Recall(answer) => self.recall(answer, gathered),
            Request::Close(_) => Ok(()),
        }
    }

    fn claim(
        &mut self,
        request: ClaimRequest,
        answer: AnswerTo<Lookup>,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let (key, owner) = (request.key, request.owner);
        if !self.bring(key, gathered)? {
            hold(gathered, false, answer, Ok(Lookup::DataLoss), |_| None);
            return Ok(());
        }
        let known = self.active.contains_key(&key);
        if !known && let Err(full) = self.room_for(&request.tenant, gathered) {
            hold(gathered, false, answer, Err(full), |_| None);
            return Ok(());
        }
        let now = self.options.clock.wall();
        let lookup = match self.active.get_mut(&key) {
            Some(active) => active
                .record
                .apply(request.into_command(now))
                .map(|applied| Lookup::of(&active.record, applied.reply)),
            None => {
                let mut slot = None;
                let applied = life::apply(&mut slot, request.into_command(now));
                applied.map(|applied| match slot {
                    Some(record) => {
                        let lookup = Lookup::of(&record, applied.reply);
                        let on_disk = false;
                        self.active.insert(key, Active { record, on_disk });
                        lookup
                    }
                    None => Lookup::Unknown,
                })
            }
        };
        let waits = gathered.dirty.contains(&key);
        hold(
            gathered,
            waits,
            answer,
            lookup.map_err(StoreError::from),
            move |lookup| matches!(lookup, Lookup::Open(_)).then_some((key, owner)),
        );
        Ok(())
    }

    /// Whether a new key of this tenant is taken.
    fn room_for(&self, tenant: &Tenant, gathered: &mut Gathered) -> Result<(), StoreError> {
        if self.active.len() >= self.options.max_running {
            return Err(StoreError::Full(format!(
                "{} keys are in work",
                self.active.len()
            )));
        }
        let used = self
            .live
            .as_ref()
            .and_then(|live| live.used.get(tenant))
            .copied()
            .unwrap_or(0);
        if used >= self.options.tenant_quota {
            return Err(StoreError::over_quota(
                tenant,
                used,
                self.options.tenant_quota,
            ));
        }
        let free = match gathered.free {
            Some(free) => free,
            None => free_space(&self.paths.dir)
                .map_err(|e| StoreError::Failed(format!("the disk failed: {e}")))?,
        };
        gathered.free = Some(free);
        let floor = self.options.free_space_floor;
        if free < floor {
            return Err(StoreError::Full(format!(
                "{free} bytes of disk space are free, new keys need {floor}"
            )));
        }
        Ok(())
    }

    /// Decides one command and gathers what it writes.
    fn apply(
        &mut self,
        key: KeyHash,
        command: Command<BodyRef>,
        body: Option<&[u8]>,
        gathered: &mut Gathered,
    ) -> Result<Result<Reply, StoreError>, Fault> {
        if !self.bring(key, gathered)? {
            return Ok(Err(StoreError::Damaged(
                "the key's record cannot be read".into(),
            )));
        }
        let Some(active) = self.active.get_mut(&key) else {
            return Ok(Err(StoreError::NotOwner));
        };
        gathered.touched.push(key);
        let applied = match active.record.apply(command) {
            Ok(applied) => applied,
            Err(rejection) => return Ok(Err(rejection.into())),
        };
        let Some(event) = applied.event else {
            return Ok(Ok(applied.reply));
        };
        let opened = (!active.on_disk).then(|| active.record.opened());
        active.on_disk = true;
        let tenant = active.record.tenant.clone();
        if let Event::Dispatched { attempt, .. } = &event
            && let Some(pin) = attempt.binds
        {
            let note = PinNote::bound(attempt.target.clone(), self.options.clock.wall());
            bind(pin, &note, gathered)?;
        }
        let mut inline: &[u8] = &[];
        if let Some(body) = body {
            if BodyRef::is_inline(body.len()) {
                inline = body;
            } else {
                self.put_chunks(key, body, &tenant, gathered)?;
            }
        }
        let now = self.options.clock.wall();
        if opened.is_some() {
            if let Some(live) = &mut self.live {
                live.known.insert(key);
            }
            let due = DueKey {
                at_ms: to_ms(now + self.options.retention),
                hash: key,
            };
            put_due(&mut gathered.writes, due).map_err(unencodable)?;
        }
        let events = opened.into_iter().chain([event]).collect();
        self.put_events(key, events, inline, &tenant, gathered)?;
        gathered.dirty.insert(key);
        Ok(Ok(applied.reply))
    }

    fn put_chunks(
        &mut self,
        hash: KeyHash,
        body: &[u8],
        tenant: &Tenant,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        for chunk in body.chunks(MAX_BODY) {
            let place = self.place(hash, Class::Chunk)?;
            let key = place.encode();
            let value = frame::encode(Kind::Chunk, &key, chunk).map_err(unencodable)?;
            self.put(key, value, Some(tenant), gathered);
        }
        Ok(())
    }

    fn put_events(
        &mut self,
        hash: KeyHash,
        events: Vec<Event<BodyRef>>,
        inline: &[u8],
        tenant: &Tenant,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let key = self.place(hash, Class::Event)?.encode();
        let at_ms = to_ms(self.options.clock.wall());
        let stored = StoredEvent { at_ms, events };
        let value = stored.encode(&key, inline).map_err(unencodable)?;
        self.put(key, value, Some(tenant), gathered);
        Ok(())
    }

    pub(super) fn place(&mut self, hash: KeyHash, class: Class) -> Result<RecordKey, Fault> {
        let live = self.live.as_mut().ok_or_else(Fault::closed)?;
        let seq = live.sequence.take();
        Ok(RecordKey { hash, class, seq })
    }

    pub(super) fn put(
        &mut self,
        key: Vec<u8>,
        value: Vec<u8>,
        tenant: Option<&Tenant>,
        gathered: &mut Gathered,
    ) {
        if let (Some(live), Some(tenant)) = (&mut self.live, tenant) {
            *live.used.entry(tenant.clone()).or_default() += charge(&key, &value);
        }
        gathered.writes.insert(key, value);
    }
}

/// Answers at once, or with the batch where the answer rests on it.
pub(super) fn hold<T: Send + 'static>(
    gathered: &mut Gathered,
    waits: bool,
    answer: AnswerTo<T>,
    result: Result<T, StoreError>,
    give_back: impl FnOnce(T) -> Option<(KeyHash, OwnerId)> + Send + 'static,
) {
    let tell = move |durable: Result<(), StoreError>| {
        if let Err(why) = durable {
            let _ = answer.send(Err(why));
            return result.ok().and_then(give_back);
        }
        match answer.send(result) {
            Err(Ok(unreceived)) => give_back(unreceived),
            Ok(()) | Err(Err(_)) => None,
        }
    };
    if waits {
        gathered.held.push(Box::new(tell));
    } else {
        gathered.unreceived.extend(tell(Ok(())));
    }
}

pub(super) fn refuse(request: Request, why: StoreError) {
    // Whoever has gone need not be told.
    match request {
        Request::Claim(_, answer) | Request::Read(_, answer) => drop(answer.send(Err(why))),
        Request::Write(_, _, answer) => drop(answer.send(Err(why))),
        Request::Commit { answer, .. } => drop(answer.send(Err(why))),
        Request::Incarnation(_, _, answer) => drop(answer.send(Err(why))),
        Request::Purge(_, _, answer) => drop(answer.send(Err(why))),
        Request::Note(_, answer) => drop(answer.send(Err(why))),
        Request::Recall(answer) => drop(answer.send(Err(why))),
        Request::Close(answer) => drop(answer.send(Err(why))),
    }
}

fn kept_bytes(record: &Record<BodyRef>) -> u64 {
    record
        .samples
        .iter()
        .map(|sample| match sample {
            SampleState::Done { result, .. } => result.len,
            _ => 0,
        })
        .sum()
}

/// Sizes are checked before a request is queued, so this does not happen; if it
/// does, the record in memory is ahead of the disk and must be read back.
pub(super) fn unencodable(_: Damaged) -> Fault {
    Fault::Io("a record cannot be encoded".into())
}
