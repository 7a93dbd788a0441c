//! Coming back from a failed disk without a restart. Whatever a batch wanted
//! when the disk failed is unknown, and its callers were told so; the disk is
//! right about every record, and owners keep their keys.

use std::sync::PoisonError;

use super::{
    super::{KeyHash, StoreError, life::Record},
    committer::{Committer, Gathered},
    fault::Fault,
    frame::Damaged,
    open::{self, OpenError},
    overlay::Overlay,
    salvage::close,
};

impl Committer {
    /// The disk or sled has failed: what this batch wanted is unknown.
    pub(super) fn fall(&mut self, fault: Fault, gathered: Gathered) {
        tracing::error!(%fault, "the store failed; opening it again");
        let why = StoreError::Failed(format!(
            "{fault}; whether this write took effect is unknown"
        ));
        let mut unreceived = gathered.unreceived;
        for held in gathered.held {
            unreceived.extend(held(Err(why.clone())));
        }
        self.give_back(&unreceived);
        self.go_down(&fault);
        if matches!(fault, Fault::Unsynced(_)) {
            self.given_up = true;
        } else {
            self.rise();
        }
    }

    fn go_down(&mut self, why: &Fault) {
        if let Some(mover) = self.live.take().and_then(|live| live.mover) {
            // It holds sled open. What it has not moved is in the redo log.
            let _ = mover.wait();
        }
        *self.shared.overlay() = Overlay::default();
        self.expiring = false;
        let db = self
            .shared
            .db
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(db) = db {
            // It may fail or panic once more; there is nothing left to save.
            let _ = close(db);
        }
        self.shared
            .stats(|stats| stats.down = Some(why.to_string()));
    }

    /// Opens the store again; keeps it down where that fails.
    pub(super) fn rise(&mut self) {
        match open::open_locked(&self.paths, &self.options) {
            Ok(opened) => {
                self.go_live(opened);
                self.shared.stats(|stats| stats.reopened += 1);
                if let Err(fault) = self.reload() {
                    tracing::error!(%fault, "the store failed again");
                    self.go_down(&fault);
                } else {
                    tracing::info!("the store is open again");
                }
            }
            Err(error) => {
                self.given_up = !matches!(&error, OpenError::Unusable { .. });
                let why = match &error {
                    OpenError::Unusable { reason, .. } => reason.clone(),
                    other => other.to_string(),
                };
                self.shared.stats(|stats| stats.down = Some(why));
            }
        }
    }

    /// Reads back what owners hold: the disk is right about their records.
    fn reload(&mut self) -> Result<(), Fault> {
        let keys: Vec<KeyHash> = self.active.keys().copied().collect();
        for key in keys {
            let loaded = self.load(key)?;
            let Some(active) = self.active.get_mut(&key) else {
                continue;
            };
            let owner = active.record.owner;
            match loaded {
                Ok(fold) => match fold.record {
                    Some(mut record) => {
                        record.owner = if record.is_final() { None } else { owner };
                        active.record = record;
                        active.on_disk = true;
                    }
                    None => {
                        let fresh = Record::from_opened(active.record.opened());
                        if let Ok(mut record) = fresh {
                            record.owner = owner;
                            active.record = record;
                            active.on_disk = false;
                        }
                    }
                },
                Err(Damaged) => active.record.owner = None,
            }
        }
        self.active
            .retain(|_, active| active.record.owner.is_some());
        Ok(())
    }
}
