//! A rank for every attempt of every sample: the routing core decides where, and
//! `attempts` whether there is another try.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;
use tower::Service;

use super::{
    Parts, StackConfig,
    asked::{self, Asked},
    attempts::SampleRun,
    counters::Counters,
    dispatch::AttemptFailed,
    fence::Fence,
    idempotency::{Samples, Work},
    partial::Partial,
    poison::{Poison, PromptHash},
    resolve::{ResolvedWork, list},
};
use crate::{
    call::RouteReason,
    engine::Finish,
    error::{Error, Reason},
    fleet::{
        Fleet,
        snapshot::{LoadTicket, RankLoad, RankSlot, RankView, ReplicaView},
    },
    ids::{EngineRequestId, Target},
    routing::{Lack, NoRoute, PinKey, Router, moves::Queued},
    store::FinishedSample,
};

/// One attempt of one sample with the rank that was chosen for it. Only
/// [`Affinity`] makes one.
pub struct RoutedAttempt {
    /// The request.
    pub work: Work,
    /// Which sample.
    pub sample: u32,
    /// 1 for the sample's first attempt; growing over crashes too.
    pub number: u32,
    /// Its name at the engine.
    pub id: EngineRequestId,
    /// The rank.
    pub rank: RoutedRank,
    /// The trajectory whose pin led there.
    pub pin: Option<PinKey>,
    /// Tokens that it goes on from.
    pub kept: Partial,
    /// When the sample's first attempt began.
    pub started: Instant,
    /// Its prompt waits to be computed until its first token.
    pub queued: Queued,
}

/// A chosen rank.
#[derive(Clone)]
pub struct RoutedRank {
    /// Its number for pins.
    pub slot: RankSlot,
    /// Its name.
    pub target: Target,
    /// Its base URL.
    pub url: Arc<str>,
    /// The number that the engine wants.
    pub engine_rank: u32,
    /// The replica's facts.
    pub replica: Arc<ReplicaView>,
    /// What runs there.
    pub load: Arc<RankLoad>,
}

impl RoutedRank {
    fn of(view: &RankView) -> Self {
        Self {
            slot: view.slot,
            target: view.target.clone(),
            url: Arc::clone(&view.facts.url),
            engine_rank: view.facts.engine_rank,
            replica: Arc::clone(&view.replica),
            load: Arc::clone(&view.load),
        }
    }
}

/// An attempt that came to the engine's own end.
#[derive(Debug)]
pub struct AttemptDone {
    /// All tokens of the sample.
    pub tokens: Partial,
    /// How it ended.
    pub finish: Finish,
}

/// The layer.
#[derive(Clone)]
pub struct Affinity<S> {
    pub(super) inner: S,
    pub(super) fleet: Arc<Fleet>,
    pub(super) router: Arc<Router>,
    pub(super) fence: Fence,
    pub(super) poison: Arc<Poison>,
    pub(super) counters: Arc<Counters>,
    pub(super) max_attempts: u32,
}

impl<S> Affinity<S> {
    /// Before `inner`.
    pub fn new(inner: S, parts: &Parts, config: StackConfig) -> Self {
        Self {
            inner,
            fleet: Arc::clone(&parts.fleet),
            router: Arc::clone(&parts.router),
            fence: Fence::new(Arc::clone(&parts.fleet), parts.engines.clone()),
            poison: Arc::clone(&parts.poison),
            counters: Arc::clone(&parts.counters),
            max_attempts: config.max_attempts,
        }
    }
}

impl<S> Service<ResolvedWork> for Affinity<S>
where
    S: Service<RoutedAttempt, Response = AttemptDone, Error = AttemptFailed>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    type Response = Samples;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Samples, Error>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, resolved: ResolvedWork) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { this.run(resolved).await })
    }
}

/// A rank and the count of what is sent there.
pub(super) struct Chosen {
    pub(super) rank: RoutedRank,
    pub(super) reason: RouteReason,
    pub(super) expected_cached_tokens: u32,
    /// See [`Decision`](crate::routing::Decision).
    pub(super) verifiable: bool,
    pub(super) ticket: LoadTicket,
    /// Given away with the attempt.
    pub(super) queued: Queued,
}

