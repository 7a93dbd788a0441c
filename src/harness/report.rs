//! What a run showed, as numbers: a pure function of its turns. Rates are sums
//! over sums, never means of ratios; times are measured times over the time
//! scale.
//!
//! The fields of `report.json`: rates are fractions from 0 to 1, lifts are
//! differences of them, and everything else says its unit in its name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::{
    affinity::{AffinityBench, ArmOrder, Baseline},
    arms::{ArmRun, Place, Turn},
    chart,
};

/// The whole result of an ablation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Replicas that served.
    pub replicas: u32,
    /// Both sides.
    pub arms: Arms,
    /// Reusable-prefix hit rate with affinity less without.
    pub absolute_reusable_prefix_hit_rate_lift: f64,
    /// Overall input cache hit rate with affinity less without.
    pub absolute_overall_input_cache_hit_rate_lift: f64,
    /// Mean warm-turn latency without affinity over with.
    pub warm_turn_latency_speedup: f64,
    /// 1 less mean warm-turn latency with affinity over without.
    pub warm_turn_latency_reduction: f64,
    /// What one second of the reported times took, in measured seconds: 1 for
    /// real engines, below for simulated ones that run faster.
    pub time_scale: f64,
    /// What was asked for.
    pub workload: Workload,
    /// What it ran on.
    pub fleet: FleetSummary,
    /// What a reader of the numbers must know, such as a replica that was lost.
    pub notes: Vec<String>,
    /// Of the program that measured.
    pub berth_version: String,
}

/// Both sides of the comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arms {
    /// The baseline.
    pub no_affinity: ArmReport,
    /// With affinity keys.
    pub affinity: ArmReport,
}

/// One arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmReport {
    /// How many.
    pub trajectories: u64,
    /// Sum over warm turns of the prompt tokens that a cache could hold.
    pub reusable_prefix_tokens: u64,
    /// Of those, the ones that came from the cache.
    pub reusable_cache_hit_tokens: u64,
    /// Hit over reusable tokens.
    pub reusable_prefix_hit_rate: f64,
    /// Sum over all turns, cold ones included.
    pub all_prompt_tokens: u64,
    /// From the cache, as the engines report it.
    pub all_prompt_cache_hit_tokens: u64,
    /// Cached over all prompt tokens.
    pub overall_input_cache_hit_rate: f64,
    /// Warm turns whose reusable prefix came from the cache, down to a whole
    /// page.
    pub full_hit_turns: u64,
    /// Warm turns: all but the first of each trajectory.
    pub measured_turns: u64,
    /// Over all turns.
    pub mean_request_latency_ms: f64,
    /// Median over all turns.
    pub p50_request_latency_ms: f64,
    /// 95th percentile over all turns.
    pub p95_request_latency_ms: f64,
    /// Over warm turns.
    pub mean_warm_turn_latency_ms: f64,
    /// Sum of all request latencies.
    pub total_wall_seconds: f64,
    /// From the arm's first request to its last response.
    pub elapsed_seconds: f64,
    /// Requests that were answered: all of them.
    pub requests: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tries beyond the first of each request.
    pub retries: u64,
    /// Requests that were served on another rank than the one asked.
    pub wrong_rank_requests: u64,
    /// Over trajectories, by turn.
    pub turns: Vec<TurnReport>,
    /// Where the turns were generated.
    pub placement: Placement,
}

/// One turn of all trajectories of an arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TurnReport {
    /// The first is 1.
    pub turn: u32,
    /// Sent.
    pub prompt_tokens: u64,
    /// From the cache.
    pub cache_hit_tokens: u64,
    /// Cached over sent.
    pub input_cache_hit_rate: f64,
    /// 0 in the first turn.
    pub reusable_prefix_tokens: u64,
    /// Of those, from the cache.
    pub reusable_cache_hit_tokens: u64,
    /// Over trajectories.
    pub mean_request_latency_ms: f64,
}

/// Where an arm's turns were generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Replicas that served any turn.
    pub distinct_replicas: u64,
    /// Ranks that served any turn.
    pub distinct_ranks: u64,
    /// Turns per rank.
    pub counts: Vec<PlaceCount>,
    /// Each trajectory's.
    pub trajectories: Vec<TrajectoryPlacement>,
}

