//! One step: whom it admits, what it computes, who ends.

use std::sync::Arc;

use super::{
    Done, Ended, Event, LOOK_AHEAD, RATIO_FIRST, RATIO_LEAST, RATIO_STEPS, Rank, Request, Span,
    Step, limit,
};
use crate::engine::sim::{text::Sequence, timing::Work};

/// A prompt, or the part of one, that a step computes.
struct Chunk<S> {
    request: Request<S>,
    from: usize,
    to: usize,
}

impl<S: Sequence> Rank<S> {
    /// Runs one step. Unset: there is nothing to do.
    pub fn step(&mut self) -> Option<Step> {
        let mut events = Vec::new();
        self.make_room_for_decode();
        let chunks = self.admit(&mut events);
        if let Some(chunk) = chunks.iter().find(|c| c.request.job.poison) {
            events.push(Event::Crashed {
                job: chunk.request.job.id,
            });
        }
        if chunks.is_empty() && self.running.is_empty() {
            return None;
        }

        let mut work = Work::default();
        for chunk in &chunks {
            work.add_chunk(chunk.from, chunk.to);
        }
        for request in &self.running {
            work.add_decode(request.tokens.len());
        }
        let took = self.config.timing.step(&work);
        self.account(&chunks, took.as_micros());

        for request in std::mem::take(&mut self.running) {
            self.generate(request, &mut events);
        }
        for Chunk {
            mut request, to, ..
        } in chunks
        {
            self.settle(&mut request);
            if to < request.tokens.len() && !request.abort {
                self.chunked = Some(request);
            } else if to < request.tokens.len() {
                self.finish(request, Ended::Aborted, &mut events);
            } else if request.job.max_new == 0 {
                let ended = if request.abort {
                    Ended::Aborted
                } else {
                    Ended::Length
                };
                self.finish(request, ended, &mut events);
            } else {
                self.generate(request, &mut events);
            }
        }
        self.ratio = (self.ratio - (RATIO_FIRST - RATIO_LEAST) / RATIO_STEPS).max(RATIO_LEAST);
        Some(Step { took, events })
    }

    /// Takes requests into the batch while running requests, prompt tokens and
    /// KV allow it. Their KV is there when this returns.
    fn admit(&mut self, events: &mut Vec<Event>) -> Vec<Chunk<S>> {
        let page = self.config.page.max(1);
        let mut budget = self.config.chunk.max(page);
        let mut chunks = Vec::new();
        if let Some(mut request) = self.chunked.take() {
            let to = request.tokens.len().min(request.kv + budget);
            let to = if to < request.tokens.len() {
                self.cache.aligned(to)
            } else {
                to
            };
            let need = (to - request.kv).next_multiple_of(page);
            if self.reserve(need) {
                let from = request.kv;
                budget = budget.saturating_sub(to - from);
                self.grow(&mut request, to - from);
                chunks.push(Chunk { request, from, to });
            } else {
                self.chunked = Some(request);
                return chunks;
            }
        }
        while budget >= page && self.running.len() + chunks.len() < self.config.max_running {
            let Some(mut request) = self.waiting.pop_front() else {
                break;
            };
            let found = self.cache.find(
                &request.job.namespace,
                request.tokens.first(limit(&request)),
            );
            // Locked first, so that room is not made of what it is about to use.
            self.cache.lock(found.node);
            let extend = request.tokens.len() - found.tokens;
            let need = extend.next_multiple_of(page);
            let alone = chunks.is_empty() && self.running.is_empty();
            let ahead = if alone {
                0
            } else {
                request.remaining().min(LOOK_AHEAD) + self.expected_growth(&chunks)
            };
            if need + ahead > self.available() + self.cache.evictable() {
                self.cache.unlock(found.node);
                self.waiting.push_front(request);
                break;
            }
            let now = extend.min(budget);
            let now = if now < extend {
                self.cache.aligned(now)
            } else {
                now
            };
            if now == 0 || !self.reserve(now.next_multiple_of(page)) {
                self.cache.unlock(found.node);
                self.waiting.push_front(request);
                break;
            }
            request.node = Some(found.node);
            request.in_tree = found.tokens;
            request.kv = found.tokens;
            if request.cached.is_none() {
                let cached = u32::try_from(found.tokens).unwrap_or(u32::MAX);
                request.cached = Some(cached);
                events.push(Event::Started {
                    job: request.job.id,
                    cached,
                });
            }
            budget -= now;
            let (from, to) = (found.tokens, found.tokens + now);
            self.grow(&mut request, now);
            let whole = to == request.tokens.len();
            chunks.push(Chunk { request, from, to });
            if !whole {
                break;
            }
        }
        chunks
    }

