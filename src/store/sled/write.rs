//! How a batch is made durable, and how it comes into sled.

use std::sync::{Arc, PoisonError};

use tokio::time::Instant;

use super::{
    apply::apply,
    committer::{Committer, Gathered},
    decide::unencodable,
    fault::{Fault, guarded},
    mover::Mover,
    open::put_gap,
    options::Step,
    redo::Redo,
    sequence::GapChange,
    writes::Writes,
};

impl Committer {
    /// Makes the batch durable.
    pub(super) fn write(&mut self, gathered: &mut Gathered) -> Result<(), Fault> {
        let Some(live) = &mut self.live else {
            return Ok(());
        };
        let (mut gaps, mut merged) = (Writes::default(), Writes::default());
        for change in live.sequence.retire(std::mem::take(&mut gathered.retired)) {
            let writes = match change {
                GapChange::Put { .. } => &mut gaps,
                GapChange::Remove { .. } => &mut merged,
            };
            put_gap(writes, change).map_err(unencodable)?;
        }
        let logged = live.redo.is_some();
        let writes = std::mem::take(&mut gathered.writes).in_order(gaps, merged);
        let count = writes.len() as u64;
        if count == 0 {
            return Ok(());
        }
        self.step(Step::Decided);
        if logged {
            self.log(writes)?;
        } else {
            self.put_relaxed(writes)?;
        }
        let Some(live) = &self.live else {
            return Ok(());
        };
        let (used, gaps) = (live.used.values().sum(), live.sequence.gap_count() as u64);
        self.shared.timings.batch(count);
        self.shared.stats(|stats| {
            stats.batches += 1;
            stats.writes += count;
            stats.used_bytes = used;
            stats.gaps = gaps;
        });
        Ok(())
    }

    /// Into the redo log, and over the tree.
    fn log(&mut self, writes: Writes) -> Result<(), Fault> {
        let mut left = writes.into_inner();
        while !left.is_empty() {
            let redo = self.redo()?;
            let later = left.split_off(redo.fitting(&left));
            let frame = std::mem::replace(&mut left, later);
            if !redo.has_room(&frame) {
                self.switch()?;
            }
            self.redo()?.append(&frame)?;
            self.step(Step::Logged);
            let begun = Instant::now();
            self.redo()?.sync().map_err(Fault::of_sync)?;
            self.shared.timings.synced(begun.elapsed());
            self.step(Step::Synced);
            self.shared.overlay().extend(frame);
        }
        if let Some(live) = &mut self.live {
            live.high_water.advance(live.sequence.next() - 1)?;
        }
        self.step(Step::Marked);
        Ok(())
    }

    fn redo(&mut self) -> Result<&mut Redo, Fault> {
        let live = self.live.as_mut();
        live.and_then(|live| live.redo.as_mut())
            .ok_or_else(Fault::closed)
    }

    /// Straight into sled, which tells the kernel.
    fn put_relaxed(&mut self, writes: Writes) -> Result<(), Fault> {
        let handle = self
            .shared
            .db
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let db = handle.as_ref().ok_or_else(Fault::closed)?;
        let count = writes.len();
        guarded(|| apply(db, writes.into_batch(), count))?;
        if let Some(live) = &mut self.live {
            live.unsynced = true;
        }
        Ok(())
    }

    /// Goes on in the other half of the redo log, and has what is in this one
    /// moved into sled.
    fn switch(&mut self) -> Result<(), Fault> {
        self.end_move(true)?;
        let db = self
            .shared
            .db
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(Fault::closed)?;
        self.redo()?.switch()?;
        self.step(Step::Switched);
        let changes = self.shared.overlay().begin_move();
        if let Some(live) = &mut self.live {
            live.mover = Some(Mover::start(db, Arc::clone(&live.log), changes)?);
        }
        Ok(())
    }

    /// Takes note of a move that is done; waits for it where it is needed.
    pub(super) fn end_move(&mut self, wait: bool) -> Result<(), Fault> {
        let Some(live) = &mut self.live else {
            return Ok(());
        };
        let Some(mover) = live.mover.take_if(|mover| wait || mover.is_done()) else {
            return Ok(());
        };
        mover.wait()?;
        self.redo()?.moved();
        self.shared.overlay().end_move();
        self.shared.stats(|stats| stats.moves += 1);
        self.step(Step::Moved);
        Ok(())
    }

    /// Moves everything into sled.
    pub(super) fn move_all(&mut self) -> Result<(), Fault> {
        self.end_move(true)?;
        if !self.shared.overlay().is_empty() {
            self.switch()?;
            self.end_move(true)?;
        }
        match self.redo() {
            Ok(redo) => Ok(redo.moved_all()?),
            Err(_) => Ok(()),
        }
    }
}
