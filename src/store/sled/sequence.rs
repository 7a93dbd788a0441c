//! The dense sequence: every record takes the next number, and a number that is
//! no longer in use lies in a gap that was written down. A number that is
//! neither in use nor in a gap is therefore a loss, and a scan finds it.
//!
//! Gaps merge. The first one begins at 0: its end is the low-water mark, which
//! moves as the oldest keys expire, so that the number of gaps stays below the
//! number of records.

use std::collections::BTreeMap;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    next: u64,
    /// Start to end, one past the last. Never empty, never touching.
    gaps: BTreeMap<u64, u64>,
}

/// A change of the gaps that must be written in the batch that makes it true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GapChange {
    Put { start: u64, end: u64 },
    Remove { start: u64 },
}

impl Default for Sequence {
    fn default() -> Self {
        Self {
            next: 1,
            gaps: BTreeMap::from([(0, 1)]),
        }
    }
}

impl Sequence {
    /// The next number, taken.
    pub(super) fn take(&mut self) -> u64 {
        let seq = self.next;
        self.next += 1;
        seq
    }

    /// The number that is taken next: every smaller one was taken.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Every smaller number is out of use.
    pub(super) fn low_water(&self) -> u64 {
        self.gaps.get(&0).copied().unwrap_or(0)
    }

    /// Ranges out of use.
    pub(super) fn gap_count(&self) -> usize {
        self.gaps.len()
    }

    /// Whether this number is known to be out of use.
    pub(super) fn is_retired(&self, seq: u64) -> bool {
        self.gaps
            .range(..=seq)
            .next_back()
            .is_some_and(|(_, end)| seq < *end)
    }

    /// The gap at or after `seq`, for a scan.
    pub(super) fn gap_from(&self, seq: u64) -> Option<(u64, u64)> {
        self.gaps
            .range(..=seq)
            .next_back()
            .filter(|(_, end)| **end > seq)
            .or_else(|| self.gaps.range(seq..).next())
            .map(|(start, end)| (*start, *end))
    }

    /// At least this number comes next.
    pub(super) fn raise(&mut self, next: u64) {
        self.next = self.next.max(next);
    }

    /// Takes numbers out of use and says what to write. Numbers may repeat.
    pub(super) fn retire(&mut self, mut seqs: Vec<u64>) -> Vec<GapChange> {
        seqs.sort_unstable();
        let mut changes = Vec::new();
        let mut seqs = seqs.into_iter().peekable();
        while let Some(start) = seqs.next() {
            let mut end = start.saturating_add(1);
            while let Some(seq) = seqs.next_if(|seq| *seq <= end) {
                end = end.max(seq.saturating_add(1));
            }
            self.retire_range(start, end, &mut changes);
        }
        changes
    }

    /// Takes `start..end` out of use.
    pub(super) fn retire_range(&mut self, start: u64, end: u64, changes: &mut Vec<GapChange>) {
        if start >= end {
            return;
        }
        // Every gap that overlaps or touches is taken into the new one. Ends grow
        // with starts, so those are the last ones that begin by `end`.
        let touching: Vec<(u64, u64)> = self
            .gaps
            .range(..=end)
            .rev()
            .take_while(|(_, gap_end)| **gap_end >= start)
            .map(|(gap_start, gap_end)| (*gap_start, *gap_end))
            .collect();
        let first = touching.iter().fold(start, |first, gap| first.min(gap.0));
        let last = touching.iter().fold(end, |last, gap| last.max(gap.1));
        if self.gaps.get(&first) == Some(&last) {
            return;
        }
        for (gap_start, _) in touching {
            self.gaps.remove(&gap_start);
            if gap_start != first {
                changes.push(GapChange::Remove { start: gap_start });
            }
        }
        self.gaps.insert(first, last);
        changes.push(GapChange::Put {
            start: first,
            end: last,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain set; and what is written gives the same gaps again.
        #[test]
        fn gaps_are_the_retired_numbers_merged(rounds in prop::collection::vec(
            prop::collection::vec(1u64..60, 0..12), 0..12,
        )) {
            let mut sequence = Sequence::default();
            sequence.raise(60);
            let mut set = BTreeSet::from([0u64]);
            let mut disk = BTreeMap::from([(0u64, 1u64)]);
            for round in rounds {
                set.extend(&round);
                for change in sequence.retire(round) {
                    match change {
                        GapChange::Put { start, end } => disk.insert(start, end),
                        GapChange::Remove { start } => disk.remove(&start),
                    };
                }
                for seq in 0..60 {
                    prop_assert_eq!(sequence.is_retired(seq), set.contains(&seq));
                }
                let low = (0..).find(|seq| !set.contains(seq)).unwrap();
                prop_assert_eq!(sequence.low_water(), low);
                prop_assert_eq!(&disk, &sequence.gaps);
                let touching = disk.iter().zip(disk.iter().skip(1)).any(|(a, b)| a.1 >= b.0);
                prop_assert!(!touching, "{:?}", disk);
            }
        }
    }

    #[test]
    fn an_orderly_expiry_leaves_one_gap() {
        let mut sequence = Sequence::default();
        let taken: Vec<u64> = (0..100).map(|_| sequence.take()).collect();
        for seq in taken {
            sequence.retire(vec![seq]);
        }
        assert_eq!(sequence.low_water(), sequence.next());
        assert_eq!(sequence.gaps.len(), 1);
    }
}
