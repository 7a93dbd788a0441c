//! `/generate`: from a request's bytes to its reply.
//!
//! What the real front does and this one with it: a plain request goes on when
//! its client has gone, until a look every 4 s finds that; a stream is dropped
//! with its connection. While generation is paused everything that passed the
//! first checks waits here, known by its id, unknown to any rank.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    driver::Selector,
    engine::{Call, DISCONNECT_POLL, Engine},
    faults::{Cut, CutWhen, DropStream, Faults},
    reply::Said,
    request::{Fault, Parsed, parse},
    running::{Running, start},
    server::Connection,
};

pub(super) async fn generate(
    State(engine): State<Arc<Engine>>,
    Extension(connection): Extension<Connection>,
    body: Bytes,
) -> Response {
    let arrived = Instant::now();
    let call = engine.call();
    engine.history.lock().counters.received += 1;
    let struck = strike(&engine);
    match struck {
        Struck::Hang => return std::future::pending().await,
        Struck::Cut => return connection.cut(&engine).await,
        Struck::Unavailable => return plain_error(503, "The server is unavailable."),
        Struck::Failing => return plain_error(500, "Internal Server Error"),
        _ => {}
    }
    let closed = CancellationToken::new();
    let gone = closed.clone().drop_guard();
    let serving = serve(Arc::clone(&engine), body, arrived, struck, closed, call);
    // On a task of its own: it outlives the client.
    let task = engine.tasks.spawn({
        let root = engine.root.clone();
        async move { root.run_until_cancelled(serving).await }
    });
    match task.await {
        Ok(Some(Answer::Reply(response))) => {
            gone.disarm();
            response
        }
        Ok(Some(Answer::Cut)) => connection.cut(&engine).await,
        // The engine is dead: so is this connection, in a moment.
        _ => std::future::pending().await,
    }
}

/// What a fault does to this call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Struck {
    No,
    Hang,
    Cut,
    CutWhenDone,
    Unavailable,
    Failing,
    QueueFull,
    Drop(u32),
}

pub(super) fn strike(engine: &Engine) -> Struck {
    let mut faults = engine.faults.lock();
    if faults.hang.is_some() {
        return Struck::Hang;
    }
    if let Some(cut) = faults.cut {
        let mut times = Some(cut.times);
        Faults::strike(&mut times);
        faults.cut = times.map(|times| Cut { times, ..cut });
        return match cut.when {
            CutWhen::AtOnce => Struck::Cut,
            CutWhen::WhenDone => Struck::CutWhenDone,
        };
    }
    if Faults::strike(&mut faults.unavailable) {
        return Struck::Unavailable;
    }
    if Faults::strike(&mut faults.failing) {
        return Struck::Failing;
    }
    if Faults::strike(&mut faults.queue_full) {
        return Struck::QueueFull;
    }
    if let Some(drop) = faults.drop_stream {
        // Counted only once it is known that the request is a stream.
        return Struck::Drop(drop.after_tokens);
    }
    Struck::No
}

enum Answer {
    Reply(Response),
    Cut,
}

async fn serve(
    engine: Arc<Engine>,
    body: Bytes,
    arrived: Instant,
    struck: Struck,
    closed: CancellationToken,
    call: Call,
) -> Answer {
    if !engine.config.parse_delay.is_zero() {
        tokio::time::sleep(engine.config.parse_delay).await;
    }
    let parsed = match parse(&body) {
        Ok(parsed) => parsed,
        Err(fault) => {
            engine.history.lock().counters.refused += 1;
            return Answer::Reply(refuse(&fault));
        }
    };
    drop(body);
    if parsed.stream {
        if struck == Struck::CutWhenDone {
            return Answer::Cut;
        }
        let struck = match struck {
            Struck::Drop(_) => drop_now(&engine),
            other => other,
        };
        return Answer::Reply(streamed(engine, parsed, arrived, struck, call));
    }
    let answer = plain(&engine, parsed, arrived, struck, closed).await;
    match struck {
        Struck::CutWhenDone => Answer::Cut,
        _ => Answer::Reply(answer),
    }
}

/// Counts a stream that is dropped.
pub(super) fn drop_now(engine: &Engine) -> Struck {
    let mut faults = engine.faults.lock();
    let Some(drop) = faults.drop_stream else {
        return Struck::No;
    };
    let mut times = Some(drop.times);
    let strikes = Faults::strike(&mut times);
    faults.drop_stream = times.map(|times| DropStream { times, ..drop });
    if strikes {
        Struck::Drop(drop.after_tokens)
    } else {
        Struck::No
    }
}

pub(super) fn json_reply(status: u16, body: &serde_json::Value) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (
        status,
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}

/// An error of the engine's own making, as the real one words it.
fn plain_error(status: u16, message: &str) -> Response {
    json_reply(
        status,
        &json!({
            "object": "error",
            "message": message,
            "type": status.to_string(),
            "param": null,
            "code": status,
        }),
    )
}

