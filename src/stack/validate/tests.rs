//! Each rule, from both sides.

use super::*;
use crate::{
    call::{Group, LogprobsWanted, WeightsWanted},
    ids::{AffinityKey, IdempotencyKey},
    stack::testing::call,
};

/// The fields that are at fault after `change`.
fn faults(change: impl FnOnce(&mut SampleCall, &mut SampleParams, &mut Sampling)) -> Vec<String> {
    let mut call = call();
    let mut params = (*call.params).clone();
    let mut sampling = (*params.sampling).clone();
    change(&mut call, &mut params, &mut sampling);
    params.sampling = Arc::new(sampling);
    call.params = Arc::new(params);
    match ValidCall::check(call) {
        Ok(_) => Vec::new(),
        Err(error) => {
            assert_eq!(error.reason, Reason::InvalidRequest);
            error
                .violations
                .iter()
                .map(|v| v.field.to_string())
                .collect()
        }
    }
}

fn sampling_faults(change: impl FnOnce(&mut Sampling)) -> Vec<String> {
    faults(|_, _, s| change(s))
}

/// Values on both sides of a rule for one field of `Sampling`.
fn rule<T>(field: &str, set: impl Fn(&mut Sampling, T), good: Vec<T>, bad: Vec<T>) {
    let path = format!("sampling.{field}");
    for value in good {
        assert!(sampling_faults(|s| set(s, value)).is_empty(), "{path}");
    }
    for value in bad {
        assert_eq!(sampling_faults(|s| set(s, value)), [path.as_str()]);
    }
}

#[test]
fn a_plain_call_is_valid() {
    assert!(faults(|_, _, _| {}).is_empty());
}

#[test]
fn sampling_parameters_have_ranges() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    rule(
        "max_tokens",
        |s, v| s.max_tokens = Some(v),
        vec![1, 1 << 20],
        vec![0, (1 << 20) + 1],
    );
    rule(
        "min_tokens",
        |s, v| (s.max_tokens, s.min_tokens) = (Some(8), Some(v)),
        vec![0, 8],
        vec![9],
    );
    rule(
        "temperature",
        |s, v| s.temperature = Some(v),
        vec![0.0, 100.0],
        vec![-0.1, 100.1, NAN, INF],
    );
    rule(
        "top_p",
        |s, v| s.top_p = Some(v),
        vec![0.001, 1.0],
        vec![0.0, -1.0, 1.001, NAN],
    );
    rule(
        "top_k",
        |s, v| s.top_k = Some(v),
        vec![1, 1 << 20],
        vec![0, (1 << 20) + 1],
    );
    rule(
        "min_p",
        |s, v| s.min_p = Some(v),
        vec![0.0, 1.0],
        vec![-0.1, 1.1, NAN],
    );
    rule(
        "seed",
        |s, v| s.seed = Some(v),
        vec![0, 1 << 62],
        vec![(1 << 62) + 1, u64::MAX],
    );
    rule(
        "frequency_penalty",
        |s, v| s.frequency_penalty = Some(v),
        vec![-2.0, 2.0],
        vec![-2.1, 2.1, NAN],
    );
    rule(
        "presence_penalty",
        |s, v| s.presence_penalty = Some(v),
        vec![-2.0, 2.0],
        vec![-2.1, 2.1, INF],
    );
    rule(
        "repetition_penalty",
        |s, v| s.repetition_penalty = Some(v),
        vec![0.1, 2.0],
        vec![0.0, 2.1, NAN],
    );
}

#[test]
fn stops_and_biases_are_bounded() {
    let stop = |n: usize, len: usize| Some(vec!["x".repeat(len); n]);
    rule(
        "stop",
        |s, v| s.stop = v,
        vec![None, stop(0, 0), stop(16, 1024)],
        vec![stop(17, 1), stop(1, 0), stop(1, 1025)],
    );
    rule(
        "stop_token_ids",
        |s, v: usize| s.stop_token_ids = Some(vec![1; v]),
        vec![0, 64],
        vec![65],
    );
    let bias = |n: u32, value: f32| (0..n).map(|i| (i, value)).collect();
    rule(
        "logit_bias",
        |s, v| s.logit_bias = v,
        vec![bias(1024, 100.0), bias(1, -100.0)],
        vec![bias(1025, 1.0), bias(1, 100.1), bias(1, f32::NAN)],
    );
    rule(
        "json_schema",
        |s, v: &str| s.structured = Some(Structured::JsonSchema(v.to_owned())),
        vec!["{}", "{\"type\": \"object\"}"],
        vec!["{"],
    );
    rule(
        "regex",
        |s, v: String| s.structured = Some(Structured::Regex(v)),
        vec!["a+".to_owned()],
        vec![String::new(), "a".repeat(65_537)],
    );
    rule(
        "ebnf",
        |s, v: String| s.structured = Some(Structured::Ebnf(v)),
        vec!["root ::= \"a\"".to_owned()],
        vec![String::new()],
    );
}

