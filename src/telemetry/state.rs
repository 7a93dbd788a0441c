//! What is read from state that exists, when Prometheus asks: the counters that
//! `GetStats` tells too, the fleet, the router, the store. It costs requests
//! nothing.

use std::{
    fmt,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::DescriptorEncoder,
    registry::{Registry, Unit},
};

use super::{
    families::{Page, tokens},
    fleet,
    otlp::SpanCounts,
};
use crate::{
    call::{AttemptFailure, RouteReason},
    stack::Parts,
    store::account::Timings,
};

/// Puts it into a registry.
pub(super) fn register(registry: &mut Registry, parts: Parts, spans: Arc<SpanCounts>) {
    if let Some(account) = parts.store.account() {
        let Timings { sync, batch } = account.timings;
        registry.register_with_unit(
            "store_sync",
            "How long the disk took to make a batch of the store durable",
            Unit::Seconds,
            sync,
        );
        registry.register(
            "store_batch_writes",
            "Writes of a batch of the store",
            batch,
        );
    }
    registry.register_collector(Box::new(State {
        parts,
        spans,
        started: SystemTime::now(),
    }));
}

struct State {
    parts: Parts,
    spans: Arc<SpanCounts>,
    started: SystemTime,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").finish_non_exhaustive()
    }
}

impl Collector for State {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.process(&mut page)?;
        self.idempotency(&mut page)?;
        self.routing(&mut page)?;
        self.attempts(&mut page)?;
        self.tokens(&mut page)?;
        fleet::write(&self.parts.fleet, &mut page)?;
        self.store(&mut page)
    }
}

impl State {
    fn process(&self, page: &mut Page<'_>) -> fmt::Result {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        page.gauges("build_info", "The program; always 1", [(version, 1.0)])?;
        let started = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        page.gauge_of(
            "start_time",
            Unit::Seconds,
            "When the control plane started, since 1970",
            started.as_secs_f64(),
        )?;
        page.counter(
            "spans_exported",
            "Spans that a collector has taken",
            self.spans.exported(),
        )?;
        page.counter(
            "spans_dropped",
            "Spans that were dropped: the queue was full, or no collector took them",
            self.spans.dropped(),
        )
    }

    fn idempotency(&self, page: &mut Page<'_>) -> fmt::Result {
        let counters = &self.parts.counters;
        page.counter(
            "generations",
            "Generations begun, with an idempotency key or without",
            counters.generations.get(),
        )?;
        let outcomes = [
            ("joined", &counters.joins),
            ("replayed", &counters.replays),
            ("mismatched", &counters.keys_reused),
            ("unknown", &counters.unknown_outcomes),
        ];
        page.counters(
            "idempotency_outcomes",
            "Requests with a key that began no generation (joined and replayed: duplicates \
             avoided; mismatched: refused), and generations whose outcome is unknown",
            outcomes.map(|(outcome, count)| ([("outcome", outcome)], count.get())),
        )?;
        page.counter(
            "late_results",
            "Results of fenced attempts that came late and were dropped",
            counters.late_results.get(),
        )?;
        page.gauge(
            "keys_running",
            "Idempotency keys whose generation runs",
            self.parts.running.len() as f64,
        )?;
        page.gauge(
            "condemned_prompts",
            "Prompts that are refused because engines died with them",
            self.parts.poison.condemned().len() as f64,
        )
    }

