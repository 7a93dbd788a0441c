//! A result becomes a message. A pure function of the result and the encoding
//! that was asked for, so a replay gives the same samples to the byte.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    call::{
        AttemptFailure, Completion, LogprobMode, MatchedStop, PromptLogprobs, RouteReason,
        RouteReceipt, SampleOutput, StopReason, TopLogprobs, Usage,
    },
    proto,
    stack::generation::Finished,
};

pub(super) fn response(
    finished: &Finished,
    packed: bool,
    keyed: bool,
    request_id: &str,
) -> proto::SampleResponse {
    let completion: &Completion = &finished.completion;
    let usages: Vec<Usage> = completion.samples.iter().map(|s| s.usage).collect();
    proto::SampleResponse {
        samples: (0..)
            .zip(&completion.samples)
            .map(|(i, s)| sample(i, s, packed))
            .collect(),
        prompt_logprobs: completion.prompt_logprobs.as_ref().map(prompt_logprobs),
        usage: Some(sum(&usages)),
        logprob_mode: logprob_mode(completion.logprob_mode).into(),
        replayed: finished.replayed,
        produced_at: Some(completion.produced_at.into()),
        timing: Some(proto::Timing {
            total: duration(completion.total),
            first_token: completion.first_token.and_then(duration),
        }),
        not_stored: keyed && !finished.stored,
        request_id: request_id.to_owned(),
    }
}

/// `None` beyond what the message can hold: 10,000 years.
pub(super) fn duration(d: Duration) -> Option<prost_types::Duration> {
    d.try_into().ok()
}

fn sum(usages: &[Usage]) -> proto::Usage {
    proto::Usage {
        prompt_tokens: usages.iter().map(|u| u64::from(u.prompt_tokens)).sum(),
        cached_tokens: usages.iter().map(|u| u64::from(u.cached_tokens)).sum(),
        completion_tokens: usages.iter().map(|u| u64::from(u.completion_tokens)).sum(),
    }
}

fn sample(index: u32, output: &SampleOutput, packed: bool) -> proto::SampleResult {
    use proto::sample_result::MatchedStop as Wire;
    let logprobs = output.logprobs.as_deref().unwrap_or_default();
    let (token_ids, token_ids_le, logprobs, logprobs_le) = if packed {
        (
            Vec::new(),
            output.tokens.iter().flat_map(|t| t.to_le_bytes()).collect(),
            Vec::new(),
            logprobs.iter().flat_map(|l| l.to_le_bytes()).collect(),
        )
    } else {
        (
            output.tokens.clone(),
            Bytes::new(),
            logprobs.to_vec(),
            Bytes::new(),
        )
    };
    proto::SampleResult {
        index,
        token_ids,
        token_ids_le,
        logprobs,
        logprobs_le,
        top_logprobs: output.top_logprobs.as_ref().map(top_logprobs),
        text: output.text.clone(),
        stop_reason: stop_reason(output.stop_reason).into(),
        matched_stop: output.matched.as_ref().map(|m| match m {
            MatchedStop::Token(id) => Wire::MatchedTokenId(*id),
            MatchedStop::Text(text) => Wire::MatchedString(text.clone()),
        }),
        weight_spans: output
            .weight_spans
            .iter()
            .map(|s| proto::WeightSpan {
                version: s.version.clone(),
                start: s.start,
                end: s.end,
            })
            .collect(),
        routed_experts: output
            .routed_experts
            .as_ref()
            .map(|e| proto::RoutedExperts {
                data: e.data.clone(),
                dtype: e.dtype.clone(),
                shape: e.shape.clone(),
            }),
        usage: Some(sum(&[output.usage])),
        route: Some(route(&output.route)),
    }
}

fn top_logprobs(top: &TopLogprobs) -> proto::TopLogprobs {
    proto::TopLogprobs {
        stride: top.stride,
        token_ids: top.token_ids.clone(),
        logprobs: top.logprobs.clone(),
    }
}

fn prompt_logprobs(prompt: &PromptLogprobs) -> proto::PromptLogprobs {
    proto::PromptLogprobs {
        logprobs: prompt.logprobs.clone(),
        top_logprobs: prompt.top.as_ref().map(top_logprobs),
    }
}

pub(super) fn route(receipt: &RouteReceipt) -> proto::Route {
    proto::Route {
        replica_id: receipt.target.replica.as_str().to_owned(),
        incarnation: receipt.target.incarnation.0,
        rank: receipt.target.rank,
        served_rank: receipt.served_rank,
        reason: route_reason(receipt.reason).into(),
        attempts: receipt
            .attempts
            .iter()
            .map(|a| proto::Attempt {
                number: a.number,
                replica_id: a.target.replica.as_str().to_owned(),
                incarnation: a.target.incarnation.0,
                rank: a.target.rank,
                failure: a.failure.map(|f| attempt_failure(f).into()),
                kept_tokens: a.kept_tokens,
            })
            .collect(),
        expected_cached_tokens: receipt.expected_cached_tokens.into(),
    }
}

fn stop_reason(reason: StopReason) -> proto::StopReason {
    match reason {
        StopReason::Stop => proto::StopReason::Stop,
        StopReason::Length => proto::StopReason::Length,
        StopReason::Aborted => proto::StopReason::Aborted,
    }
}

fn attempt_failure(failure: AttemptFailure) -> proto::AttemptFailure {
    match failure {
        AttemptFailure::Refused => proto::AttemptFailure::Refused,
        AttemptFailure::Busy => proto::AttemptFailure::Busy,
        AttemptFailure::Lost => proto::AttemptFailure::Lost,
        AttemptFailure::Aborted => proto::AttemptFailure::Aborted,
        AttemptFailure::BadReply => proto::AttemptFailure::BadReply,
        AttemptFailure::Silent => proto::AttemptFailure::Silent,
        AttemptFailure::Weights => proto::AttemptFailure::Weights,
        AttemptFailure::Adapter => proto::AttemptFailure::Adapter,
    }
}

pub(super) fn route_reason(reason: RouteReason) -> proto::RouteReason {
    match reason {
        RouteReason::Pinned => proto::RouteReason::Pinned,
        RouteReason::NewKey => proto::RouteReason::NewKey,
        RouteReason::NoKey => proto::RouteReason::NoKey,
        RouteReason::ReplicaLost => proto::RouteReason::ReplicaLost,
        RouteReason::Draining => proto::RouteReason::Draining,
        RouteReason::Overload => proto::RouteReason::Overload,
        RouteReason::Weights => proto::RouteReason::Weights,
        RouteReason::Random => proto::RouteReason::Random,
        RouteReason::RoundRobin => proto::RouteReason::RoundRobin,
        RouteReason::LeastLoaded => proto::RouteReason::LeastLoaded,
        RouteReason::Detour => proto::RouteReason::Detour,
        RouteReason::Group => proto::RouteReason::Group,
        RouteReason::Prefix => proto::RouteReason::Prefix,
    }
}

pub(super) fn logprob_mode(mode: LogprobMode) -> proto::LogprobMode {
    match mode {
        LogprobMode::Unknown => proto::LogprobMode::Unspecified,
        LogprobMode::Processed => proto::LogprobMode::Processed,
        LogprobMode::Raw => proto::LogprobMode::Raw,
    }
}
