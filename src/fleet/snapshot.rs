//! The fleet as readers see it: immutable, swapped whole. Only the load counters
//! inside move, and they are atomics shared by all snapshots of one rank.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    facts::{AdapterFacts, RankFacts, ReplicaFacts},
    signs::Watch,
    verified::Verified,
};
use crate::{
    ids::{Incarnation, Target},
    routing::{moves::Queue, ring::Ring},
};

/// A rank of one incarnation, by a number that is never used again: what a pin
/// holds. A pin to a slot that the snapshot does not know points at a rank that
/// is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankSlot(pub u32);

/// Whether a rank takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankState {
    /// All.
    Open,
    /// Only those of keys that live here: it drains.
    PinnedOnly,
    /// None for now; keys that live here keep their pins.
    Closed(&'static str),
    /// None for now, and soon all again: generation is paused, as for a weight
    /// sync. Keys that live here keep their pins.
    Paused,
    /// All, and only where no other rank that could serve them takes any:
    /// heartbeats are missing, and nothing else speaks against it. Keys that live
    /// here keep their pins.
    Suspect,
    /// Likewise, and its keys move where another takes them: heartbeats have been
    /// missing for as long as a lease, and too many fell silent with it.
    Held,
    /// None for longer, and its keys move: the data path ejected it, or it has
    /// been unwell for as long as a lease.
    Ejected(&'static str),
    /// None, and its keys move: the drain's grace is over.
    Drained,
}

impl RankState {
    /// It takes requests where nobody else does.
    pub fn is_last_resort(&self) -> bool {
        matches!(self, Self::Suspect | Self::Held)
    }

    /// For people, in one phrase.
    pub fn text(&self) -> &'static str {
        match self {
            Self::Open => "it takes requests",
            Self::PinnedOnly => "it drains and takes no new work",
            Self::Drained => "it drains, and its keys move",
            Self::Paused => "generation is paused",
            Self::Suspect => "heartbeats are missing: it is the last resort",
            Self::Held => "heartbeats have been missing for long: it is the last resort",
            Self::Closed(why) | Self::Ejected(why) => why,
        }
    }
}

/// What runs on a rank and lives there, by this process's own count.
#[derive(Debug, Default)]
pub struct RankLoad {
    in_flight: AtomicU64,
    live_pins: AtomicU64,
    live_tokens: AtomicU64,
    queue: Arc<Queue>,
    verified: Verified,
    /// Samples in flight on all ranks of this start.
    together: Arc<AtomicU64>,
    watch: Arc<Watch>,
}

impl RankLoad {
    /// What prompts in flight have still to compute.
    pub fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Whether it serves whom it is asked to, and finds what it should hold.
    pub fn verified(&self) -> &Verified {
        &self.verified
    }

    /// Of a further rank of the same start.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self {
            together: Arc::clone(&self.together),
            ..Self::default()
        }
    }

    /// Signs of life of what was sent there.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Samples sent and not yet answered.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Trajectories that live here.
    pub fn live_pins(&self) -> u64 {
        self.live_pins.load(Ordering::Relaxed)
    }

    /// Tokens of those trajectories: of their histories, or of the prompts that are
    /// being computed.
    pub fn live_tokens(&self) -> u64 {
        self.live_tokens.load(Ordering::Relaxed)
    }

    /// Counts `samples` as sent until the ticket is dropped.
    pub fn take(self: &Arc<Self>, samples: u32) -> LoadTicket {
        self.in_flight
            .fetch_add(u64::from(samples), Ordering::Relaxed);
        self.together
            .fetch_add(u64::from(samples), Ordering::Relaxed);
        LoadTicket {
            load: Arc::clone(self),
            samples: u64::from(samples),
        }
    }

    /// A trajectory of so many tokens comes to live here.
    pub fn pin(&self, tokens: u32) {
        self.live_pins.fetch_add(1, Ordering::Relaxed);
        self.live_tokens
            .fetch_add(u64::from(tokens), Ordering::Relaxed);
    }

    /// A trajectory of so many tokens leaves.
    pub fn unpin(&self, tokens: u32) {
        self.live_pins.fetch_sub(1, Ordering::Relaxed);
        self.live_tokens
            .fetch_sub(u64::from(tokens), Ordering::Relaxed);
    }

    /// A trajectory that lives here grew (or shrank, when it was answered from
    /// an earlier point).
    pub fn resize(&self, from: u32, to: u32) {
        if to >= from {
            self.live_tokens
                .fetch_add(u64::from(to - from), Ordering::Relaxed);
        } else {
            self.live_tokens
                .fetch_sub(u64::from(from - to), Ordering::Relaxed);
        }
    }
}

/// Samples in flight on a rank; dropping it takes them off the count.
#[derive(Debug)]
pub struct LoadTicket {
    load: Arc<RankLoad>,
    samples: u64,
}

impl LoadTicket {
    /// Samples in flight on all ranks of the rank's replica, these included: what
    /// is lost when it dies.
    pub fn in_flight_together(&self) -> u64 {
        self.load.together.load(Ordering::Relaxed)
    }

