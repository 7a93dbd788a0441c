//! What is refused, how, and that nothing of it reaches an engine.

use berth::proto::{
    HeartbeatResponse, Logprobs, RegisterReplicaRequest, SampleRequest, StopStrings, TokenIds,
    WeightsConstraint, replica_service_client::ReplicaServiceClient, sample_request::Prompt,
    weights_constraint::Constraint,
};
use tonic::Code;
use tonic_types::StatusExt;

use crate::cluster::{Cluster, VOCAB, ids, instant, keyed, reason, refused, request};

fn fields(status: &tonic::Status) -> Vec<String> {
    status
        .get_error_details()
        .bad_request()
        .map(|b| b.field_violations.iter().map(|v| v.field.clone()).collect())
        .unwrap_or_default()
}

#[tokio::test]
async fn all_violations_come_at_once_and_nothing_is_sent_or_pinned() {
    let cluster = Cluster::start(1, instant()).await;
    let mut bad = keyed("  ", &[1], 1);
    bad.prompt = Some(Prompt::TokenIdsLe(vec![1, 2, 3].into()));
    bad.idempotency_key = Some("a key with spaces".to_owned());
    bad.num_samples = Some(0);
    bad.on_abort = 77;
    let sampling = bad.sampling.as_mut().unwrap();
    sampling.top_p = Some(0.0);
    sampling.temperature = Some(f32::NAN);
    sampling.max_tokens = Some(0);
    let status = refused(
        cluster.sample(bad).await,
        Code::InvalidArgument,
        "INVALID_REQUEST",
    );
    let found = fields(&status);
    for field in [
        "prompt",
        "idempotency_key",
        "cache_affinity_key",
        "num_samples",
        "on_abort",
        "sampling.top_p",
        "sampling.temperature",
        "sampling.max_tokens",
    ] {
        assert!(found.iter().any(|f| f == field), "{field} in {found:?}");
    }
    assert_eq!(cluster.received(), 0);
    assert_eq!(cluster.playground.server().parts().router.pins(), 0);
    cluster.stop().await;
}

#[tokio::test]
async fn every_kind_of_bad_request_is_refused_before_an_engine_sees_it() {
    let cluster = Cluster::start(1, instant()).await;
    let good = || request(&ids(1, 8), 4);
    let with = |change: &dyn Fn(&mut SampleRequest)| {
        let mut r = good();
        change(&mut r);
        r
    };
    let invalid: Vec<(&str, SampleRequest)> = vec![
        ("prompt", with(&|r| r.prompt = None)),
        (
            "prompt",
            with(&|r| r.prompt = Some(Prompt::TokenIds(TokenIds::default()))),
        ),
        (
            "prompt",
            with(&|r| r.prompt = Some(Prompt::Text(String::new()))),
        ),
        ("routing_policy", with(&|r| r.routing_policy = 99)),
        ("output_encoding", with(&|r| r.output_encoding = 99)),
        ("on_lost", with(&|r| r.on_lost = 99)),
        ("priority", with(&|r| r.priority = Some(5000))),
        (
            "logprobs.top_k",
            with(&|r| {
                r.logprobs = Some(Logprobs {
                    top_k: 3,
                    ..Default::default()
                });
            }),
        ),
        (
            "weights.wait",
            with(&|r| {
                r.weights = Some(WeightsConstraint {
                    constraint: None,
                    wait: true,
                });
            }),
        ),
        (
            "sampling.stop",
            with(&|r| {
                r.sampling.as_mut().unwrap().stop = Some(StopStrings {
                    strings: vec![String::new()],
                });
            }),
        ),
    ];
    for (field, bad) in invalid {
        let status = refused(
            cluster.sample(bad).await,
            Code::InvalidArgument,
            "INVALID_REQUEST",
        );
        assert_eq!(fields(&status), [field]);
    }
    for (change, code, why) in [
        (
            with(&|r| r.model = Some("unknown".to_owned())),
            Code::NotFound,
            "MODEL_NOT_FOUND",
        ),
        (
            with(&|r| {
                r.prompt = Some(Prompt::TokenIds(TokenIds {
                    ids: vec![1, VOCAB],
                }))
            }),
            Code::InvalidArgument,
            "TOKEN_OUT_OF_VOCABULARY",
        ),
        (
            with(&|r| r.sampling.as_mut().unwrap().max_tokens = Some(16_384)),
            Code::InvalidArgument,
            "PROMPT_TOO_LONG",
        ),
        (
            with(&|r| r.prompt = Some(Prompt::Text("hello".to_owned()))),
            Code::FailedPrecondition,
            "NOT_SUPPORTED",
        ),
        (
            with(&|r| r.adapter = Some("lora".to_owned())),
            Code::FailedPrecondition,
            "NOT_SUPPORTED",
        ),
        (
            with(&|r| {
                r.weights = Some(WeightsConstraint {
                    constraint: Some(Constraint::Exact("9".to_owned())),
                    wait: false,
                });
            }),
            Code::FailedPrecondition,
            "WEIGHTS_NOT_SERVED",
        ),
    ] {
        refused(cluster.sample(change).await, code, why);
    }
    assert_eq!(cluster.received(), 0);
    assert!(cluster.sample(good()).await.is_ok());
    cluster.stop().await;
}

