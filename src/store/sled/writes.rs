//! Writes in their order, on their way to the disk.

use std::collections::BTreeMap;

/// One change of the tree. `None`: the key is removed.
pub(super) type Write = (Vec<u8>, Option<Vec<u8>>);

/// Changes by key: the last one of each.
pub(super) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// See the module. They take effect together, but where they are more than one
/// frame of the redo log holds, a crash may keep a first part of them: whoever
/// gathers them puts what is referred to before what refers to it.
#[derive(Debug, Default)]
pub(super) struct Writes(Vec<Write>);

impl Writes {
    pub(super) fn insert(&mut self, key: impl Into<Vec<u8>>, value: Vec<u8>) {
        self.0.push((key.into(), Some(value)));
    }

    pub(super) fn remove(&mut self, key: impl Into<Vec<u8>>) {
        self.0.push((key.into(), None));
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// With these gaps, in an order of which any first part may be kept: what is
    /// new is there before what it replaces is gone, and a number is retired
    /// before its record goes. No key is both written and removed.
    pub(super) fn in_order(self, gaps: Self, merged: Self) -> Self {
        let (mut writes, removed): (Vec<_>, Vec<_>) =
            self.0.into_iter().partition(|(_, value)| value.is_some());
        writes.extend(gaps.0);
        writes.extend(removed);
        writes.extend(merged.0);
        Self(writes)
    }

    pub(super) fn into_inner(self) -> Vec<Write> {
        self.0
    }

    /// For sled, which keeps the last change of each key.
    pub(super) fn into_batch(self) -> ::sled::Batch {
        let mut batch = ::sled::Batch::default();
        for (key, value) in self.0 {
            match value {
                Some(value) => batch.insert(key, value),
                None => batch.remove(key),
            }
        }
        batch
    }
}
