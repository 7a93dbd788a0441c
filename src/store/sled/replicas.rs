//! Incarnations: which start of a replica has which number. One record per
//! replica holds its latest starts.

use super::{
    super::{BOOTS_REMEMBERED, IncarnationGrant, KeyHash, StoreError},
    clock::to_ms,
    committer::{AnswerTo, Committer, Gathered},
    decide::{hold, unencodable},
    fault::Fault,
    frame::{Damaged, Kind},
    high_water::{HighWater, Mark},
    layout::{Class, RecordKey},
    record::{self, StoredReplica, replica_hash},
};
use crate::ids::{BootId, Incarnation, ReplicaId};

/// A replica's record that holds the low-water mark is moved up once so many
/// numbers lie above it; so many replicas at a time.
const MOVE_SPAN: u64 = 1 << 20;
const MOVE_REPLICAS: usize = 64;
/// A replica that has not started for so long is forgotten; the floor under all
/// incarnations then keeps its numbers from coming again.
const FORGET_MS: u64 = 365 * 24 * 60 * 60 * 1000;

impl Committer {
    pub(super) fn grant(
        &mut self,
        id: ReplicaId,
        boot: BootId,
        answer: AnswerTo<IncarnationGrant>,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let hash = replica_hash(&id);
        let known = match gathered.replicas.get(&hash) {
            Some(known) => Some(known.clone()),
            None => match self.load_replica(hash)? {
                Ok(known) => known,
                Err(Damaged) => {
                    let damaged = StoreError::Damaged("the starts of this replica".into());
                    hold(gathered, false, answer, Err(damaged), |_| None);
                    return Ok(());
                }
            },
        };
        let waits = gathered.replicas.contains_key(&hash);
        let boots = known.as_ref().map_or(&[][..], |(_, r)| &r.boots[..]);
        if let Some((_, number)) = boots.iter().find(|(b, _)| *b == boot) {
            let grant = IncarnationGrant {
                incarnation: Incarnation(*number),
                new: false,
                latest: Incarnation(boots.last().map_or(*number, |(_, last)| *last)),
            };
            hold(gathered, waits, answer, Ok(grant), |_| None);
            return Ok(());
        }
        let floor = self
            .live
            .as_ref()
            .map_or(0, |live| live.high_water.mark().incarnation_floor);
        let (old, mut replica) = match known {
            Some((seq, replica)) => (Some(seq), replica),
            None => {
                let boots = Vec::new();
                (
                    None,
                    StoredReplica {
                        id,
                        boots,
                        at_ms: 0,
                    },
                )
            }
        };
        let last = replica.boots.last().map_or(0, |(_, number)| *number);
        let number = last.max(floor) + 1;
        replica.boots.push((boot, number));
        if replica.boots.len() > BOOTS_REMEMBERED {
            replica.boots.remove(0);
        }
        replica.at_ms = to_ms(self.options.clock.wall());
        self.put_replica(hash, old, replica, gathered)?;
        let grant = IncarnationGrant {
            incarnation: Incarnation(number),
            new: true,
            latest: Incarnation(number),
        };
        hold(gathered, true, answer, Ok(grant), |_| None);
        Ok(())
    }

    /// The newest record of a replica, and its number in the sequence.
    fn load_replica(
        &self,
        hash: KeyHash,
    ) -> Result<Result<Option<(u64, StoredReplica)>, Damaged>, Fault> {
        self.shared.read(|view| record::load_replica(view, hash))
    }

    fn put_replica(
        &mut self,
        hash: KeyHash,
        old: Option<u64>,
        replica: StoredReplica,
        gathered: &mut Gathered,
    ) -> Result<(), Fault> {
        let place = self.place(hash, Class::Replica)?;
        let key = place.encode();
        let value = record::encode(Kind::Replica, &key, &replica).map_err(unencodable)?;
        self.put(key, value, None, gathered);
        if let Some(live) = &mut self.live {
            live.replicas.insert(place.seq, hash);
        }
        if let Some(old) = old {
            self.drop_replica(hash, old, gathered);
        }
        gathered.replicas.insert(hash, (place.seq, replica));
        Ok(())
    }

    fn drop_replica(&mut self, hash: KeyHash, seq: u64, gathered: &mut Gathered) {
        let class = Class::Replica;
        let place = RecordKey { hash, class, seq };
        gathered.writes.remove(place.encode());
        gathered.retired.push(seq);
        if let Some(live) = &mut self.live {
            live.replicas.remove(&seq);
        }
    }

    /// Moves the records of replicas out of the way of the low-water mark.
    pub(super) fn move_replicas(&mut self, gathered: &mut Gathered) -> Result<(), Fault> {
        let Some(live) = &self.live else {
            return Ok(());
        };
        let low = live.sequence.low_water();
        if live.sequence.next() - low < MOVE_SPAN {
            return Ok(());
        }
        let in_the_way: Vec<(u64, KeyHash)> = live
            .replicas
            .iter()
            .zip(low..)
            .take_while(|((seq, _), expected)| *seq == expected)
            .map(|((seq, hash), _)| (*seq, *hash))
            .filter(|(_, hash)| !gathered.replicas.contains_key(hash))
            .take(MOVE_REPLICAS)
            .collect();
        let now_ms = to_ms(self.options.clock.wall());
        for (seq, hash) in in_the_way {
            match self.load_replica(hash)? {
                Ok(Some((_, replica))) if now_ms.saturating_sub(replica.at_ms) > FORGET_MS => {
                    self.raise_floor(replica.boots.last().map_or(0, |(_, number)| *number))?;
                    self.drop_replica(hash, seq, gathered);
                }
                Ok(Some((_, replica))) => self.put_replica(hash, Some(seq), replica, gathered)?,
                Ok(None) | Err(Damaged) => {}
            }
        }
        Ok(())
    }

    fn raise_floor(&mut self, number: u64) -> Result<(), Fault> {
        let Some(live) = &mut self.live else {
            return Ok(());
        };
        let mark = live.high_water.mark();
        if number > mark.incarnation_floor {
            let raised = Mark {
                incarnation_floor: number,
                ..mark
            };
            live.high_water = HighWater::create(&self.paths.high_water(), raised)?;
        }
        Ok(())
    }
}
