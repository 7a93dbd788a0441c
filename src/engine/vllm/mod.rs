//! vLLM's tokens-in, tokens-out HTTP, as of 0.32. The client guarantees what
//! that of SGLang does:
//!
//! - one request on the wire per attempt, with the attempt's own id;
//! - nothing is reported as finished that the engine did not finish: a stream
//!   without `[DONE]`, or a reply cut short, is [`EngineError::Lost`];
//! - what contradicts itself or the request is [`EngineError::BadReply`];
//! - no prompt, path or caller's value from an engine's message reaches an
//!   error.
//!
//! Streams carry what is new, never everything so far. Log probabilities of the
//! prompt and routed experts are not in streams: a request for either is answered
//! by one plain reply.

pub mod facts;
pub mod metrics;
mod npy;
mod request;
mod transcript;
mod wire;
mod words;

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt, future::BoxFuture};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use self::{transcript::Transcript, words::WORDS};
use crate::{
    engine::{
        ClientConfig, EngineClient, EngineError, EngineRequest, EngineStream,
        attempt::{self, Ask, Dialect},
        http::HttpClient,
    },
    ids::EngineRequestId,
};

/// Where tokens are generated.
pub const GENERATE: &str = "/inference/v1/generate";

/// The engine puts this before every id of this route.
const ID_PREFIX: &str = "generate-tokens-";

/// Which rank is to serve. A value that is no number would be ignored.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Goes before the id in the body: a proxy that adds one of its own would make
/// the attempt unknown to its abort.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Where attempts are aborted by id: on servers in development mode or for tokens
/// only; on later ones.
const ABORTS: [&str; 2] = ["/abort_requests", "/inference/v1/abort_requests"];

/// Speaks to any number of vLLM servers. Clones share the connections.
#[derive(Clone, Debug)]
pub struct VllmClient {
    http: HttpClient,
    config: ClientConfig,
}

impl Default for VllmClient {
    fn default() -> Self {
        Self::new(HttpClient::default(), ClientConfig::default())
    }
}

impl VllmClient {
    /// A client over these connections.
    pub fn new(http: HttpClient, config: ClientConfig) -> Self {
        Self { http, config }
    }

    async fn control(
        &self,
        method: Method,
        url: &str,
        path: &str,
        json: Option<Bytes>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), EngineError> {
        attempt::control(&self.http, &self.config, method, url, path, json).await
    }

    /// Asks for the abort where the server has a route for it.
    async fn abort_by_id(&self, url: &str, id: &str) -> Result<(), EngineError> {
        let id = format!("{ID_PREFIX}{id}");
        let body = Bytes::from(serde_json::json!({ "request_ids": [id] }).to_string());
        for path in ABORTS {
            let (status, headers, answer) = self
                .control(Method::POST, url, path, Some(body.clone()))
                .await?;
            match status {
                StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {}
                status if status.is_success() => return Ok(()),
                status => return Err(WORDS.of_reply(status, &headers, &answer)),
            }
        }
        Ok(())
    }
}

impl Dialect for VllmClient {
    type Transcript = Transcript;

    fn http(&self) -> &HttpClient {
        &self.http
    }

    fn max_frame_bytes(&self) -> usize {
        self.config.max_frame_bytes
    }

    fn ask(&self, request: &EngineRequest) -> Result<Ask, EngineError> {
        let mut headers = HeaderMap::new();
        headers.insert(RANK, HeaderValue::from(request.rank));
        let id = HeaderValue::from_str(request.id.as_str())
            .map_err(|_| EngineError::Rejected("the attempt's id is no header value".into()))?;
        headers.insert(REQUEST_ID, id);
        Ok(Ask {
            path: GENERATE,
            headers,
            body: request::body(request)?,
            stream: request::streams(request),
        })
    }

    fn transcript(&self, request: &EngineRequest) -> Transcript {
        Transcript::new(request)
    }

    fn refused(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> EngineError {
        WORDS.of_reply(status, headers, body)
    }
}

impl EngineClient for VllmClient {
    fn generate(&self, request: EngineRequest) -> EngineStream {
        attempt::run(self.clone(), request)
    }

    /// vLLM stops what it runs for a connection that is closed, within some
    /// 20 ms; a server without a route for aborts has this way alone. An attempt
    /// whose connection is open still is then stopped by dropping its stream.
    ///
    /// A server whose engine is dead answers aborts as well, for seconds until it
    /// ends. Where its health says so that is [`EngineError::Failed`], not `Ok`:
    /// nobody was there to take the abort.
    fn abort(
        &self,
        url: &str,
        id: &EngineRequestId,
    ) -> BoxFuture<'static, Result<(), EngineError>> {
        let (client, url, id) = (self.clone(), Arc::<str>::from(url), id.clone());
        async move {
            client.abort_by_id(&url, id.as_str()).await?;
            match client.control(Method::GET, &url, "/health", None).await? {
                (status, ..) if status.is_server_error() => {
                    Err(EngineError::Failed("the engine behind it is dead".into()))
                }
                _ => Ok(()),
            }
        }
        .boxed()
    }

    fn ready(&self, url: &str) -> BoxFuture<'static, Result<(), EngineError>> {
        let (client, url) = (self.clone(), Arc::<str>::from(url));
        async move {
            let (status, headers, body) =
                client.control(Method::GET, &url, "/health", None).await?;
            WORDS.check(status, &headers, &body)
        }
        .boxed()
    }
}
