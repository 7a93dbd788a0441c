//! What outlives the process beside results: which trajectory lives where, which
//! replicas there are, which prompts kill engines. It is noted in the store while
//! the control plane runs, and brought back before it serves, so that a restart
//! moves no trajectory and no sidecar has to do anything.
//!
//! | what | noted |
//! |---|---|
//! | a pin | with the attempt that binds it (`store`); without an idempotency key as soon as it is bound |
//! | a pin's growth | every [`GROWTH`] |
//! | registrations and drains | when they change |
//! | condemned prompts | every [`GROWTH`] |
//!
//! A note that is not there yet costs a cold turn, never a result: nobody waits
//! for one.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::Method;
use tokio::time::{Instant, MissedTickBehavior, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    engine::{
        egress::Egress,
        http::{HttpClient, HttpError},
    },
    fleet::{Fleet, probe::port_refuses, restart::Found},
    ids::ReplicaId,
    routing::{HINT_TTL, PinKey, Router, pins::PinView},
    stack::{Parts, poison::Poison},
    store::{
        Store, StoreError,
        notes::{Note, PinNote, ReplicaNote},
    },
};

/// How often the growth of pins is noted.
pub const GROWTH: Duration = Duration::from_secs(2);
/// Pins that are bound within this are noted together.
const TOGETHER: Duration = Duration::from_millis(5);
/// Notes that are written at once.
const PIECE: usize = 4096;
/// A store that fails is tried again after this.
const PAUSE: Duration = Duration::from_secs(1);
/// A replica that does not answer within this at a start is silent.
const ASK: Duration = Duration::from_secs(3);

/// Keeps the notes.
#[derive(Clone)]
pub struct Keeper {
    store: Arc<dyn Store>,
    fleet: Arc<Fleet>,
    router: Arc<Router>,
    poison: Arc<Poison>,
}

impl Keeper {
    /// Of this control plane.
    pub fn new(parts: &Parts) -> Self {
        Self {
            store: Arc::clone(&parts.store),
            fleet: Arc::clone(&parts.fleet),
            router: Arc::clone(&parts.router),
            poison: Arc::clone(&parts.poison),
        }
    }

