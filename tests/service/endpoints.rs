//! Addresses that a stranger would have Berth call.

use std::net::Ipv4Addr;

use berth::proto::{
    EngineKind, Rank, RegisterReplicaRequest, register_replica_request::Address,
    replica_service_client::ReplicaServiceClient,
};
use tokio::net::TcpListener;
use tonic::Code;
use tonic_types::StatusExt;

use crate::cluster::{Cluster, instant};

fn registration(address: Address, rank: Option<String>) -> RegisterReplicaRequest {
    RegisterReplicaRequest {
        replica_id: "stranger".to_owned(),
        boot_id: "b".to_owned(),
        address: Some(address),
        engine: EngineKind::Sglang.into(),
        model: "m".to_owned(),
        vocab_size: 1000,
        context_length: 1000,
        page_size: 1,
        ranks: vec![Rank {
            kv_capacity_tokens: 1000,
            endpoint: rank,
            ..Rank::default()
        }],
        ..RegisterReplicaRequest::default()
    }
}

#[tokio::test]
async fn what_may_not_be_called_is_refused_with_a_reason_and_not_called() {
    // Whoever calls it is seen.
    let trap = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = trap.local_addr().unwrap().port();
    let cluster = Cluster::with(0, instant(), |config| {
        config.egress.loopback = false;
        config.egress.ports = vec![1024..=u16::MAX];
    })
    .await;
    let mut client = ReplicaServiceClient::new(cluster.channel.clone());
    let own = cluster.playground.url();
    let cases = [
        (format!("http://127.0.0.1:{port}"), "own machine"),
        (format!("http://localhost:{port}"), "own machine"),
        (format!("http://[::ffff:127.0.0.1]:{port}"), "own machine"),
        (format!("http://[::1]:{port}"), "own machine"),
        ("http://169.254.169.254:30000".to_owned(), "metadata"),
        (
            "http://[::ffff:169.254.169.254]:30000".to_owned(),
            "metadata",
        ),
        ("http://169.254.1.2:30000".to_owned(), "link-local"),
        ("http://[fe80::1]:30000".to_owned(), "link-local"),
        ("http://0.0.0.0:30000".to_owned(), "unspecified"),
        ("http://10.0.0.1:22".to_owned(), "port 22"),
        (
            "http://no-such-host.invalid:30000".to_owned(),
            "cannot be resolved",
        ),
        (own, "own address"),
    ];
    for (endpoint, expected) in cases {
        let status = client
            .register_replica(registration(Address::Endpoint(endpoint.clone()), None))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{endpoint}: {status}");
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations.len(), 1, "{endpoint}: {violations:?}");
        assert_eq!(violations[0].field, "endpoint");
        let why = &violations[0].description;
        assert!(why.contains(expected), "{endpoint}: {why}");
    }
    // A port on the caller's own address, and a rank behind a good replica.
    let status = client
        .register_replica(registration(Address::Port(port.into()), None))
        .await
        .unwrap_err();
    assert!(status.message().contains("own machine") || !status.details().is_empty());
    let good = Address::Endpoint("http://10.255.255.1:30000".to_owned());
    let rank = Some(format!("http://127.0.0.1:{port}"));
    let status = client
        .register_replica(registration(good, rank))
        .await
        .unwrap_err();
    let violations = status.get_details_bad_request().unwrap().field_violations;
    assert_eq!(violations[0].field, "ranks[0].endpoint");
    let called = tokio::time::timeout(std::time::Duration::from_millis(300), trap.accept()).await;
    assert!(called.is_err(), "something was called");
    cluster.stop().await;
}
