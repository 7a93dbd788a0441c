//! Replicas that are drained, paused and watched.

use std::{collections::BTreeSet, time::Duration};

use berth::{
    engine::sim::PauseMode,
    fleet::snapshot::RankState,
    ids::ReplicaId,
    proto::{
        DrainReplicaRequest, GetPinRequest, GetReplicaRequest, GetStatsRequest, Replica,
        ReplicaHealth, ResumeReplicaRequest, RouteReason, SampleResponse, WatchFleetRequest,
        sampling_service_client::SamplingServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use futures_util::future::join_all;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::cluster::{
    Cluster, eventually, home, ids, instant, keyed, only, reason, refused, request, route, stepping,
};

fn seconds(seconds: i64) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos: 0 })
}

async fn drain(cluster: &Cluster, replica: &str, grace: i64) -> Result<Replica, Status> {
    let answer = cluster
        .operator()
        .drain_replica(DrainReplicaRequest {
            replica_id: replica.to_owned(),
            grace: seconds(grace),
            ..DrainReplicaRequest::default()
        })
        .await?;
    Ok(answer.into_inner().replica.unwrap())
}

async fn resume(cluster: &Cluster, replica: &str) -> Replica {
    let answer = cluster
        .operator()
        .resume_replica(ResumeReplicaRequest {
            replica_id: replica.to_owned(),
        })
        .await
        .unwrap();
    answer.into_inner().replica.unwrap()
}

async fn look(cluster: &Cluster, replica: &str) -> Replica {
    let answer = cluster
        .operator()
        .get_replica(GetReplicaRequest {
            replica_id: replica.to_owned(),
        })
        .await
        .unwrap();
    answer.into_inner().replica.unwrap()
}

async fn count(cluster: &Cluster, counter: &str) -> u64 {
    let stats = cluster.operator().get_stats(GetStatsRequest {}).await;
    stats.unwrap().into_inner().counters[counter]
}

fn served(response: &SampleResponse) -> (String, RouteReason) {
    let sample = only(response);
    assert_eq!(route(sample).attempts.len(), 1, "no attempt failed");
    (home(sample).0, route(sample).reason())
}

/// Waits until the control plane sees the rank so.
async fn seen_as(cluster: &Cluster, replica: &str, state: RankState) {
    let fleet = &cluster.playground.server().parts().fleet;
    eventually("the rank's state is seen", async || {
        let snapshot = fleet.snapshot();
        let mut ranks = snapshot.ranks.iter();
        ranks.any(|r| r.target.replica.as_str() == replica && r.state == state)
    })
    .await;
}

#[tokio::test]
async fn a_drain_lets_turns_finish_takes_nothing_new_and_moves_each_key_once() {
    let cluster = Cluster::start(3, stepping(Duration::from_millis(5))).await;
    let key = |i: u32| format!("t{i}");
    let turn = async |i: u32, tokens| {
        let prompt = ids(i, 64);
        let response = cluster.sample(keyed(&key(i), &prompt, tokens)).await;
        served(&response.unwrap())
    };
    // Two trajectories a replica.
    let homes: Vec<String> = join_all((0..6).map(|i| turn(i, 2)))
        .await
        .into_iter()
        .map(|(home, _)| home)
        .collect();
    let at_r0: Vec<u32> = (0..6).filter(|i| homes[*i as usize] == "r0").collect();
    assert_eq!(at_r0.len(), 2);

    // All in flight, for three seconds.
    let before = cluster.engine("r0").counters().received;
    let running = join_all((0..6).map(|i| turn(i, 600)));
    let driver = async {
        eventually("all are in flight", async || {
            let snapshot = cluster.playground.server().parts().fleet.snapshot();
            snapshot
                .ranks
                .iter()
                .map(|r| r.load.in_flight())
                .sum::<u64>()
                == 6
        })
        .await;
        let drained = drain(&cluster, "r0", 3600).await.unwrap();
        assert_eq!(drained.health(), ReplicaHealth::Draining);
        assert!(!drained.ranks[0].routable);
        assert_eq!(
            drained.ranks[0].not_routable,
            "it drains and takes no new work"
        );
        assert_eq!(drained.ranks[0].in_flight, 2);
        // New keys and keyless requests go elsewhere, though r0 is no busier.
        let keyless = join_all((20..26).map(|i| {
            let cluster = &cluster;
            async move { cluster.sample(request(&ids(i, 16), 2)).await.unwrap() }
        }));
        let new = join_all((10..16).map(|i| turn(i, 2)));
        for (home, why) in new.await {
            assert_ne!(home, "r0");
            assert_eq!(why, RouteReason::NewKey);
        }
        for response in keyless.await {
            assert_ne!(served(&response).0, "r0");
        }
    };
    let (finished, ()) = tokio::join!(running, driver);
    for (i, (home, why)) in finished.into_iter().enumerate() {
        assert_eq!((home, why), (homes[i].clone(), RouteReason::Pinned));
    }
    assert_eq!(cluster.engine("r0").counters().received - before, 2);

    // Within the grace keys go on where they live.
    for i in &at_r0 {
        assert_eq!(turn(*i, 2).await, ("r0".to_owned(), RouteReason::Pinned));
    }
    // Over: each moves, once, and others stay.
    let over = drain(&cluster, "r0", 0).await.unwrap();
    assert_eq!(over.drain.unwrap().grace_left, seconds(0));
    let received = cluster.engine("r0").counters().received;
    for i in 0..6 {
        let (home, why) = turn(i, 2).await;
        if at_r0.contains(&i) {
            assert_ne!(home, "r0");
            assert_eq!(why, RouteReason::Draining);
            assert_eq!(turn(i, 2).await, (home, RouteReason::Pinned));
        } else {
            assert_eq!(
                (home, why),
                (homes[i as usize].clone(), RouteReason::Pinned)
            );
        }
    }
    assert_eq!(cluster.engine("r0").counters().received, received);
    assert_eq!(count(&cluster, "keys_moved_draining").await, 2);
    assert_eq!(look(&cluster, "r0").await.ranks[0].live_pins, 0);

    // Resumed, it takes new keys, and none comes back.
    let resumed = resume(&cluster, "r0").await;
    assert_eq!(
        (resumed.health(), resumed.drain),
        (ReplicaHealth::Healthy, None)
    );
    for i in at_r0 {
        let (home, why) = turn(i, 2).await;
        assert_eq!(why, RouteReason::Pinned);
        assert_ne!(home, "r0");
    }
    assert_eq!(turn(30, 2).await, ("r0".to_owned(), RouteReason::NewKey));
    cluster.stop().await;
}

