//! The line that each request has in the log.

use std::time::Duration;

use serde_json::Value;
use tonic::Request;

use crate::{
    plane::{Plane, eventually, instant, stepping},
    requests::request,
};

/// The lines of finished requests so far.
fn finished(log: &str) -> Vec<Value> {
    // The last one may not be whole yet.
    let lines = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    lines
        .filter(|line: &Value| line["message"] == "request finished")
        .collect()
}

#[tokio::test]
async fn an_answered_request_is_told_with_its_ids_and_counts() {
    let plane = Plane::start(&["--log-format", "json"], "info").await;
    let _engine = plane.add("r", instant()).await;
    let mut asked = request(&[1, 2, 3], 5);
    asked.cache_affinity_key = Some("t".into());
    asked.idempotency_key = Some("k".into());
    let mut call = Request::new(asked);
    let id = "this-is-the-one".parse().unwrap();
    call.metadata_mut().insert("x-request-id", id);
    plane.client().sample(call).await.unwrap();
    let log = plane.stop().await;
    let [line] = &finished(&log)[..] else {
        panic!("{log}");
    };
    for (field, value) in [
        ("level", "INFO"),
        ("request_id", "this-is-the-one"),
        ("method", "berth.v1.SamplingService/Sample"),
        ("outcome", "OK"),
        ("reason", "none"),
        ("replica", "r"),
        ("routing", "new_key"),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    for (field, value) in [
        ("incarnation", 1),
        ("rank", 0),
        ("attempts", 1),
        ("samples", 1),
        ("prompt_tokens", 3),
        ("cached_tokens", 0),
        ("completion_tokens", 5),
    ] {
        assert_eq!(line[field], value, "{field} of {line}");
    }
    assert_eq!(line["replayed"], false);
    assert!(!line["model"].as_str().unwrap().is_empty(), "{line}");
    assert!(line["duration_s"].as_f64().unwrap() > 0.0, "{line}");
    assert_eq!(line["key"].as_str().unwrap().len(), 12, "a short hash");
    assert!(line.get("why").is_none() && line.get("trace_id").is_none());
}

#[tokio::test]
async fn a_failed_request_is_told_with_its_reason_and_where_it_ran() {
    let options = ["--log-format", "json", "--default-deadline", "3s"];
    let plane = Plane::start(&options, "info").await;
    let mut client = plane.client();
    client.sample(request(&[], 1)).await.unwrap_err();
    client.sample(request(&[1], 1)).await.unwrap_err();
    let _engine = plane.add("r", stepping(Duration::from_millis(5))).await;
    // The server's own deadline: tonic's client would keep one of its own, too.
    client.sample(request(&[1, 2, 3], 5000)).await.unwrap_err();
    let stream = client.sample_stream(request(&[1, 2, 3], 5000)).await;
    let mut stream = stream.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    drop(stream);
    eventually("it is noticed that the caller went", async || {
        finished(&plane.log()).len() == 4
    })
    .await;
    let log = plane.stop().await;
    let told: Vec<_> = finished(&log)
        .iter()
        .map(|line| {
            let text = |field: &str| line[field].as_str().unwrap_or("-").to_owned();
            [text("outcome"), text("reason"), text("replica")]
        })
        .collect();
    assert_eq!(
        told,
        [
            ["INVALID_ARGUMENT", "INVALID_REQUEST", "-"],
            ["UNAVAILABLE", "NO_REPLICA", "-"],
            ["DEADLINE_EXCEEDED", "DEADLINE", "r"],
            ["CANCELLED", "CANCELLED", "r"],
        ]
    );
}
