//! Adapters: who can serve one, who has it in memory, and what a reload does to
//! what the cache is expected to hold.

use super::*;

fn adapter(name: &str, load_id: &str, resident: bool) -> AdapterFacts {
    AdapterFacts {
        name: name.into(),
        load_id: load_id.to_owned(),
        resident,
    }
}

fn wants(name: &str) -> Needs {
    Needs {
        adapter: Some(name.into()),
        ..needs()
    }
}

/// Ranks of which the first can serve nothing, the second has "x" in memory, and
/// the others can load it.
fn fleet() -> Fleet {
    let mut fleet = Fleet::new(8, 1);
    fleet.set(1, |r| r.adapters = vec![adapter("x", "1", true)]);
    for slot in 2..8 {
        fleet.set(slot, |r| r.adapters = vec![adapter("x", "1", false)]);
    }
    fleet
}

#[tokio::test(start_paused = true)]
async fn who_cannot_load_it_is_not_eligible() {
    let (fleet, router) = (fleet(), router());
    let now = Instant::now();
    for key in 0..100 {
        let needs = wants("x");
        let chosen = router.route(&fleet.snapshot, &request(&needs, Some(key)), now);
        assert_ne!(chosen.unwrap().slot, RankSlot(0));
    }
    let needs = wants("y");
    let none = router.route(&fleet.snapshot, &request(&needs, None), now);
    assert_eq!(none.unwrap_err(), NoRoute::Lacking(vec![Lack::Adapter]));
}

#[tokio::test(start_paused = true)]
async fn who_has_it_in_memory_is_preferred_until_it_is_far_busier() {
    let (fleet, router, needs) = (fleet(), router(), wants("x"));
    let now = Instant::now();
    let mut tickets = Vec::new();
    let slots: Vec<u32> = (0..60)
        .map(|key| {
            let decision = router
                .route(&fleet.snapshot, &request(&needs, Some(key)), now)
                .unwrap();
            tickets.push(decision.ticket);
            decision.slot.0
        })
        .collect();
    assert_eq!(slots[..3], [1; 3], "preferred");
    let there = slots.iter().filter(|slot| **slot == 1).count();
    assert!((10..25).contains(&there), "and not buried: {slots:?}");
    for slot in 2..8 {
        assert!(slots.contains(&slot), "{slot} loads it: {slots:?}");
    }
    // Without an adapter nothing of this counts.
    let plain = super::needs();
    let free = router
        .route(&fleet.snapshot, &request(&plain, Some(1000)), now)
        .unwrap();
    assert_eq!(free.slot, RankSlot(0));
}

#[tokio::test(start_paused = true)]
async fn requests_without_a_key_prefer_it_too() {
    let (fleet, router, needs) = (fleet(), router(), wants("x"));
    for _ in 0..10 {
        let decision = router
            .route(&fleet.snapshot, &request(&needs, None), Instant::now())
            .unwrap();
        assert_eq!(decision.slot, RankSlot(1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_reloaded_adapter_makes_the_expectation_cold() {
    let (mut fleet, router, needs) = (Fleet::new(1, 1), router(), wants("x"));
    let now = Instant::now();
    let expected = |fleet: &Fleet| {
        let asked = RouteRequest {
            prompt_tokens: 200,
            ..request(&needs, Some(1))
        };
        let decision = router.route(&fleet.snapshot, &asked, now).unwrap();
        (decision.reason, decision.expected_cached_tokens)
    };
    let grown = |fleet: &Fleet, tokens| {
        router.grown(&fleet.snapshot, pin(1), RankSlot(0), tokens, Some("x"), now);
    };
    fleet.set(0, |r| r.adapters = vec![adapter("x", "1", true)]);
    assert_eq!(expected(&fleet), (RouteReason::NewKey, 0));
    grown(&fleet, 100);
    assert_eq!(expected(&fleet), (RouteReason::Pinned, 100));
    fleet.set(0, |r| r.adapters = vec![adapter("x", "2", true)]);
    assert_eq!(expected(&fleet), (RouteReason::Pinned, 0), "loaded anew");
    grown(&fleet, 150);
    assert_eq!(expected(&fleet), (RouteReason::Pinned, 150));
}
