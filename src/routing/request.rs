//! What the router is asked, and what it answers.

use std::time::Duration;

use super::{
    moves::Queued,
    needs::{Lack, Needs},
    pins::PinKey,
};
use crate::{
    call::{RouteReason, RoutingPolicy},
    fleet::snapshot::{LoadTicket, RankSlot},
    ids::Tenant,
};

/// What the router is asked.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// The trajectory, where there is one.
    pub key: Option<PinKey>,
    /// A hash of the request's id: breaks ties of requests without a key, and is
    /// what `random` draws from.
    pub request: u128,
    /// What it counts as load.
    pub samples: u32,
    /// Its length, where known; bounds what can be expected from the cache.
    pub prompt_tokens: u32,
    /// What the rank must be able to do.
    pub needs: &'a Needs,
    /// How to choose.
    pub policy: RoutingPolicy,
    /// Ranks where this request has just failed: not chosen, and a pin to one of
    /// them moves.
    pub avoid: &'a [RankSlot],
    /// What else is known of it.
    pub hints: Hints<'a>,
}

/// What else is known of a request; nothing for most.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hints<'a> {
    /// The requests that share its prompt.
    pub group: Option<Siblings>,
    /// Its prompt as [`prefix::blocks`](super::prefix::blocks), for the `prefix`
    /// policy.
    pub blocks: &'a [u64],
    /// It has waited for room for so long. `None`: not yet, so it gets in line
    /// behind those who have.
    pub waited: Option<Duration>,
}

/// A group of requests that share a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Siblings {
    /// Its name within tenant, model and adapter, as a hash.
    pub key: u128,
    /// All on one rank.
    pub share: bool,
}

impl Siblings {
    /// Of this name.
    pub fn new(
        tenant: &Tenant,
        model: &str,
        adapter: Option<&str>,
        name: &str,
        share: bool,
    ) -> Self {
        Self {
            key: PinKey::of(tenant, model, adapter, name).0,
            share,
        }
    }
}

/// A rank for a request.
#[derive(Debug)]
pub struct Decision {
    /// The rank.
    pub slot: RankSlot,
    /// Why.
    pub reason: RouteReason,
    /// Cached tokens that the pin's history lets one expect, rounded down to the
    /// engine's page.
    pub expected_cached_tokens: u32,
    /// The expectation can be held against the rank: it has served this history
    /// before, by the weights that it serves now.
    pub verifiable: bool,
    /// Heartbeats of the rank are missing, and no other that could serve this takes
    /// requests.
    pub last_resort: bool,
    /// The samples count as load until this is dropped.
    pub ticket: LoadTicket,
    /// Its prompt waits to be computed until this is dropped: with the first
    /// token.
    pub queued: Queued,
}

/// No rank can take a request now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoRoute {
    /// Nobody serves the model.
    NoModel,
    /// No rank that serves it can do what is asked; the distinct lacks.
    Lacking(Vec<Lack>),
    /// Some could, but none takes requests now.
    NoneOpen,
    /// Some could and are paused: they will take requests again soon.
    Paused,
    /// All that could are draining.
    Draining,
    /// Some could, and none has room for another trajectory; or others wait
    /// already.
    KvFull,
}
