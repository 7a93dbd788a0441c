//! A registered sidecar: it looks at its engine at every beat and says what it saw.

use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{
    Found, Sidecar, chance,
    control::{CallError, Grant},
    engine::{Sighting, Standing},
    frozen::Pulse,
    phase::Event,
    told,
};
use crate::proto::{
    AdapterList, Directive, HeartbeatRequest, RankStatus, ReplicaState as WireState,
};

/// An engine that answers nothing this often in a row is reported unhealthy;
/// one that is gone at once.
const SILENT_LOOKS: u32 = 2;
/// An engine that was told to end finishes what it is sent until it has nothing to
/// do, and is gone then: trajectories move soon. Not at once, since what it says
/// is taken for so long before it is asked again whether it ends or is only paused.
const ENDING_GRACE: Duration = Duration::from_secs(15);

impl Sidecar {
    /// Beats at the interval that was told, on an absolute schedule: a late
    /// beat is left out, not made up for.
    pub(super) async fn beat(&mut self, shutdown: &CancellationToken) -> Event {
        let Some(grant) = self.grant else {
            return Event::Unknown;
        };
        let mut ticks = tokio::time::interval(grant.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            let more = tokio::select! {
                biased;
                () = shutdown.cancelled() => return Event::Shutdown,
                gpus = told(&mut self.asked) => {
                    if gpus == self.gpus {
                        continue;
                    }
                    self.gpus = gpus;
                    return Event::FactsChanged;
                }
                () = self.engine.told() => true,
                _ = ticks.tick() => false,
            };
            // What has come is read; what has failed is asked for again.
            if more || (self.is_pending() && !self.engine.awaits()) {
                match self.refresh().await {
                    Found::Restarted => return Event::EngineRestarted,
                    Found::Changed => return Event::FactsChanged,
                    Found::Same | Found::Trouble(_) => {}
                }
            }
            if more {
                continue;
            }
            let state = match self.look().await {
                Ok(state) => state,
                Err(event) => return event,
            };
            let beat = self.heartbeat(grant.incarnation, state);
            match self.control.heartbeat(beat, grant.interval).await {
                Ok(heard) => {
                    self.failures = 0;
                    self.follow(heard.directive);
                    if heard.directive == Directive::Reregister {
                        return self.again(Event::ReregisterAsked, &grant, shutdown).await;
                    }
                }
                Err(CallError::Unknown(_)) => {
                    return self.again(Event::Unknown, &grant, shutdown).await;
                }
                Err(CallError::Dead(_)) => {
                    return self.again(Event::Disowned, &grant, shutdown).await;
                }
                Err(CallError::Stale(said)) => {
                    if let Found::Restarted = self.refresh().await {
                        return Event::EngineRestarted;
                    }
                    self.stale = Some(said);
                    return Event::Stale;
                }
                Err(
                    error @ (CallError::Failed(_) | CallError::Full(_) | CallError::Refused(_)),
                ) => {
                    if self.failures == 0 {
                        tracing::warn!(replica = %self.config.replica_id, %error, "a heartbeat is not taken");
                    }
                    self.failures = self.failures.saturating_add(1);
                }
            }
        }
    }

    fn is_pending(&self) -> bool {
        self.known.as_ref().is_some_and(|known| known.facts.pending)
    }

    /// An operator's drain is repeated in the beats and followed by nothing else:
    /// it may be resumed.
    fn follow(&mut self, directive: Directive) {
        let drain = directive == Directive::Drain;
        if drain != self.drain {
            tracing::info!(replica = %self.config.replica_id, drain, "an operator's drain");
        }
        self.drain = drain;
    }

    /// Registers again under the same boot id, not at the same moment as
    /// everybody else.
    async fn again(&mut self, event: Event, grant: &Grant, shutdown: &CancellationToken) -> Event {
        self.recheck = true;
        let longest = self.config.timing.reregister_jitter.min(grant.interval);
        if self.pause(longest.mul_f64(chance()), shutdown).await {
            return Event::Shutdown;
        }
        event
    }

    /// Looks at the engine; the state to report, or the event that it is
    /// another one.
    async fn look(&mut self) -> Result<WireState, Event> {
        let Some(known) = &self.known else {
            return Err(Event::Unknown);
        };
        let mut looked = self.engine.look(&known.facts).await;
        if looked.is_ok() && self.engine.breaks() != known.breaks {
            match self.refresh().await {
                Found::Same => {}
                Found::Changed => return Err(Event::FactsChanged),
                Found::Restarted => return Err(Event::EngineRestarted),
                // It may be starting: until its facts are told, what it says is
                // not taken for that of the registered start.
                Found::Trouble(trouble) => looked = Err(trouble),
            }
        }
        match looked {
            Ok(sighting) => {
                self.silent = 0;
                if let Some(adapters) = &sighting.adapters {
                    self.loads.see(adapters);
                }
                let state = self.state_of(&sighting);
                self.last = Some(sighting);
                Ok(state)
            }
            Err(trouble) => {
                self.silent = self.silent.saturating_add(1);
                if self.silent == 1 {
                    tracing::warn!(replica = %self.config.replica_id, %trouble, "the engine does not answer");
                }
                if trouble.is_gone() || self.silent >= SILENT_LOOKS {
                    self.last = None;
                }
                Ok(match &self.last {
                    Some(sighting) => self.state_of(sighting),
                    None => WireState::Unhealthy,
                })
            }
        }
    }

    fn state_of(&self, sighting: &Sighting) -> WireState {
        let pulses = || sighting.ranks.iter().map(|rank| rank.pulse);
        if pulses().any(|pulse| pulse == Pulse::Dead) || pulses().all(|pulse| pulse != Pulse::Alive)
        {
            WireState::Unhealthy
        } else if self.drain || sighting.standing == Standing::Draining {
            WireState::Draining
        } else {
            WireState::Ready
        }
    }

    pub(super) fn heartbeat(&mut self, incarnation: u64, state: WireState) -> HeartbeatRequest {
        self.sequence += 1;
        let standing = self.last.as_ref().map(|seen| seen.standing);
        let ending = standing == Some(Standing::Draining);
        let ranks = match (&self.last, &self.known) {
            (Some(seen), _) => seen
                .ranks
                .iter()
                .map(|rank| RankStatus {
                    rank: rank.load.rank,
                    healthy: rank.pulse == Pulse::Alive && state != WireState::Unhealthy,
                    running: rank.load.running,
                    waiting: rank.load.waiting,
                    waiting_uncached_tokens: rank.load.waiting_uncached_tokens,
                    kv_used_tokens: rank.load.kv_used_tokens,
                    weight_version: rank.weight_version.clone(),
                    paused: seen.standing == Standing::Paused,
                })
                .collect(),
            (None, Some(known)) => known
                .facts
                .ranks
                .iter()
                .map(|fact| RankStatus {
                    rank: fact.rank,
                    healthy: false,
                    weight_version: known.facts.weight_version.clone(),
                    ..RankStatus::default()
                })
                .collect(),
            (None, None) => Vec::new(),
        };
        HeartbeatRequest {
            replica_id: self.config.replica_id.clone(),
            incarnation,
            sequence: self.sequence,
            state: state.into(),
            ranks,
            // An operator's drain is only repeated.
            drain_grace: (state == WireState::Draining && ending)
                .then(|| ENDING_GRACE.try_into().ok())
                .flatten(),
            adapters: self
                .last
                .as_ref()
                .and_then(|seen| seen.adapters.as_deref())
                .map(|adapters| AdapterList {
                    adapters: adapters.iter().map(|a| self.loads.adapter(a)).collect(),
                }),
        }
    }
}
