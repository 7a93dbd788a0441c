//! One arm of the ablation: its trajectories, a bounded number at once, the
//! turns of each in order. Every reply is checked before it is counted.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::Instant};

use super::{
    affinity::AffinityBench,
    client::{Answer, Client},
    progress::Progress,
    workload::{Trajectory, pack, reusable_tokens, unpack},
};
use crate::proto::{
    OutputEncoding, RoutingPolicy, SampleRequest, Sampling, sample_request::Prompt,
};

/// Which side of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The baseline policy, no affinity key.
    NoAffinity,
    /// An affinity key per trajectory, the server's default policy.
    Affinity,
}

impl Arm {
    /// In reports and names of requests.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoAffinity => "no_affinity",
            Self::Affinity => "affinity",
        }
    }

    /// For people.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoAffinity => "no affinity",
            Self::Affinity => "affinity",
        }
    }
}

/// Where a turn was generated, as its receipt says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The replica's id.
    pub replica: String,
    /// The rank that served, where the engine says; else the one asked.
    pub rank: u32,
}

/// One finished turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Tokens sent.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Prompt tokens from the cache, as the engine reports them.
    pub cached_tokens: u32,
    /// Prompt tokens that a cache could hold; 0 at the first turn.
    pub reusable_tokens: u32,
    /// By the client's clock, retries included. Measured, not scaled.
    pub latency: Duration,
    /// Where.
    pub place: Place,
    /// The engine says that it served on another rank than the one asked.
    pub wrong_rank: bool,
    /// Tries after the first.
    pub retries: u32,
}

/// All turns of one arm.
#[derive(Clone, Debug, PartialEq)]
pub struct ArmRun {
    /// By trajectory, then by turn.
    pub trajectories: Vec<Vec<Turn>>,
    /// From the first request to the last response. Measured, not scaled.
    pub elapsed: Duration,
}

/// What both arms share.
pub(super) struct Job<P> {
    pub(super) bench: AffinityBench,
    pub(super) client: Client,
    pub(super) run_id: String,
    pub(super) model: String,
    pub(super) vocab_size: u32,
    pub(super) send_seed: bool,
    pub(super) progress: P,
}

impl<P: Progress> Job<P> {
    pub(super) fn trajectory(&self, arm: Arm, number: u32) -> Trajectory {
        Trajectory::new(self.run_id.clone(), self.bench.seed, arm, number)
    }

    /// Runs all trajectories of `arm`. The first failure ends the arm; requests
    /// still in flight are dropped.
    pub(super) async fn run(self: &Arc<Self>, arm: Arm) -> anyhow::Result<ArmRun> {
        let requests = u64::from(self.bench.trajectories) * u64::from(self.bench.turns);
        self.progress.arm_started(arm, requests);
        let started = Instant::now();
        let mut running = JoinSet::new();
        let result = self.run_trajectories(arm, &mut running).await;
        let elapsed = started.elapsed();
        running.shutdown().await;
        self.progress.arm_finished(arm);
        Ok(ArmRun {
            trajectories: result?,
            elapsed,
        })
    }

    async fn run_trajectories(
        self: &Arc<Self>,
        arm: Arm,
        running: &mut JoinSet<(u32, anyhow::Result<Vec<Turn>>)>,
    ) -> anyhow::Result<Vec<Vec<Turn>>> {
        let mut waiting = 1..=self.bench.trajectories;
        let mut done = Vec::new();
        loop {
            while running.len() < self.bench.concurrency as usize
                && let Some(number) = waiting.next()
            {
                let job = Arc::clone(self);
                running.spawn(async move { (number, job.run_trajectory(arm, number).await) });
            }
            let Some(joined) = running.join_next().await else {
                break;
            };
            let (number, turns) = joined.context("a trajectory's task failed")?;
            done.push((number, turns?));
        }
        done.sort_unstable_by_key(|(number, _)| *number);
        Ok(done.into_iter().map(|(_, turns)| turns).collect())
    }

    async fn run_trajectory(&self, arm: Arm, number: u32) -> anyhow::Result<Vec<Turn>> {
        let bench = &self.bench;
        let trajectory = self.trajectory(arm, number);
        let mut prompt: Vec<u32> = Vec::new();
        let mut turns: Vec<Turn> = Vec::new();
        for turn in 1..=bench.turns {
            let fresh = match turn {
                1 => bench.initial_prompt_tokens,
                _ => bench.new_tokens_per_turn,
            };
            prompt.extend(trajectory.fresh_tokens(turn, fresh, self.vocab_size));
            let previous = turns.last().map(|t| (t.prompt_tokens, t.output_tokens));
            let (finished, output) = self
                .run_turn(&trajectory, turn, &prompt, previous)
                .await
                .with_context(|| format!("{}, trajectory {number}, turn {turn}", arm.label()))?;
            prompt.extend(output);
            turns.push(finished);
            self.progress.request_done(arm);
        }
        Ok(turns)
    }

