//! Moves changes into sled, and makes them durable there.

use std::{
    collections::BTreeMap,
    fs::File,
    sync::Arc,
    thread::{Builder, JoinHandle},
};

use super::{
    apply::apply,
    fault::{Fault, guarded},
    frame::Kind,
    layout, record,
    sequence::Sequence,
    writes::{Changes, Write},
};

/// What sled gets between two syncs. Once it has written over segments whose
/// contents moved, a power loss may cost what was moved and not synced; with
/// small steps there is little of either.
const STEP_BYTES: usize = 256 << 10;

/// Changes that are being moved.
#[derive(Debug)]
pub(super) struct Mover(JoinHandle<Result<(), Fault>>);

impl Mover {
    /// Begins, on a thread of its own.
    pub(super) fn start(
        db: ::sled::Db,
        log: Arc<File>,
        changes: Arc<Changes>,
    ) -> Result<Self, Fault> {
        let work = move || {
            let writes = changes.iter().map(|(k, v)| (k.as_slice(), v.as_deref()));
            put_all(&db, &log, writes)
        };
        let thread = Builder::new().name("store-mover".into()).spawn(work);
        thread.map(Self).map_err(Fault::from)
    }

    pub(super) fn is_done(&self) -> bool {
        self.0.is_finished()
    }

    pub(super) fn wait(self) -> Result<(), Fault> {
        self.0
            .join()
            .unwrap_or_else(|_| Err(Fault::Corrupt("moving into sled panicked".into())))
    }
}

/// Puts these changes into sled, durable before this returns.
fn put_all<'a>(
    db: &::sled::Tree,
    log: &File,
    changes: impl IntoIterator<Item = (&'a [u8], Option<&'a [u8]>)>,
) -> Result<(), Fault> {
    let mut changes = changes.into_iter().peekable();
    while changes.peek().is_some() {
        let mut batch = ::sled::Batch::default();
        let (mut bytes, mut writes) = (0, 0);
        while bytes < STEP_BYTES
            && let Some((key, value)) = changes.next()
        {
            bytes += key.len() + value.map_or(0, <[u8]>::len);
            writes += 1;
            match value {
                Some(value) => batch.insert(key, value),
                None => batch.remove(key),
            }
        }
        guarded(|| apply(db, batch, writes))?;
        log.sync_data().map_err(Fault::of_sync)?;
    }
    Ok(())
}

/// Does again what the redo log says, which sled may hold in part, or hold
/// already together with later changes. The only keys that are written more
/// than once are those of gaps, and a gap only grows: an older form of one that
/// sled knows is passed over.
pub(super) fn replay(db: &::sled::Tree, log: &File, writes: &[Write]) -> Result<(), Fault> {
    let mut known = Sequence::default();
    guarded(|| {
        for item in db.scan_prefix(layout::GAP) {
            let (key, value) = item?;
            if let (Some(start), Ok(end)) = (
                layout::gap_start(&key),
                record::decode::<u64>(Kind::Gap, &key, &value),
            ) {
                known.retire_range(start, end, &mut Vec::new());
            }
        }
        Ok(())
    })?;
    let mut changes: BTreeMap<&[u8], Option<&[u8]>> = BTreeMap::new();
    for (key, value) in writes {
        if let (Some(start), Some(value)) = (layout::gap_start(key), value)
            && let Ok(end) = record::decode::<u64>(Kind::Gap, key, value)
        {
            let covered = known
                .gap_from(start)
                .is_some_and(|(from, to)| from <= start && to >= end);
            if covered {
                continue;
            }
            known.retire_range(start, end, &mut Vec::new());
        }
        changes.insert(key, value.as_deref());
    }
    put_all(db, log, changes)
}
