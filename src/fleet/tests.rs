//! Registration, heartbeats and leases, under paused time.

use std::collections::BTreeMap;

use super::{
    facts::{Accelerator, Capabilities, EngineKind, RankFacts},
    *,
};
use crate::{call::LogprobMode, ids::BootId, store::memory::MemoryStore};

fn fleet() -> Arc<Fleet> {
    Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()))
}

fn facts(id: &str, boot: &str) -> ReplicaFacts {
    let rank = |rank| RankFacts {
        rank,
        url: "http://127.0.0.1:1".into(),
        engine_rank: rank,
        gpu_uuids: Vec::new(),
        kv_capacity: 1000,
        max_running: 0,
    };
    ReplicaFacts {
        id: ReplicaId::new(id),
        boot: BootId::new(boot),
        url: "http://127.0.0.1:1".into(),
        engine: EngineKind::Sglang,
        engine_version: "0".to_owned(),
        model: "m".into(),
        vocab_size: None,
        context_length: 100,
        weight_version: "1".into(),
        adapters: Vec::new(),
        capabilities: Capabilities::default(),
        accelerator: Accelerator::default(),
        ranks: vec![rank(0), rank(1)],
        page_size: 1,
        logprob_mode: LogprobMode::Unknown,
        labels: BTreeMap::new(),
    }
}

fn beat(id: &str, incarnation: Incarnation, sequence: u64) -> Beat {
    Beat {
        replica: ReplicaId::new(id),
        incarnation,
        sequence,
        state: ReportedState::Ready,
        drain_grace: None,
        ranks: Vec::new(),
    }
}

fn states(fleet: &Fleet) -> Vec<RankState> {
    let snapshot = fleet.snapshot();
    snapshot.ranks.iter().map(|r| r.state.clone()).collect()
}

fn reason(result: Result<impl Sized, Error>) -> Reason {
    result.err().expect("refused").reason
}

