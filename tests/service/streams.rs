//! `SampleStream`.

use std::time::Duration;

use berth::{
    engine::sim::{DropStream, Faults, Times},
    proto::{SampleRequest, SampleResponse, sample_stream_response::Event},
};
use tonic::Streaming;

use crate::cluster::{Cluster, expected, ids, instant, only, request, stepping};

/// What a client holds that obeys the events.
#[derive(Default)]
struct Heard {
    tokens: Vec<u32>,
    deltas: usize,
    resets: usize,
    started: usize,
    last: Option<SampleResponse>,
}

async fn hear(mut stream: Streaming<berth::proto::SampleStreamResponse>) -> Heard {
    let mut heard = Heard::default();
    while let Some(message) = stream.message().await.unwrap() {
        assert!(heard.last.is_none(), "nothing follows the final message");
        match message.event.unwrap() {
            Event::Started(started) => {
                assert_eq!(heard.deltas, 0);
                assert!(!started.routes.is_empty());
                heard.started += 1;
            }
            Event::Delta(delta) => {
                assert_eq!(delta.offset as usize, heard.tokens.len());
                heard.tokens.extend(delta.token_ids);
                heard.deltas += 1;
            }
            Event::Reset(reset) => {
                heard.tokens.truncate(reset.keep as usize);
                heard.resets += 1;
            }
            Event::Alive(_) => {}
            Event::Final(response) => heard.last = Some(response),
        }
    }
    heard
}

async fn stream(cluster: &Cluster, request: SampleRequest) -> Heard {
    hear(
        cluster
            .client()
            .sample_stream(request)
            .await
            .unwrap()
            .into_inner(),
    )
    .await
}

#[tokio::test]
async fn tokens_come_as_the_engine_makes_them_and_the_end_is_the_unary_answer() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let asked = SampleRequest {
        idempotency_key: Some("k".to_owned()),
        ..request(&prompt, 60)
    };
    let heard = stream(&cluster, asked.clone()).await;
    assert_eq!(heard.started, 1);
    assert_eq!(heard.tokens, expected(&prompt, 60));
    assert!(heard.deltas > 5, "{} deltas", heard.deltas);
    let unary = cluster.sample(asked.clone()).await.unwrap();
    assert!(unary.replayed);
    assert_eq!(heard.last.unwrap().samples, unary.samples);
    // A replay streams what is stored.
    let replay = stream(&cluster, asked).await;
    assert_eq!(replay.tokens, expected(&prompt, 60));
    assert!(replay.last.unwrap().replayed);
    assert_eq!(cluster.received(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn a_joiner_gets_what_was_produced_then_follows() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let asked = SampleRequest {
        idempotency_key: Some("k".to_owned()),
        ..request(&prompt, 80)
    };
    let mut first = cluster
        .client()
        .sample_stream(asked.clone())
        .await
        .unwrap()
        .into_inner();
    let mut seen = 0;
    while seen < 20 {
        if let Some(Event::Delta(delta)) = first.message().await.unwrap().unwrap().event {
            seen += delta.token_ids.len();
        }
    }
    let (joiner, rest) = tokio::join!(stream(&cluster, asked), async {
        let mut tokens = 0;
        while let Some(message) = first.message().await.unwrap() {
            if let Some(Event::Delta(delta)) = message.event {
                tokens += delta.token_ids.len();
            }
        }
        tokens
    });
    assert_eq!(joiner.tokens, expected(&prompt, 80));
    assert_eq!(seen + rest, 80);
    assert_eq!(cluster.received(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn a_lost_attempt_is_taken_back() {
    let cluster = Cluster::start(2, stepping(Duration::from_millis(2))).await;
    for engine in cluster.engines() {
        engine.set_faults(Faults {
            drop_stream: Some(DropStream {
                times: Times::Next(1),
                after_tokens: 20,
            }),
            ..Faults::default()
        });
    }
    let prompt = ids(1, 64);
    let heard = stream(&cluster, request(&prompt, 40)).await;
    assert_eq!(heard.tokens, expected(&prompt, 40));
    assert!(heard.resets >= 1);
    assert_eq!(only(heard.last.as_ref().unwrap()).token_ids, heard.tokens);
    cluster.stop().await;
}

#[tokio::test]
async fn a_refusal_is_the_streams_status() {
    let cluster = Cluster::start(1, instant()).await;
    let status = cluster
        .client()
        .sample_stream(SampleRequest::default())
        .await
        .unwrap_err();
    assert_eq!(crate::cluster::reason(&status), "INVALID_REQUEST");
    cluster.stop().await;
}
