//! A restart of the control plane, under paused time.

use super::*;
use crate::{fleet::restart::Found, store::notes::ReplicaNote};

/// A fleet that finds a replica `a` as noted, which does `found`, and its
/// incarnation.
async fn restarted(found: Found) -> (Arc<Fleet>, Incarnation) {
    let before = fleet();
    before.register(facts("a", "boot")).await.unwrap();
    let notes: Vec<ReplicaNote> = before.notes();
    let incarnation = notes[0].incarnation;
    let after = fleet();
    let answered = after.restore(notes, |_| std::future::ready(found)).await;
    assert_eq!(answered, usize::from(found == Found::Answers));
    (after, incarnation)
}

#[tokio::test(start_paused = true)]
async fn one_that_is_silent_then_is_unverified_until_its_first_beat() {
    let (fleet, me) = restarted(Found::Silent).await;
    let closed = |fleet: &Fleet| {
        let states = states(fleet);
        states.iter().all(|s| matches!(s, RankState::Closed(_)))
    };
    for _ in 0..11 {
        pass(&fleet, 1, &[], &mut 0).await;
        assert_eq!(health(&fleet, "a"), Health::Unverified);
        assert!(closed(&fleet), "{:?}", states(&fleet));
        let shown = fleet.get(&ReplicaId::new("a")).unwrap();
        assert!(shown.reason.contains("restart"), "{}", shown.reason);
        assert!(shown.ranks.iter().all(|rank| !rank.routable()));
    }
    fleet.beat(beat("a", me, 1)).unwrap();
    assert_eq!(health(&fleet, "a"), Health::Healthy);
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test(start_paused = true)]
async fn one_that_stays_silent_is_dead_after_a_lease() {
    let (fleet, me) = restarted(Found::Silent).await;
    pass(&fleet, 12, &[], &mut 0).await;
    assert_eq!(health(&fleet, "a"), Health::Dead);
    assert_eq!(
        reason(fleet.beat(beat("a", me, 1))),
        Reason::IncarnationDead
    );
}

#[tokio::test(start_paused = true)]
async fn one_that_answers_serves_at_once_and_has_a_lease_more_for_its_first_beat() {
    let (fleet, me) = restarted(Found::Answers).await;
    assert_eq!(health(&fleet, "a"), Health::Healthy);
    pass(&fleet, 17, &[], &mut 0).await;
    assert_eq!(health(&fleet, "a"), Health::Healthy);
    // From its first beat on it is one like all others.
    fleet.beat(beat("a", me, 1)).unwrap();
    pass(&fleet, 6, &[], &mut 0).await;
    assert_eq!(health(&fleet, "a"), Health::Suspect);
}

#[tokio::test(start_paused = true)]
async fn a_repeated_registration_verifies_it_as_well() {
    let (fleet, me) = restarted(Found::Silent).await;
    // The store of the other fleet is another one: both begin at the same number.
    let again = fleet.register(facts("a", "boot")).await.unwrap();
    assert_eq!(again.incarnation, me);
    assert_eq!(health(&fleet, "a"), Health::Healthy);
}
