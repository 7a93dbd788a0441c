//! SGLang's HTTP, as of 0.5.23. The client guarantees:
//!
//! - one request on the wire per attempt, with the attempt's own id;
//! - nothing is reported as finished that the engine did not finish: a stream
//!   without `[DONE]`, or a reply cut short, is [`EngineError::Lost`];
//! - what contradicts itself or the request is [`EngineError::BadReply`];
//! - no prompt, path or caller's value from an engine's message reaches an
//!   error.

pub mod facts;
mod request;
mod transcript;
mod wire;
mod words;

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use http::{HeaderMap, Method, StatusCode};

use self::{transcript::Transcript, words::WORDS};
use crate::{
    engine::{
        ClientConfig, EngineClient, EngineError, EngineRequest, EngineStream, StreamMode,
        attempt::{self, Ask, Dialect},
        http::HttpClient,
    },
    ids::EngineRequestId,
};

/// Speaks to any number of SGLang servers. Clones share the connections.
#[derive(Clone, Debug)]
pub struct SglangClient {
    http: HttpClient,
    config: ClientConfig,
}

impl Default for SglangClient {
    fn default() -> Self {
        Self::new(HttpClient::default(), ClientConfig::default())
    }
}

impl SglangClient {
    /// A client over these connections.
    pub fn new(http: HttpClient, config: ClientConfig) -> Self {
        Self { http, config }
    }
}

impl Dialect for SglangClient {
    type Transcript = Transcript;

    fn http(&self) -> &HttpClient {
        &self.http
    }

    fn max_frame_bytes(&self) -> usize {
        self.config.max_frame_bytes
    }

    fn ask(&self, request: &EngineRequest) -> Result<Ask, EngineError> {
        Ok(Ask {
            path: "/generate",
            headers: HeaderMap::new(),
            body: request::body(request)?,
            stream: request.stream != StreamMode::Plain,
        })
    }

    fn transcript(&self, request: &EngineRequest) -> Transcript {
        Transcript::new(request, self.config.max_frame_bytes)
    }

    fn refused(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> EngineError {
        WORDS.of_reply(status, headers, body)
    }
}

impl EngineClient for SglangClient {
    fn generate(&self, request: EngineRequest) -> EngineStream {
        attempt::run(self.clone(), request)
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
        let answer = attempt::control(&self.http, &self.config, method, url, path, json);
        let (status, headers, body) = answer.await?;
        WORDS.check(status, &headers, &body)
    }
}
