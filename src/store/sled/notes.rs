//! Notes on disk: each in one value, or, where it is longer, in numbered parts.
//! They are outside the sequence and no tenant is charged for them.
//!
//! What a later version adds to a note stands behind all that was there before, so
//! that older notes are read too, and newer ones by older versions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    super::{
        StoreError,
        notes::{DrainNote, Note, PinNote, Recalled, ReplicaNote},
    },
    committer::{AnswerTo, Committer, Gathered},
    decide::{hold, unencodable},
    fault::Fault,
    frame::{self, Damaged, Kind, MAX_BODY},
    layout::{NoteKey, NoteKind},
    record::replica_hash,
    writes::Writes,
};
use crate::{
    fleet::facts::ReplicaFacts,
    ids::{Incarnation, ReplicaId},
};

/// Parts of one note, 4 MB: a registration has at most 1 MiB, and a rank without an
/// address of its own repeats the replica's here.
const MAX_PARTS: usize = 1024;

/// Before the bytes of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PartHead {
    parts: u16,
    /// Of the whole note, so that parts of two never make one.
    crc: u32,
}

/// As much as a head can take.
const HEAD: usize = 8;

impl Committer {
    pub(super) fn take_notes(
        &mut self,
        notes: Vec<Note>,
        answer: AnswerTo<()>,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let mut done = Ok(());
        for note in notes {
            if !self.take_note(note, gathered)? {
                done = Err(StoreError::Failed("a note is too long to be kept".into()));
            }
        }
        hold(gathered, true, answer, done, |()| None);
        Ok(())
    }

    /// False: it is too long and nothing of it is kept.
    fn take_note(&mut self, note: Note, gathered: &mut Gathered) -> Result<bool, Fault> {
        let (key, bytes) = match &note {
            Note::Pin(key, pin) => (pin_key(*key), pin.as_ref().map(postcard::to_stdvec)),
            Note::Replica(id, replica) => (
                NoteKey::new(NoteKind::Replica, replica_hash(id).0.to_vec()),
                replica
                    .as_ref()
                    .map(|note| postcard::to_stdvec(&(id, note, more(&note.facts)))),
            ),
            Note::Condemned(prompt, until) => (
                NoteKey::new(NoteKind::Condemned, prompt.to_vec()),
                until.as_ref().map(postcard::to_stdvec),
            ),
        };
        let bytes = bytes.transpose().map_err(|_| unencodable(Damaged))?;
        // Only a replica's can have more than one part.
        let old = match note {
            Note::Replica(..) => self.parts_of(&key)?,
            Note::Pin(..) | Note::Condemned(..) => 1,
        };
        let parts = bytes
            .as_ref()
            .map_or(0, |bytes| bytes.len().div_ceil(MAX_BODY - HEAD));
        if parts > MAX_PARTS {
            return Ok(false);
        }
        if let Some(bytes) = &bytes {
            put_parts(&key, bytes, &mut gathered.writes)?;
        }
        for part in parts..old {
            gathered.writes.remove(key.part(part));
        }
        Ok(true)
    }

    fn parts_of(&self, key: &NoteKey) -> Result<usize, Fault> {
        let parts = self.shared.read(|view| view.prefix(&key.prefix()))?;
        // At least one: what this very batch holds is not seen here, and to
        // remove what is not there does no harm.
        Ok(parts.len().max(1))
    }

    pub(super) fn recall(
        &self,
        answer: AnswerTo<Recalled>,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let mut recalled = Recalled::default();
        let mut damaged = 0u64;
        for kind in NoteKind::ALL {
            // In pieces, so that a million pins are not in memory twice.
            let mut from = NoteKey::first(kind);
            loop {
                let piece = self
                    .shared
                    .read(|view| view.range(&from, &NoteKey::end(kind), PIECE))?;
                let last = piece.last().map(|(key, _)| NoteKey::start_of(key));
                let Some(last) = last.filter(|_| piece.len() == PIECE) else {
                    damaged += add(&mut recalled, kind, &piece);
                    break;
                };
                // The last note may go on in the next piece: it is read there.
                let cut = piece.partition_point(|(key, _)| NoteKey::start_of(key) < last);
                damaged += add(&mut recalled, kind, piece.get(..cut).unwrap_or_default());
                from = last;
            }
        }
        if damaged > 0 {
            tracing::warn!(
                damaged,
                "notes of pins or replicas are damaged and passed over"
            );
        }
        hold(gathered, false, answer, Ok(recalled), |_| None);
        Ok(())
    }
}

