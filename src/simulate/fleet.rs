//! The fleet of a simulation: the facts that replicas would register, their
//! states, and from them the same snapshots that the server routes by.

use std::{collections::HashSet, sync::Arc};

use crate::{
    call::LogprobMode,
    fleet::{
        facts::{Accelerator, Capabilities, EngineKind, RankFacts, ReplicaFacts},
        snapshot::{RankLoad, RankSlot, RankState, RankView, ReplicaView, Snapshot},
    },
    ids::{BootId, Incarnation, ReplicaId, Target},
};

/// The model that all replicas serve.
pub const MODEL: &str = "simulated";

/// What all replicas have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Replicas.
    pub replicas: usize,
    /// Ranks of each.
    pub ranks: usize,
    /// As NVML prints it.
    pub accelerator: &'static str,
    /// KV tokens of a rank.
    pub kv_tokens: usize,
    /// Tokens of a page.
    pub page: usize,
    /// Requests that a rank runs at once.
    pub max_running: usize,
}

struct Replica {
    view: Arc<ReplicaView>,
    state: RankState,
    dead: bool,
    /// Numbers that are never used again, and loads, rank by rank.
    ranks: Vec<(RankSlot, Arc<RankLoad>)>,
    weights: Arc<str>,
}

/// The fleet.
pub struct Fleet {
    shape: Shape,
    replicas: Vec<Replica>,
    next_slot: u32,
    snapshot: Snapshot,
}

impl Fleet {
    /// All replicas up, idle and open.
    pub fn new(shape: Shape, weights: &Arc<str>) -> Self {
        let mut fleet = Self {
            replicas: Vec::with_capacity(shape.replicas),
            shape,
            next_slot: 0,
            snapshot: Snapshot::default(),
        };
        for number in 0..fleet.shape.replicas {
            let replica = fleet.start(number, 1, Arc::clone(weights));
            fleet.replicas.push(replica);
        }
        fleet.publish();
        fleet
    }

    fn start(&mut self, number: usize, incarnation: u64, weights: Arc<str>) -> Replica {
        let ranks: Vec<(RankSlot, Arc<RankLoad>)> = (0..self.shape.ranks)
            .map(|_| {
                self.next_slot += 1;
                (RankSlot(self.next_slot), Arc::default())
            })
            .collect();
        Replica {
            view: Arc::new(ReplicaView {
                facts: facts(&self.shape, number, incarnation, &weights),
                incarnation: Incarnation(incarnation),
            }),
            state: RankState::Open,
            dead: false,
            ranks,
            weights,
        }
    }

    fn publish(&mut self) {
        let views = self
            .replicas
            .iter()
            .filter(|replica| !replica.dead)
            .flat_map(|replica| {
                let facts = &replica.view.facts;
                facts.ranks.iter().zip(&replica.ranks).map(
                    |(rank, (slot, load)): (_, &(RankSlot, Arc<RankLoad>))| RankView {
                        slot: *slot,
                        target: Target {
                            replica: facts.id.clone(),
                            incarnation: replica.view.incarnation,
                            rank: rank.rank,
                        },
                        facts: rank.clone(),
                        replica: Arc::clone(&replica.view),
                        state: replica.state.clone(),
                        weight_version: Arc::clone(&replica.weights),
                        load: Arc::clone(load),
                    },
                )
            })
            .collect();
        let dead = self.replicas.iter().filter(|replica| replica.dead);
        let lost: HashSet<Arc<str>> = dead
            .map(|replica| Arc::clone(&replica.view.facts.model))
            .collect();
        self.snapshot = Snapshot::build(views, lost, &self.snapshot);
    }

    /// As the router sees it.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Ranks of all replicas, counted through, replica by replica.
    pub fn rank_of(&self, slot: RankSlot) -> Option<usize> {
        self.replicas
            .iter()
            .enumerate()
            .find_map(|(number, replica)| {
                let rank = replica.ranks.iter().position(|(s, _)| *s == slot)?;
                (!replica.dead).then_some(number * self.shape.ranks + rank)
            })
    }

    /// The numbers of its ranks.
    pub fn slots(&self, replica: usize) -> impl Iterator<Item = RankSlot> {
        let replica = self.replicas.get(replica);
        replica
            .into_iter()
            .flat_map(|r| &r.ranks)
            .map(|(slot, _)| *slot)
    }

    /// It is not dead.
    pub fn is_up(&self, replica: usize) -> bool {
        self.replicas.get(replica).is_some_and(|r| !r.dead)
    }

    /// It is gone: its numbers will not be used again.
    pub fn die(&mut self, replica: usize) {
        if let Some(replica) = self.replicas.get_mut(replica) {
            replica.dead = true;
        }
        self.publish();
    }

    /// It starts anew, with its last weights, which are returned.
    pub fn restart(&mut self, replica: usize) -> Arc<str> {
        let weights = Arc::clone(&self.replicas[replica].weights);
        let next = self.replicas[replica].view.incarnation.0 + 1;
        self.replicas[replica] = self.start(replica, next, Arc::clone(&weights));
        self.publish();
        weights
    }

    /// All its ranks take requests so from now on.
    pub fn set_state(&mut self, replica: usize, state: RankState) {
        if let Some(replica) = self.replicas.get_mut(replica) {
            replica.state = state;
        }
        self.publish();
    }

    /// It serves these weights from now on.
    pub fn set_weights(&mut self, replica: usize, version: &Arc<str>) {
        if let Some(replica) = self.replicas.get_mut(replica) {
            replica.weights = Arc::clone(version);
        }
        self.publish();
    }
}

/// What a replica of this shape would register.
fn facts(shape: &Shape, number: usize, incarnation: u64, weights: &Arc<str>) -> ReplicaFacts {
    let url: Arc<str> = format!("http://replica-{number}.invalid").into();
    let ranks = (0..shape.ranks).map(|rank| {
        let rank = u32::try_from(rank).unwrap_or(u32::MAX);
        RankFacts {
            rank,
            url: Arc::clone(&url),
            engine_rank: rank,
            gpu_uuids: Vec::new(),
            kv_capacity: shape.kv_tokens as u64,
            max_running: u32::try_from(shape.max_running).unwrap_or(u32::MAX),
        }
    });
    ReplicaFacts {
        id: ReplicaId::new(format!("replica-{number}")),
        boot: BootId::new(format!("replica-{number}/{incarnation}")),
        url: Arc::clone(&url),
        engine: EngineKind::Sglang,
        engine_version: "simulated".to_owned(),
        model: MODEL.into(),
        vocab_size: None,
        // What fits the KV cache: lengths were checked against it.
        context_length: u32::try_from(shape.kv_tokens).unwrap_or(u32::MAX),
        weight_version: Arc::clone(weights),
        adapters: Vec::new(),
        capabilities: Capabilities::default(),
        accelerator: Accelerator {
            name: shape.accelerator.to_owned(),
            memory_bytes: 0,
            count: u32::try_from(shape.ranks).unwrap_or(u32::MAX),
        },
        ranks: ranks.collect(),
        page_size: u32::try_from(shape.page).unwrap_or(u32::MAX),
        logprob_mode: LogprobMode::Raw,
        labels: std::collections::BTreeMap::new(),
        engine_start: None,
    }
}
