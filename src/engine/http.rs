//! The HTTP client that engines are spoken to with. It guarantees:
//!
//! - a request whose bytes may have left is never sent again: the pool below
//!   retries only what it hands back unsent;
//! - an error says whether anything can have been sent
//!   ([`HttpError::Refused`]) or not ([`HttpError::Lost`]);
//! - redirects, proxies and environment variables are not looked at: what is
//!   asked is the address that was given, if `egress` allows it;
//! - heads and bodies of replies are bounded;
//! - a reply that is dropped half-read closes its connection.

use std::{
    error::Error as _, fmt, future::Future, io, net::SocketAddr, pin::Pin, sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use tokio::net::TcpStream;

use super::egress::{Egress, Forbidden, Resolver, literal};

/// How the client behaves. The defaults suit engines of one cluster.
#[derive(Clone, Copy, Debug)]
pub struct HttpConfig {
    /// Name lookup and TCP handshake together.
    pub connect_timeout: Duration,
    /// How long an unused connection is kept. Shorter than the 5 s after which
    /// uvicorn closes one: a request that meets such a close on its way may
    /// have been read or not, and must be taken for lost.
    pub idle_timeout: Duration,
    /// Unused connections kept per engine. 0: every request has its own.
    pub max_idle_per_host: usize,
    /// Of a reply's head, in bytes; at least 8,192. Also the largest piece in
    /// which a body is read.
    pub max_head_bytes: usize,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(2),
            max_idle_per_host: 64,
            max_head_bytes: 256 * 1024,
        }
    }
}

/// Header fields of a reply at most.
const MAX_HEADERS: usize = 64;

/// Why a request got no reply, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// No connection could be made, or there is no such address: nothing was
    /// sent.
    #[error("{0}")]
    Refused(String),
    /// The connection broke after the request may have been sent.
    #[error("{0}")]
    Lost(String),
    /// No answer in the time given.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The reply is larger than the caller takes.
    #[error("the reply is larger than {0} bytes")]
    TooLarge(usize),
    /// What came back is not HTTP.
    #[error("{0}")]
    Protocol(String),
}

/// A reply whose body has not been read yet. Dropped, it closes the connection
/// unless the body was read to its end.
#[derive(Debug)]
pub struct Reply {
    /// Status code.
    pub status: StatusCode,
    /// Header fields.
    pub headers: http::HeaderMap,
    /// The body.
    pub body: ReplyBody,
}

/// A body as it arrives.
#[derive(Debug)]
pub struct ReplyBody(Incoming);

impl ReplyBody {
    /// The next piece; `None` at the proper end of the body.
    ///
    /// # Errors
    /// [`HttpError::Lost`] when it ended before its end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        loop {
            match self.0.frame().await {
                None => return Ok(None),
                Some(Err(error)) => return Err(lost(&error)),
                // Trailers say nothing here.
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The whole body, if it has at most `limit` bytes.
    ///
    /// # Errors
    /// [`HttpError::TooLarge`], or as [`Self::next`].
    pub async fn collect(mut self, limit: usize) -> Result<Bytes, HttpError> {
        use hyper::body::Body as _;
        let announced = self.0.size_hint().lower();
        if usize::try_from(announced).map_or(true, |size| size > limit) {
            return Err(HttpError::TooLarge(limit));
        }
        let Some(first) = self.next().await? else {
            return Ok(Bytes::new());
        };
        if first.len() > limit {
            return Err(HttpError::TooLarge(limit));
        }
        let mut whole = BytesMut::from(first);
        while let Some(piece) = self.next().await? {
            if whole.len() + piece.len() > limit {
                return Err(HttpError::TooLarge(limit));
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole.freeze())
    }

    /// Reads what is left, for at most `limit`, so that the connection can
    /// serve again. For the last bytes after an end mark.
    pub async fn finish(mut self, limit: Duration) {
        let rest = async { while let Ok(Some(_)) = self.next().await {} };
        let _ = tokio::time::timeout(limit, rest).await;
    }
}

/// A pool of connections to engines. Clones share it.
#[derive(Clone)]
pub struct HttpClient {
    inner: Client<BoundedConnector, Full<Bytes>>,
}

impl fmt::Debug for HttpClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpClient").finish_non_exhaustive()
    }
}

impl Default for HttpClient {
    fn default() -> Self {
        Self::new(HttpConfig::default())
    }
}

impl HttpClient {
    /// A client with no connections yet, which may call whatever it is told to.
    pub fn new(config: HttpConfig) -> Self {
        Self::within(config, Arc::default())
    }

    /// One that calls nothing but what is allowed.
    pub fn within(config: HttpConfig, egress: Arc<Egress>) -> Self {
        let mut tcp = HttpConnector::new_with_resolver(Resolver(Arc::clone(&egress)));
        tcp.set_connect_timeout(Some(config.connect_timeout));
        tcp.set_nodelay(true);
        // A peer whose machine is gone is noticed within about half a minute,
        // though a silent generation may take far longer than that.
        tcp.set_keepalive(Some(Duration::from_secs(15)));
        tcp.set_keepalive_interval(Some(Duration::from_secs(5)));
        tcp.set_keepalive_retries(Some(3));
        let inner = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(config.idle_timeout)
            .pool_max_idle_per_host(config.max_idle_per_host)
            .http1_max_buf_size(config.max_head_bytes.max(8 * 1024))
            .http1_max_headers(MAX_HEADERS)
            // Only a request that is handed back unsent is tried on another
            // connection.
            .retry_canceled_requests(true)
            .build(BoundedConnector {
                tcp,
                egress,
                timeout: config.connect_timeout,
            });
        Self { inner }
    }

