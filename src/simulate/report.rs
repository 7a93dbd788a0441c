//! Figures from outcomes. Rates are sums over sums, never means of ratios;
//! percentiles interpolate linearly at `(n - 1) p`.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde::Serialize;

use super::{
    Arrival, Setup,
    oracle::Reachable,
    outcome::{Outcome, TurnDone},
    policy::Policy,
    trace::Trace,
};

/// A comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What was sent.
    pub workload: Workload,
    /// Where to.
    pub fleet: FleetReport,
    /// What happened to it, as it was asked for.
    pub events: Vec<String>,
    /// Of session names and request ids.
    pub seed: u64,
    /// In the order in which they were asked for.
    pub policies: Vec<PolicyReport>,
}

/// A workload.
#[derive(Clone, Debug, Serialize)]
pub struct Workload {
    /// Its name.
    pub trace: String,
    /// Trajectories; requests where the trace knows no trajectories.
    pub sessions: usize,
    /// Requests.
    pub turns: usize,
    /// Tokens.
    pub prompt_tokens: u64,
    /// Tokens.
    pub output_tokens: u64,
    /// When sessions begin, in words.
    pub arrival: String,
    /// Prompt tokens that an infinite cache for everybody would have found.
    pub reachable_tokens: u64,
    /// Over all prompt tokens.
    pub reachable_rate: f64,
    /// The same in blocks, of a trace of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reachable_block_rate: Option<f64>,
}

/// A fleet.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "as in Shape")]
pub struct FleetReport {
    pub replicas: usize,
    pub ranks_per_replica: usize,
    pub accelerator: String,
    pub kv_tokens_per_rank: usize,
    pub page_size: usize,
    pub max_running_per_rank: usize,
    pub chunk_tokens: usize,
}

/// One policy's figures.
#[derive(Clone, Debug, Serialize)]
pub struct PolicyReport {
    /// Its name.
    pub policy: String,
    /// In a few words.
    pub about: String,
    /// Cached prompt tokens over those that an infinite cache would have found.
    /// 1 where nothing can be found.
    pub hits_of_reachable: f64,
    /// Cached prompt tokens over those that one cache of all ranks' size would
    /// have found in the same run. It can pass 1 where far more is live than fits:
    /// the least recently used is then not the best to drop.
    pub hits_of_pooled: f64,
    /// Cached prompt tokens over all prompt tokens, cold turns included.
    pub hit_rate: f64,
    /// Tokens.
    pub cached_tokens: u64,
    /// Until the last turn was answered.
    pub makespan_seconds: f64,
    /// Until nine of ten sessions were over.
    pub sessions_90_seconds: f64,
    /// Until nine of ten turns were answered.
    pub turns_90_seconds: f64,
    /// From a turn's sending to its answer.
    pub latency_seconds: Latency,
    /// How evenly ranks were used.
    pub balance: Balance,
    /// Sessions that changed their rank.
    pub moves: Moves,
    /// Prompt tokens computed although an earlier turn had computed them.
    pub reprefilled_tokens: u64,
    /// Requests that a rank took out of its batch for want of KV.
    pub retractions: u64,
    /// Cached tokens that ranks evicted.
    pub evicted_tokens: u64,
    /// The turns of all sessions by their number: the first ones, the second ones,
    /// and so on.
    pub turns: Vec<TurnReport>,
    /// What the events did.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<EventReport>,
}

/// The turns of one number, of all sessions that have one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TurnReport {
    /// How many.
    pub requests: u64,
    /// Their prompts' tokens.
    pub prompt_tokens: u64,
    /// Those of them that a cache held.
    pub cached_tokens: u64,
}

/// Of all turns.
#[derive(Clone, Copy, Debug, Serialize)]
#[expect(missing_docs, reason = "seconds, by their names")]
pub struct Latency {
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
}

/// The greatest over the mean of ranks: 1 is even.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Balance {
    /// Of requests on the rank, over time.
    pub in_flight: f64,
    /// Of time spent in steps.
    pub busy: f64,
    /// Of sessions that began there.
    pub sessions: f64,
}

