//! How many connections there are, how they begin, how long they may say nothing.

use std::time::Duration;

use berth::{auth::TlsConfig, harness::playground, listen::limits::Connections, server::Server};

use crate::{
    plane::{Plane, SAMPLE, request},
    wait::eventually,
    wire::{self, ENHANCE_YOUR_CALM, NO_ERROR, PING, SETTINGS, Wire, frame},
};

#[tokio::test]
async fn more_connections_than_may_be_are_told_and_closed() {
    let plane = Plane::start(|config| {
        config.limits.connections = Connections {
            all: 9,
            of_address: 6,
        };
    })
    .await;
    plane.serves().await;
    // The client and the sidecar have theirs.
    let open = plane.metric("berth_connections{port=\"grpc\"}").await;
    let mut here = Vec::new();
    for _ in 0..6 - open as usize {
        here.push(Wire::open(plane.grpc()).await);
    }
    let mut refused = Wire::connect(plane.grpc()).await;
    assert_eq!(refused.goaways().await, [ENHANCE_YOUR_CALM]);
    plane.limited("address", 1.0).await;
    // Another address is not to blame for it.
    let mut there = Vec::new();
    for _ in 0..3 {
        let mut wire = Wire::connect_from("127.0.0.2", plane.grpc()).await;
        wire.send(&wire::hello()).await;
        wire.until(SETTINGS).await;
        there.push(wire);
    }
    let mut refused = Wire::connect_from("127.0.0.3", plane.grpc()).await;
    assert_eq!(refused.goaways().await, [ENHANCE_YOUR_CALM]);
    plane.limited("connections", 1.0).await;
    plane.serves().await;
    // Who goes leaves room.
    drop(here.pop());
    plane.counts("berth_connections{port=\"grpc\"}", 8.0).await;
    Wire::open(plane.grpc()).await;
    plane.serves().await;
}

#[tokio::test]
async fn who_asks_nothing_is_sent_away_and_who_is_answered_is_not() {
    let plane = Plane::start(|config| {
        config.limits.first_request = Duration::from_millis(600);
        config.limits.idle = Duration::from_millis(900);
    })
    .await;
    // A call that takes longer than all of them.
    let mut client = plane.client();
    let long = tokio::spawn(async move { client.sample(request(60)).await });
    let mut silent = Wire::connect(plane.grpc()).await;
    let mut half = Wire::connect(plane.grpc()).await;
    half.send(&wire::PREFACE[..9]).await;
    let mut greeted = Wire::open(plane.grpc()).await;
    let mut half_asked = Wire::open(plane.grpc()).await;
    let call = wire::call(1, SAMPLE);
    half_asked.send(&call[..call.len() / 2]).await;
    assert_eq!(silent.rest().await, b"");
    assert_eq!(half.rest().await, b"");
    plane.limited("handshake", 2.0).await;
    // Neither acknowledges anything, so they are cut in the end.
    for wire in [&mut greeted, &mut half_asked] {
        let codes = wire.goaways().await;
        assert!(codes.contains(&NO_ERROR), "{codes:?}");
    }
    plane.limited("first_request", 2.0).await;
    let response = long.await.unwrap().unwrap().into_inner();
    assert_eq!(response.samples[0].token_ids.len(), 60);
}

#[tokio::test]
async fn an_idle_connection_ends_and_its_client_makes_another() {
    let plane = Plane::start(|config| config.limits.idle = Duration::from_millis(400)).await;
    plane.serves().await;
    // The sidecar's beats are further apart, so its connection may be the first.
    let ended = "berth_connections_limited_total{port=\"grpc\",limit=\"idle\"}";
    eventually("it ends", async || plane.metric(ended).await >= 2.0).await;
    plane.serves().await;
}

#[tokio::test]
async fn a_flood_of_pings_is_read_slowly_and_others_are_served() {
    let plane = Plane::start(|config| config.limits.control_frames = 100).await;
    plane.serves().await;
    let mut wire = Wire::open(plane.grpc()).await;
    wire.send(&wire::ping().repeat(200)).await;
    plane.counts("berth_connections_throttled_total", 1.0).await;
    plane.serves().await;
    // None is lost.
    for _ in 0..200 {
        wire.until(PING).await;
    }
}

#[tokio::test]
async fn rapid_resets_end_the_connection() {
    let plane = Plane::start(|config| config.limits.max_streams = 4).await;
    let mut wire = Wire::open(plane.grpc()).await;
    let mut bytes = Vec::new();
    for stream in (1..2000).step_by(2) {
        bytes.extend(wire::call(stream, SAMPLE));
        bytes.extend(wire::reset(stream));
    }
    wire.send(&bytes).await;
    assert!(wire.goaways().await.contains(&ENHANCE_YOUR_CALM));
    plane.limited("calm", 1.0).await;
    plane.serves().await;
}

#[tokio::test]
async fn a_frame_of_headers_beyond_measure_is_not_waited_for() {
    let plane = Plane::start(|_| {}).await;
    let mut wire = Wire::open(plane.grpc()).await;
    wire.send(&wire::head(wire::HEADERS, 0, 1, 500_000)).await;
    assert!(wire.goaways().await.contains(&ENHANCE_YOUR_CALM));
    plane.limited("frame_size", 1.0).await;
    // What a client may say is taken.
    let mut wire = Wire::open(plane.grpc()).await;
    wire.send(&frame(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 9].repeat(100)))
        .await;
    wire.send(&wire::ping()).await;
    wire.until(PING).await;
}

#[tokio::test]
async fn who_shakes_no_hands_in_time_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&cert, own.cert.pem()).unwrap();
    std::fs::write(&key, own.signing_key.serialize_pem()).unwrap();
    let mut config = playground::config(None);
    config.auth.tls = Some(TlsConfig {
        cert,
        key,
        client_ca: None,
        require_client_cert: false,
        handshake_timeout: Duration::from_millis(300),
        connection_age: Duration::from_secs(600),
    });
    let server = Server::start(config).await.unwrap();
    let mut silent = Wire::connect(server.grpc_address()).await;
    assert_eq!(silent.rest().await, b"");
    let series = "berth_connections_limited_total{port=\"grpc\",limit=\"handshake\"}";
    eventually("it is counted", async || {
        (wire::metric(server.admin_address(), series).await - 1.0).abs() < f64::EPSILON
    })
    .await;
    server.stop().await.unwrap();
}
