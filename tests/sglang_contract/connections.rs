//! Connections: what broke when, what may be sent again, what is closed.

use std::time::Duration;

use berth::engine::{
    ClientConfig, EngineClient, EngineError, EngineRequest, StreamMode,
    http::{HttpClient, HttpConfig, HttpError},
    sglang::SglangClient,
};
use futures_util::StreamExt;
use http::Method;
use tokio::net::TcpSocket;

use crate::{
    LONG, failure,
    fixtures::{call, id, recorded},
    outcome, run,
    server::{Answer, Server, chunked, reply},
};

fn plain(url: &str) -> EngineRequest {
    call(&recorded("gen_plain").request, url, StreamMode::Plain)
}

fn good() -> Answer {
    let rec = recorded("gen_plain");
    Answer::Keep(reply(200, "application/json", "", &rec.body), 1 << 20)
}

/// A URL that nothing listens on, and the socket that keeps it so.
fn nobody() -> (String, TcpSocket) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    (format!("http://{}", socket.local_addr().unwrap()), socket)
}

#[tokio::test]
async fn a_closed_port_refuses() {
    let client = SglangClient::default();
    let (url, _kept) = nobody();
    let error = failure(run(&client, plain(&url)).await);
    assert!(
        matches!(&error, EngineError::Refused(m) if m.contains("refused")),
        "{error:?}"
    );
    assert!(matches!(
        client.abort(&url, &id("x")).await,
        Err(EngineError::Refused(_))
    ));
    assert!(matches!(
        client.ready(&url).await,
        Err(EngineError::Refused(_))
    ));
}

