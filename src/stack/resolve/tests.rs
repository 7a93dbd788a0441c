//! What the fleet has to say about a request.

use std::num::NonZeroU32;

use super::*;
use crate::{
    call::{LogprobMode, LogprobsWanted, Sampling, WeightsConstraint},
    fleet::{
        FleetConfig,
        facts::{EngineKind, ReplicaFacts, tests::plain},
    },
    ids::ReplicaId,
    stack::testing::call,
    store::memory::MemoryStore,
};

fn facts(id: &str, model: &str) -> ReplicaFacts {
    ReplicaFacts {
        model: model.into(),
        vocab_size: NonZeroU32::new(1000),
        weight_version: "7".into(),
        logprob_mode: LogprobMode::Processed,
        ..plain(id, "boot")
    }
}

async fn fleet(replicas: Vec<ReplicaFacts>) -> Arc<Fleet> {
    let fleet = Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()));
    for facts in replicas {
        fleet.register(facts).await.unwrap();
    }
    fleet
}

fn ask(
    fleet: &Fleet,
    change: impl FnOnce(&mut SampleParams, &mut Sampling),
) -> Result<Needs, Error> {
    let mut call = call();
    let mut params = (*call.params).clone();
    let mut sampling = (*params.sampling).clone();
    change(&mut params, &mut sampling);
    params.sampling = Arc::new(sampling);
    call.params = Arc::new(params);
    resolve(&fleet.snapshot(), &call)
}

fn reason(result: Result<Needs, Error>) -> Reason {
    result.unwrap_err().reason
}

#[tokio::test(start_paused = true)]
async fn the_model_may_be_left_out_where_one_is_served() {
    let one = fleet(vec![facts("a", "m"), facts("b", "m")]).await;
    assert_eq!(&*ask(&one, |_, _| {}).unwrap().model, "m");
    let two = fleet(vec![facts("a", "m"), facts("b", "n")]).await;
    let error = ask(&two, |_, _| {}).unwrap_err();
    assert_eq!(error.reason, Reason::ModelAmbiguous);
    assert!(error.message.contains("\"m\", \"n\""), "{}", error.message);
    assert!(ask(&two, |p, _| p.model = Some("n".into())).is_ok());
    let unknown = ask(&two, |p, _| p.model = Some("o".into())).unwrap_err();
    assert_eq!(unknown.reason, Reason::ModelNotFound);
    assert!(unknown.message.contains("\"m\", \"n\""));
}

#[tokio::test(start_paused = true)]
async fn nobody_there_is_not_the_same_as_an_unknown_model() {
    let empty = fleet(vec![]).await;
    assert_eq!(reason(ask(&empty, |_, _| {})), Reason::NoReplica);
    assert_eq!(
        reason(ask(&empty, |p, _| p.model = Some("m".into()))),
        Reason::NoReplica
    );

    let lost = fleet(vec![facts("a", "m"), facts("b", "n")]).await;
    let incarnation = lost.get(&ReplicaId::new("a")).unwrap().incarnation;
    lost.deregister(&ReplicaId::new("a"), incarnation);
    assert_eq!(
        reason(ask(&lost, |p, _| p.model = Some("m".into()))),
        Reason::NoReplica
    );
}

#[tokio::test(start_paused = true)]
async fn ids_must_be_below_the_vocabulary_wherever_they_stand() {
    let fleet = fleet(vec![facts("a", "m")]).await;
    assert!(ask(&fleet, |p, _| p.prompt = Prompt::Tokens([0, 999].into())).is_ok());
    let error = ask(&fleet, |p, s| {
        p.prompt = Prompt::Tokens([5, 1000, 1001].into());
        s.stop_token_ids = Some(vec![1, 1000]);
        s.logit_bias = [(4000, 1.0)].into();
        s.max_tokens = Some(1000);
    })
    .unwrap_err();
    assert_eq!(error.reason, Reason::TokenOutOfVocabulary);
    let fields: Vec<_> = error.violations.iter().map(|v| &*v.field).collect();
    assert_eq!(
        fields,
        [
            "prompt",
            "sampling.stop_token_ids",
            "sampling.logit_bias",
            "prompt"
        ]
    );
    assert!(error.violations[0].description.contains("position 1 "));
}

#[tokio::test(start_paused = true)]
async fn prompt_and_output_fit_the_context() {
    let fleet = fleet(vec![facts("a", "m")]).await;
    let with = |prompt: usize, max_tokens| {
        ask(&fleet, |p, s| {
            p.prompt = Prompt::Tokens(vec![1; prompt].into());
            s.max_tokens = max_tokens;
        })
    };
    assert!(with(92, Some(8)).is_ok());
    assert_eq!(reason(with(93, Some(8))), Reason::PromptTooLong);
    assert!(with(99, None).is_ok());
    assert_eq!(reason(with(100, None)), Reason::PromptTooLong);
    assert_eq!(reason(with(1, Some(u32::MAX))), Reason::PromptTooLong);
}

