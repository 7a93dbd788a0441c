//! Puts a batch into sled, and sees to what it replaced.
//!
//! What a write replaces (nodes, older forms of pages, buffers) sled leaves to
//! crossbeam's epochs, which free some 500 things at every 128th time that a thread
//! enters one. A batch enters once, however much it writes. Where keys are hardly
//! looked up, which is what the set of known keys is for, that is far too seldom:
//! memory has been seen to grow by 3 KB a request, and to be given back never.

use ::sled::{Batch, Tree};

/// One sweep frees 512 things; a write has been seen to replace four to eight.
const WRITES_PER_SWEEP: usize = 32;

/// What was replaced may be freed two epochs later, and a sweep enters the next.
const EPOCHS: usize = 3;

/// Puts a batch of so many writes into the tree and tells the kernel.
///
/// # Errors
/// sled's.
pub(super) fn apply(tree: &Tree, batch: Batch, writes: usize) -> ::sled::Result<()> {
    tree.apply_batch(batch)?;
    tree.flush()?;
    // sled uses the collector that is the whole process's.
    for _ in 0..writes / WRITES_PER_SWEEP + EPOCHS {
        crossbeam_epoch::pin().flush();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;

    /// Whether a thing is freed with the next small batch that is left behind all that a
    /// great many writes replaced: things are freed in the order in which they were left.
    fn all_is_freed_with_the_next_batch() -> bool {
        let dir = tempfile::tempdir().unwrap();
        let db = ::sled::Config::new().path(dir.path()).open().unwrap();
        let put = |round: u32, writes: u32| {
            let mut batch = Batch::default();
            for n in 0..writes {
                let key = blake3::hash(&(round * writes + n).to_le_bytes());
                batch.insert(key.as_bytes(), vec![7_u8; 200]);
            }
            apply(&db, batch, writes as usize).unwrap();
        };
        for round in 0..10 {
            put(round, 1000);
        }
        let freed = Arc::new(AtomicBool::new(false));
        let (last, guard) = (Arc::clone(&freed), crossbeam_epoch::pin());
        guard.defer(move || last.store(true, Ordering::Release));
        drop(guard);
        put(1_000_000, 1);
        freed.load(Ordering::Acquire)
    }

    /// A thread that is stopped within an epoch, of sled's or of another test, holds all
    /// up, so it is not always so: of ten times some eight, and without the sweeps none
    /// in twenty-four.
    #[test]
    fn what_is_replaced_is_freed_as_fast_as_it_comes() {
        let tries = (0..20).map(|_| all_is_freed_with_the_next_batch());
        assert_eq!(tries.filter(|freed| *freed).take(3).count(), 3);
    }
}
