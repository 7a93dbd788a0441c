//! Trajectories that lost their rank when few others were left.

use super::*;

fn back(fleet: &mut Fleet, slot: u32) {
    let replica = format!("r{}", slot % 100);
    let mut rank = Fake::new(slot, replica);
    rank.incarnation = 2;
    fleet.ranks.push(rank);
    fleet.publish();
}

fn serve(fleet: &Fleet, router: &Router, keys: std::ops::Range<u64>) -> Vec<RouteReason> {
    let (needs, now) = (needs(), Instant::now());
    keys.map(|key| {
        let decision = router.route(&fleet.snapshot, &request(&needs, Some(key)), now);
        decision.unwrap().reason
    })
    .collect()
}

/// Of a fleet that restarts one rank after the other the first is everybody's
/// refuge, and not for ever.
#[tokio::test(start_paused = true)]
async fn the_first_rank_that_is_back_does_not_keep_everybody() {
    let (mut fleet, router) = (Fleet::new(4, 1), router());
    serve(&fleet, &router, 0..40);
    for slot in 0..4 {
        fleet.lose(slot);
    }
    back(&mut fleet, 100);
    let all = serve(&fleet, &router, 0..40);
    assert!(all.iter().all(|r| *r == RouteReason::ReplicaLost));
    assert_eq!(fleet.live_pins(), [40]);
    for slot in 101..104 {
        back(&mut fleet, slot);
    }
    let reasons = serve(&fleet, &router, 0..40);
    let moved = reasons.iter().filter(|r| **r == RouteReason::Overload);
    let pins = fleet.live_pins();
    assert_eq!(moved.count() as u64, 40 - pins[0], "{pins:?}");
    // Down to twice the mean; each moved once, and the others are balanced.
    assert!(
        pins[0] <= 20 && pins[1..].iter().all(|p| *p >= 6),
        "{pins:?}"
    );
    let again = serve(&fleet, &router, 0..40);
    assert!(again.iter().all(|r| *r == RouteReason::Pinned));
}

#[tokio::test(start_paused = true)]
async fn one_of_two_that_comes_back_gets_none_back() {
    let (mut fleet, router) = (Fleet::new(2, 1), router());
    serve(&fleet, &router, 0..20);
    fleet.lose(0);
    serve(&fleet, &router, 0..20);
    back(&mut fleet, 100);
    let all = serve(&fleet, &router, 0..20);
    assert!(all.iter().all(|r| *r == RouteReason::Pinned));
}

/// Whoever has lived somewhere for long has its history there.
#[tokio::test(start_paused = true)]
async fn a_refuge_becomes_a_home() {
    let (mut fleet, router) = (Fleet::new(3, 1), router());
    serve(&fleet, &router, 0..30);
    for slot in 0..3 {
        fleet.lose(slot);
    }
    back(&mut fleet, 100);
    serve(&fleet, &router, 0..30);
    tokio::time::advance(std::time::Duration::from_secs(16 * 60)).await;
    for slot in 101..103 {
        back(&mut fleet, slot);
    }
    let all = serve(&fleet, &router, 0..30);
    assert!(all.iter().all(|r| *r == RouteReason::Pinned));
}
