//! A control plane that is started again and finds a replica of which nobody can
//! say anything.

use std::time::Duration;

use berth::{
    engine::sim::{Faults, Hang, SimConfig, SimEngine},
    proto::{Replica, ReplicaHealth},
};

use crate::{
    eventually,
    process::Serve,
    sidecar,
    watcher::{healthy, operator, replicas},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_silent_at_a_restart_is_unverified_until_its_first_beat() {
    // A lease of a minute: what is seen is not its end.
    let options = ["--heartbeat-interval", "10s"];
    let mut serve = Serve::start(&options);
    let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
    let other = SimEngine::start(SimConfig::instant()).await.unwrap();
    let beside = sidecar(&serve.url, &engine.url(), "silent");
    let _beside_other = sidecar(&serve.url, &other.url(), "well");
    healthy(&serve.url, 2).await;
    // It is noted when it changes, which nobody waits for.
    tokio::time::sleep(Duration::from_millis(500)).await;
    beside.signal("-STOP");
    engine.set_faults(Faults {
        hang: Some(Hang::All),
        ..Faults::default()
    });
    serve.signal("-KILL");
    serve.ended().await;
    serve.restart(&options);

    let mut operator = operator(&serve.url);
    let found = replicas(&mut operator).await;
    let of = |id: &str| -> Replica {
        let found = found.iter().find(|r| r.replica_id == id);
        found.unwrap().clone()
    };
    let (silent, well) = (of("silent"), of("well"));
    assert_eq!(well.health(), ReplicaHealth::Healthy);
    assert_eq!(silent.health(), ReplicaHealth::Unverified);
    assert!(silent.health_reason.contains("restart"));
    assert!(silent.ranks.iter().all(|rank| !rank.routable));

    engine.clear_faults();
    beside.signal("-CONT");
    let mut after = None;
    eventually("its first beat is enough", async || {
        let found = replicas(&mut operator).await;
        after = found.into_iter().find(|r| r.replica_id == "silent");
        let health = after.as_ref().map(Replica::health);
        assert_ne!(health, Some(ReplicaHealth::Suspect));
        health == Some(ReplicaHealth::Healthy)
    })
    .await;
    let after = after.unwrap();
    assert_eq!(after.incarnation, silent.incarnation);
    assert!(after.ranks.iter().all(|rank| rank.routable));
}
