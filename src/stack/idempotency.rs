//! One key, one generation. A duplicate in flight joins the running generation,
//! one of a finished one is answered from the store, and the same key with other
//! parameters is refused.
//!
//! Every generation, with a key or without, runs in a task of its own: tonic
//! drops the handler of a caller that goes away, and with it nothing but that
//! caller's [`Ticket`].

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service;
use tracing::Instrument;

use super::{
    Parts, StackConfig,
    counters::Counters,
    fingerprint,
    generation::{Finished, Generation, Outcome, Ticket},
    journal::{Journal, from_scratch},
    running::{Entered, Running},
    validate::ValidCall,
};
use crate::{
    error::{Error, Reason},
    failpoint::{self, Point},
    store::{Claim, ClaimRequest, Claimed, Fingerprint, FinishedSample, KeyHash, OwnerId, Store},
};

/// A generation to be done: what the layers below work on.
#[derive(Clone)]
pub struct Work {
    /// The request.
    pub call: Arc<ValidCall>,
    /// Those who wait for it.
    pub generation: Arc<Generation>,
    /// Where it is written down.
    pub journal: Journal,
    /// What is done already.
    pub start: Arc<Claimed>,
}

/// All samples of a finished generation, in order of their index.
#[derive(Debug)]
pub struct Samples {
    /// The samples.
    pub samples: Vec<FinishedSample>,
    /// All of them are kept.
    pub stored: bool,
}

/// The layer.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    shared: Arc<Shared>,
}

struct Shared {
    store: Arc<dyn Store>,
    owner: OwnerId,
    grace: Duration,
    max_followers: usize,
    running: Arc<Running>,
    counters: Arc<Counters>,
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl<S> Idempotency<S> {
    /// Before `inner`.
    pub fn new(inner: S, parts: &Parts, config: StackConfig) -> Self {
        Self {
            inner,
            shared: Arc::new(Shared {
                store: Arc::clone(&parts.store),
                owner: parts.owner,
                grace: config.grace,
                max_followers: config.max_followers,
                running: Arc::clone(&parts.running),
                counters: Arc::clone(&parts.counters),
                tasks: parts.tasks.clone(),
                closing: parts.closing.clone(),
            }),
        }
    }
}

impl<S> Service<ValidCall> for Idempotency<S>
where
    S: Service<Work, Response = Samples, Error = Error> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Ticket;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Ticket, Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, call: ValidCall) -> Self::Future {
        let inner = self.inner.clone();
        let shared = Arc::clone(&self.shared);
        Box::pin(async move { shared.open(inner, call).await })
    }
}

impl Shared {
    async fn open<S>(self: Arc<Self>, inner: S, call: ValidCall) -> Result<Ticket, Error>
    where
        S: Service<Work, Response = Samples, Error = Error> + Send + 'static,
        S::Future: Send + 'static,
    {
        let Some(key) = &call.call().idempotency_key else {
            let (generation, ticket) =
                Generation::begin(None, call.params().num_samples, self.max_followers);
            let run = Run {
                shared: self,
                key: None,
                generation,
            };
            let tasks = run.shared.tasks.clone();
            // Its spans belong to the request that began it.
            tasks.spawn(run.without_key(inner, call).in_current_span());
            return Ok(ticket);
        };
        let key = KeyHash::of(&call.call().tenant, key);
        let fingerprint = fingerprint::of(call.params());
        loop {
            match self.running.enter(
                key,
                fingerprint,
                call.params().num_samples,
                self.max_followers,
            ) {
                Entered::Begun(generation, ticket) => {
                    let run = Run {
                        shared: Arc::clone(&self),
                        key: Some(key),
                        generation,
                    };
                    let running = run.with_key(inner, call, key, fingerprint);
                    self.tasks.spawn(running.in_current_span());
                    return Ok(ticket);
                }
                Entered::Joined(ticket) => {
                    self.counters.joins.one();
                    return Ok(ticket);
                }
                Entered::TooMany => {
                    return Err(Error::new(
                        Reason::TooManyWaiters,
                        format!(
                            "{} callers wait for this idempotency key already",
                            self.max_followers
                        ),
                    ));
                }
                Entered::Mismatch => {
                    self.counters.keys_reused.one();
                    return Err(reused());
                }
                // Never beside it: after it.
                Entered::Stopping(ending) => drop(ending.ended().await),
            }
        }
    }
}

/// A generation's task. However it ends, those who follow are told, and the key
/// is free.
struct Run {
    shared: Arc<Shared>,
    key: Option<KeyHash>,
    generation: Arc<Generation>,
}