/// Values that are read at once: more than one note has.
const PIECE: usize = 4096;

/// The note of a pin that an attempt binds, in the attempt's own batch.
pub(super) fn bind(key: u128, pin: &PinNote, gathered: &mut Gathered) -> Result<(), Fault> {
    let bytes = postcard::to_stdvec(pin).map_err(|_| unencodable(Damaged))?;
    put_parts(&pin_key(key), &bytes, &mut gathered.writes)
}

fn pin_key(key: u128) -> NoteKey {
    NoteKey::new(NoteKind::Pin, key.to_be_bytes().to_vec())
}

fn put_parts(key: &NoteKey, bytes: &[u8], writes: &mut Writes) -> Result<(), Fault> {
    let parts = bytes.chunks(MAX_BODY - HEAD);
    let head = PartHead {
        parts: u16::try_from(parts.len()).unwrap_or(u16::MAX),
        crc: crc32c::crc32c(bytes),
    };
    for (part, bytes) in parts.enumerate() {
        let place = key.part(part);
        let mut body = postcard::to_stdvec(&head).map_err(|_| unencodable(Damaged))?;
        body.extend_from_slice(bytes);
        let value = frame::encode(Kind::Note, &place, &body).map_err(unencodable)?;
        writes.insert(place, value);
    }
    Ok(())
}

/// Adds the notes of which these are the parts, in order. Says how many are
/// damaged.
fn add(recalled: &mut Recalled, kind: NoteKind, parts: &[(Vec<u8>, Vec<u8>)]) -> u64 {
    let mut damaged = 0;
    for note in parts.chunk_by(|(a, _), (b, _)| NoteKey::start_of(a) == NoteKey::start_of(b)) {
        let added = whole(note).and_then(|bytes| {
            let id = note.first().map_or(&[][..], |(key, _)| NoteKey::id(key));
            let read = |_| Damaged;
            match kind {
                NoteKind::Pin => {
                    let pin: PinNote = postcard::from_bytes(&bytes).map_err(read)?;
                    let key = id.try_into().map_err(|_| Damaged)?;
                    recalled.pins.push((u128::from_be_bytes(key), pin));
                }
                NoteKind::Replica => recalled.replicas.push(replica(&bytes)?),
                NoteKind::Condemned => {
                    let until = postcard::from_bytes(&bytes).map_err(read)?;
                    let key = id.try_into().map_err(|_| Damaged)?;
                    recalled.condemned.push((key, until));
                }
            }
            Ok(())
        });
        damaged += u64::from(added.is_err());
    }
    damaged
}

/// The first fields of a replica's note, which all have.
#[derive(Deserialize)]
struct ReplicaHead {
    facts: ReplicaFacts,
    incarnation: Incarnation,
    drain: Option<DrainNote>,
}

/// The fields behind them; none in a note of an older version.
#[derive(Deserialize)]
struct ReplicaTail {
    owner: Option<Arc<str>>,
    has_beaten: bool,
    more: MoreFacts,
}

/// What facts say that older ones did not: behind the note, not within.
#[derive(Default, Serialize, Deserialize)]
struct MoreFacts {
    engine_start: Option<String>,
    more_follow: bool,
}

fn more(facts: &ReplicaFacts) -> MoreFacts {
    MoreFacts {
        engine_start: facts.engine_start.clone(),
        more_follow: facts.capabilities.more_follow,
    }
}

fn replica(bytes: &[u8]) -> Result<ReplicaNote, Damaged> {
    let read = postcard::take_from_bytes::<(ReplicaId, ReplicaHead)>(bytes);
    let ((_, mut head), rest) = read.map_err(|_| Damaged)?;
    let tail = if rest.is_empty() {
        ReplicaTail {
            owner: None,
            has_beaten: true,
            more: MoreFacts::default(),
        }
    } else {
        postcard::from_bytes(rest).map_err(|_| Damaged)?
    };
    head.facts.engine_start = tail.more.engine_start;
    head.facts.capabilities.more_follow = tail.more.more_follow;
    Ok(ReplicaNote {
        facts: head.facts,
        incarnation: head.incarnation,
        drain: head.drain,
        owner: tail.owner,
        has_beaten: tail.has_beaten,
    })
}

