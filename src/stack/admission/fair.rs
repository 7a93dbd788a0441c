//! Whose turn it is, as a pure state: no clock, no waiting, no lock of its own.
//!
//! Each tenant has a virtual time that its samples advance; the tenant furthest
//! behind is next. One that comes back after a pause starts where the others are,
//! so that nobody saves up a claim. A tenant at its own limit is passed over; one
//! whose next call does not fit in what is left of all is waited for, or large
//! calls would never be served.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::AdmissionConfig;
use crate::ids::Tenant;

/// What a call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) samples: u64,
    /// Of its prompt.
    pub(super) bytes: u64,
}

impl Cost {
    const NONE: Self = Self {
        samples: 0,
        bytes: 0,
    };

    fn and(self, other: Self) -> Self {
        Self {
            samples: self.samples.saturating_add(other.samples),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    fn less(self, other: Self) -> Self {
        Self {
            samples: self.samples.saturating_sub(other.samples),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }
}

/// A place in a tenant's queue: greater priority first, then the earlier one.
pub(super) type Ticket = (Reverse<i32>, u64);

/// See the module. `G` tells one that waits that it is its turn. No call that comes
/// here takes more than a limit allows: it would wait for ever.
#[derive(Debug)]
pub(super) struct Fair<G> {
    config: AdmissionConfig,
    samples: u64,
    tenants: HashMap<Tenant, Share<G>>,
    /// Tenants with somebody in their queue.
    queues: usize,
    /// The virtual time of whoever was served last.
    now: u64,
    sequence: u64,
    /// For how long one call is in flight, in seconds, the last ones counting most.
    held: Option<f64>,
}

#[derive(Debug)]
struct Share<G> {
    samples: u64,
    bytes: u64,
    queue: BTreeMap<Ticket, (Cost, G)>,
    queued: Cost,
    /// Calls that wait for something else than their turn.
    parked: usize,
    /// What they will take.
    apart: Cost,
    time: u64,
}

impl<G> Default for Share<G> {
    fn default() -> Self {
        Self {
            samples: 0,
            bytes: 0,
            queue: BTreeMap::new(),
            queued: Cost::NONE,
            parked: 0,
            apart: Cost::NONE,
            time: 0,
        }
    }
}

impl<G> Share<G> {
    fn fits(&self, cost: Cost, config: &AdmissionConfig) -> bool {
        self.samples.saturating_add(cost.samples) <= config.tenant_samples
            && self.bytes.saturating_add(cost.bytes) <= config.tenant_bytes
    }

    fn is_idle(&self) -> bool {
        self.samples == 0 && self.bytes == 0 && self.waiting() == 0
    }

    fn waiting(&self) -> usize {
        self.queue.len() + self.parked
    }
}

impl<G> Fair<G> {
    pub(super) fn new(config: AdmissionConfig) -> Self {
        Self {
            config,
            samples: 0,
            tenants: HashMap::new(),
            queues: 0,
            now: 0,
            sequence: 0,
            held: None,
        }
    }

    fn fits(&self, cost: Cost) -> bool {
        self.samples.saturating_add(cost.samples) <= self.config.max_samples
    }

    /// Nothing is in flight, nobody waits.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.samples == 0 && self.queues == 0
    }

    /// Samples of a tenant in flight and waiting.
    pub(super) fn of(&self, tenant: &Tenant) -> u64 {
        self.tenants.get(tenant).map_or(0, |share| {
            share.samples + share.queued.and(share.apart).samples
        })
    }

    /// Whether a call may begin at once: it fits, and nobody waits before it. Those
    /// who wait for their own tenant's limit are before nobody else.
    pub(super) fn free(&self, tenant: &Tenant, cost: Cost) -> bool {
        let own = self.tenants.get(tenant);
        let own_fits =
            own.is_none_or(|share| share.queue.is_empty() && share.fits(cost, &self.config));
        own_fits && self.fits(cost) && (self.queues == 0 || self.foremost().is_none())
    }

    /// Begins a call.
    pub(super) fn take(&mut self, tenant: &Tenant, cost: Cost) {
        self.samples = self.samples.saturating_add(cost.samples);
        let now = self.now;
        let share = self.share(tenant);
        share.samples = share.samples.saturating_add(cost.samples);
        share.bytes = share.bytes.saturating_add(cost.bytes);
        share.time = share.time.max(now).saturating_add(cost.samples);
    }

    /// Whether one more may wait.
    pub(super) fn has_room(&self, tenant: &Tenant, cost: Cost) -> bool {
        let Some(share) = self.tenants.get(tenant) else {
            return self.config.tenant_queue > 0;
        };
        let bytes = share.queued.and(share.apart).and(cost).bytes;
        share.waiting() < self.config.tenant_queue && bytes <= self.config.tenant_bytes
    }

    /// One more waits for something else than its turn. It has a place among those
    /// who wait, and is before nobody. False: there is no room.
    pub(super) fn park(&mut self, tenant: &Tenant, cost: Cost) -> bool {
        let room = self.has_room(tenant, cost);
        if room {
            let share = self.share(tenant);
            share.parked += 1;
            share.apart = share.apart.and(cost);
        }
        room
    }

    /// It waits no more.
    pub(super) fn unpark(&mut self, tenant: &Tenant, cost: Cost) {
        let share = self.share(tenant);
        share.parked = share.parked.saturating_sub(1);
        share.apart = share.apart.less(cost);
        self.forget_if_idle(tenant);
    }

    /// How long a call would wait, as far as can be told: so many samples are
    /// before it, and its tenant has its part of all places.
    pub(super) fn wait(&self, tenant: &Tenant, cost: Cost, priority: i32) -> Duration {
        let Some(held) = self.held else {
            return Duration::ZERO;
        };
        let share = self.tenants.get(tenant);
        let ahead: u64 = share.map_or(0, |share| {
            share
                .queue
                .range(..=(Reverse(priority), u64::MAX))
                .map(|(_, (cost, _))| cost.samples)
                .sum()
        });
        let waits = share.is_some_and(|share| !share.queue.is_empty());
        let tenants = self.queues + usize::from(!waits);
        let part = self.config.max_samples / (tenants.max(1) as u64);
        let places = part.min(self.config.tenant_samples).max(1);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let rounds = (ahead + cost.samples) as f64 / places as f64;
        Duration::try_from_secs_f64(rounds * held).unwrap_or(Duration::MAX)
    }

    /// Stands in the queue.
    pub(super) fn join(&mut self, tenant: &Tenant, cost: Cost, priority: i32, grant: G) -> Ticket {
        self.sequence += 1;
        let ticket = (Reverse(priority), self.sequence);
        let now = self.now;
        let share = self.share(tenant);
        let first = share.queue.is_empty();
        if first {
            share.time = share.time.max(now);
        }
        share.queued = share.queued.and(cost);
        share.queue.insert(ticket, (cost, grant));
        self.queues += usize::from(first);
        ticket
    }

    /// Leaves the queue, if it still stands there.
    pub(super) fn quit(&mut self, tenant: &Tenant, ticket: Ticket) {
        self.pull(tenant, ticket);
        self.forget_if_idle(tenant);
    }

    /// Whose turn it is, if there is room: taken for it.
    pub(super) fn next(&mut self) -> Option<(Tenant, Cost, G)> {
        let (tenant, ticket, cost) = self.foremost()?;
        if !self.fits(cost) {
            return None;
        }
        let (_, grant) = self.pull(&tenant, ticket)?;
        self.now = self.share(&tenant).time.max(self.now);
        self.take(&tenant, cost);
        Some((tenant, cost, grant))
    }

    /// A call has ended.
    pub(super) fn leave(&mut self, tenant: &Tenant, cost: Cost, held: Duration) {
        self.samples = self.samples.saturating_sub(cost.samples);
        let share = self.share(tenant);
        share.samples = share.samples.saturating_sub(cost.samples);
        share.bytes = share.bytes.saturating_sub(cost.bytes);
        self.forget_if_idle(tenant);
        let held = held.as_secs_f64();
        self.held = Some(
            self.held
                .map_or(held, |before| before + (held - before) / 16.0),
        );
    }

    /// The next call of the tenant furthest behind, of those whose own limits let
    /// it in.
    fn foremost(&self) -> Option<(Tenant, Ticket, Cost)> {
        self.tenants
            .iter()
            .filter_map(|(tenant, share)| {
                let (ticket, (cost, _)) = share.queue.first_key_value()?;
                let fits = share.fits(*cost, &self.config);
                fits.then_some((share.time, tenant, *ticket, *cost))
            })
            .min_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)))
            .map(|(_, tenant, ticket, cost)| (tenant.clone(), ticket, cost))
    }

    fn pull(&mut self, tenant: &Tenant, ticket: Ticket) -> Option<(Cost, G)> {
        let share = self.tenants.get_mut(tenant)?;
        let pulled = share.queue.remove(&ticket)?;
        share.queued = share.queued.less(pulled.0);
        if share.queue.is_empty() {
            self.queues -= 1;
        }
        Some(pulled)
    }

    fn share(&mut self, tenant: &Tenant) -> &mut Share<G> {
        self.tenants.entry(tenant.clone()).or_default()
    }

    /// A tenant that has nothing here costs no memory. What it was ahead of the
    /// others is forgiven: it was not waited for.
    fn forget_if_idle(&mut self, tenant: &Tenant) {
        if self.tenants.get(tenant).is_some_and(Share::is_idle) {
            self.tenants.remove(tenant);
        }
    }
}
