//! What fuzzers feed (`fuzz/`): each function takes any bytes, and panics where a
//! promise of Berth does not hold for them. Seeds and findings are fed by a test
//! below, so that what was found once stays found.

pub use crate::{
    api::fuzzing::{addresses, messages},
    config::fuzzing::config,
    engine::fuzzing::replies,
    store::sled::fuzzing::records,
};

/// A function for a fuzzer.
pub type Target = fn(&[u8]);

/// All of them, by their names in `fuzz/`.
pub const TARGETS: [(&str, Target); 5] = [
    ("addresses", addresses),
    ("config", config),
    ("messages", messages),
    ("records", records),
    ("replies", replies),
];

/// Choices taken from the front of the bytes; 0 once there are none left.
pub(crate) struct Feed<'a>(pub(crate) &'a [u8]);

impl<'a> Feed<'a> {
    pub(crate) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub(crate) fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        let taken = self.take(8);
        bytes[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(bytes)
    }

    /// So many bytes, or fewer.
    pub(crate) fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A piece whose length stands in two bytes before it.
    pub(crate) fn piece(&mut self) -> &'a [u8] {
        let len = u16::from_le_bytes([self.byte(), self.byte()]);
        self.take(usize::from(len))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use proptest::prelude::*;

    use super::*;

    fn fed(name: &str, folder: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz")
            .join(folder)
            .join(name);
        let Ok(files) = fs::read_dir(&folder) else {
            return Vec::new();
        };
        let mut fed: Vec<_> = files
            .map(|file| file.unwrap().path())
            .map(|path| (path.clone(), fs::read(path).unwrap()))
            .collect();
        fed.sort();
        fed
    }

    /// Names the file that a panic is about: the panic's own message follows.
    struct Now(PathBuf);

    impl Drop for Now {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("fed with {}", self.0.display());
            }
        }
    }

    #[test]
    fn every_seed_and_every_finding_passes() {
        for (name, target) in TARGETS {
            let seeds = fed(name, "seeds");
            assert!(seeds.len() >= 3, "{name} has {} seeds", seeds.len());
            for (path, bytes) in seeds.into_iter().chain(fed(name, "findings")) {
                let now = Now(path);
                target(&bytes);
                drop(now);
            }
        }
    }

    #[test]
    fn seeds_that_are_a_little_broken_pass_too() {
        for (name, target) in TARGETS {
            for (path, bytes) in fed(name, "seeds") {
                let now = Now(path);
                let step = (bytes.len() / 64).max(1);
                for at in (0..bytes.len()).step_by(step) {
                    target(&bytes[..at]);
                    let mut flipped = bytes.clone();
                    flipped[at] ^= 1 << (at % 8);
                    target(&flipped);
                    let mut twice = bytes.clone();
                    twice.extend_from_within(at..);
                    target(&twice);
                }
                drop(now);
            }
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_pass(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
        }
    }
}
