//! The pieces of a key's life as they are stored, and back: events, and bodies
//! in chunks. Nothing is ever made up: what does not fold into a life is damage.

use serde::{Deserialize, Serialize};

use super::{
    super::{
        KeyHash, OwnerId,
        life::{Event, Record, Reply, SampleState},
    },
    frame::{self, Damaged, Kind, MAX_BODY},
    layout::{self, Class, RecordKey},
    overlay::View,
};
use crate::ids::{BootId, ReplicaId};

/// Where a finished sample lies: in chunks with consecutive sequence numbers, or,
/// where it is small, behind the event that refers to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BodyRef {
    /// Of the first chunk; without chunks, of the event.
    pub(super) first_seq: u64,
    pub(super) chunks: u32,
    pub(super) len: u64,
    pub(super) crc: u32,
}

impl BodyRef {
    /// Where `body` will lie if what holds it takes the numbers from `first_seq`.
    pub(super) fn plan(body: &[u8], first_seq: u64) -> Self {
        let chunks = if Self::is_inline(body.len()) {
            0
        } else {
            u32::try_from(body.len().div_ceil(MAX_BODY)).unwrap_or(u32::MAX)
        };
        Self {
            first_seq,
            chunks,
            len: body.len() as u64,
            crc: crc32c::crc32c(body),
        }
    }

    /// Whether a body of so many bytes lies behind its event.
    pub(super) fn is_inline(len: usize) -> bool {
        len <= MAX_INLINE
    }

    /// The event behind which it lies, if it does.
    pub(super) fn event_key(self, hash: KeyHash) -> Option<RecordKey> {
        (self.chunks == 0).then_some(RecordKey {
            hash,
            class: Class::Event,
            seq: self.first_seq,
        })
    }

    pub(super) fn holds(&self, seq: u64) -> bool {
        seq.checked_sub(self.first_seq)
            .is_some_and(|offset| offset < u64::from(self.chunks))
    }

    /// Where each chunk lies.
    pub(super) fn keys(self, hash: KeyHash) -> impl Iterator<Item = RecordKey> {
        (0..u64::from(self.chunks)).map(move |offset| RecordKey {
            hash,
            class: Class::Chunk,
            seq: self.first_seq.saturating_add(offset),
        })
    }
}

/// The largest body that lies behind its event.
const MAX_INLINE: usize = MAX_BODY - 128;

/// Events that happened at once, with the time: the opening of a life comes with
/// the first thing that happens in it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredEvent {
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
    pub(super) events: Vec<Event<BodyRef>>,
}

impl StoredEvent {
    /// A framed value for this place, with a small body behind it.
    pub(super) fn encode(&self, key: &[u8], inline: &[u8]) -> Result<Vec<u8>, Damaged> {
        let mut body = postcard::to_stdvec(self).map_err(|_| Damaged)?;
        body.extend_from_slice(inline);
        frame::encode(Kind::Event, key, &body)
    }

    /// The value that was framed for this place, and what lies behind it.
    pub(super) fn decode<'a>(key: &[u8], value: &'a [u8]) -> Result<(Self, &'a [u8]), Damaged> {
        let body = frame::decode(Kind::Event, key, value)?;
        postcard::take_from_bytes(body).map_err(|_| Damaged)
    }
}

/// The starts of one replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredReplica {
    pub(super) id: ReplicaId,
    /// Oldest first.
    pub(super) boots: Vec<(BootId, u64)>,
    /// When the last one was added, in milliseconds since 1970.
    pub(super) at_ms: u64,
}

/// The store's identity, as sled holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) store: u64,
}

/// A framed value for this place.
pub(super) fn encode<T: Serialize>(kind: Kind, key: &[u8], value: &T) -> Result<Vec<u8>, Damaged> {
    let body = postcard::to_stdvec(value).map_err(|_| Damaged)?;
    frame::encode(kind, key, &body)
}

/// The value that was framed for this place.
pub(super) fn decode<T: for<'a> Deserialize<'a>>(
    kind: Kind,
    key: &[u8],
    value: &[u8],
) -> Result<T, Damaged> {
    postcard::from_bytes(frame::decode(kind, key, value)?).map_err(|_| Damaged)
}

/// The hash under which a replica's starts lie.
pub(super) fn replica_hash(id: &ReplicaId) -> KeyHash {
    let key = blake3::derive_key("berth.dev 2026 replica", id.as_str().as_bytes());
    KeyHash(key)
}

/// A life folded from its stored events.
#[derive(Debug, Default)]
pub(super) struct Fold {
    pub(super) record: Option<Record<BodyRef>>,
    /// Of the last event, in milliseconds since 1970.
    pub(super) last_ms: u64,
}

