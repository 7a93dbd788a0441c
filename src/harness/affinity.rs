//! The multi-turn affinity ablation: options, their validation, and the run.

use std::{fmt, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::{
    arms::{Arm, Job},
    client::Client,
    fleet::{self, Fleet},
    progress::Progress,
    report::{FleetSummary, Report, Workload},
    workload::random_run_id,
};
use crate::{
    auth::client::Access,
    proto::{FinishTrajectoryRequest, RoutingPolicy},
};

/// Bounds a run to what fits in a report: turns of both arms, each recorded.
const MAX_REQUESTS: u64 = 1_000_000;
const MAX_TOKENS: u32 = 1 << 20;
/// Freeing the pins of a run is courtesy: it gets this long for all of them.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of a run. `Default` is the origin's workload: 4 trajectories, 8
/// turns, prompts of 4,096 tokens, exactly 512 generated.
#[derive(Clone, Debug)]
pub struct AffinityBench {
    /// `http://host:port` of the control plane's gRPC.
    pub control_plane: String,
    /// How to show it who calls.
    pub access: Access,
    /// May be unset where the healthy replicas serve one model.
    pub model: Option<String>,
    /// Replicas that must be healthy, no fewer and no more. Unset: however many
    /// there are, at least one.
    pub replicas: Option<u32>,
    /// How long to wait for them.
    pub wait: Duration,
    /// Per arm, 1 or more.
    pub trajectories: u32,
    /// Per trajectory, 2 or more: the first is always cold.
    pub turns: u32,
    /// Random tokens in the first turn's prompt, 1 or more.
    pub initial_prompt_tokens: u32,
    /// To generate per turn, 1 or more.
    pub output_tokens: u32,
    /// Random tokens after each turn's output, as an environment would add.
    pub new_tokens_per_turn: u32,
    /// Generate exactly `output_tokens`, past any end of sequence.
    pub ignore_eos: bool,
    /// Trajectories in flight at once; the turns of one are always in order.
    pub concurrency: u32,
    /// How the arm without affinity is routed.
    pub baseline: Baseline,
    /// Which arm runs first.
    pub arm_order: ArmOrder,
    /// Prompts and sampling are random by this and the run id.
    pub seed: u64,
    /// Names the run: 1 to 64 characters of `[A-Za-z0-9._-]`. Unset: random. A
    /// run id can be used once on one control plane, since its requests would
    /// be replayed.
    pub run_id: Option<String>,
    /// For one request with its retries.
    pub request_timeout: Duration,
    /// What one simulated second takes, in seconds: below 1 for simulated
    /// engines that run faster than what they simulate. All reported times are
    /// measured times divided by it. 1 for real engines.
    pub time_scale: f64,
}

impl Default for AffinityBench {
    fn default() -> Self {
        Self {
            control_plane: "http://127.0.0.1:7700".to_owned(),
            access: Access::default(),
            model: None,
            replicas: None,
            wait: Duration::from_secs(120),
            trajectories: 4,
            turns: 8,
            initial_prompt_tokens: 4096,
            output_tokens: 512,
            new_tokens_per_turn: 0,
            ignore_eos: true,
            concurrency: 1,
            baseline: Baseline::Random,
            arm_order: ArmOrder::NoAffinityFirst,
            seed: 0,
            run_id: None,
            request_timeout: Duration::from_secs(600),
            time_scale: 1.0,
        }
    }
}

/// How the arm without affinity is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Baseline {
    /// Uniformly at random by the request id, so that a run id repeats it.
    Random,
    /// Each request the next rank.
    RoundRobin,
    /// Least in flight. With one trajectory in flight every rank is idle and
    /// the tie decides.
    LeastLoaded,
}

impl Baseline {
    pub(super) fn policy(self) -> RoutingPolicy {
        match self {
            Self::Random => RoutingPolicy::Random,
            Self::RoundRobin => RoutingPolicy::RoundRobin,
            Self::LeastLoaded => RoutingPolicy::LeastLoaded,
        }
    }
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
        })
    }
}

/// Which arm runs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ArmOrder {
    /// The baseline, then affinity.
    NoAffinityFirst,
    /// Affinity, then the baseline: to see whether the order matters.
    AffinityFirst,
}

impl ArmOrder {
    fn arms(self) -> [Arm; 2] {
        match self {
            Self::NoAffinityFirst => [Arm::NoAffinity, Arm::Affinity],
            Self::AffinityFirst => [Arm::Affinity, Arm::NoAffinity],
        }
    }
}

impl AffinityBench {
    /// Prompt and output of the last turn, in tokens.
    pub fn longest_context(&self) -> u64 {
        u64::from(self.initial_prompt_tokens)
            + u64::from(self.turns) * u64::from(self.output_tokens)
            + u64::from(self.turns.saturating_sub(1)) * u64::from(self.new_tokens_per_turn)
    }

    /// Looks at the options alone.
    ///
    /// # Errors
    /// Everything that is wrong with them.
    pub fn check(&self) -> anyhow::Result<()> {
        refuse(&self.faults())
    }

