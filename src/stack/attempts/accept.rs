//! Building the finished sample of an attempt that came to its end: written down
//! before anybody sees it.

use std::time::SystemTime;

use tokio::time::Instant;

use super::SampleRun;
use crate::{
    call::{AttemptReceipt, RouteReceipt, SampleOutput, StopReason, Usage},
    engine::FinishReason,
    error::{Error, Reason},
    fleet::verified::{Affinity, Answer},
    stack::{
        affinity::{AttemptDone, Chosen, pin_key, prompt_tokens},
        asked,
    },
    store::FinishedSample,
};

impl<S> SampleRun<'_, S> {
    fn count_sample(&self, output: &SampleOutput, wrong_rank: bool) {
        let counters = &self.layer.counters;
        let usage = &output.usage;
        counters.samples.one();
        counters.wrong_rank.add(u64::from(wrong_rank));
        let expected = output.route.expected_cached_tokens;
        counters.cached_tokens_expected.add(u64::from(expected));
        counters
            .cached_tokens_reported
            .add(u64::from(usage.cached_tokens));
        counters.prompt_tokens.add(u64::from(usage.prompt_tokens));
        counters
            .completion_tokens
            .add(u64::from(usage.completion_tokens));
    }

    /// Holds an answer against what was asked, and says when the judgement of its
    /// rank changes.
    fn verify(&self, chosen: &Chosen, answer: Answer) {
        if let Some((expected, reported)) = answer.cached
            && reported < expected / 2
        {
            self.layer.counters.cache_misses.one();
        }
        let verified = chosen.rank.load.verified();
        let Some(now) = verified.take(answer) else {
            return;
        };
        let (target, view) = (&chosen.rank.target, verified.view());
        match now {
            Affinity::Unknown | Affinity::Holds => {
                tracing::info!(%target, wrong_rank = view.wrong_rank, "pins hold here");
            }
            Affinity::IgnoresPins => tracing::warn!(
                %target,
                wrong_rank = view.wrong_rank,
                "this rank ignores pins: its engine serves its requests elsewhere"
            ),
            Affinity::LosesCache => tracing::warn!(
                %target,
                found_percent = view.recent_percent,
                live_tokens = chosen.rank.load.live_tokens(),
                "this rank loses its cache: warm turns do not find their history"
            ),
        }
    }

    pub(super) async fn accept(
        &mut self,
        chosen: Chosen,
        done: AttemptDone,
        base: u32,
    ) -> Result<(FinishedSample, bool), Error> {
        let AttemptDone { tokens, finish } = done;
        self.layer.poison.cleared(&self.prompt);
        let completion = tokens.len();
        let target = chosen.rank.target.clone();
        self.attempts.push(AttemptReceipt {
            number: self.number,
            target: target.clone(),
            failure: None,
            kept_tokens: completion - base,
        });
        let prompt = match prompt_tokens(self.resolved) {
            // A text prompt: only the engine knows.
            0 => finish.usage.prompt_tokens,
            known => known,
        };
        let (stop_reason, matched) = match finish.reason {
            FinishReason::Stop(matched) => (StopReason::Stop, matched),
            FinishReason::Length => (StopReason::Length, None),
            FinishReason::Aborted { .. } => (StopReason::Aborted, None),
        };
        let served_rank = finish.served_rank;
        let wrong_rank = served_rank.is_some_and(|served| served != chosen.rank.engine_rank);
        if wrong_rank {
            let request_id = &*self.resolved.work.call.call().request_id;
            // Where it goes on, `verify` says it louder, once.
            tracing::debug!(request_id, %target, served_rank, "the engine served on another rank than it was told");
        }
        let last_version = tokens
            .weight_spans
            .last()
            .map(|s| s.version.clone())
            .filter(|version| !version.is_empty());
        let call = self.resolved.work.call.call();
        let needs = &self.resolved.needs;
        let adapter = call.params.adapter.as_deref();
        let snapshot = self.layer.fleet.snapshot();
        let weights_stay = snapshot.rank(chosen.rank.slot).is_some_and(|rank| {
            let last = last_version.as_deref();
            last.is_none_or(|last| *last == *rank.weight_version)
        });
        self.verify(
            &chosen,
            Answer {
                elsewhere: served_rank.map(|_| wrong_rank),
                cached: (chosen.verifiable && weights_stay && base == 0 && !wrong_rank)
                    .then_some((chosen.expected_cached_tokens, finish.usage.cached_tokens)),
            },
        );
        let now = Instant::now();
        if !wrong_rank && let Some(group) = asked::siblings(call, needs) {
            let router = &self.layer.router;
            router.group_answered(group, chosen.rank.slot, now);
        }
        if !wrong_rank && asked::by_prefix(call, &self.layer.router) {
            let blocks = asked::blocks(call, needs, &tokens.tokens);
            let router = &self.layer.router;
            router.prefix_seen(&blocks, chosen.rank.slot, now);
        }
        if let Some(key) = pin_key(self.resolved)
            && !wrong_rank
        {
            // The last token's KV is not computed.
            let held = (prompt + completion).saturating_sub(1);
            self.layer
                .router
                .grown(&snapshot, key, chosen.rank.slot, held, adapter, now);
        }
        self.layer
            .fleet
            .answered(&target, last_version.as_deref(), adapter);

        let finished = FinishedSample {
            output: SampleOutput {
                stop_reason,
                matched,
                // Text of a resumed attempt is a part only.
                text: finish.text.filter(|_| base == 0),
                routed_experts: finish.routed_experts,
                usage: Usage {
                    prompt_tokens: prompt,
                    cached_tokens: finish.usage.cached_tokens.min(prompt),
                    completion_tokens: completion,
                },
                route: RouteReceipt {
                    target,
                    served_rank,
                    reason: chosen.reason,
                    attempts: std::mem::take(&mut self.attempts),
                    expected_cached_tokens: chosen.expected_cached_tokens,
                },
                tokens: tokens.tokens,
                logprobs: tokens.logprobs,
                top_logprobs: tokens.top_logprobs,
                weight_spans: tokens.weight_spans,
            },
            prompt_logprobs: tokens.prompt_logprobs,
            logprob_mode: chosen.rank.replica.facts.logprob_mode,
            finished_at: SystemTime::now(),
            first_token: tokens.first_token,
        };
        // On disk before anybody sees it. The rank is done with it: off the count
        // first.
        drop(chosen.ticket);
        let kept = self
            .resolved
            .work
            .journal
            .commit(self.index, self.number, finished.clone())
            .await
            .inspect_err(|error| {
                if error.reason == Reason::OutcomeUnknown {
                    self.layer.counters.late_results.one();
                }
            })?;
        self.count_sample(&finished.output, wrong_rank);
        self.resolved.work.generation.sample_done(self.index);
        Ok((finished, kept))
    }
}