    /// Sends one request and waits for the head of its reply. `base` is
    /// `http://host:port`, `path` begins with a slash and may have a query. The
    /// future, dropped, closes the connection.
    ///
    /// # Errors
    /// Every kind but [`HttpError::Timeout`].
    pub async fn send(
        &self,
        method: Method,
        base: &str,
        path: &str,
        mut headers: http::HeaderMap,
        json: Option<Bytes>,
    ) -> Result<Reply, HttpError> {
        let uri = join(base, path)?;
        let mut request = Request::new(Full::new(json.clone().unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        headers.insert(header::USER_AGENT, USER_AGENT);
        if json.is_some() {
            headers.insert(header::CONTENT_TYPE, APPLICATION_JSON);
        }
        *request.headers_mut() = headers;
        let response = self
            .inner
            .request(request)
            .await
            .map_err(|error| classify(&error))?;
        let (parts, body) = response.into_parts();
        Ok(Reply {
            status: parts.status,
            headers: parts.headers,
            body: ReplyBody(body),
        })
    }

    /// Sends one request and reads the whole reply, all within `limit`.
    ///
    /// # Errors
    /// Every kind.
    pub async fn call(
        &self,
        method: Method,
        base: &str,
        path: &str,
        json: Option<Bytes>,
        max_bytes: usize,
        limit: Duration,
    ) -> Result<(StatusCode, http::HeaderMap, Bytes), HttpError> {
        let whole = async {
            let reply = self
                .send(method, base, path, http::HeaderMap::new(), json)
                .await?;
            let body = reply.body.collect(max_bytes).await?;
            Ok((reply.status, reply.headers, body))
        };
        match tokio::time::timeout(limit, whole).await {
            Ok(result) => result,
            Err(_) => Err(HttpError::Timeout(limit)),
        }
    }
}

const USER_AGENT: header::HeaderValue =
    header::HeaderValue::from_static(concat!("berth/", env!("CARGO_PKG_VERSION")));
const APPLICATION_JSON: header::HeaderValue = header::HeaderValue::from_static("application/json");

fn join(base: &str, path: &str) -> Result<Uri, HttpError> {
    let base = base.trim_end_matches('/');
    let uri: Uri = format!("{base}{path}")
        .parse()
        .map_err(|error| HttpError::Refused(format!("no URL: {error}")))?;
    if uri.scheme_str() != Some("http") {
        return Err(HttpError::Refused("only http URLs are served".into()));
    }
    Ok(uri)
}

/// What a failed request says about its bytes. Whatever failed while connecting
/// failed before any left.
fn classify(error: &hyper_util::client::legacy::Error) -> HttpError {
    if error.is_connect() {
        return HttpError::Refused(innermost(error));
    }
    match error
        .source()
        .and_then(|e| e.downcast_ref::<hyper::Error>())
    {
        Some(cause) if cause.is_parse() || cause.is_parse_too_large() => {
            HttpError::Protocol(format!("not an HTTP reply: {cause}"))
        }
        Some(cause) => lost(cause),
        None => HttpError::Lost(innermost(error)),
    }
}

fn lost(error: &hyper::Error) -> HttpError {
    if error.is_incomplete_message() {
        return HttpError::Lost("the connection was closed before the reply was complete".into());
    }
    HttpError::Lost(innermost(error))
}

/// The cause at the end of the chain: the layers above say "client error".
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

fn check_literal(egress: &Egress, uri: &Uri) -> Result<(), Forbidden> {
    match uri.host().and_then(literal) {
        Some(ip) => egress.check(SocketAddr::new(ip, uri.port_u16().unwrap_or(80))),
        None => Ok(()),
    }
}

/// TCP, with a limit over lookup and handshake together: the connector's own
/// covers only the handshake.
#[derive(Clone)]
struct BoundedConnector {
    tcp: HttpConnector<Resolver>,
    egress: Arc<Egress>,
    timeout: Duration,
}

impl tower::Service<Uri> for BoundedConnector {
    type Response = TokioIo<TcpStream>;
    type Error = Box<dyn std::error::Error + Send + Sync>;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(
        &mut self,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        // A number is not looked up, so the resolver does not see it.
        if let Err(why) = check_literal(&self.egress, &uri) {
            return async move { Err(why.into()) }.boxed();
        }
        let connecting = self.tcp.call(uri);
        let (timeout, egress) = (self.timeout, Arc::clone(&self.egress));
        async move {
            match tokio::time::timeout(timeout, connecting).await {
                // The resolver does not see the port, and a name may have come to mean
                // Berth itself. Nothing has been said yet.
                Ok(Ok(stream)) => {
                    egress.check(stream.inner().peer_addr()?)?;
                    Ok(stream)
                }
                Ok(Err(error)) => Err(error.into()),
                Err(_) => Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no connection within {timeout:?}"),
                )
                .into()),
            }
        }
        .boxed()
    }
}
