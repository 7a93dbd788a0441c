//! Under paused time, without a connection: what a reader gets that reads.

use std::collections::BTreeMap;

use futures_util::StreamExt;

use super::*;
use crate::{
    fleet::{
        Beat, FleetConfig,
        drain::DrainOrder,
        facts::{AdapterFacts, RankReport, ReplicaFacts, ReportedState, tests::plain},
    },
    ids::ReplicaId,
    store::memory::MemoryStore,
};

fn facts(id: &str) -> ReplicaFacts {
    ReplicaFacts {
        labels: [("b", "2"), ("a", "1")]
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        ..plain(id, "boot")
    }
}

struct Watched {
    fleet: Arc<Fleet>,
    watchers: Arc<Watchers>,
    drain: CancellationToken,
}

impl Watched {
    async fn with(replicas: usize) -> Self {
        let fleet = Fleet::new(FleetConfig::default(), Arc::new(MemoryStore::default()));
        for i in 0..replicas {
            fleet.register(facts(&format!("r{i:04}"))).await.unwrap();
        }
        Self {
            fleet,
            watchers: Arc::default(),
            drain: CancellationToken::new(),
        }
    }

    fn watch(&self, load: Option<Duration>) -> WatchStream {
        let place = self.watchers.admit().unwrap();
        stream(Arc::clone(&self.fleet), load, place, self.drain.clone())
    }

    fn order(&self, grace: u64) -> DrainOrder {
        DrainOrder {
            grace: Some(Duration::from_secs(grace)),
            allow_last: true,
            ..DrainOrder::default()
        }
    }
}

async fn next(stream: &mut WatchStream) -> proto::WatchFleetResponse {
    stream.next().await.unwrap().unwrap()
}

