//! The page of metrics: well-formed, true, and as the table in `docs/metrics.md`
//! says.

use std::{collections::BTreeMap, io::Write, process::Command, process::Stdio, time::Duration};

use berth::proto::{
    DeregisterReplicaRequest, GetStatsRequest, ListReplicasRequest, SampleRequest,
    fleet_service_client::FleetServiceClient, replica_service_client::ReplicaServiceClient,
};
use tonic::Request;

use crate::{
    front::Manner,
    page::{self, Family},
    plane::{Engine, Plane, eventually, instant, stepping},
    requests::request,
};

/// A series of requests of which all is known.
async fn scripted() -> (Plane, Engine) {
    let plane = Plane::start(&[], "info").await;
    let mut client = plane.client();
    client.sample(request(&[1], 1)).await.unwrap_err();
    let mut config = instant();
    config.model = "a \"model\" \\n".to_owned();
    let engine = plane.add("r", config).await;
    let turn = |n: u32, key: &str| SampleRequest {
        idempotency_key: Some(format!("k{n}")),
        cache_affinity_key: Some(key.to_owned()),
        ..request(&[1, 2, 3, n], 5)
    };
    // Two new keys, one warm turn, two replays, one without a key, one stream.
    for (n, key) in [(10, "a"), (11, "b"), (10, "a"), (10, "a")] {
        client.sample(turn(n, key)).await.unwrap();
    }
    let mut warm = turn(12, "a");
    warm.prompt = request(&[1, 2, 3, 10, 7, 8], 5).prompt;
    client.sample(warm).await.unwrap();
    client.sample(request(&[9; 8], 5)).await.unwrap();
    let stream = client.sample_stream(request(&[8; 8], 5)).await;
    let mut stream = stream.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    // The same key for something else, twice; a bad request, thrice, once streamed.
    for n in [20, 21] {
        let reused = SampleRequest {
            idempotency_key: Some("k10".into()),
            ..request(&[n], 5)
        };
        client.sample(reused).await.unwrap_err();
    }
    for _ in 0..2 {
        client.sample(request(&[], 5)).await.unwrap_err();
    }
    let stream = client.sample_stream(request(&[], 5)).await;
    assert!(match stream {
        Err(_) => true,
        Ok(stream) => stream.into_inner().message().await.is_err(),
    });
    engine.front.set(Manner::RefusesWithEcho);
    client.sample(request(&[1], 5)).await.unwrap_err();
    engine.front.set(Manner::Passes);
    eventually("its sidecar has reported", async || {
        let page = page::read(&plane.metrics().await);
        !of(&page, "berth_rank_kv_used_tokens").series.is_empty()
    })
    .await;
    (plane, engine)
}

fn of<'a>(families: &'a BTreeMap<String, Family>, name: &str) -> &'a Family {
    families
        .get(name)
        .unwrap_or_else(|| panic!("{name} is not among {:?}", families.keys()))
}

