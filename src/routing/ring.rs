//! The consistent-hash ring of a model's ranks: which rank is a key's home
//! whatever the load, and in which order the others follow. Built on `hashring`,
//! immutable, and the same in every process and on every machine: the mapping is
//! pinned by a test and must never change.
//!
//! `hashring` has one point per node and hashes with whatever `Hash` does, so
//! virtual nodes are made here, and hash explicit bytes only.

use std::{
    collections::HashMap,
    hash::{Hash, Hasher},
};

use hashring::HashRing;
use xxhash_rust::xxh3::Xxh3DefaultBuilder;

use crate::ids::ReplicaId;

/// Points per rank. At 128 the busiest of eight ranks gets some 20 % more keys
/// than the mean.
const VIRTUAL_NODES: u32 = 128;

/// Probes of the ring for another rank than the home before the order falls back
/// to highest random weight.
const PROBES: u32 = 32;

/// One point of a rank.
#[derive(Clone, Debug)]
struct VirtualNode {
    number: usize,
    point: [u8; 16],
}

impl VirtualNode {
    fn new(number: usize, replica: &ReplicaId, rank: u32, nth: u32) -> Self {
        let mut bytes = Vec::with_capacity(replica.as_str().len() + 9);
        bytes.extend_from_slice(replica.as_str().as_bytes());
        // No replica id holds a zero byte, so no two ranks give the same bytes.
        bytes.push(0);
        bytes.extend_from_slice(&rank.to_le_bytes());
        bytes.extend_from_slice(&nth.to_le_bytes());
        Self {
            number,
            point: xxhash_rust::xxh3::xxh3_128(&bytes).to_le_bytes(),
        }
    }
}

impl Hash for VirtualNode {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // `write` and nothing else: `write_u64` and friends follow the machine's
        // byte order.
        state.write(&self.point);
    }
}

/// All points of a rank but that of the fallback order.
fn nodes_of(number: usize, of: &(ReplicaId, u32)) -> impl Iterator<Item = VirtualNode> {
    (0..VIRTUAL_NODES).map(move |n| VirtualNode::new(number, &of.0, of.1, n))
}

fn point_of(member: &(ReplicaId, u32)) -> [u8; 16] {
    VirtualNode::new(0, &member.0, member.1, VIRTUAL_NODES).point
}

/// A key with a salt.
struct Probe([u8; 20]);

impl Probe {
    fn new(key: u128, salt: u32) -> Self {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(&key.to_le_bytes());
        bytes[16..].copy_from_slice(&salt.to_le_bytes());
        Self(bytes)
    }
}

impl Hash for Probe {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

/// The ring of one set of ranks.
pub struct Ring {
    members: Vec<(ReplicaId, u32)>,
    /// By the number that points have: the position in `members`.
    places: Vec<usize>,
    /// Per member, for the fallback order.
    points: Vec<[u8; 16]>,
    ring: HashRing<VirtualNode, Xxh3DefaultBuilder>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} ranks)", self.members.len())
    }
}

impl Ring {
    /// Of these ranks, named without their incarnation: a restarted rank has the
    /// same home keys. Their order does not change the mapping.
    pub fn new(members: Vec<(ReplicaId, u32)>) -> Self {
        let all = members.iter().enumerate();
        let nodes = all.flat_map(|(i, member)| nodes_of(i, member)).collect();
        let mut ring = HashRing::with_hasher(Xxh3DefaultBuilder::new());
        ring.batch_add(nodes);
        Self {
            places: (0..members.len()).collect(),
            points: members.iter().map(point_of).collect(),
            members,
            ring,
        }
    }

    /// The same as [`new`](Self::new), for less where all of `self` are among them:
    /// their points are in order already.
    #[must_use]
    pub fn with(&self, members: Vec<(ReplicaId, u32)>) -> Self {
        let at: HashMap<&(ReplicaId, u32), usize> = members.iter().zip(0..).collect();
        let moved = self.members.iter().map(|member| at.get(member).copied());
        let Some(moved) = moved.collect::<Option<Vec<usize>>>() else {
            // `hashring` takes points out one by one, each by moving all behind it.
            return Self::new(members);
        };
        let mut places: Vec<usize> = self.places.iter().map(|old| moved[*old]).collect();
        let mut old = vec![false; members.len()];
        for place in &places {
            old[*place] = true;
        }
        let mut nodes = Vec::new();
        for (place, member) in members.iter().enumerate().filter(|(place, _)| !old[*place]) {
            nodes.extend(nodes_of(places.len(), member));
            places.push(place);
        }
        let mut ring = self.ring.clone();
        ring.batch_add(nodes);
        Self {
            places,
            points: members.iter().map(point_of).collect(),
            members,
            ring,
        }
    }

