//! Ranks that hang, fail or die behind a server that looks well.

use std::time::Duration;

use berth::{
    config::Config,
    engine::sim::{Cut, CutWhen, Faults, Hang, PauseMode, SimConfig, SimEngine, Times},
    fleet::{Health, health::Standing, snapshot::RankState},
    ids::{ReplicaId, Target},
    proto::{AttemptFailure, GetStatsRequest, ReplicaHealth, RouteReason, SampleRequest},
};
use futures_util::future::join_all;

use crate::cluster::{
    Cluster, cached, eventually, expected, home, ids, instant, keyed, only, request, route,
    stepping,
};

const MS: Duration = Duration::from_millis(1);

/// A control plane that gives up soon.
fn impatient(config: &mut Config) {
    // A machine that is busy with other tests must not look like silence.
    config.fleet.lease.interval = Duration::from_secs(1);
    let health = &mut config.fleet.health;
    health.hang_after = Duration::from_secs(2);
    health.slowest_prefill = 1_000_000;
    health.slowest_decode = 1_000_000;
    health.first_term = 300 * MS;
    health.fence_after = 300 * MS;
    health.eject_after = 3;
}

fn target(cluster: &Cluster, replica: &str, rank: u32) -> Target {
    let fleet = &cluster.playground.server().parts().fleet;
    let replica = ReplicaId::new(replica);
    Target {
        incarnation: fleet.get(&replica).unwrap().incarnation,
        replica,
        rank,
    }
}

fn standing(cluster: &Cluster, target: &Target) -> Standing {
    let fleet = &cluster.playground.server().parts().fleet;
    fleet.standing(target).unwrap()
}

fn is_open(cluster: &Cluster, target: &Target) -> bool {
    let snapshot = cluster.playground.server().parts().fleet.snapshot();
    snapshot
        .find(target)
        .is_some_and(|rank| rank.state == RankState::Open)
}

async fn count(cluster: &Cluster, name: &str) -> u64 {
    let stats = cluster.operator().get_stats(GetStatsRequest {}).await;
    stats.unwrap().into_inner().counters[name]
}

/// Turns of twelve trajectories at once, in order of their keys.
async fn turns(cluster: &Cluster) -> Vec<berth::proto::SampleResult> {
    let prompts: Vec<_> = (0..12).map(|i| ids(i, 64)).collect();
    let running = prompts.iter().enumerate().map(async |(i, prompt)| {
        let response = cluster.sample(keyed(&format!("t{i}"), prompt, 8)).await;
        let sample = only(&response.unwrap()).clone();
        assert_eq!(sample.token_ids, expected(prompt, 8));
        sample
    });
    join_all(running).await
}

/// Its sidecar lives on, and nobody sends it anything.
#[tokio::test]
async fn an_engine_that_its_sidecar_calls_unwell_and_whose_port_refuses_is_dead() {
    let cluster = Cluster::with(2, instant(), impatient).await;
    cluster.engine("r0").kill().await;
    let get = |id| {
        let fleet = &cluster.playground.server().parts().fleet;
        fleet.get(&ReplicaId::new(id)).unwrap()
    };
    eventually("it is dead", async || get("r0").health == Health::Dead).await;
    assert!(get("r0").reason.contains("refuses"), "{}", get("r0").reason);
    assert_eq!(get("r1").health, Health::Healthy);
    cluster.stop().await;
}