    /// Brings back what was noted. Replicas are asked over `http`.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn bring_back(&self, http: &HttpClient) -> Result<Written, StoreError> {
        let begun = Instant::now();
        let recalled = self.store.recall().await?;
        let replicas = recalled.replicas.len();
        let by_id = recalled.replicas.iter();
        let written = Written {
            replicas: by_id
                .map(|note| (note.facts.id.clone(), note.clone()))
                .collect(),
            condemned: recalled
                .condemned
                .iter()
                .map(|(prompt, _)| *prompt)
                .collect(),
        };
        let answered = self
            .fleet
            .restore(recalled.replicas, |urls| {
                let (http, egress) = (http.clone(), Arc::clone(self.fleet.egress()));
                async move { find(&http, &egress, urls).await }
            })
            .await;
        let (now, wall) = (Instant::now(), SystemTime::now());
        let fleet = self.fleet.snapshot();
        let mut lost = Vec::new();
        let mut pins = 0usize;
        for (key, note) in recalled.pins {
            let idle = wall.duration_since(note.used_at).unwrap_or_default();
            match fleet.find(&note.target) {
                Some(rank) if idle < HINT_TTL => {
                    pins += 1;
                    let past = PinView {
                        slot: rank.slot,
                        tokens: note.tokens,
                        adapter: note.adapter,
                        idle,
                        live: true,
                    };
                    self.router.restore(&fleet, PinKey(key), past, now);
                }
                // Its rank is gone, and its cache with it.
                _ => lost.push(Note::Pin(key, None)),
            }
        }
        for (prompt, until) in recalled.condemned {
            match until.duration_since(wall) {
                Ok(left) if !left.is_zero() => self.poison.restore(prompt, left),
                _ => lost.push(Note::Condemned(prompt, None)),
            }
        }
        while !lost.is_empty() {
            let piece = lost.split_off(lost.len().saturating_sub(PIECE));
            self.store.note(piece).await?;
        }
        if replicas > 0 || pins > 0 {
            info!(replicas, answered, pins, took = ?begun.elapsed(), "brought back");
        }
        Ok(written)
    }

    /// Notes what changes, until `stop`, and once more then.
    pub async fn keep(self, mut written: Written, stop: CancellationToken) {
        let mut changes = self.fleet.changes();
        // On a beat of its own, which no number of new pins holds up.
        let mut ticks = tokio::time::interval(GROWTH);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Pins are bound far more often than anything else changes: to look at
            // all replicas each time would cost more than the notes.
            let (pins_only, stopped) = tokio::select! {
                () = stop.cancelled() => (false, true),
                () = self.router.pin_bound() => {
                    sleep(TOGETHER).await;
                    (true, false)
                }
                changed = changes.changed() => {
                    // Many changes come at once, and nobody waits for this note.
                    sleep(TOGETHER).await;
                    (false, changed.is_err())
                }
                _ = ticks.tick() => (false, false),
            };
            if let Err(error) = self.note(&mut written, pins_only).await {
                warn!(%error, "replicas, and where trajectories live, cannot be noted; trying again");
                if timeout(PAUSE, stop.cancelled()).await.is_ok() {
                    return;
                }
            }
            if stopped {
                return;
            }
        }
    }

    async fn note(&self, written: &mut Written, pins_only: bool) -> Result<(), StoreError> {
        loop {
            let keys = self.router.changed_pins(PIECE);
            let whole = keys.len() < PIECE;
            self.note_pins(keys).await?;
            if whole {
                break;
            }
        }
        if pins_only {
            return Ok(());
        }
        let mut notes = Vec::new();
        let replicas: HashMap<ReplicaId, ReplicaNote> = self
            .fleet
            .notes()
            .into_iter()
            .map(|note| (note.facts.id.clone(), note))
            .collect();
        for (id, note) in &replicas {
            if written.replicas.get(id).is_none_or(|old| !same(old, note)) {
                notes.push(Note::Replica(id.clone(), Some(Box::new(note.clone()))));
            }
        }
        let gone = written
            .replicas
            .keys()
            .filter(|id| !replicas.contains_key(*id));
        notes.extend(gone.map(|id| Note::Replica(id.clone(), None)));
        let wall = SystemTime::now();
        let condemned = self.poison.condemned();
        for (prompt, left) in &condemned {
            if !written.condemned.contains(prompt) {
                notes.push(Note::Condemned(*prompt, Some(wall + *left)));
            }
        }
        let condemned: HashSet<[u8; 16]> = condemned.into_iter().map(|(p, _)| p).collect();
        let gone = written.condemned.difference(&condemned);
        notes.extend(gone.map(|prompt| Note::Condemned(*prompt, None)));
        if !notes.is_empty() {
            self.store.note(notes).await?;
        }
        *written = Written {
            replicas,
            condemned,
        };
        Ok(())
    }

    async fn note_pins(&self, keys: Vec<PinKey>) -> Result<(), StoreError> {
        if keys.is_empty() {
            return Ok(());
        }
        let (now, wall) = (Instant::now(), SystemTime::now());
        let fleet = self.fleet.snapshot();
        let notes: Vec<Note> = keys
            .iter()
            .filter_map(|key| {
                let Some(pin) = self.router.pin(*key, now) else {
                    return Some(Note::Pin(key.0, None));
                };
                let rank = fleet.rank(pin.slot)?;
                let note = PinNote {
                    target: rank.target.clone(),
                    tokens: pin.tokens,
                    adapter: pin.adapter,
                    used_at: wall.checked_sub(pin.idle).unwrap_or(wall),
                };
                Some(Note::Pin(key.0, Some(note)))
            })
            .collect();
        let noted = self.store.note(notes).await;
        if noted.is_err() {
            for key in keys {
                self.router.pin_changed(key);
            }
        }
        noted
    }
}

/// What the store has been told.
#[derive(Debug, Default)]
pub struct Written {
    replicas: HashMap<ReplicaId, ReplicaNote>,
    condemned: HashSet<[u8; 16]>,
}

/// But for the end of a drain's grace, which wavers with the clocks.
fn same(old: &ReplicaNote, new: &ReplicaNote) -> bool {
    let drains = match (old.drain, new.drain) {
        (None, None) => true,
        (Some(old), Some(new)) => {
            let apart = old
                .until
                .duration_since(new.until)
                .unwrap_or_else(|before| before.duration());
            old.hold == new.hold && apart < Duration::from_millis(500)
        }
        _ => false,
    };
    drains
        && old.incarnation == new.incarnation
        && old.owner == new.owner
        && old.has_beaten == new.has_beaten
        && old.facts == new.facts
}

/// Asks every address of a replica whether it serves.
async fn find(http: &HttpClient, egress: &Egress, urls: Vec<Arc<str>>) -> Found {
    let mut found = Found::Answers;
    for url in urls {
        let asked = http.call(Method::GET, &url, "/health", None, 1 << 16, ASK);
        match asked.await {
            Ok((status, _, _)) if !status.is_server_error() => {}
            Ok(_) => found = Found::Silent,
            Err(HttpError::Refused(_)) if port_refuses(&url, egress).await => {
                return Found::Refuses;
            }
            Err(_) => found = Found::Silent,
        }
    }
    found
}