    fn routing(&self, page: &mut Page<'_>) -> fmt::Result {
        let counters = &self.parts.counters;
        page.counters(
            "routing_decisions",
            "Choices of a rank, by reason",
            RouteReason::ALL
                .map(|reason| ([("reason", reason.name())], counters.routed(reason).get())),
        )?;
        let waits = [
            ("kv", &counters.waits_for_kv),
            ("pause", &counters.waits_for_pause),
        ];
        page.counters(
            "routing_waits",
            "Choices that waited for room in a KV cache, or for the end of a pause",
            waits.map(|(what, count)| ([("awaited", what)], count.get())),
        )?;
        page.counter(
            "routing_waits_in_vain",
            "Turns of trajectories that were taken without room after the longest wait",
            counters.waits_for_kv_in_vain.get(),
        )?;
        page.counter(
            "routing_last_resorts",
            "Choices of a rank whose heartbeats are missing, for want of any other",
            counters.last_resorts.get(),
        )?;
        let all = self.parts.router.pins();
        let snapshot = self.parts.fleet.snapshot();
        let live: u64 = snapshot.ranks.iter().map(|r| r.load.live_pins()).sum();
        // Two looks at a table that changes.
        let hints = (all as u64).saturating_sub(live);
        page.gauges(
            "pins",
            "Trajectories remembered: live ones count as load, hints do not",
            [("live", live), ("hint", hints)].map(|(state, n)| ([("state", state)], n as f64)),
        )?;
        page.gauge(
            "prefix_blocks",
            "Blocks of prompts remembered for requests without a key",
            self.parts.router.prefix_blocks() as f64,
        )
    }

    fn attempts(&self, page: &mut Page<'_>) -> fmt::Result {
        let counters = &self.parts.counters;
        page.counter(
            "attempts",
            "Attempts sent to engines",
            counters.attempts.get(),
        )?;
        page.counters(
            "attempt_failures",
            "Attempts without a result, by what became of them",
            AttemptFailure::ALL.map(|how| ([("failure", how.name())], counters.failed(how).get())),
        )?;
        let fenced = [
            ("aborted", &counters.attempts_aborted),
            ("left_behind", &counters.attempts_left_behind),
            ("orphan", &counters.orphans_fenced),
        ];
        page.counters(
            "attempts_fenced",
            "Attempts ended so that no copy runs: aborted at their engine, given up at a hanging \
             one, or left by an earlier run of the control plane",
            fenced.map(|(how, count)| ([("how", how)], count.get())),
        )?;
        page.counter("samples", "Samples finished", counters.samples.get())?;
        page.counter(
            "wrong_rank_samples",
            "Samples that an engine served on another rank than it was told",
            counters.wrong_rank.get(),
        )?;
        page.counter(
            "cache_misses",
            "Warm turns that found less than half of what their rank should have held",
            counters.cache_misses.get(),
        )
    }

    fn tokens(&self, page: &mut Page<'_>) -> fmt::Result {
        let counters = &self.parts.counters;
        for (name, help, count) in [
            (
                "prompt",
                "Prompt tokens of finished samples",
                &counters.prompt_tokens,
            ),
            (
                "completion",
                "Generated tokens of finished samples",
                &counters.completion_tokens,
            ),
            (
                "expected_cached",
                "Prompt tokens that pins let one expect in a rank's cache",
                &counters.cached_tokens_expected,
            ),
            (
                "reported_cached",
                "Prompt tokens that engines found in their caches",
                &counters.cached_tokens_reported,
            ),
        ] {
            page.counter_of(name, tokens(), help, count.get())?;
        }
        Ok(())
    }

    fn store(&self, page: &mut Page<'_>) -> fmt::Result {
        let Some(account) = self.parts.store.account() else {
            return Ok(());
        };
        let stats = account.stats;
        page.gauge(
            "store_up",
            "1: the store works",
            f64::from(u8::from(stats.down.is_none())),
        )?;
        page.gauge_of(
            "store_used",
            Unit::Bytes,
            "Bytes on disk that tenants are charged for",
            stats.used_bytes as f64,
        )?;
        page.gauge(
            "store_damaged_records",
            "Records that did not decode when the store was opened",
            stats.damaged_records as f64,
        )?;
        for (name, help, count) in [
            ("store_writes", "Writes made durable", stats.writes),
            ("store_expired_keys", "Keys expired", stats.expired),
            (
                "store_losses",
                "Losses declared since the store was opened",
                stats.losses,
            ),
            (
                "store_reopened",
                "Times the store was opened again after a failure",
                stats.reopened,
            ),
        ] {
            page.counter(name, help, count)?;
        }
        Ok(())
    }
}
