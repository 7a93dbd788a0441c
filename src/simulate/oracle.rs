//! What could have been found: the yardsticks that hit rates are measured by.
//!
//! - [`Reachable`]: one cache for everybody that never forgets. A turn reaches
//!   the longest prefix of its prompt in any earlier prompt and output, but never
//!   the last token of its prompt, which an engine always computes.
//! - [`Pool`]: one cache of a given size for everybody, the least recently used
//!   going first. It sees the turns in the order in which the run that it watches
//!   computes them. Least recently used is not the best that a cache can do: where
//!   far more is live than fits, ranks that share unevenly can find more.

use std::collections::HashSet;

use super::{
    outline::{Outline, Runs},
    trace::{History, Origin, Trace},
};
use crate::engine::sim::{
    radix::{NodeId, RadixTree},
    text::Sequence as _,
};

/// What an infinite cache would have found, in whole tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Reachable {
    /// By session and turn.
    pub turns: Vec<Vec<u32>>,
    /// The sum.
    pub tokens: u64,
    /// Of a trace of blocks without sessions: those that an earlier prompt began
    /// with as well, and all.
    pub blocks: Option<(u64, u64)>,
}

impl Reachable {
    /// Of a trace, its turns taken in the order of the file.
    pub fn of(trace: &Trace) -> Self {
        let mut cache = RadixTree::<Runs>::new(1);
        let mut turns = Vec::with_capacity(trace.sessions.len());
        for (number, session) in trace.sessions.iter().enumerate() {
            let mut history = History::new(number);
            let mut found = Vec::with_capacity(session.turns.len());
            for (at, turn) in session.turns.iter().enumerate() {
                let prompt = history.ask(at, turn);
                let most = prompt.len().saturating_sub(1);
                found.push(narrow(cache.peek("", prompt.first(most))));
                let text = history.answered(at, turn.output);
                cache.insert("", text.first(text.len()));
            }
            turns.push(found);
        }
        Self {
            tokens: turns.iter().flatten().map(|&n| u64::from(n)).sum(),
            turns,
            blocks: blocks(trace),
        }
    }
}

fn blocks(trace: &Trace) -> Option<(u64, u64)> {
    if trace.sessions.iter().any(|session| session.keyed) {
        return None;
    }
    let mut known = HashSet::new();
    let (mut seen, mut all) = (0, 0);
    for turn in trace.sessions.iter().flat_map(|session| &session.turns) {
        let ids = || {
            turn.fresh.iter().filter_map(|piece| match piece.origin {
                Origin::Shared(id) => Some(id),
                Origin::Own => None,
            })
        };
        seen += ids().take_while(|id| known.contains(id)).count() as u64;
        all += ids().count() as u64;
        known.extend(ids());
    }
    (all > 0).then_some((seen, all))
}

fn narrow(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// One cache for everybody, as large as those of all ranks together.
#[derive(Debug)]
pub struct Pool {
    cache: RadixTree<Runs>,
    capacity: usize,
    /// Prompt tokens found ever.
    found: u64,
}

impl Pool {
    /// An empty one.
    pub fn new(capacity: usize, page: usize) -> Self {
        Self {
            cache: RadixTree::new(page),
            capacity,
            found: 0,
        }
    }

    /// A turn's prompt begins to be computed. It is kept until it is answered.
    pub fn ask(&mut self, prompt: &Outline) -> NodeId {
        let most = prompt.len().saturating_sub(1);
        self.found += self.cache.find("", prompt.first(most)).tokens as u64;
        let held = self.cache.insert("", prompt.first(prompt.len()));
        self.cache.lock(held.node);
        self.shrink();
        held.node
    }

    /// It is answered. The last token's KV was not computed.
    pub fn answered(&mut self, prompt: NodeId, text: &Outline) {
        self.cache
            .insert("", text.first(text.len().saturating_sub(1)));
        self.cache.unlock(prompt);
        self.shrink();
    }

    fn shrink(&mut self) {
        let held = self.cache.evictable() + self.cache.protected();
        if held > self.capacity {
            self.cache.evict(held - self.capacity);
        }
    }

    /// Prompt tokens found ever.
    pub fn found(&self) -> u64 {
        self.found
    }
}