    fn faults(&self) -> Vec<String> {
        let wire = super::client::wire(&self.control_plane, &self.access);
        let mut faults = wire.err().unwrap_or_default();
        let mut require = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        require(
            self.model.as_ref().is_none_or(|m| !m.is_empty()),
            "--model: must not be empty",
        );
        require(self.replicas != Some(0), "--replicas: must be at least 1");
        require(self.trajectories > 0, "--trajectories: must be at least 1");
        require(
            self.turns >= 2,
            "--turns: must be at least 2, since a first turn has nothing to reuse",
        );
        require(
            u64::from(self.trajectories) * u64::from(self.turns) <= MAX_REQUESTS,
            "--trajectories, --turns: at most 1,000,000 requests an arm",
        );
        require(
            (1..=MAX_TOKENS).contains(&self.initial_prompt_tokens),
            "--initial-prompt-tokens: must be 1 to 1,048,576",
        );
        require(
            (1..=MAX_TOKENS).contains(&self.output_tokens),
            "--output-tokens: must be 1 to 1,048,576",
        );
        require(
            self.new_tokens_per_turn <= MAX_TOKENS,
            "--new-tokens-per-turn: must be at most 1,048,576",
        );
        require(self.concurrency > 0, "--concurrency: must be at least 1");
        require(
            !self.request_timeout.is_zero() && self.request_timeout <= Duration::from_secs(86_400),
            "--request-timeout: must be above 0 and at most 24h",
        );
        require(
            self.wait <= Duration::from_secs(86_400),
            "--wait: must be at most 24h",
        );
        require(
            self.time_scale.is_finite() && self.time_scale > 0.0,
            "--time-scale: must be a number above 0",
        );
        require(
            self.run_id.as_ref().is_none_or(|id| {
                (1..=64).contains(&id.len())
                    && id
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            }),
            "--run-id: must be 1 to 64 characters of [A-Za-z0-9._-]",
        );
        faults
    }

    /// Everything that is wrong with them on this fleet.
    fn faults_on(&self, fleet: &Fleet) -> Vec<String> {
        let mut faults = Vec::new();
        let longest = self.longest_context();
        if fleet.models.len() > 1 {
            let models: Vec<&str> = fleet.models.iter().map(String::as_str).collect();
            faults.push(format!(
                "--model: name one of those that are served: {}",
                models.join(", ")
            ));
        }
        if fleet.vocab_size == 0 {
            faults.push("a replica does not say its vocabulary size".to_owned());
        }
        if longest > u64::from(fleet.context_length) {
            faults.push(format!(
                "--initial-prompt-tokens, --turns, --output-tokens, --new-tokens-per-turn: the \
                 last turn has {longest} tokens of prompt and output, the context is {}",
                fleet.context_length
            ));
        } else if longest > fleet.kv_capacity {
            faults.push(format!(
                "the last turn has {longest} tokens of prompt and output, the smallest KV cache \
                 of a rank holds {}",
                fleet.kv_capacity
            ));
        }
        faults
    }
}

fn refuse(faults: &[String]) -> anyhow::Result<()> {
    if faults.is_empty() {
        return Ok(());
    }
    bail!("the run cannot start:\n  {}", faults.join("\n  "))
}

/// Waits for the fleet, runs both arms, and reports.
///
/// # Errors
/// Options that cannot be run, all of them at once and before anything is sent;
/// a fleet that is not complete in time; the first request that fails. No
/// report is made of a part.
pub async fn run(bench: AffinityBench, progress: impl Progress) -> anyhow::Result<Report> {
    bench.check()?;
    let client = Client::new(&bench.control_plane, &bench.access, bench.concurrency)?;
    let fleet = fleet::complete(
        &client,
        bench.model.as_deref(),
        bench.replicas,
        bench.wait,
        &progress,
    )
    .await?;
    refuse(&bench.faults_on(&fleet))?;
    let model = fleet.models.first().cloned().context("no model")?;

    let job = Arc::new(Job {
        run_id: bench.run_id.clone().unwrap_or_else(random_run_id),
        model: model.clone(),
        vocab_size: fleet.vocab_size,
        send_seed: fleet.seeds,
        bench,
        client,
        progress,
    });
    let arms = run_arms(&job).await;
    free_pins(&job).await;
    let (no_affinity, affinity) = arms?;

    let mut notes = match job.client.list_replicas(Some(model.clone())).await {
        Ok(after) => fleet::changes(&fleet, &after),
        Err(error) => vec![format!("the fleet could not be checked again: {error:#}")],
    };
    if !job.send_seed {
        notes.push("not every replica honours a seed: sampling is not repeatable".to_owned());
    }
    let summary = FleetSummary {
        replicas: u32::try_from(fleet.incarnations.len()).unwrap_or(u32::MAX),
        ranks: fleet.ranks,
        model,
        accelerators: fleet.accelerators,
        page_size: fleet.page_size,
    };
    let workload = Workload::new(&job.bench, &job.run_id);
    let report = Report::new(workload, summary, &no_affinity, &affinity, notes);
    if job.bench.ignore_eos {
        report.check_equal_work()?;
    }
    Ok(report)
}

async fn run_arms<P: Progress>(
    job: &Arc<Job<P>>,
) -> anyhow::Result<(super::arms::ArmRun, super::arms::ArmRun)> {
    let [first, second] = job.bench.arm_order.arms();
    let one = job.run(first).await?;
    let two = job.run(second).await?;
    Ok(match first {
        Arm::NoAffinity => (one, two),
        Arm::Affinity => (two, one),
    })
}

/// The trajectories are over. Only after both arms: freeing one earlier would
/// change where the next is placed.
async fn free_pins<P: Progress>(job: &Arc<Job<P>>) {
    let free = async {
        for number in 1..=job.bench.trajectories {
            let request = FinishTrajectoryRequest {
                model: Some(job.model.clone()),
                adapter: None,
                cache_affinity_key: job.trajectory(Arm::Affinity, number).affinity_key(),
            };
            if let Err(error) = job.client.finish_trajectory(request).await {
                tracing::debug!(%error, "a pin of the run stays until it expires");
                return;
            }
        }
    };
    if tokio::time::timeout(FINISH_TIMEOUT, free).await.is_err() {
        tracing::debug!("pins of the run stay until they expire");
    }
}