#[tokio::test]
async fn the_page_agrees_with_what_happened() {
    let (plane, _engine) = scripted().await;
    let (status, kind, text) = plane.get("/metrics", None).await;
    assert_eq!(
        (status, &*kind),
        (200, "text/plain; version=0.0.4; charset=utf-8")
    );
    let page = page::read(&text);
    let sample = ("method", "berth.v1.SamplingService/Sample");
    let stream = ("method", "berth.v1.SamplingService/SampleStream");
    let requests = of(&page, "berth_requests_total");
    for (method, code, reason, count) in [
        (sample, "OK", "none", 6.0),
        (stream, "OK", "none", 1.0),
        (sample, "UNAVAILABLE", "NO_REPLICA", 1.0),
        (sample, "ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED", 2.0),
        (sample, "INVALID_ARGUMENT", "INVALID_REQUEST", 2.0),
        (stream, "INVALID_ARGUMENT", "INVALID_REQUEST", 1.0),
        (sample, "INVALID_ARGUMENT", "ENGINE_REFUSED", 1.0),
    ] {
        let labels = [method, ("code", code), ("reason", reason)];
        assert_eq!(requests.sum(&labels), count, "{labels:?}");
    }
    assert_eq!(requests.sum(&[sample]), 12.0);
    assert_eq!(requests.sum(&[stream]), 2.0);
    let durations = of(&page, "berth_request_duration_seconds");
    let count = |labels: &[(&str, &str)]| {
        let mut family = durations.clone();
        family
            .series
            .retain(|series| series.name.ends_with("_count"));
        family.sum(labels)
    };
    assert_eq!(count(&[sample]), 12.0);
    for (name, labels, value) in [
        ("berth_requests_in_flight", &[sample][..], 0.0),
        (
            "berth_idempotency_outcomes_total",
            &[("outcome", "replayed")],
            2.0,
        ),
        (
            "berth_idempotency_outcomes_total",
            &[("outcome", "mismatched")],
            2.0,
        ),
        (
            "berth_idempotency_outcomes_total",
            &[("outcome", "joined")],
            0.0,
        ),
        (
            "berth_routing_decisions_total",
            &[("reason", "new_key")],
            2.0,
        ),
        (
            "berth_routing_decisions_total",
            &[("reason", "pinned")],
            1.0,
        ),
        (
            "berth_routing_decisions_total",
            &[("reason", "no_key")],
            3.0,
        ),
        ("berth_attempts_total", &[], 6.0),
        ("berth_samples_total", &[], 5.0),
        (
            "berth_prompt_tokens_total",
            &[],
            4.0 + 4.0 + 6.0 + 8.0 + 8.0,
        ),
        ("berth_completion_tokens_total", &[], 25.0),
        ("berth_expected_cached_tokens_total", &[], 5.0),
        ("berth_pins", &[("state", "live")], 2.0),
        ("berth_pins", &[("state", "hint")], 0.0),
        ("berth_replicas", &[("state", "healthy")], 1.0),
        ("berth_replicas", &[], 1.0),
        ("berth_ranks", &[("state", "open")], 1.0),
        (
            "berth_rank_live_pins",
            &[("replica", "r"), ("rank", "0")],
            2.0,
        ),
        ("berth_rank_live_pins", &[("model", "a \"model\" \\n")], 2.0),
        (
            "berth_build_info",
            &[("version", env!("CARGO_PKG_VERSION"))],
            1.0,
        ),
        ("berth_store_up", &[], 1.0),
    ] {
        assert_eq!(of(&page, name).sum(labels), value, "{name} {labels:?}");
    }
    let layers = of(&page, "berth_layer_duration_seconds");
    for (layer, count) in [
        ("deadline", 14.0),
        ("validate", 14.0),
        ("idempotency", 11.0),
        // Replays and mismatches end above it.
        ("resolve", 7.0),
        ("admission", 6.0),
        ("affinity", 6.0),
        ("dispatch", 6.0),
        ("engine", 6.0),
    ] {
        let counted: f64 = layers
            .series
            .iter()
            .filter(|s| s.name.ends_with("_count") && s.labels["layer"] == layer)
            .map(|s| s.value)
            .sum();
        assert_eq!(counted, count, "{layer}");
    }
    let syncs = of(&page, "berth_store_sync_seconds");
    let syncs = syncs.series.iter().find(|s| s.name.ends_with("_count"));
    assert!(syncs.unwrap().value >= 3.0, "each new key is synced");

    // One source: what GetStats tells is what Prometheus is told.
    let mut fleet = FleetServiceClient::new(plane.channel.clone());
    let stats = fleet.get_stats(GetStatsRequest {}).await.unwrap();
    let counters = stats.into_inner().counters;
    for (counter, name) in [
        ("attempts", "berth_attempts_total"),
        ("samples", "berth_samples_total"),
        ("generations", "berth_generations_total"),
        (
            "cached_tokens_reported",
            "berth_reported_cached_tokens_total",
        ),
    ] {
        assert_eq!(
            of(&page, name).sum(&[]),
            counters[counter] as f64,
            "{counter}"
        );
    }
    plane.stop().await;
}

#[tokio::test]
async fn what_is_said_of_whether_pins_hold_ends_with_the_replica() {
    let (plane, _engine) = scripted().await;
    let expected = "berth_rank_expected_cached_tokens_total";
    let rank = [("replica", "r"), ("rank", "0")];
    let page = page::read(&plane.metrics().await);
    assert_eq!(of(&page, expected).sum(&rank), 5.0);
    let found = of(&page, "berth_rank_found_cached_tokens_total").sum(&rank);
    assert!((1.0..=5.0).contains(&found), "{found}");
    for (name, value) in [
        ("berth_rank_wrong_rank_samples_total", 0.0),
        ("berth_rank_affinity", 0.0),
    ] {
        let family = of(&page, name);
        assert_eq!(family.series.len(), 1, "{name}");
        assert_eq!(family.sum(&rank), value, "{name}");
        let labels: Vec<String> = family.labels().into_iter().collect();
        assert_eq!(labels, ["rank", "replica"], "{name}");
    }
    let mut fleet = FleetServiceClient::new(plane.channel.clone());
    let replicas = fleet.list_replicas(ListReplicasRequest::default()).await;
    let start = replicas.unwrap().into_inner().replicas[0].incarnation;
    let leave = DeregisterReplicaRequest {
        replica_id: "r".to_owned(),
        incarnation: start,
    };
    let mut sidecar = ReplicaServiceClient::new(plane.channel.clone());
    sidecar.deregister_replica(leave).await.unwrap();
    // The next start of it begins with nothing.
    let page = page::read(&plane.metrics().await);
    assert_eq!(of(&page, expected).sum(&rank), 0.0);
    plane.stop().await;
}

