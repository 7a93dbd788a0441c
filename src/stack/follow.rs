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
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        call::{Completion, LogprobMode, RouteReason},
        error::Reason,
        ids::{Incarnation, ReplicaId, Target},
        stack::generation::Generation,
    };

    const QUIET: Duration = Duration::from_secs(5);

    fn receipt() -> RouteReceipt {
        RouteReceipt {
            target: Target {
                replica: ReplicaId::new("r"),
                incarnation: Incarnation(1),
                rank: 0,
            },
            served_rank: None,
            reason: RouteReason::NoKey,
            attempts: Vec::new(),
            expected_cached_tokens: 0,
        }
    }

    fn chunk(tokens: &[u32]) -> TokenChunk {
        TokenChunk {
            tokens: tokens.to_vec(),
            ..TokenChunk::default()
        }
    }

    fn kept(tokens: &[u32]) -> Partial {
        Partial {
            tokens: tokens.to_vec(),
            ..Partial::default()
        }
    }

    fn done() -> Outcome {
        Ok(Finished {
            completion: Arc::new(Completion {
                samples: Vec::new(),
                prompt_logprobs: None,
                logprob_mode: LogprobMode::Unknown,
                produced_at: std::time::SystemTime::UNIX_EPOCH,
                total: Duration::ZERO,
                first_token: None,
            }),
            replayed: false,
            stored: true,
        })
    }

    /// The tokens that a reader holds who obeys the events so far.
    async fn read(follower: &mut Follower, events: usize) -> Vec<u32> {
        let mut held: Vec<u32> = Vec::new();
        for _ in 0..events {
            match follower.next().await.unwrap().unwrap() {
                Event::Delta { offset, tokens, .. } => {
                    assert_eq!(offset as usize, held.len());
                    held.extend(tokens);
                }
                Event::Reset { keep, .. } => held.truncate(keep as usize),
                Event::Started(_) | Event::Alive | Event::Final(_) => {}
            }
        }
        held
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_reader_catches_up_then_follows() {
        let (generation, ticket) = Generation::begin(None, 1, 8);
        generation.attempt(0, 1, &Partial::default(), receipt());
        generation.push(0, &chunk(&[1, 2]));
        generation.push(0, &chunk(&[3]));
        let mut follower = Follower::new(ticket, QUIET);
        assert_eq!(read(&mut follower, 2).await, [1, 2, 3]);
        generation.push(0, &chunk(&[4]));
        assert!(matches!(
            follower.next().await,
            Some(Ok(Event::Delta { offset: 3, .. }))
        ));
        generation.end(done());
        assert!(matches!(follower.next().await, Some(Ok(Event::Final(_)))));
        assert!(follower.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_attempt_is_taken_back_to_what_is_kept() {
        let (generation, ticket) = Generation::begin(None, 1, 8);
        let late = generation.follow().unwrap();
        generation.attempt(0, 1, &Partial::default(), receipt());
        generation.push(0, &chunk(&[1, 2, 3]));
        let mut follower = Follower::new(ticket, QUIET);
        assert_eq!(read(&mut follower, 2).await, [1, 2, 3]);
        // Two attempts come and go before the reader looks again: the second
        // kept nothing.
        generation.attempt(0, 2, &Partial::default(), receipt());
        generation.push(0, &chunk(&[7, 8]));
        generation.attempt(0, 3, &kept(&[7, 8]), receipt());
        generation.push(0, &chunk(&[9]));
        let held = read(&mut follower, 2).await;
        assert_eq!(held, [7, 8, 9]);
        // Who comes now never sees what was lost.
        assert_eq!(read(&mut Follower::new(late, QUIET), 2).await, [7, 8, 9]);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_broken_and_the_deadline_ends_it() {
        let (generation, ticket) = Generation::begin(None, 1, 8);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(12);
        let mut follower = Follower::new(ticket.until(deadline), QUIET);
        assert!(matches!(follower.next().await, Some(Ok(Event::Alive))));
        assert!(matches!(follower.next().await, Some(Ok(Event::Alive))));
        let end = follower.next().await.unwrap().unwrap_err();
        assert_eq!(end.reason, Reason::Deadline);
        assert!(follower.next().await.is_none());
        drop(generation);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replay_is_told_once() {
        let (generation, ticket) = Generation::begin(None, 1, 8);
        let mut finished = done().unwrap();
        Arc::get_mut(&mut finished.completion)
            .unwrap()
            .samples
            .push(crate::call::SampleOutput {
                tokens: vec![1, 2, 3],
                logprobs: None,
                top_logprobs: None,
                text: None,
                stop_reason: crate::call::StopReason::Length,
                matched: None,
                weight_spans: Vec::new(),
                routed_experts: None,
                usage: Default::default(),
                route: receipt(),
            });
        generation.end(Ok(finished));
        let mut follower = Follower::new(ticket, QUIET);
        assert_eq!(read(&mut follower, 3).await, [1, 2, 3]);
        assert!(follower.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_delta_is_bounded() {
        let (generation, ticket) = Generation::begin(None, 1, 8);
        generation.attempt(0, 1, &Partial::default(), receipt());
        generation.push(0, &chunk(&vec![7; MAX_DELTA + 1]));
        let mut follower = Follower::new(ticket, QUIET);
        assert_eq!(read(&mut follower, 2).await.len(), MAX_DELTA);
    }
}
