//! Connections: a closed one is an abort, so none is closed or kept by accident.

use berth::engine::{EngineClient, EngineError, EngineEvent, StreamMode, vllm::VllmClient};
use futures_util::StreamExt;

use crate::{
    LONG, failure,
    fixtures::recorded,
    outcome, run,
    server::{Answer, Server, chunked},
};

#[tokio::test]
async fn a_finished_stream_leaves_its_connection_to_the_next() {
    let rec = recorded("gen_stream");
    let bytes = chunked(&rec.kind, &rec.body, 64, false);
    let server = Server::start(vec![Answer::Keep(bytes, 1 << 20); 50]).await;
    let client = VllmClient::default();
    // The tail is read in the background: some soon next attempt finds the
    // connection free.
    let mut last = None;
    for _ in 0..50 {
        let asked = rec.call(&server.url(), StreamMode::Incremental);
        outcome(run(&client, asked).await);
        let connection = server.take_requests()[0].connection;
        if last.replace(connection) == Some(connection) {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("no connection was used twice");
}

#[tokio::test]
async fn what_is_dropped_closes_its_connection() {
    let stream = recorded("gen_stream");
    let half = &stream.body[..stream.body.len() / 2];
    let server = Server::start(vec![
        Answer::Hang(chunked(&stream.kind, half, 1 << 20, true)),
        Answer::Hang(Vec::new()),
    ])
    .await;
    let client = VllmClient::default();
    // After its first tokens, and before any answer.
    let mut events = client.generate(stream.call(&server.url(), StreamMode::Incremental));
    let first = tokio::time::timeout(LONG, events.next()).await.unwrap();
    assert!(matches!(first, Some(Ok(EngineEvent::Tokens(_)))));
    drop(events);
    let mut closed = server.closed_by_client.clone();
    let waiting = closed.wait_for(|n| *n == 1);
    tokio::time::timeout(LONG, waiting).await.unwrap().unwrap();

    let mut events = client.generate(stream.call(&server.url(), StreamMode::Plain));
    assert!(
        tokio::time::timeout(std::time::Duration::from_millis(200), events.next())
            .await
            .is_err()
    );
    drop(events);
    let waiting = closed.wait_for(|n| *n == 2);
    tokio::time::timeout(LONG, waiting).await.unwrap().unwrap();
}

#[tokio::test]
async fn nobody_there_is_refused_and_sent_nothing() {
    let asked = recorded("gen_plain").call("http://127.0.0.1:1", StreamMode::Plain);
    let error = failure(run(&VllmClient::default(), asked).await);
    assert!(matches!(error, EngineError::Refused(_)), "{error:?}");
}
