//! Ranks whose heartbeats are missing are taken where nobody else is open.

use super::*;

const SILENT: [RankState; 2] = [RankState::Suspect, RankState::Held];

fn at(fleet: &Fleet, router: &Router, request: &RouteRequest<'_>) -> Decision {
    let now = Instant::now();
    router.route(&fleet.snapshot, request, now).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_suspect_takes_nothing_while_one_is_open_and_all_where_none_is() {
    for silent in SILENT {
        let (mut fleet, router, needs) = (Fleet::new(3, 1), router(), needs());
        fleet.set(0, |r| r.state = silent.clone());
        fleet.set(1, |r| r.state = RankState::Closed("unwell"));
        for key in 0..20 {
            let taken = at(&fleet, &router, &request(&needs, Some(key)));
            assert_eq!((taken.slot.0, taken.last_resort), (2, false));
        }
        for state in [
            RankState::Paused,
            RankState::PinnedOnly,
            RankState::Ejected("it hangs"),
        ] {
            fleet.set(2, |r| r.state = state.clone());
            for policy in [
                RoutingPolicy::Affinity,
                RoutingPolicy::LeastLoaded,
                RoutingPolicy::Random,
                RoutingPolicy::RoundRobin,
                RoutingPolicy::Prefix,
            ] {
                let keyless = RouteRequest {
                    policy,
                    ..request(&needs, None)
                };
                let taken = at(&fleet, &router, &keyless);
                assert_eq!((taken.slot.0, taken.last_resort), (0, true), "{policy:?}");
            }
            let taken = at(&fleet, &router, &request(&needs, Some(99)));
            assert_eq!((taken.slot.0, taken.last_resort), (0, true));
        }
        fleet.set(2, |r| r.state = RankState::Open);
        let taken = at(&fleet, &router, &request(&needs, None));
        assert_eq!((taken.slot.0, taken.last_resort), (2, false));
    }
}

#[tokio::test(start_paused = true)]
async fn a_pinned_key_is_served_at_its_silent_home_first() {
    for silent in SILENT {
        let (mut fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
        let now = Instant::now();
        let homes: Vec<RankSlot> = (0..32)
            .map(|key| at(&fleet, &router, &request(&needs, Some(key))).slot)
            .collect();
        for slot in 0..4 {
            fleet.set(slot, |r| r.state = silent.clone());
        }
        for (key, home) in (0..32).zip(&homes) {
            let request = request(&needs, Some(key));
            let shown = router.explain(&fleet.snapshot, &request, now);
            let outcome = shown.outcome.unwrap();
            assert!(outcome.last_resort);
            let chosen = shown.candidates.iter().find(|c| c.chosen).unwrap();
            assert!(
                chosen
                    .why
                    .starts_with("the key lives here; heartbeats are missing"),
                "{}",
                chosen.why
            );
            let turn = at(&fleet, &router, &request);
            assert_eq!((turn.slot, turn.reason), (*home, RouteReason::Pinned));
            assert!(turn.last_resort);
        }
        // The home lacks what is asked for, or has just failed: another suspect.
        let home = homes[0];
        fleet.set(home.0, |r| r.weights = "7");
        let wanted = Needs {
            weights: Some(WeightsConstraint::Exact("1".into())),
            ..needs.clone()
        };
        let turn = at(&fleet, &router, &request(&wanted, Some(0)));
        assert!(turn.slot != home && turn.last_resort);
        let avoid = [homes[1]];
        let retry = RouteRequest {
            avoid: &avoid,
            ..request(&needs, Some(1))
        };
        let turn = at(&fleet, &router, &retry);
        assert!(turn.slot != homes[1] && turn.last_resort);
    }
}

#[tokio::test(start_paused = true)]
async fn once_one_is_open_a_suspects_key_makes_a_detour_and_a_held_ones_moves() {
    for (silent, reason) in [
        (RankState::Suspect, RouteReason::Detour),
        (RankState::Held, RouteReason::ReplicaLost),
    ] {
        let (mut fleet, router, needs) = (Fleet::new(3, 1), router(), needs());
        let home = at(&fleet, &router, &request(&needs, Some(1))).slot;
        for slot in 0..3 {
            fleet.set(slot, |r| r.state = silent.clone());
        }
        assert_eq!(at(&fleet, &router, &request(&needs, Some(1))).slot, home);
        let open = (0..3).find(|slot| *slot != home.0).unwrap();
        fleet.set(open, |r| r.state = RankState::Open);
        let turn = at(&fleet, &router, &request(&needs, Some(1)));
        assert_eq!((turn.slot.0, turn.reason), (open, reason));
        assert!(!turn.last_resort);
    }
}
