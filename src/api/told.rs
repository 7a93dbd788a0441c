//! The line that tells what became of a sampling request. Each request has one,
//! whether it was answered, refused, or given up by its client; it holds ids,
//! counts and reasons, never a prompt, a completion or a key. Of an idempotency
//! key it has the hash that the store knows it by.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::{Span, info};

use crate::{
    call::{RouteReceipt, SampleCall},
    error::{Error, Reason},
    fleet::Fleet,
    stack::generation::{Finished, Follow},
    store::KeyHash,
    telemetry::{method::Method, outcome::Outcome, trace},
};

/// A request of which nothing was told yet.
pub(super) struct Untold {
    fleet: Arc<Fleet>,
    method: Method,
    request_id: Arc<str>,
    begun: Instant,
    /// As its replicas registered it.
    model: Option<Arc<str>>,
    key: Option<KeyHash>,
    follow: Option<Follow>,
    told: bool,
}

impl Untold {
    pub(super) fn new(fleet: &Arc<Fleet>, method: Method, call: &SampleCall) -> Self {
        // Where no line is wanted, none of this is looked up.
        let told = !tracing::enabled!(tracing::Level::INFO);
        if told {
            return Self {
                fleet: Arc::clone(fleet),
                method,
                request_id: Arc::clone(&call.request_id),
                begun: Instant::now(),
                model: None,
                key: None,
                follow: None,
                told,
            };
        }
        let snapshot = fleet.snapshot();
        // A name that nobody registered is the caller's text.
        let model = match call.params.model.as_deref() {
            Some(named) => snapshot.models.get_key_value(named).map(|(model, _)| model),
            None => snapshot
                .models
                .keys()
                .next()
                .filter(|_| snapshot.models.len() == 1),
        };
        Self {
            fleet: Arc::clone(fleet),
            method,
            request_id: Arc::clone(&call.request_id),
            begun: Instant::now(),
            model: model.cloned(),
            key: call
                .idempotency_key
                .as_ref()
                .map(|key| KeyHash::of(&call.tenant, key)),
            follow: None,
            told,
        }
    }

    /// It follows this generation: where that runs is known if it fails.
    pub(super) fn follows(&mut self, generation: Follow) {
        self.follow = Some(generation);
    }

    pub(super) fn answered(&mut self, finished: &Finished) {
        let samples = &finished.completion.samples;
        let route = samples.first().map(|sample| &sample.route);
        // A model that was not named, or that was served by a fleet that is gone.
        let served = route.and_then(|route| {
            let snapshot = self.fleet.snapshot();
            let rank = snapshot.find(&route.target)?;
            Some(Arc::clone(&rank.replica.facts.model))
        });
        self.model = self.model.take().or(served);
        let sum = |of: fn(&crate::call::Usage) -> u32| -> u64 {
            samples
                .iter()
                .map(|sample| u64::from(of(&sample.usage)))
                .sum()
        };
        self.tell(&Line {
            outcome: Outcome::OK,
            why: None,
            route,
            attempts: samples.iter().map(|s| s.route.attempts.len()).sum(),
            samples: samples.len(),
            replayed: finished.replayed,
            // All samples have one prompt; each finds what it finds of it.
            prompt_tokens: samples.first().map_or(0, |s| s.usage.prompt_tokens.into()),
            cached_tokens: sum(|usage| usage.cached_tokens),
            completion_tokens: sum(|usage| usage.completion_tokens),
        });
    }

    pub(super) fn refused(&mut self, error: &Error) {
        self.without_result(Outcome::of_reason(error.reason), &error.message);
    }

    fn without_result(&mut self, outcome: Outcome, why: &str) {
        let last = self.follow.take().and_then(|follow| follow.last_route());
        self.tell(&Line {
            outcome,
            why: Some(why),
            route: last.as_ref(),
            attempts: last.as_ref().map_or(0, |route| route.attempts.len() + 1),
            samples: 0,
            replayed: false,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
        });
    }

    fn tell(&mut self, line: &Line<'_>) {
        if std::mem::replace(&mut self.told, true) {
            return;
        }
        let target = line.route.map(|route| &route.target);
        let trace_id = trace::trace_id(&Span::current()).map(tracing::field::display);
        info!(
            request_id = &*self.request_id,
            method = self.method.name(),
            outcome = line.outcome.code_name(),
            reason = line.outcome.reason,
            model = self.model.as_deref(),
            replica = target.map(|target| target.replica.as_str()),
            incarnation = target.map(|target| target.incarnation.0),
            rank = target.map(|target| target.rank),
            routing = line.route.map(|route| route.reason.name()),
            attempts = line.attempts,
            samples = line.samples,
            replayed = line.replayed,
            prompt_tokens = line.prompt_tokens,
            cached_tokens = line.cached_tokens,
            completion_tokens = line.completion_tokens,
            duration_s = self.begun.elapsed().as_secs_f64(),
            key = self.key.map(tracing::field::debug),
            trace_id,
            why = line.why,
            "request finished"
        );
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        if !self.told {
            let gone = Outcome {
                code: tonic::Code::Cancelled,
                reason: Reason::Cancelled.name(),
            };
            self.without_result(gone, "the caller went away");
        }
    }
}

struct Line<'a> {
    outcome: Outcome,
    why: Option<&'a str>,
    /// Of the first sample.
    route: Option<&'a RouteReceipt>,
    attempts: usize,
    samples: usize,
    replayed: bool,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
}
