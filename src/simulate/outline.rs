//! Sequences without token ids: a token is known by where it comes from and by
//! its position. Two sequences share a prefix exactly as far as their tokens come
//! from the same places, which is all that a prefix cache can see.
//!
//! A context of 100,000 tokens is a few hundred runs, so the very scheduler and
//! radix tree of the simulated engine work on it a thousand times faster.

use std::{collections::HashMap, sync::Arc};

use xxhash_rust::xxh3::Xxh3;

use crate::{
    engine::sim::{
        text::{Label, Sequence},
        tokens::Eos,
    },
    routing::prefix::{BLOCK, MOST_BLOCKS},
};

/// Tokens of one origin, up to a position. Positions count from the beginning
/// of the sequence, so a run begins where the one before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Where they come from. Tokens of one origin at one position are equal.
    pub origin: u64,
    /// One past the last of them.
    pub end: usize,
}

/// A prompt, and the origin of what will be generated after it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// What it is made of, without gaps; neighbours differ in their origin.
    pub runs: Arc<[Run]>,
    /// Of the output.
    pub output: u64,
}

/// A sequence of runs that grows at its end.
#[derive(Clone, Debug)]
pub struct Outline {
    runs: Vec<Run>,
    output: u64,
}

impl Outline {
    /// With nothing in it.
    pub fn empty() -> Self {
        Self {
            runs: Vec::new(),
            output: 0,
        }
    }

    /// Appends tokens of an origin.
    pub fn push(&mut self, origin: u64, tokens: usize) {
        if tokens == 0 {
            return;
        }
        let from = self.len();
        match self.runs.last_mut() {
            Some(last) if last.origin == origin => last.end += tokens,
            _ => self.runs.push(Run {
                origin,
                end: from + tokens,
            }),
        }
    }

    /// Keeps the first `tokens` tokens.
    pub fn truncate(&mut self, tokens: usize) {
        let keep = self.runs.partition_point(|run| run.end < tokens);
        self.runs.truncate(keep + 1);
        if tokens == 0 {
            self.runs.clear();
        }
        if let Some(last) = self.runs.last_mut() {
            last.end = last.end.min(tokens);
        }
    }

    /// The names of its whole blocks, first to last, as
    /// [`prefix::blocks`](crate::routing::prefix::blocks) names those of token ids:
    /// two are the same where all tokens up to the block's end are.
    pub fn blocks(&self) -> Vec<u64> {
        let mut hasher = Xxh3::new();
        let mut names = Vec::new();
        let mut end = BLOCK as usize;
        for run in &self.runs {
            while end <= run.end {
                hasher.update(&run.origin.to_le_bytes());
                hasher.update(&(end as u64).to_le_bytes());
                names.push(hasher.digest());
                if names.len() == MOST_BLOCKS {
                    return names;
                }
                end += BLOCK as usize;
            }
            // What is left of the run begins a block that others end.
            if run.end + BLOCK as usize > end {
                hasher.update(&run.origin.to_le_bytes());
                hasher.update(&(run.end as u64).to_le_bytes());
            }
        }
        names
    }

    /// As a prompt, with the origin of the output.
    pub fn prompt(&self, output: u64) -> Prompt {
        Prompt {
            runs: self.runs.as_slice().into(),
            output,
        }
    }
}

impl Sequence for Outline {
    type Prompt = Prompt;
    type Label = Runs;

    fn new(prompt: Prompt) -> Self {
        let mut runs = Vec::with_capacity(prompt.runs.len() + 1);
        runs.extend_from_slice(&prompt.runs);
        Self {
            runs,
            output: prompt.output,
        }
    }

    fn len(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end)
    }

    fn first(&self, to: usize) -> View<'_> {
        View {
            runs: &self.runs,
            from: 0,
            to,
        }
    }

    fn generate(&mut self, _seed: u64, _vocab: u32, _eos: Option<Eos>, _eos_id: u32) -> u32 {
        self.push(self.output, 1);
        0
    }

    /// Nobody waits for them.
    fn tail(&self, _from: usize) -> Vec<u32> {
        Vec::new()
    }
}

/// The runs between two nodes of a radix tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    runs: Vec<Run>,
    from: usize,
}

/// Positions `[from, to)` of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The first one reaches beyond `from`.
    runs: &'a [Run],
    from: usize,
    to: usize,
}

/// A copy of the runs up to position `to`, the last one cut there.
fn clipped(runs: &[Run], to: usize) -> Vec<Run> {
    let whole = runs.partition_point(|run| run.end <= to);
    let mut out = Vec::with_capacity(whole + 1);
    out.extend_from_slice(&runs[..whole]);
    if let Some(cut) = runs.get(whole)
        && out.last().is_none_or(|last| last.end < to)
    {
        out.push(Run { end: to, ..*cut });
    }
    out
}

impl Label for Runs {
    type View<'a> = View<'a>;
    type Key = Box<[Run]>;

    fn empty() -> Self {
        Self {
            runs: Vec::new(),
            from: 0,
        }
    }

    fn of(view: View<'_>) -> Self {
        if view.from == view.to {
            return Self {
                runs: Vec::new(),
                from: view.from,
            };
        }
        Self {
            runs: clipped(view.runs, view.to),
            from: view.from,
        }
    }

    fn len(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end - self.from)
    }

    fn key(&self, page: usize) -> Box<[Run]> {
        clipped(&self.runs, self.from + page).into()
    }

    fn split_off(&mut self, at: usize) -> Self {
        let cut = self.from + at;
        let first = self.runs.partition_point(|run| run.end <= cut);
        let lower = Self {
            runs: self.runs[first..].to_vec(),
            from: cut,
        };
        self.runs = clipped(&self.runs, cut);
        lower
    }

    fn shared(&self, view: View<'_>) -> usize {
        let end = view.to.min(self.from + self.len());
        let (mut here, mut there) = (self.runs.iter(), view.runs.iter());
        let (mut a, mut b) = (here.next(), there.next());
        let mut at = self.from;
        while let (Some(x), Some(y)) = (a, b)
            && x.origin == y.origin
            && at < end
        {
            at = x.end.min(y.end);
            if x.end == at {
                a = here.next();
            }
            if y.end == at {
                b = there.next();
            }
        }
        at.min(end) - self.from
    }

    fn view_len(view: View<'_>) -> usize {
        view.to - view.from
    }

    fn part(view: Self::View<'_>, from: usize, to: usize) -> Self::View<'_> {
        let (from, to) = (view.from + from, view.from + to);
        let first = view.runs.partition_point(|run| run.end <= from);
        View {
            runs: &view.runs[first..],
            from,
            to,
        }
    }

    fn look_up<V: Copy>(
        children: &HashMap<Box<[Run]>, V>,
        view: View<'_>,
        page: usize,
    ) -> Option<V> {
        let key = clipped(view.runs, view.from + page);
        children.get(key.as_slice()).copied()
    }
}

#[cfg(test)]
#[path = "outline_test.rs"]
mod tests;
