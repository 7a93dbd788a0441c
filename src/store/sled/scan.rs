//! One pass over the whole tree when the store is opened. It checks every
//! value, finds numbers of the dense sequence that are missing, and counts what
//! each tenant keeps. It changes nothing.

use std::collections::{BTreeMap, HashMap};

use super::{
    super::KeyHash,
    frame::{self, Damaged, Kind},
    known::{Known, head},
    layout::{self, Class, DueKey, RecordKey},
    record::{self, BodyRef, Fold, Identity, StoredReplica},
    sequence::Sequence,
};
use crate::{ids::Tenant, store::life::SampleState};

/// The most numbers that may lie between the low-water mark and the highest
/// record: beyond, a number is damage and not a place to look for holes.
const MAX_SPAN: u64 = 1 << 32;

/// What the pass found.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Gaps as stored, and the next number as the records say.
    pub(super) sequence: Sequence,
    /// Numbers that are neither there nor in a gap, as start and end.
    pub(super) holes: Vec<(u64, u64)>,
    pub(super) identity: Option<Identity>,
    pub(super) used: HashMap<Tenant, u64>,
    /// Where each replica's starts lie.
    pub(super) replicas: BTreeMap<u64, KeyHash>,
    /// Values that did not decode.
    pub(super) damaged: u64,
    /// Replicas whose starts did not decode: their incarnations are unknown.
    pub(super) damaged_replicas: u64,
    /// Batches of the redo log that are needed and unreadable.
    pub(super) redo_missing: u64,
    /// Remains of batches that were never acknowledged, or of expired keys.
    pub(super) leftovers: Vec<Vec<u8>>,
    /// Keys that would never be looked at for expiry.
    pub(super) without_due: Vec<KeyHash>,
    /// Keys that have any record, readable or not.
    pub(super) known: Known,
    records: u64,
}

impl Scan {
    /// Nothing is stored.
    pub(super) fn is_empty(&self) -> bool {
        self.records == 0 && self.identity.is_none() && self.sequence == Sequence::default()
    }

    /// Numbers missing in all.
    pub(super) fn missing(&self) -> u64 {
        self.holes.iter().map(|(start, end)| end - start).sum()
    }
}

/// Passes over the tree.
pub(super) fn scan(tree: &::sled::Tree) -> Result<Scan, ::sled::Error> {
    let mut scan = Scan::default();
    let mut present = Present::default();
    let mut due = Vec::new();
    let mut group: Option<Group> = None;
    let mut last = None;
    for item in tree.iter() {
        let (key, value) = item?;
        if key.starts_with(layout::RECORD) {
            if let Some(hash) = layout::hash_of(&key)
                && last != Some(hash)
            {
                last = Some(hash);
                scan.known.insert(hash);
            }
            let Some(place) = RecordKey::decode(&key) else {
                scan.damaged += 1;
                continue;
            };
            if scan.records == 0 {
                // Every due time was seen: they sort before.
                due.sort_unstable();
            }
            scan.records += 1;
            if scan.sequence.is_retired(place.seq) {
                // Its removal was not whole, or an old page came back.
                scan.leftovers.push(key.to_vec());
                continue;
            }
            if !present.set(place.seq, scan.sequence.low_water()) {
                scan.damaged += 1;
                continue;
            }
            if group.as_ref().is_none_or(|group| group.hash != place.hash) {
                if let Some(group) = group.take() {
                    group.close(&mut scan, &due);
                }
                group = Some(Group::new(place.hash));
            }
            if let Some(group) = &mut group {
                group.add(&mut scan, place, &key, &value);
            }
        } else if key.starts_with(layout::DUE) {
            match (DueKey::decode(&key), frame::decode(Kind::Due, &key, &value)) {
                (Some(place), Ok(_)) => due.push(head(place.hash)),
                _ => scan.leftovers.push(key.to_vec()),
            }
        } else if key.starts_with(layout::GAP) {
            let end = record::decode::<u64>(Kind::Gap, &key, &value);
            if let (Some(start), Ok(end)) = (layout::gap_start(&key), end) {
                scan.sequence.retire_range(start, end, &mut Vec::new());
                scan.sequence.raise(end);
            } else {
                // Its numbers show up as holes.
                scan.damaged += 1;
            }
        } else if key.starts_with(layout::NOTE) {
            // No record: what is damaged of it is passed over where it is read.
        } else if &key[..] == layout::IDENTITY {
            match record::decode(Kind::Identity, &key, &value) {
                Ok(identity) => scan.identity = Some(identity),
                Err(Damaged) => scan.damaged += 1,
            }
        } else {
            scan.damaged += 1;
        }
    }
    if let Some(group) = group {
        group.close(&mut scan, &due);
    }
    scan.sequence.raise(present.next());
    scan.holes = present.holes(&scan.sequence);
    Ok(scan)
}