fn whole(parts: &[(Vec<u8>, Vec<u8>)]) -> Result<Vec<u8>, Damaged> {
    let mut bytes = Vec::new();
    let mut first = None;
    for (key, value) in parts {
        let body = frame::decode(Kind::Note, key, value)?;
        let (head, rest): (PartHead, &[u8]) =
            postcard::take_from_bytes(body).map_err(|_| Damaged)?;
        if *first.get_or_insert(head) != head {
            return Err(Damaged);
        }
        bytes.extend_from_slice(rest);
    }
    let sound = first.is_some_and(|head| {
        usize::from(head.parts) == parts.len() && head.crc == crc32c::crc32c(&bytes)
    });
    if sound { Ok(bytes) } else { Err(Damaged) }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        time::{Duration, SystemTime},
    };

    use super::*;
    use crate::{call::LogprobMode, fleet::facts::tests::plain};

    fn note() -> ReplicaNote {
        let facts = ReplicaFacts {
            ranks: Vec::new(),
            logprob_mode: LogprobMode::Raw,
            labels: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
            engine_start: Some("s1".to_owned()),
            ..plain("a", "boot")
        };
        ReplicaNote {
            facts,
            incarnation: Incarnation(7),
            drain: Some(DrainNote {
                until: SystemTime::UNIX_EPOCH + Duration::from_secs(9),
                hold: true,
            }),
            owner: Some("sidecars".into()),
            has_beaten: false,
        }
    }

    #[test]
    fn a_replicas_note_comes_back_and_part_of_what_was_added_is_damage() {
        let note = note();
        let bytes = postcard::to_stdvec(&(&note.facts.id, &note, more(&note.facts))).unwrap();
        assert_eq!(replica(&bytes), Ok(note.clone()));
        // An owner and a start, their lengths before them, and two truths.
        let added = 1 + 1 + "sidecars".len() + 1 + 1 + 1 + "s1".len() + 1;
        for cut in 1..added {
            assert_eq!(replica(&bytes[..bytes.len() - cut]), Err(Damaged), "{cut}");
        }
        let older = replica(&bytes[..bytes.len() - added]).unwrap();
        assert_eq!((older.owner, older.has_beaten), (None, true));
    }

    #[test]
    fn a_note_without_what_was_added_later_is_read() {
        let note = note();
        // As it was written before there were owners.
        let old = (&note.facts.id, (&note.facts, note.incarnation, note.drain));
        let read = replica(&postcard::to_stdvec(&old).unwrap()).unwrap();
        let expected = ReplicaNote {
            facts: ReplicaFacts {
                engine_start: None,
                ..note.facts
            },
            owner: None,
            has_beaten: true,
            ..note
        };
        assert_eq!(read, expected);
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing {
    use super::*;
    use crate::fuzzing::Feed;

    /// Notes whose parts have these bodies, under good checksums of the parts.
    pub(in super::super) fn recalled(kind: NoteKind, mut feed: Feed<'_>) {
        let id = match kind {
            NoteKind::Pin | NoteKind::Condemned => vec![feed.byte(); 16],
            NoteKind::Replica => vec![feed.byte(); 32],
        };
        let key = NoteKey::new(kind, id);
        let note = feed.piece();
        let mut writes = Writes::default();
        let mut parts: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        if put_parts(&key, note, &mut writes).is_ok() {
            let put = writes.into_inner().into_iter();
            parts.extend(put.filter_map(|(key, value)| Some((key, value?))));
        }
        let read: Vec<_> = parts.clone();
        if !read.is_empty() {
            assert!(whole(&read).is_ok_and(|bytes| bytes == note));
        }
        // And parts that nobody put there.
        while !feed.0.is_empty() {
            let place = key.part(parts.len());
            if let Ok(value) = frame::encode(Kind::Note, &place, feed.piece()) {
                parts.push((place, value));
            }
        }
        let mut recalled = Recalled::default();
        let damaged = add(&mut recalled, kind, &parts);
        let whole = recalled.pins.len() + recalled.replicas.len() + recalled.condemned.len();
        assert!(whole as u64 + damaged <= parts.len() as u64);
    }
}
