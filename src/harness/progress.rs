//! What a run tells while it runs. Never part of what it measures.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

use super::arms::Arm;

/// Told as a run goes on, from several tasks at once. Keep it quick: a call
/// stands between two requests.
pub trait Progress: Send + Sync + 'static {
    /// The fleet is not complete yet; `status` says what is missing.
    fn waiting(&self, status: &str) {
        let _ = status;
    }

    /// An arm begins, with so many requests to do.
    fn arm_started(&self, arm: Arm, requests: u64) {
        let _ = (arm, requests);
    }

    /// A request of the arm is done.
    fn request_done(&self, arm: Arm) {
        let _ = arm;
    }

    /// The arm is over, whole or failed.
    fn arm_finished(&self, arm: Arm) {
        let _ = arm;
    }
}

/// Says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}

/// A bar on standard error; nothing where that is no terminal.
#[derive(Debug, Default)]
pub struct Bar {
    // Replaced at each phase. Held for an assignment, never across a call out.
    current: Mutex<Option<ProgressBar>>,
}

impl Bar {
    /// A bar that shows nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn show(&self, bar: Option<ProgressBar>) {
        let mut current = self
            .current
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(old) = std::mem::replace(&mut *current, bar) {
            old.finish_and_clear();
        }
    }

    fn with(&self, f: impl FnOnce(&ProgressBar)) {
        let current = self
            .current
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(bar) = &*current {
            f(bar);
        }
    }
}

impl Progress for Bar {
    fn waiting(&self, status: &str) {
        let mut shown = false;
        self.with(|bar| {
            if bar.length().is_none() {
                bar.set_message(status.to_owned());
                shown = true;
            }
        });
        if !shown {
            let spinner = ProgressBar::new_spinner();
            spinner.set_message(status.to_owned());
            spinner.enable_steady_tick(std::time::Duration::from_millis(120));
            self.show(Some(spinner));
        }
    }

    fn arm_started(&self, arm: Arm, requests: u64) {
        let bar = ProgressBar::new(requests);
        // A template that does not parse leaves the plain bar.
        if let Ok(style) = ProgressStyle::with_template(
            "{msg:12} [{bar:32}] {pos}/{len} requests, {elapsed} elapsed, {eta} left",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(arm.label());
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        self.show(Some(bar));
    }

    fn request_done(&self, _arm: Arm) {
        self.with(|bar| bar.inc(1));
    }

    fn arm_finished(&self, _arm: Arm) {
        self.show(None);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.show(None);
    }
}
