//! What is shown is what would be done, and showing it does nothing.

use proptest::prelude::*;

use super::*;
use crate::routing::{Explanation, KvAdmission};

fn why(explanation: &Explanation) -> Vec<(bool, &str)> {
    let candidates = explanation.candidates.iter();
    candidates.map(|c| (c.chosen, c.why.as_str())).collect()
}

#[tokio::test(start_paused = true)]
async fn each_rank_has_its_sentence() {
    let (mut fleet, router, mut needs) = (Fleet::new(5, 1), router(), needs());
    let now = Instant::now();
    fleet.set(0, |r| r.state = RankState::Closed("heartbeats are missing"));
    fleet.set(1, |r| r.weights = "7");
    fleet.set(2, |r| r.state = RankState::PinnedOnly);
    let _busy = fleet.snapshot.rank(RankSlot(3)).unwrap().load.take(3);
    needs.weights = Some(WeightsConstraint::Exact("1".into()));
    let request = request(&needs, Some(1));
    let shown = router.explain(&fleet.snapshot, &request, now);
    assert_eq!(
        why(&shown),
        [
            (false, "heartbeats are missing"),
            (false, "it serves weights \"7\""),
            (false, "it drains and takes no new work"),
            (false, "more load than on others"),
            (
                true,
                "least loaded for a new key, then most KV free, then first in the key's order"
            ),
        ]
    );
    let eligible: Vec<bool> = shown.candidates.iter().map(|c| c.eligible).collect();
    assert_eq!(eligible, [false, false, false, true, true]);
    assert_eq!(shown.candidates[3].in_flight, 3);
    assert!(shown.candidates[3].load > 0.0);
    let outcome = shown.outcome.unwrap();
    assert_eq!(outcome.reason, RouteReason::NewKey);
    assert_eq!(router.pins(), 0);

    router.route(&fleet.snapshot, &request, now).unwrap();
    let shown = router.explain(&fleet.snapshot, &request, now);
    assert_eq!(
        why(&shown)[3..],
        [
            (false, "the key lives elsewhere"),
            (true, "the key lives here")
        ]
    );

    fleet.set(3, |r| r.state = RankState::Paused);
    fleet.set(4, |r| r.state = RankState::Drained);
    let shown = router.explain(&fleet.snapshot, &request, now);
    assert_eq!(shown.outcome, Err(NoRoute::Paused));
    assert_eq!(
        why(&shown)[3..],
        [
            (false, "generation is paused"),
            (false, "it drains, and its keys move")
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_full_cache_is_told_with_its_numbers() {
    let (fleet, needs) = (Fleet::new(1, 1), needs());
    let router = Router::new(RouterConfig {
        kv_admission: Some(KvAdmission::default()),
        ..RouterConfig::default()
    });
    let now = Instant::now();
    let turn = |key, prompt_tokens| RouteRequest {
        prompt_tokens,
        ..request(&needs, Some(key))
    };
    router
        .route(&fleet.snapshot, &turn(1, 370_000), now)
        .unwrap();
    let shown = router.explain(&fleet.snapshot, &turn(2, 9000), now);
    assert_eq!(shown.outcome, Err(NoRoute::KvFull));
    let told = "370000 tokens of 375000 are taken by live trajectories: this one would not fit";
    assert_eq!(why(&shown), [(false, told)]);
    assert_eq!(shown.candidates[0].live_tokens, 370_000);
}

#[tokio::test(start_paused = true)]
async fn nobody_serves_the_model() {
    let (fleet, router) = (Fleet::new(1, 1), router());
    let needs = Needs {
        model: "other".into(),
        ..needs()
    };
    let shown = router.explain(&fleet.snapshot, &request(&needs, None), Instant::now());
    assert_eq!(shown.outcome, Err(NoRoute::NoModel));
    assert!(shown.candidates.is_empty());
}

proptest! {
    /// Whatever has happened before: the explanation names the rank and the reason
    /// that the next decision has, changes no load and no pin, and marks one rank.
    #[test]
    fn the_explanation_is_the_decision(
        steps in prop::collection::vec((0u64..12, 0u8..9, 0u32..4), 1..80),
        factor in prop::sample::select(vec![1.0, 1.25, f64::INFINITY]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut fleet = Fleet::new(4, 1);
            let needs = needs();
            let router = Router::new(RouterConfig {
                load_factor: factor,
                max_pins: 640,
                ..RouterConfig::default()
            });
            let now = Instant::now();
            let mut running = Vec::new();
            for (key, what, slot) in steps {
                let mut request = request(&needs, Some(key));
                match what {
                    0 => fleet.set(slot, |r| r.state = RankState::Paused),
                    1 => fleet.set(slot, |r| r.state = RankState::Drained),
                    2 => fleet.set(slot, |r| r.state = RankState::Open),
                    3 => { running.pop(); }
                    7 => fleet.set(slot, |r| r.state = RankState::Suspect),
                    4 => request.key = None,
                    5 => request.policy = RoutingPolicy::RoundRobin,
                    6 => request.hints.group = Some(Siblings { key: 1, share: slot == 0 }),
                    _ => {}
                }
                let before = (fleet.in_flight(), fleet.live_pins(), router.pins());
                let shown = router.explain(&fleet.snapshot, &request, now);
                let again = router.explain(&fleet.snapshot, &request, now);
                assert_eq!(shown, again);
                let after = (fleet.in_flight(), fleet.live_pins(), router.pins());
                assert_eq!(before, after);
                let chosen = shown.candidates.iter().filter(|c| c.chosen).count();
                match router.route(&fleet.snapshot, &request, now) {
                    Ok(decision) => {
                        let outcome = shown.outcome.unwrap();
                        let rank = fleet.snapshot.rank(decision.slot).unwrap();
                        assert_eq!(outcome.target, rank.target);
                        assert_eq!(outcome.reason, decision.reason);
                        assert_eq!(chosen, 1);
                        running.push(decision);
                    }
                    Err(none) => {
                        assert_eq!(shown.outcome, Err(none));
                        assert_eq!(chosen, 0);
                    }
                }
            }
        });
    }
}
