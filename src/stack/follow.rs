//! How a stream follows a generation: one append-only buffer per sample, and a
//! cursor per reader. A slow reader lags behind; it slows neither the engine nor
//! others, and what it has not read is the buffer itself, bounded by the request.

use std::time::Duration;

use tokio::{sync::watch, time::timeout};

use super::{
    generation::{Finished, Outcome, Ticket},
    partial::Partial,
};
use crate::{call::RouteReceipt, engine::TokenChunk, error::Error};

/// Tokens of one delta at most: a message of a bounded size, whatever a late
/// joiner has to catch up with.
const MAX_DELTA: usize = 8192;

/// One sample as far as it is.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// The attempt that runs or ran last; 0 before the first.
    attempt: u32,
    /// Per attempt so far, its number and how many tokens it kept. Bounded by
    /// the bounds on attempts.
    kept: Vec<(u32, u32)>,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    route: Option<RouteReceipt>,
    done: bool,
}

impl Progress {
    pub(super) fn attempt(&mut self, number: u32, kept: &Partial, route: RouteReceipt) {
        self.attempt = number;
        self.kept.push((number, kept.len()));
        self.tokens.clone_from(&kept.tokens);
        self.logprobs = kept.logprobs.clone().unwrap_or_default();
        self.route = Some(route);
    }

    pub(super) fn push(&mut self, chunk: &TokenChunk) {
        self.tokens.extend_from_slice(&chunk.tokens);
        if let Some(logprobs) = &chunk.logprobs {
            self.logprobs.extend_from_slice(logprobs);
        }
    }

    pub(super) fn done(&mut self) {
        self.done = true;
    }

    pub(super) fn route(&self) -> Option<&RouteReceipt> {
        self.route.as_ref()
    }

    pub(super) fn is_done(&self) -> bool {
        self.done
    }

    pub(super) fn is_running(&self) -> bool {
        self.attempt > 0 && !self.done
    }
}

/// Something for the reader of a stream.
#[derive(Clone, Debug)]
pub enum Event {
    /// The samples' first ranks are chosen, or the result is known. First, once.
    Started(Vec<RouteReceipt>),
    /// More tokens of a sample, provisional until [`Event::Final`].
    Delta {
        /// Which sample.
        sample: u32,
        /// Which attempt.
        attempt: u32,
        /// Position of the first of them.
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
        /// One per token, where asked for.
        logprobs: Vec<f32>,
    },
    /// An attempt was lost: keep the first tokens of the sample, drop the rest.
    Reset {
        /// Which sample.
        sample: u32,
        /// The attempt that goes on.
        attempt: u32,
        /// Tokens that stay.
        keep: u32,
    },
    /// Nothing new for a while.
    Alive,
    /// The whole result. Last.
    Final(Finished),
}

/// One reader.
#[derive(Debug)]
pub struct Follower {
    ticket: Ticket,
    progress: watch::Receiver<u64>,
    cursors: Vec<Cursor>,
    started: bool,
    ended: bool,
    sign_of_life: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    attempt: u32,
    sent: usize,
}

