//! Small facts beside the records, so that a restart finds the fleet and the
//! trajectories where they were. Each is replaced as a whole or removed. A lost
//! one costs work and never a result, so the loss of one is not declared.

use std::{sync::Arc, time::SystemTime};

use serde::{Deserialize, Serialize};

use crate::{
    fleet::facts::ReplicaFacts,
    ids::{Incarnation, ReplicaId, Target},
};

/// Where a trajectory lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinNote {
    /// The rank that holds its cache.
    pub target: Target,
    /// How many tokens of it; 0 when the first turn was not answered yet.
    pub tokens: u32,
    /// The load of the adapter that made it; 0 without one.
    pub adapter: u64,
    /// Its last turn.
    pub used_at: SystemTime,
}

impl PinNote {
    /// Of a trajectory that an attempt binds to this rank: no turn of it was
    /// answered there yet.
    pub fn bound(target: Target, at: SystemTime) -> Self {
        Self {
            target,
            tokens: 0,
            adapter: 0,
            used_at: at,
        }
    }
}

/// A replica that was registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaNote {
    /// What it said.
    pub facts: ReplicaFacts,
    /// What it was given.
    pub incarnation: Incarnation,
    /// An operator drains it.
    pub drain: Option<DrainNote>,
    /// The principal that registered it; `None`: it is nobody's.
    pub owner: Option<Arc<str>>,
    /// A heartbeat of it has come. True where nobody knows.
    pub has_beaten: bool,
}

/// An operator's drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainNote {
    /// When its grace is over.
    pub until: SystemTime,
    /// It is for later starts of the replica as well.
    pub hold: bool,
}

/// One change. `None` removes.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// By `routing::PinKey`.
    Pin(u128, Option<PinNote>),
    /// By the replica's id.
    Replica(ReplicaId, Option<Box<ReplicaNote>>),
    /// A prompt that kills engines, by `stack::poison::PromptHash`, and until
    /// when it is refused.
    Condemned([u8; 16], Option<SystemTime>),
}

/// Every note that is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recalled {
    /// See [`Note::Pin`].
    pub pins: Vec<(u128, PinNote)>,
    /// See [`Note::Replica`].
    pub replicas: Vec<ReplicaNote>,
    /// See [`Note::Condemned`].
    pub condemned: Vec<([u8; 16], SystemTime)>,
}