/// Requests that went to another rank than the one before.
#[derive(Clone, Debug, Serialize)]
pub struct Moves {
    /// How many.
    pub total: u64,
    /// By the router's reason.
    pub by_reason: BTreeMap<String, u64>,
    /// From a rank that lives to one that had died and come back.
    pub to_returned: u64,
    /// Prompt tokens that they computed again.
    pub reprefilled_tokens: u64,
}

/// What an event did.
#[derive(Clone, Debug, Serialize)]
pub struct EventReport {
    /// As it was asked for.
    pub event: String,
    /// Sessions that lived on a rank that died.
    pub sessions_there: u64,
    /// Of them, those that have moved since.
    pub sessions_moved: u64,
    /// Requests that were lost and sent again.
    pub requests_lost: u64,
}

impl PolicyReport {
    pub(super) fn new(policy: &Policy, outcome: &Outcome, reachable: &Reachable) -> Self {
        let cached: u64 = outcome.turns.iter().map(|t| u64::from(t.cached)).sum();
        let prompts: u64 = outcome.turns.iter().map(|t| u64::from(t.prompt)).sum();
        let again = |turn: &TurnDone| {
            let reach = reachable.turns[turn.session][turn.turn];
            u64::from(reach.saturating_sub(turn.cached))
        };
        let mut latencies: Vec<Duration> = outcome
            .turns
            .iter()
            .map(|turn| turn.done.saturating_sub(turn.sent))
            .collect();
        latencies.sort_unstable();
        let answered: Vec<Duration> = outcome.turns.iter().map(|turn| turn.done).collect();
        let mut over = outcome.sessions.clone();
        over.sort_unstable();
        let ranks = &outcome.ranks;
        Self {
            policy: policy.name.clone(),
            about: policy.about.to_owned(),
            hits_of_reachable: share(cached, reachable.tokens),
            hits_of_pooled: share(cached, outcome.pooled),
            hit_rate: share(cached, prompts),
            cached_tokens: cached,
            makespan_seconds: over.last().copied().unwrap_or_default().as_secs_f64(),
            sessions_90_seconds: nine_of_ten(&over),
            turns_90_seconds: nine_of_ten(&answered),
            latency_seconds: Latency {
                mean: latencies.iter().sum::<Duration>().as_secs_f64()
                    / latencies.len().max(1) as f64,
                p50: percentile(&latencies, 0.5),
                p95: percentile(&latencies, 0.95),
                p99: percentile(&latencies, 0.99),
            },
            balance: Balance {
                in_flight: uneven(ranks.iter().map(|w| w.occupied as f64)),
                busy: uneven(ranks.iter().map(|w| w.busy.as_secs_f64())),
                sessions: uneven(ranks.iter().map(|w| w.began as f64)),
            },
            moves: Moves {
                total: outcome.moves.values().sum(),
                by_reason: outcome.moves.clone(),
                to_returned: outcome.moves_to_returned,
                reprefilled_tokens: outcome.turns.iter().filter(|t| t.moved).map(again).sum(),
            },
            reprefilled_tokens: outcome.turns.iter().map(again).sum(),
            retractions: ranks.iter().map(|w| w.retractions).sum(),
            evicted_tokens: ranks.iter().map(|w| w.evicted).sum(),
            turns: by_number(&outcome.turns),
            events: outcome
                .effects
                .iter()
                .map(|effect| EventReport {
                    event: effect.event.to_string(),
                    sessions_there: effect.there,
                    sessions_moved: effect.moved,
                    requests_lost: effect.lost,
                })
                .collect(),
        }
    }
}

impl Report {
    pub(super) fn new(
        trace: &Trace,
        setup: &Setup,
        reachable: &Reachable,
        policies: Vec<PolicyReport>,
    ) -> Self {
        let (prompt_tokens, output_tokens) = trace.tokens();
        let shape = &setup.shape;
        Self {
            workload: Workload {
                trace: trace.name.clone(),
                sessions: trace.sessions.len(),
                turns: trace.turns(),
                prompt_tokens,
                output_tokens,
                arrival: arrival(setup.arrival),
                reachable_tokens: reachable.tokens,
                reachable_rate: reachable.tokens as f64 / prompt_tokens.max(1) as f64,
                reachable_block_rate: reachable.blocks.map(|(seen, all)| share(seen, all)),
            },
            fleet: FleetReport {
                replicas: shape.replicas,
                ranks_per_replica: shape.ranks,
                accelerator: shape.accelerator.to_owned(),
                kv_tokens_per_rank: shape.kv_tokens,
                page_size: shape.page,
                max_running_per_rank: shape.max_running,
                chunk_tokens: setup.chunk,
            },
            events: setup.events.iter().map(ToString::to_string).collect(),
            seed: setup.seed,
            policies,
        }
    }

