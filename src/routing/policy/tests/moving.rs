//! Moves off a busy rank.

use std::time::Duration;

use super::*;
use crate::routing::MoveConfig;

fn moving(per_minute: u32) -> Router {
    Router::new(RouterConfig {
        moves: Some(MoveConfig {
            per_minute,
            ..MoveConfig::default()
        }),
        ..RouterConfig::default()
    })
}

fn turn(needs: &Needs, key: u64, prompt_tokens: u32) -> RouteRequest<'_> {
    RouteRequest {
        prompt_tokens,
        ..request(needs, Some(key))
    }
}

/// A key with a history of `tokens` at the rank that is returned.
fn settled(fleet: &Fleet, router: &Router, needs: &Needs, key: u64, tokens: u32) -> RankSlot {
    let now = Instant::now();
    let slot = router
        .route(&fleet.snapshot, &turn(needs, key, tokens), now)
        .unwrap()
        .slot;
    router.grown(&fleet.snapshot, pin(key), slot, tokens, None, now);
    slot
}

fn queue(fleet: &Fleet, slot: RankSlot, seconds: f64) -> Queued {
    let load = &fleet.snapshot.rank(slot).unwrap().load;
    Queued::on(load.queue(), Duration::from_secs_f64(seconds))
}

#[tokio::test(start_paused = true)]
async fn a_move_pays_or_is_not_made_and_is_the_pin_from_then_on() {
    let (fleet, router, needs) = (Fleet::new(2, 1), moving(60), needs());
    let home = settled(&fleet, &router, &needs, 1, 8000);
    let now = Instant::now();
    let route = || {
        router
            .route(&fleet.snapshot, &turn(&needs, 1, 8200), now)
            .unwrap()
    };
    // 8,000 tokens cost 0.51 s, and the margin is 3 s.
    let first = queue(&fleet, home, 3.4);
    assert_eq!((route().slot, route().reason), (home, RouteReason::Pinned));
    let _second = queue(&fleet, home, 0.3);
    let moved = route();
    assert_ne!(moved.slot, home);
    assert_eq!(
        (moved.reason, moved.expected_cached_tokens),
        (RouteReason::Overload, 0)
    );
    assert_eq!(
        router.pin(pin(1), now).unwrap().slot,
        moved.slot,
        "the same step"
    );
    drop(first);
    assert_eq!(
        (route().slot, route().reason),
        (moved.slot, RouteReason::Pinned)
    );
    let loads = fleet.live_pins();
    assert_eq!(
        (loads[home.0 as usize], loads[moved.slot.0 as usize]),
        (0, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn nobody_moves_unless_it_is_turned_on_or_to_where_the_queue_is_as_long() {
    let (fleet, needs) = (Fleet::new(2, 1), needs());
    let off = router();
    let home = settled(&fleet, &off, &needs, 1, 8000);
    let _long = queue(&fleet, home, 1000.0);
    let route = |router: &Router| {
        router
            .route(&fleet.snapshot, &turn(&needs, 1, 8200), Instant::now())
            .unwrap()
            .reason
    };
    assert_eq!(route(&off), RouteReason::Pinned);
    let on = moving(60);
    let view = PinView {
        slot: home,
        tokens: 8000,
        adapter: 0,
        idle: Duration::ZERO,
        live: true,
    };
    on.restore(&fleet.snapshot, pin(1), view, Instant::now());
    let _too = queue(&fleet, RankSlot(1 - home.0), 999.0);
    assert_eq!(route(&on), RouteReason::Pinned);
}

#[tokio::test(start_paused = true)]
async fn a_long_history_never_moves() {
    let (fleet, router, needs) = (Fleet::new(2, 1), moving(60), needs());
    let home = settled(&fleet, &router, &needs, 1, 16_385);
    let _long = queue(&fleet, home, 1000.0);
    let next = router.route(&fleet.snapshot, &turn(&needs, 1, 17_000), Instant::now());
    assert_eq!(next.unwrap().reason, RouteReason::Pinned);
}

#[tokio::test(start_paused = true)]
async fn one_key_moves_once_in_a_while() {
    let (fleet, router, needs) = (Fleet::new(2, 1), moving(60), needs());
    let start = Instant::now();
    let home = settled(&fleet, &router, &needs, 1, 1000);
    let _here = queue(&fleet, home, 100.0);
    let route = |after: u64| {
        let now = start + Duration::from_secs(after);
        router
            .route(&fleet.snapshot, &turn(&needs, 1, 1000), now)
            .unwrap()
            .reason
    };
    assert_eq!(route(0), RouteReason::Overload);
    let _there = queue(&fleet, RankSlot(1 - home.0), 1000.0);
    assert_eq!(route(1), RouteReason::Pinned);
    assert_eq!(route(299), RouteReason::Pinned);
    assert_eq!(route(300), RouteReason::Overload);
}

#[tokio::test(start_paused = true)]
async fn the_fleet_moves_no_more_than_its_budget() {
    let (fleet, router, needs) = (Fleet::new(2, 1), moving(5), needs());
    let homes: Vec<_> = (0..40)
        .map(|key| settled(&fleet, &router, &needs, key, 1000))
        .collect();
    let _long = queue(&fleet, RankSlot(0), 1000.0);
    let start = Instant::now();
    let moves = |after: u64| {
        let now = start + Duration::from_secs(after);
        (0..40)
            .zip(&homes)
            .filter(|(_, home)| **home == RankSlot(0))
            .filter(|(key, _)| {
                let request = turn(&needs, *key, 1000);
                let decision = router.route(&fleet.snapshot, &request, now).unwrap();
                decision.reason == RouteReason::Overload
            })
            .count()
    };
    assert_eq!(moves(0), 5);
    assert_eq!(moves(59), 0);
    assert_eq!(moves(60), 5);
}
