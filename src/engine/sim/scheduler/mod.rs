//! The scheduler of one rank: queue, batch, KV cache and time, without a clock
//! and without I/O, so that a server and a discrete-event simulator drive the
//! very same one.
//!
//! It guarantees:
//! - KV in use never exceeds the capacity; where it would, the requests with
//!   the fewest tokens generated are retracted and computed again later;
//! - at least one token of every prompt is computed, and the KV of the last
//!   generated token never is: a request of `p` prompt and `n` generated tokens
//!   leaves `p + n - 1` tokens in the cache;
//! - a request runs or waits, never both, and ends once;
//! - an abort of a running request takes effect with the next step, after one
//!   more token.
//!
//! The caller gives jobs and aborts between steps and calls
//! [`Rank::step`], which says how long the step takes and what has happened at
//! its end.

mod batch;
mod job;

#[cfg(test)]
mod test;

use std::{collections::VecDeque, sync::Arc, time::Duration};

pub use job::{Done, Ended, Event, Job, JobId, Load, RankConfig, Refusal, Span, Totals};

use super::{
    radix::{NodeId, RadixTree},
    text::{Sequence, TokenIds},
};

/// A request that is known here.
#[derive(Debug)]
struct Request<S> {
    /// Its prompt is in `tokens`.
    job: Job<()>,
    /// Prompt and output.
    tokens: S,
    prompt: usize,
    /// Locked while it runs.
    node: Option<NodeId>,
    /// Tokens whose KV is in the tree and locked through `node`.
    in_tree: usize,
    /// Tokens whose KV exists.
    kv: usize,
    /// Output tokens told so far.
    told: usize,
    cached: Option<u32>,
    retractions: u32,
    spans: Vec<Span>,
    abort: bool,
    /// Tokens that were not cached when it was queued.
    uncached: usize,
}

impl<S: Sequence> Request<S> {
    fn output(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    fn output_u32(&self) -> u32 {
        u32::try_from(self.output()).unwrap_or(u32::MAX)
    }

    /// Whether this token is an end of it.
    fn ended_by(&self, token: u32, eos: u32) -> bool {
        let job = &self.job;
        (!job.ignore_eos && token == eos)
            || ((!job.ignore_eos || job.stops_past_eos) && job.stop_ids.contains(&token))
    }

    /// Tokens that it may still generate.
    fn remaining(&self) -> usize {
        (self.job.max_new as usize).saturating_sub(self.output())
    }
}

/// One rank. What its sequences are made of is of no matter to it.
#[derive(Debug)]
pub struct Rank<S: Sequence = TokenIds> {
    config: RankConfig,
    cache: RadixTree<S::Label>,
    waiting: VecDeque<Request<S>>,
    running: Vec<Request<S>>,
    /// The request whose prompt is computed in chunks. One at a time.
    chunked: Option<Request<S>>,
    version: Arc<str>,
    /// KV tokens of running requests that are not in the tree, in whole pages.
    private: usize,
    /// The share of its remaining tokens that a running request is expected to
    /// generate. Falls while all goes well, rises with a retraction.
    ratio: f64,
    hit_rate: f64,
    totals: Totals,
}

/// Where `ratio` starts, where it ends, and in how many steps.
const RATIO_FIRST: f64 = 0.7;
const RATIO_LEAST: f64 = 0.098;
const RATIO_STEPS: f64 = 600.0;
/// Tokens ahead that admission looks at.
const LOOK_AHEAD: usize = 4096;

/// What a step did.
#[derive(Debug)]
pub struct Step {
    /// How long it took.
    pub took: Duration,
    /// What happened at its end, in order.
    pub events: Vec<Event>,
}

impl<S: Sequence> Rank<S> {
    /// An idle one with an empty cache.
    pub fn new(config: RankConfig, version: Arc<str>) -> Self {
        Self {
            cache: RadixTree::new(config.page),
            config,
            waiting: VecDeque::new(),
            running: Vec::new(),
            chunked: None,
            version,
            private: 0,
            ratio: RATIO_FIRST,
            hit_rate: 0.0,
            totals: Totals::default(),
        }
    }

    /// Takes a job. What it returns happens at once.
    pub fn submit(&mut self, job: Job<S::Prompt>) -> Vec<Event> {
        let (prompt, mut job) = job.take_prompt();
        let tokens = S::new(prompt);
        let room = self.cache.aligned(self.config.kv_tokens);
        if tokens.is_empty() || tokens.len() + 1 >= room {
            return vec![refused(job.id, Refusal::TooLarge)];
        }
        // One token less than fits: the KV of the next one needs a place too.
        let most = room - 1 - tokens.len();
        job.max_new = job.max_new.min(u32::try_from(most).unwrap_or(u32::MAX));
        let mut events = Vec::new();
        if self
            .config
            .max_queued
            .is_some_and(|most| self.waiting.len() >= most)
        {
            match self.displaceable(job.priority) {
                Some(at) => {
                    if let Some(out) = self.waiting.remove(at) {
                        events.push(give_up(out, Refusal::Displaced));
                    }
                }
                None => return vec![refused(job.id, Refusal::QueueFull)],
            }
        }
        self.enqueue(Request {
            prompt: tokens.len(),
            tokens,
            job,
            node: None,
            in_tree: 0,
            kv: 0,
            told: 0,
            cached: None,
            retractions: 0,
            spans: Vec::new(),
            abort: false,
            uncached: 0,
        });
        events
    }

