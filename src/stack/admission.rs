//! How much runs at once, and who is next. It guarantees:
//!
//! - no more samples and no more bytes of prompts are in flight than configured,
//!   in all and of one tenant; a call that alone would be more is refused, since no
//!   wait helps it;
//! - who waits is served round robin among tenants, by priority and then in order
//!   of arrival within one, each tenant charged for its samples: what one offers
//!   does not lengthen the wait of another;
//! - a queue is bounded, with those who wait for weights before they may stand in
//!   it; where it is full, or the wait would outlast the caller's deadline, the
//!   call is refused at once.
//!
//! A caller that joins a running generation takes no place: the generation has
//! one. Heartbeats, health checks and operators do not come this way.

mod fair;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use tokio::{sync::oneshot, time::Instant};
use tower::Service;

use self::fair::{Cost, Fair, Ticket};
use super::{
    counters::Counters,
    idempotency::{Samples, Work},
    resolve::ResolvedWork,
};
use crate::{
    call::{Prompt, SampleParams},
    error::{Error, Reason, Violation},
    ids::Tenant,
};

/// Limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// Samples in flight.
    pub max_samples: u64,
    /// Of one tenant.
    pub tenant_samples: u64,
    /// Bytes of prompts in flight of one tenant; as many may wait.
    pub tenant_bytes: u64,
    /// Calls of one tenant that wait, for their turn or for weights before it.
    pub tenant_queue: usize,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            max_samples: 65_536,
            tenant_samples: 16_384,
            tenant_bytes: 2 << 30,
            tenant_queue: 4096,
        }
    }
}

/// A retry is never asked for sooner or later than this.
const RETRY_LEAST: Duration = Duration::from_millis(100);
const RETRY_MOST: Duration = Duration::from_secs(30);

/// What is in flight, and who waits.
#[derive(Debug)]
pub struct Admission {
    config: AdmissionConfig,
    state: Mutex<Fair<oneshot::Sender<Permit>>>,
}

/// A place among those in flight, given back when it is dropped.
#[derive(Debug)]
pub struct Permit {
    admission: Arc<Admission>,
    tenant: Tenant,
    cost: Cost,
    since: Instant,
}

/// A place among those who wait for weights, left when it is dropped.
#[derive(Debug)]
pub(super) struct Parked {
    admission: Arc<Admission>,
    tenant: Tenant,
    cost: Cost,
}

/// A place in the queue, left when it is dropped.
struct Waiting {
    admission: Arc<Admission>,
    tenant: Tenant,
    ticket: Ticket,
    granted: oneshot::Receiver<Permit>,
}

impl Admission {
    /// Nothing is in flight yet.
    pub fn new(config: AdmissionConfig) -> Arc<Self> {
        Arc::new(Self {
            config,
            state: Mutex::new(Fair::new(config)),
        })
    }

    /// Samples of this tenant that are in flight or wait to be.
    pub fn of(&self, tenant: &Tenant) -> u64 {
        self.lock().of(tenant)
    }

    /// Whether a call of these parameters may ever be in flight.
    ///
    /// # Errors
    /// INVALID_REQUEST: alone it would be more than may be at once; each limit that it
    /// is beyond, with the option that sets it.
    pub fn may_ever_enter(&self, params: &SampleParams) -> Result<(), Error> {
        self.may_ever(Cost {
            samples: params.num_samples.into(),
            bytes: prompt_bytes(params),
        })
    }