/// Turns on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceCount {
    /// Replica and rank.
    #[serde(flatten)]
    pub place: Place,
    /// How many.
    pub turns: u64,
}

/// Where one trajectory's turns were generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrajectoryPlacement {
    /// In order.
    pub turns: Vec<Place>,
    /// Turns per rank.
    pub counts: Vec<PlaceCount>,
    /// Replicas that served it.
    pub distinct_replicas: u64,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "documented at AffinityBench")]
pub struct Workload {
    pub run_id: String,
    pub seed: u64,
    pub trajectories: u32,
    pub turns: u32,
    pub initial_prompt_tokens: u32,
    pub output_tokens: u32,
    pub new_tokens_per_turn: u32,
    pub ignore_eos: bool,
    pub concurrency: u32,
    pub baseline: Baseline,
    pub arm_order: ArmOrder,
    pub time_scale: f64,
}

impl Workload {
    /// Of a run under this id.
    pub fn new(bench: &AffinityBench, run_id: &str) -> Self {
        Self {
            run_id: run_id.to_owned(),
            seed: bench.seed,
            trajectories: bench.trajectories,
            turns: bench.turns,
            initial_prompt_tokens: bench.initial_prompt_tokens,
            output_tokens: bench.output_tokens,
            new_tokens_per_turn: bench.new_tokens_per_turn,
            ignore_eos: bench.ignore_eos,
            concurrency: bench.concurrency,
            baseline: bench.baseline,
            arm_order: bench.arm_order,
            time_scale: bench.time_scale,
        }
    }
}

/// What it ran on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetSummary {
    /// Healthy and distinct before the first request.
    pub replicas: u32,
    /// Of all replicas.
    pub ranks: u64,
    /// The model that was sampled from.
    pub model: String,
    /// Accelerators by name, with their number.
    pub accelerators: BTreeMap<String, u64>,
    /// Tokens per page of the KV cache, the greatest of all replicas: a full
    /// hit may be short of the reusable prefix by less than one page.
    pub page_size: u32,
}

