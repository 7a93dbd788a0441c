//! A map that holds at most so many entries: in a full one a new entry takes the
//! place of the least recently used of some, drawn at random.

use std::hash::Hash;

use indexmap::IndexMap;
use tokio::time::Instant;

/// Entries looked at for the least recently used one.
const SAMPLE: usize = 32;

/// When an entry was last used.
pub(super) trait Used {
    fn used(&self) -> Instant;
}

/// The map.
#[derive(Debug)]
pub(super) struct Bounded<K, V> {
    entries: IndexMap<K, V>,
    most: usize,
    draw: u64,
}

impl<K: Hash + Eq + Copy, V: Used> Bounded<K, V> {
    /// For at most so many entries, at least 1.
    pub(super) fn new(most: usize) -> Self {
        Self {
            entries: IndexMap::new(),
            most: most.max(1),
            draw: 0x9e37_79b9_7f4a_7c15,
        }
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        self.entries.swap_remove(key)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.most
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.entries.iter_mut()
    }

    /// Keeps those of which `keep` says so.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&V) -> bool) {
        self.entries.retain(|_, value| keep(value));
    }

    /// Returns what had to leave for it: another key's entry.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<K> {
        let leaves = (self.is_full() && !self.entries.contains_key(&key))
            .then(|| self.oldest_of_some())
            .flatten();
        if let Some(leaves) = &leaves {
            self.entries.swap_remove(leaves);
        }
        self.entries.insert(key, value);
        leaves
    }

    fn oldest_of_some(&mut self) -> Option<K> {
        let len = self.entries.len();
        let mut oldest: Option<(K, Instant)> = None;
        for _ in 0..SAMPLE {
            // Xorshift: who guesses it can have others' entries forgotten no sooner
            // than by filling the table.
            self.draw ^= self.draw << 13;
            self.draw ^= self.draw >> 7;
            self.draw ^= self.draw << 17;
            let at = usize::try_from(self.draw % (len as u64).max(1)).unwrap_or(0);
            if let Some((key, value)) = self.entries.get_index(at)
                && oldest.is_none_or(|(_, used)| value.used() < used)
            {
                oldest = Some((*key, value.used()));
            }
        }
        oldest.map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct At(Instant);

    impl Used for At {
        fn used(&self) -> Instant {
            self.0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_long_unused_leaves_wherever_it_lies() {
        let start = Instant::now();
        let at = |seconds: u64| At(start + Duration::from_secs(seconds));
        let mut map = Bounded::new(1000);
        for key in 0..1000u64 {
            assert_eq!(map.insert(key, at(key)), None);
        }
        // As many again: of the older half nearly all go, of the newer nearly none.
        for key in 1000..1500 {
            assert!(map.insert(key, at(key)).is_some());
            assert_eq!(map.len(), 1000);
        }
        let left = |keys: std::ops::Range<u64>| keys.filter(|k| map.get(k).is_some()).count();
        assert!(left(0..500) < 100, "{}", left(0..500));
        assert_eq!(left(1000..1500), 500);
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_key_takes_no_other_place() {
        let mut map = Bounded::new(2);
        let now = Instant::now();
        assert_eq!(map.insert(1, At(now)), None);
        assert_eq!(map.insert(2, At(now)), None);
        assert_eq!(map.insert(2, At(now)), None);
        assert_eq!(map.len(), 2);
        assert!(map.remove(&1).is_some() && map.remove(&1).is_none());
    }
}
