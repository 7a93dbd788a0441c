//! What the committer does by itself: late syncs, expiry, and opening again.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::{
    super::KeyHash,
    clock::to_ms,
    committer::{Active, Committer, Gathered},
    decide::unencodable,
    fault::Fault,
    frame::Damaged,
    layout::{self, Class, DueKey, RecordKey},
    open::put_due,
    options::Durability,
    record::{self, Fold},
    scan::charge,
};

/// Keys, and bytes of them, that one batch expires at most.
const EXPIRE_KEYS: usize = 128;
const EXPIRE_BYTES: u64 = 8 << 20;

/// A key's records as expiry sees them.
pub(super) struct Aged {
    pub(super) fold: Fold,
    pub(super) records: Vec<Vec<u8>>,
    pub(super) bytes: u64,
    /// Trajectories that its attempts bound.
    pub(super) pins: BTreeSet<u128>,
}

impl Committer {
    /// Once per tick.
    pub(super) fn tick_if_due(&mut self, gathered: &mut Gathered) {
        let now = Instant::now();
        if now.duration_since(self.last_tick) < self.options.tick {
            return;
        }
        self.last_tick = now;
        if self.live.is_none() {
            if !self.given_up {
                self.rise();
            }
            return;
        }
        let agree = self.watch.agree(&*self.options.clock);
        let stopped = !agree;
        let was = self
            .shared
            .stats(|stats| std::mem::replace(&mut stats.expiry_stopped, stopped));
        if stopped && !was {
            tracing::error!(
                "the wall clock was set by more than a minute; nothing expires until the store is \
                 opened again"
            );
        }
        self.expiring = agree;
        if let Err(fault) = self.sync_late().and_then(|()| self.move_replicas(gathered)) {
            self.fall(fault, std::mem::take(gathered));
        }
    }

    fn sync_late(&mut self) -> Result<(), Fault> {
        let Some(live) = &mut self.live else {
            return Ok(());
        };
        if live.unsynced && self.options.durability == Durability::Relaxed {
            let begun = Instant::now();
            live.log.sync_data().map_err(Fault::of_sync)?;
            self.shared.timings.synced(begun.elapsed());
            live.high_water.advance(live.sequence.next() - 1)?;
            live.unsynced = false;
        }
        live.high_water.sync()?;
        Ok(())
    }

    /// Expires some of the keys that are due.
    pub(super) fn expire(&mut self, gathered: &mut Gathered) -> Result<(), Fault> {
        if !self.expiring {
            return Ok(());
        }
        let now_ms = to_ms(self.options.clock.wall());
        let retention_ms = u64::try_from(self.options.retention.as_millis()).unwrap_or(u64::MAX);
        let due = self.due(now_ms)?;
        self.expiring = due.len() == EXPIRE_KEYS;
        let mut bytes = 0;
        for (key, hash) in due {
            if bytes > EXPIRE_BYTES {
                self.expiring = true;
                break;
            }
            gathered.writes.remove(key);
            // Where somebody works on it, it is looked at again a retention later.
            let mut again = now_ms.saturating_add(retention_ms.max(1));
            if !self.is_busy(hash, gathered) {
                let aged = self.aged(hash)?;
                bytes += aged.bytes;
                again = aged.fold.last_ms.saturating_add(retention_ms);
                if again <= now_ms {
                    self.remove(hash, aged, gathered);
                    self.shared.stats(|stats| stats.expired += 1);
                    continue;
                }
            }
            put_due(&mut gathered.writes, DueKey { at_ms: again, hash }).map_err(unencodable)?;
        }
        Ok(())
    }

    /// Somebody works on it.
    pub(super) fn is_busy(&self, hash: KeyHash, gathered: &Gathered) -> bool {
        let owned = |active: &Active| active.record.owner.is_some();
        gathered.dirty.contains(&hash) || self.active.get(&hash).is_some_and(owned)
    }

    fn due(&self, now_ms: u64) -> Result<Vec<(Vec<u8>, KeyHash)>, Fault> {
        let end = DueKey {
            at_ms: now_ms.saturating_add(1),
            hash: KeyHash([0; 32]),
        };
        let due = self
            .shared
            .read(|view| view.range(layout::DUE, &end.encode(), EXPIRE_KEYS))?;
        let places = due
            .into_iter()
            .filter_map(|(key, _)| DueKey::decode(&key).map(|place| (key, place.hash)));
        Ok(places.collect())
    }

    pub(super) fn aged(&self, hash: KeyHash) -> Result<Aged, Fault> {
        self.shared.read(|view| {
            let mut aged = Aged {
                fold: Fold::default(),
                records: Vec::new(),
                bytes: 0,
                pins: BTreeSet::new(),
            };
            let mut damaged = false;
            for (key, value) in view.prefix(&layout::key_prefix(hash))? {
                let event = RecordKey::decode(&key).is_some_and(|p| p.class == Class::Event);
                if event && !damaged {
                    // The account counts what folds up to the damage, too.
                    damaged = aged.fold.add(&key, &value) == Err(Damaged);
                    aged.pins.extend(record::bound(&key, &value));
                }
                aged.bytes += charge(&key, &value);
                aged.records.push(key);
            }
            Ok(aged)
        })
    }

    pub(super) fn remove(&mut self, hash: KeyHash, aged: Aged, gathered: &mut Gathered) {
        gathered.removed.insert(hash);
        if let Some(live) = &mut self.live {
            live.known.remove(hash);
        }
        for key in aged.records {
            if let Some(place) = RecordKey::decode(&key) {
                gathered.retired.push(place.seq);
            }
            gathered.writes.remove(key);
        }
        if let (Some(live), Some(record)) = (&mut self.live, aged.fold.record)
            && let Some(used) = live.used.get_mut(&record.tenant)
        {
            *used = used.saturating_sub(aged.bytes);
            if *used == 0 {
                live.used.remove(&record.tenant);
            }
        }
    }
}
