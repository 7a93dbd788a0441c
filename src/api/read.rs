//! A sampling request becomes a call. This never fails: what cannot be said in
//! the domain's types becomes a violation of the call, which validation reports
//! with all others.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    auth::Caller,
    call::{
        Group, LogprobsWanted, OnAbort, OnLost, Prompt, RoutingPolicy, SampleCall, SampleParams,
        Sampling, Structured, WeightsConstraint, WeightsWanted,
    },
    error::Violation,
    ids::{AffinityKey, IdempotencyKey},
    proto,
};

/// What a call brings besides its message.
pub(super) struct Context {
    pub(super) caller: Caller,
    pub(super) request_id: Arc<str>,
    pub(super) deadline: Option<Instant>,
}

pub(super) fn call(message: proto::SampleRequest, context: Context) -> SampleCall {
    let mut malformed = Vec::new();
    let on_abort = on_abort(&message, &mut malformed);
    let on_lost = on_lost(&message, &mut malformed);
    let packed_output = packed_output(message.output_encoding, &mut malformed);
    let routing_policy = routing_policy(&message, &mut malformed);
    let params = SampleParams {
        affinity_key: message.cache_affinity_key.map(AffinityKey::new),
        model: message.model.map(Into::into),
        adapter: message.adapter.map(Into::into),
        prompt: prompt(message.prompt, &mut malformed),
        sampling: Arc::new(sampling(message.sampling.unwrap_or_default())),
        num_samples: message.num_samples.unwrap_or(1),
        logprobs: message
            .logprobs
            .map_or_else(LogprobsWanted::default, |l| LogprobsWanted {
                output: l.output,
                top_k: l.top_k,
                prompt: l.prompt,
                prompt_top_k: l.prompt_top_k,
            }),
        weights: message.weights.map_or_else(WeightsWanted::default, weights),
        group: message.group.map(|g| Group {
            key: g.key.into(),
            share: g.share,
        }),
        routed_experts: message.return_routed_experts,
        on_abort,
        on_lost,
        packed_output,
    };
    SampleCall {
        tenant: context.caller.tenant,
        request_id: context.request_id,
        deadline: context.deadline,
        idempotency_key: message.idempotency_key.map(IdempotencyKey::new),
        params: Arc::new(params),
        routing_policy,
        priority: message.priority.unwrap_or(0),
        malformed,
    }
}

fn prompt(prompt: Option<proto::sample_request::Prompt>, malformed: &mut Vec<Violation>) -> Prompt {
    use proto::sample_request::Prompt as Wire;
    match prompt {
        Some(Wire::TokenIds(list)) => Prompt::Tokens(list.ids.into()),
        Some(Wire::TokenIdsLe(bytes)) => {
            if bytes.len() % 4 != 0 {
                malformed.push(Violation::new(
                    "prompt",
                    format!(
                        "token_ids_le has {} bytes, which is not a multiple of 4",
                        bytes.len()
                    ),
                ));
                return Prompt::Tokens(Arc::from([]));
            }
            Prompt::Tokens(words(&bytes).collect())
        }
        Some(Wire::Text(text)) => Prompt::Text(text.into()),
        None => {
            malformed.push(Violation::new(
                "prompt",
                "is missing: give one of token_ids, token_ids_le, text",
            ));
            Prompt::Tokens(Arc::from([]))
        }
    }
}

fn words(bytes: &Bytes) -> impl Iterator<Item = u32> {
    bytes
        .chunks_exact(4)
        .map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]))
}

fn sampling(s: proto::Sampling) -> Sampling {
    use proto::sampling::Structured as Wire;
    Sampling {
        max_tokens: s.max_tokens,
        min_tokens: s.min_tokens,
        temperature: s.temperature,
        top_p: s.top_p,
        top_k: s.top_k,
        min_p: s.min_p,
        seed: s.seed,
        ignore_eos: s.ignore_eos,
        stop: s.stop.map(|list| list.strings),
        stop_token_ids: s.stop_token_ids.map(|list| list.ids),
        frequency_penalty: s.frequency_penalty,
        presence_penalty: s.presence_penalty,
        repetition_penalty: s.repetition_penalty,
        logit_bias: s.logit_bias.into_iter().collect(),
        structured: s.structured.map(|kind| match kind {
            Wire::JsonSchema(text) => Structured::JsonSchema(text),
            Wire::Regex(text) => Structured::Regex(text),
            Wire::Ebnf(text) => Structured::Ebnf(text),
        }),
        skip_special_tokens: s.skip_special_tokens,
    }
}

fn weights(w: proto::WeightsConstraint) -> WeightsWanted {
    use proto::weights_constraint::Constraint as Wire;
    WeightsWanted {
        constraint: w.constraint.map(|c| match c {
            Wire::AtLeast(version) => WeightsConstraint::AtLeast(version),
            Wire::Exact(version) => WeightsConstraint::Exact(version.into()),
        }),
        wait: w.wait,
    }
}

fn unknown(field: &'static str, value: i32, malformed: &mut Vec<Violation>) {
    malformed.push(Violation::new(
        field,
        format!("{value} is no value that this server knows"),
    ));
}

fn on_abort(message: &proto::SampleRequest, malformed: &mut Vec<Violation>) -> OnAbort {
    match proto::OnAbort::try_from(message.on_abort) {
        Ok(proto::OnAbort::Unspecified | proto::OnAbort::Continue) => OnAbort::Continue,
        Ok(proto::OnAbort::ReturnPartial) => OnAbort::ReturnPartial,
        Err(_) => {
            unknown("on_abort", message.on_abort, malformed);
            OnAbort::default()
        }
    }
}

fn on_lost(message: &proto::SampleRequest, malformed: &mut Vec<Violation>) -> OnLost {
    match proto::OnLost::try_from(message.on_lost) {
        Ok(proto::OnLost::Unspecified | proto::OnLost::Restart) => OnLost::Restart,
        Ok(proto::OnLost::Resume) => OnLost::Resume,
        Err(_) => {
            unknown("on_lost", message.on_lost, malformed);
            OnLost::default()
        }
    }
}

pub(super) fn packed_output(encoding: i32, malformed: &mut Vec<Violation>) -> bool {
    use proto::OutputEncoding as Wire;
    match Wire::try_from(encoding) {
        Ok(Wire::Unspecified | Wire::Lists) => false,
        Ok(Wire::Packed) => true,
        Err(_) => {
            unknown("output_encoding", encoding, malformed);
            false
        }
    }
}

fn routing_policy(
    message: &proto::SampleRequest,
    malformed: &mut Vec<Violation>,
) -> Option<RoutingPolicy> {
    use proto::RoutingPolicy as Wire;
    match Wire::try_from(message.routing_policy) {
        Ok(Wire::Unspecified) => None,
        Ok(Wire::Affinity) => Some(RoutingPolicy::Affinity),
        Ok(Wire::Random) => Some(RoutingPolicy::Random),
        Ok(Wire::RoundRobin) => Some(RoutingPolicy::RoundRobin),
        Ok(Wire::LeastLoaded) => Some(RoutingPolicy::LeastLoaded),
        Ok(Wire::Prefix) => Some(RoutingPolicy::Prefix),
        Err(_) => {
            unknown("routing_policy", message.routing_policy, malformed);
            None
        }
    }
}