#[tokio::test(start_paused = true)]
async fn what_no_replica_can_honour_is_refused_by_name() {
    let fleet = fleet(vec![facts("a", "m")]).await;
    type Change = fn(&mut SampleParams, &mut Sampling);
    let wants: [(&str, Change); 9] = [
        ("tokenizer", |p, _| p.prompt = Prompt::Text("a".into())),
        ("tokenizer", |_, s| s.stop = Some(vec!["a".into()])),
        ("tokenizer", |_, s| s.min_tokens = Some(1)),
        ("seed", |_, s| s.seed = Some(1)),
        ("experts", |p, _| p.routed_experts = true),
        ("adapter", |p, _| p.adapter = Some("l".into())),
        ("output logprobs", |p, _| {
            p.logprobs = LogprobsWanted {
                output: true,
                ..Default::default()
            };
        }),
        ("structured", |_, s| {
            s.structured = Some(crate::call::Structured::Regex("a".into()));
        }),
        ("ignore_eos", |_, s| {
            s.ignore_eos = true;
            s.stop_token_ids = Some(vec![1]);
        }),
    ];
    for (what, want) in wants {
        let error = ask(&fleet, want).unwrap_err();
        assert_eq!(error.reason, Reason::NotSupported, "{what}");
        assert!(error.message.contains(what), "{what}: {}", error.message);
    }
    assert!(ask(&fleet, |_, s| s.stop = Some(vec![])).is_ok());
    assert!(ask(&fleet, |_, s| s.stop_token_ids = Some(vec![1])).is_ok());
    let no_ids = |_: &mut SampleParams, s: &mut Sampling| {
        s.ignore_eos = true;
        s.stop_token_ids = Some(vec![]);
    };
    assert!(ask(&fleet, no_ids).is_ok());
}

#[tokio::test(start_paused = true)]
async fn stop_ids_past_the_end_of_sequence_are_for_engines_that_tell_the_two_apart() {
    let mut vllm = facts("b", "m");
    vllm.engine = EngineKind::Vllm;
    let fleet = fleet(vec![facts("a", "m"), vllm]).await;
    let needs = ask(&fleet, |_, s| {
        s.ignore_eos = true;
        s.stop_token_ids = Some(vec![1]);
    })
    .unwrap();
    let able: Vec<_> = fleet
        .snapshot()
        .ranks
        .iter()
        .filter(|rank| needs.lack(rank).is_none())
        .map(|rank| rank.replica.facts.engine)
        .collect();
    assert_eq!(able, [EngineKind::Vllm]);
}

#[tokio::test(start_paused = true)]
async fn what_an_engine_would_change_in_silence_goes_to_one_that_does_not() {
    let mut vllm = facts("b", "m");
    vllm.engine = EngineKind::Vllm;
    vllm.capabilities.tokenizer = false;
    let mut sglang = facts("a", "m");
    sglang.capabilities.tokenizer = false;
    let fleet = fleet(vec![sglang, vllm]).await;
    let able = |set: fn(&mut Sampling)| -> Vec<EngineKind> {
        let Ok(needs) = ask(&fleet, |_, s| set(s)) else {
            return Vec::new();
        };
        let snapshot = fleet.snapshot();
        let ranks = snapshot.ranks.iter();
        let able = ranks.filter(|rank| needs.lack(rank).is_none());
        able.map(|rank| rank.replica.facts.engine).collect()
    };
    let both = [EngineKind::Sglang, EngineKind::Vllm];
    for (set, kinds) in [
        (
            (|s| s.min_tokens = Some(1)) as fn(&mut Sampling),
            &both[1..],
        ),
        (|s| s.temperature = Some(0.005), &both[..1]),
        (|s| s.temperature = Some(2.5), &both[..1]),
        (|s| s.temperature = Some(0.0), &both[..]),
        (|s| s.temperature = Some(0.01), &both[..]),
        (|s| s.temperature = Some(2.0), &both[..]),
        (|s| s.stop = Some(vec!["x".into()]), &[]),
    ] {
        assert_eq!(able(set), kinds);
    }
}

#[tokio::test(start_paused = true)]
async fn weights_that_nobody_serves_are_refused_with_what_is_served() {
    let fleet = fleet(vec![facts("a", "m")]).await;
    let want = |constraint| ask(&fleet, |p, _| p.weights.constraint = Some(constraint));
    assert!(want(WeightsConstraint::AtLeast(7)).is_ok());
    assert!(want(WeightsConstraint::Exact("7".into())).is_ok());
    let error = want(WeightsConstraint::AtLeast(8)).unwrap_err();
    assert_eq!(error.reason, Reason::WeightsNotServed);
    assert!(error.message.contains("\"7\""), "{}", error.message);
    assert_eq!(
        reason(want(WeightsConstraint::Exact("07".into()))),
        Reason::WeightsNotServed
    );
}

#[tokio::test(start_paused = true)]
async fn all_that_is_lacking_is_told_at_once() {
    let fleet = fleet(vec![facts("a", "m")]).await;
    let error = ask(&fleet, |p, s| {
        p.adapter = Some("x".into());
        p.weights.constraint = Some(WeightsConstraint::Exact("8".into()));
        s.seed = Some(1);
    })
    .unwrap_err();
    assert_eq!(error.reason, Reason::NotSupported);
    for lack in ["the adapter", "repeatable sampling", "weights \"7\""] {
        assert!(error.message.contains(lack), "{}", error.message);
    }
}

#[tokio::test(start_paused = true)]
async fn of_many_lacks_some_are_told() {
    let replicas = (0..20).map(|i| ReplicaFacts {
        weight_version: format!("v{i}").into(),
        ..facts(&format!("r{i}"), "m")
    });
    let fleet = fleet(replicas.collect()).await;
    let error = ask(&fleet, |p, s| {
        p.weights.constraint = Some(WeightsConstraint::Exact("8".into()));
        s.seed = Some(1);
    })
    .unwrap_err();
    assert!(error.message.ends_with("; and 5 more"), "{}", error.message);
}
