//! The way of a sample: typed tower services, one per file, assembled here.
//!
//! A call becomes a [`Ticket`] at once; the generation runs in a task of its own
//! that any number of callers follow, so a caller that goes away takes nothing
//! with it. Types carry what a layer has done: only [`Validate`] makes a
//! [`ValidCall`], only [`Resolve`] a [`ResolvedWork`], only [`Affinity`] a
//! [`RoutedAttempt`], so an unchecked or unrouted call cannot reach an engine.
//!
//! [`Validate`]: validate::Validate
//! [`ValidCall`]: validate::ValidCall
//! [`Resolve`]: resolve::Resolve
//! [`ResolvedWork`]: resolve::ResolvedWork
//! [`Affinity`]: affinity::Affinity
//! [`RoutedAttempt`]: affinity::RoutedAttempt

pub mod admission;
pub mod affinity;
pub(crate) mod asked;
mod attempts;
pub mod counters;
pub mod deadline;
pub mod dispatch;
pub mod fence;
pub mod fingerprint;
pub mod follow;
pub mod generation;
pub mod idempotency;
pub mod journal;
pub mod partial;
pub mod poison;
pub mod resolve;
pub mod running;
#[cfg(test)]
mod testing;
pub mod trials;
pub mod validate;

use std::{sync::Arc, time::Duration};

use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::{Service, ServiceBuilder, util::BoxCloneSyncService};

use crate::{
    call::SampleCall,
    engine::EngineClient,
    error::Error,
    fleet::{Fleet, facts::EngineKind},
    routing::Router,
    store::{OwnerId, Store},
    telemetry::{
        layer::Measured,
        metrics::{Layer, Metrics},
    },
};
pub use generation::Ticket;

/// What the layers share.
#[derive(Clone)]
pub struct Parts {
    /// Idempotency records.
    pub store: Arc<dyn Store>,
    /// This run of this control plane, as the store knows it.
    pub owner: OwnerId,
    /// Who is there.
    pub fleet: Arc<Fleet>,
    /// Who gets what.
    pub router: Arc<Router>,
    /// How they are spoken to.
    pub engines: Engines,
    /// The generations that run under a key.
    pub running: Arc<running::Running>,
    /// What is in flight, and who waits.
    pub admission: Arc<admission::Admission>,
    /// What happened so far.
    pub counters: Arc<counters::Counters>,
    /// What is measured as it happens.
    pub metrics: Arc<Metrics>,
    /// Prompts that engines died with.
    pub poison: Arc<poison::Poison>,
    /// The tasks of running generations.
    pub tasks: TaskTracker,
    /// Cancelled when the process is about to end: generations stop.
    pub closing: CancellationToken,
}

/// The clients, by what engines speak.
#[derive(Clone)]
pub struct Engines {
    /// For SGLang.
    pub sglang: Arc<dyn EngineClient>,
    /// For vLLM.
    pub vllm: Arc<dyn EngineClient>,
}

impl Engines {
    /// The client for engines of this kind.
    pub fn client(&self, kind: EngineKind) -> &Arc<dyn EngineClient> {
        match kind {
            EngineKind::Sglang => &self.sglang,
            EngineKind::Vllm => &self.vllm,
        }
    }
}

/// What the layers may be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackConfig {
    /// For a call that brings no deadline.
    pub default_deadline: Duration,
    /// A generation with a key goes on for so long after its last caller left.
    pub grace: Duration,
    /// Callers that may follow one generation.
    pub max_followers: usize,
    /// Attempts of one sample, lost ones included.
    pub max_attempts: u32,
    /// What may be in flight.
    pub admission: admission::AdmissionConfig,
}

impl Default for StackConfig {
    fn default() -> Self {
        Self {
            default_deadline: Duration::from_secs(600),
            grace: Duration::from_secs(30),
            max_followers: 64,
            max_attempts: 3,
            admission: admission::AdmissionConfig::default(),
        }
    }
}

/// The whole stack. Always ready; a clone is the same stack.
pub type Stack = BoxCloneSyncService<SampleCall, Ticket, Error>;

/// Assembles it. Read it as the way of a call, first to last.
pub fn assemble(parts: &Parts, config: StackConfig) -> Stack {
    macro_rules! measured {
        ($layer:ident) => {
            |inner| Measured::new(inner, Layer::$layer, &parts.metrics)
        };
    }
    let stack = ServiceBuilder::new()
        .layer_fn(measured!(Deadline))
        // A call knows when its caller gives up before anything is done for it.
        .layer_fn(|inner| deadline::Deadline::new(inner, config.default_deadline))
        .layer_fn(measured!(Validate))
        // What is wrong with the request itself is said before it costs anything.
        .layer_fn(validate::Validate::new)
        .layer_fn(measured!(Idempotency))
        // One key, one generation. Above all that depends on the fleet: a result
        // is replayed even when the fleet is gone.
        .layer_fn(|inner| idempotency::Idempotency::new(inner, parts, config))
        .layer_fn(measured!(Resolve))
        // What is wrong with the request for this fleet.
        .layer_fn(|inner| resolve::Resolve::new(inner, parts))
        .layer_fn(measured!(Admission))
        // Who is next, where more is asked for than may be in flight. Below what
        // answers without an engine.
        .layer_fn(|inner| {
            let (admission, counters) = (Arc::clone(&parts.admission), Arc::clone(&parts.counters));
            admission::Admit::new(inner, admission, counters)
        })
        .layer_fn(measured!(Affinity))
        // A rank for every attempt of every sample, and what to do when it fails.
        .layer_fn(|inner| affinity::Affinity::new(inner, parts, config))
        .layer_fn(measured!(Dispatch))
        // One attempt at one engine.
        .service(dispatch::Dispatch::new(parts));
    BoxCloneSyncService::new(stack)
}

/// Runs one call through the stack.
///
/// # Errors
/// What a layer refuses it for, before anything runs.
pub async fn open(stack: &Stack, call: SampleCall) -> Result<Ticket, Error> {
    // The services are always ready: none holds capacity that a call must wait
    // for, so readiness need not be polled.
    stack.clone().call(call).await
}
