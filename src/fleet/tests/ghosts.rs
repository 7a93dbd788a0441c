//! Replicas that register and say nothing more: whoever may register cannot fill the
//! fleet with them, nor have the dead of others spared.

use super::{
    super::{facts::RankFacts, restart::Found},
    *,
};
use crate::telemetry::kept::Kept;

fn who(name: &str) -> Option<Arc<str>> {
    Some(name.into())
}

async fn register(fleet: &Fleet, id: &str, principal: &str) -> Incarnation {
    let registered = fleet.register_by(facts(id, "boot"), who(principal)).await;
    registered.unwrap().incarnation
}

/// Ten replicas of one principal, which have beaten.
async fn ten(fleet: &Fleet, principal: &str) -> Vec<(String, Incarnation)> {
    let mut all = Vec::new();
    for n in 0..10 {
        let id = format!("{principal}-{n}");
        let me = register(fleet, &id, principal).await;
        fleet.beat(beat(&id, me, 1)).unwrap();
        all.push((id, me));
    }
    all
}

fn named(replicas: &[(String, Incarnation)]) -> Vec<(&str, Incarnation)> {
    replicas.iter().map(|(id, me)| (id.as_str(), *me)).collect()
}

#[tokio::test(start_paused = true)]
async fn one_that_never_beat_dies_while_half_of_the_fleet_is_spared() {
    let fleet = fleet();
    let real = ten(&fleet, "mine").await;
    let mut sequence = 1;
    pass(&fleet, 2, &named(&real), &mut sequence).await;
    register(&fleet, "ghost", "mine").await;
    pass(&fleet, 11, &named(&real[5..]), &mut sequence).await;
    assert_eq!(health(&fleet, "ghost"), Health::Suspect);
    pass(&fleet, 49, &named(&real[5..]), &mut sequence).await;
    assert_eq!(health(&fleet, "ghost"), Health::Dead);
    for (id, _) in &real[..5] {
        assert_eq!(state_of(&fleet, &target(&fleet, id, 0)), RankState::Held);
    }
}

#[tokio::test(start_paused = true)]
async fn those_that_never_beat_do_not_have_others_spared() {
    let fleet = fleet();
    let real = ten(&fleet, "mine").await;
    let mut sequence = 1;
    // As many at any time as there are real ones, and of the same principal.
    for n in 0..40 {
        for more in 0..3 {
            register(&fleet, &format!("ghost-{n}-{more}"), "mine").await;
        }
        pass(&fleet, 1, &named(&real[1..]), &mut sequence).await;
    }
    assert_eq!(health(&fleet, &real[0].0), Health::Dead);
    assert_eq!(health(&fleet, &real[1].0), Health::Healthy);
}

/// A stranger's may beat as well as anybody's, and then fall silent.
#[tokio::test(start_paused = true)]
async fn silence_of_one_principals_replicas_spares_no_others() {
    let fleet = fleet();
    let real = ten(&fleet, "mine").await;
    for n in 0..100 {
        let id = format!("ghost-{n}");
        let me = register(&fleet, &id, "stranger").await;
        fleet.beat(beat(&id, me, 1)).unwrap();
    }
    pass(&fleet, 60, &named(&real[1..]), &mut 1).await;
    assert_eq!(health(&fleet, &real[0].0), Health::Dead);
    // Its own are held, where they are in nobody's way.
    let ghost = target(&fleet, "ghost-7", 0);
    assert_eq!(state_of(&fleet, &ghost), RankState::Held);
}

/// Who is told of it hears of those that are spared, not of the whole fleet.
#[tokio::test(start_paused = true)]
async fn what_is_said_of_a_silence_counts_those_that_are_spared() {
    let (kept, _guard) = Kept::from(tracing::Level::INFO);
    let fleet = fleet();
    let real = ten(&fleet, "mine").await;
    let mut others = Vec::new();
    for n in 0..100 {
        let id = format!("other-{n}");
        let me = register(&fleet, &id, "others").await;
        fleet.beat(beat(&id, me, 1)).unwrap();
        others.push((id, me));
    }
    // Of the others some are silent too, but not too many.
    let alive: Vec<(&str, Incarnation)> = named(&others[20..]);
    let mut sequence = 1;
    pass(&fleet, 60, &alive, &mut sequence).await;
    let told = kept.text();
    let line = |what: &str| {
        let mut lines = told.lines().filter(|line| line.contains(what));
        let line = lines.next().unwrap_or_else(|| panic!("{told}"));
        assert_eq!(lines.next(), None, "{told}");
        line.to_owned()
    };
    let spared = line("fell silent at once");
    for told in ["silent=10 ", "fleet=10 ", "principals=1"] {
        assert!(format!("{spared} ").contains(told), "{spared}");
    }
    let back: Vec<(&str, Incarnation)> = alive.into_iter().chain(named(&real)).collect();
    pass(&fleet, 10, &back, &mut sequence).await;
    assert!(kept.text().contains("called dead again"), "{}", kept.text());
}

