//! The lines in which new trajectories wait for room in some KV cache: one a
//! model, first come, first served. Only the first of a line looks for room.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{Mutex as FairMutex, MutexGuard as FairGuard, Notify};

/// All lines that somebody stands in.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lines: Mutex<HashMap<Arc<str>, Arc<Line>>>,
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Line {
    waiting: AtomicUsize,
    /// Tokio's mutex is fair.
    front: FairMutex<()>,
    room: Notify,
}

/// A place in a line, left when this is dropped.
#[derive(Debug)]
pub struct InLine {
    lines: Arc<Lines>,
    model: Arc<str>,
    line: Arc<Line>,
}

impl Lines {
    pub(super) fn join(self: &Arc<Self>, model: &Arc<str>) -> InLine {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = Arc::clone(lines.entry(Arc::clone(model)).or_default());
        line.waiting.fetch_add(1, Ordering::Relaxed);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        InLine {
            lines: Arc::clone(self),
            model: Arc::clone(model),
            line,
        }
    }

    /// Who wait for this model.
    pub(super) fn waiting(&self, model: &str) -> usize {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.get(model);
        line.map_or(0, |line| line.waiting.load(Ordering::Relaxed))
    }

    /// There may be room now.
    pub(super) fn room(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        for line in lines.values() {
            line.room.notify_one();
        }
    }
}

impl InLine {
    /// Until this is the first in its line.
    pub async fn front(&self) -> Front<'_> {
        Front {
            line: &self.line,
            _guard: self.line.front.lock().await,
        }
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let lines = &self.lines;
        let mut all = lines.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.waiting.fetch_sub(1, Ordering::Relaxed);
        if self.line.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            all.remove(&self.model);
        }
    }
}

/// The first in a line; the next one is when this is dropped.
#[derive(Debug)]
pub struct Front<'a> {
    line: &'a Line,
    _guard: FairGuard<'a, ()>,
}

impl Front<'_> {
    /// Until there may be room.
    pub async fn room(&self) {
        self.line.room.notified().await;
    }
}
