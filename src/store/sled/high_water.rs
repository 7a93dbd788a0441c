//! A small file beside sled's directory that says which store this is and up to
//! which sequence number it has acknowledged. A store that was emptied, rolled
//! back or exchanged contradicts it.
//!
//! Two slots, each in a disk sector of its own, are written in turn, so that a
//! torn or damaged one leaves the other. A mark is written after the records
//! below it are durable and before they are acknowledged: it never claims more
//! than the disk holds, and after a crash of the process it is exact. It is
//! synced every second and on closing, so after a power loss it may lag.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::disk::sync_dir;

const MAGIC: [u8; 8] = *b"berthHW1";
const SLOT: usize = 512;
const LEN: usize = 8 + 5 * 8 + 4;

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Which of the two slots is newer.
    pub(super) turn: u64,
    /// Random, of one store.
    pub(super) store: u64,
    /// Changes when the store declares a loss.
    pub(super) epoch: u64,
    /// No incarnation up to this one is given any more: earlier ones may have
    /// been forgotten.
    pub(super) incarnation_floor: u64,
    /// Every sequence number up to this one was acknowledged or is in a gap.
    pub(super) seq: u64,
}

impl Mark {
    fn encode(&self) -> [u8; LEN] {
        let mut slot = [0; LEN];
        let fields = [
            self.turn,
            self.store,
            self.epoch,
            self.incarnation_floor,
            self.seq,
        ];
        let mut body: Vec<u8> = MAGIC.to_vec();
        for field in fields {
            body.extend_from_slice(&field.to_le_bytes());
        }
        body.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        slot.copy_from_slice(&body);
        slot
    }

    fn decode(slot: &[u8]) -> Option<Self> {
        let slot: &[u8; LEN] = slot.first_chunk()?;
        let (body, crc) = slot.split_at_checked(LEN - 4)?;
        if crc != crc32c::crc32c(body).to_le_bytes() {
            return None;
        }
        let body = body.strip_prefix(&MAGIC)?;
        let mut fields = body
            .chunks_exact(8)
            .filter_map(|f| f.try_into().ok().map(u64::from_le_bytes));
        Some(Self {
            turn: fields.next()?,
            store: fields.next()?,
            epoch: fields.next()?,
            incarnation_floor: fields.next()?,
            seq: fields.next()?,
        })
    }
}

/// What a look at the file finds.
#[derive(Debug)]
pub(super) enum Found {
    /// No file.
    Missing,
    /// A file without one good slot.
    Damaged,
    /// The newest good slot.
    Mark(Mark),
}

/// Looks at the file.
pub(super) fn look(path: &Path) -> io::Result<Found> {
    let bytes = match File::open(path) {
        Ok(file) => {
            let mut bytes = vec![0; 2 * SLOT];
            let mut len = 0;
            loop {
                match file.read_at(bytes.get_mut(len..).unwrap_or(&mut []), len as u64)? {
                    0 => break,
                    read => len += read,
                }
            }
            bytes
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found::Missing),
        Err(e) => return Err(e),
    };
    let newest = bytes
        .chunks(SLOT)
        .filter_map(Mark::decode)
        .max_by_key(|mark| mark.turn);
    Ok(newest.map_or(Found::Damaged, Found::Mark))
}

/// The file, open for writing.
#[derive(Debug)]
pub(super) struct HighWater {
    file: File,
    mark: Mark,
    dirty: bool,
}

impl HighWater {
    /// Writes a whole new file with this mark in both slots, durable before
    /// this returns, in place of an older one at once or not at all.
    pub(super) fn create(path: &Path, mark: Mark) -> io::Result<Self> {
        let next = PathBuf::from(format!("{}.next", path.display()));
        let mut bytes = vec![0; 2 * SLOT];
        for slot in bytes.chunks_mut(SLOT) {
            if let Some(head) = slot.first_chunk_mut() {
                *head = mark.encode();
            }
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&next)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        fs::rename(&next, path)?;
        sync_dir(path.parent().unwrap_or(Path::new(".")))?;
        Ok(Self {
            file,
            mark,
            dirty: false,
        })
    }

    /// Goes on with an existing file.
    pub(super) fn resume(path: &Path, mark: Mark) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Self {
            file,
            mark,
            dirty: false,
        })
    }

    /// What it says now.
    pub(super) fn mark(&self) -> Mark {
        self.mark
    }

    /// Says that everything up to `seq` is durable.
    pub(super) fn advance(&mut self, seq: u64) -> io::Result<()> {
        if seq <= self.mark.seq {
            return Ok(());
        }
        let mark = Mark {
            turn: self.mark.turn + 1,
            seq,
            ..self.mark
        };
        self.file
            .write_all_at(&mark.encode(), (mark.turn % 2) * SLOT as u64)?;
        self.mark = mark;
        self.dirty = true;
        Ok(())
    }

    /// Makes it survive a power loss.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        if self.dirty {
            self.file.sync_data()?;
            self.dirty = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(turn: u64, seq: u64) -> Mark {
        Mark {
            turn,
            store: 1,
            epoch: 2,
            incarnation_floor: 3,
            seq,
        }
    }

    #[test]
    fn any_one_damaged_byte_leaves_a_mark_at_most_one_step_old() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("high-water");
        assert!(matches!(look(&path).unwrap(), Found::Missing));
        let mut file = HighWater::create(&path, mark(0, 5)).unwrap();
        file.advance(9).unwrap();
        file.advance(12).unwrap();
        file.sync().unwrap();
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            fs::write(&path, &bad).unwrap();
            let Found::Mark(found) = look(&path).unwrap() else {
                panic!("byte {at}: no mark");
            };
            assert!(found.seq == 12 || found.seq == 9, "byte {at}: {found:?}");
        }
        fs::write(&path, b"").unwrap();
        assert!(matches!(look(&path).unwrap(), Found::Damaged));
    }

    #[test]
    fn a_mark_never_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("high-water");
        let mut file = HighWater::create(&path, mark(0, 5)).unwrap();
        file.advance(3).unwrap();
        assert_eq!(file.mark().seq, 5);
        let mut again = HighWater::resume(&path, file.mark()).unwrap();
        again.advance(6).unwrap();
        assert!(matches!(look(&path).unwrap(), Found::Mark(m) if m.seq == 6));
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing {
    use super::*;

    /// A slot with a good checksum.
    pub(in super::super) fn mark(fields: &[u8]) {
        let mut slot = MAGIC.to_vec();
        slot.extend_from_slice(fields.get(..40).unwrap_or_default());
        slot.extend_from_slice(&crc32c::crc32c(&slot).to_le_bytes());
        if let Some(mark) = Mark::decode(&slot) {
            assert_eq!(mark.encode().as_slice(), slot);
        }
        if let Some(mark) = Mark::decode(fields) {
            assert!(fields.starts_with(&mark.encode()));
        }
    }
}