/// CASES 19: one id outside the vocabulary ends an engine.
#[tokio::test]
async fn an_id_outside_the_vocabulary_is_refused_at_the_door_and_no_engine_dies() {
    let cluster = Cluster::start(2, instant()).await;
    for id in [VOCAB, u32::MAX] {
        let bad = request(&[1, id, 3], 4);
        refused(
            cluster.sample(bad).await,
            Code::InvalidArgument,
            "TOKEN_OUT_OF_VOCABULARY",
        );
    }
    assert!(
        cluster
            .engines()
            .all(berth::engine::sim::SimHandle::is_alive)
    );
    assert_eq!(cluster.received(), 0);
    cluster.stop().await;
}

#[tokio::test]
async fn without_replicas_the_answer_is_unavailable_with_a_time_to_wait() {
    let cluster = Cluster::start(0, instant()).await;
    let status = refused(
        cluster.sample(request(&[1], 1)).await,
        Code::Unavailable,
        "NO_REPLICA",
    );
    let retry = status.get_error_details();
    assert!(retry.retry_info().unwrap().retry_delay.is_some());
    cluster.stop().await;
}

#[tokio::test]
async fn a_message_beyond_the_limit_is_refused() {
    let cluster = Cluster::with(1, instant(), |c| c.max_message_bytes = 1 << 16).await;
    let mut large = request(&[1], 1);
    large.prompt = Some(Prompt::TokenIdsLe(vec![0; 1 << 17].into()));
    let large = cluster.sample(large).await;
    let status = refused(large, Code::OutOfRange, "MESSAGE_TOO_LARGE");
    for told in ["the request", "131", "65536", "--max-message-bytes"] {
        assert!(status.message().contains(told), "{status}");
    }
    // A sidecar's messages have a bound that no option moves.
    let address = cluster.playground.server().grpc_address();
    let large = RegisterReplicaRequest {
        model: "m".repeat(2 << 20),
        ..RegisterReplicaRequest::default()
    };
    let mut replicas = ReplicaServiceClient::connect(format!("http://{address}"))
        .await
        .unwrap();
    let status = replicas.register_replica(large).await.unwrap_err();
    assert_eq!(reason(&status), "MESSAGE_TOO_LARGE", "{status}");
    assert!(status.message().contains("1048576"), "{status}");
    assert!(!status.message().contains("--max"), "{status}");
    cluster.stop().await;
}

#[tokio::test]
async fn an_answer_beyond_the_limit_says_so() {
    let cluster = Cluster::with(1, instant(), |c| c.max_message_bytes = 1 << 16).await;
    let mut long = request(&[1], 4000);
    long.num_samples = Some(16);
    let long = cluster.sample(long).await;
    let status = refused(long, Code::OutOfRange, "MESSAGE_TOO_LARGE");
    for told in ["the answer", "65536", "--max-message-bytes"] {
        assert!(status.message().contains(told), "{status}");
    }
    cluster.stop().await;
}

/// Its field 1 is of another kind.
#[derive(Clone, PartialEq, prost::Message)]
struct NotAHeartbeat {
    #[prost(uint64, tag = "1")]
    replica_id: u64,
}

#[tokio::test]
async fn what_is_no_message_is_refused_with_a_reason() {
    let cluster = Cluster::start(0, instant()).await;
    let mut client = tonic::client::Grpc::new(cluster.channel.clone());
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/berth.v1.ReplicaService/Heartbeat");
    let codec = tonic_prost::ProstCodec::<_, HeartbeatResponse>::default();
    let heartbeat = NotAHeartbeat { replica_id: 7 };
    let status = client
        .unary(tonic::Request::new(heartbeat), path, codec)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert_eq!(reason(&status), "INVALID_REQUEST");
    cluster.stop().await;
}
