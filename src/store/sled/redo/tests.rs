//! The log against a model of it, torn and damaged.

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
