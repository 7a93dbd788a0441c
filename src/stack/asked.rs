//! What a call asks of the router.

use std::time::Duration;

use crate::{
    call::{Prompt, RoutingPolicy, SampleCall},
    fleet::snapshot::RankSlot,
    routing::{Hints, Needs, PinKey, RouteRequest, Router, Siblings, prefix},
};

/// The lasting part of a call's [`RouteRequest`]s, made once.
pub(crate) struct Asked<'a> {
    needs: &'a Needs,
    key: Option<PinKey>,
    request: u128,
    prompt_tokens: u32,
    policy: RoutingPolicy,
    group: Option<Siblings>,
    blocks: Vec<u64>,
}

impl<'a> Asked<'a> {
    /// Of this call, which needs this of a rank.
    pub(crate) fn new(call: &SampleCall, needs: &'a Needs, router: &Router) -> Self {
        let key = pin_key(call, needs);
        let policy = call.routing_policy.unwrap_or_default();
        let blocks = if by_prefix(call, router) {
            blocks(call, needs, &[])
        } else {
            Vec::new()
        };
        Self {
            needs,
            key,
            request: xxhash_rust::xxh3::xxh3_128(call.request_id.as_bytes()),
            prompt_tokens: prompt_tokens(call),
            policy,
            group: siblings(call, needs),
            blocks,
        }
    }

    /// The trajectory's pin.
    pub(crate) fn key(&self) -> Option<PinKey> {
        self.key
    }

    /// One question.
    pub(crate) fn request<'r>(
        &'r self,
        samples: u32,
        avoid: &'r [RankSlot],
        waited: Option<Duration>,
    ) -> RouteRequest<'r> {
        RouteRequest {
            key: self.key,
            request: self.request,
            samples,
            prompt_tokens: self.prompt_tokens,
            needs: self.needs,
            policy: self.policy,
            avoid,
            hints: Hints {
                group: self.group,
                blocks: &self.blocks,
                waited,
            },
        }
    }
}

/// The trajectory's pin, where the request may use it.
pub(super) fn pin_key(call: &SampleCall, needs: &Needs) -> Option<PinKey> {
    if call.routing_policy.unwrap_or_default() != RoutingPolicy::Affinity {
        return None;
    }
    let params = &call.params;
    params
        .affinity_key
        .as_ref()
        .map(|key| PinKey::new(&call.tenant, &needs.model, params.adapter.as_deref(), key))
}

/// The call's group.
pub(super) fn siblings(call: &SampleCall, needs: &Needs) -> Option<Siblings> {
    let params = &call.params;
    params.group.as_ref().map(|group| {
        let adapter = params.adapter.as_deref();
        Siblings::new(&call.tenant, &needs.model, adapter, &group.key, group.share)
    })
}

/// Whether the beginning of its prompt decides.
pub(super) fn by_prefix(call: &SampleCall, router: &Router) -> bool {
    match call.routing_policy.unwrap_or_default() {
        RoutingPolicy::Prefix => true,
        RoutingPolicy::Affinity => {
            router.config().keyless_prefix && call.params.affinity_key.is_none()
        }
        RoutingPolicy::Random | RoutingPolicy::RoundRobin | RoutingPolicy::LeastLoaded => false,
    }
}

/// Names of the blocks of its prompt and of what followed it.
pub(super) fn blocks(call: &SampleCall, needs: &Needs, output: &[u32]) -> Vec<u64> {
    let params = &call.params;
    let Prompt::Tokens(prompt) = &params.prompt else {
        return Vec::new();
    };
    let tokens = prompt.iter().chain(output);
    let adapter = params.adapter.as_deref();
    prefix::blocks(&call.tenant, &needs.model, adapter, tokens)
}

pub(super) fn prompt_tokens(call: &SampleCall) -> u32 {
    let prompt = call.params.prompt.token_count();
    u32::try_from(prompt.unwrap_or(0)).unwrap_or(u32::MAX)
}
