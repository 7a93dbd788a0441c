//! Which keys the disk may hold, in memory, so that a key that nobody has used
//! costs no look at the tree: most claims are of such keys, and sled makes whoever
//! reads wait while it takes a batch.
//!
//! A key that is not in here is not on the disk. The converse need not hold: one
//! that is here is looked up. Eight bytes of its hash stand for a key; two keys
//! that share them are in here for good, so that the removal of one cannot hide
//! the other.

use std::collections::HashSet;

use super::super::KeyHash;

/// The most keys, at about 10 bytes each: 38 MB. With more, every key is looked up,
/// until the store is opened again.
const MOST: usize = (1 << 22) / 8 * 7;

/// See the module.
#[derive(Debug)]
pub(super) struct Known {
    /// `None`: too many.
    keys: Option<HashSet<u64>>,
    /// Heads that more than one key has, or had.
    shared: HashSet<u64>,
    most: usize,
}

impl Default for Known {
    fn default() -> Self {
        Self::bounded(MOST)
    }
}

impl Known {
    fn bounded(most: usize) -> Self {
        Self {
            keys: Some(HashSet::new()),
            shared: HashSet::new(),
            most,
        }
    }

    /// The disk holds it, or soon may. Told once for each key that comes.
    pub(super) fn insert(&mut self, key: KeyHash) {
        let Some(keys) = &mut self.keys else {
            return;
        };
        let head = head(key);
        if !keys.insert(head) {
            self.shared.insert(head);
        }
        if keys.len() > self.most {
            tracing::warn!(
                keys = keys.len(),
                "too many keys to be known in memory: each new one is looked up on the disk"
            );
            self.keys = None;
            self.shared = HashSet::new();
        }
    }

    /// The disk holds it no more.
    pub(super) fn remove(&mut self, key: KeyHash) {
        let head = head(key);
        if let Some(keys) = &mut self.keys
            && !self.shared.contains(&head)
        {
            keys.remove(&head);
        }
    }

    /// Whether the disk may hold it.
    pub(super) fn has(&self, key: KeyHash) -> bool {
        let keys = self.keys.as_ref();
        keys.is_none_or(|keys| keys.contains(&head(key)))
    }
}

/// The first eight bytes.
pub(super) fn head(key: KeyHash) -> u64 {
    key.0
        .first_chunk::<8>()
        .map_or(0, |head| u64::from_be_bytes(*head))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Few heads and few tails, so that heads are shared all the time.
    fn key(head: u8, tail: u8) -> KeyHash {
        let mut hash = [0; 32];
        (hash[0], hash[31]) = (head, tail);
        KeyHash(hash)
    }

    proptest! {
        #[test]
        fn no_key_on_the_disk_is_unknown(
            ops in prop::collection::vec((any::<bool>(), 0u8..4, 0u8..3), 0..200),
            most in 1usize..6,
        ) {
            let mut known = Known::bounded(most);
            let mut disk = HashSet::new();
            for (comes, head, tail) in ops {
                let key = key(head, tail);
                if comes && disk.insert(key) {
                    known.insert(key);
                } else if !comes && disk.remove(&key) {
                    known.remove(key);
                }
                prop_assert!(disk.iter().all(|key| known.has(*key)));
            }
        }
    }

    #[test]
    fn what_is_gone_is_unknown_again() {
        let mut known = Known::default();
        known.insert(key(1, 0));
        known.insert(key(2, 0));
        known.remove(key(1, 0));
        assert!(!known.has(key(1, 0)) && known.has(key(2, 0)) && !known.has(key(3, 0)));
    }

    #[test]
    fn too_many_keys_are_all_looked_up() {
        let mut known = Known::bounded(2);
        for number in 0..3 {
            known.insert(key(number, 0));
        }
        assert!(known.has(key(9, 0)));
    }
}
