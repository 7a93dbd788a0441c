//! Servers that say that their engines are dead, under paused time.

use super::*;

/// Without a port that could be asked, and would refuse.
fn portless(id: &str, boot: &str) -> ReplicaFacts {
    let mut facts = facts(id, boot);
    for rank in &mut facts.ranks {
        rank.url = "/".into();
    }
    facts
}

/// Moves time on in small steps, so that terms end and probes are due.
async fn wait(fleet: &Fleet, time: Duration) {
    tokio::time::advance(time).await;
    fleet.tick(Instant::now(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn one_word_ejects_all_ranks_behind_that_server_and_no_other() {
    let fleet = fleet();
    let mut two_servers = portless("a", "boot");
    two_servers.ranks.push(RankFacts {
        rank: 2,
        url: "/other".into(),
        ..two_servers.ranks[0].clone()
    });
    fleet.register(two_servers).await.unwrap();
    fleet.register(facts("b", "boot")).await.unwrap();
    fleet.said_dead(&target(&fleet, "a", 1));
    for rank in [0, 1] {
        let state = state_of(&fleet, &target(&fleet, "a", rank));
        assert!(matches!(state, RankState::Ejected(why) if why.contains("dead")));
    }
    assert_eq!(state_of(&fleet, &target(&fleet, "a", 2)), RankState::Open);
    assert_eq!(state_of(&fleet, &target(&fleet, "b", 0)), RankState::Open);
    assert_eq!(fleet.hangs_since(&target(&fleet, "a", 0)), None);
}

#[tokio::test(start_paused = true)]
async fn a_word_that_was_wrong_is_taken_back_by_probes() {
    let fleet = fleet();
    fleet.register(portless("a", "boot")).await.unwrap();
    let at = target(&fleet, "a", 0);
    fleet.said_dead(&at);
    assert!(!fleet.is_over(&at));
    wait(&fleet, Duration::from_secs(4)).await;
    assert!(fleet.trials().is_empty());
    wait(&fleet, Duration::from_secs(1)).await;
    for _ in 0..2 {
        assert_eq!(fleet.trials().iter().filter(|t| t.target == at).count(), 1);
        fleet.probed(&at, health::Probe::Passed);
    }
    assert_eq!(state_of(&fleet, &at), RankState::Open);
}

#[tokio::test(start_paused = true)]
async fn however_many_say_so_each_is_believed() {
    let (fleet, _) = five().await;
    for id in ["a", "b", "c", "d", "e"] {
        fleet.said_dead(&target(&fleet, id, 0));
    }
    assert!(
        states(&fleet)
            .iter()
            .all(|s| matches!(s, RankState::Ejected(_)))
    );
}

#[tokio::test(start_paused = true)]
async fn a_late_word_about_an_older_start_changes_nothing() {
    let fleet = fleet();
    fleet.register(facts("a", "boot1")).await.unwrap();
    let late = target(&fleet, "a", 0);
    fleet.register(facts("a", "boot2")).await.unwrap();
    fleet.said_dead(&late);
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}
