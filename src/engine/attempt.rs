//! One attempt over HTTP, whatever JSON the engine speaks: sent once, read to its
//! end, given as events. It guarantees that nothing is told as finished without
//! the end mark `[DONE]` of a stream or the whole of a plain reply, that no frame
//! or body beyond the limit is held, and that nothing follows an error.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use http::{HeaderMap, Method, StatusCode, header};

use super::{
    EngineError, EngineEvent, EngineRequest, EngineStream, Finish, TokenChunk,
    http::{HttpClient, HttpError, Reply, ReplyBody},
    refusal,
    sse::SseParser,
};
use crate::telemetry::trace::TRACEPARENT;

/// Limits of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientConfig {
    /// A plain reply, or one frame of a stream, in bytes. The default, 64 MiB,
    /// takes what one answer can honestly hold: a log probability is some 30
    /// bytes of SGLang's JSON, so 32k generated tokens with 20 alternatives each
    /// are 20 MiB, which a cumulative frame repeats, and those of a 128k-token
    /// prompt with ten alternatives 40 MiB; an alternative is some 60 bytes of
    /// vLLM's, so 32k generated tokens with 20 each are 40 MiB. Routed experts of
    /// long outputs of large models need more.
    pub max_frame_bytes: usize,
    /// For aborts and readiness: an engine answers both in some 20 ms.
    pub control_timeout: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            max_frame_bytes: 64 * 1024 * 1024,
            control_timeout: Duration::from_secs(2),
        }
    }
}

/// The answer to a question that generates nothing, in bytes at most.
const MAX_CONTROL_BYTES: usize = 64 * 1024;

/// Asks such a question.
pub(super) async fn control(
    http: &HttpClient,
    config: &ClientConfig,
    method: Method,
    url: &str,
    path: &str,
    json: Option<Bytes>,
) -> Result<(StatusCode, HeaderMap, Bytes), EngineError> {
    let limit = config.control_timeout;
    let answer = http.call(method, url, path, json, MAX_CONTROL_BYTES, limit);
    Ok(answer.await?)
}

/// What is particular to one engine's API.
pub(super) trait Dialect: Send + Sync + 'static {
    /// Checks what comes back.
    type Transcript: Transcript;

    /// The connections.
    fn http(&self) -> &HttpClient;

    /// A plain reply, or one frame of a stream, in bytes at most.
    fn max_frame_bytes(&self) -> usize;

    /// What to send.
    fn ask(&self, request: &EngineRequest) -> Result<Ask, EngineError>;

    /// What to hold the answer against.
    fn transcript(&self, request: &EngineRequest) -> Self::Transcript;

    /// What an answer other than success means.
    fn refused(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> EngineError;
}

/// A request as it goes over the wire.
pub(super) struct Ask {
    pub(super) path: &'static str,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// The answer is to be an event stream.
    pub(super) stream: bool,
}

/// What has been received of one attempt, and checked.
pub(super) trait Transcript: Send + 'static {
    /// Takes a whole plain reply, or one frame of a stream, and gives the tokens
    /// that it adds.
    fn accept(&mut self, json: &[u8]) -> Result<Option<TokenChunk>, EngineError>;

    /// The finish, once all has been accepted. `None`: none has come.
    fn finish(&mut self) -> Result<Option<Box<Finish>>, EngineError>;

    /// Tokens so far.
    fn received(&self) -> u32;
}

/// Runs an attempt. Nothing is sent before the stream is first polled.
pub(super) fn run<D: Dialect>(dialect: D, request: EngineRequest) -> EngineStream {
    let unsent = Phase::Unsent(Box::new((dialect, request)));
    stream::unfold(unsent, |phase| phase.next().boxed()).boxed()
}

/// Where an attempt stands.
///
/// `Unsent` -> `Ready` (a plain reply is there) | `Streaming`; both -> `Over`
/// with their last event or first error.
enum Phase<D: Dialect> {
    Unsent(Box<(D, EngineRequest)>),
    Ready(VecDeque<EngineEvent>),
    Streaming(Box<Streaming<D::Transcript>>),
    Over,
}

struct Streaming<T> {
    body: ReplyBody,
    frames: Frames<T>,
}

/// The frames of a stream as its bytes come, whoever brings them.
pub(super) struct Frames<T> {
    parser: SseParser,
    transcript: T,
}

/// What the bytes so far say next.
pub(super) enum Next {
    /// More tokens.
    Tokens(TokenChunk),
    /// The end mark.
    End,
    /// Nothing: more bytes are needed.
    Starved,
}

impl<T: Transcript> Frames<T> {
    pub(super) fn new(transcript: T, limit: usize) -> Self {
        Self {
            parser: SseParser::new(limit),
            transcript,
        }
    }