    /// Of this policy.
    pub fn policy(&self, name: &str) -> Option<&PolicyReport> {
        self.policies.iter().find(|policy| policy.policy == name)
    }

    /// As JSON, with a line feed at its end.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Writes `simulate.json` and `simulate.svg` into a directory, which is made
    /// if need be.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn write(&self, directory: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(directory)?;
        std::fs::write(directory.join("simulate.json"), self.json()?)?;
        std::fs::write(directory.join("simulate.svg"), self.chart())
    }
}

fn by_number(turns: &[TurnDone]) -> Vec<TurnReport> {
    let most = turns.iter().map(|turn| turn.turn + 1).max();
    let mut by_number = vec![TurnReport::default(); most.unwrap_or_default()];
    for turn in turns {
        if let Some(of_number) = by_number.get_mut(turn.turn) {
            of_number.requests += 1;
            of_number.prompt_tokens += u64::from(turn.prompt);
            of_number.cached_tokens += u64::from(turn.cached);
        }
    }
    by_number
}

fn arrival(arrival: Arrival) -> String {
    match arrival {
        Arrival::Every(gap) => {
            format!("one session every {}", humantime::format_duration(gap))
        }
        Arrival::Live(live) => format!("{live} sessions live"),
        Arrival::Recorded => "as recorded".to_owned(),
    }
}

/// 1 where there is nothing to have a share of.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        1.0
    } else {
        part as f64 / whole as f64
    }
}

/// When nine of ten were over, of times in order.
fn nine_of_ten(times: &[Duration]) -> f64 {
    let at = (times.len() * 9).div_ceil(10).saturating_sub(1);
    times.get(at).copied().unwrap_or_default().as_secs_f64()
}

/// Of values in order.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index of the values"
)]
fn percentile(sorted: &[Duration], p: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let place = last as f64 * p;
    let below = (place.floor() as usize).min(last);
    let above = (below + 1).min(last);
    let (a, b) = (sorted[below].as_secs_f64(), sorted[above].as_secs_f64());
    a + (b - a) * (place - below as f64)
}

/// The greatest over the mean; 1 where all are 0.
fn uneven(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count().max(1) as f64;
    let mean = values.clone().sum::<f64>() / count;
    let greatest = values.fold(0.0, f64::max);
    if mean > 0.0 { greatest / mean } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(values: &[u64]) -> Vec<Duration> {
        values.iter().copied().map(Duration::from_secs).collect()
    }

    #[test]
    fn percentiles_interpolate() {
        let sorted = seconds(&[1, 2, 3, 4, 5]);
        assert!((percentile(&sorted, 0.5) - 3.0).abs() < 1e-12);
        assert!((percentile(&sorted, 0.95) - 4.8).abs() < 1e-12);
        assert!((percentile(&sorted[..1], 0.99) - 1.0).abs() < 1e-12);
        assert!(percentile(&[], 0.5).abs() < 1e-12);
    }

    #[test]
    fn nine_of_ten_is_the_ninth() {
        assert!((nine_of_ten(&seconds(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])) - 9.0).abs() < 1e-12);
        assert!((nine_of_ten(&seconds(&[7])) - 7.0).abs() < 1e-12);
        assert!((nine_of_ten(&seconds(&[1, 2, 3])) - 3.0).abs() < 1e-12);
    }

    #[test]
    fn unevenness() {
        assert!((uneven([2.0, 2.0].into_iter()) - 1.0).abs() < 1e-12);
        assert!((uneven([4.0, 0.0].into_iter()) - 2.0).abs() < 1e-12);
        assert!((uneven([0.0, 0.0].into_iter()) - 1.0).abs() < 1e-12);
    }
}