/// CASES 22: it takes requests and never answers, while its health looks good.
#[tokio::test]
async fn an_engine_that_hangs_loses_its_keys_and_gets_nothing_until_probes_pass() {
    let cluster = Cluster::with(3, instant(), impatient).await;
    let before = turns(&cluster).await;
    let hung = target(&cluster, &home(&before[0]).0, 0);
    let engine = cluster.engine(hung.replica.as_str());
    engine.set_faults(Faults {
        hang: Some(Hang::Generate),
        ..Faults::default()
    });
    let during = turns(&cluster).await;
    for (before, during) in before.iter().zip(&during) {
        if home(before).0 == hung.replica.as_str() {
            assert_ne!(home(during).0, hung.replica.as_str());
            assert_eq!(route(during).reason(), RouteReason::ReplicaLost);
            let attempts = &route(during).attempts;
            assert_eq!(attempts[0].failure(), AttemptFailure::Silent);
            assert_eq!(attempts.len(), 2);
        } else {
            assert_eq!(route(during).reason(), RouteReason::Pinned);
            assert_eq!((home(during), cached(during)), (home(before), 63));
            assert_eq!(route(during).attempts.len(), 1, "unharmed");
        }
    }
    assert!(matches!(
        standing(&cluster, &hung),
        Standing::Ejected { .. } | Standing::OnTrial { .. }
    ));
    let list = cluster
        .operator()
        .list_replicas(berth::proto::ListReplicasRequest::default())
        .await
        .unwrap()
        .into_inner()
        .replicas;
    let shown = list.iter().find(|r| r.replica_id == hung.replica.as_str());
    assert_eq!(shown.unwrap().health(), ReplicaHealth::Unhealthy);
    assert!(shown.unwrap().health_reason.contains("answers none"));

    // Nothing but probes comes there now, and they do not pass.
    let received = engine.counters().received;
    let probed = || engine.counters().received > received;
    eventually("it is probed", async || probed()).await;
    let after = turns(&cluster).await;
    for (during, after) in during.iter().zip(&after) {
        assert_eq!(home(during), home(after));
        assert_eq!(route(after).reason(), RouteReason::Pinned);
        assert_eq!(cached(after), 63, "warm where it went");
    }
    assert!(!is_open(&cluster, &hung));

    engine.clear_faults();
    eventually("it is back", async || is_open(&cluster, &hung)).await;
    for (after, back) in after.iter().zip(turns(&cluster).await) {
        assert_eq!(home(after), home(&back), "no key comes back");
    }
    let answers = (100..130).map(async |i| {
        let response = cluster.sample(request(&ids(i, 32), 4)).await.unwrap();
        home(only(&response)).0
    });
    let homes = join_all(answers).await;
    assert!(homes.iter().any(|h| *h == hung.replica.as_str()));
    cluster.stop().await;
}

/// Nothing there answers, aborts included: what was sent is given up a bound after
/// the rank was ejected.
#[tokio::test]
async fn an_engine_that_answers_no_abort_either_is_left_behind_within_the_bound() {
    let cluster = Cluster::with(2, instant(), |config| {
        impatient(config);
        // Not its lease that ends it: a sidecar waits a second for a silent engine.
        config.fleet.lease.interval = Duration::from_secs(2);
    })
    .await;
    let before = turns(&cluster).await;
    let hung = home(&before[0]).0;
    cluster.engine(&hung).set_faults(Faults {
        hang: Some(Hang::All),
        ..Faults::default()
    });
    let asked = || SampleRequest {
        idempotency_key: Some("once".to_owned()),
        ..keyed("t0", &ids(0, 64), 8)
    };
    let begun = tokio::time::Instant::now();
    let answer = cluster.sample(asked()).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(15));
    let sample = only(&answer);
    assert_eq!(sample.token_ids, expected(&ids(0, 64), 8));
    assert_ne!(home(sample).0, hung);
    assert_eq!(route(sample).attempts[0].failure(), AttemptFailure::Silent);
    assert_eq!(count(&cluster, "attempts_left_behind").await, 1);
    assert_eq!(count(&cluster, "unknown_outcomes").await, 0);
    // What the store has is what was told.
    let again = cluster.sample(asked()).await.unwrap();
    assert!(again.replayed);
    assert_eq!(again.samples, answer.samples);
    cluster.engine(&hung).clear_faults();
    cluster.stop().await;
}

