//! SGLang's HTTP, as of 0.5.23. The client guarantees:
//!
//! - one request on the wire per attempt, with the attempt's own id;
//! - nothing is reported as finished that the engine did not finish: a stream
//!   without `[DONE]`, or a reply cut short, is [`EngineError::Lost`];
//! - what contradicts itself or the request is [`EngineError::BadReply`];
//! - no prompt, path or caller's value from an engine's message reaches an
//!   error.

pub mod facts;
mod refusal;
mod request;
pub mod sse;
mod transcript;
mod wire;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use http::{Method, header};

use self::{sse::SseParser, transcript::Transcript};
use crate::{
    engine::{
        EngineClient, EngineError, EngineEvent, EngineRequest, EngineStream, Finish, StreamMode,
        http::{HttpClient, HttpError, Reply, ReplyBody},
    },
    ids::EngineRequestId,
};

/// Limits of the client.
#[derive(Clone, Copy, Debug)]
pub struct SglangConfig {
    /// A plain reply, or one frame of a stream, in bytes. The default, 64 MiB,
    /// takes what one answer can honestly hold: a log probability is some 30
    /// bytes of JSON, so 32k generated tokens with 20 alternatives each are 20
    /// MiB, which a cumulative frame repeats, and those of a 128k-token prompt
    /// with ten alternatives 40 MiB. Routed experts of long outputs of large
    /// models need more.
    pub max_frame_bytes: usize,
    /// For aborts and readiness: an engine answers both in some 20 ms.
    pub control_timeout: Duration,
}

impl Default for SglangConfig {
    fn default() -> Self {
        Self {
            max_frame_bytes: 64 * 1024 * 1024,
            control_timeout: Duration::from_secs(2),
        }
    }
}

/// Speaks to any number of SGLang servers. Clones share the connections.
#[derive(Clone, Debug)]
pub struct SglangClient {
    http: HttpClient,
    config: SglangConfig,
}

impl Default for SglangClient {
    fn default() -> Self {
        Self::new(HttpClient::default(), SglangConfig::default())
    }
}

impl SglangClient {
    /// A client over these connections.
    pub fn new(http: HttpClient, config: SglangConfig) -> Self {
        Self { http, config }
    }

    /// Sends the request and gives what follows from the head of the reply.
    async fn start(&self, request: &EngineRequest) -> Result<Phase, EngineError> {
        let body = request::body(request)?;
        let reply = self
            .http
            .send(Method::POST, &request.url, "/generate", Some(body))
            .await?;
        if !reply.status.is_success() {
            let body = refusal::read_body(reply.body).await;
            return Err(refusal::of_reply(reply.status, &reply.headers, &body));
        }
        if reply.headers.contains_key(header::CONTENT_ENCODING) {
            return Err(EngineError::BadReply("a compressed reply".into()));
        }
        let transcript = Transcript::new(request, self.config.max_frame_bytes);
        if request.stream == StreamMode::Plain {
            return self.plain(reply, transcript).await;
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
            parser: SseParser::new(self.config.max_frame_bytes),
            transcript,
            finish: None,
        })))
    }

    async fn plain(&self, reply: Reply, mut transcript: Transcript) -> Result<Phase, EngineError> {
        let body = reply.body.collect(self.config.max_frame_bytes).await?;
        let step = transcript.accept(&body)?;
        let finish = step
            .finish
            .ok_or_else(|| EngineError::BadReply("a reply without a finish reason".into()))?;
        Ok(Phase::Ready(
            step.chunk
                .map(EngineEvent::Tokens)
                .into_iter()
                .chain([EngineEvent::Finished(finish)])
                .collect(),
        ))
    }
}

/// Where an attempt stands.
///
/// `Unsent` -> `Ready` (a plain reply is there) | `Streaming`; both -> `Over`
/// with their last event or first error.
enum Phase {
    Unsent(Box<(SglangClient, EngineRequest)>),
    Ready(VecDeque<EngineEvent>),
    Streaming(Box<Streaming>),
    Over,
}

struct Streaming {
    body: ReplyBody,
    parser: SseParser,
    transcript: Transcript,
    /// Held until the end mark.
    finish: Option<Box<Finish>>,
}

/// How long a connection is given to end its reply after the end mark.
const TAIL: Duration = Duration::from_secs(1);

impl Phase {
    async fn next(mut self) -> Option<(Result<EngineEvent, EngineError>, Self)> {
        loop {
            self = match self {
                Self::Unsent(unsent) => match unsent.0.start(&unsent.1).await {
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
                        Ok(None) => {
                            let Streaming { body, finish, .. } = *streaming;
                            match finish {
                                Some(finish) => {
                                    // The connection can serve again once the
                                    // few bytes after the mark are read; the
                                    // caller need not wait for them.
                                    tokio::spawn(body.finish(TAIL));
                                    (Ok(EngineEvent::Finished(finish)), Self::Over)
                                }
                                None => (
                                    Err(EngineError::Lost(
                                        "the end mark came without a finish".into(),
                                    )),
                                    Self::Over,
                                ),
                            }
                        }
                        Err(error) => (Err(error), Self::Over),
                    });
                }
                Self::Over => return None,
            };
        }
    }
}

impl Streaming {
    /// The next tokens; `None` at the end mark.
    async fn next(&mut self) -> Result<Option<EngineEvent>, EngineError> {
        loop {
            let event = self
                .parser
                .next_event()
                .map_err(|_| EngineError::BadReply("a frame is too large".into()))?;
            if let Some(data) = event {
                if data.trim_ascii() == b"[DONE]" {
                    return Ok(None);
                }
                let step = self.transcript.accept(&data)?;
                if step.finish.is_some() {
                    self.finish = step.finish;
                }
                if let Some(chunk) = step.chunk {
                    return Ok(Some(EngineEvent::Tokens(chunk)));
                }
                continue;
            }
            match self.body.next().await? {
                Some(bytes) => self.parser.push(&bytes),
                None => {
                    return Err(EngineError::Lost(format!(
                        "the stream ended without its end mark after {} tokens",
                        self.transcript.received()
                    )));
                }
            }
        }
    }
}

impl EngineClient for SglangClient {
    fn generate(&self, request: EngineRequest) -> EngineStream {
        let unsent = Phase::Unsent(Box::new((self.clone(), request)));
        stream::unfold(unsent, |phase| phase.next().boxed()).boxed()
    }

    fn abort(
        &self,
        url: &str,
        id: &EngineRequestId,
    ) -> BoxFuture<'static, Result<(), EngineError>> {
        let (client, url, id) = (self.clone(), Arc::<str>::from(url), id.clone());
        async move {
            let body = Bytes::from(serde_json::json!({ "rid": id.as_str() }).to_string());
            client
                .control(Method::POST, &url, "/abort_request", Some(body))
                .await
        }
        .boxed()
    }

    fn ready(&self, url: &str) -> BoxFuture<'static, Result<(), EngineError>> {
        let (client, url) = (self.clone(), Arc::<str>::from(url));
        async move { client.control(Method::GET, &url, "/ready", None).await }.boxed()
    }
}

impl SglangClient {
    async fn control(
        &self,
        method: Method,
        url: &str,
        path: &str,
        json: Option<Bytes>,
    ) -> Result<(), EngineError> {
        let (status, headers, body) = self
            .http
            .call(
                method,
                url,
                path,
                json,
                64 * 1024,
                self.config.control_timeout,
            )
            .await?;
        if status.is_success() {
            return Ok(());
        }
        Err(refusal::of_reply(status, &headers, &body))
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
