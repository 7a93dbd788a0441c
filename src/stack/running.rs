//! The generations that run under an idempotency key, by key.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::generation::{CannotFollow, Generation, Ticket};
use crate::store::{Fingerprint, KeyHash};

/// The generations that run.
#[derive(Debug, Default)]
pub struct Running {
    by_key: Mutex<HashMap<KeyHash, Arc<Generation>>>,
}

/// What a caller with a key meets.
pub enum Entered {
    /// Nobody: the caller begins this one, and must [`leave`](Running::leave) it.
    Begun(Arc<Generation>, Ticket),
    /// The same request, running: the caller follows it.
    Joined(Ticket),
    /// The same request, being stopped: wait for its end and enter again.
    Stopping(Arc<Generation>),
    /// The same request, with as many followers as are allowed.
    TooMany,
    /// Another request.
    Mismatch,
}

impl Running {
    /// Begins or joins the generation of `key`, in one step.
    pub fn enter(
        &self,
        key: KeyHash,
        fingerprint: Fingerprint,
        samples: u32,
        max_followers: usize,
    ) -> Entered {
        let mut by_key = self.lock();
        let Some(running) = by_key.get(&key) else {
            let (generation, ticket) = Generation::begin(Some(fingerprint), samples, max_followers);
            by_key.insert(key, Arc::clone(&generation));
            return Entered::Begun(generation, ticket);
        };
        if running.fingerprint != Some(fingerprint) {
            return Entered::Mismatch;
        }
        match running.follow() {
            Ok(ticket) => Entered::Joined(ticket),
            Err(CannotFollow::TooMany) => Entered::TooMany,
            Err(CannotFollow::Stopping) => Entered::Stopping(Arc::clone(running)),
        }
    }

    /// This generation of `key` is over. Another one's is left alone.
    pub fn leave(&self, key: &KeyHash, generation: &Arc<Generation>) {
        let mut by_key = self.lock();
        if by_key.get(key).is_some_and(|g| Arc::ptr_eq(g, generation)) {
            by_key.remove(key);
        }
    }

    /// How many run.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// None runs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The one that runs under `key`.
    pub fn get(&self, key: &KeyHash) -> Option<Arc<Generation>> {
        self.lock().get(key).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<KeyHash, Arc<Generation>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
