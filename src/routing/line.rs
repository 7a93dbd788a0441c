//! The lines in which trajectories wait for room in some KV cache: one a model.
//! Those that have begun stand before new ones, so that what is begun is finished;
//! otherwise first come, first served. Only the first of a line looks for room.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

/// All lines that somebody stands in.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lines: Mutex<HashMap<Arc<str>, Line>>,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    waiting: BTreeMap<Place, Arc<Notify>>,
}

/// Where somebody stands: the least is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    begun: Begun,
    number: u64,
}

/// Whether a trajectory has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Begun {
    /// It had room before.
    Yes,
    /// It is new.
    No,
}

/// A place in a line, left when this is dropped.
#[derive(Debug)]
pub struct InLine {
    lines: Arc<Lines>,
    model: Arc<str>,
    place: Place,
    bell: Arc<Notify>,
}

impl Lines {
    pub(super) fn join(self: &Arc<Self>, model: &Arc<str>, begun: Begun) -> InLine {
        let mut lines = self.lock();
        let line = lines.entry(Arc::clone(model)).or_default();
        let place = Place {
            begun,
            number: line.next,
        };
        line.next += 1;
        let bell = Arc::new(Notify::new());
        line.waiting.insert(place, Arc::clone(&bell));
        self.waiting.fetch_add(1, Ordering::Relaxed);
        drop(lines);
        InLine {
            lines: Arc::clone(self),
            model: Arc::clone(model),
            place,
            bell,
        }
    }

    /// Who wait for this model.
    pub(super) fn waiting(&self, model: &str) -> usize {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let lines = self.lock();
        lines.get(model).map_or(0, |line| line.waiting.len())
    }

    /// There may be room now.
    pub(super) fn room(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        for line in self.lock().values() {
            line.ring();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    fn ring(&self) {
        if let Some((_, bell)) = self.waiting.first_key_value() {
            bell.notify_one();
        }
    }
}

impl InLine {
    /// Nobody stands before it.
    pub fn is_first(&self) -> bool {
        let lines = self.lines.lock();
        let first = lines
            .get(&self.model)
            .and_then(|line| line.waiting.first_key_value());
        first.is_some_and(|(place, _)| *place == self.place)
    }

    /// Until it may be worth a look: it has become the first, or is, and there may
    /// be room.
    pub async fn news(&self) {
        self.bell.notified().await;
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        self.lines.waiting.fetch_sub(1, Ordering::Relaxed);
        if let Some(line) = lines.get_mut(&self.model) {
            line.waiting.remove(&self.place);
            line.ring();
            if line.waiting.is_empty() {
                lines.remove(&self.model);
            }
        }
    }
}
