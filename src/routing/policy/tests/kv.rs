//! The KV cache as the first-order variable: counted, used for placement, and
//! waited for.
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use std::time::Duration;

use super::*;
use crate::routing::KvAdmission;

fn turn(needs: &Needs, key: u64, prompt_tokens: u32) -> RouteRequest<'_> {
    RouteRequest {
        prompt_tokens,
        ..request(needs, Some(key))
    }
}

fn waited(needs: &Needs, key: u64, prompt_tokens: u32, seconds: u64) -> RouteRequest<'_> {
    RouteRequest {
        hints: Hints {
            waited: Some(Duration::from_secs(seconds)),
            ..Hints::default()
        },
        ..turn(needs, key, prompt_tokens)
    }
}

fn admitting() -> Router {
    Router::new(RouterConfig {
        kv_admission: Some(KvAdmission::default()),
        ..RouterConfig::default()
    })
}

#[tokio::test(start_paused = true)]
async fn a_prompt_counts_while_it_is_computed_and_the_history_after() {
    let (fleet, router, needs) = (Fleet::new(1, 1), router(), needs());
    let now = Instant::now();
    let load = &fleet.snapshot.rank(RankSlot(0)).unwrap().load;
    let first = router.route(&fleet.snapshot, &turn(&needs, 1, 4000), now);
    assert_eq!(first.unwrap().expected_cached_tokens, 0);
    assert_eq!(load.live_tokens(), 4000);
    router.grown(&fleet.snapshot, pin(1), RankSlot(0), 4500, None, now);
    assert_eq!(load.live_tokens(), 4500);
    let second = router.route(&fleet.snapshot, &turn(&needs, 1, 9000), now);
    assert_eq!(second.unwrap().expected_cached_tokens, 4500);
    assert_eq!(load.live_tokens(), 9000);
    router.finish(pin(1));
    assert_eq!(load.live_tokens(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_rank_without_room_is_passed_over_while_another_has_some() {
    let (fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let first = router
        .route(&fleet.snapshot, &turn(&needs, 0, 300_000), now)
        .unwrap()
        .slot;
    // Four more at the other: it has more load, and room.
    for key in 1..5 {
        let slot = router
            .route(&fleet.snapshot, &turn(&needs, key, 80_000), now)
            .unwrap()
            .slot;
        assert_ne!(slot, first, "{key}");
    }
    // Nobody has room: the least loaded.
    let slot = router
        .route(&fleet.snapshot, &turn(&needs, 9, 100_000), now)
        .unwrap()
        .slot;
    assert_eq!(slot, first);
}

#[tokio::test(start_paused = true)]
async fn a_new_trajectory_waits_for_room() {
    let (fleet, router, needs) = (Fleet::new(2, 1), admitting(), needs());
    let now = Instant::now();
    let route = |request: &RouteRequest<'_>| {
        router
            .route(&fleet.snapshot, request, now)
            .map(|d| (d.slot, d.reason))
    };
    for key in 0..2 {
        route(&turn(&needs, key, 300_000)).unwrap();
    }
    assert_eq!(route(&turn(&needs, 2, 100_000)), Err(NoRoute::KvFull));
    assert!(router.pin(pin(2), now).is_none(), "nothing is pinned");
    let full = route(&turn(&needs, 2, 70_000));
    assert_eq!(
        full,
        Err(NoRoute::KvFull),
        "those that live there are to grow"
    );
    assert!(route(&turn(&needs, 2, 30_000)).is_ok(), "it fits");
    router.finish(pin(0));
    assert!(route(&turn(&needs, 3, 100_000)).is_ok());
}

/// What lives there outgrows the cache: a turn of one below the mean waits, and
/// leaves its room to the others. It goes on where there is room, at home if it can.
#[tokio::test(start_paused = true)]
async fn of_those_that_outgrow_the_cache_a_short_one_makes_room() {
    let (fleet, router, needs) = (Fleet::new(1, 1), admitting(), needs());
    let now = Instant::now();
    let load = Arc::clone(&fleet.ranks[0].load);
    let route = |request: &RouteRequest<'_>| {
        let decision = router.route(&fleet.snapshot, request, now);
        decision.map(|d| d.reason)
    };
    for (key, prompt) in [(0, 200_000), (1, 60_000), (2, 60_000)] {
        route(&turn(&needs, key, prompt)).unwrap();
    }
    // 375,000 are there: the long one grows beyond that, and stays.
    let grown = route(&turn(&needs, 0, 290_000));
    assert_eq!(grown, Ok(RouteReason::Pinned));
    assert_eq!(load.live_tokens(), 410_000);
    assert_eq!(route(&turn(&needs, 1, 61_000)), Err(NoRoute::KvFull));
    assert_eq!((load.live_tokens(), load.live_pins()), (350_000, 2));
    // There is room for the other one by that.
    assert_eq!(route(&turn(&needs, 2, 61_000)), Ok(RouteReason::Pinned));
    // In line it waits until so much is free that all have room to grow.
    assert_eq!(route(&waited(&needs, 1, 61_000, 10)), Err(NoRoute::KvFull));
    router.finish(pin(2));
    assert_eq!(route(&waited(&needs, 1, 61_000, 10)), Err(NoRoute::KvFull));
    router.finish(pin(0));
    assert_eq!(
        route(&waited(&needs, 1, 61_000, 20)),
        Ok(RouteReason::Pinned)
    );
}

#[tokio::test(start_paused = true)]
async fn one_that_made_room_goes_on_where_there_is_some_or_after_the_longest_wait_at_home() {
    let (fleet, router, needs) = (Fleet::new(2, 1), admitting(), needs());
    let now = Instant::now();
    let route = |request: &RouteRequest<'_>| {
        let decision = router.route(&fleet.snapshot, request, now);
        decision.map(|d| (d.slot, d.reason))
    };
    let (home, _) = route(&turn(&needs, 0, 200_000)).unwrap();
    // The other rank is filled, so that all of these live at home.
    let (other, _) = route(&turn(&needs, 9, 330_000)).unwrap();
    for key in 1..3 {
        assert_eq!(route(&turn(&needs, key, 60_000)).unwrap().0, home);
    }
    route(&turn(&needs, 0, 290_000)).unwrap();
    assert_eq!(route(&turn(&needs, 1, 61_000)), Err(NoRoute::KvFull));
    assert_eq!(
        route(&waited(&needs, 1, 61_000, 300)),
        Ok((home, RouteReason::Pinned))
    );
    assert_eq!(route(&turn(&needs, 2, 61_000)), Err(NoRoute::KvFull));
    router.finish(pin(9));
    assert_eq!(
        route(&waited(&needs, 2, 61_000, 10)),
        Ok((other, RouteReason::Overload))
    );
    assert_eq!(
        route(&turn(&needs, 2, 62_000)),
        Ok((other, RouteReason::Pinned))
    );
}

#[tokio::test(start_paused = true)]
async fn what_has_begun_stands_before_what_is_new() {
    let (fleet, router, needs) = (Fleet::new(1, 1), admitting(), needs());
    let now = Instant::now();
    drop(router.route(&fleet.snapshot, &turn(&needs, 1, 1000), now));
    let new = router.wait_for_room(&needs.model, Some(pin(7)));
    assert!(new.is_first());
    let keyless = router.wait_for_room(&needs.model, None);
    let begun = router.wait_for_room(&needs.model, Some(pin(1)));
    assert!(begun.is_first() && !new.is_first() && !keyless.is_first());
    drop(begun);
    // It is told that it is the first again.
    new.news().await;
    assert!(new.is_first());
    drop(new);
    assert!(keyless.is_first());
}

#[tokio::test(start_paused = true)]
async fn what_fits_nowhere_is_taken_by_a_rank_where_nothing_lives() {
    let (fleet, router, needs) = (Fleet::new(1, 1), admitting(), needs());
    let now = Instant::now();
    let huge = turn(&needs, 1, 10_000_000);
    assert!(router.route(&fleet.snapshot, &huge, now).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_new_one_gets_in_line_and_the_longest_wait_ends_in_any_case() {
    let (fleet, router, needs) = (Fleet::new(1, 1), admitting(), needs());
    let now = Instant::now();
    let route = |request: &RouteRequest<'_>| {
        router
            .route(&fleet.snapshot, request, now)
            .map(|d| d.reason)
    };
    route(&turn(&needs, 0, 300_000)).unwrap();
    let place = router.wait_for_room(&needs.model, None);
    assert_eq!(
        route(&turn(&needs, 1, 10)),
        Err(NoRoute::KvFull),
        "others wait before it, though it would fit"
    );
    assert!(
        route(&waited(&needs, 1, 10, 0)).is_ok(),
        "the first in line"
    );
    assert_eq!(
        route(&waited(&needs, 2, 200_000, 299)),
        Err(NoRoute::KvFull)
    );
    assert!(route(&waited(&needs, 2, 200_000, 300)).is_ok());
    drop(place);
    assert!(
        route(&turn(&needs, 3, 10)).is_err(),
        "overcommitted by then"
    );
}

/// First come, first served, and everybody is: whoever is in front takes what
/// becomes free, and after the longest wait is taken all the same.
#[tokio::test(start_paused = true)]
async fn the_line_is_fair_and_moves() {
    let (fleet, needs) = (Fleet::new(1, 1), needs());
    let router = Arc::new(admitting());
    let fleet = Arc::new(fleet);
    let start = Instant::now();
    router
        .route(&fleet.snapshot, &turn(&needs, 0, 300_000), start)
        .unwrap();
    let (told, mut served) = tokio::sync::mpsc::unbounded_channel();
    for key in 1..=20u32 {
        let (router, fleet, needs) = (Arc::clone(&router), Arc::clone(&fleet), needs.clone());
        let told = told.clone();
        // In this order, and each wants more than the one before.
        let place = router.wait_for_room(&needs.model, None);
        tokio::spawn(async move {
            let begun = Instant::now();
            loop {
                let waited = begun.elapsed();
                let request = RouteRequest {
                    hints: Hints {
                        waited: Some(waited),
                        ..Hints::default()
                    },
                    ..turn(&needs, key.into(), 100_000 + key)
                };
                let longest = Duration::from_secs(300);
                if (place.is_first() || waited >= longest)
                    && router
                        .route(&fleet.snapshot, &request, Instant::now())
                        .is_ok()
                {
                    break;
                }
                let left = longest.saturating_sub(waited);
                let _ = tokio::time::timeout(left, place.news()).await;
            }
            told.send((key, begun.elapsed())).unwrap();
        });
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    router.finish(pin(0));
    let mut order = Vec::new();
    for _ in 0..20 {
        let (key, wait) = served.recv().await.unwrap();
        assert!(wait <= Duration::from_secs(300), "{key} waited {wait:?}");
        order.push(key);
    }
    assert_eq!(order, (1..=20).collect::<Vec<_>>());
    assert!(
        router
            .route(&fleet.snapshot, &turn(&needs, 0, 1), Instant::now())
            .is_err()
    );
}
