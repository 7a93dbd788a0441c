//! Weights: known by rank, asked for, waited for, and checked on the reply.

use std::time::Duration;

use berth::proto::{
    AttemptFailure, RouteReason, SampleRequest, WeightsConstraint, weights_constraint::Constraint,
};
use tonic::Code;

use crate::cluster::{
    Cluster, eventually, expected, home, ids, instant, keyed, only, refused, request, route,
    stepping,
};

fn exact(version: &str, wait: bool) -> Option<WeightsConstraint> {
    Some(WeightsConstraint {
        constraint: Some(Constraint::Exact(version.to_owned())),
        wait,
    })
}

fn at_least(version: u64, wait: bool) -> Option<WeightsConstraint> {
    Some(WeightsConstraint {
        constraint: Some(Constraint::AtLeast(version)),
        wait,
    })
}

fn engine(version: &str) -> berth::engine::sim::SimConfig {
    berth::engine::sim::SimConfig {
        weight_version: version.to_owned(),
        ..instant()
    }
}

/// Replicas r0, r1, ... of these versions, which are known from beats every
/// `interval`.
async fn cluster(versions: &[&str], interval: Duration) -> Cluster {
    let mut cluster = Cluster::with(0, instant(), |c| c.fleet.lease.interval = interval).await;
    for (i, version) in versions.iter().enumerate() {
        cluster
            .playground
            .add_with(&format!("r{i}"), engine(version), |_| {})
            .await
            .unwrap();
    }
    cluster
}

const SOON: Duration = Duration::from_millis(100);
/// Beats say nothing within a test.
const LATE: Duration = Duration::from_secs(30);

fn known(cluster: &Cluster, replica: &str) -> String {
    let snapshot = cluster.playground.server().parts().fleet.snapshot();
    let mut ranks = snapshot.ranks.iter();
    let rank = ranks.find(|r| r.target.replica.as_str() == replica);
    rank.unwrap().weight_version.to_string()
}

fn spans(sample: &berth::proto::SampleResult) -> Vec<(&str, u32, u32)> {
    let spans = sample.weight_spans.iter();
    spans
        .map(|s| (s.version.as_str(), s.start, s.end))
        .collect()
}

/// CASES 5: a recovered engine gets no traffic before its weights are current.
#[tokio::test]
async fn a_rank_that_is_behind_gets_no_request_that_needs_more_and_keeps_its_keys() {
    let cluster = cluster(&["1", "2"], SOON).await;
    let prompt = ids(1, 64);
    // Pin a key to each.
    let mut at = None;
    for i in 0..16 {
        let response = cluster.sample(keyed(&format!("t{i}"), &prompt, 4)).await;
        if home(only(&response.unwrap())).0 == "r0" {
            at = Some(format!("t{i}"));
        }
    }
    let key = at.expect("one of sixteen");
    let turn = async |weights| {
        let asked = SampleRequest {
            weights,
            ..keyed(&key, &prompt, 4)
        };
        only(&cluster.sample(asked).await.unwrap()).clone()
    };
    for _ in 0..4 {
        let sample = turn(at_least(2, false)).await;
        assert_eq!(home(&sample).0, "r1");
        assert_eq!(route(&sample).reason(), RouteReason::Weights);
        assert_eq!(spans(&sample), [("2", 0, 4)]);
    }
    let sample = turn(None).await;
    assert_eq!(
        route(&sample).reason(),
        RouteReason::Pinned,
        "it lives there"
    );
    cluster.engine("r0").set_weight_version("2", false);
    eventually("a beat says so", async || known(&cluster, "r0") == "2").await;
    let sample = turn(at_least(2, false)).await;
    assert_eq!(
        (home(&sample).0.as_str(), route(&sample).reason()),
        ("r0", RouteReason::Pinned)
    );
    cluster.stop().await;
}

#[tokio::test]
async fn weights_that_nobody_serves_are_refused_by_name_or_waited_for() {
    let cluster = cluster(&["1", "2"], SOON).await;
    let with = |weights| SampleRequest {
        weights,
        ..request(&ids(1, 32), 4)
    };
    let status = refused(
        cluster.sample(with(at_least(3, false))).await,
        Code::FailedPrecondition,
        "WEIGHTS_NOT_SERVED",
    );
    assert!(status.message().contains("\"1\", \"2\""), "{status}");
    let mut short = tonic::Request::new(with(at_least(3, true)));
    short
        .metadata_mut()
        .insert("grpc-timeout", "300m".parse().unwrap());
    let status = cluster.client().sample(short).await.unwrap_err();
    // The client's own clock may be first.
    assert!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status}"
    );

    let waiting = tokio::spawn({
        let mut client = cluster.client();
        let request = with(at_least(3, true));
        async move { client.sample(request).await }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished());
    cluster.engine("r1").set_weight_version("3", false);
    let response = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(home(only(&response)).0, "r1");
    assert_eq!(spans(only(&response)), [("3", 0, 4)]);
    cluster.stop().await;
}

