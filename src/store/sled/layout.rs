//! How keys are laid out in the one tree. All of it lies in the default tree,
//! so that one batch, which sled recovers whole or not at all, covers every
//! kind of record.
//!
//! | tree key | value |
//! |---|---|
//! | `m` | identity of the store |
//! | `e` due, key hash | the key is looked at for expiry at this time |
//! | `g` start | sequence numbers from start to the stored end are not in use |
//! | `n` kind, id, part | a piece of a note |
//! | `r` key hash, class, sequence number | one piece of a key's life |
//!
//! Numbers are big-endian, so that the tree's order is theirs.

use super::super::KeyHash;

/// The identity's key.
pub(super) const IDENTITY: &[u8] = b"m";
/// Before every due time.
pub(super) const DUE: &[u8] = b"e";
/// Before every gap.
pub(super) const GAP: &[u8] = b"g";
/// Before every note.
pub(super) const NOTE: &[u8] = b"n";
/// Before every record.
pub(super) const RECORD: &[u8] = b"r";

/// What a record of a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// An event of its life.
    Event = 0,
    /// A piece of a body that an event refers to.
    Chunk = 1,
    /// The starts of a replica: here the hash is that of its id.
    Replica = 2,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordKey {
    pub(super) hash: KeyHash,
    pub(super) class: Class,
    pub(super) seq: u64,
}

impl RecordKey {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut key = class_prefix(self.hash, self.class);
        key.extend_from_slice(&self.seq.to_be_bytes());
        key
    }

    pub(super) fn decode(key: &[u8]) -> Option<Self> {
        let rest = key.strip_prefix(RECORD)?;
        let (hash, rest) = rest.split_first_chunk::<32>()?;
        let (class, seq) = rest.split_first()?;
        let class = match class {
            0 => Class::Event,
            1 => Class::Chunk,
            2 => Class::Replica,
            _ => return None,
        };
        Some(Self {
            hash: KeyHash(*hash),
            class,
            seq: u64::from_be_bytes(seq.try_into().ok()?),
        })
    }
}

/// Whose record this is, also where the rest of it cannot be read.
pub(super) fn hash_of(record: &[u8]) -> Option<KeyHash> {
    let (hash, _) = record.strip_prefix(RECORD)?.split_first_chunk::<32>()?;
    Some(KeyHash(*hash))
}

/// Before every record of one key.
pub(super) fn key_prefix(hash: KeyHash) -> Vec<u8> {
    let mut prefix = Vec::with_capacity(1 + 32 + 1 + 8);
    prefix.extend_from_slice(RECORD);
    prefix.extend_from_slice(&hash.0);
    prefix
}

/// Before every record of one class of one key.
pub(super) fn class_prefix(hash: KeyHash, class: Class) -> Vec<u8> {
    let mut prefix = key_prefix(hash);
    prefix.push(class as u8);
    prefix
}

/// When a key is looked at, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DueKey {
    pub(super) at_ms: u64,
    pub(super) hash: KeyHash,
}

impl DueKey {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut key = Vec::with_capacity(1 + 8 + 32);
        key.extend_from_slice(DUE);
        key.extend_from_slice(&self.at_ms.to_be_bytes());
        key.extend_from_slice(&self.hash.0);
        key
    }

    pub(super) fn decode(key: &[u8]) -> Option<Self> {
        let rest = key.strip_prefix(DUE)?;
        let (at_ms, hash) = rest.split_first_chunk::<8>()?;
        Some(Self {
            at_ms: u64::from_be_bytes(*at_ms),
            hash: KeyHash(hash.try_into().ok()?),
        })
    }
}

/// What a note is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoteKind {
    Pin = 0,
    Replica = 1,
    Condemned = 2,
}

impl NoteKind {
    pub(super) const ALL: [Self; 3] = [Self::Pin, Self::Replica, Self::Condemned];
}

/// Where a note lies; its parts lie behind each other. All ids of one kind are of
/// one length.
#[derive(Clone, Debug)]
pub(super) struct NoteKey(Vec<u8>);

impl NoteKey {
    pub(super) fn new(kind: NoteKind, id: Vec<u8>) -> Self {
        let mut key = Self::first(kind);
        key.extend(id);
        Self(key)
    }

    pub(super) fn part(&self, part: usize) -> Vec<u8> {
        let mut key = self.0.clone();
        key.extend_from_slice(&u16::try_from(part).unwrap_or(u16::MAX).to_be_bytes());
        key
    }

    /// Before every part.
    pub(super) fn prefix(&self) -> Vec<u8> {
        self.0.clone()
    }

    /// Before every note of a kind.
    pub(super) fn first(kind: NoteKind) -> Vec<u8> {
        let mut key = NOTE.to_vec();
        key.push(kind as u8);
        key
    }

    /// After every note of a kind.
    pub(super) fn end(kind: NoteKind) -> Vec<u8> {
        let mut key = NOTE.to_vec();
        key.push(kind as u8 + 1);
        key
    }

    /// The note that this part belongs to.
    pub(super) fn start_of(part: &[u8]) -> Vec<u8> {
        part.get(..part.len().saturating_sub(2))
            .unwrap_or_default()
            .to_vec()
    }

    /// The id in a part's key.
    pub(super) fn id(part: &[u8]) -> &[u8] {
        part.get(2..part.len().saturating_sub(2))
            .unwrap_or_default()
    }
}

/// The key of the gap that begins here.
pub(super) fn gap_key(start: u64) -> Vec<u8> {
    let mut key = GAP.to_vec();
    key.extend_from_slice(&start.to_be_bytes());
    key
}

/// Where the gap under this key begins.
pub(super) fn gap_start(key: &[u8]) -> Option<u64> {
    let start = key.strip_prefix(GAP)?;
    Some(u64::from_be_bytes(start.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_back_and_sort_by_their_numbers() {
        let hash = KeyHash([9; 32]);
        let key = |class, seq| RecordKey { hash, class, seq };
        for class in [Class::Event, Class::Chunk, Class::Replica] {
            let one = key(class, 255);
            assert_eq!(RecordKey::decode(&one.encode()), Some(one));
            assert!(one.encode() < key(class, 256).encode());
            assert!(one.encode().starts_with(&class_prefix(hash, class)));
        }
        let due = DueKey { at_ms: 255, hash };
        assert_eq!(DueKey::decode(&due.encode()), Some(due));
        assert_eq!(gap_start(&gap_key(77)), Some(77));
        assert_eq!(RecordKey::decode(b"r"), None);
        assert_eq!(DueKey::decode(b"e"), None);
    }
}