    /// Ends a job. A waiting one ends now; a running one at the end of the
    /// next step; one that is not known is not touched.
    pub fn abort(&mut self, id: JobId) -> Option<Event> {
        if let Some(at) = self.waiting.iter().position(|r| r.job.id == id) {
            let request = self.waiting.remove(at)?;
            return Some(give_up(request, Refusal::AbortedWaiting));
        }
        if let Some(request) = self
            .running
            .iter_mut()
            .chain(&mut self.chunked)
            .find(|r| r.job.id == id)
        {
            request.abort = true;
        }
        None
    }

    /// Takes every running request out of the batch and puts it into the
    /// queue; its tokens stay, its private KV is freed.
    pub fn retract_all(&mut self) {
        let mut out: Vec<_> = self.chunked.take().into_iter().collect();
        out.append(&mut self.running);
        for request in out {
            self.retract(request);
        }
    }

    /// Empties the cache, unless requests run. Requests in the queue do not
    /// matter here: whether they do is the caller's rule.
    pub fn flush(&mut self) -> bool {
        let idle = self.running.is_empty() && self.chunked.is_none();
        if idle {
            self.cache.clear();
        }
        idle
    }

    /// From now on tokens are generated by these weights.
    pub fn set_version(&mut self, version: Arc<str>) {
        self.version = version;
    }

    /// Nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.chunked.is_none() && self.waiting.is_empty()
    }

    /// Nothing waits.
    pub fn queue_is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// What it holds and does now.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len() + usize::from(self.chunked.is_some()),
            waiting: self.waiting.len(),
            retracted: self.waiting.iter().filter(|r| r.retractions > 0).count(),
            waiting_uncached: self.waiting.iter().map(|r| r.uncached).sum(),
            waiting_tokens: self.waiting.iter().map(|r| r.tokens.len()).sum(),
            used: self.cache.protected() + self.private,
            cache_hit_rate: if self.is_idle() { 0.0 } else { self.hit_rate },
            totals: Totals {
                evicted: self.cache.evicted(),
                ..self.totals
            },
        }
    }

    /// Tokens of this prompt that are cached now. Changes nothing.
    pub fn cached(&self, namespace: &str, prompt: &S) -> usize {
        let limit = prompt.len().saturating_sub(1);
        self.cache.peek(namespace, prompt.first(limit))
    }

    fn enqueue(&mut self, mut request: Request<S>) {
        // As of now, so that a look at the load costs little.
        let held = self.cache.peek(
            &request.job.namespace,
            request.tokens.first(limit(&request)),
        );
        request.uncached = request.tokens.len() - held;
        let at = if self.config.priorities {
            self.waiting
                .iter()
                .position(|r| r.job.priority < request.job.priority)
        } else {
            None
        };
        match at {
            Some(at) => self.waiting.insert(at, request),
            None => self.waiting.push_back(request),
        }
    }

    /// The last waiting request of lower priority than `priority`.
    fn displaceable(&self, priority: i64) -> Option<usize> {
        let last = self.waiting.len().checked_sub(1)?;
        (self.config.priorities && self.waiting[last].job.priority < priority).then_some(last)
    }

    /// KV of the whole request goes, but for what the tree holds of it.
    fn retract(&mut self, mut request: Request<S>) {
        self.private -= self.private_of(&request);
        if let Some(node) = request.node.take() {
            self.cache.unlock(node);
        }
        request.in_tree = 0;
        request.kv = 0;
        request.retractions += 1;
        self.totals.retractions += 1;
        if request.abort {
            // It would have ended with its next token; it ends with the first
            // one after it is computed again.
            self.waiting.push_front(request);
        } else {
            self.enqueue(request);
        }
    }

    /// Private KV of a request in whole pages.
    fn private_of(&self, request: &Request<S>) -> usize {
        (request.kv - request.in_tree).next_multiple_of(self.config.page.max(1))
    }
}

/// Tokens of a request that may come from the cache: never its last one.
fn limit<S: Sequence>(request: &Request<S>) -> usize {
    let most = request.tokens.len() - 1;
    request.job.compute_from.map_or(most, |from| most.min(from))
}

fn refused(job: JobId, why: Refusal) -> Event {
    Event::Refused {
        job,
        why,
        tokens: Vec::new(),
    }
}

fn give_up<S: Sequence>(request: Request<S>, why: Refusal) -> Event {
    Event::Refused {
        job: request.job.id,
        why,
        tokens: request.tokens.tail(request.prompt + request.told),
    }
}
