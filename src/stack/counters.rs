//! What happened since the start, as plain counters: `GetStats` tells them.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::call::{AttemptFailure, RouteReason};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the start of this process.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl Counters {
            /// All of them by name.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counters! {
    /// Generations begun, with a key or without.
    generations,
    /// Callers that joined a running generation instead of beginning another.
    joins,
    /// Callers that were answered with a stored result.
    replays,
    /// Keys refused because they were used for something else.
    keys_reused,
    /// Generations that ended with OUTCOME_UNKNOWN.
    unknown_outcomes,
    /// Results of a fenced attempt that came late and were dropped.
    late_results,
    /// Attempts sent to engines.
    attempts,
    /// Attempts that no engine took because its port refused.
    attempts_refused,
    /// Attempts that an engine did not take because it was full.
    attempts_busy,
    /// Attempts that broke off.
    attempts_lost,
    /// Attempts that engines ended early by themselves.
    attempts_ended_early,
    /// Attempts whose reply was not believed.
    attempts_bad_reply,
    /// Attempts given up because their rank gave no request an answer.
    attempts_silent,
    /// Attempts whose tokens came from other weights than were asked for.
    attempts_other_weights,
    /// Attempts at engines that did not have the adapter.
    attempts_without_adapter,
    /// Attempts given up at a hanging engine without its answer to an abort.
    attempts_left_behind,
    /// Attempts that were aborted at their engine, by us.
    attempts_aborted,
    /// Attempts left by an earlier run of the control plane and fenced.
    orphans_fenced,
    /// Choices of the rank that the key is pinned to.
    routed_pinned,
    /// First choices for keys.
    routed_new_key,
    /// Choices for requests without a key.
    routed_no_key,
    /// Choices of another rank because the pinned one has other weights.
    routed_weights,
    /// Choices by the policy random.
    routed_random,
    /// Choices by the policy round_robin.
    routed_round_robin,
    /// Choices by the policy least_loaded.
    routed_least_loaded,
    /// Keys that moved because their rank drained, or left after a drain.
    keys_moved_draining,
    /// Keys that moved because their rank was lost, or refused them.
    keys_moved_lost,
    /// Keys that moved because their rank's queue cost more than their history.
    keys_moved_overload,
    /// Choices by a group's rule.
    placed_by_group,
    /// Choices by the longest beginning of a prompt that was seen.
    placed_by_prefix,
    /// Generations that waited for their turn among those of all tenants.
    waits_for_admission,
    /// Generations refused because too much of their tenant was in flight and waiting, or
    /// would be by them alone.
    refused_by_admission,
    /// New trajectories that waited for room in some KV cache.
    waits_for_kv,
    /// Of those, the ones that were taken without room after the longest wait.
    waits_for_kv_in_vain,
    /// Choices of another rank than the pinned one that left the pin where it is.
    detours,
    /// Choices of a rank whose heartbeats are missing, because no other that could
    /// serve the request takes any.
    last_resorts,
    /// Choices that waited because all that could serve were paused.
    waits_for_pause,
    /// Samples finished.
    samples,
    /// Samples that an engine served on another rank than it was told.
    wrong_rank,
    /// Warm turns that could be verified and found less than half of what they
    /// should have.
    cache_misses,
    /// Cached tokens that pins let one expect.
    cached_tokens_expected,
    /// Cached tokens that engines reported, of all samples.
    cached_tokens_reported,
    /// Prompt tokens of all samples.
    prompt_tokens,
    /// Generated tokens of all samples.
    completion_tokens,
}

impl Counters {
    /// Where choices for this reason are counted.
    pub fn routed(&self, reason: RouteReason) -> &Counter {
        match reason {
            RouteReason::Pinned => &self.routed_pinned,
            RouteReason::NewKey => &self.routed_new_key,
            RouteReason::NoKey => &self.routed_no_key,
            RouteReason::ReplicaLost => &self.keys_moved_lost,
            RouteReason::Draining => &self.keys_moved_draining,
            RouteReason::Overload => &self.keys_moved_overload,
            RouteReason::Weights => &self.routed_weights,
            RouteReason::Random => &self.routed_random,
            RouteReason::RoundRobin => &self.routed_round_robin,
            RouteReason::LeastLoaded => &self.routed_least_loaded,
            RouteReason::Detour => &self.detours,
            RouteReason::Group => &self.placed_by_group,
            RouteReason::Prefix => &self.placed_by_prefix,
        }
    }

    /// Where attempts that failed in this way are counted.
    pub fn failed(&self, how: AttemptFailure) -> &Counter {
        match how {
            AttemptFailure::Refused => &self.attempts_refused,
            AttemptFailure::Busy => &self.attempts_busy,
            AttemptFailure::Lost => &self.attempts_lost,
            AttemptFailure::Aborted => &self.attempts_ended_early,
            AttemptFailure::BadReply => &self.attempts_bad_reply,
            AttemptFailure::Silent => &self.attempts_silent,
            AttemptFailure::Weights => &self.attempts_other_weights,
            AttemptFailure::Adapter => &self.attempts_without_adapter,
        }
    }
}

/// One count.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    pub fn one(&self) {
        self.add(1);
    }

    /// So many more.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// As it is.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