    fn may_ever(&self, cost: Cost) -> Result<(), Error> {
        let AdmissionConfig {
            max_samples,
            tenant_samples,
            tenant_bytes,
            ..
        } = self.config;
        let mut violations = Vec::new();
        for (whose, most, option) in [
            ("all tenants together", max_samples, "--max-in-flight"),
            ("one tenant", tenant_samples, "--tenant-max-in-flight"),
        ] {
            if cost.samples > most {
                violations.push(Violation::new(
                    "num_samples",
                    format!(
                        "is {}, and of {whose} at most {most} samples may be in flight ({option} \
                         of the server): ask for fewer at once",
                        cost.samples
                    ),
                ));
            }
        }
        if cost.bytes > tenant_bytes {
            violations.push(Violation::new(
                "prompt",
                format!(
                    "has {} bytes, and of one tenant at most {tenant_bytes} bytes of prompts may \
                     be in flight (--tenant-max-bytes of the server)",
                    cost.bytes
                ),
            ));
        }
        if violations.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(Reason::InvalidRequest, violations))
    }

    /// Takes a place, at once or when it is this call's turn.
    ///
    /// # Errors
    /// TENANT_BUSY, and as [`may_ever_enter`](Self::may_ever_enter); at once.
    async fn enter(
        self: &Arc<Self>,
        tenant: &Tenant,
        cost: Cost,
        priority: i32,
        deadline: Option<Instant>,
        counters: &Counters,
    ) -> Result<Permit, Error> {
        self.check(cost, counters)?;
        let waiting = {
            let mut state = self.lock();
            if state.free(tenant, cost) {
                state.take(tenant, cost);
                drop(state);
                return Ok(self.permit(tenant.clone(), cost));
            }
            let wait = state.wait(tenant, cost, priority);
            let late = deadline.is_some_and(|at| Instant::now() + wait > at);
            if late || !state.has_room(tenant, cost) {
                drop(state);
                counters.refused_by_admission.one();
                return Err(busy(late, wait));
            }
            let (grant, granted) = oneshot::channel();
            let ticket = state.join(tenant, cost, priority, grant);
            Waiting {
                admission: Arc::clone(self),
                tenant: tenant.clone(),
                ticket,
                granted,
            }
        };
        counters.waits_for_admission.one();
        // Somebody else may have left room since.
        self.serve();
        waiting.turn().await
    }

    /// A place for work that waits for weights and may not stand in the queue yet.
    ///
    /// # Errors
    /// As for its place among those in flight.
    pub(super) fn park(
        self: &Arc<Self>,
        work: &Work,
        counters: &Counters,
    ) -> Result<Parked, Error> {
        self.park_as(&work.call.call().tenant, cost(work), counters)
    }

    fn park_as(
        self: &Arc<Self>,
        tenant: &Tenant,
        cost: Cost,
        counters: &Counters,
    ) -> Result<Parked, Error> {
        self.check(cost, counters)?;
        if !self.lock().park(tenant, cost) {
            counters.refused_by_admission.one();
            return Err(busy(false, RETRY_MOST));
        }
        Ok(Parked {
            admission: Arc::clone(self),
            tenant: tenant.clone(),
            cost,
        })
    }

    fn check(&self, cost: Cost, counters: &Counters) -> Result<(), Error> {
        let checked = self.may_ever(cost);
        checked.inspect_err(|_| counters.refused_by_admission.one())
    }

    fn permit(self: &Arc<Self>, tenant: Tenant, cost: Cost) -> Permit {
        Permit {
            admission: Arc::clone(self),
            tenant,
            cost,
            since: Instant::now(),
        }
    }

    /// Lets in whose turn it is.
    fn serve(self: &Arc<Self>) {
        loop {
            let Some((tenant, cost, grant)) = self.lock().next() else {
                return;
            };
            // One that has gone gives its place back here, not under the lock.
            drop(grant.send(self.permit(tenant, cost)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Fair<oneshot::Sender<Permit>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let held = self.since.elapsed();
        self.admission.lock().leave(&self.tenant, self.cost, held);
        self.admission.serve();
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.admission.lock().unpark(&self.tenant, self.cost);
    }
}

impl Waiting {
    async fn turn(mut self) -> Result<Permit, Error> {
        let granted = (&mut self.granted).await;
        granted.map_err(|_| Error::new(Reason::Internal, "a place in the queue was lost"))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.admission.lock().quit(&self.tenant, self.ticket);
        // Whoever stood behind may fit.
        self.admission.serve();
    }
}

fn busy(late: bool, wait: Duration) -> Error {
    let why = if late {
        "the wait would outlast the deadline"
    } else {
        "the queue is full"
    };
    let error = Error::new(
        Reason::TenantBusy,
        format!("too much of this tenant is in flight or waits to be: {why}"),
    );
    error.retry_after(wait.clamp(RETRY_LEAST, RETRY_MOST))
}

/// The layer.
#[derive(Clone)]
pub struct Admit<S> {
    inner: S,
    admission: Arc<Admission>,
    counters: Arc<Counters>,
}

impl<S> Admit<S> {
    /// Before `inner`.
    pub fn new(inner: S, admission: Arc<Admission>, counters: Arc<Counters>) -> Self {
        Self {
            inner,
            admission,
            counters,
        }
    }
}

impl<S> Service<ResolvedWork> for Admit<S>
where
    S: Service<ResolvedWork, Response = Samples, Error = Error> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Samples;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Samples, Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, resolved: ResolvedWork) -> Self::Future {
        let mut inner = self.inner.clone();
        let (admission, counters) = (Arc::clone(&self.admission), Arc::clone(&self.counters));
        Box::pin(async move {
            let call = resolved.work.call.call();
            let cost = cost(&resolved.work);
            let entering =
                admission.enter(&call.tenant, cost, call.priority, call.deadline, &counters);
            let permit = resolved.work.generation.unless_stopped(entering).await??;
            let result = inner.call(resolved).await;
            drop(permit);
            result
        })
    }
}

/// What is left of it to do.
fn cost(work: &Work) -> Cost {
    let params = work.call.params();
    let done = u64::try_from(work.start.finished.len()).unwrap_or(u64::MAX);
    Cost {
        samples: u64::from(params.num_samples).saturating_sub(done).max(1),
        bytes: prompt_bytes(params),
    }
}

fn prompt_bytes(params: &SampleParams) -> u64 {
    let bytes = match &params.prompt {
        Prompt::Tokens(ids) => size_of_val(&ids[..]),
        Prompt::Text(text) => text.len(),
    };
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