    /// One request. `previous` is the turn before: lengths of its prompt and
    /// output.
    async fn run_turn(
        &self,
        trajectory: &Trajectory,
        turn: u32,
        prompt: &[u32],
        previous: Option<(u32, u32)>,
    ) -> anyhow::Result<(Turn, Vec<u32>)> {
        let request_id = trajectory.request_id(turn);
        let answer = self
            .client
            .sample(
                trajectory.number(),
                self.request(trajectory, turn, prompt),
                &request_id,
                self.bench.request_timeout,
            )
            .await?;
        let prompt_tokens = u32::try_from(prompt.len()).context("the prompt is too long")?;
        self.check(answer, prompt_tokens, previous)
    }

    fn request(&self, trajectory: &Trajectory, turn: u32, prompt: &[u32]) -> SampleRequest {
        let (affinity_key, policy) = match trajectory.arm() {
            Arm::NoAffinity => (None, self.bench.baseline.policy()),
            Arm::Affinity => (Some(trajectory.affinity_key()), RoutingPolicy::Unspecified),
        };
        SampleRequest {
            idempotency_key: Some(trajectory.request_id(turn)),
            cache_affinity_key: affinity_key,
            model: Some(self.model.clone()),
            prompt: Some(Prompt::TokenIdsLe(pack(prompt))),
            sampling: Some(Sampling {
                max_tokens: Some(self.bench.output_tokens),
                temperature: Some(1.0),
                seed: self.send_seed.then(|| trajectory.sampling_seed(turn)),
                ignore_eos: self.bench.ignore_eos,
                ..Default::default()
            }),
            output_encoding: OutputEncoding::Packed.into(),
            routing_policy: policy.into(),
            ..Default::default()
        }
    }

    /// Believes a reply only where it is what was asked for.
    fn check(
        &self,
        answer: Answer,
        prompt_tokens: u32,
        previous: Option<(u32, u32)>,
    ) -> anyhow::Result<(Turn, Vec<u32>)> {
        let Answer {
            response,
            latency,
            tries,
        } = answer;
        // After a retry the first try may have finished: that is no other run's
        // result.
        ensure!(
            !response.replayed || tries > 1,
            "the result is a replay: run id {} was used before on this control plane; \
             choose another",
            self.run_id
        );
        let count = response.samples.len();
        let mut samples = response.samples.into_iter();
        let (Some(sample), None) = (samples.next(), samples.next()) else {
            anyhow::bail!("asked for 1 sample, got {count}");
        };
        let output = unpack(&sample.token_ids_le)
            .context("the packed token ids are no whole number of 32-bit words")?;
        let wanted = self.bench.output_tokens;
        let output_tokens = u32::try_from(output.len()).unwrap_or(u32::MAX);
        ensure!(
            output_tokens == wanted || (!self.bench.ignore_eos && output_tokens < wanted),
            "asked for {}{wanted} tokens, got {output_tokens}",
            if self.bench.ignore_eos {
                "exactly "
            } else {
                "at most "
            },
        );
        if let Some(id) = output.iter().find(|&&id| id >= self.vocab_size) {
            anyhow::bail!(
                "token id {id} is not below the vocabulary size {}",
                self.vocab_size
            );
        }
        let usage = sample.usage.context("the sample has no usage")?;
        ensure!(
            usage.prompt_tokens == u64::from(prompt_tokens)
                && usage.completion_tokens == u64::from(output_tokens),
            "usage says {} prompt and {} generated tokens; it was {prompt_tokens} and \
             {output_tokens}",
            usage.prompt_tokens,
            usage.completion_tokens,
        );
        let cached_tokens = u32::try_from(usage.cached_tokens)
            .ok()
            .filter(|&n| n <= prompt_tokens)
            .with_context(|| {
                format!(
                    "{} of {prompt_tokens} prompt tokens are said to be cached",
                    usage.cached_tokens
                )
            })?;
        let route = sample.route.context("the sample has no route")?;
        let turn = Turn {
            prompt_tokens,
            output_tokens,
            cached_tokens,
            reusable_tokens: reusable_tokens(previous, prompt_tokens),
            latency,
            wrong_rank: route.served_rank.is_some_and(|rank| rank != route.rank),
            place: Place {
                rank: route.served_rank.unwrap_or(route.rank),
                replica: route.replica_id,
            },
            retries: tries - 1,
        };
        Ok((turn, output))
    }
}