impl Follower {
    /// Of the generation that `ticket` holds; silent for at most `sign_of_life`.
    pub fn new(ticket: Ticket, sign_of_life: Duration) -> Self {
        let samples = ticket.generation().read(|samples, _| samples.len());
        Self {
            progress: ticket.progress(),
            ticket,
            cursors: vec![Cursor::default(); samples],
            started: false,
            ended: false,
            sign_of_life,
        }
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Event, Error>> {
        if self.ended {
            return None;
        }
        loop {
            self.progress.mark_unchanged();
            if let Some(event) = self.ready() {
                self.ended = matches!(event, Ok(Event::Final(_)) | Err(_));
                return Some(event);
            }
            let woken = timeout(self.sign_of_life, self.progress.changed());
            let woken = match self.ticket.deadline() {
                Some(deadline) => tokio::time::timeout_at(deadline, woken).await,
                None => Ok(woken.await),
            };
            match woken {
                Err(_) => {
                    self.ended = true;
                    return Some(Err(Error::deadline()));
                }
                Ok(Err(_)) => return Some(Ok(Event::Alive)),
                Ok(Ok(_)) => {}
            }
        }
    }

    /// What can be told without waiting.
    fn ready(&mut self) -> Option<Result<Event, Error>> {
        let Self {
            ticket,
            cursors,
            started,
            ..
        } = self;
        ticket.generation().read(|samples, outcome| {
            if !*started {
                let routes = routes(samples, outcome)?;
                *started = true;
                return Some(Ok(Event::Started(routes)));
            }
            for (index, (cursor, progress)) in (0..).zip(cursors.iter_mut().zip(samples)) {
                if let Some(event) = cursor.advance(index, progress) {
                    return Some(Ok(event));
                }
            }
            match outcome? {
                Err(error) => Some(Err(error.clone())),
                Ok(finished) => {
                    Some(Ok(catch_up(cursors, finished)
                        .unwrap_or_else(|| Event::Final(finished.clone()))))
                }
            }
        })
    }
}

/// Known once every sample was sent somewhere, or it is all over; an error is
/// told as such.
fn routes(samples: &[Progress], outcome: Option<&Outcome>) -> Option<Vec<RouteReceipt>> {
    match outcome {
        Some(Ok(finished)) => Some(
            finished
                .completion
                .samples
                .iter()
                .map(|s| s.route.clone())
                .collect(),
        ),
        Some(Err(_)) => Some(Vec::new()),
        None => {
            let routed = samples.iter().all(|p| p.done || p.route.is_some());
            routed.then(|| samples.iter().filter_map(|p| p.route.clone()).collect())
        }
    }
}

impl Cursor {
    fn advance(&mut self, sample: u32, progress: &Progress) -> Option<Event> {
        // Nothing runs, or nothing had to: then the result is all there is.
        if progress.attempt == 0 {
            return None;
        }
        if self.attempt != progress.attempt {
            let first = self.attempt == 0;
            // Of all attempts since, the one that kept the least counts.
            let keep = progress
                .kept
                .iter()
                .filter(|(number, _)| *number > self.attempt)
                .map(|(_, kept)| *kept as usize)
                .min()
                .unwrap_or(0);
            self.attempt = progress.attempt;
            if !first {
                self.sent = self.sent.min(keep);
                return Some(Event::Reset {
                    sample,
                    attempt: self.attempt,
                    keep: position(self.sent),
                });
            }
        }
        self.delta(sample, &progress.tokens, &progress.logprobs)
    }

    fn delta(&mut self, sample: u32, tokens: &[u32], logprobs: &[f32]) -> Option<Event> {
        let from = self.sent;
        let to = tokens.len().min(from + MAX_DELTA);
        if from >= to {
            return None;
        }
        self.sent = to;
        Some(Event::Delta {
            sample,
            attempt: self.attempt,
            offset: position(from),
            tokens: tokens[from..to].to_vec(),
            logprobs: logprobs.get(from..to).unwrap_or_default().to_vec(),
        })
    }
}

/// What a reader has not seen of a result that was not generated before its
/// eyes: a replay, or samples that an earlier run had finished.
fn catch_up(cursors: &mut [Cursor], finished: &Finished) -> Option<Event> {
    for (index, (cursor, sample)) in (0..).zip(cursors.iter_mut().zip(&finished.completion.samples))
    {
        if cursor.attempt == 0 {
            cursor.attempt = sample.route.attempts.last().map_or(1, |a| a.number);
        }
        let logprobs = sample.logprobs.as_deref().unwrap_or_default();
        if let Some(event) = cursor.delta(index, &sample.tokens, logprobs) {
            return Some(event);
        }
    }
    None
}

fn position(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