    /// Tokens that those who run already are expected to need yet.
    fn expected_growth(&self, chunks: &[Chunk<S>]) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share, from 0 to 1, of at most LOOK_AHEAD"
        )]
        let growth = |request: &Request<S>| {
            (request.remaining().min(LOOK_AHEAD) as f64 * self.ratio).ceil() as usize
        };
        let running: usize = self.running.iter().map(growth).sum();
        let computing: usize = chunks
            .iter()
            .map(|c| growth(&c.request) + (c.request.tokens.len() - c.request.kv))
            .sum();
        running + computing
    }

    /// Gives every running request a place for one token. Where the cache
    /// has nothing left to evict, requests lose theirs: the ones with the
    /// fewest generated tokens first, of those the longest prompt.
    fn make_room_for_decode(&mut self) {
        let page = self.config.page.max(1);
        loop {
            let need: usize = self
                .running
                .iter()
                .filter(|r| (r.kv - r.in_tree).is_multiple_of(page))
                .count()
                * page;
            if self.reserve(need) {
                break;
            }
            let victim = (0..self.running.len()).min_by_key(|&at| {
                let r = &self.running[at];
                (r.output(), std::cmp::Reverse(r.prompt))
            });
            let request = match victim {
                Some(at) if self.running.len() > 1 => self.running.remove(at),
                _ => match self.chunked.take() {
                    Some(request) => request,
                    // One alone always fits: `submit` saw to that.
                    None => break,
                },
            };
            self.retract(request);
            self.ratio = self.ratio_after_retraction();
        }
        for mut request in std::mem::take(&mut self.running) {
            self.grow(&mut request, 1);
            self.running.push(request);
        }
    }

    /// What has been generated, and a little more, over what was asked for.
    fn ratio_after_retraction(&self) -> f64 {
        let done: usize = self.running.iter().map(|r| r.output() + 20).sum();
        let asked: usize = self.running.iter().map(|r| r.job.max_new as usize).sum();
        (done as f64 / asked.max(1) as f64).clamp(RATIO_LEAST, 1.0)
    }

    /// KV tokens that nobody holds.
    fn available(&self) -> usize {
        self.config
            .kv_tokens
            .saturating_sub(self.cache.evictable() + self.cache.protected() + self.private)
    }

    /// Makes `tokens` available, by eviction where that is needed.
    fn reserve(&mut self, tokens: usize) -> bool {
        let available = self.available();
        if available < tokens {
            self.cache.evict(tokens - available);
        }
        self.available() >= tokens
    }

    /// Gives a request the KV of `by` more tokens.
    fn grow(&mut self, request: &mut Request<S>, by: usize) {
        let before = self.private_of(request);
        request.kv += by;
        self.private += self.private_of(request) - before;
    }

    /// Hands the whole pages of a request's KV to the tree and locks them there.
    fn settle(&mut self, request: &mut Request<S>) {
        self.private -= self.private_of(request);
        let held = self
            .cache
            .insert(&request.job.namespace, request.tokens.first(request.kv));
        self.cache.lock(held.node);
        if let Some(old) = request.node.replace(held.node) {
            self.cache.unlock(old);
        }
        request.in_tree = held.tokens;
        self.private += self.private_of(request);
    }

    /// Appends the next token and decides whether it was the last.
    fn generate(&mut self, mut request: Request<S>, events: &mut Vec<Event>) {
        // Before it may end, its end is not drawn.
        let early = request.output_u32() < request.job.min_new;
        let eos = (!request.job.ignore_eos && !early).then_some(self.config.eos);
        let token =
            request
                .tokens
                .generate(request.job.seed, self.config.vocab, eos, self.config.eos.id);
        self.totals.generated += 1;
        let total = request.output_u32();
        match request.spans.last_mut() {
            Some(span) if span.version == self.version => span.end = total,
            _ => request.spans.push(Span {
                version: Arc::clone(&self.version),
                start: total - 1,
                end: total,
            }),
        }
        let ended = if request.abort {
            Some(Ended::Aborted)
        } else if total >= request.job.max_new {
            Some(Ended::Length)
        } else if total > request.job.min_new && request.ended_by(token, self.config.eos.id) {
            Some(Ended::Stop(token))
        } else {
            None
        };
        if let Some(ended) = ended {
            self.finish(request, ended, events);
            return;
        }
        let every = request.job.notify_every;
        let tell = match every {
            0 => false,
            1 => true,
            // The first one at once, then every so many.
            _ => total % every == 1,
        };
        if tell {
            events.push(Event::Progress {
                job: request.job.id,
                tokens: request.tokens.tail(request.prompt + request.told),
                total,
                retractions: request.retractions,
            });
            request.told = request.output();
        }
        self.running.push(request);
    }

    /// Leaves its KV in the cache and ends it.
    fn finish(&mut self, mut request: Request<S>, ended: Ended, events: &mut Vec<Event>) {
        self.settle(&mut request);
        self.private -= self.private_of(&request);
        if let Some(node) = request.node.take() {
            self.cache.unlock(node);
        }
        if request.spans.is_empty() {
            request.spans.push(Span {
                version: Arc::clone(&self.version),
                start: 0,
                end: 0,
            });
        }
        events.push(Event::Done {
            job: request.job.id,
            done: Box::new(Done {
                ended,
                total: request.output_u32(),
                tokens: request.tokens.tail(request.prompt + request.told),
                cached: request.cached.unwrap_or(0),
                retractions: request.retractions,
                spans: std::mem::take(&mut request.spans),
            }),
        });
    }

    fn account(&mut self, chunks: &[Chunk<S>], micros: u128) {
        let micros = u64::try_from(micros).unwrap_or(u64::MAX);
        self.totals.steps += 1;
        if chunks.is_empty() {
            let (n, us) = (self.running.len() as f64, micros as f64);
            let more = [1.0, n, us, n * n, n * us, n];
            for (total, more) in self.totals.decode_moments.iter_mut().zip(more) {
                *total += more;
            }
            return;
        }
        let computed: usize = chunks.iter().map(|c| c.to - c.from).sum();
        let cached: usize = chunks
            .iter()
            // What an earlier chunk computed is not a hit.
            .filter(|c| c.request.cached.map(|n| n as usize) == Some(c.from))
            .map(|c| c.from)
            .sum();
        self.totals.prefilled += computed as u64;
        self.totals.prefill_us += micros;
        self.hit_rate = cached as f64 / (cached + computed).max(1) as f64;
    }
}
