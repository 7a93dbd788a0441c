//! Engines that serve on while nobody hears of their sidecars.

use super::*;

async fn of(count: usize) -> (Arc<Fleet>, Vec<(String, Incarnation)>) {
    let fleet = fleet();
    let mut replicas = Vec::new();
    for id in ["a", "b", "c", "d", "e", "f"].into_iter().take(count) {
        let registered = fleet.register(facts(id, "boot")).await.unwrap();
        fleet.beat(beat(id, registered.incarnation, 1)).unwrap();
        replicas.push((id.to_owned(), registered.incarnation));
    }
    (fleet, replicas)
}

/// Whoever is sent something answers it.
async fn serve(fleet: &Fleet, seconds: u32) {
    for _ in 0..seconds {
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.tick(Instant::now(), Duration::ZERO);
        let snapshot = fleet.snapshot();
        for rank in &snapshot.ranks {
            fleet.answered(&rank.target, None, None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn who_answers_stays_a_last_resort_for_as_long_as_its_sidecar_is_silent() {
    for count in [1, 4, 6] {
        let (fleet, replicas) = of(count).await;
        serve(&fleet, 600).await;
        assert_eq!(states(&fleet), vec![RankState::Suspect; 2 * count]);
        // And is trusted again by two good beats.
        for sequence in [2, 3] {
            for (id, incarnation) in &replicas {
                fleet.beat(beat(id, *incarnation, sequence)).unwrap();
            }
        }
        assert_eq!(states(&fleet), vec![RankState::Open; 2 * count]);
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_spared_and_answers_is_a_suspect_again_whose_keys_stay() {
    let (fleet, _) = of(6).await;
    tokio::time::advance(Duration::from_secs(13)).await;
    fleet.tick(Instant::now(), Duration::ZERO);
    assert_eq!(states(&fleet), vec![RankState::Held; 12]);
    fleet.answered(&target(&fleet, "a", 0), None, None);
    fleet.tick(Instant::now(), Duration::ZERO);
    assert_eq!(
        states(&fleet)[..2],
        [RankState::Suspect, RankState::Suspect]
    );
    assert_eq!(states(&fleet)[2..], vec![RankState::Held; 10]);
}

#[tokio::test(start_paused = true)]
async fn what_else_speaks_against_a_silent_one_still_does() {
    let (fleet, replicas) = of(3).await;
    let said = |at: usize, state, ranks| Beat {
        state,
        ranks,
        ..beat(&replicas[at].0, replicas[at].1, 2)
    };
    let paused = RankReport {
        paused: true,
        ..report(0, true)
    };
    let beats = [
        said(0, ReportedState::Ready, vec![paused, report(1, false)]),
        said(1, ReportedState::Unhealthy, Vec::new()),
        said(2, ReportedState::Draining, Vec::new()),
    ];
    for beat in beats {
        fleet.beat(beat).unwrap();
    }
    tokio::time::advance(Duration::from_secs(7)).await;
    fleet.tick(Instant::now(), Duration::ZERO);
    for state in states(&fleet) {
        assert!(matches!(state, RankState::Closed(_)), "{state:?}");
    }
}