    /// Splits `samples` off into a ticket of their own, so that each can end by
    /// itself. At most what is left.
    #[must_use]
    pub fn split(&mut self, samples: u32) -> Self {
        let part = u64::from(samples).min(self.samples);
        self.samples -= part;
        Self {
            load: Arc::clone(&self.load),
            samples: part,
        }
    }
}

impl Drop for LoadTicket {
    fn drop(&mut self) {
        self.load
            .in_flight
            .fetch_sub(self.samples, Ordering::Relaxed);
        self.load
            .together
            .fetch_sub(self.samples, Ordering::Relaxed);
    }
}

/// One rank.
#[derive(Debug)]
pub struct RankView {
    /// Its number for pins.
    pub slot: RankSlot,
    /// Its name.
    pub target: Target,
    /// Its facts.
    pub facts: RankFacts,
    /// The replica it belongs to.
    pub replica: Arc<ReplicaView>,
    /// Whether it takes requests.
    pub state: RankState,
    /// The weights that it serves, as far as is known.
    pub weight_version: Arc<str>,
    /// What runs and lives on it.
    pub load: Arc<RankLoad>,
}

impl RankView {
    /// Its facts of this adapter, where it can serve it.
    fn adapter(&self, name: Option<&str>) -> Option<&AdapterFacts> {
        self.replica.facts.adapter(name?)
    }

    /// It has this adapter in memory.
    pub fn holds(&self, adapter: Option<&str>) -> bool {
        self.adapter(adapter).is_some_and(|a| a.resident)
    }

    /// Names the load of this adapter that is there now; 0 without an adapter. KV
    /// that another load made is not found.
    pub fn adapter_load(&self, adapter: Option<&str>) -> u64 {
        self.adapter(adapter).map_or(0, |a| {
            xxhash_rust::xxh3::xxh3_64(a.load_id.as_bytes()).max(1)
        })
    }

    /// What load is divided by.
    #[expect(clippy::cast_precision_loss, reason = "capacities are below 2^52")]
    pub fn weight(&self) -> f64 {
        self.facts.kv_capacity as f64
    }
}

/// One replica.
#[derive(Debug)]
pub struct ReplicaView {
    /// Its facts.
    pub facts: ReplicaFacts,
    /// This start.
    pub incarnation: Incarnation,
}

/// The ranks that serve one model.
#[derive(Debug)]
pub struct ModelView {
    /// Indices into the snapshot's ranks, in order of replica and rank.
    pub ranks: Vec<usize>,
    /// Their ring.
    pub ring: Arc<Ring>,
}

/// The fleet at one moment.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Ranks of all replicas that are not dead, in order of replica and rank.
    pub ranks: Vec<RankView>,
    /// By name.
    pub models: HashMap<Arc<str>, ModelView>,
    /// Models of dead replicas that are still remembered: nobody serves them now,
    /// and somebody may again.
    pub lost_models: HashSet<Arc<str>>,
    /// Ranks that took their leave after a drain, while they are remembered: a key
    /// pinned to one has lost nothing but its cache.
    pub departed: HashSet<RankSlot>,
    by_slot: HashMap<RankSlot, usize>,
}

impl Snapshot {
    /// From ranks in any order. Rings are kept where their members are the same, and
    /// grow where there are more: building one costs far more than looking it up.
    pub fn build(
        mut ranks: Vec<RankView>,
        lost_models: HashSet<Arc<str>>,
        previous: &Self,
    ) -> Self {
        ranks.sort_by(|a, b| a.target.cmp(&b.target));
        let by_slot = ranks.iter().enumerate().map(|(i, r)| (r.slot, i)).collect();
        let mut members: HashMap<Arc<str>, Vec<usize>> = HashMap::new();
        for (index, rank) in ranks.iter().enumerate() {
            members
                .entry(Arc::clone(&rank.replica.facts.model))
                .or_default()
                .push(index);
        }
        let models = members
            .into_iter()
            .map(|(model, indices)| {
                let names: Vec<_> = indices
                    .iter()
                    .map(|&i| (ranks[i].target.replica.clone(), ranks[i].target.rank))
                    .collect();
                let ring = match previous.models.get(&model).map(|m| &m.ring) {
                    Some(ring) if ring.members() == names => Arc::clone(ring),
                    Some(ring) => Arc::new(ring.with(names)),
                    None => Arc::new(Ring::new(names)),
                };
                (
                    model,
                    ModelView {
                        ranks: indices,
                        ring,
                    },
                )
            })
            .collect();
        Self {
            ranks,
            models,
            lost_models,
            departed: HashSet::new(),
            by_slot,
        }
    }

    /// The rank in this slot, unless it is gone.
    pub fn rank(&self, slot: RankSlot) -> Option<&RankView> {
        self.by_slot.get(&slot).map(|&i| &self.ranks[i])
    }

    /// The rank of this name, unless it is gone.
    pub fn find(&self, target: &Target) -> Option<&RankView> {
        self.ranks
            .binary_search_by(|r| r.target.cmp(target))
            .ok()
            .map(|i| &self.ranks[i])
    }
}