#[tokio::test]
async fn what_is_in_flight_is_told_while_it_is() {
    let plane = Plane::start(&[], "info").await;
    let _engine = plane.add("r", stepping(Duration::from_millis(5))).await;
    let calls: Vec<_> = (0..3)
        .map(|n| {
            let mut client = plane.client();
            let mut asked = Request::new(request(&[n], 5000));
            asked.set_timeout(Duration::from_secs(60));
            tokio::spawn(async move { client.sample(asked).await })
        })
        .collect();
    let sample = [("method", "berth.v1.SamplingService/Sample")];
    let told = async |requests: f64, samples: f64| {
        let page = page::read(&plane.metrics().await);
        of(&page, "berth_requests_in_flight").sum(&sample) == requests
            && of(&page, "berth_rank_in_flight_samples").sum(&[]) == samples
    };
    eventually("three run", async || told(3.0, 3.0).await).await;
    for call in &calls {
        call.abort();
    }
    eventually("none runs", async || told(0.0, 0.0).await).await;
    let page = page::read(&plane.metrics().await);
    let cancelled = [sample[0], ("code", "CANCELLED")];
    assert_eq!(of(&page, "berth_requests_total").sum(&cancelled), 3.0);
    plane.stop().await;
}

#[tokio::test]
async fn both_forms_are_well_formed_and_in_base_units() {
    let (plane, _engine) = scripted().await;
    let text = plane.metrics().await;
    for (name, family) in page::read(&text) {
        assert!(name.starts_with("berth_"), "{name}");
        assert_eq!(name.ends_with("_total"), family.kind == "counter", "{name}");
        let words: Vec<&str> = name.split('_').collect();
        for unit in [
            "ms",
            "us",
            "milliseconds",
            "microseconds",
            "minutes",
            "hours",
            "kb",
            "mb",
            "kilobytes",
            "megabytes",
            "mebibytes",
            "percent",
        ] {
            assert!(!words.contains(&unit), "{name} is not in base units");
        }
        if family.kind == "histogram" {
            let unit = words.last().unwrap();
            assert!(["seconds", "writes"].contains(unit), "{name}");
        }
        for label in family.labels() {
            let known = [
                "method", "code", "reason", "layer", "outcome", "failure", "how", "awaited",
                "state", "cause", "replica", "rank", "model", "version", "port", "limit",
            ];
            assert!(known.contains(&&*label), "{label} of {name}");
        }
    }
    promtool(&text);

    let accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
    let (_, kind, open) = plane.get("/metrics", Some(accept)).await;
    assert_eq!(
        kind,
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    assert!(open.ends_with("# EOF\n"));
    assert_eq!(open.matches("# EOF").count(), 1);
    assert!(open.contains("# TYPE berth_requests counter\n"), "{open}");
    assert!(open.contains("# UNIT berth_request_duration_seconds seconds\n"));
    plane.stop().await;
}

/// Prometheus' own check, where it is installed.
fn promtool(text: &str) {
    let started = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match started {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("SKIPPED: promtool is not installed (Debian's package prometheus has it)");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let mut input = child.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// A row of the table: name, type, labels, meaning.
fn documented() -> BTreeMap<String, [String; 3]> {
    include_str!("../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `berth_"))
        .map(|row| {
            let row = row.trim_end_matches('|').replace('`', "");
            let mut cells = row.split('|').map(|cell| cell.trim().to_owned());
            let mut cell = || cells.next().unwrap();
            (format!("berth_{}", cell()), [cell(), cell(), cell()])
        })
        .collect()
}

#[tokio::test]
async fn the_table_in_the_docs_is_what_is_served() {
    let (plane, _engine) = scripted().await;
    let served: BTreeMap<String, [String; 3]> = page::read(&plane.metrics().await)
        .into_iter()
        .map(|(name, family)| {
            let labels: Vec<String> = family.labels().into_iter().collect();
            let help = family.help.trim_end_matches('.').to_owned();
            (name, [family.kind, labels.join(", "), help])
        })
        .collect();
    let documented = documented();
    for (name, is) in &served {
        let row = |[kind, labels, help]: &[String; 3]| format!("{kind} | {labels} | {help}");
        let told = documented.get(name).map(row);
        assert_eq!(told.as_deref(), Some(&*row(is)), "`{name}`");
    }
    assert_eq!(
        served.keys().collect::<Vec<_>>(),
        documented.keys().collect::<Vec<_>>()
    );
    plane.stop().await;
}

#[tokio::test]
async fn probes_are_told_what_they_ask_for() {
    let plane = Plane::start(&["--drain-timeout", "20s"], "info").await;
    for path in ["/livez", "/healthz", "/readyz"] {
        let (status, _, _) = plane.get(path, None).await;
        assert_eq!(status, 200, "{path}: without replicas, too");
    }
    assert_eq!(plane.get("/nothing", None).await.0, 404);
    // In flight while it drains: alive, and not ready.
    let _engine = plane.add("r", stepping(Duration::from_millis(20))).await;
    let mut client = plane.client();
    let call = tokio::spawn(async move { client.sample(request(&[1, 2, 3], 200)).await });
    eventually("it runs", async || {
        let page = page::read(&plane.metrics().await);
        of(&page, "berth_rank_in_flight_samples").sum(&[]) == 1.0
    })
    .await;
    plane.drain();
    eventually("it is not ready", async || {
        plane.get("/readyz", None).await.0 == 503
    })
    .await;
    assert_eq!(plane.get("/healthz", None).await.0, 200);
    call.await.unwrap().unwrap();
    plane.stop().await;
}