/// One bit for each number from a base on.
#[derive(Debug, Default)]
struct Present {
    base: Option<u64>,
    words: Vec<u64>,
    next: u64,
}

impl Present {
    fn set(&mut self, seq: u64, low_water: u64) -> bool {
        let base = *self.base.get_or_insert(low_water);
        let Some(offset) = seq.checked_sub(base).filter(|offset| *offset < MAX_SPAN) else {
            return false;
        };
        let Ok(word) = usize::try_from(offset / 64) else {
            return false;
        };
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        if let Some(word) = self.words.get_mut(word) {
            *word |= 1 << (offset % 64);
        }
        self.next = self.next.max(seq + 1);
        true
    }

    fn has(&self, seq: u64) -> bool {
        let Some(offset) = self.base.and_then(|base| seq.checked_sub(base)) else {
            return false;
        };
        usize::try_from(offset / 64)
            .ok()
            .and_then(|word| self.words.get(word))
            .is_some_and(|word| word & (1 << (offset % 64)) != 0)
    }

    fn next(&self) -> u64 {
        self.next
    }

    fn holes(&self, sequence: &Sequence) -> Vec<(u64, u64)> {
        let mut holes: Vec<(u64, u64)> = Vec::new();
        let mut seq = sequence.low_water();
        while seq < sequence.next() {
            match sequence.gap_from(seq) {
                Some((start, end)) if start <= seq => {
                    seq = end;
                    continue;
                }
                _ => {}
            }
            if !self.has(seq) {
                match holes.last_mut() {
                    Some(last) if last.1 == seq => last.1 = seq + 1,
                    _ => holes.push((seq, seq + 1)),
                }
            }
            seq += 1;
        }
        holes
    }
}

/// The records of one hash.
#[derive(Debug)]
struct Group {
    hash: KeyHash,
    fold: Fold,
    /// An event did not decode or does not follow.
    damaged: bool,
    bytes: u64,
    /// Number and size.
    chunks: Vec<(u64, u64)>,
    is_replica: bool,
}

impl Group {
    fn new(hash: KeyHash) -> Self {
        Self {
            hash,
            fold: Fold::default(),
            damaged: false,
            bytes: 0,
            chunks: Vec::new(),
            is_replica: false,
        }
    }

    fn add(&mut self, scan: &mut Scan, place: RecordKey, key: &[u8], value: &[u8]) {
        self.bytes += charge(key, value);
        match place.class {
            Class::Event => {
                if !self.damaged && self.fold.add(key, value).is_err() {
                    self.damaged = true;
                    scan.damaged += 1;
                }
            }
            Class::Chunk => {
                self.chunks.push((place.seq, charge(key, value)));
                if frame::decode(Kind::Chunk, key, value).is_err() {
                    scan.damaged += 1;
                }
            }
            Class::Replica => {
                self.is_replica = true;
                match record::decode::<StoredReplica>(Kind::Replica, key, value) {
                    Ok(_) => {
                        scan.replicas.insert(place.seq, place.hash);
                    }
                    Err(Damaged) => {
                        scan.damaged += 1;
                        scan.damaged_replicas += 1;
                    }
                }
            }
        }
    }

    fn close(mut self, scan: &mut Scan, due: &[u64]) {
        if self.is_replica {
            return;
        }
        let bodies: Vec<BodyRef> = self.fold.record.as_ref().map_or_else(Vec::new, |record| {
            record
                .samples
                .iter()
                .filter_map(|sample| match sample {
                    SampleState::Done { result, .. } => Some(*result),
                    _ => None,
                })
                .collect()
        });
        if !self.damaged {
            for (seq, size) in &self.chunks {
                if !bodies.iter().any(|body| body.holds(*seq)) {
                    let place = RecordKey {
                        hash: self.hash,
                        class: Class::Chunk,
                        seq: *seq,
                    };
                    scan.leftovers.push(place.encode());
                    self.bytes -= size;
                }
            }
        }
        if let Some(record) = self.fold.record {
            *scan.used.entry(record.tenant).or_default() += self.bytes;
        }
        if due.binary_search(&head(self.hash)).is_err() {
            scan.without_due.push(self.hash);
        }
    }
}

/// What a tenant is charged for a record.
pub(super) fn charge(key: &[u8], value: &[u8]) -> u64 {
    (key.len() + value.len()) as u64
}