#[test]
fn an_idempotency_key_is_1_to_128_printable_ascii_characters() {
    let with = |key: &str| faults(|c, _, _| c.idempotency_key = Some(IdempotencyKey::new(key)));
    for good in ["a", "run/arm/0/1", &"k".repeat(128), "!~"] {
        assert!(with(good).is_empty(), "{good:?}");
    }
    for bad in ["", " ", "a b", "tab\t", "é", "\u{7f}", &"k".repeat(129)] {
        assert!(with(bad).iter().all(|f| f == "idempotency_key"));
        assert!(!with(bad).is_empty(), "{bad:?}");
    }
}

#[test]
fn names_are_1_to_256_characters_and_not_blank() {
    type Set = fn(&mut SampleParams, &str);
    let names: [(&str, Set); 5] = [
        ("cache_affinity_key", |p, n| {
            p.affinity_key = Some(AffinityKey::new(n))
        }),
        ("model", |p, n| p.model = Some(n.into())),
        ("adapter", |p, n| p.adapter = Some(n.into())),
        ("weights.exact", |p, n| {
            p.weights.constraint = Some(WeightsConstraint::Exact(n.into()));
        }),
        ("group.key", |p, n| {
            p.group = Some(Group {
                key: n.into(),
                share: false,
            });
        }),
    ];
    for (field, set) in names {
        for good in ["a", "ein Schlüssel", &"ü".repeat(256)] {
            assert!(
                faults(|_, p, _| set(p, good)).is_empty(),
                "{field} {good:?}"
            );
        }
        for bad in ["", "   ", "\t\n", &"ü".repeat(257)] {
            assert_eq!(faults(|_, p, _| set(p, bad)), [field]);
        }
    }
}

#[test]
fn a_prompt_is_not_empty_and_text_needs_max_tokens() {
    assert_eq!(
        faults(|_, p, _| p.prompt = Prompt::Tokens([].into())),
        ["prompt"]
    );
    assert_eq!(
        faults(|_, p, _| p.prompt = Prompt::Text("".into())),
        ["prompt"]
    );
    assert_eq!(
        faults(|_, p, s| {
            p.prompt = Prompt::Text("hi".into());
            s.max_tokens = None;
        }),
        ["sampling.max_tokens"]
    );
    assert!(
        faults(|_, p, s| {
            p.prompt = Prompt::Text("hi".into());
            s.max_tokens = Some(1);
        })
        .is_empty()
    );
}

#[test]
fn counts_priority_and_logprobs_have_bounds() {
    for bad in [0, 129] {
        assert_eq!(faults(|_, p, _| p.num_samples = bad), ["num_samples"]);
    }
    for bad in [-1001, 1001] {
        assert_eq!(faults(|c, _, _| c.priority = bad), ["priority"]);
    }
    let with = |wanted| faults(|_, p, _| p.logprobs = wanted);
    let none = LogprobsWanted::default();
    assert_eq!(
        with(LogprobsWanted { top_k: 1, ..none }),
        ["logprobs.top_k"]
    );
    assert_eq!(
        with(LogprobsWanted {
            prompt_top_k: 1,
            ..none
        }),
        ["logprobs.prompt_top_k"]
    );
    let all = LogprobsWanted {
        output: true,
        top_k: 20,
        prompt: true,
        prompt_top_k: 20,
    };
    assert!(with(all).is_empty());
    assert_eq!(
        with(LogprobsWanted { top_k: 21, ..all }),
        ["logprobs.top_k"]
    );
    assert_eq!(
        with(LogprobsWanted {
            prompt_top_k: 21,
            ..all
        }),
        ["logprobs.prompt_top_k"]
    );
}

#[test]
fn waiting_needs_something_to_wait_for() {
    let wait = WeightsWanted {
        constraint: None,
        wait: true,
    };
    assert_eq!(faults(|_, p, _| p.weights = wait), ["weights.wait"]);
}

#[test]
fn everything_is_said_at_once_and_nothing_of_the_values_that_are_private() {
    let mut bad = call();
    bad.malformed
        .push(Violation::new("on_abort", "7 is no value"));
    bad.idempotency_key = Some(IdempotencyKey::new("canary canary"));
    let mut params = (*bad.params).clone();
    params.affinity_key = Some(AffinityKey::new("canary".repeat(100)));
    params.num_samples = 0;
    params.sampling = Arc::new(Sampling {
        top_p: Some(7.0),
        stop: Some(vec!["canary".repeat(1000)]),
        ..Sampling::default()
    });
    bad.params = Arc::new(params);
    let error = ValidCall::check(bad).err().unwrap();
    let fields: Vec<_> = error.violations.iter().map(|v| &*v.field).collect();
    assert_eq!(
        fields,
        [
            "on_abort",
            "idempotency_key",
            "cache_affinity_key",
            "num_samples",
            "sampling.top_p",
            "sampling.stop"
        ]
    );
    assert!(!error.message.contains("canary"), "{}", error.message);
}