#[tokio::test]
async fn what_is_no_http_address_refuses() {
    for url in ["https://127.0.0.1:1", "127.0.0.1:1", "", "http://"] {
        let error = failure(run(&SglangClient::default(), plain(url)).await);
        assert!(matches!(error, EngineError::Refused(_)), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn a_connection_that_is_not_made_in_time_refuses() {
    // A listener whose queue is full leaves the next handshake unanswered.
    let listener = TcpSocket::new_v4().unwrap();
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listener.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut held = Vec::new();
    while let Ok(Ok(socket)) = tokio::time::timeout(
        Duration::from_millis(200),
        tokio::net::TcpStream::connect(address),
    )
    .await
    {
        held.push(socket);
        assert!(held.len() < 1000, "the queue has a bound");
    }
    let http = HttpClient::new(HttpConfig {
        connect_timeout: Duration::from_millis(200),
        ..HttpConfig::default()
    });
    let client = SglangClient::new(http, ClientConfig::default());
    let error = failure(run(&client, plain(&format!("http://{address}"))).await);
    assert!(matches!(error, EngineError::Refused(_)), "{error:?}");
}

#[tokio::test]
async fn a_close_without_an_answer_is_lost_and_sent_once() {
    for first in [
        Answer::Close(Vec::new(), 1),
        Answer::Close(b"HTTP/1.1 20".to_vec(), 1),
    ] {
        let server = Server::start(vec![first, good()]).await;
        let error = failure(run(&SglangClient::default(), plain(&server.url())).await);
        assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
        assert_eq!(server.take_requests().len(), 1);
    }
}

#[tokio::test]
async fn a_request_on_a_reused_connection_is_not_sent_twice_either() {
    let server = Server::start(vec![good(), Answer::Close(Vec::new(), 1), good()]).await;
    let client = SglangClient::default();
    outcome(run(&client, plain(&server.url())).await);
    let error = failure(run(&client, plain(&server.url())).await);
    assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
    let requests = server.take_requests();
    assert_eq!(requests.len(), 2);
    assert_eq!(
        requests[0].connection, requests[1].connection,
        "the connection was reused, or this test shows nothing"
    );
}

#[tokio::test]
async fn a_connection_that_the_engine_closed_while_idle_costs_nothing() {
    let rec = recorded("gen_plain");
    let close = Answer::Close(reply(200, "application/json", "", &rec.body), 1 << 20);
    let mut server = Server::start(vec![close.clone(), close.clone(), close]).await;
    let client = SglangClient::default();
    for n in 1..4 {
        outcome(run(&client, plain(&server.url())).await);
        // The client has seen the close when it closes in turn.
        client_goes(&mut server, n).await;
    }
    assert_eq!(server.take_requests().len(), 3);
}

#[tokio::test]
async fn a_reply_cut_short_is_lost() {
    let rec = recorded("gen_plain");
    let mut bytes = reply(200, "application/json", "", &rec.body);
    bytes.truncate(bytes.len() - 5);
    let server = Server::start(vec![Answer::Close(bytes, 1 << 20)]).await;
    let error = failure(run(&SglangClient::default(), plain(&server.url())).await);
    assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
}

#[tokio::test]
async fn what_is_not_http_is_a_bad_reply() {
    let huge = [b"HTTP/1.1 200 OK\r\nx: ".to_vec(), vec![b'x'; 300 * 1024]].concat();
    for bytes in [b"SSH-2.0-OpenSSH\r\n\r\n".to_vec(), huge] {
        let server = Server::start(vec![Answer::Hang(bytes)]).await;
        let error = failure(run(&SglangClient::default(), plain(&server.url())).await);
        assert!(matches!(error, EngineError::BadReply(_)), "{error:?}");
    }
}

/// Waits until the server has seen its client close so many connections.
async fn client_goes(server: &mut Server, count: usize) {
    tokio::time::timeout(LONG, server.closed_by_client.wait_for(|n| *n == count))
        .await
        .expect("the connection is closed")
        .unwrap();
}

#[tokio::test]
async fn a_stream_that_is_dropped_closes_its_connection() {
    let rec = recorded("stream_cut_engine_killed");
    let bytes = chunked(&rec.kind, &rec.body, 64, true);
    let mut server = Server::start(vec![Answer::Hang(bytes)]).await;
    let client = SglangClient::default();
    let request = call(
        &rec.request,
        &server.url(),
        StreamMode::Cumulative { interval: 1 },
    );
    let mut stream = client.generate(request);
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    client_goes(&mut server, 1).await;
}

#[tokio::test]
async fn a_request_that_is_dropped_before_its_answer_closes_its_connection() {
    let mut server = Server::start(vec![Answer::Hang(Vec::new())]).await;
    let client = SglangClient::default();
    let mut stream = client.generate(plain(&server.url()));
    tokio::select! {
        event = stream.next() => panic!("{event:?}"),
        () = async {
            while server.take_requests().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        } => {}
    }
    drop(stream);
    client_goes(&mut server, 1).await;
}

#[tokio::test]
async fn a_plain_reply_that_is_dropped_half_read_closes_its_connection() {
    let mut bytes = reply(200, "application/json", "", &[b' '; 100]);
    bytes.truncate(bytes.len() - 50);
    let mut server = Server::start(vec![Answer::Hang(bytes)]).await;
    let client = SglangClient::default();
    let mut stream = client.generate(plain(&server.url()));
    assert!(
        tokio::time::timeout(Duration::from_millis(200), stream.next())
            .await
            .is_err()
    );
    drop(stream);
    client_goes(&mut server, 1).await;
}

#[tokio::test]
async fn a_finished_stream_leaves_its_connection_to_the_next() {
    let rec = recorded("gen_stream");
    let bytes = chunked(&rec.kind, &rec.body, 64, false);
    let server = Server::start(vec![Answer::Keep(bytes, 9); 50]).await;
    let client = SglangClient::default();
    // The tail is read in the background: some soon next attempt finds the
    // connection free.
    let mut last = None;
    for _ in 0..50 {
        let request = call(
            &rec.request,
            &server.url(),
            StreamMode::Cumulative { interval: 1 },
        );
        outcome(run(&client, request).await);
        let connection = server.take_requests()[0].connection;
        if last.replace(connection) == Some(connection) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no connection was used twice");
}

#[tokio::test]
async fn nothing_is_sent_before_the_stream_is_polled() {
    let server = Server::start(vec![good()]).await;
    let stream = SglangClient::default().generate(plain(&server.url()));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(server.take_requests().is_empty());
    outcome(stream.collect().await);
}

#[tokio::test]
async fn a_silent_engine_ends_control_calls_in_time() {
    let server = Server::start(vec![
        Answer::Hang(Vec::new()),
        Answer::Hang(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n".to_vec()),
    ])
    .await;
    let config = ClientConfig {
        control_timeout: Duration::from_millis(100),
        ..ClientConfig::default()
    };
    let client = SglangClient::new(HttpClient::default(), config);
    for _ in 0..2 {
        let error = client.ready(&server.url()).await.unwrap_err();
        assert!(matches!(error, EngineError::Lost(_)), "{error:?}");
    }
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_not_read() {
    let server = Server::start(vec![Answer::Keep(
        reply(200, "x", "", &[b'x'; 1001]),
        1 << 20,
    )])
    .await;
    let error = HttpClient::default()
        .call(Method::GET, &server.url(), "/x", None, 1000, LONG)
        .await
        .unwrap_err();
    assert_eq!(error, HttpError::TooLarge(1000));
}