fn refuse(fault: &Fault) -> Response {
    json_reply(400, &fault.body())
}

/// The reply at the end, all at once.
async fn plain(
    engine: &Arc<Engine>,
    parsed: Parsed,
    arrived: Instant,
    struck: Struck,
    closed: CancellationToken,
) -> Response {
    let mut running = match start(engine, parsed, arrived, struck == Struck::QueueFull).await {
        Ok(running) => running,
        Err(fault) => return refuse(&fault),
    };
    let waiting = Instant::now();
    let gone = noticed(engine, waiting, &closed);
    tokio::pin!(gone);
    let mut found_gone = false;
    let mut replies = vec![Vec::new(); running.sequences.len()];
    loop {
        let next = tokio::select! {
            next = running.next(false) => next,
            () = &mut gone, if !found_gone => {
                found_gone = true;
                engine.history.lock().counters.disconnects += 1;
                for job in running.flight.jobs.iter().flatten() {
                    engine.abort(&Selector::Job(*job));
                }
                continue;
            }
        };
        match next {
            None => break,
            Some((index, Said::Frame { json, last: true })) => replies[index] = json,
            Some((_, Said::Error(status, message))) => {
                return plain_error_or_fault(status, message);
            }
            Some(_) => {}
        }
    }
    let body = if running.list {
        let mut body = vec![b'['];
        for (at, reply) in replies.iter().enumerate() {
            if at > 0 {
                body.push(b',');
            }
            body.extend_from_slice(reply);
        }
        body.push(b']');
        body
    } else {
        replies.pop().unwrap_or_default()
    };
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn plain_error_or_fault(status: u16, message: &str) -> Response {
    if status == 400 {
        refuse(&Fault::Message(message.into()))
    } else {
        plain_error(status, message)
    }
}

/// Ends at the first look, one every [`DISCONNECT_POLL`], that finds the
/// client gone.
async fn noticed(engine: &Engine, since: Instant, closed: &CancellationToken) {
    closed.cancelled().await;
    let poll = engine.config.scaled(DISCONNECT_POLL);
    if poll.is_zero() {
        return;
    }
    let looks = since.elapsed().as_secs_f64() / poll.as_secs_f64();
    let next = Duration::try_from_secs_f64(looks.ceil() * poll.as_secs_f64());
    tokio::time::sleep_until(since + next.unwrap_or(poll)).await;
}

/// Where a stream stands.
enum Stage {
    Start(Box<(Arc<Engine>, Parsed, Instant, Struck)>),
    Running(Box<Running>, Struck),
    /// Every sequence is over.
    Last,
    Over,
}

/// Frames as they come. The head is sent at once, whatever comes.
fn streamed(
    engine: Arc<Engine>,
    parsed: Parsed,
    arrived: Instant,
    struck: Struck,
    call: Call,
) -> Response {
    let first = Stage::Start(Box::new((engine, parsed, arrived, struck)));
    let frames = stream::unfold((first, call), |(stage, call)| async move {
        let (frame, stage) = advance(stage).await?;
        Some((frame, (stage, call)))
    });
    (
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")],
        Body::from_stream(frames),
    )
        .into_response()
}

/// A stream ends like a dead engine's: without a word.
#[derive(Debug, thiserror::Error)]
#[error("the stream is dropped")]
pub(super) struct Dropped;

async fn advance(stage: Stage) -> Option<(Result<Vec<u8>, Dropped>, Stage)> {
    let (mut running, struck) = match stage {
        Stage::Over => return None,
        Stage::Last => return Some((Ok(b"data: [DONE]\n\n".to_vec()), Stage::Over)),
        Stage::Running(running, struck) => (running, struck),
        Stage::Start(start_of) => {
            let (engine, parsed, arrived, struck) = *start_of;
            let queue_full = struck == Struck::QueueFull;
            match start(&engine, parsed, arrived, queue_full).await {
                Ok(running) => (Box::new(running), struck),
                Err(fault) => {
                    let frame = sse(fault.frame().to_string().as_bytes());
                    return Some((Ok(frame), Stage::Last));
                }
            }
        }
    };
    loop {
        match running.next(true).await {
            None => return Some((Ok(b"data: [DONE]\n\n".to_vec()), Stage::Over)),
            Some((index, Said::Frame { json, last })) => {
                if let Struck::Drop(after) = struck
                    && (last || running.sequences[index].len() > after as usize)
                {
                    // What was sent before leaves before the connection breaks.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    running.flight.engine.history.lock().counters.cut += 1;
                    return Some((Err(Dropped), Stage::Over));
                }
                return Some((Ok(sse(&json)), Stage::Running(running, struck)));
            }
            Some(_) => {}
        }
    }
}

/// A frame of an event stream.
pub(super) fn sse(json: &[u8]) -> Vec<u8> {
    [b"data: ", json, b"\n\n"].concat()
}
