//! A rank for every attempt of every sample: the routing core decides where, and
//! `attempts` whether there is another try.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;
use tower::Service;

use super::{
    Parts, StackConfig,
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
    call::{RouteReason, RoutingPolicy},
    engine::Finish,
    error::{Error, Reason},
    fleet::{
        Fleet,
        snapshot::{LoadTicket, RankLoad, RankSlot, RankView, ReplicaView},
    },
    ids::{EngineRequestId, Target},
    routing::{Lack, NoRoute, PinKey, RouteRequest, Router},
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
    pub(super) ticket: LoadTicket,
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
                    ticket: all.ticket.split(1),
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
        let mut changes = self.fleet.changes();
        let mut waits = false;
        loop {
            // Before the look: what changes after it ends the wait.
            changes.borrow_and_update();
            let mut why = NoRoute::NoneOpen;
            let mut paused = false;
            for avoid in avoid {
                match self.choose_now(resolved, samples, avoid) {
                    Ok(chosen) => return Ok(chosen),
                    Err(none) => why = none,
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
            tokio::select! {
                biased;
                () = generation.stop_token().cancelled() => return Err(generation.stop_reason()),
                changed = changes.changed() => if changed.is_err() {
                    return Err(none);
                },
            }
        }
    }

    fn choose_now(
        &self,
        resolved: &ResolvedWork,
        samples: u32,
        avoid: &[RankSlot],
    ) -> Result<Chosen, NoRoute> {
        let call = resolved.work.call.call();
        let snapshot = self.fleet.snapshot();
        let request = RouteRequest {
            key: pin_key(resolved),
            request: xxhash_rust::xxh3::xxh3_128(call.request_id.as_bytes()),
            samples,
            prompt_tokens: prompt_tokens(resolved),
            needs: &resolved.needs,
            policy: call.routing_policy.unwrap_or_default(),
            avoid,
        };
        let decision = self.router.route(&snapshot, &request, Instant::now())?;
        let view = snapshot.rank(decision.slot).ok_or(NoRoute::NoneOpen)?;
        match decision.reason {
            RouteReason::Draining => self.counters.keys_moved_draining.one(),
            RouteReason::ReplicaLost => self.counters.keys_moved_lost.one(),
            RouteReason::Detour => self.counters.detours.one(),
            _ => {}
        }
        Ok(Chosen {
            rank: RoutedRank::of(view),
            reason: decision.reason,
            expected_cached_tokens: decision.expected_cached_tokens,
            ticket: decision.ticket,
        })
    }
}

/// The trajectory's pin, where the request may use it.
pub(super) fn pin_key(resolved: &ResolvedWork) -> Option<PinKey> {
    let call = resolved.work.call.call();
    if call.routing_policy.unwrap_or_default() != RoutingPolicy::Affinity {
        return None;
    }
    let params = &call.params;
    params.affinity_key.as_ref().map(|key| {
        PinKey::new(
            &call.tenant,
            &resolved.needs.model,
            params.adapter.as_deref(),
            key,
        )
    })
}

pub(super) fn prompt_tokens(resolved: &ResolvedWork) -> u32 {
    let prompt = resolved.work.call.params().prompt.token_count();
    u32::try_from(prompt.unwrap_or(0)).unwrap_or(u32::MAX)
}

fn no_route(why: NoRoute) -> Error {
    let lacks = match why {
        NoRoute::Lacking(lacks) => lacks,
        NoRoute::Draining => {
            return Error::new(
                Reason::NoReplica,
                "every rank that can serve this drains and takes no new trajectories: resume one \
                 (ResumeReplica) or add a replica",
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
                "no rank serves the weights asked for any more; served: {}",
                list(served.into_iter())
            ),
        );
    }
    if lacks.contains(&Lack::Adapter) {
        return Error::new(
            Reason::NotSupported,
            "no rank serves the adapter asked for any more",
        );
    }
    Error::new(
        Reason::NoReplica,
        "no rank that can serve this is there now; ListReplicas says why",
    )
}
