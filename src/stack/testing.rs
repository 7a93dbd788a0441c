//! A plain call for unit tests to change.

use std::sync::Arc;

use crate::{
    call::{
        LogprobsWanted, OnAbort, OnLost, Prompt, SampleCall, SampleParams, Sampling, WeightsWanted,
    },
    ids::Tenant,
};

pub(crate) fn call() -> SampleCall {
    SampleCall {
        tenant: Tenant::default(),
        request_id: "test".into(),
        deadline: None,
        idempotency_key: None,
        params: Arc::new(SampleParams {
            affinity_key: None,
            model: None,
            adapter: None,
            prompt: Prompt::Tokens([1, 2, 3].into()),
            sampling: Arc::new(Sampling {
                max_tokens: Some(8),
                ..Sampling::default()
            }),
            num_samples: 1,
            logprobs: LogprobsWanted::default(),
            weights: WeightsWanted::default(),
            group: None,
            routed_experts: false,
            on_abort: OnAbort::default(),
            on_lost: OnLost::default(),
            packed_output: false,
        }),
        routing_policy: None,
        priority: 0,
        malformed: Vec::new(),
    }
}
