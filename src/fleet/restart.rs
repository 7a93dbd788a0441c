//! A restart of the control plane: what was registered is noted, and taken back
//! before anything is served. Nobody is routed to on the word of a note alone:
//! each replica is asked first, by whoever can speak to it.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Fleet, entry::Entry, lease::Liveness, register::fill_slots};
use crate::{
    ids::{Incarnation, ReplicaId},
    store::notes::ReplicaNote,
};

/// Replicas that are asked at once.
const ASKED_AT_ONCE: usize = 64;

/// What became of an engine meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It answers.
    Answers,
    /// Its port refuses connections: it is gone.
    Refuses,
    /// Neither, within the time that there is.
    Silent,
}

impl Fleet {
    /// What a restart is to find: every replica that is not dead, and those whose
    /// next start an operator drains.
    pub fn notes(&self) -> Vec<ReplicaNote> {
        let now = (Instant::now(), SystemTime::now());
        let state = self.lock();
        let kept =
            |entry: &&Entry| entry.lease.liveness() != Liveness::Dead || entry.drains.holds();
        let entries = state.replicas.values().filter(kept);
        entries.map(|entry| entry.note(now)).collect()
    }

    /// Takes back what was noted, once it was asked. Those that answer take
    /// requests at once; those that are silent do once their sidecars beat again;
    /// of those that refuse the end is remembered. Returns how many answered.
    pub async fn restore<F: Future<Output = Found> + Send>(
        self: &Arc<Self>,
        notes: Vec<ReplicaNote>,
        ask: impl Fn(Vec<Arc<str>>) -> F,
    ) -> usize {
        let mut asked = Vec::new();
        {
            let now = (Instant::now(), SystemTime::now());
            let mut state = self.lock();
            let mut left = 0_usize;
            let known = state.replicas.values();
            let mut ranks: usize = known.map(|entry| entry.facts().ranks.len()).sum();
            for note in notes {
                if state.replicas.contains_key(&note.facts.id) {
                    continue;
                }
                let with = ranks + note.facts.ranks.len();
                if state.replicas.len() >= self.config.max_replicas || with > self.config.max_ranks
                {
                    left += 1;
                    continue;
                }
                ranks = with;
                let slots = vec![None; note.facts.ranks.len()];
                let slots = fill_slots(&mut state.next_slot, slots);
                let mut urls: Vec<Arc<str>> = note
                    .facts
                    .ranks
                    .iter()
                    .map(|r| Arc::clone(&r.url))
                    .collect();
                urls.sort();
                urls.dedup();
                let id = note.facts.id.clone();
                asked.push((id.clone(), note.incarnation, urls));
                state.replicas.insert(id, Entry::restored(note, slots, now));
            }
            if left > 0 {
                warn!(
                    replicas = left,
                    "max-replicas and max-ranks are lower than before: replicas that were \
                     registered are left out, and refused as long as the fleet is full"
                );
            }
            self.publish(&mut state);
        }
        let found: Vec<(ReplicaId, Incarnation, Found)> =
            stream::iter(asked.into_iter().map(|(id, incarnation, urls)| {
                let answer = ask(urls);
                async move { (id, incarnation, answer.await) }
            }))
            .buffer_unordered(ASKED_AT_ONCE)
            .collect()
            .await;
        let mut answered = 0;
        for (replica, incarnation, found) in found {
            match found {
                Found::Answers => {
                    answered += 1;
                    self.verified(&replica, incarnation);
                }
                Found::Refuses => {
                    self.end(&replica, incarnation, "its port refuses connections");
                }
                Found::Silent => {
                    warn!(%replica, %incarnation, "replica does not answer; it takes no requests until its sidecar beats");
                }
            }
        }
        answered
    }

    fn verified(&self, replica: &ReplicaId, incarnation: Incarnation) {
        let mut state = self.lock();
        if let Some(entry) = state.replicas.get_mut(replica)
            && entry.incarnation == incarnation
            && entry
                .lease
                .verified(Instant::now(), self.config.lease.ttl())
        {
            info!(%replica, %incarnation, "replica is taken back");
            self.publish(&mut state);
        }
    }
}

/// The moment of the wall clock that a moment of ours is.
pub(super) fn wall_of(at: Instant, now: (Instant, SystemTime)) -> SystemTime {
    now.1 + at.saturating_duration_since(now.0)
}

/// The moment of ours that a moment of the wall clock is; a past one is now, and
/// none is further off than `most`.
pub(super) fn instant_of(at: SystemTime, now: (Instant, SystemTime), most: Duration) -> Instant {
    now.0 + at.duration_since(now.1).unwrap_or_default().min(most)
}