impl Report {
    /// Computes everything from the turns of both arms.
    pub fn new(
        workload: Workload,
        fleet: FleetSummary,
        no_affinity: &ArmRun,
        affinity: &ArmRun,
        mut notes: Vec<String>,
    ) -> Self {
        let scale = workload.time_scale;
        let arms = Arms {
            no_affinity: ArmReport::new(no_affinity, fleet.page_size, scale),
            affinity: ArmReport::new(affinity, fleet.page_size, scale),
        };
        let (without, with) = (&arms.no_affinity, &arms.affinity);
        for (name, arm) in [("no affinity", without), ("affinity", with)] {
            if arm.retries > 0 {
                notes.push(format!(
                    "{name}: {} retries are part of the latencies",
                    arm.retries
                ));
            }
            if arm.wrong_rank_requests > 0 {
                notes.push(format!(
                    "{name}: {} requests were served on another rank than the one asked",
                    arm.wrong_rank_requests
                ));
            }
        }
        if with.generated_tokens != without.generated_tokens {
            notes.push(
                "the arms generated different numbers of tokens: their times do not compare"
                    .to_owned(),
            );
        }
        Self {
            replicas: fleet.replicas,
            absolute_reusable_prefix_hit_rate_lift: with.reusable_prefix_hit_rate
                - without.reusable_prefix_hit_rate,
            absolute_overall_input_cache_hit_rate_lift: with.overall_input_cache_hit_rate
                - without.overall_input_cache_hit_rate,
            warm_turn_latency_speedup: ratio(
                without.mean_warm_turn_latency_ms,
                with.mean_warm_turn_latency_ms,
            ),
            warm_turn_latency_reduction: 1.0
                - ratio(
                    with.mean_warm_turn_latency_ms,
                    without.mean_warm_turn_latency_ms,
                ),
            time_scale: scale,
            arms,
            workload,
            fleet,
            notes,
            berth_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Both arms did the same work.
    ///
    /// # Errors
    /// Names what differs.
    pub fn check_equal_work(&self) -> anyhow::Result<()> {
        let work = |arm: &ArmReport| (arm.requests, arm.all_prompt_tokens, arm.generated_tokens);
        let (without, with) = (work(&self.arms.no_affinity), work(&self.arms.affinity));
        ensure!(
            without == with,
            "the arms did different work (requests, prompt tokens, generated tokens): \
             {without:?} without affinity, {with:?} with"
        );
        Ok(())
    }

    /// Whether the reusable-prefix hit rate with affinity, and its lift over the
    /// baseline, reach these minima (fractions from 0 to 1).
    ///
    /// # Errors
    /// Every minimum that is missed.
    pub fn check(
        &self,
        min_hit_rate: Option<f64>,
        min_lift: Option<f64>,
    ) -> Result<(), BelowMinimum> {
        let mut misses = Vec::new();
        let mut at_least = |what: &'static str, value: f64, minimum: Option<f64>| {
            // A value that is not a number misses too.
            if let Some(minimum) = minimum
                && !matches!(
                    value.partial_cmp(&minimum),
                    Some(std::cmp::Ordering::Greater | std::cmp::Ordering::Equal)
                )
            {
                misses.push(format!("{what} is {value:.4}, below {minimum}"));
            }
        };
        at_least(
            "the reusable-prefix hit rate with affinity",
            self.arms.affinity.reusable_prefix_hit_rate,
            min_hit_rate,
        );
        at_least(
            "the lift of the reusable-prefix hit rate",
            self.absolute_reusable_prefix_hit_rate_lift,
            min_lift,
        );
        if misses.is_empty() {
            Ok(())
        } else {
            Err(BelowMinimum { misses })
        }
    }

    /// Writes `report.json` and `chart.svg` into `dir`, which is made if need
    /// be. Files of an earlier run are replaced.
    ///
    /// # Errors
    /// The disk's, with the path.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let json = serde_json::to_string_pretty(self).context("cannot encode the report")?;
        for (name, text) in [
            ("report.json", json + "\n"),
            ("chart.svg", chart::svg(self)),
        ] {
            let path = dir.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

/// A run whose result is worse than asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("below the minimum: {}", misses.join("; "))]
pub struct BelowMinimum {
    /// Each in one sentence.
    pub misses: Vec<String>,
}

impl ArmReport {
    fn new(run: &ArmRun, page_size: u32, time_scale: f64) -> Self {
        let all: Vec<&Turn> = run.trajectories.iter().flatten().collect();
        let warm: Vec<&Turn> = run
            .trajectories
            .iter()
            .flat_map(|turns| turns.iter().skip(1))
            .collect();
        let reusable_prefix_tokens = sum(&warm, |t| t.reusable_tokens);
        let reusable_cache_hit_tokens = sum(&warm, reusable_hit);
        let all_prompt_tokens = sum(&all, |t| t.prompt_tokens);
        let all_prompt_cache_hit_tokens = sum(&all, |t| t.cached_tokens);
        let mut latencies = latencies_ms(&all, time_scale);
        latencies.sort_unstable_by(f64::total_cmp);
        Self {
            trajectories: run.trajectories.len() as u64,
            reusable_prefix_tokens,
            reusable_cache_hit_tokens,
            reusable_prefix_hit_rate: rate(reusable_cache_hit_tokens, reusable_prefix_tokens),
            all_prompt_tokens,
            all_prompt_cache_hit_tokens,
            overall_input_cache_hit_rate: rate(all_prompt_cache_hit_tokens, all_prompt_tokens),
            full_hit_turns: warm.iter().filter(|t| is_full_hit(t, page_size)).count() as u64,
            measured_turns: warm.len() as u64,
            mean_request_latency_ms: mean(&latencies),
            p50_request_latency_ms: percentile(&latencies, 0.50),
            p95_request_latency_ms: percentile(&latencies, 0.95),
            mean_warm_turn_latency_ms: mean(&latencies_ms(&warm, time_scale)),
            total_wall_seconds: latencies.iter().sum::<f64>() / 1e3,
            elapsed_seconds: run.elapsed.as_secs_f64() / time_scale,
            requests: all.len() as u64,
            generated_tokens: sum(&all, |t| t.output_tokens),
            retries: sum(&all, |t| t.retries),
            wrong_rank_requests: all.iter().filter(|t| t.wrong_rank).count() as u64,
            turns: by_turn(run, time_scale),
            placement: Placement::new(run),
        }
    }
}

fn by_turn(run: &ArmRun, time_scale: f64) -> Vec<TurnReport> {
    let count = run.trajectories.iter().map(Vec::len).max().unwrap_or(0);
    (0..count)
        .zip(1..)
        .map(|(index, turn)| {
            let column: Vec<&Turn> = run
                .trajectories
                .iter()
                .filter_map(|turns| turns.get(index))
                .collect();
            let prompt_tokens = sum(&column, |t| t.prompt_tokens);
            let cache_hit_tokens = sum(&column, |t| t.cached_tokens);
            TurnReport {
                turn,
                prompt_tokens,
                cache_hit_tokens,
                input_cache_hit_rate: rate(cache_hit_tokens, prompt_tokens),
                reusable_prefix_tokens: sum(&column, |t| t.reusable_tokens),
                reusable_cache_hit_tokens: sum(&column, reusable_hit),
                mean_request_latency_ms: mean(&latencies_ms(&column, time_scale)),
            }
        })
        .collect()
}

impl Placement {
    fn new(run: &ArmRun) -> Self {
        let places = || run.trajectories.iter().flatten().map(|t| &t.place);
        let counts = count_places(places());
        Self {
            distinct_replicas: distinct_replicas(places()),
            distinct_ranks: counts.len() as u64,
            counts,
            trajectories: run
                .trajectories
                .iter()
                .map(|turns| TrajectoryPlacement {
                    counts: count_places(turns.iter().map(|t| &t.place)),
                    distinct_replicas: distinct_replicas(turns.iter().map(|t| &t.place)),
                    turns: turns.iter().map(|t| t.place.clone()).collect(),
                })
                .collect(),
        }
    }
}

fn count_places<'a>(places: impl Iterator<Item = &'a Place>) -> Vec<PlaceCount> {
    let mut counts: BTreeMap<&Place, u64> = BTreeMap::new();
    for place in places {
        *counts.entry(place).or_default() += 1;
    }
    counts
        .into_iter()
        .map(|(place, turns)| PlaceCount {
            place: place.clone(),
            turns,
        })
        .collect()
}

fn distinct_replicas<'a>(places: impl Iterator<Item = &'a Place>) -> u64 {
    places.map(|p| &p.replica).collect::<BTreeSet<_>>().len() as u64
}

/// Cached tokens beyond the reusable prefix do not count: an engine that finds
/// more shares a prefix that this workload does not have.
fn reusable_hit(turn: &Turn) -> u32 {
    turn.cached_tokens.min(turn.reusable_tokens)
}

fn is_full_hit(turn: &Turn, page_size: u32) -> bool {
    let page = page_size.max(1);
    turn.cached_tokens >= turn.reusable_tokens / page * page
}

fn sum(turns: &[&Turn], of: impl Fn(&Turn) -> u32) -> u64 {
    turns.iter().map(|t| u64::from(of(t))).sum()
}

/// 0 where there is nothing to hit.
#[expect(
    clippy::cast_precision_loss,
    reason = "counts of tokens are far below 2^53"
)]
fn rate(hit: u64, of: u64) -> f64 {
    ratio(hit as f64, of as f64)
}

fn ratio(a: f64, b: f64) -> f64 {
    if b == 0.0 { 0.0 } else { a / b }
}

fn latencies_ms(turns: &[&Turn], time_scale: f64) -> Vec<f64> {
    turns.iter().map(|t| ms(t.latency) / time_scale).collect()
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of requests are far below 2^53"
)]
fn mean(values: &[f64]) -> f64 {
    ratio(values.iter().sum(), values.len() as f64)
}

/// Of sorted values, interpolated linearly at `(n - 1) * p`; 0 of none.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index into values in memory"
)]
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let position = last as f64 * p;
    let below = position.floor() as usize;
    let at = |index: usize| sorted.get(index.min(last)).copied().unwrap_or_default();
    at(below) + (at(below + 1) - at(below)) * (position - position.floor())
}

#[cfg(test)]
#[path = "report/test.rs"]
pub(super) mod tests;
