//! The process as a whole: its open files, and its end.

use std::{process::Command, time::Duration};

use tokio::time::Instant;

use crate::{
    plane::SAMPLE,
    served::Served,
    wait::eventually,
    wire::{self, SETTINGS, Wire},
};

/// Under these `ulimit`s.
async fn start(ulimit: &str, options: &[&str]) -> Served {
    let script = format!("{ulimit}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_berth")]);
    Served::start(command, options).await
}

#[tokio::test]
async fn it_takes_as_many_files_as_it_may() {
    let plane = start("ulimit -Sn 64", &[]).await;
    let mut wires = Vec::new();
    for _ in 0..150 {
        wires.push(Wire::open(plane.grpc).await);
    }
    let open = wire::metric(plane.admin, "berth_connections{port=\"grpc\"}").await;
    assert!(open >= 150.0, "{open}");
}

#[tokio::test]
async fn without_a_file_left_it_waits_and_serves_again() {
    let plane = start("ulimit -n 64", &[]).await;
    let begun = Instant::now();
    let mut wires = Vec::new();
    for _ in 0..80 {
        let mut wire = Wire::connect(plane.grpc).await;
        wire.send(&wire::hello()).await;
        wires.push(wire);
    }
    // The first was accepted. Of the last ones nobody heard, till the first go.
    wires[0].until(SETTINGS).await;
    let mut last = wires.pop().unwrap();
    let early = tokio::time::timeout(Duration::from_millis(500), last.next()).await;
    assert!(early.is_err(), "{early:?}");
    drop(wires);
    last.until(SETTINGS).await;
    let failures = "berth_accept_failures_total{port=\"grpc\"}";
    let failed = wire::metric(plane.admin, failures).await;
    // It waits a tenth of a second, or until a connection ends.
    let could = begun.elapsed().as_millis() / 100 + 90;
    assert!(
        failed >= 1.0 && failed <= could as f64,
        "{failed} of {could}"
    );
}

#[tokio::test]
async fn a_shutdown_waits_for_nobody_who_asks_nothing() {
    let mut plane = start("true", &["--drain-timeout", "1h"]).await;
    let silent = Wire::connect(plane.grpc).await;
    let mut slow = Wire::connect(plane.grpc).await;
    slow.send(&wire::PREFACE[..5]).await;
    // They acknowledge nothing, not even that it ends.
    let greeted = Wire::open(plane.grpc).await;
    let mut half = Wire::open(plane.grpc).await;
    half.send(&wire::call(1, SAMPLE)[..20]).await;
    let mut admin = Wire::connect(plane.admin).await;
    admin.send(b"GET /livez HTT").await;
    plane.process.signal("-TERM");
    assert!(plane.process.ended().await.success());
    drop((silent, slow, greeted, half, admin));
}

#[tokio::test]
async fn a_shutdown_with_slow_requests_ends_within_its_bound() {
    let mut plane = start("true", &["--drain-timeout", "500ms"]).await;
    let mut wires = Vec::new();
    for _ in 0..20 {
        let mut wire = Wire::open(plane.grpc).await;
        wire.send(&wire::call(1, SAMPLE)).await;
        wire.send(&wire::frame(wire::DATA, 0, 1, &[0, 0, 0, 1, 0]))
            .await;
        wires.push(wire);
    }
    let in_flight = "berth_requests_in_flight{method=\"berth.v1.SamplingService/Sample\"}";
    eventually("they are in flight", async || {
        wire::get(plane.admin, "/metrics")
            .await
            .contains(&format!("{in_flight} 20"))
    })
    .await;
    plane.process.signal("-TERM");
    assert!(plane.process.ended().await.success());
}