impl<S> Affinity<S>
where
    S: Service<RoutedAttempt, Response = AttemptDone, Error = AttemptFailed>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    async fn run(self, resolved: ResolvedWork) -> Result<Samples, Error> {
        let work = &resolved.work;
        let wanted = work.call.params().num_samples;
        let mut finished: Vec<(u32, FinishedSample)> = work.start.finished.clone();
        let missing: Vec<u32> = (0..wanted)
            .filter(|i| !finished.iter().any(|(done, _)| done == i))
            .collect();
        let mut stored = true;
        if !missing.is_empty() {
            let prompt = PromptHash::of(work.call.params());
            self.poison.admit(&prompt)?;
            // One choice for all samples of the request, each counted as load.
            let count = u32::try_from(missing.len()).unwrap_or(u32::MAX);
            let mut all = self.choose(&resolved, count, &[&[]], None).await?;
            let runs = missing.iter().map(|&index| {
                let first = Chosen {
                    rank: all.rank.clone(),
                    reason: all.reason,
                    expected_cached_tokens: all.expected_cached_tokens,
                    verifiable: all.verifiable,
                    ticket: all.ticket.split(1),
                    // The prompt is computed once.
                    queued: std::mem::take(&mut all.queued),
                };
                SampleRun::new(&self, &resolved, prompt, index).run(first)
            });
            let mut failure = None;
            for (index, result) in missing.iter().zip(join_all(runs).await) {
                match result {
                    Ok((sample, kept)) => {
                        finished.push((*index, sample));
                        stored &= kept;
                    }
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            if let Some(error) = failure {
                return Err(error);
            }
        }
        finished.sort_by_key(|(index, _)| *index);
        Ok(Samples {
            samples: finished.into_iter().map(|(_, sample)| sample).collect(),
            stored,
        })
    }

    /// Chooses a rank that is not in the first of the sets `avoid`, or where there
    /// is none in the next. It waits, as long as anybody waits for the generation,
    /// where all that could serve are paused, as for a weight sync: a pinned key
    /// stays where it is; and where the request says so, until some rank serves
    /// its weights and takes it.
    ///
    /// # Errors
    /// `otherwise`, or why there is no rank; and why the generation stops.
    pub(super) async fn choose(
        &self,
        resolved: &ResolvedWork,
        samples: u32,
        avoid: &[&[RankSlot]],
        otherwise: Option<Error>,
    ) -> Result<Chosen, Error> {
        let generation = &resolved.work.generation;
        let wanted = &resolved.work.call.params().weights;
        let for_weights = wanted.wait && wanted.constraint.is_some();
        let asked = Asked::new(resolved.work.call.call(), &resolved.needs, &self.router);
        let mut changes = self.fleet.changes();
        let mut waits = false;
        loop {
            // Before the look: what changes after it ends the wait.
            changes.borrow_and_update();
            let mut why = NoRoute::NoneOpen;
            let mut paused = false;
            for avoid in avoid {
                match self.choose_now(&asked, samples, avoid, None) {
                    Ok(chosen) => return Ok(chosen),
                    Err(none) => why = none,
                }
                if why == NoRoute::KvFull {
                    match self.wait_for_room(resolved, &asked, samples, avoid).await? {
                        Ok(chosen) => return Ok(chosen),
                        Err(none) => why = none,
                    }
                }
                paused |= why == NoRoute::Paused;
            }
            let none = no_route(why);
            let comes =
                for_weights && matches!(none.reason, Reason::WeightsNotServed | Reason::NoReplica);
            if !paused && !comes {
                return Err(match none.reason {
                    // Says more than how the last attempt was lost.
                    Reason::WeightsNotServed | Reason::NotSupported => none,
                    _ => otherwise.unwrap_or(none),
                });
            }
            if paused && !std::mem::replace(&mut waits, true) {
                self.counters.waits_for_pause.one();
            }
            if generation.unless_stopped(changes.changed()).await?.is_err() {
                return Err(none);
            }
        }
    }

    /// Waits in line until some rank has room for this trajectory, as long as
    /// anybody waits for the generation; after the longest wait it is taken all the
    /// same. Returns why there is no rank when that is for another reason.
    async fn wait_for_room(
        &self,
        resolved: &ResolvedWork,
        asked: &Asked<'_>,
        samples: u32,
        avoid: &[RankSlot],
    ) -> Result<Result<Chosen, NoRoute>, Error> {
        let generation = &resolved.work.generation;
        let longest = self.router.config().kv_admission.unwrap_or_default().wait;
        let begun = Instant::now();
        let key = asked.key();
        let place = self.router.wait_for_room(&resolved.needs.model, key);
        self.counters.waits_for_kv.one();
        let mut changes = self.fleet.changes();
        loop {
            changes.borrow_and_update();
            let waited = begun.elapsed();
            if place.is_first() || waited >= longest {
                match self.choose_now(asked, samples, avoid, Some(waited)) {
                    Err(NoRoute::KvFull) => {}
                    chosen => {
                        if waited >= longest && chosen.is_ok() {
                            self.counters.waits_for_kv_in_vain.one();
                        }
                        return Ok(chosen);
                    }
                }
            }
            let news = async {
                tokio::select! {
                    () = place.news() => {}
                    // The fleet's end is the generation's, too.
                    _ = changes.changed() => {}
                    () = tokio::time::sleep(longest.saturating_sub(waited)) => {}
                }
            };
            generation.unless_stopped(news).await?;
        }
    }

    fn choose_now(
        &self,
        asked: &Asked<'_>,
        samples: u32,
        avoid: &[RankSlot],
        waited: Option<Duration>,
    ) -> Result<Chosen, NoRoute> {
        let snapshot = self.fleet.snapshot();
        let request = asked.request(samples, avoid, waited);
        let decision = self.router.route(&snapshot, &request, Instant::now())?;
        let view = snapshot.rank(decision.slot).ok_or(NoRoute::NoneOpen)?;
        self.counters.routed(decision.reason).one();
        if decision.last_resort {
            self.counters.last_resorts.one();
        }
        Ok(Chosen {
            rank: RoutedRank::of(view),
            reason: decision.reason,
            expected_cached_tokens: decision.expected_cached_tokens,
            verifiable: decision.verifiable,
            ticket: decision.ticket,
            queued: decision.queued,
        })
    }
}

/// The trajectory's pin, where the request may use it.
pub(super) fn pin_key(resolved: &ResolvedWork) -> Option<PinKey> {
    asked::pin_key(resolved.work.call.call(), &resolved.needs)
}

pub(super) fn prompt_tokens(resolved: &ResolvedWork) -> u32 {
    asked::prompt_tokens(resolved.work.call.call())
}

/// Why there is no rank, as callers are told.
pub(crate) fn no_route(why: NoRoute) -> Error {
    let lacks = match why {
        NoRoute::Lacking(lacks) => lacks,
        NoRoute::Draining => {
            return Error::new(
                Reason::NoReplica,
                "every rank that can serve this drains and takes no new trajectories: resume one \
                 (ResumeReplica) or add a replica",
            );
        }
        NoRoute::KvFull => {
            return Error::new(
                Reason::NoReplica,
                "no rank has room for this trajectory now, or others wait before it \
                 (kv-admission)",
            );
        }
        NoRoute::NoModel | NoRoute::NoneOpen | NoRoute::Paused => {
            return Error::new(
                Reason::NoReplica,
                "no rank that can serve this takes requests now; ListReplicas says why",
            );
        }
    };
    let served: Vec<&str> = lacks
        .iter()
        .filter_map(|lack| match lack {
            Lack::Weights { serves } => Some(&**serves),
            _ => None,
        })
        .collect();
    if !served.is_empty() {
        return Error::new(
            Reason::WeightsNotServed,
            format!(
                "no rank serves the weights asked for; served: {}",
                list(served.into_iter())
            ),
        );
    }
    if lacks.contains(&Lack::Adapter) {
        return Error::new(Reason::NotSupported, "no rank serves the adapter asked for");
    }
    Error::new(
        Reason::NoReplica,
        "no rank that can serve this is there now; ListReplicas says why",
    )
}
