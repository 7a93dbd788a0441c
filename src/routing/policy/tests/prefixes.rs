//! Requests without a key that follow what was seen of their prompt.
#![allow(clippy::cast_possible_truncation, reason = "small numbers")]

use super::*;
use crate::{ids::Tenant, routing::prefix};

fn blocks(tokens: &[u32]) -> Vec<u64> {
    prefix::blocks(&Tenant::default(), "m", None, tokens)
}

fn asks<'a>(needs: &'a Needs, blocks: &'a [u64], prompt_tokens: u32, id: u64) -> RouteRequest<'a> {
    RouteRequest {
        policy: RoutingPolicy::Prefix,
        prompt_tokens,
        request: pin(id).0,
        hints: Hints {
            blocks,
            ..Hints::default()
        },
        ..request(needs, None)
    }
}

#[tokio::test(start_paused = true)]
async fn turns_without_a_key_stay_together_and_trajectories_apart() {
    let (fleet, router, needs) = (Fleet::new(8, 1), router(), needs());
    let now = Instant::now();
    let mut homes = HashSet::new();
    let mut running = Vec::new();
    for trajectory in 0..8u32 {
        let mut history: Vec<u32> = (0..4096).map(|i| i ^ (trajectory << 20)).collect();
        let mut home = None;
        for turn in 0..4u32 {
            let names = blocks(&history);
            let length = 4096 + 600 * turn;
            let id = u64::from(trajectory * 10 + turn);
            let request = asks(&needs, &names, length, id);
            let decision = router.route(&fleet.snapshot, &request, now).unwrap();
            if turn == 0 {
                assert_eq!(decision.reason, RouteReason::NoKey);
            } else {
                assert_eq!(decision.reason, RouteReason::Prefix);
                assert!(decision.expected_cached_tokens >= 4096);
                assert!(!decision.verifiable);
            }
            assert_eq!(*home.get_or_insert(decision.slot), decision.slot);
            history.extend(0..600);
            router.prefix_seen(&blocks(&history), decision.slot, now);
            if turn == 3 {
                running.push(decision);
            }
        }
        homes.extend(home);
    }
    assert!(homes.len() > 4, "they spread while others run: {homes:?}");
    assert_eq!(router.pins(), 0);
    assert!(router.prefix_blocks() > 0);
}

#[tokio::test(start_paused = true)]
async fn a_short_common_beginning_gathers_nobody() {
    let (fleet, router, needs) = (Fleet::new(2, 1), router(), needs());
    let now = Instant::now();
    let system: Vec<u32> = (0..1024).collect();
    router.prefix_seen(&blocks(&system), RankSlot(0), now);
    let mut prompt = system.clone();
    prompt.extend(5000..6025);
    let names = blocks(&prompt);
    let request = asks(&needs, &names, 2049, 1);
    let decision = router.route(&fleet.snapshot, &request, now).unwrap();
    assert_eq!(decision.reason, RouteReason::NoKey, "less than half of it");
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_is_far_busier_or_gone_is_not_followed() {
    let (mut fleet, router, needs) = (Fleet::new(4, 1), router(), needs());
    let now = Instant::now();
    let prompt: Vec<u32> = (0..1024).collect();
    let names = blocks(&prompt);
    router.prefix_seen(&names, RankSlot(0), now);
    let request = asks(&needs, &names, 1025, 1);
    let reason = |fleet: &Fleet| {
        let decision = router.route(&fleet.snapshot, &request, now).unwrap();
        (decision.slot == RankSlot(0), decision.reason)
    };
    let load = Arc::clone(&fleet.snapshot.rank(RankSlot(0)).unwrap().load);
    let some = load.take(4);
    assert_eq!(reason(&fleet), (true, RouteReason::Prefix));
    let many = load.take(10);
    assert_eq!(reason(&fleet), (false, RouteReason::NoKey));
    drop((some, many));
    fleet.lose(0);
    assert_eq!(reason(&fleet), (false, RouteReason::NoKey));
}

#[tokio::test(start_paused = true)]
async fn keyless_requests_follow_prefixes_where_that_is_turned_on() {
    let (fleet, needs) = (Fleet::new(2, 1), needs());
    let router = Router::new(RouterConfig {
        keyless_prefix: true,
        ..RouterConfig::default()
    });
    let prompt: Vec<u32> = (0..1024).collect();
    let names = blocks(&prompt);
    router.prefix_seen(&names, RankSlot(1), Instant::now());
    let request = RouteRequest {
        policy: RoutingPolicy::Affinity,
        ..asks(&needs, &names, 1025, 1)
    };
    let decision = router
        .route(&fleet.snapshot, &request, Instant::now())
        .unwrap();
    assert_eq!(
        (decision.slot, decision.reason),
        (RankSlot(1), RouteReason::Prefix)
    );
}
