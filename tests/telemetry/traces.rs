//! The spans of a request, as a collector gets them.

use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use tokio::time::Instant;
use tonic::Request;

use crate::{
    collector::{Collector, attribute},
    front::Manner,
    plane::{Plane, eventually, instant},
    requests::request,
};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn traced<T>(message: T, flags: &str) -> Request<T> {
    let mut call = Request::new(message);
    let context = format!("00-{TRACE}-{CLIENT}-{flags}");
    call.metadata_mut()
        .insert("traceparent", context.parse().unwrap());
    call
}

/// The spans of the client's trace, once its root has come: it is the last.
async fn spans(collector: &Collector) -> Vec<Span> {
    let of_trace = || {
        let mut spans = collector.spans();
        spans.retain(|span| hex(&span.trace_id) == TRACE);
        spans
    };
    eventually("the root has come", async || {
        of_trace().iter().any(|s| hex(&s.parent_span_id) == CLIENT)
    })
    .await;
    of_trace()
}

fn children<'a>(spans: &'a [Span], parent: &str) -> Vec<&'a Span> {
    let children = spans.iter().filter(|s| hex(&s.parent_span_id) == parent);
    children.collect()
}

#[tokio::test]
async fn a_request_is_one_tree_from_the_client_s_span_to_the_engine_s_attempt() {
    let collector = Collector::start().await;
    let plane = Plane::start(&["--otlp-endpoint", &collector.url], "info").await;
    let engine = plane.add("r", instant()).await;
    let mut asked = request(&[1, 2, 3], 5);
    asked.idempotency_key = Some("k".into());
    asked.sampling.as_mut().unwrap().temperature = Some(0.5);
    plane.client().sample(traced(asked, "01")).await.unwrap();
    let spans = spans(&collector).await;

    let mut parent = CLIENT.to_owned();
    let mut path = Vec::new();
    while let [span] = children(&spans, &parent)[..] {
        path.push(span.clone());
        parent = hex(&span.span_id);
    }
    let names: Vec<&str> = path.iter().map(|span| &*span.name).collect();
    let attempt = format!("text_completion {}", engine.sim.config().model);
    assert_eq!(
        names,
        [
            "berth.v1.SamplingService/Sample",
            "deadline",
            "validate",
            "idempotency",
            "resolve",
            "admission",
            "affinity",
            "dispatch",
            &attempt,
        ]
    );
    assert_eq!(spans.len(), path.len(), "and nothing beside: {spans:?}");

    let root = &path[0];
    assert_eq!(root.kind(), SpanKind::Server);
    for (key, value) in [
        ("rpc.system", "grpc"),
        ("rpc.service", "berth.v1.SamplingService"),
        ("rpc.method", "Sample"),
        ("rpc.grpc.status_code", "0"),
    ] {
        assert_eq!(attribute(&root.attributes, key).as_deref(), Some(value));
    }
    let leaf = path.last().unwrap();
    assert_eq!(leaf.kind(), SpanKind::Client);
    let address = engine.front.url();
    let (host, port) = address
        .trim_start_matches("http://")
        .split_once(':')
        .unwrap();
    for (key, value) in [
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.provider.name", "sglang"),
        ("gen_ai.request.model", &*engine.sim.config().model),
        ("gen_ai.request.max_tokens", "5"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.usage.input_tokens", "3"),
        ("gen_ai.usage.output_tokens", "5"),
        ("gen_ai.response.finish_reasons", "length"),
        ("server.address", host),
        ("server.port", port),
        ("berth.replica.id", "r"),
        ("berth.replica.rank", "0"),
        ("berth.attempt.number", "1"),
    ] {
        assert_eq!(
            attribute(&leaf.attributes, key).as_deref(),
            Some(value),
            "{key} of {leaf:?}"
        );
    }
    for span in &path {
        assert_ne!(
            span.status.as_ref().map_or(0, |status| status.code),
            StatusCode::Error as i32,
            "{span:?}"
        );
    }
    let sent = format!("00-{TRACE}-{}-01", hex(&leaf.span_id));
    assert_eq!(engine.front.contexts(), [Some(sent)]);

    let resource = collector.received()[0].resource_spans[0].resource.clone();
    let resource = resource.unwrap().attributes;
    let service = attribute(&resource, "service.name");
    assert_eq!(service.as_deref(), Some("berth"));
    let log = plane.stop().await;
    assert!(log.contains(&format!("trace_id={TRACE}")), "{log}");
}

#[tokio::test]
async fn every_attempt_is_a_span_and_a_failed_one_says_how() {
    let collector = Collector::start().await;
    let plane = Plane::start(&["--otlp-endpoint", &collector.url], "info").await;
    let (a, b) = (
        plane.add("a", instant()).await,
        plane.add("b", instant()).await,
    );
    a.front.set(Manner::FailsWithEcho);
    b.front.set(Manner::FailsWithEcho);
    let failed = plane.client().sample(traced(request(&[1], 5), "01")).await;
    failed.unwrap_err();
    let spans = spans(&collector).await;
    let root = spans.iter().find(|s| hex(&s.parent_span_id) == CLIENT);
    let root = root.unwrap();
    assert_eq!(root.status.as_ref().unwrap().code(), StatusCode::Error);
    let kind = attribute(&root.attributes, "error.type");
    assert_eq!(kind.as_deref(), Some("REPLICA_LOST"));
    let attempts: Vec<_> = spans
        .iter()
        .filter(|s| s.kind() == SpanKind::Client)
        .collect();
    assert!(attempts.len() > 1, "{spans:?}");
    for attempt in attempts {
        let kind = attribute(&attempt.attributes, "error.type");
        assert_eq!(kind.as_deref(), Some("failed"), "{attempt:?}");
    }
    drop(plane.stop().await);
}

#[tokio::test]
async fn what_the_client_does_not_sample_is_not_told_of() {
    let collector = Collector::start().await;
    let plane = Plane::start(&["--otlp-endpoint", &collector.url], "info").await;
    let engine = plane.add("r", instant()).await;
    let mut client = plane.client();
    client.sample(traced(request(&[1], 5), "00")).await.unwrap();
    plane.stop().await;
    let spans = collector.spans();
    assert!(spans.iter().all(|span| hex(&span.trace_id) != TRACE));
    // The engine's own trace may be kept all the same.
    let sent = engine.front.contexts().remove(0).unwrap();
    assert!(
        sent.starts_with(&format!("00-{TRACE}-")) && sent.ends_with("-00"),
        "{sent}"
    );
}

#[tokio::test]
async fn without_a_collector_engines_are_sent_no_context() {
    let plane = Plane::start(&[], "trace").await;
    let engine = plane.add("r", instant()).await;
    let mut client = plane.client();
    client.sample(traced(request(&[1], 5), "01")).await.unwrap();
    assert_eq!(engine.front.contexts(), [None]);
    plane.stop().await;
}

/// A port that accepts and never answers, and one where nobody listens.
#[tokio::test]
async fn a_dead_collector_costs_requests_nothing_and_the_end_little() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = {
        let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        taken.local_addr().unwrap()
    };
    for (address, refuses) in [(silent.local_addr().unwrap(), false), (nobody, true)] {
        let endpoint = format!("http://{address}");
        let plane = Plane::start(&["--otlp-endpoint", &endpoint], "info").await;
        let _engine = plane.add("r", instant()).await;
        for i in 0..50 {
            plane.client().sample(request(&[i], 5)).await.unwrap();
        }
        if refuses {
            eventually("the spans are dropped, and counted", async || {
                let page = plane.metrics().await;
                let mut lines = page.lines();
                let dropped = lines.find_map(|l| l.strip_prefix("berth_spans_dropped_total "));
                dropped.unwrap().parse::<u64>().unwrap() > 0
            })
            .await;
        }
        let begun = Instant::now();
        plane.stop().await;
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}
