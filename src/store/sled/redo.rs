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
        return Ok(Replay::default());
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
    Ok(Replay {
        store,
        writes,
        missing,
        resume: Some(end).filter(|_| missing == 0),
        next: last + 1,
    })
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: u64 = 64 << 10;

    fn change(n: u64, len: usize) -> Write {
        let value = (!n.is_multiple_of(5)).then(|| vec![(n % 251) as u8; len]);
        (n.to_be_bytes().to_vec(), value)
    }

    /// A log as the committer drives it, and what sled has of it.
    struct Driven {
        dir: tempfile::TempDir,
        redo: Redo,
        /// Every change that was synced.
        told: Vec<Write>,
        /// So many of them sled durably holds.
        moved: usize,
        /// So many of them were told when the half was left.
        left: usize,
    }

    impl Driven {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let redo = Redo::open(&dir.path().join("redo"), &Replay::default(), 7, BYTES).unwrap();
            Self {
                dir,
                redo,
                told: Vec::new(),
                moved: 0,
                left: 0,
            }
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("redo")
        }

        fn end_move(&mut self) {
            self.redo.moved();
            self.moved = self.left;
        }

        fn write(&mut self, len: usize) {
            let frame = [change(self.told.len() as u64, len)];
            if !self.redo.has_room(&frame) {
                self.end_move();
                self.redo.switch().unwrap();
                self.left = self.told.len();
            }
            self.redo.append(&frame).unwrap();
            self.redo.sync().unwrap();
            self.told.extend(frame);
        }

        /// What is found must be the newest changes, and all that sled lacks.
        fn check(&self) -> Replay {
            let found = look(&self.path()).unwrap();
            assert_eq!(found.missing, 0);
            assert!(self.told.ends_with(&found.writes));
            assert!(self.told.len() - found.writes.len() <= self.moved);
            found
        }

        fn reopen(&mut self) {
            let found = self.check();
            self.moved = self.told.len();
            self.left = self.told.len();
            self.redo = Redo::open(&self.path(), &found, 7, BYTES).unwrap();
        }
    }

    #[derive(Clone, Debug)]
    enum Act {
        Write(usize),
        Moved,
        Reopen,
        Close,
        /// A frame that was not synced, of which these sectors arrive.
        Torn(usize, u64),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            12 => (0usize..9000).prop_map(Act::Write),
            2 => Just(Act::Moved),
            1 => Just(Act::Reopen),
            1 => Just(Act::Close),
            2 => (0usize..9000, any::<u64>()).prop_map(|(len, part)| Act::Torn(len, part)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn what_sled_lacks_is_found_whatever_was_torn(acts in prop::collection::vec(act(), 1..90)) {
            let mut log = Driven::new();
            for act in acts {
                match act {
                    Act::Write(len) => log.write(len),
                    Act::Moved => log.end_move(),
                    Act::Reopen => log.reopen(),
                    Act::Close => {
                        log.redo.moved_all().unwrap();
                        log.moved = log.told.len();
                        log.left = log.told.len();
                        prop_assert!(look(&log.path()).unwrap().writes.is_empty());
                        log.reopen();
                    }
                    Act::Torn(len, part) => {
                        let frame = [change(log.told.len() as u64, len)];
                        if !log.redo.has_room(&frame) {
                            log.end_move();
                            log.redo.switch().unwrap();
                            log.left = log.told.len();
                        }
                        let before = fs::read(log.path()).unwrap();
                        log.redo.append(&frame).unwrap();
                        let mut bytes = fs::read(log.path()).unwrap();
                        for (i, sector) in bytes.chunks_mut(SECTOR).enumerate() {
                            if part >> (i % 64) & 1 == 0 {
                                sector.copy_from_slice(&before[i * SECTOR..][..SECTOR]);
                            }
                        }
                        fs::write(log.path(), bytes).unwrap();
                        // It may be whole by chance, though nobody was told, or one
                        // that was torn at the same place before may be.
                        let found = look(&log.path()).unwrap();
                        if let Some(last) = found.writes.last()
                            && last.0 == frame[0].0
                        {
                            log.told.push(last.clone());
                        }
                        log.reopen();
                    }
                }
                log.check();
            }
        }
    }

    #[test]
    fn a_damaged_frame_that_is_needed_is_missed() {
        let mut log = Driven::new();
        for n in 1..5 {
            log.redo.append(&[change(n, 700)]).unwrap();
            log.redo.sync().unwrap();
        }
        let path = log.path();
        let good = fs::read(&path).unwrap();
        // The first frame has no changes; those after it take two sectors each.
        let len = HEADER + 8 + 8 + 700;
        for frame in 0..4 {
            for at in (0..len).step_by(41) {
                let mut bad = good.clone();
                bad[SECTOR + frame * 2 * SECTOR + at] ^= 4;
                fs::write(&path, &bad).unwrap();
                let found = look(&path).unwrap();
                // The last one: the high-water file tells that it is not there.
                let missing = u64::from(frame < 3);
                let what = (found.missing, found.writes.len());
                assert_eq!(what, (missing, 3), "frame {frame}, byte {at}");
                let again = Redo::open(&path, &found, 7, BYTES).unwrap();
                assert!(again.next > 4);
            }
        }
    }

    #[test]
    fn another_stores_log_and_another_size_are_replaced() {
        let mut log = Driven::new();
        log.write(100);
        let path = log.path();
        for (store, bytes) in [(8, BYTES), (7, 2 * BYTES)] {
            let found = look(&path).unwrap();
            let mut redo = Redo::open(&path, &found, store, bytes).unwrap();
            redo.append(&[change(1, 10)]).unwrap();
            redo.sync().unwrap();
            let found = look(&path).unwrap();
            assert_eq!((found.store, found.missing), (store, 0));
            assert_eq!(found.writes, [change(1, 10)]);
            assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
        }
    }

    #[test]
    fn the_largest_change_fits_a_frame_of_the_smallest_log() {
        let mut redo = Driven::new().redo;
        let largest = (vec![1; 64], Some(vec![2; 4096]));
        let many = vec![largest; 20];
        assert_eq!(redo.fitting(&many), 3);
        assert!(redo.has_room(&many[..3]));
        redo.append(&many[..3]).unwrap();
    }
}
