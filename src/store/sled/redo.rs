//! The redo log: every batch is durable here, with one append and one
//! fdatasync, before it is told. sled gets the same changes later and in larger
//! pieces; what it has not got when the process or the power goes is done again
//! when the store is opened.
//!
//! ```text
//! DIR/redo = two halves of equal size, written in turn
//! frame    = header, changes, zeros up to the next 512 bytes
//! header   = magic, store, number, floor, length, CRC32C of all of it
//! ```
//!
//! - Frames have consecutive numbers. A frame's floor is the oldest frame that
//!   sled was not known to hold when it was written. The last frame therefore
//!   says which ones are needed: all from its floor on. One of them missing is
//!   damage; anything else in the file is of no interest.
//! - Only the last frame can be torn, since each is synced before the next one
//!   is written. Whether it was acknowledged, the high-water file says.
//! - Before a half is written over, sled durably holds everything in it, and a
//!   frame with a floor that says so is durable in the other half.
//! - To do a change again that sled has already does no harm, even where later
//!   changes are there too: a record's key is never used twice, and a gap only
//!   grows (`replay`).

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::{disk::sync_dir, writes::Write};

const MAGIC: [u8; 8] = *b"berthRD1";
/// What disks write whole.
const SECTOR: usize = 512;
const HEADER: usize = 8 + 3 * 8 + 4 + 4;
/// Kept free at the end of each half, for a frame without changes.
const RESERVE: u64 = SECTOR as u64;
/// The smallest half: two of the largest changes fit.
const SMALLEST_HALF: u64 = 32 << 10;

/// What a look at the file finds.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Whose changes they are; 0 where there are none.
    pub(super) store: u64,
    /// Changes that sled may not hold, in their order.
    pub(super) writes: Vec<Write>,
    /// Frames that are needed are missing: how many.
    pub(super) missing: u64,
    /// Where the log goes on. `None`: it must be begun anew.
    resume: Option<Place>,
    /// Greater than every number in the file.
    next: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    at: u64,
    half: u64,
    /// It lies in the second half.
    second: bool,
    /// Of the last frame.
    floor: u64,
}

#[derive(Debug)]
struct Frame {
    at: u64,
    /// With the zeros behind it.
    len: u64,
    number: u64,
    floor: u64,
    store: u64,
    changes: Vec<Write>,
}

/// The log, open for writing.
#[derive(Debug)]
pub(super) struct Redo {
    file: File,
    /// Bytes of one half.
    half: u64,
    store: u64,
    /// The next frame's number.
    next: u64,
    /// The second half is written now.
    second: bool,
    /// Where the next frame begins.
    at: u64,
    /// The oldest frame that sled is not known to hold.
    floor: u64,
    /// What the last durable frame says about it.
    floor_on_disk: u64,
    /// The first frame in the half that is written now.
    half_begins: u64,
}

fn half_of(bytes: u64) -> u64 {
    (bytes / 2)
        .max(SMALLEST_HALF)
        .next_multiple_of(SECTOR as u64)
}

/// Bytes that a frame with these changes takes.
fn frame_len(changes: &[Write]) -> u64 {
    let bytes: usize = changes.iter().map(change_len).sum();
    (HEADER + bytes).next_multiple_of(SECTOR) as u64
}

fn change_len((key, value): &Write) -> usize {
    8 + key.len() + value.as_ref().map_or(0, Vec::len)
}

fn encode(store: u64, number: u64, floor: u64, changes: &[Write]) -> io::Result<Vec<u8>> {
    let len = frame_len(changes);
    let too_large = |_| io::Error::from(io::ErrorKind::FileTooLarge);
    let mut frame = Vec::with_capacity(usize::try_from(len).map_err(too_large)?);
    frame.extend_from_slice(&[0; HEADER]);
    for (key, value) in changes {
        let key_len = u32::try_from(key.len()).map_err(too_large)?;
        // 0: removed; else one more than the value's length.
        let value_len = match value {
            None => 0,
            Some(value) => u32::try_from(value.len() + 1).map_err(too_large)?,
        };
        frame.extend_from_slice(&key_len.to_le_bytes());
        frame.extend_from_slice(&value_len.to_le_bytes());
        frame.extend_from_slice(key);
        frame.extend_from_slice(value.as_deref().unwrap_or_default());
    }
    let payload = u32::try_from(frame.len() - HEADER).map_err(too_large)?;
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(&MAGIC);
    for field in [store, number, floor] {
        header.extend_from_slice(&field.to_le_bytes());
    }
    header.extend_from_slice(&payload.to_le_bytes());
    let changes = frame.get(HEADER..).unwrap_or_default();
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header), changes);
    header.extend_from_slice(&crc.to_le_bytes());
    if let Some(head) = frame.get_mut(..HEADER) {
        head.copy_from_slice(&header);
    }
    frame.resize(usize::try_from(len).map_err(too_large)?, 0);
    Ok(frame)
}

