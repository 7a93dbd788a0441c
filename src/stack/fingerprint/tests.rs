//! Everything that is asked for counts, and nothing else.

use std::sync::Arc;

use super::*;
use crate::{
    call::{Group, LogprobsWanted, WeightsWanted},
    ids::AffinityKey,
    stack::testing::call,
};

fn print(change: impl FnOnce(&mut SampleParams, &mut Sampling)) -> Fingerprint {
    let mut params = (*call().params).clone();
    let mut sampling = (*params.sampling).clone();
    change(&mut params, &mut sampling);
    params.sampling = Arc::new(sampling);
    of(&params)
}

/// A stored fingerprint must match for as long as its record is kept.
#[test]
fn version_1_is_pinned() {
    let hex: String = print(|_, _| {}).0[..8]
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    assert_eq!(hex, "35bf56c2267f9249");
}

#[test]
fn every_field_that_is_asked_for_counts() {
    type Change = fn(&mut SampleParams, &mut Sampling);
    let changes: Vec<Change> = vec![
        |_, _| {},
        |p, _| p.affinity_key = Some(AffinityKey::new("a")),
        |p, _| p.model = Some("a".into()),
        |p, _| p.adapter = Some("a".into()),
        |p, _| p.prompt = Prompt::Tokens([1, 2].into()),
        |p, _| p.prompt = Prompt::Tokens([1, 2, 4].into()),
        |p, _| p.prompt = Prompt::Text("a".into()),
        |p, _| p.num_samples = 2,
        |p, _| {
            p.logprobs = LogprobsWanted {
                output: true,
                ..Default::default()
            }
        },
        |p, _| {
            p.logprobs = LogprobsWanted {
                output: true,
                top_k: 1,
                ..Default::default()
            }
        },
        |p, _| {
            p.logprobs = LogprobsWanted {
                prompt: true,
                ..Default::default()
            }
        },
        |p, _| {
            p.logprobs = LogprobsWanted {
                prompt: true,
                prompt_top_k: 1,
                ..Default::default()
            };
        },
        |p, _| {
            p.weights = WeightsWanted {
                constraint: Some(WeightsConstraint::AtLeast(1)),
                wait: false,
            };
        },
        |p, _| {
            p.weights = WeightsWanted {
                constraint: Some(WeightsConstraint::Exact("1".into())),
                wait: false,
            };
        },
        |p, _| {
            p.group = Some(Group {
                key: "a".into(),
                share: false,
            })
        },
        |p, _| {
            p.group = Some(Group {
                key: "a".into(),
                share: true,
            })
        },
        |p, _| p.routed_experts = true,
        |p, _| p.on_abort = OnAbort::ReturnPartial,
        |p, _| p.on_lost = OnLost::Resume,
        |p, _| p.packed_output = true,
        |_, s| s.max_tokens = None,
        |_, s| s.max_tokens = Some(9),
        |_, s| s.min_tokens = Some(0),
        |_, s| s.temperature = Some(1.0),
        |_, s| s.top_p = Some(1.0),
        |_, s| s.top_k = Some(1),
        |_, s| s.min_p = Some(0.0),
        |_, s| s.seed = Some(0),
        |_, s| s.ignore_eos = true,
        |_, s| s.stop = Some(vec![]),
        |_, s| s.stop = Some(vec!["ab".into()]),
        |_, s| s.stop = Some(vec!["a".into(), "b".into()]),
        |_, s| s.stop_token_ids = Some(vec![]),
        |_, s| s.stop_token_ids = Some(vec![1]),
        |_, s| s.frequency_penalty = Some(0.0),
        |_, s| s.presence_penalty = Some(0.0),
        |_, s| s.repetition_penalty = Some(1.0),
        |_, s| s.logit_bias = [(1, 1.0)].into(),
        |_, s| s.structured = Some(Structured::JsonSchema("{}".into())),
        |_, s| s.structured = Some(Structured::Regex("{}".into())),
        |_, s| s.structured = Some(Structured::Ebnf("{}".into())),
        |_, s| s.skip_special_tokens = Some(true),
        |_, s| s.skip_special_tokens = Some(false),
    ];
    let prints: Vec<_> = changes.iter().map(|change| print(change)).collect();
    for (i, a) in prints.iter().enumerate() {
        for (j, b) in prints.iter().enumerate().skip(i + 1) {
            assert_ne!(a, b, "changes {i} and {j}");
        }
    }
}

#[test]
fn waiting_is_when_and_not_what() {
    let with = |wait| {
        print(|p, _| {
            p.weights = WeightsWanted {
                constraint: Some(WeightsConstraint::AtLeast(1)),
                wait,
            };
        })
    };
    assert_eq!(with(true), with(false));
}
