//! Requests that share a prompt: spread, unless they say otherwise.

use proptest::prelude::*;

use super::*;

fn sibling<'a>(needs: &'a Needs, key: Option<u64>, share: bool) -> RouteRequest<'a> {
    RouteRequest {
        hints: Hints {
            group: Some(Siblings { key: 77, share }),
            ..Hints::default()
        },
        ..request(needs, key)
    }
}

#[tokio::test(start_paused = true)]
async fn siblings_spread_though_the_first_holds_the_prompt() {
    let (fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let now = Instant::now();
    for key in 0..16 {
        let decision = router
            .route(&fleet.snapshot, &sibling(&needs, Some(key), false), now)
            .unwrap();
        assert_eq!(decision.reason, RouteReason::Group);
        let group = Siblings {
            key: 77,
            share: false,
        };
        router.group_answered(group, decision.slot, now);
    }
    assert_eq!(fleet.live_pins(), [2; 8]);
}

#[tokio::test(start_paused = true)]
async fn siblings_that_share_are_on_one_rank_and_move_together() {
    let (mut fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let place = |fleet: &Fleet, key| {
        router
            .route(&fleet.snapshot, &sibling(&needs, Some(key), true), now)
            .unwrap()
            .slot
    };
    let home = place(&fleet, 0);
    assert!((1..12).all(|key| place(&fleet, key) == home));
    fleet.lose(home.0);
    let next = place(&fleet, 0);
    assert_ne!(next, home);
    assert!((1..20).all(|key| place(&fleet, key) == next));
}

#[tokio::test(start_paused = true)]
async fn a_later_one_goes_where_the_prompt_is_while_that_is_not_busier() {
    let (fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    // Ten of others everywhere.
    let _busy: Vec<_> = (0..4)
        .map(|slot| fleet.snapshot.rank(RankSlot(slot)).unwrap().load.take(10))
        .collect();
    let place = |key| {
        router
            .route(&fleet.snapshot, &sibling(&needs, Some(key), false), now)
            .map(|d| d.slot)
            .unwrap()
    };
    let first = place(0);
    assert_ne!(place(1), first, "nobody has answered yet");
    let group = Siblings {
        key: 77,
        share: false,
    };
    router.group_answered(group, first, now);
    assert_eq!(place(2), first, "the prompt is there");
    let more = (3..40).filter(|key| place(*key) == first).count();
    assert!(more < 20, "within the bound: {more} of 37");
}

#[tokio::test(start_paused = true)]
async fn without_keys_they_spread_by_what_is_in_flight() {
    let (fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let running: Vec<_> = (0..8)
        .map(|i| {
            let request = RouteRequest {
                request: pin(i).0,
                ..sibling(&needs, None, false)
            };
            router
                .route(&fleet.snapshot, &request, Instant::now())
                .unwrap()
        })
        .collect();
    assert_eq!(fleet.in_flight(), [2; 4]);
    assert!(running.iter().all(|d| d.reason == RouteReason::Group));
    assert_eq!(router.pins(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pinned_sibling_stays() {
    let (fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let first = router
        .route(&fleet.snapshot, &request(&needs, Some(1)), now)
        .unwrap();
    for _ in 0..4 {
        let next = router
            .route(&fleet.snapshot, &sibling(&needs, Some(1), false), now)
            .unwrap();
        assert_eq!((next.slot, next.reason), (first.slot, RouteReason::Pinned));
    }
}

proptest! {
    /// However many there are and whatever ran before, no rank has two more of a
    /// group than another that is not busier than most.
    #[test]
    fn a_group_spreads_evenly_over_an_even_fleet(
        ranks in 1u32..12,
        siblings in 1u64..60,
        load in 0u32..20,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time().start_paused(true).build().unwrap();
        let counts = runtime.block_on(async {
            let (fleet, router, needs) = (Fleet::new(ranks, 1), router(), needs());
            let _busy: Vec<_> = (0..ranks)
                .map(|slot| fleet.snapshot.rank(RankSlot(slot)).unwrap().load.take(load))
                .collect();
            for key in 0..siblings {
                let request = sibling(&needs, Some(key), false);
                router.route(&fleet.snapshot, &request, Instant::now()).unwrap();
            }
            fleet.live_pins()
        });
        prop_assert!(spread(&counts) <= 1, "{counts:?}");
    }
}