#[tokio::test(start_paused = true)]
async fn registration_is_idempotent_and_incarnations_only_grow() {
    let fleet = fleet();
    let first = fleet.register(facts("a", "boot1")).await.unwrap();
    let again = fleet.register(facts("a", "boot1")).await.unwrap();
    assert_eq!(first, again);
    assert_eq!(fleet.list().len(), 1);
    let slots: Vec<_> = fleet.snapshot().ranks.iter().map(|r| r.slot).collect();

    let restarted = fleet.register(facts("a", "boot2")).await.unwrap();
    assert!(restarted.incarnation > first.incarnation);
    assert_eq!(fleet.list().len(), 1);
    assert!(
        fleet
            .snapshot()
            .ranks
            .iter()
            .all(|r| !slots.contains(&r.slot)),
        "pins of the old start point at nothing"
    );
    // A zombie's word changes nothing.
    assert_eq!(
        reason(fleet.beat(beat("a", first.incarnation, 99))),
        Reason::StaleIncarnation
    );
    assert_eq!(
        reason(fleet.register(facts("a", "boot1")).await),
        Reason::StaleIncarnation
    );
    fleet.deregister(&ReplicaId::new("a"), first.incarnation);
    assert_eq!(fleet.snapshot().ranks.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_beat_from_nobody_is_told_to_register() {
    let fleet = fleet();
    assert_eq!(
        reason(fleet.beat(beat("a", Incarnation(1), 1))),
        Reason::Reregister
    );
}

#[tokio::test(start_paused = true)]
async fn silence_closes_then_kills_and_the_dead_are_told() {
    let fleet = fleet();
    let stop = CancellationToken::new();
    tokio::spawn(fleet.clone().keep(stop.clone()));
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);

    tokio::time::sleep(Duration::from_millis(6600)).await;
    assert!(matches!(states(&fleet)[0], RankState::Closed(_)));
    fleet.beat(beat("a", me, 1)).unwrap();
    assert!(
        matches!(states(&fleet)[0], RankState::Closed(_)),
        "one beat is not enough"
    );
    fleet.beat(beat("a", me, 2)).unwrap();
    assert_eq!(states(&fleet)[0], RankState::Open);

    tokio::time::sleep(Duration::from_millis(12_600)).await;
    assert!(states(&fleet).is_empty());
    assert_eq!(fleet.list()[0].health, Health::Dead);
    assert_eq!(
        reason(fleet.beat(beat("a", me, 3))),
        Reason::IncarnationDead
    );
    assert_eq!(
        reason(fleet.register(facts("a", "boot1")).await),
        Reason::IncarnationDead
    );
    assert!(fleet.register(facts("a", "boot2")).await.is_ok());
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn the_dead_are_forgotten_in_the_end() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    fleet.deregister(&ReplicaId::new("a"), me);
    assert_eq!(fleet.list().len(), 1);
    assert!(fleet.snapshot().lost_models.contains("m"));
    fleet.tick(Instant::now() + Duration::from_secs(601), Duration::ZERO);
    assert!(fleet.list().is_empty());
    assert!(fleet.snapshot().lost_models.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stall_of_the_control_plane_kills_nobody() {
    let fleet = fleet();
    fleet.register(facts("a", "boot1")).await.unwrap();
    let late = Instant::now() + Duration::from_secs(60);
    fleet.tick(late, Duration::from_secs(59));
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test(start_paused = true)]
async fn an_old_beat_is_ignored_and_ranks_close_one_by_one() {
    let fleet = fleet();
    let me = fleet
        .register(facts("a", "boot1"))
        .await
        .unwrap()
        .incarnation;
    let report = |rank, healthy, paused| RankReport {
        rank,
        healthy,
        running: 0,
        waiting: 0,
        waiting_uncached_tokens: 0,
        kv_used_tokens: 0,
        weight_version: "2".into(),
        paused,
    };
    let with = |sequence, ranks| Beat {
        ranks,
        ..beat("a", me, sequence)
    };
    // Rank 9 does not exist.
    fleet
        .beat(with(
            5,
            vec![report(0, true, true), report(9, false, false)],
        ))
        .unwrap();
    assert_eq!(states(&fleet), [RankState::Paused, RankState::Open]);
    assert_eq!(&*fleet.snapshot().ranks[0].weight_version, "2");
    assert_eq!(&*fleet.snapshot().ranks[1].weight_version, "1");
    fleet.beat(with(4, vec![report(0, true, false)])).unwrap();
    assert_ne!(states(&fleet)[0], RankState::Open, "sequence 4 is old");
    fleet.beat(with(6, vec![report(0, true, false)])).unwrap();
    assert_eq!(states(&fleet), [RankState::Open, RankState::Open]);
}

#[tokio::test]
async fn a_port_that_refuses_is_dead_at_once() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url: Arc<str> = format!("http://{}", listener.local_addr().unwrap()).into();
    let fleet = fleet();
    let mut facts = facts("a", "boot1");
    facts.url = Arc::clone(&url);
    for rank in &mut facts.ranks {
        rank.url = Arc::clone(&url);
    }
    fleet.register(facts).await.unwrap();
    let target = fleet.snapshot().ranks[0].target.clone();

    let mut changes = fleet.changes();
    fleet.unreachable(&target);
    // Somebody listens: not dead.
    let (accepted, _) = listener.accept().await.unwrap();
    drop(accepted);
    assert_eq!(fleet.snapshot().ranks.len(), 2);

    drop(listener);
    loop {
        fleet.unreachable(&target);
        if tokio::time::timeout(Duration::from_millis(50), changes.changed())
            .await
            .is_ok()
            && fleet.snapshot().ranks.is_empty()
        {
            break;
        }
    }
    assert_eq!(fleet.list()[0].reason, "its port refuses connections");
}

#[tokio::test(start_paused = true)]
async fn strangers_cannot_fill_the_registry() {
    let fleet = Fleet::new(
        FleetConfig {
            max_replicas: 2,
            ..FleetConfig::default()
        },
        Arc::new(MemoryStore::default()),
    );
    fleet.register(facts("a", "boot")).await.unwrap();
    fleet.register(facts("b", "boot")).await.unwrap();
    assert_eq!(
        reason(fleet.register(facts("c", "boot")).await),
        Reason::FleetFull
    );
    assert!(fleet.register(facts("b", "boot2")).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn incarnations_do_not_run_backwards_over_a_restart() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let before = Fleet::new(FleetConfig::default(), Arc::clone(&store));
    before.register(facts("a", "boot1")).await.unwrap();
    before.register(facts("a", "boot2")).await.unwrap();
    let after = Fleet::new(FleetConfig::default(), store);
    assert_eq!(
        reason(after.register(facts("a", "boot1")).await),
        Reason::StaleIncarnation
    );
    assert!(after.register(facts("a", "boot2")).await.is_ok());
}

mod drain;