    /// The ranks, as they were given.
    pub fn members(&self) -> &[(ReplicaId, u32)] {
        &self.members
    }

    /// The first rank in the key's order that `takes` accepts, by position in
    /// `members`. The order begins with the key's home.
    pub fn first(&self, key: u128, mut takes: impl FnMut(usize) -> bool) -> Option<usize> {
        for salt in 0..PROBES {
            let number = self.ring.get(&Probe::new(key, salt))?.number;
            let member = *self.places.get(number)?;
            if takes(member) {
                return Some(member);
            }
        }
        // Few ranks are acceptable: the highest of their hashes with the key.
        (0..self.members.len())
            .filter(|&m| takes(m))
            .max_by_key(|&m| {
                let mut bytes = [0; 32];
                bytes[..16].copy_from_slice(&key.to_le_bytes());
                bytes[16..].copy_from_slice(&self.points[m]);
                xxhash_rust::xxh3::xxh3_64(&bytes)
            })
    }

    /// The key's home: the rank that its hash names, whatever the load.
    pub fn home(&self, key: u128) -> Option<usize> {
        self.first(key, |_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(replicas: u32, ranks: u32) -> Ring {
        Ring::new(
            (0..replicas)
                .flat_map(|r| (0..ranks).map(move |k| (ReplicaId::new(format!("r{r}")), k)))
                .collect(),
        )
    }

    fn key(i: u64) -> u128 {
        xxhash_rust::xxh3::xxh3_128(&i.to_le_bytes())
    }

    /// Routers of different versions and machines must agree for ever.
    #[test]
    fn the_mapping_is_pinned() {
        let ring = ring(4, 2);
        let homes: Vec<_> = (0..16).map(|i| ring.home(key(i)).unwrap()).collect();
        assert_eq!(homes, GOLDEN);
    }
    const GOLDEN: [usize; 16] = [2, 2, 7, 0, 2, 0, 7, 3, 0, 6, 1, 2, 2, 1, 5, 1];

    #[test]
    fn the_order_of_members_does_not_matter() {
        let forward = ring(4, 2);
        let backward = Ring::new(forward.members().iter().rev().cloned().collect());
        for i in 0..1000 {
            assert_eq!(
                forward.members()[forward.home(key(i)).unwrap()],
                backward.members()[backward.home(key(i)).unwrap()],
            );
        }
    }

    #[test]
    fn a_member_that_leaves_takes_only_its_own_keys() {
        let all = ring(8, 1);
        let fewer = Ring::new(all.members()[..7].to_vec());
        for i in 0..2000 {
            let home = all.home(key(i)).unwrap();
            if home != 7 {
                assert_eq!(fewer.home(key(i)).unwrap(), home);
            }
        }
    }

    /// Whoever comes and goes, the mapping is that of a ring made anew.
    #[test]
    fn a_ring_that_is_changed_is_the_ring_made_anew() {
        let all = ring(12, 2).members().to_vec();
        let mut changed = Ring::new(all[..8].to_vec());
        for (from, to) in [(0, 9), (3, 9), (3, 20), (2, 21), (20, 24), (5, 5), (1, 24)] {
            changed = changed.with(all[from..to].to_vec());
            let anew = Ring::new(all[from..to].to_vec());
            assert_eq!(changed.members(), anew.members());
            for i in 0..500 {
                assert_eq!(changed.home(key(i)), anew.home(key(i)));
                let few = |m: usize| m % 7 == 6;
                assert_eq!(changed.first(key(i), few), anew.first(key(i), few));
                let last = |m: usize| m + 1 == to - from;
                assert_eq!(changed.first(key(i), last), anew.first(key(i), last));
            }
        }
    }

    #[test]
    fn keys_spread() {
        let ring = ring(8, 1);
        let mut counts = [0u32; 8];
        for i in 0..8000 {
            counts[ring.home(key(i)).unwrap()] += 1;
        }
        assert!(counts.iter().all(|c| (700..1300).contains(c)), "{counts:?}");
    }

    #[test]
    fn the_order_reaches_every_member() {
        let ring = ring(64, 1);
        for wanted in 0..64 {
            assert_eq!(ring.first(key(7), |m| m == wanted), Some(wanted));
        }
        assert_eq!(ring.first(key(7), |_| false), None);
        assert_eq!(Ring::new(Vec::new()).home(1), None);
    }
}
