//! A workload: sessions of turns, each turn told by lengths and by what its
//! prompt shares with what went before. No token ids.

use std::time::Duration;

use super::outline::{Outline, Prompt};
use crate::engine::sim::text::Sequence as _;

/// A workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Where it comes from, for people.
    pub name: String,
    /// At least one, in the order in which they start.
    pub sessions: Vec<Session>,
}

/// One trajectory, or one request where a trace knows no trajectories.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Its requests carry an affinity key.
    pub keyed: bool,
    /// When it starts, where the trace says so.
    pub starts: Option<Duration>,
    /// At least one.
    pub turns: Vec<Turn>,
}

/// One request. All of its lengths are in tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// So much of the session's history (the prompt and the output of the turn
    /// before) stands at the beginning of the prompt.
    pub reuse: u32,
    /// What follows it: at least one token of prompt in all.
    pub fresh: Vec<Piece>,
    /// Generated, at least 1.
    pub output: u32,
    /// Between the end of the turn before and this one.
    pub think: Duration,
}

/// Tokens of one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Pieces of one origin at one position of their prompts are equal.
    pub origin: Origin,
    /// Tokens.
    pub tokens: u32,
}

/// Where tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere else: this turn alone.
    Own,
    /// A text that other prompts have too, by number.
    Shared(u64),
}

impl Turn {
    /// Tokens of its prompt.
    pub fn prompt(&self) -> u32 {
        self.reuse + self.fresh.iter().map(|piece| piece.tokens).sum::<u32>()
    }
}

impl Trace {
    /// The same with all prompts `factor` times as long. Outputs stay.
    ///
    /// # Errors
    /// When a prompt grows beyond what can be counted.
    pub fn scaled(mut self, factor: u32) -> Result<Self, String> {
        for session in &mut self.sessions {
            for turn in &mut session.turns {
                let room = u32::MAX - turn.output;
                let grown = u64::from(turn.prompt()) * u64::from(factor);
                if factor == 0 || grown > u64::from(room) {
                    return Err(format!(
                        "a prompt of {} tokens cannot be made {factor} times as long",
                        turn.prompt()
                    ));
                }
                turn.reuse *= factor;
                for piece in &mut turn.fresh {
                    piece.tokens *= factor;
                }
            }
        }
        Ok(self)
    }

    /// Turns of all sessions.
    pub fn turns(&self) -> usize {
        self.sessions.iter().map(|s| s.turns.len()).sum()
    }

    /// Tokens of all prompts and of all outputs.
    pub fn tokens(&self) -> (u64, u64) {
        let turns = || self.sessions.iter().flat_map(|s| &s.turns);
        (
            turns().map(|t| u64::from(t.prompt())).sum(),
            turns().map(|t| u64::from(t.output)).sum(),
        )
    }

    /// Prompt and output of the longest turn together.
    pub fn longest(&self) -> u64 {
        let turns = self.sessions.iter().flat_map(|s| &s.turns);
        turns
            .map(|t| u64::from(t.prompt()) + u64::from(t.output))
            .max()
            .unwrap_or(0)
    }
}

/// A session's text as it grows, turn by turn.
#[derive(Clone, Debug)]
pub struct History {
    session: u64,
    text: Outline,
}

/// Numbers of shared texts have this bit, those of a session's own have not.
const SHARED: u64 = 1 << 63;

impl History {
    /// Of session number `session`, before its first turn.
    pub fn new(session: usize) -> Self {
        Self {
            session: session as u64,
            text: Outline::empty(),
        }
    }

    /// The text becomes the prompt of `turn`, which is number `number`. A history
    /// shorter than what the turn takes of it is taken whole; the missing tokens
    /// are new ones then.
    pub fn ask(&mut self, number: usize, turn: &Turn) -> &Outline {
        let missing = (turn.reuse as usize).saturating_sub(self.text.len());
        self.text.truncate(turn.reuse as usize);
        self.text.push(self.own(number, 0), missing);
        for piece in &turn.fresh {
            let origin = match piece.origin {
                Origin::Own => self.own(number, 0),
                Origin::Shared(text) => text | SHARED,
            };
            self.text.push(origin, piece.tokens as usize);
        }
        &self.text
    }

    /// Appends the output of turn `number`.
    pub fn answered(&mut self, number: usize, output: u32) -> &Outline {
        self.text.push(self.output(number), output as usize);
        &self.text
    }

    /// The text as it is.
    pub fn text(&self) -> &Outline {
        &self.text
    }

    /// The text as it is, as the prompt of turn `number`.
    pub fn prompt(&self, number: usize) -> Prompt {
        self.text.prompt(self.output(number))
    }

    /// The origin of the output of turn `number`.
    fn output(&self, number: usize) -> u64 {
        self.own(number, 1)
    }

    /// Sessions below 2^31 and turns below 2^31 never meet.
    fn own(&self, turn: usize, part: u64) -> u64 {
        (self.session << 32) | ((turn as u64) << 1) | part
    }
}
