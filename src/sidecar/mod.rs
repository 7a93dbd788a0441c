//! The sidecar: beside each engine, it registers its ranks, reports their
//! health by heartbeat and takes its leave. It guarantees:
//!
//! - one start of an engine has one boot id, and an engine that was seen to
//!   restart gets another before its next beat;
//! - whatever the engine does, beats go on and say how it is;
//! - whatever the control plane does (restarts, forgets, is away), the replica
//!   is registered again by itself;
//! - every wait is bounded, and a shutdown ends within the drain timeout.
//!
//! The states and their transitions stand in [`phase`]. Several sidecars can run
//! in one process.

pub mod accelerator;
mod beat;
pub mod config;
pub mod control;
mod dialect;
pub mod engine;
pub mod frozen;
mod leave;
pub mod link;
mod loads;
pub mod phase;
mod register;
mod vllm;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

pub use self::config::{AcceleratorConfig, SidecarConfig, Timing};
use self::{
    control::{CallError, Control, Grant},
    engine::{Engine, EngineTrouble, Sighting},
    link::Breaks,
    loads::Loads,
    phase::{Boot, Event, Phase},
};
use crate::engine::facts::Facts;

/// Why a sidecar ended by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SidecarError {
    /// It was told nonsense; all faults.
    #[error("invalid configuration: {0}")]
    Config(String),
    /// Another sidecar registered a newer start under the same replica id.
    #[error(
        "a newer start of this replica is registered, but this engine has not restarted: is the \
         replica id used twice? ({0})"
    )]
    Stale(String),
}

/// Where a sidecar stands, for whoever runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its state.
    pub phase: Phase,
    /// Of the latest registration.
    pub incarnation: Option<u64>,
    /// Of the latest registration.
    pub boot_id: Option<String>,
}

/// Engines close a connection that is idle for 5 s: with beats further apart a
/// loss says nothing.
const KEEPALIVE: Duration = Duration::from_secs(4);
/// Its own engine is asked at least so often whether it is there: whoever waits for
/// it to come back should not wait for the sidecar as well.
const ASK_ENGINE: Duration = Duration::from_secs(1);
/// What an engine is slow to tell of a start that is registered for the first time
/// is waited for so long; the rest follows.
const FIRST_FACTS: Duration = Duration::from_millis(250);

/// One sidecar.
#[derive(Debug)]
pub struct Sidecar {
    config: SidecarConfig,
    engine: Engine,
    control: Control,
    gpus: Vec<accelerator::Gpu>,
    /// The driver may take seconds to tell them: nothing waits for it.
    asked: Option<JoinHandle<Vec<accelerator::Gpu>>>,
    status: watch::Sender<Status>,
    /// Only growing, over restarts of the sidecar too: it begins at the time.
    sequence: u64,
    known: Option<Known>,
    grant: Option<Grant>,
    /// Failures in a row of what the current phase tries.
    failures: u32,
    /// The engine should be asked again before the next registration.
    recheck: bool,
    /// An operator asked for a drain.
    drain: bool,
    last: Option<Sighting>,
    loads: Loads,
    silent: u32,
    stale: Option<String>,
}

/// The start of the engine that is, or is to be, registered.
#[derive(Debug)]
struct Known {
    facts: Facts,
    vocab_size: u32,
    boot_id: String,
    /// As they were when the facts were read.
    breaks: Breaks,
}

/// What reading the facts again has found.
enum Found {
    Same,
    Changed,
    Restarted,
    Trouble(EngineTrouble),
}

