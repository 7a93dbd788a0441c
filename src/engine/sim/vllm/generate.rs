//! `/inference/v1/generate`: from a request's bytes to its reply. Whatever the
//! reply was to be, it is dropped with its connection, and what runs for it is
//! aborted then.

use std::sync::Arc;

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use tokio::time::Instant;

use super::{
    reply::{Counted, Said, Sequence, frame, named, whole},
    request::{Fault, Request, Style, parse},
};
use crate::engine::sim::{
    engine::{Call as OpenCall, Engine},
    flight::{self, Call, Flight, fresh_rid},
    generate::{Dropped, Struck, drop_now, json_reply, sse, strike},
    server::Connection,
};

/// Before every id of this route.
pub(super) const PREFIX: &str = "generate-tokens-";

pub(super) async fn generate(
    State(engine): State<Arc<Engine>>,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let arrived = Instant::now();
    let call = engine.call();
    engine.history.lock().counters.received += 1;
    let mut struck = strike(&engine);
    match struck {
        Struck::Hang => return std::future::pending().await,
        Struck::Cut => return connection.cut(&engine).await,
        Struck::Unavailable => return Fault::busy("The server is unavailable.").reply(),
        _ => {}
    }
    if !engine.config.parse_delay.is_zero() {
        tokio::time::sleep(engine.config.parse_delay).await;
    }
    let refuse = |fault: &Fault| {
        engine.history.lock().counters.refused += 1;
        fault.reply()
    };
    let checked = |request: Request| {
        let checked = request.check(&engine.config, &engine.adapters.lock());
        checked.map(|()| request)
    };
    let request = match parse(&body).and_then(checked) {
        Ok(request) => request,
        Err(fault) => return refuse(&fault),
    };
    drop(body);
    let style = request.style();
    let order = match Order::read(&engine, request, &headers, arrived, struck) {
        Ok(order) => order,
        Err(fault) if style.stream && fault.late => return ended(&fault),
        Err(fault) => return refuse(&fault),
    };
    if style.stream {
        match struck {
            Struck::CutWhenDone => return connection.cut(&engine).await,
            Struck::Drop(_) => struck = drop_now(&engine),
            _ => {}
        }
        return streamed(engine, order, struck, call);
    }
    // Dropped at any point, it aborts what runs.
    let left = Left(Some(Arc::clone(&engine)));
    let answer = plain(&engine, order).await;
    left.answered();
    match (answer, struck) {
        (_, Struck::CutWhenDone) => connection.cut(&engine).await,
        (Ok(response), _) => response,
        (Err(fault), _) => fault.reply(),
    }
}

/// Counts a client that goes away before its reply.
struct Left(Option<Arc<Engine>>);

impl Left {
    fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(engine) = &self.0 {
            engine.history.lock().counters.disconnects += 1;
        }
    }
}

/// A request that is to run.
struct Order {
    id: Arc<str>,
    request: Request,
    call: Call,
}

impl Order {
    fn read(
        engine: &Arc<Engine>,
        request: Request,
        headers: &HeaderMap,
        arrived: Instant,
        struck: Struck,
    ) -> Result<Self, Fault> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let rank = Request::rank(text("x-data-parallel-rank"), engine.config.ranks)?;
        // The header goes before the body.
        let id = match text("x-request-id").or(request.request_id.as_deref()) {
            Some(id) => named(PREFIX, id),
            None => named(PREFIX, &fresh_rid()[..16]),
        };
        let rids = vec![Arc::clone(&id); request.n()];
        // An id outside the range of the type is outside the vocabulary too.
        let prompt: Vec<u32> = request
            .token_ids
            .iter()
            .map(|&id| u32::try_from(id).unwrap_or(u32::MAX))
            .collect();
        let call = Call {
            live: engine.make_live_again(&rids),
            n: rids.len(),
            rids,
            prompts: vec![prompt],
            rank,
            stream: request.style().stream,
            namespace: namespace(&request, engine),
            // Lower is earlier.
            priority: request.priority.unwrap_or(0).saturating_neg(),
            arrived,
            queue_full: struck == Struck::QueueFull,
        };
        Ok(Self { id, request, call })
    }
}

/// What shares KV.
fn namespace(request: &Request, engine: &Engine) -> Arc<str> {
    let salt = request.cache_salt.as_deref().unwrap_or_default();
    match request.adapter(&engine.config) {
        Some(adapter) => format!("{adapter}@{salt}").into(),
        None => salt.into(),
    }
}

/// A call that runs.
struct Running {
    id: Arc<str>,
    /// As the reply names it.
    model: String,
    prompt: Vec<u32>,
    style: Style,
    flight: Flight,
    sequences: Vec<Sequence>,
}

