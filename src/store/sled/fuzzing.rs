//! What a disk may give back, its checksums made right so that what lies behind
//! them is reached. See `crate::fuzzing`.

#![allow(
    clippy::expect_used,
    reason = "a panic is how a fuzzer learns of a fault"
)]

use std::time::SystemTime;

use serde::{Serialize, de::DeserializeOwned};

use super::{
    super::{FinishedSample, KeyHash, life::MAX_SAMPLES, notes::PinNote, notes::ReplicaNote},
    frame::{self, Kind, MAX_BODY},
    high_water, layout,
    layout::{Class, DueKey, NoteKind, RecordKey},
    notes, record,
    record::{Fold, Identity, StoredEvent, StoredReplica},
    redo,
};
use crate::{fuzzing::Feed, ids::ReplicaId};

const KINDS: [Kind; 7] = [
    Kind::Event,
    Kind::Chunk,
    Kind::Replica,
    Kind::Gap,
    Kind::Due,
    Kind::Identity,
    Kind::Note,
];

/// A stored value, the redo log or the high-water mark.
pub fn records(data: &[u8]) {
    let mut feed = Feed(data);
    match feed.byte() % 8 {
        0 => events(feed),
        1 => {
            stable::<StoredEvent>(feed.0);
            stable::<StoredReplica>(feed.0);
            stable::<Identity>(feed.0);
        }
        2 => {
            if let Some(sample) = stable::<FinishedSample>(feed.0) {
                let len = sample.encoded_len().expect("its size");
                assert_eq!(len, bytes_of(&sample).len() as u64);
                let twice = [sample.clone(), sample];
                let whole = FinishedSample::assemble(SystemTime::UNIX_EPOCH, &twice);
                assert_eq!(whole.samples.len(), 2);
            }
        }
        3 => {
            stable::<PinNote>(feed.0);
            stable::<(ReplicaId, ReplicaNote)>(feed.0);
            stable::<SystemTime>(feed.0);
            notes::fuzzing::recalled(NoteKind::ALL[usize::from(feed.byte() % 3)], feed);
        }
        4 => keys(feed.0),
        5 => redo::fuzzing::log(feed),
        6 => high_water::fuzzing::mark(feed.0),
        _ => raw(feed),
    }
}

fn bytes_of<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("what was read can be written")
}

/// What is read is written so that it is read as the same.
fn stable<T: Serialize + DeserializeOwned>(body: &[u8]) -> Option<T> {
    let (value, _) = postcard::take_from_bytes::<T>(body).ok()?;
    let bytes = bytes_of(&value);
    let again: T = postcard::from_bytes(&bytes).expect("what was written can be read");
    assert_eq!(bytes_of(&again), bytes);
    Some(value)
}

/// A value comes back as it was.
pub(crate) fn comes_back<T>(value: &T)
where
    T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let again: T = postcard::from_bytes(&bytes_of(value)).expect("it can be read");
    assert_eq!(*value, again);
}

/// Bodies under good checksums fold into a life or are damage.
fn events(mut feed: Feed<'_>) {
    let mut fold = Fold::default();
    for seq in 0..16 {
        let body = feed.piece();
        let key = RecordKey {
            hash: KeyHash([7; 32]),
            class: Class::Event,
            seq,
        };
        let key = key.encode();
        let Ok(value) = frame::encode(Kind::Event, &key, body) else {
            assert!(body.len() > MAX_BODY);
            continue;
        };
        assert_eq!(frame::decode(Kind::Event, &key, &value), Ok(body));
        if let Ok((stored, inline)) = StoredEvent::decode(&key, &value) {
            let again = stored.encode(&key, inline).expect("it fitted");
            let (_, behind) = StoredEvent::decode(&key, &again).expect("it was written");
            assert_eq!(behind, inline);
        }
        let _ = record::bound(&key, &value);
        if fold.add(&key, &value).is_err() {
            break;
        }
    }
    if let Some(record) = &fold.record {
        assert!((1..=MAX_SAMPLES as usize).contains(&record.samples.len()));
        assert_eq!(record.last_attempts().len(), record.samples.len());
    }
}

fn keys(key: &[u8]) {
    if let Some(place) = RecordKey::decode(key) {
        assert_eq!(place.encode(), key);
    }
    if let Some(due) = DueKey::decode(key) {
        assert_eq!(due.encode(), key);
    }
    if let Some(start) = layout::gap_start(key) {
        assert_eq!(layout::gap_key(start), key);
    }
}

/// Under no checksum but what the bytes bring.
fn raw(mut feed: Feed<'_>) {
    let key = feed.piece();
    let value = feed.0;
    for kind in KINDS {
        if let Ok(body) = frame::decode(kind, key, value) {
            assert_eq!(frame::encode(kind, key, body).as_deref(), Ok(value));
        }
    }
    let _ = record::decode::<StoredReplica>(Kind::Replica, key, value);
}