#[tokio::test]
async fn an_engine_that_hangs_in_mid_stream_is_found_too() {
    let cluster = Cluster::with(2, stepping(5 * MS), impatient).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let at = home(only(&first));
    let turn = tokio::spawn({
        let mut client = cluster.client();
        let request = keyed("t", &prompt, 200);
        async move { client.sample(request).await }
    });
    eventually("it runs", async || {
        cluster.engine(&at.0).counters().started == 2
    })
    .await;
    tokio::time::sleep(50 * MS).await;
    // Its scheduler dies; the server stays up and answers everything else.
    cluster.engine(&at.0).set_faults(Faults {
        dead_ranks: vec![0],
        ..Faults::default()
    });
    let response = turn.await.unwrap().unwrap().into_inner();
    let sample = only(&response);
    assert_eq!(sample.token_ids, expected(&prompt, 200));
    assert_ne!(home(sample), at);
    assert_eq!(route(sample).attempts[0].failure(), AttemptFailure::Silent);
    // A dead rank never has nothing to do: its sidecar would wait for that.
    cluster.engine(&at.0).kill().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_long_prefill_is_no_hang() {
    let slow = SimConfig {
        chunked_prefill_size: 512,
        ..stepping(300 * MS)
    };
    let cluster = Cluster::with(1, slow, |config| {
        impatient(config);
        // 4,096 tokens in eight steps take 2.4 s, without a sign: they may take 4 on top.
        config.fleet.health.slowest_prefill = 1000;
    })
    .await;
    let prompt = ids(1, 4096);
    let response = cluster.sample(request(&prompt, 2)).await.unwrap();
    assert_eq!(only(&response).token_ids, expected(&prompt, 2));
    assert_eq!(route(only(&response)).attempts.len(), 1);
    cluster.stop().await;
}

/// One request that waits for long behind others on the same rank.
#[tokio::test]
async fn a_request_in_the_queue_behind_others_is_no_hang() {
    let narrow = SimConfig {
        max_running_requests: 1,
        ..stepping(20 * MS)
    };
    let cluster = Cluster::with(1, narrow, impatient).await;
    let prompts: Vec<_> = (0..4).map(|i| ids(i, 32)).collect();
    // Each runs for 1.6 s, one after the other: far more than the patience.
    let answers = join_all(prompts.iter().map(|p| cluster.sample(request(p, 80)))).await;
    for answer in answers {
        assert_eq!(route(only(&answer.unwrap())).attempts.len(), 1);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn an_engine_that_fails_everything_is_ejected_and_returns_when_it_is_mended() {
    let cluster = Cluster::with(3, instant(), impatient).await;
    let bad = target(&cluster, "r0", 0);
    let engine = cluster.engine("r0");
    engine.set_faults(Faults {
        failing: Some(Times::Always),
        ..Faults::default()
    });
    let mut seed = 0;
    eventually("it is ejected", async || {
        seed += 1;
        // Whoever meets it is answered by another.
        let prompt = ids(seed, 32);
        let response = cluster.sample(request(&prompt, 4)).await.unwrap();
        assert_eq!(only(&response).token_ids, expected(&prompt, 4));
        standing(&cluster, &bad) != Standing::Trusted
    })
    .await;
    for i in 0..20 {
        let response = cluster.sample(request(&ids(i, 32), 4)).await.unwrap();
        assert_eq!(route(only(&response)).attempts.len(), 1, "nobody meets it");
    }
    engine.clear_faults();
    eventually("it is back", async || is_open(&cluster, &bad)).await;
    cluster.stop().await;
}

#[tokio::test]
async fn one_reset_connection_condemns_nobody() {
    let cluster = Cluster::with(2, instant(), impatient).await;
    let before = turns(&cluster).await;
    for engine in cluster.engines() {
        engine.set_faults(Faults {
            cut: Some(Cut {
                times: Times::Next(1),
                when: CutWhen::AtOnce,
            }),
            ..Faults::default()
        });
    }
    turns(&cluster).await;
    for replica in ["r0", "r1"] {
        let at = target(&cluster, replica, 0);
        assert_eq!(standing(&cluster, &at), Standing::Trusted);
        assert!(is_open(&cluster, &at));
    }
    let moved = turns(&cluster)
        .await
        .iter()
        .zip(&before)
        .filter(|(after, before)| home(after) != home(before))
        .count();
    assert!(moved <= 2, "only those whose connection broke: {moved}");
    cluster.stop().await;
}

/// CASES 23: 503 is load, not death.
#[tokio::test]
async fn a_storm_of_503_ejects_nobody_and_moves_no_key() {
    let cluster = Cluster::with(2, instant(), impatient).await;
    let before = turns(&cluster).await;
    let full = target(&cluster, &home(&before[0]).0, 0);
    let engine = cluster.engine(full.replica.as_str());
    let received = engine.counters().received;
    engine.set_faults(Faults {
        unavailable: Some(Times::Always),
        ..Faults::default()
    });
    let (after, ()) = tokio::join!(turns(&cluster), async {
        eventually("it has refused often", async || {
            engine.counters().received > received + 12
        })
        .await;
        engine.clear_faults();
    });
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(home(before), home(after));
        assert_eq!(route(after).reason(), RouteReason::Pinned);
        assert_eq!(cached(after), 63, "warm");
    }
    assert_eq!(standing(&cluster, &full), Standing::Trusted);
    cluster.stop().await;
}

/// Real SGLang, recorded: a rank's scheduler dies, its server stays up and looks
/// ready, and the first message to the dead rank hangs all of its ranks.
#[tokio::test]
async fn a_dead_rank_behind_a_living_server_gets_nothing_and_neither_does_a_dead_replica() {
    let mut cluster = Cluster::with(0, instant(), |config| {
        impatient(config);
        config.fleet.lease.interval = 500 * MS;
        // The sidecar's word is what counts here.
        config.fleet.health.hang_after = Duration::from_secs(60);
    })
    .await;
    let two = SimConfig {
        ranks: 2,
        ..instant()
    };
    for id in ["r0", "r1"] {
        cluster
            .playground
            .add_with(id, two.clone(), |sidecar| {
                sidecar.timing.frozen_after = 300 * MS;
            })
            .await
            .unwrap();
    }
    let ranks: Vec<Target> = (0..2).map(|rank| target(&cluster, "r0", rank)).collect();
    let kill = |dead: &[u32]| {
        cluster.engine("r0").set_faults(Faults {
            dead_ranks: dead.to_vec(),
            ..Faults::default()
        });
    };
    let first = turns(&cluster).await;
    kill(&[1]);
    eventually("the rank is out", async || !is_open(&cluster, &ranks[1])).await;
    assert!(is_open(&cluster, &ranks[0]), "the other rank stays");
    // Long enough, and its keys move for good.
    eventually("its keys move", async || {
        let snapshot = cluster.playground.server().parts().fleet.snapshot();
        let state = &snapshot.find(&ranks[1]).unwrap().state;
        matches!(state, RankState::Ejected(_))
    })
    .await;
    for (before, after) in first.iter().zip(turns(&cluster).await) {
        if home(before) == ("r0".to_owned(), 1) {
            assert_ne!(home(&after), home(before));
            assert_eq!(route(&after).reason(), RouteReason::ReplicaLost);
        } else {
            assert_eq!(home(&after), home(before));
        }
    }
    kill(&[0, 1]);
    eventually("the replica is out", async || {
        let replica = cluster
            .playground
            .server()
            .parts()
            .fleet
            .get(&ranks[0].replica);
        replica.is_some_and(|r| {
            r.health == berth::fleet::Health::Unhealthy && r.ranks.iter().all(|r| !r.routable())
        })
    })
    .await;
    for sample in turns(&cluster).await {
        assert_eq!(home(&sample).0, "r1");
    }
    assert!(
        !cluster.engine("r0").is_wedged(),
        "no message went to a dead rank, no probe either"
    );
    cluster.stop().await;
}

/// While it is paused timestamps stand still with every right.
#[tokio::test]
async fn a_paused_engine_is_not_dead_and_keeps_its_keys() {
    let mut cluster = Cluster::with(0, instant(), |config| {
        impatient(config);
        config.fleet.lease.interval = 500 * MS;
    })
    .await;
    for id in ["r0", "r1"] {
        cluster
            .playground
            // On its own clock: a paused engine leaves `/health` unanswered for 20 s.
            .add_with(id, stepping(MS), |sidecar| {
                sidecar.timing.frozen_after = 300 * MS;
            })
            .await
            .unwrap();
    }
    let before = turns(&cluster).await;
    let paused = target(&cluster, &home(&before[0]).0, 0);
    let engine = cluster.engine(paused.replica.as_str()).clone();
    engine.pause(PauseMode::InPlace).await;
    eventually("it is known", async || !is_open(&cluster, &paused)).await;
    // Far longer than a dead rank's or a hanging one's time.
    let until = tokio::time::Instant::now() + Duration::from_secs(4);
    while tokio::time::Instant::now() < until {
        tokio::time::sleep(50 * MS).await;
        let snapshot = cluster.playground.server().parts().fleet.snapshot();
        let state = snapshot.find(&paused).unwrap().state.clone();
        assert_eq!(state, RankState::Paused);
    }
    engine.resume();
    eventually("it is open", async || is_open(&cluster, &paused)).await;
    for (before, after) in before.iter().zip(turns(&cluster).await) {
        assert_eq!(home(before), home(&after));
        assert_eq!(cached(&after), 63);
    }
    cluster.stop().await;
}

/// A restarted engine's cache is empty, whoever lived there.
#[tokio::test]
async fn a_restarted_engine_inherits_no_pins_warmth() {
    let cluster = Cluster::with(1, instant(), impatient).await;
    let prompt = ids(1, 64);
    cluster.sample(keyed("t", &prompt, 8)).await.unwrap();
    let old = target(&cluster, "r0", 0);
    let revived = cluster.engine("r0").restart().await.unwrap();
    eventually("the new start is known", async || {
        target(&cluster, "r0", 0).incarnation > old.incarnation
            && is_open(&cluster, &target(&cluster, "r0", 0))
    })
    .await;
    let response = cluster.sample(keyed("t", &prompt, 8)).await.unwrap();
    let sample = only(&response);
    assert_eq!(route(sample).reason(), RouteReason::ReplicaLost);
    assert_eq!(route(sample).expected_cached_tokens, 0);
    assert_eq!(cached(sample), 0);
    assert!(route(sample).incarnation > old.incarnation.0);
    let warm = cluster.sample(keyed("t", &prompt, 8)).await.unwrap();
    assert_eq!(route(only(&warm)).reason(), RouteReason::Pinned);
    assert_eq!(route(only(&warm)).expected_cached_tokens, 63);
    revived.stop().await;
    cluster.stop().await;
}

/// Nobody hears of them any more, and they serve: that is no outage.
#[tokio::test]
async fn engines_whose_sidecars_are_all_silent_serve_on_and_keep_their_keys() {
    let interval = 500 * MS;
    let cluster = Cluster::with(0, instant(), |c| c.fleet.lease.interval = interval).await;
    let mut engines = Vec::new();
    for i in 0..2 {
        let engine = SimEngine::start(instant()).await.unwrap();
        cluster.register(&format!("r{i}"), &engine).await;
        engines.push(engine);
    }
    let turn = async |key: u32| {
        let asked = keyed(&format!("t{key}"), &ids(key, 32), 4);
        let response = cluster.sample(asked).await.unwrap();
        home(only(&response))
    };
    let mut homes = Vec::new();
    for key in 0..8 {
        homes.push(turn(key).await);
    }
    // Twice as long as it takes to be dead, once both are suspect: while only one is,
    // its keys are the other's to serve.
    let fleet = &cluster.playground.server().parts().fleet;
    let suspect = || fleet.list().iter().all(|r| r.health == Health::Suspect);
    eventually("both are suspect", async || suspect()).await;
    let end = tokio::time::Instant::now() + interval * 12;
    while tokio::time::Instant::now() < end {
        for (key, home) in (0..).zip(&homes) {
            assert_eq!(turn(key).await, *home);
        }
        tokio::time::sleep(20 * MS).await;
    }
    for replica in fleet.list() {
        assert_eq!(replica.health, Health::Suspect, "{}", replica.reason);
    }
    assert!(count(&cluster, "last_resorts").await > 0);
    cluster.stop().await;
    for engine in engines {
        engine.stop().await;
    }
}
