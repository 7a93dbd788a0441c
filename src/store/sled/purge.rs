//! A tenant's keys are removed when somebody asks for it: by their due times, some
//! in each batch, so that nobody else waits for long.

use super::{
    super::{KeyHash, Purged},
    committer::{Committer, Gathered},
    decide::hold,
    fault::Fault,
    layout::{self, DueKey},
};
use crate::ids::Tenant;

/// Keys that one step looks at, and bytes of them that it removes, at most.
const STEP_KEYS: usize = 512;
const STEP_BYTES: u64 = 8 << 20;

impl Committer {
    /// What this batch was asked for, after everything else in it is decided.
    pub(super) fn purge(&mut self, gathered: &mut Gathered) -> Result<(), Fault> {
        for (tenant, from, answer) in std::mem::take(&mut gathered.purges) {
            let purged = self.purge_some(&tenant, from, gathered)?;
            hold(gathered, true, answer, Ok(purged), |_| None);
        }
        Ok(())
    }

    fn purge_some(
        &mut self,
        tenant: &Tenant,
        from: Option<Vec<u8>>,
        gathered: &mut Gathered,
    ) -> Result<Purged, Fault> {
        let from = from.unwrap_or_else(|| layout::DUE.to_vec());
        let end = DueKey {
            at_ms: u64::MAX,
            hash: KeyHash([0xff; 32]),
        };
        let due = self
            .shared
            .read(|view| view.range(&from, &end.encode(), STEP_KEYS))?;
        let mut purged = Purged::default();
        let last = (due.len() == STEP_KEYS).then(|| due.last().map(|(key, _)| key.clone()));
        for (key, _) in due {
            if purged.bytes > STEP_BYTES {
                // This one is looked at by the next step.
                purged.next = Some(key);
                return Ok(purged);
            }
            let Some(place) = DueKey::decode(&key) else {
                continue;
            };
            if gathered.removed.contains(&place.hash) {
                continue;
            }
            if self.is_busy(place.hash, gathered) {
                let active = self.active.get(&place.hash);
                let own = active.is_some_and(|active| active.record.tenant == *tenant);
                purged.owned += u64::from(own);
                continue;
            }
            // First without its results: most keys are another tenant's.
            let fold = self.load(place.hash)?.ok().and_then(|fold| fold.record);
            if fold.is_none_or(|record| record.tenant != *tenant) {
                continue;
            }
            let aged = self.aged(place.hash)?;
            purged.keys += 1;
            purged.bytes += aged.bytes;
            purged.pins.extend(&aged.pins);
            gathered.writes.remove(key);
            self.remove(place.hash, aged, gathered);
        }
        purged.next = last.flatten().map(after);
        Ok(purged)
    }
}

/// The first key behind this one.
fn after(mut key: Vec<u8>) -> Vec<u8> {
    key.push(0);
    key
}