/// A version that is no integer never satisfies `at_least`.
#[tokio::test]
async fn a_version_that_is_no_integer_is_only_ever_exact() {
    let cluster = cluster(&["step-9"], SOON).await;
    let with = |weights| SampleRequest {
        weights,
        ..request(&ids(1, 32), 4)
    };
    refused(
        cluster.sample(with(at_least(0, false))).await,
        Code::FailedPrecondition,
        "WEIGHTS_NOT_SERVED",
    );
    let response = cluster.sample(with(exact("step-9", false))).await.unwrap();
    assert_eq!(spans(only(&response)), [("step-9", 0, 4)]);
    cluster.stop().await;
}

/// The registry is behind: the reply tells, and nothing of it is believed.
#[tokio::test]
async fn weights_are_checked_on_the_reply_and_the_registry_learns() {
    let cluster = cluster(&["1", "1"], LATE).await;
    for engine in ["r0", "r1"] {
        assert_eq!(known(&cluster, engine), "1");
    }
    cluster.engine("r0").set_weight_version("2", false);
    // Requests of which some go to r0, where "1" is long gone.
    let mut met = 0;
    for i in 0..8 {
        let prompt = ids(i, 32);
        let response = cluster
            .sample(SampleRequest {
                weights: exact("1", false),
                ..request(&prompt, 4)
            })
            .await
            .unwrap();
        let sample = only(&response);
        assert_eq!(home(sample).0, "r1");
        assert_eq!(sample.token_ids, expected(&prompt, 4));
        assert_eq!(spans(sample), [("1", 0, 4)]);
        if route(sample).attempts.len() > 1 {
            assert_eq!(route(sample).attempts[0].failure(), AttemptFailure::Weights);
            met += 1;
        }
    }
    assert_eq!(met, 1, "known after the first");
    assert_eq!(known(&cluster, "r0"), "2");

    cluster.engine("r1").set_weight_version("3", false);
    let last = SampleRequest {
        weights: exact("1", false),
        ..request(&ids(9, 32), 4)
    };
    let status = refused(
        cluster.sample(last).await,
        Code::FailedPrecondition,
        "WEIGHTS_NOT_SERVED",
    );
    assert!(status.message().contains("\"2\", \"3\""), "{status}");
    cluster.stop().await;
}

/// Where it may be waited for, a reply from other weights is no reason to fail.
#[tokio::test]
async fn a_reply_from_other_weights_is_waited_over() {
    let cluster = cluster(&["1"], LATE).await;
    cluster.engine("r0").set_weight_version("0", false);
    let waiting = tokio::spawn({
        let mut client = cluster.client();
        let request = SampleRequest {
            weights: at_least(1, true),
            ..request(&ids(1, 32), 4)
        };
        async move { client.sample(request).await }
    });
    eventually("the reply told", async || known(&cluster, "r0") == "0").await;
    cluster.engine("r0").set_weight_version("1", false);
    // Somebody else's reply tells that the weights are there.
    cluster.sample(request(&ids(2, 32), 4)).await.unwrap();
    let response = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(spans(only(&response)), [("1", 0, 4)]);
    let attempts = &route(only(&response)).attempts;
    assert_eq!(attempts[0].failure(), AttemptFailure::Weights);
    cluster.stop().await;
}

#[tokio::test]
async fn a_change_in_mid_generation_is_told_in_spans_or_refused() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let run = async |weights, change: &str| {
        let started = cluster.engine("r0").counters().started;
        let task = tokio::spawn({
            let mut client = cluster.client();
            let request = SampleRequest {
                weights,
                ..request(&prompt, 100)
            };
            async move { client.sample(request).await }
        });
        eventually("it runs", async || {
            cluster.engine("r0").counters().started > started
        })
        .await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        cluster.engine("r0").set_weight_version(change, false);
        task.await.unwrap()
    };
    let response = run(None, "2").await.unwrap().into_inner();
    let sample = only(&response);
    let spans = spans(sample);
    assert_eq!(spans.len(), 2, "{spans:?}");
    assert_eq!((spans[0].0, spans[0].1), ("default", 0));
    assert_eq!((spans[1].0, spans[1].2), ("2", 100));
    assert_eq!(spans[0].2, spans[1].1, "without gap");

    let tokens = cluster.engine("r0").counters().finished;
    let status = run(exact("2", false), "3").await.unwrap_err();
    assert_eq!(crate::cluster::reason(&status), "WEIGHTS_NOT_SERVED");
    cluster.nothing_runs("r0").await;
    assert_eq!(
        cluster.engine("r0").counters().finished,
        tokens,
        "it was stopped at the first token that nobody wants"
    );
    cluster.stop().await;
}