/// The frame that begins here, if one does.
fn decode(bytes: &[u8], at: u64) -> Option<Frame> {
    let (header, rest) = bytes.split_at_checked(HEADER)?;
    let (covered, crc) = header.split_at_checked(HEADER - 4)?;
    let fields = covered.strip_prefix(&MAGIC)?;
    let (numbers, len) = fields.split_at_checked(24)?;
    let mut numbers = numbers
        .chunks_exact(8)
        .filter_map(|f| f.try_into().ok().map(u64::from_le_bytes));
    let (store, number, floor) = (numbers.next()?, numbers.next()?, numbers.next()?);
    // None is the last: another follows.
    number.checked_add(1)?;
    let len = u32::from_le_bytes(len.try_into().ok()?) as usize;
    let payload = rest.get(..len)?;
    let expected = crc32c::crc32c_append(crc32c::crc32c(covered), payload);
    if crc != expected.to_le_bytes() {
        return None;
    }
    let mut changes = Vec::new();
    let mut left = payload;
    while !left.is_empty() {
        let (lens, tail) = left.split_first_chunk::<8>()?;
        let key_len = u32::from_le_bytes(*lens.first_chunk()?) as usize;
        let value_len = u32::from_le_bytes(*lens.last_chunk()?) as usize;
        let (key, tail) = tail.split_at_checked(key_len)?;
        let (value, tail) = tail.split_at_checked(value_len.saturating_sub(1))?;
        changes.push((key.to_vec(), (value_len > 0).then(|| value.to_vec())));
        left = tail;
    }
    let len = (HEADER + len).next_multiple_of(SECTOR) as u64;
    Some(Frame {
        at,
        len,
        number,
        floor,
        store,
        changes,
    })
}

/// Looks at the file.
pub(super) fn look(path: &Path) -> io::Result<Replay> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Replay::default()),
        Err(e) => return Err(e),
    };
    Ok(read(&bytes))
}

/// What these bytes of a whole file say.
fn read(bytes: &[u8]) -> Replay {
    let mut frames = BTreeMap::new();
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        let step = match decode(rest, at as u64) {
            Some(frame) => {
                let len = usize::try_from(frame.len).unwrap_or(SECTOR);
                frames.insert(frame.number, frame);
                len
            }
            None => SECTOR,
        };
        at = at.saturating_add(step);
    }
    let half = bytes.len() as u64 / 2;
    let Some((last, store, end)) = frames.last_key_value().map(|(number, last)| {
        let place = Place {
            at: last.at + last.len,
            half,
            second: last.at >= half,
            floor: last.floor,
        };
        (*number, last.store, place)
    }) else {
        return Replay::default();
    };
    let needed = frames.split_off(&end.floor);
    let missing = (last + 1)
        .saturating_sub(end.floor)
        .saturating_sub(needed.len() as u64);
    let writes = needed
        .into_values()
        .filter(|frame| frame.store == store)
        .flat_map(|frame| frame.changes)
        .collect();
    Replay {
        store,
        writes,
        missing,
        resume: Some(end).filter(|_| missing == 0),
        next: last + 1,
    }
}

impl Redo {
    /// Goes on with the file as `replay` describes it, or begins a new one in
    /// its place. sled durably holds everything that is in it. `bytes` is the
    /// size of both halves.
    pub(super) fn open(path: &Path, replay: &Replay, store: u64, bytes: u64) -> io::Result<Self> {
        let half = half_of(bytes);
        let next = replay.next.max(1);
        let fits = |place: &Place| place.half == half && replay.store == store;
        let Some(place) = replay.resume.filter(fits) else {
            return Self::create(path, replay, store, bytes);
        };
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut redo = Self {
            file,
            half,
            store,
            next,
            second: place.second,
            at: place.at,
            floor: next,
            floor_on_disk: place.floor,
            half_begins: next,
        };
        if !redo.has_reserve() {
            // The last frame took the reserve, so it is one that allows this.
            redo.turn();
        }
        redo.moved_all()?;
        Ok(redo)
    }