impl Running {
    async fn start(engine: &Arc<Engine>, order: Order) -> Result<Self, Fault> {
        if *engine.errored.borrow() {
            return Err(Fault::dead());
        }
        let Order { id, request, call } = order;
        let style = request.style();
        let model = request.adapter(&engine.config);
        let model = model.unwrap_or(&engine.config.model).to_owned();
        let prompt = call.prompts.first().cloned().unwrap_or_default();
        let vocab = engine.config.vocab_size;
        let sequences = (0..call.n)
            .map(|index| Sequence::new(index, &prompt, vocab, style))
            .collect();
        let flight = flight::start(engine, call, |config| {
            Ok::<_, Fault>(vec![request.sampling(config)?])
        })
        .await?;
        Ok(Self {
            id,
            model,
            prompt,
            style,
            flight,
            sequences,
        })
    }

    /// What is said next. Unset: all sequences are over.
    async fn next(&mut self) -> Option<(usize, Said)> {
        let mut errored = self.flight.engine.errored.subscribe();
        let (index, event) = tokio::select! {
            biased;
            event = self.flight.next() => event?,
            // The sender lives as long as the engine.
            _ = errored.wait_for(|errored| *errored) => {
                return Some((0, Said::Fault(Fault::dead())));
            }
        };
        let version = self.flight.engine.version();
        Some((index, self.sequences[index].take(&event, &version)))
    }

    fn counted(&self) -> Counted {
        Counted::of(self.prompt.len(), &self.sequences)
    }
}

async fn plain(engine: &Arc<Engine>, order: Order) -> Result<Response, Fault> {
    let mut running = Running::start(engine, order).await?;
    while let Some((_, said)) = running.next().await {
        if let Said::Fault(fault) = said {
            return Err(fault);
        }
    }
    let Running {
        id,
        model,
        prompt,
        style,
        sequences,
        ..
    } = running;
    let now = engine.clock.now();
    Ok(json_reply(
        200,
        &whole(&id, &model, now, &prompt, sequences, style),
    ))
}

/// A stream that is over with its first frame.
fn ended(fault: &Fault) -> Response {
    event_stream(Body::from(
        [&sse(fault.body().to_string().as_bytes())[..], DONE].concat(),
    ))
}

const DONE: &[u8] = b"data: [DONE]\n\n";

fn event_stream(body: Body) -> Response {
    (
        [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")],
        body,
    )
        .into_response()
}

/// Where a stream stands.
enum Stage {
    Start(Box<(Arc<Engine>, Order, Struck)>),
    Running(Box<Running>, Struck),
    /// Every sequence is over.
    Last,
    Over,
}

/// Frames as they come. The head is sent at once, whatever comes.
fn streamed(engine: Arc<Engine>, order: Order, struck: Struck, call: OpenCall) -> Response {
    let first = Stage::Start(Box::new((engine, order, struck)));
    let frames = stream::unfold((first, call), |(stage, call)| async move {
        let (frame, stage) = advance(stage).await?;
        Some((frame, (stage, call)))
    });
    event_stream(Body::from_stream(frames))
}

async fn advance(stage: Stage) -> Option<(Result<Vec<u8>, Dropped>, Stage)> {
    let failed = |fault: Fault| {
        let frame = sse(fault.body().to_string().as_bytes());
        Some((Ok(frame), Stage::Last))
    };
    let (mut running, struck) = match stage {
        Stage::Over => return None,
        Stage::Last => return Some((Ok(DONE.to_vec()), Stage::Over)),
        Stage::Running(running, struck) => (running, struck),
        Stage::Start(start_of) => {
            let (engine, order, struck) = *start_of;
            match Running::start(&engine, order).await {
                Ok(running) => (Box::new(running), struck),
                Err(fault) => return failed(fault),
            }
        }
    };
    loop {
        let Some((index, said)) = running.next().await else {
            let usage = running.style.include_usage.then(|| {
                let usage = running.counted().at_end();
                sse(&frame(&running.id, None, usage))
            });
            return Some(match usage {
                Some(usage) => (Ok(usage), Stage::Last),
                None => (Ok(DONE.to_vec()), Stage::Over),
            });
        };
        match said {
            Said::Nothing => {}
            Said::Fault(fault) => return failed(fault),
            Said::Choices(choices) => {
                let last = choices.iter().any(|c| !c["finish_reason"].is_null());
                if let Struck::Drop(after) = struck
                    && (last || running.sequences[index].len() > after as usize)
                {
                    // What was sent before leaves before the connection breaks.
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                    running.flight.engine.history.lock().counters.cut += 1;
                    return Some((Err(Dropped), Stage::Over));
                }
                let usage = if running.style.continuous_usage {
                    running.counted().so_far()
                } else {
                    serde_json::Value::Null
                };
                let frames: Vec<Vec<u8>> = choices
                    .into_iter()
                    .map(|choice| sse(&frame(&running.id, Some(choice), usage.clone())))
                    .collect();
                return Some((Ok(frames.concat()), Stage::Running(running, struck)));
            }
        }
    }
}