impl Sidecar {
    /// Checks the configuration. Nothing is sent yet.
    ///
    /// # Errors
    /// [`SidecarError::Config`] with every fault.
    pub fn new(config: SidecarConfig) -> Result<Self, SidecarError> {
        let mut faults = config.faults();
        let control = Control::new(
            &config.control_plane,
            config.access.clone(),
            config.timing.call_timeout,
        )
        .map_err(|more| faults.extend(more))
        .ok();
        let engine = Engine::new(&config).ok();
        let (Some(control), Some(engine), true) = (control, engine, faults.is_empty()) else {
            return Err(SidecarError::Config(faults.join("; ")));
        };
        let status = Status {
            phase: Phase::Waiting,
            incarnation: None,
            boot_id: None,
        };
        Ok(Self {
            config,
            engine,
            control,
            gpus: Vec::new(),
            asked: None,
            status: watch::Sender::new(status),
            sequence: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0)),
            known: None,
            grant: None,
            failures: 0,
            recheck: false,
            drain: false,
            last: None,
            loads: Loads::default(),
            silent: 0,
            stale: None,
        })
    }

    /// Follows the sidecar from now on, also after it has begun to run.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Runs until `shutdown` is cancelled and the leave is taken.
    ///
    /// # Errors
    /// [`SidecarError::Stale`].
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), SidecarError> {
        if self.config.accelerator.ask_driver {
            self.asked = Some(tokio::spawn(accelerator::gpus()));
        }
        let mut phase = Phase::Waiting;
        loop {
            let event = match phase {
                Phase::Waiting => self.wait_for_engine(&shutdown).await,
                Phase::Registering => self.register(&shutdown).await,
                Phase::Beating => self.beat(&shutdown).await,
                Phase::Leaving => self.leave().await,
                Phase::Stopped => {
                    return self.stale.map_or(Ok(()), |s| Err(SidecarError::Stale(s)));
                }
            };
            let Some((next, boot)) = phase.on(event) else {
                tracing::error!(?phase, ?event, "an event that this phase cannot have");
                continue;
            };
            if boot == Boot::Renew {
                self.renew_boot();
            }
            if next != phase {
                tracing::info!(replica = %self.config.replica_id, from = ?phase, to = ?next, because = ?event, "sidecar");
                self.failures = 0;
            }
            phase = next;
            self.publish(phase);
        }
    }

    fn publish(&self, phase: Phase) {
        self.status.send_replace(Status {
            phase,
            incarnation: self.grant.map(|grant| grant.incarnation),
            boot_id: self.known.as_ref().map(|known| known.boot_id.clone()),
        });
    }

    fn renew_boot(&mut self) {
        if let Some(known) = &mut self.known {
            known.boot_id =
                register::boot_id(&self.config.replica_id, &known.facts, Some(&known.boot_id));
        }
    }

    /// Polls until the engine is ready and tells its facts.
    async fn wait_for_engine(&mut self, shutdown: &CancellationToken) -> Event {
        let mut otherwise = false;
        loop {
            let told = tokio::select! {
                told = self.facts_or_why() => told,
                () = shutdown.cancelled() => return Event::Shutdown,
            };
            match told {
                Ok(()) => return Event::EngineReady,
                Err(trouble) => {
                    // Waiting does not help: somebody has to change something.
                    let is_other = matches!(trouble, EngineTrouble::Dialect { .. });
                    if is_other && !otherwise {
                        tracing::error!(engine = %self.config.engine_url, %trouble, "the engine speaks otherwise than was said");
                    } else if self.failures == 0 {
                        tracing::info!(engine = %self.config.engine_url, %trouble, "waiting for the engine");
                    }
                    otherwise = is_other;
                    if self.pause(self.backoff().min(ASK_ENGINE), shutdown).await {
                        return Event::Shutdown;
                    }
                    self.failures = self.failures.saturating_add(1);
                }
            }
        }
    }

    async fn facts_or_why(&mut self) -> Result<(), EngineTrouble> {
        match self.first_facts().await {
            Ok(()) => Ok(()),
            Err(trouble) => Err(dialect::explained(&self.config, trouble).await),
        }
    }

    async fn first_facts(&mut self) -> Result<(), EngineTrouble> {
        self.engine.ready().await?;
        let facts = self.engine.facts(FIRST_FACTS).await?;
        let vocab_size = engine::vocab_size(&facts, self.config.vocab_size).await;
        self.loads.see(&facts.adapters);
        self.known = Some(Known {
            boot_id: register::boot_id(&self.config.replica_id, &facts, None),
            vocab_size,
            breaks: self.engine.breaks(),
            facts,
        });
        Ok(())
    }

    /// Reads the facts again and keeps them.
    async fn refresh(&mut self) -> Found {
        let known = self.known.as_ref();
        // Of a start that is known well, what is slow to be told tells it from
        // another.
        let patience = match known {
            Some(known)
                if !known.facts.pending && self.engine.breaks().refused == known.breaks.refused =>
            {
                self.config.timing.facts_timeout
            }
            Some(_) | None => FIRST_FACTS,
        };
        let facts = match self.engine.facts(patience).await {
            Ok(facts) => facts,
            Err(trouble) => return Found::Trouble(trouble),
        };
        let vocab_size = engine::vocab_size(&facts, self.config.vocab_size).await;
        self.loads.see(&facts.adapters);
        let breaks = self.engine.breaks();
        let telling = self.grant.is_none_or(|grant| grant.interval < KEEPALIVE);
        let Some(known) = &mut self.known else {
            return Found::Changed;
        };
        let restarted = !known.facts.same_start(&facts)
            // Nobody listened in between: another process, whatever it says.
            || breaks.refused > known.breaks.refused
            // The loss is all there is to go by.
            || ((facts.start.is_none() || known.facts.start.is_none())
                && telling
                && breaks.lost > known.breaks.lost);
        let changed = !known.facts.same_registration(&facts) || known.vocab_size != vocab_size;
        known.facts = facts;
        known.vocab_size = vocab_size;
        known.breaks = breaks;
        match (restarted, changed) {
            (true, _) => Found::Restarted,
            (false, true) => Found::Changed,
            (false, false) => Found::Same,
        }
    }

    /// One attempt, and the wait after one that failed.
    async fn register(&mut self, shutdown: &CancellationToken) -> Event {
        if let Some(gpus) = told(&mut self.asked).now_or_never() {
            self.gpus = gpus;
        }
        if self.recheck {
            match self.refresh().await {
                Found::Restarted => {
                    self.recheck = false;
                    return Event::EngineRestarted;
                }
                // A dead engine is not registered.
                Found::Trouble(trouble) if trouble.is_gone() => {
                    let wait = self.backoff().min(ASK_ENGINE);
                    return self.failed(wait, shutdown, Event::RegisterFailed).await;
                }
                // Slow or strange: the control plane shall know it, and hear in
                // the beats that it is unwell.
                Found::Trouble(_) | Found::Same | Found::Changed => {}
            }
        }
        let Some(known) = &self.known else {
            return self
                .failed(self.backoff(), shutdown, Event::RegisterFailed)
                .await;
        };
        let request = register::request(
            &self.config,
            &known.facts,
            known.vocab_size,
            &known.boot_id,
            &self.gpus,
            &self.loads,
        );
        self.recheck = true;
        match self.control.register(request).await {
            Ok(grant) => {
                tracing::info!(replica = %self.config.replica_id, incarnation = grant.incarnation, ranks = known.facts.ranks.len(), "registered");
                self.grant = Some(grant);
                self.recheck = false;
                self.last = None;
                self.silent = 0;
                Event::Registered
            }
            Err(CallError::Dead(_)) => Event::Disowned,
            Err(error @ CallError::Refused(_)) => {
                tracing::error!(replica = %self.config.replica_id, %error, "the registration is refused; it is tried again in {:?}", self.config.timing.refused_wait);
                let wait = self.config.timing.refused_wait;
                self.failed(wait, shutdown, Event::RegisterRefused).await
            }
            Err(error) => {
                if self.failures == 0 {
                    tracing::warn!(control_plane = %self.config.control_plane, %error, "cannot register yet");
                }
                self.failed(self.backoff(), shutdown, Event::RegisterFailed)
                    .await
            }
        }
    }

    async fn failed(
        &mut self,
        wait: Duration,
        shutdown: &CancellationToken,
        event: Event,
    ) -> Event {
        self.failures = self.failures.saturating_add(1);
        if self.pause(wait, shutdown).await {
            return Event::Shutdown;
        }
        event
    }

    /// Doubles with every failure, half of it by chance.
    fn backoff(&self) -> Duration {
        let timing = &self.config.timing;
        let doubled = timing
            .backoff
            .saturating_mul(1 << self.failures.min(16))
            .min(timing.max_backoff);
        doubled.mul_f64(0.5 + chance() / 2.0)
    }

    /// True: the shutdown came first.
    async fn pause(&self, wait: Duration, shutdown: &CancellationToken) -> bool {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => true,
            () = tokio::time::sleep(wait) => false,
        }
    }
}

/// What the driver tells, once; waits for ever where it is not asked, or was heard.
async fn told(asked: &mut Option<JoinHandle<Vec<accelerator::Gpu>>>) -> Vec<accelerator::Gpu> {
    let Some(answer) = asked else {
        return std::future::pending().await;
    };
    let gpus = answer.await.unwrap_or_default();
    *asked = None;
    gpus
}

/// From 0 to below 1.
fn chance() -> f64 {
    let (high, _) = uuid::Uuid::new_v4().as_u64_pair();
    // The upper 32 bits are all random in a version 4 id.
    let random = (high >> 32) as u32;
    f64::from(random) / (f64::from(u32::MAX) + 1.0)
}