    /// None is wanted: removes the file, of which sled durably holds everything.
    pub(super) fn remove(path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Ok(()) => sync_dir(path.parent().unwrap_or(Path::new("."))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Begins a new file in place of the one that `replay` describes.
    pub(super) fn create(path: &Path, replay: &Replay, store: u64, bytes: u64) -> io::Result<Self> {
        let half = half_of(bytes);
        let next = replay.next.max(1);
        let new = PathBuf::from(format!("{}.next", path.display()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&new)?;
        // Written and not only reserved: a sync of blocks that are there already
        // changes no metadata.
        let zeros = vec![0; 1 << 16];
        let mut at = 0;
        while at < 2 * half {
            let len = (2 * half - at).min(zeros.len() as u64);
            let len = usize::try_from(len).unwrap_or(0);
            file.write_all_at(zeros.get(..len).unwrap_or_default(), at)?;
            at += len as u64;
        }
        file.sync_all()?;
        fs::rename(&new, path)?;
        sync_dir(path.parent().unwrap_or(Path::new(".")))?;
        let mut redo = Self {
            file,
            half,
            store,
            next,
            second: false,
            at: 0,
            floor: next,
            floor_on_disk: 0,
            half_begins: next,
        };
        redo.moved_all()?;
        Ok(redo)
    }

    /// The most changes, from the first on, that one frame takes. At least one.
    pub(super) fn fitting(&self, changes: &[Write]) -> usize {
        // Half of a half, so that no large frame wastes much of one.
        let most = usize::try_from(self.half / 2).unwrap_or(usize::MAX) - SECTOR;
        let mut bytes = HEADER;
        let fit = changes
            .iter()
            .take_while(|change| {
                bytes += change_len(change);
                bytes <= most
            })
            .count();
        fit.max(1).min(changes.len())
    }

    /// Whether these changes fit into the half that is written now.
    pub(super) fn has_room(&self, changes: &[Write]) -> bool {
        self.at + frame_len(changes) + RESERVE <= self.half_end()
    }

    /// Writes one frame, which is not durable before [`Self::sync`].
    pub(super) fn append(&mut self, changes: &[Write]) -> io::Result<()> {
        let frame = encode(self.store, self.next, self.floor, changes)?;
        if self.at + frame.len() as u64 > self.half_end() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.file.write_all_at(&frame, self.at)?;
        self.at += frame.len() as u64;
        self.next += 1;
        Ok(())
    }

    /// Makes what was appended durable.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        self.floor_on_disk = self.floor;
        Ok(())
    }

    /// sled durably holds everything before the half that is written now.
    pub(super) fn moved(&mut self) {
        self.floor = self.floor.max(self.half_begins);
    }

    /// sled durably holds everything; the disk says so.
    pub(super) fn moved_all(&mut self) -> io::Result<()> {
        self.floor = self.next;
        if self.floor_on_disk < self.next && self.has_reserve() {
            self.floor += 1;
            self.append(&[])?;
            self.sync()?;
        }
        Ok(())
    }

    /// Goes on in the other half, of which sled must durably hold everything
    /// ([`Self::moved`]); what is in the half that is left is to be moved now.
    pub(super) fn switch(&mut self) -> io::Result<()> {
        if self.floor_on_disk < self.half_begins {
            self.append(&[])?;
            self.sync()?;
        }
        self.turn();
        Ok(())
    }

    fn turn(&mut self) {
        self.second = !self.second;
        self.at = if self.second { self.half } else { 0 };
        self.half_begins = self.next;
    }

    fn has_reserve(&self) -> bool {
        self.at + RESERVE <= self.half_end()
    }

    fn half_end(&self) -> u64 {
        if self.second {
            2 * self.half
        } else {
            self.half
        }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests;

#[cfg(any(test, feature = "fuzzing"))]
pub(super) mod fuzzing {
    use super::*;
    use crate::fuzzing::Feed;

    /// A file of frames with good checksums, whatever they say, between other bytes.
    pub(in super::super) fn log(mut feed: Feed<'_>) {
        let mut file = Vec::new();
        while !feed.0.is_empty() {
            if feed.byte() == 0 {
                file.extend_from_slice(feed.piece());
                file.resize(file.len().next_multiple_of(SECTOR), 0);
                continue;
            }
            let at = file.len();
            file.extend_from_slice(&MAGIC);
            for field in [u64::from(feed.byte()), feed.number(), feed.number()] {
                file.extend_from_slice(&field.to_le_bytes());
            }
            let changes = feed.piece();
            let len = u32::try_from(changes.len()).unwrap_or(0);
            file.extend_from_slice(&len.to_le_bytes());
            let crc = crc32c::crc32c(file.get(at..).unwrap_or_default());
            let crc = crc32c::crc32c_append(crc, changes);
            file.extend_from_slice(&crc.to_le_bytes());
            file.extend_from_slice(changes);
            file.resize(file.len().next_multiple_of(SECTOR), 0);
            let frame = file.get(at..).unwrap_or_default();
            if let Some(read) = decode(frame, 0) {
                let again = encode(read.store, read.number, read.floor, &read.changes);
                assert!(again.is_ok_and(|bytes| bytes == frame));
            }
        }
        let replay = read(&file);
        assert!(replay.missing == 0 || replay.resume.is_none());
        assert!(replay.writes.is_empty() || replay.store < 256);
    }
}