/// Ghosts that beat on must not hide that all real ones fell silent, either.
#[tokio::test(start_paused = true)]
async fn many_that_beat_do_not_end_the_sparing_of_another_principals() {
    let fleet = fleet();
    let real = ten(&fleet, "mine").await;
    let mut ghosts = Vec::new();
    for n in 0..100 {
        let id = format!("ghost-{n}");
        let me = register(&fleet, &id, "stranger").await;
        ghosts.push((id, me));
    }
    pass(&fleet, 60, &named(&ghosts), &mut 0).await;
    for (id, _) in &real {
        assert_eq!(state_of(&fleet, &target(&fleet, id, 0)), RankState::Held);
    }
}

/// Sidecars with credentials of their own are a fleet too.
#[tokio::test(start_paused = true)]
async fn silence_of_many_principals_spares_them_all() {
    let fleet = fleet();
    let ids: Vec<String> = (0..6).map(|n| format!("r{n}")).collect();
    let mut all = Vec::new();
    for id in &ids {
        let me = register(&fleet, id, &format!("sidecar of {id}")).await;
        fleet.beat(beat(id, me, 1)).unwrap();
        all.push((id.as_str(), me));
    }
    let mut sequence = 1;
    pass(&fleet, 60, &all[..3], &mut sequence).await;
    // Two without any single one of the three are not many.
    for id in &ids[3..] {
        assert_eq!(health(&fleet, id), Health::Dead);
    }
    pass(&fleet, 60, &[], &mut sequence).await;
    for id in &ids[..3] {
        assert_eq!(health(&fleet, id), Health::Dead);
    }

    let fleet = super::fleet();
    for id in &ids {
        let me = register(&fleet, id, &format!("sidecar of {id}")).await;
        fleet.beat(beat(id, me, 1)).unwrap();
    }
    pass(&fleet, 60, &[], &mut 1).await;
    for id in &ids {
        assert_eq!(state_of(&fleet, &target(&fleet, id, 0)), RankState::Held);
    }
}

fn bounded(all: usize, of_principal: usize) -> Arc<Fleet> {
    let config = FleetConfig {
        max_replicas: all,
        max_replicas_per_principal: of_principal,
        ..FleetConfig::default()
    };
    Fleet::new(config, Arc::new(MemoryStore::default()))
}

#[tokio::test(start_paused = true)]
async fn a_principal_has_no_more_replicas_than_it_may_and_others_still_come() {
    let fleet = bounded(10, 2);
    let first = register(&fleet, "a", "mine").await;
    register(&fleet, "b", "mine").await;
    let refused = fleet.register_by(facts("c", "boot"), who("mine")).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.reason, Reason::FleetFull);
    for word in ["max-replicas-per-principal", "mine", "2 replicas"] {
        assert!(refused.message.contains(word), "{}", refused.message);
    }
    // A repeated registration and a new start are no newcomers.
    register(&fleet, "a", "mine").await;
    let again = fleet.register_by(facts("b", "boot2"), who("mine")).await;
    again.unwrap();
    register(&fleet, "o", "other").await;

    // A dead one of its own gives way, and no other's.
    tokio::time::advance(Duration::from_secs(1)).await;
    let others = target(&fleet, "o", 0).incarnation;
    fleet.deregister(&ReplicaId::new("o"), others);
    let still = fleet.register_by(facts("c", "boot"), who("mine")).await;
    assert_eq!(reason(still), Reason::FleetFull);
    fleet.deregister(&ReplicaId::new("a"), first);
    register(&fleet, "c", "mine").await;
    let known: Vec<String> = fleet
        .list()
        .iter()
        .map(|r| r.facts.id.to_string())
        .collect();
    assert_eq!(known, ["b", "c", "o"]);

    // What another's dead one leaves counts as a newcomer.
    let taken = fleet.register_by(facts("o", "boot2"), who("mine")).await;
    assert_eq!(reason(taken), Reason::FleetFull);
    // Without a principal there is no bound but that of all.
    // The last of them takes the place of the dead one.
    for id in ["d", "e", "f", "g", "h", "i", "j", "k"] {
        fleet.register(facts(id, "boot")).await.unwrap();
    }
    assert_eq!(
        reason(fleet.register(facts("l", "boot")).await),
        Reason::FleetFull
    );
}