impl Fold {
    pub(super) fn add(&mut self, key: &[u8], value: &[u8]) -> Result<(), Damaged> {
        let (StoredEvent { at_ms, events }, _) = StoredEvent::decode(key, value)?;
        for event in events {
            match &mut self.record {
                None => self.record = Some(Record::from_opened(event).map_err(|_| Damaged)?),
                Some(record) => record.replay(event).map_err(|_| Damaged)?,
            }
        }
        self.last_ms = self.last_ms.max(at_ms);
        Ok(())
    }
}

/// The trajectories that an event's attempts bound.
pub(super) fn bound(key: &[u8], value: &[u8]) -> Vec<u128> {
    let events = StoredEvent::decode(key, value).map(|(stored, _)| stored.events);
    let bound = events
        .into_iter()
        .flatten()
        .filter_map(|event| match event {
            Event::Dispatched { attempt, .. } => attempt.binds,
            _ => None,
        });
    bound.collect()
}

/// What the disk says about a key.
pub(super) fn load(view: &View<'_>, hash: KeyHash) -> Result<Result<Fold, Damaged>, ::sled::Error> {
    let mut fold = Fold::default();
    for (key, value) in view.prefix(&layout::class_prefix(hash, Class::Event))? {
        if let Err(damaged) = fold.add(&key, &value) {
            return Ok(Err(damaged));
        }
    }
    Ok(Ok(fold))
}

/// The newest record of a replica, and its number in the sequence.
pub(super) fn load_replica(
    view: &View<'_>,
    hash: KeyHash,
) -> Result<Result<Option<(u64, StoredReplica)>, Damaged>, ::sled::Error> {
    let mut records = view.prefix(&layout::class_prefix(hash, Class::Replica))?;
    let Some((key, value)) = records.pop() else {
        return Ok(Ok(None));
    };
    Ok(RecordKey::decode(&key)
        .ok_or(Damaged)
        .and_then(|place| Ok(Some((place.seq, decode(Kind::Replica, &key, &value)?)))))
}

/// A stored body, whole.
pub(super) fn load_body(
    view: &View<'_>,
    hash: KeyHash,
    body: BodyRef,
) -> Result<Result<Vec<u8>, Damaged>, ::sled::Error> {
    if let Some(key) = body.event_key(hash) {
        let key = key.encode();
        let value = view.get(&key)?.unwrap_or_default();
        return Ok(StoredEvent::decode(&key, &value).and_then(|(_, inline)| {
            let whole = inline.len() as u64 == body.len && crc32c::crc32c(inline) == body.crc;
            if whole {
                Ok(inline.to_vec())
            } else {
                Err(Damaged)
            }
        }));
    }
    // The length is covered by a checksum, but it still only sizes a hint.
    let mut bytes = Vec::with_capacity(usize::try_from(body.len.min(16 << 20)).unwrap_or(0));
    for key in body.keys(hash) {
        let key = key.encode();
        let Some(value) = view.get(&key)? else {
            return Ok(Err(Damaged));
        };
        match frame::decode(Kind::Chunk, &key, &value) {
            Ok(chunk) => bytes.extend_from_slice(chunk),
            Err(damaged) => return Ok(Err(damaged)),
        }
    }
    let whole = bytes.len() as u64 == body.len && crc32c::crc32c(&bytes) == body.crc;
    Ok(if whole { Ok(bytes) } else { Err(Damaged) })
}

/// A record as a claim or a read finds it, its bodies still on disk.
#[derive(Debug)]
pub(super) enum Lookup {
    Unknown,
    Open(Box<Progress>),
    Running(OwnerId),
    Finished(Box<Progress>),
    Failed(crate::error::Error),
    Mismatch,
    DataLoss,
}

/// See [`super::super::Claimed`].
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) started_at: std::time::SystemTime,
    pub(super) finished: Vec<(u32, BodyRef)>,
    pub(super) orphans: Vec<(u32, super::super::AttemptRecord)>,
    pub(super) last_attempts: Vec<u32>,
}

impl Lookup {
    pub(super) fn of(record: &Record<BodyRef>, reply: Reply) -> Self {
        match reply {
            Reply::Running(owner) => Self::Running(owner),
            Reply::Mismatch => Self::Mismatch,
            Reply::Failed => record.failed.clone().map_or(Self::DataLoss, Self::Failed),
            Reply::Finished => Self::Finished(Box::new(Progress::of(record))),
            Reply::Claimed | Reply::Accepted | Reply::Stale => {
                Self::Open(Box::new(Progress::of(record)))
            }
        }
    }
}

impl Progress {
    fn of(record: &Record<BodyRef>) -> Self {
        Self {
            started_at: record.started_at,
            finished: (0u32..)
                .zip(&record.samples)
                .filter_map(|(index, sample)| match sample {
                    SampleState::Done { result, .. } => Some((index, *result)),
                    _ => None,
                })
                .collect(),
            orphans: record
                .dispatched()
                .map(|(index, attempt)| (index, attempt.clone()))
                .collect(),
            last_attempts: record.last_attempts(),
        }
    }
}
