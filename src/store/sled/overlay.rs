//! What the redo log holds and sled does not yet: changes lie over the tree
//! until they are in it. Whoever reads looks here first.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, PoisonError, RwLock},
};

use super::writes::{Changes, Write};

/// Keys with their values, in order.
type Entries = Vec<(Vec<u8>, Vec<u8>)>;

/// See the module. Two layers: `fresh` takes what is written now, `moving` is on
/// its way into sled and changes no more.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    fresh: Changes,
    moving: Arc<Changes>,
}

impl Overlay {
    pub(super) fn extend(&mut self, writes: impl IntoIterator<Item = Write>) {
        self.fresh.extend(writes);
    }

    /// Everything so far, to be moved into sled. The layer before must be gone.
    pub(super) fn begin_move(&mut self) -> Arc<Changes> {
        self.moving = Arc::new(std::mem::take(&mut self.fresh));
        Arc::clone(&self.moving)
    }

    /// sled has what was moving.
    pub(super) fn end_move(&mut self) {
        self.moving = Arc::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.fresh.is_empty()
    }

    /// What it says of one key: nothing, or removed, or its value.
    fn get(&self, key: &[u8]) -> Option<&Option<Vec<u8>>> {
        self.fresh.get(key).or_else(|| self.moving.get(key))
    }

    fn range(&self, from: &[u8], to: Bound<&[u8]>) -> Changes {
        let range = (Bound::Included(from), to);
        let older = self.moving.range::<[u8], _>(range);
        let mut changes: Changes = older.map(|(k, v)| (k.clone(), v.clone())).collect();
        let newer = self.fresh.range::<[u8], _>(range);
        changes.extend(newer.map(|(k, v)| (k.clone(), v.clone())));
        changes
    }
}

/// The tree as it would be if sled held all that is durable.
pub(super) struct View<'a> {
    pub(super) tree: &'a ::sled::Tree,
    pub(super) overlay: &'a RwLock<Overlay>,
}

impl View<'_> {
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ::sled::Error> {
        // First here: what is not here any more is in sled by now.
        let here = self
            .overlay
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned();
        match here {
            Some(value) => Ok(value),
            None => Ok(self.tree.get(key)?.map(|value| value.to_vec())),
        }
    }

    /// At most `limit` of the keys from `from` on that lie before `end`, which
    /// none begins with the whole of, with their values.
    pub(super) fn range(
        &self,
        from: &[u8],
        end: &[u8],
        limit: usize,
    ) -> Result<Entries, ::sled::Error> {
        let to = Bound::Excluded(end);
        let mut merged = BTreeMap::new();
        let over = self
            .overlay
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .range(from, to);
        // Each change may hide one key of the tree.
        let most = limit.saturating_add(over.len());
        let tree = self.tree.range::<&[u8], _>((Bound::Included(from), to));
        for item in tree.take(most) {
            let (key, value) = item?;
            merged.insert(key.to_vec(), Some(value.to_vec()));
        }
        merged.extend(over);
        let kept = merged.into_iter().filter_map(|(k, v)| Some((k, v?)));
        Ok(kept.take(limit).collect())
    }

    /// Every key that begins so, with its value.
    pub(super) fn prefix(&self, prefix: &[u8]) -> Result<Entries, ::sled::Error> {
        self.range(prefix, &after(prefix), usize::MAX)
    }
}

/// The first key after all that begin so.
fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if let Some(next) = last.checked_add(1) {
            end.push(next);
            return end;
        }
    }
    // Nothing is after it; no prefix of ours is like that.
    vec![0xff; 64]
}