#[tokio::test(start_paused = true)]
async fn a_fleet_that_is_full_refuses_who_has_room_of_its_own() {
    let fleet = bounded(2, 5);
    register(&fleet, "a", "mine").await;
    let gone = register(&fleet, "b", "other").await;
    let full = fleet.register_by(facts("c", "boot"), who("mine")).await;
    let full = full.unwrap_err();
    assert_eq!(full.reason, Reason::FleetFull);
    assert!(!full.message.contains("principal"), "{}", full.message);
    fleet.deregister(&ReplicaId::new("b"), gone);
    register(&fleet, "c", "mine").await;
}

fn of_ranks(id: &str, ranks: u32) -> ReplicaFacts {
    let plain = facts(id, "boot");
    let rank = plain.ranks[0].clone();
    let ranks = (0..ranks).map(|number| RankFacts {
        rank: number,
        engine_rank: number,
        ..rank.clone()
    });
    ReplicaFacts {
        ranks: ranks.collect(),
        ..plain
    }
}

fn ranks_known(fleet: &Fleet) -> usize {
    fleet.list().iter().map(|r| r.ranks.len()).sum()
}

/// Few replicas of many ranks are a large fleet too.
#[tokio::test(start_paused = true)]
async fn a_principal_has_no_more_ranks_than_it_may() {
    let config = FleetConfig {
        max_ranks: 100,
        max_ranks_per_principal: 20,
        ..FleetConfig::default()
    };
    let fleet = Fleet::new(config, Arc::new(MemoryStore::default()));
    let register = async |id: &str, ranks: u32, by: Option<&str>| {
        let by = by.and_then(who);
        let registered = fleet.register_by(of_ranks(id, ranks), by).await;
        registered.map(|registered| registered.incarnation)
    };
    let mine = Some("mine");
    let a = register("a", 8, mine).await.unwrap();
    let b = register("b", 8, mine).await.unwrap();
    let refused = register("c", 8, mine).await.unwrap_err();
    assert_eq!(refused.reason, Reason::FleetFull);
    for word in [
        "max-ranks-per-principal",
        "mine",
        "16 ranks",
        "8 more",
        "20",
    ] {
        assert!(
            refused.message.contains(word),
            "{word}: {}",
            refused.message
        );
    }
    register("c", 4, mine).await.unwrap();
    // A start that is known may say it again, with fewer ranks, and not with more.
    assert_eq!(register("a", 8, mine).await.unwrap(), a);
    let grows = register("a", 9, mine).await;
    assert_eq!(reason(grows), Reason::FleetFull);
    assert_eq!(register("a", 7, mine).await.unwrap(), a);
    register("d", 1, mine).await.unwrap();
    assert_eq!(ranks_known(&fleet), 20);

    // As many of its own dead give way as there is need for, those first that have
    // been dead for longest, and none where that would not do.
    fleet.deregister(&ReplicaId::new("a"), a);
    tokio::time::advance(Duration::from_secs(1)).await;
    fleet.deregister(&ReplicaId::new("b"), b);
    assert_eq!(reason(register("e", 16, mine).await), Reason::FleetFull);
    assert_eq!(ranks_known(&fleet), 20);
    register("e", 7, mine).await.unwrap();
    assert!(fleet.get(&ReplicaId::new("a")).is_none());
    assert_eq!(ranks_known(&fleet), 20);
    register("f", 8, mine).await.unwrap();
    assert!(fleet.get(&ReplicaId::new("b")).is_none());

    // Who is nobody in particular has the fleet's bound.
    let refused = register("n", 81, None).await.unwrap_err();
    for word in ["max-ranks,", "20 ranks", "81 more", "100"] {
        assert!(
            refused.message.contains(word),
            "{word}: {}",
            refused.message
        );
    }
    register("n", 80, None).await.unwrap();
    let full = register("o", 1, Some("other")).await.unwrap_err();
    assert_eq!(full.reason, Reason::FleetFull);
    assert!(!full.message.contains("principal"), "{}", full.message);
}

/// Bounds that are lower than before refuse nobody who is there and does not grow.
#[tokio::test(start_paused = true)]
async fn lower_bounds_of_ranks_leave_out_what_no_longer_fits() {
    let fleet = Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()));
    for id in ["a", "b", "c"] {
        fleet.register(of_ranks(id, 8)).await.unwrap();
    }
    let config = FleetConfig {
        max_ranks: 20,
        max_ranks_per_principal: 7,
        ..FleetConfig::default()
    };
    let after = Fleet::new(config, Arc::new(MemoryStore::default()));
    let found = async |_| Found::Answers;
    assert_eq!(after.restore(fleet.notes(), found).await, 2);
    let again = after.register_by(of_ranks("a", 8), who("mine")).await;
    again.unwrap();
    let left = after.register_by(of_ranks("c", 8), who("mine")).await;
    assert_eq!(reason(left), Reason::FleetFull);
}