    /// Takes the next bytes. What came before is read first: see
    /// [`SseParser::push`].
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.parser.push(bytes);
    }

    /// Nothing may be asked after an error.
    pub(super) fn next(&mut self) -> Result<Next, EngineError> {
        loop {
            let event = self
                .parser
                .next_event()
                .map_err(|_| EngineError::BadReply("a frame is too large".into()))?;
            let Some(data) = event else {
                return Ok(Next::Starved);
            };
            if data.trim_ascii() == b"[DONE]" {
                return Ok(Next::End);
            }
            if let Some(chunk) = self.transcript.accept(&data)? {
                return Ok(Next::Tokens(chunk));
            }
        }
    }

    /// The error of bytes that end here.
    pub(super) fn cut(&self) -> EngineError {
        EngineError::Lost(format!(
            "the stream ended without its end mark after {} tokens",
            self.transcript.received()
        ))
    }

    /// What the end mark ends.
    pub(super) fn end(&mut self) -> Result<Box<Finish>, EngineError> {
        self.transcript
            .finish()?
            .ok_or_else(|| EngineError::Lost("the end mark came without a finish".into()))
    }
}

/// How long a connection is given to end its reply after the end mark.
const TAIL: Duration = Duration::from_secs(1);

impl<D: Dialect> Phase<D> {
    async fn next(mut self) -> Option<(Result<EngineEvent, EngineError>, Self)> {
        loop {
            self = match self {
                Self::Unsent(unsent) => match start(&unsent.0, &unsent.1).await {
                    Ok(phase) => phase,
                    Err(error) => return Some((Err(error), Self::Over)),
                },
                Self::Ready(mut events) => {
                    let event = events.pop_front()?;
                    return Some((Ok(event), Self::Ready(events)));
                }
                Self::Streaming(mut streaming) => {
                    return Some(match streaming.next().await {
                        Ok(Some(event)) => (Ok(event), Self::Streaming(streaming)),
                        Ok(None) => (streaming.end(), Self::Over),
                        Err(error) => (Err(error), Self::Over),
                    });
                }
                Self::Over => return None,
            };
        }
    }
}

/// Sends the request and gives what follows from the head of the reply.
async fn start<D: Dialect>(dialect: &D, request: &EngineRequest) -> Result<Phase<D>, EngineError> {
    let mut ask = dialect.ask(request)?;
    if let Some(context) = &request.traceparent {
        ask.headers.insert(TRACEPARENT, context.clone());
    }
    let reply = dialect
        .http()
        .send(
            Method::POST,
            &request.url,
            ask.path,
            ask.headers,
            Some(ask.body),
        )
        .await?;
    if !reply.status.is_success() {
        let body = refusal::read_body(reply.body).await;
        let refused = dialect.refused(reply.status, &reply.headers, &body);
        return Err(match refused {
            // vLLM has one sentence for a model that it does not serve and for an
            // adapter: where none was asked for, Berth named a wrong model.
            EngineError::AdapterMissing(message) if request.adapter.is_none() => {
                EngineError::BadReply(message)
            }
            other => other,
        });
    }
    if reply.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(EngineError::BadReply("a compressed reply".into()));
    }
    let transcript = dialect.transcript(request);
    let limit = dialect.max_frame_bytes();
    if !ask.stream {
        return plain(reply, transcript, limit).await;
    }
    let streams = reply
        .headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    if !streams {
        return Err(EngineError::BadReply("no event stream".into()));
    }
    Ok(Phase::Streaming(Box::new(Streaming {
        body: reply.body,
        frames: Frames::new(transcript, limit),
    })))
}

async fn plain<D: Dialect>(
    reply: Reply,
    mut transcript: D::Transcript,
    limit: usize,
) -> Result<Phase<D>, EngineError> {
    let body = reply.body.collect(limit).await?;
    Ok(Phase::Ready(whole(&body, &mut transcript)?))
}

/// What a whole plain reply says.
pub(super) fn whole<T: Transcript>(
    body: &[u8],
    transcript: &mut T,
) -> Result<VecDeque<EngineEvent>, EngineError> {
    let chunk = transcript.accept(body)?;
    let finish = transcript
        .finish()?
        .ok_or_else(|| EngineError::BadReply("a reply without a finish reason".into()))?;
    Ok(chunk
        .map(EngineEvent::Tokens)
        .into_iter()
        .chain([EngineEvent::Finished(finish)])
        .collect())
}

impl<T: Transcript> Streaming<T> {
    /// The next tokens; `None` at the end mark.
    async fn next(&mut self) -> Result<Option<EngineEvent>, EngineError> {
        loop {
            match self.frames.next()? {
                Next::Tokens(chunk) => return Ok(Some(EngineEvent::Tokens(chunk))),
                Next::End => return Ok(None),
                Next::Starved => match self.body.next().await? {
                    Some(bytes) => self.frames.push(&bytes),
                    None => return Err(self.frames.cut()),
                },
            }
        }
    }

    /// What the end mark ends.
    fn end(mut self) -> Result<EngineEvent, EngineError> {
        let finish = self.frames.end()?;
        // The connection can serve again once the few bytes after the mark are
        // read; the caller need not wait for them.
        tokio::spawn(self.body.finish(TAIL));
        Ok(EngineEvent::Finished(finish))
    }
}

impl From<HttpError> for EngineError {
    fn from(error: HttpError) -> Self {
        let message = error.to_string();
        match error {
            HttpError::Refused(_) => Self::Refused(message),
            // Whether the engine has it is unknown.
            HttpError::Lost(_) | HttpError::Timeout(_) => Self::Lost(message),
            HttpError::TooLarge(_) | HttpError::Protocol(_) => Self::BadReply(message),
        }
    }
}