fn names(message: &proto::WatchFleetResponse) -> Vec<&str> {
    let ids = message.replicas.iter();
    ids.map(|r| r.replica_id.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn first_the_whole_fleet_then_changes() {
    let watched = Watched::with(2).await;
    let mut stream = watched.watch(None);
    let first = next(&mut stream).await;
    assert_eq!(names(&first), ["r0000", "r0001"]);
    assert!(first.snapshot_end);

    watched
        .fleet
        .drain(&ReplicaId::new("r0001"), watched.order(30))
        .unwrap();
    let second = next(&mut stream).await;
    assert_eq!(names(&second), ["r0001"]);
    assert_eq!(second.replicas[0].health(), proto::ReplicaHealth::Draining);
    assert!(second.replicas[0].drain.is_some() && !second.snapshot_end);

    // Forgotten ones are removed.
    let one = watched.fleet.get(&ReplicaId::new("r0000")).unwrap();
    watched.fleet.deregister(&one.facts.id, one.incarnation);
    assert_eq!(names(&next(&mut stream).await), ["r0000"]);
    let late = Instant::now() + Duration::from_secs(700);
    watched.fleet.tick(late, Duration::from_secs(700));
    assert_eq!(next(&mut stream).await.removed, ["r0000"]);
}

#[tokio::test(start_paused = true)]
async fn an_empty_fleet_is_a_snapshot_too() {
    let watched = Watched::with(0).await;
    let first = next(&mut watched.watch(None)).await;
    assert!(first.snapshot_end && first.replicas.is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_reads_late_gets_how_it_is_and_nothing_twice() {
    let watched = Watched::with(3).await;
    let mut stream = watched.watch(None);
    next(&mut stream).await;
    for _ in 0..100 {
        for replica in ["r0000", "r0001"] {
            let id = ReplicaId::new(replica);
            watched.fleet.drain(&id, watched.order(30)).unwrap();
            watched.fleet.resume(&id).unwrap();
        }
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    let id = ReplicaId::new("r0002");
    watched.fleet.drain(&id, watched.order(30)).unwrap();
    // Four hundred and one changes, of which one is left to see.
    assert_eq!(names(&next(&mut stream).await), ["r0002"]);
    // And then silence, but for a sign of life.
    let before = Instant::now();
    let alive = next(&mut stream).await;
    assert_eq!(alive, proto::WatchFleetResponse::default());
    assert_eq!(before.elapsed(), SIGN_OF_LIFE);
}

#[tokio::test(start_paused = true)]
async fn load_alone_is_told_only_to_who_asks_and_not_faster_than_asked() {
    let watched = Watched::with(1).await;
    let every = Duration::from_secs(2);
    let (mut without, mut with) = (watched.watch(None), watched.watch(Some(every)));
    next(&mut without).await;
    next(&mut with).await;
    let _sent = watched.fleet.snapshot().ranks[0].load.take(1);
    let start = Instant::now();
    let told = next(&mut with).await;
    assert_eq!(told.replicas[0].ranks[0].in_flight, 1);
    assert_eq!(start.elapsed(), every);
    // Nothing new: signs of life.
    assert!(next(&mut with).await.replicas.is_empty());
    assert!(next(&mut without).await.replicas.is_empty());
    // A pause is a change of state, told at once.
    let incarnation = watched.fleet.get(&ReplicaId::new("r0000")).unwrap();
    let start = Instant::now();
    watched
        .fleet
        .beat(Beat {
            replica: ReplicaId::new("r0000"),
            incarnation: incarnation.incarnation,
            sequence: 1,
            state: ReportedState::Ready,
            drain_grace: None,
            adapters: None,
            ranks: vec![RankReport {
                rank: 0,
                healthy: true,
                running: 3,
                waiting: 0,
                waiting_uncached_tokens: 0,
                kv_used_tokens: 0,
                weight_version: "1".into(),
                paused: true,
            }],
        })
        .unwrap();
    let told = next(&mut without).await;
    assert!(told.replicas[0].ranks[0].reported.as_ref().unwrap().paused);
    assert!(start.elapsed() <= LEAST_PAUSE);
}

/// A registration may hold a thousand adapters: counting replicas, or ranks, would
/// not bound a message.
#[tokio::test(start_paused = true)]
async fn a_large_fleet_comes_in_pieces() {
    let watched = Watched::with(0).await;
    for i in 0..40 {
        let adapter = |n: usize| AdapterFacts {
            name: format!("{n:0200}").into(),
            load_id: String::new(),
            resident: true,
        };
        let large = ReplicaFacts {
            adapters: (0..1024).map(adapter).collect(),
            ..facts(&format!("r{i:04}"))
        };
        watched.fleet.register(large).await.unwrap();
    }
    let mut stream = watched.watch(None);
    let mut seen = 0;
    let mut pieces = 0;
    loop {
        let piece = next(&mut stream).await;
        assert!(piece.encoded_len() < 4 << 20);
        pieces += 1;
        seen += piece.replicas.len();
        if piece.snapshot_end {
            break;
        }
    }
    assert_eq!(seen, 40);
    // 8 MB and more.
    assert!((4..=8).contains(&pieces), "{pieces}");
}

#[test]
fn those_that_are_gone_come_in_pieces_too() {
    let gone: Vec<String> = (0..40_000).map(|n| format!("{n:0128}")).collect();
    let pieces = messages(Vec::new(), gone.clone());
    assert!(pieces.iter().all(|piece| piece.encoded_len() < 4 << 20));
    let told: Vec<String> = pieces.into_iter().flat_map(|piece| piece.removed).collect();
    assert_eq!(told, gone);
    assert!(messages(Vec::new(), Vec::new()).is_empty());
}

#[tokio::test(start_paused = true)]
async fn watchers_are_bounded_and_a_place_is_free_again() {
    let watched = Watched::with(1).await;
    let mut all: Vec<_> = (0..MAX_WATCHERS).map(|_| watched.watch(None)).collect();
    let refused = watched.watchers.admit().err().unwrap();
    assert_eq!(refused.reason, Reason::TooManyWaiters);
    all.pop();
    assert!(watched.watchers.admit().is_ok());
}

#[tokio::test(start_paused = true)]
async fn it_ends_with_the_server_and_says_so() {
    let watched = Watched::with(1).await;
    let mut stream = watched.watch(None);
    next(&mut stream).await;
    watched.drain.cancel();
    let status = stream.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(stream.next().await.is_none());
    drop(stream);
    assert_eq!(watched.watchers.count.load(Ordering::Relaxed), 0);
}