impl Drop for Run {
    fn drop(&mut self) {
        // Without effect but after a panic.
        self.end(Err(Error::new(
            Reason::Internal,
            "the generation's task failed; the server's log says why",
        )));
    }
}

impl Run {
    async fn without_key<S>(self, inner: S, call: ValidCall)
    where
        S: Service<Work, Response = Samples, Error = Error>,
    {
        let start = Arc::new(from_scratch(call.params().num_samples));
        let outcome = self
            .generate(inner, call, Journal::None, start, Duration::ZERO)
            .await;
        self.end(outcome);
    }

    async fn with_key<S>(self, inner: S, call: ValidCall, key: KeyHash, fingerprint: Fingerprint)
    where
        S: Service<Work, Response = Samples, Error = Error>,
    {
        let request = ClaimRequest {
            key,
            tenant: call.call().tenant.clone(),
            fingerprint,
            num_samples: call.params().num_samples,
            owner: self.shared.owner,
        };
        failpoint::pass(Point::Claim);
        let outcome = match self.shared.store.claim(request).await {
            Err(error) => Err(error.into()),
            Ok(Claim::Done(completion)) => {
                self.shared.counters.replays.one();
                Ok(Finished {
                    completion,
                    replayed: true,
                    stored: true,
                })
            }
            Ok(Claim::Failed(error)) => Err(error),
            Ok(Claim::Mismatch) => {
                self.shared.counters.keys_reused.one();
                Err(reused())
            }
            Ok(Claim::DataLoss) => Err(Error::new(
                Reason::DataLoss,
                "the result stored under this idempotency key is damaged; it is neither served \
                 nor generated again: use a new key",
            )),
            Ok(Claim::Running { .. }) => Err(Error::new(
                Reason::OutcomeUnknown,
                "another control plane generates this key; retry to get its result",
            )),
            Ok(Claim::Claimed(claimed)) => {
                failpoint::pass(Point::Claimed);
                let journal = Journal::Keyed {
                    store: Arc::clone(&self.shared.store),
                    owner: self.shared.owner,
                    key,
                };
                let outcome = self
                    .generate(
                        inner,
                        call,
                        journal.clone(),
                        Arc::new(claimed),
                        self.shared.grace,
                    )
                    .await;
                if let Err(error) = &outcome
                    && let Err(trouble) = journal.give_up(error).await
                {
                    // The record stays claimed by this run: the next claim of
                    // this owner takes it over.
                    tracing::warn!(?key, %trouble, "a failed generation could not be written down");
                }
                if outcome.is_ok() {
                    failpoint::pass(Point::Told);
                }
                outcome
            }
        };
        self.end(outcome);
    }

    fn end(&self, outcome: Outcome) {
        if let Err(error) = &outcome
            && error.reason == Reason::OutcomeUnknown
        {
            self.shared.counters.unknown_outcomes.one();
        }
        // The key first: who is woken by the end may begin anew at once.
        if let Some(key) = &self.key {
            self.shared.running.leave(key, &self.generation);
        }
        self.generation.end(outcome);
    }

    /// Runs the generation, and stops it when nobody waits for it any more.
    async fn generate<S>(
        &self,
        mut inner: S,
        call: ValidCall,
        journal: Journal,
        start: Arc<Claimed>,
        grace: Duration,
    ) -> Outcome
    where
        S: Service<Work, Response = Samples, Error = Error>,
    {
        self.shared.counters.generations.one();
        let started_at = start.started_at;
        for (sample, _) in &start.finished {
            self.generation.sample_done(*sample);
        }
        let work = Work {
            call: Arc::new(call),
            generation: Arc::clone(&self.generation),
            journal,
            start,
        };
        let running = inner.call(work);
        tokio::pin!(running);
        let result = tokio::select! {
            result = &mut running => result,
            // The attempts see the token and stop at their engines: waited for,
            // so that the key is not free before they have.
            () = self.generation.abandon_after(grace) => running.await,
            () = self.shared.closing.cancelled() => {
                self.generation.cancel(Error::new(
                    Reason::ShuttingDown,
                    "the control plane is shutting down; a retry goes to its next start",
                ));
                running.await
            }
        };
        result.map(|done| Finished {
            completion: Arc::new(FinishedSample::assemble(started_at, &done.samples)),
            replayed: false,
            stored: done.stored,
        })
    }
}

fn reused() -> Error {
    Error::new(
        Reason::IdempotencyKeyReused,
        "this idempotency key was used with other parameters: use a new key for a new request",
    )
}