#[tokio::test]
async fn the_grace_runs_out_by_itself() {
    let cluster = Cluster::start(2, instant()).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
    let (old, _) = served(&first);
    drain(&cluster, &old, 1).await.unwrap();
    // Turn after turn, until one moves.
    for _ in 0..3000 {
        let turn = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
        match served(&turn) {
            (home, RouteReason::Draining) => {
                assert_ne!(home, old);
                let drain = look(&cluster, &old).await.drain.unwrap();
                assert_eq!(drain.grace_left, seconds(0));
                cluster.stop().await;
                return;
            }
            stayed => assert_eq!(stayed, (old.clone(), RouteReason::Pinned)),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it never moved");
}

#[tokio::test]
async fn turns_of_one_key_that_come_at_once_when_the_grace_is_over_move_together() {
    let cluster = Cluster::start(3, instant()).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
    let (old, _) = served(&first);
    drain(&cluster, &old, 0).await.unwrap();
    let turns = join_all((0..8).map(|_| cluster.sample(keyed("t", &prompt, 2)))).await;
    let turns: Vec<_> = turns.iter().map(|r| served(r.as_ref().unwrap())).collect();
    let homes: BTreeSet<_> = turns.iter().map(|(home, _)| home).collect();
    assert_eq!(homes.len(), 1, "{turns:?}");
    assert!(!homes.contains(&old));
    let moves = turns
        .iter()
        .filter(|(_, why)| *why == RouteReason::Draining);
    assert_eq!(moves.count(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn the_last_replica_is_not_drained_by_accident_and_its_absence_is_explained() {
    let cluster = Cluster::start(2, instant()).await;
    let pinned = cluster.sample(keyed("t", &ids(1, 64), 2)).await.unwrap();
    let (home, _) = served(&pinned);
    let other = if home == "r0" { "r1" } else { "r0" };
    drain(&cluster, other, 0).await.unwrap();
    // Repeated: no news.
    drain(&cluster, other, 0).await.unwrap();
    let status = drain(&cluster, &home, 0).await.unwrap_err();
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::FailedPrecondition, "LAST_REPLICA")
    );
    assert!(status.message().contains("last replica"), "{status}");
    cluster
        .operator()
        .drain_replica(DrainReplicaRequest {
            replica_id: home.clone(),
            grace: seconds(3600),
            allow_last: true,
            ..DrainReplicaRequest::default()
        })
        .await
        .unwrap();
    // Who lives there goes on; others are told what is the matter.
    let again = cluster.sample(keyed("t", &ids(1, 64), 2)).await.unwrap();
    assert_eq!(served(&again), (home.clone(), RouteReason::Pinned));
    for asked in [keyed("new", &ids(2, 8), 2), request(&ids(3, 8), 2)] {
        let status = refused(cluster.sample(asked).await, Code::Unavailable, "NO_REPLICA");
        assert!(status.message().contains("drains"), "{status}");
    }
    // The grace of the last one is over: the key has nowhere to go, and keeps its
    // home for the case that it is resumed.
    drain(&cluster, &home, 0).await.unwrap();
    let turn = cluster.sample(keyed("t", &ids(1, 64), 2)).await;
    refused(turn, Code::Unavailable, "NO_REPLICA");
    resume(&cluster, &home).await;
    let back = cluster.sample(keyed("t", &ids(1, 64), 2)).await.unwrap();
    assert_eq!(served(&back), (home, RouteReason::Pinned));
    cluster.stop().await;
}

#[tokio::test]
async fn what_is_wrong_with_a_drain_is_told() {
    let cluster = Cluster::start(1, instant()).await;
    let unknown = drain(&cluster, "nobody", 1).await.unwrap_err();
    assert_eq!(
        (unknown.code(), reason(&unknown).as_str()),
        (Code::NotFound, "REPLICA_NOT_FOUND")
    );
    for grace in [-1, 24 * 3600 + 1, i64::MAX] {
        let status = drain(&cluster, "r0", grace).await.unwrap_err();
        assert_eq!(
            (status.code(), reason(&status).as_str()),
            (Code::InvalidArgument, "INVALID_REQUEST")
        );
    }
    let resume = cluster
        .operator()
        .resume_replica(ResumeReplicaRequest::default())
        .await
        .unwrap_err();
    assert_eq!(reason(&resume), "REPLICA_NOT_FOUND");
    cluster.stop().await;
}

/// Multi-turn trajectories go on while a sidecar is told to end: no turn fails,
/// none is even tried twice, and all go on elsewhere.
#[tokio::test]
async fn a_sidecar_that_leaves_drains_and_deregisters_and_no_turn_fails() {
    let cluster = Cluster::start(2, stepping(Duration::from_millis(4))).await;
    let engine = berth::engine::sim::SimEngine::start(stepping(Duration::from_millis(4)))
        .await
        .unwrap();
    let mut config = SidecarConfig::new(cluster.playground.url(), engine.url(), "leaving");
    config.accelerator.ask_driver = false;
    config.drain_timeout = Duration::from_secs(10);
    let stop = CancellationToken::new();
    let sidecar = tokio::spawn(Sidecar::new(config).unwrap().run(stop.clone()));
    seen_as(&cluster, "leaving", RankState::Open).await;

    let over = CancellationToken::new();
    let trajectories = join_all((0..9u32).map(|i| {
        let (cluster, over) = (&cluster, over.clone());
        async move {
            let mut turns = Vec::new();
            // On until it is gone, and a turn more.
            loop {
                let last = over.is_cancelled();
                let asked = keyed(&format!("t{i}"), &ids(i, 64), 20);
                turns.push(served(&cluster.sample(asked).await.unwrap()));
                if last {
                    return turns;
                }
            }
        }
    }));
    let driver = async {
        eventually("turns run there", async || engine.counters().finished > 6).await;
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(60), sidecar)
            .await
            .expect("it ends")
            .unwrap()
            .unwrap();
        let gone = look(&cluster, "leaving").await;
        assert_eq!(gone.health(), ReplicaHealth::Dead);
        assert_eq!(gone.health_reason, "it deregistered");
        // At the very moment of its leave nothing is left.
        assert!(engine.history().iter().all(|r| r.ended.is_some()));
        engine.stop().await;
        over.cancel();
    };
    let (trajectories, ()) = tokio::join!(trajectories, driver);
    let mut moved = 0;
    for turns in trajectories {
        let (last, _) = turns.last().unwrap();
        assert_ne!(last, "leaving");
        let moves: Vec<_> = turns
            .iter()
            .filter(|(_, why)| *why != RouteReason::Pinned)
            .map(|(_, why)| *why)
            .collect();
        if turns[0].0 == "leaving" {
            moved += 1;
            assert_eq!(moves, [RouteReason::NewKey, RouteReason::Draining]);
        } else {
            assert_eq!(moves, [RouteReason::NewKey], "others stay");
        }
    }
    assert_eq!(moved, 3);
    cluster.stop().await;
}

/// Long beats: a machine that is slow shall not look like a replica that is.
fn patient(config: &mut berth::config::Config) {
    config.fleet.lease.interval = Duration::from_secs(1);
}

#[tokio::test]
async fn a_pause_for_a_weight_sync_is_a_detour_and_the_pin_stays() {
    let cluster = Cluster::with(2, stepping(Duration::from_millis(1)), patient).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
    let (home, _) = served(&first);
    cluster.engine(&home).pause(PauseMode::Abort).await;
    seen_as(&cluster, &home, RankState::Paused).await;
    let away = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
    let (there, why) = served(&away);
    assert_ne!(there, home);
    assert_eq!(why, RouteReason::Detour);
    let pin = cluster
        .operator()
        .get_pin(GetPinRequest {
            cache_affinity_key: "t".to_owned(),
            ..GetPinRequest::default()
        })
        .await
        .unwrap();
    assert_eq!(pin.into_inner().pin.unwrap().replica_id, home);
    cluster.engine(&home).resume();
    seen_as(&cluster, &home, RankState::Open).await;
    let back = cluster.sample(keyed("t", &prompt, 2)).await.unwrap();
    assert_eq!(served(&back), (home, RouteReason::Pinned));
    assert_eq!(count(&cluster, "detours").await, 1);
    cluster.stop().await;
}

#[tokio::test]
async fn where_all_are_paused_requests_wait_and_find_their_homes() {
    let cluster = Cluster::with(2, stepping(Duration::from_millis(1)), patient).await;
    let mut homes = Vec::new();
    for i in 0..4 {
        let first = cluster
            .sample(keyed(&format!("t{i}"), &ids(i, 64), 2))
            .await;
        homes.push(served(&first.unwrap()).0);
    }
    for replica in ["r0", "r1"] {
        cluster.engine(replica).pause(PauseMode::Abort).await;
    }
    for replica in ["r0", "r1"] {
        seen_as(&cluster, replica, RankState::Paused).await;
    }
    // Who does not have the time is told so, within it.
    let mut hasty = tonic::Request::new(keyed("t0", &ids(0, 64), 2));
    let header = "200m".parse().unwrap();
    hasty.metadata_mut().insert("grpc-timeout", header);
    // Not tonic's channel, which would enforce the header itself.
    let http = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let origin = cluster.playground.url().parse().unwrap();
    let mut client = SamplingServiceClient::with_origin(http, origin);
    let late = client.sample(hasty).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");

    let turns = join_all((0..4).map(|i| {
        let cluster = &cluster;
        async move {
            cluster
                .sample(keyed(&format!("t{i}"), &ids(i, 64), 2))
                .await
        }
    }));
    let keyless = cluster.sample(request(&ids(9, 16), 2));
    let sync = async {
        eventually("all wait", async || {
            count(&cluster, "waits_for_pause").await == 6
        })
        .await;
        // One after the other, as a trainer goes through its engines.
        for replica in ["r0", "r1"] {
            cluster.engine(replica).set_weight_version("2", false);
            cluster.engine(replica).resume();
            seen_as(&cluster, replica, RankState::Open).await;
        }
    };
    let (turns, keyless, ()) = tokio::join!(turns, keyless, sync);
    keyless.unwrap();
    for (turn, home) in turns.iter().zip(&homes) {
        let (there, why) = served(turn.as_ref().unwrap());
        // Those of the engine that came later took a detour over the first.
        let expected = if *home == there {
            RouteReason::Pinned
        } else {
            RouteReason::Detour
        };
        assert_eq!(why, expected);
    }
    for (i, home) in (0..4).zip(&homes) {
        let next = cluster
            .sample(keyed(&format!("t{i}"), &ids(i, 64), 2))
            .await;
        assert_eq!(served(&next.unwrap()), (home.clone(), RouteReason::Pinned));
    }
    cluster.stop().await;
}

#[tokio::test]
async fn the_fleet_is_watched_and_a_watch_does_not_hold_up_the_end() {
    let cluster = Cluster::start(2, instant()).await;
    let mut stream = cluster
        .operator()
        .watch_fleet(WatchFleetRequest::default())
        .await
        .unwrap()
        .into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert!(first.snapshot_end);
    let ids: Vec<_> = first
        .replicas
        .iter()
        .map(|r| r.replica_id.as_str())
        .collect();
    assert_eq!(ids, ["r0", "r1"]);
    let stats = cluster.operator().get_stats(GetStatsRequest {}).await;
    let stats = stats.unwrap().into_inner();
    assert_eq!((stats.watchers, stats.in_flight), (1, 0));
    assert_eq!(stats.version, env!("CARGO_PKG_VERSION"));

    drain(&cluster, "r1", 3600).await.unwrap();
    let change = loop {
        let message = stream.message().await.unwrap().unwrap();
        if !message.replicas.is_empty() {
            break message;
        }
    };
    assert_eq!(change.replicas.len(), 1);
    assert!(change.replicas[0].drain.as_ref().unwrap().by_operator);
    let fleet = &cluster.playground.server().parts().fleet;
    assert!(fleet.get(&ReplicaId::new("r1")).unwrap().drain.is_some());

    let begun = Instant::now();
    let watching = tokio::spawn(async move {
        loop {
            if let Err(status) = stream.message().await {
                return status;
            }
        }
    });
    cluster.stop().await;
    assert!(
        begun.elapsed() < Duration::from_secs(25),
        "the drain's bound is 30 s"
    );
    let status = watching.await.unwrap();
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::Unavailable, "SHUTTING_DOWN")
    );
}
