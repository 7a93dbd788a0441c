//! The admin port's limits.

use std::time::Duration;

use berth::listen::limits::Connections;

use crate::{
    plane::Plane,
    wire::{self, Wire},
};

#[tokio::test]
async fn its_connections_are_bounded_and_the_probes_of_others_are_answered() {
    let plane = Plane::start(|config| {
        config.admin_limits.connections = Connections {
            all: 3,
            of_address: 2,
        };
    })
    .await;
    let ok = |text: String| assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    ok(wire::get(plane.admin(), "/livez").await);
    let mut held = Vec::new();
    for from in ["127.0.0.2", "127.0.0.2"] {
        held.push(Wire::connect_from(from, plane.admin()).await);
    }
    let text = Wire::connect_from("127.0.0.2", plane.admin())
        .await
        .rest()
        .await;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("HTTP/1.1 503"), "{text}");
    ok(wire::get(plane.admin(), "/livez").await);
    // The place of the one before may not be free yet.
    let limited = "berth_connections_limited_total{port=\"admin\",limit=\"address\"}";
    plane.counts(limited, 1.0).await;
    held.push(Wire::connect_from("127.0.0.3", plane.admin()).await);
    let text = Wire::connect_from("127.0.0.4", plane.admin())
        .await
        .rest()
        .await;
    assert!(text.starts_with(b"HTTP/1.1 503"));
    drop(held);
    let limited = "berth_connections_limited_total{port=\"admin\",limit=\"connections\"}";
    crate::wait::eventually("there is room again", async || {
        wire::get(plane.admin(), "/metrics")
            .await
            .contains("HTTP/1.1 200")
    })
    .await;
    assert!(plane.metric(limited).await >= 1.0);
}

#[tokio::test]
async fn headers_must_come_in_time_and_be_small() {
    let plane = Plane::start(|config| {
        config.admin_limits.first_request = Duration::from_millis(300);
    })
    .await;
    let mut silent = Wire::connect(plane.admin()).await;
    let mut slow = Wire::connect(plane.admin()).await;
    slow.send(b"GET /livez HTTP/1.1\r\nhost: b").await;
    let (silent, slow) = tokio::join!(silent.rest(), slow.rest());
    assert!(!silent.starts_with(b"HTTP/1.1 200") && !slow.starts_with(b"HTTP/1.1 200"));
    let limited = "berth_connections_limited_total{port=\"admin\",limit=\"first_request\"}";
    plane.counts(limited, 2.0).await;
    let mut large = Wire::connect(plane.admin()).await;
    let value = "x".repeat(30_000);
    let request = format!("GET /livez HTTP/1.1\r\nhost: b\r\nx-large: {value}\r\n\r\n");
    // The answer may come, and the connection end, before all of it is sent.
    let _ = tokio::io::AsyncWriteExt::write_all(&mut large.0, request.as_bytes()).await;
    let text = String::from_utf8(large.rest().await).unwrap();
    assert!(
        text.is_empty() || text.starts_with("HTTP/1.1 431"),
        "{text}"
    );
    let text = wire::get(plane.admin(), "/livez").await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}
