//! Addresses that a replica may not have, beyond those that need no name and no
//! engine (they are in the service's tests).

use std::{net::Ipv4Addr, time::Duration};

use berth::proto::{EngineKind, Rank, RegisterReplicaRequest, register_replica_request::Address};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tonic_types::StatusExt;

use crate::world::{World, eventually, request};

pub fn registration(endpoint: String) -> RegisterReplicaRequest {
    RegisterReplicaRequest {
        replica_id: "stranger".to_owned(),
        boot_id: "b".to_owned(),
        address: Some(Address::Endpoint(endpoint)),
        engine: EngineKind::Sglang.into(),
        model: "m".to_owned(),
        vocab_size: 1000,
        context_length: 1000,
        page_size: 1,
        ranks: vec![Rank {
            kv_capacity_tokens: 1000,
            ..Rank::default()
        }],
        ..RegisterReplicaRequest::default()
    }
}

/// A listener, and whether anybody has called it: whoever has would stand in its
/// queue before us.
struct Trap(TcpListener);

impl Trap {
    async fn set() -> Self {
        Self(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap())
    }

    fn port(&self) -> u16 {
        self.0.local_addr().unwrap().port()
    }

    async fn is_untouched(&self) -> bool {
        let mine = TcpStream::connect(self.0.local_addr().unwrap())
            .await
            .unwrap();
        let (_, first) = self.0.accept().await.unwrap();
        first == mine.local_addr().unwrap()
    }
}

#[tokio::test]
async fn a_name_for_a_good_and_a_bad_address_is_refused_and_not_called() {
    let trap = Trap::set().await;
    let port = trap.port();
    let world = World::start(0, |config| {
        for (name, addresses) in [
            ("mixed.test", ["127.0.0.1", "169.254.169.254"]),
            ("mapped.test", ["127.0.0.1", "::ffff:169.254.1.1"]),
            ("mixed-back.test", ["fe80::1", "127.0.0.1"]),
        ] {
            let addresses = addresses.map(|address| address.parse().unwrap());
            config
                .egress
                .hosts
                .insert(name.to_owned(), addresses.into());
        }
    })
    .await;
    for (name, expected) in [
        ("mixed.test", "metadata"),
        ("mapped.test", "link-local"),
        ("mixed-back.test", "link-local"),
    ] {
        let asked = registration(format!("http://{name}:{port}"));
        let status = world.replicas("sidecars").register_replica(asked).await;
        let status = status.unwrap_err();
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert!(
            violations[0].description.contains(expected),
            "{violations:?}"
        );
        assert!(world.audited(&[
            ("event", "register"),
            ("principal", "sidecars"),
            ("object", "stranger"),
            ("outcome", "INVALID_REQUEST"),
        ]));
        // What was tried, for whoever reads it later.
        let told = |line: &serde_json::Value| {
            let detail = line["detail"].as_str().unwrap_or_default();
            line["object"] == "stranger" && detail.contains(expected)
        };
        assert!(world.audit().iter().any(told), "{expected}");
    }
    assert!(trap.is_untouched().await);
    world.stop().await;
}

#[tokio::test]
async fn an_engine_that_sends_elsewhere_is_not_followed() {
    let trap = Trap::set().await;
    let elsewhere = format!("http://127.0.0.1:{}", trap.port());
    // Whatever it is asked, it answers with another address.
    let engine = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}", engine.local_addr().unwrap());
    let answering = tokio::spawn(async move {
        loop {
            let (mut stream, _) = engine.accept().await.unwrap();
            let answer = format!(
                "HTTP/1.1 302 Found\r\nlocation: {elsewhere}/generate\r\n\
                 content-length: 0\r\nconnection: close\r\n\r\n"
            );
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                if stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {
                    let _ = stream.write_all(answer.as_bytes()).await;
                    // What it still sends is read, so that the answer is not lost.
                    while stream.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
                }
            });
        }
    });
    let world = World::start(0, |_| {}).await;
    let mut sidecar = world.replicas("sidecars");
    sidecar.register_replica(registration(url)).await.unwrap();
    let mut ask = request(1, 2);
    ask.model = Some("m".to_owned());
    let mut status = None;
    eventually("it is asked", async || {
        let asked = world.sample("trainer-a", ask.clone());
        let refused = tokio::time::timeout(Duration::from_secs(60), asked).await;
        status = Some(refused.unwrap().unwrap_err());
        // Before a beat it may take nothing yet.
        !status.as_ref().unwrap().message().contains("no rank")
    })
    .await;
    assert!(trap.is_untouched().await, "{status:?}");
    answering.abort();
    world.stop().await;
}
