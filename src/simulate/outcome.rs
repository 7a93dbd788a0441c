//! What a simulated run has come to, before anything is computed from it.

use std::{collections::BTreeMap, time::Duration};

use super::{events::Event, lane::Work};

/// A turn that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnDone {
    /// Which session, from 0.
    pub session: usize,
    /// Which turn, from 0.
    pub turn: usize,
    /// Which rank, all ranks counted through.
    pub rank: usize,
    /// First sent, in virtual time.
    pub sent: Duration,
    /// Answered.
    pub done: Duration,
    /// Tokens.
    pub prompt: u32,
    /// Tokens generated.
    pub output: u32,
    /// Prompt tokens that the rank had in its cache.
    pub cached: u32,
    /// 1, and one more for each time that its rank was lost.
    pub attempts: u32,
    /// Another rank than that of the turn before.
    pub moved: bool,
}

/// What an event did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    /// The event.
    pub event: Event,
    /// Sessions whose last request had gone to a rank that died in it, and that
    /// were not over.
    pub there: u64,
    /// Of those, the ones that have moved since.
    pub moved: u64,
    /// Requests that were lost and sent again.
    pub lost: u64,
}

/// A run of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// In the order in which they were answered.
    pub turns: Vec<TurnDone>,
    /// When each session's last turn was answered, by session.
    pub sessions: Vec<Duration>,
    /// By rank, all ranks counted through.
    pub ranks: Vec<Work>,
    /// Requests that went to another rank than the session's last one, by the
    /// reason that the router gave.
    pub moves: BTreeMap<String, u64>,
    /// Of those, the ones that left a rank that lives for one that had died and
    /// come back.
    pub moves_to_returned: u64,
    /// One for each event of the setup.
    pub effects: Vec<Effect>,
    /// Prompt tokens that one cache of all ranks' size would have found.
    pub pooled: u64,
}
