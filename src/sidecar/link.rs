//! One connection to the engine, kept open over polls, because its loss is the
//! sign of a restart: a pool would hide it. Losses are counted, those by this
//! side's own impatience are not.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::engine::url::base_url;

/// Bytes of one answer at most. `/server_info` of 1,024 ranks repeats its
/// arguments per rank, some 18 KiB each.
const MAX_BODY: usize = 32 * 1024 * 1024;

/// Why the engine gave no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// Nobody listens: the process is gone.
    #[error("the engine refuses connections: {0}")]
    Refused(String),
    /// It could not be reached in another way, or it broke off.
    #[error("the connection to the engine is lost: {0}")]
    Lost(String),
    /// It takes too long.
    #[error("the engine does not answer within {0:?}")]
    Timeout(Duration),
}

/// The connection.
#[derive(Debug)]
pub struct Link {
    host: String,
    port: u16,
    authority: String,
    sender: Option<SendRequest<Empty<Bytes>>>,
    breaks: Breaks,
}

/// How often the engine's side broke the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Breaks {
    /// It was closed or reset.
    pub lost: u64,
    /// Nobody listened: surely another process afterwards.
    pub refused: u64,
}

impl Link {
    /// To `http://host:port`; no connection is made yet.
    ///
    /// # Errors
    /// What is wrong with the URL.
    pub fn new(url: &str) -> Result<Self, String> {
        // As the control plane takes them.
        let uri: Uri = base_url(url)
            .map_err(|what| match base_url(&format!("http://{url}")) {
                Ok(with) => format!("{url:?} has no scheme: write {with}"),
                Err(_) => what.to_owned(),
            })?
            .parse()
            .map_err(|_| "is no URL")?;
        let authority = uri.authority().ok_or("has no host")?.clone();
        Ok(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.to_string(),
            sender: None,
            breaks: Breaks::default(),
        })
    }

    /// The connection with all that is known of it; what stays has none.
    pub fn take(&mut self) -> Self {
        let fresh = Self {
            host: self.host.clone(),
            port: self.port,
            authority: self.authority.clone(),
            sender: None,
            breaks: Breaks::default(),
        };
        std::mem::replace(self, fresh)
    }

    /// All breaks so far.
    pub fn breaks(&self) -> Breaks {
        self.breaks
    }

    /// Asks for `path`, all within `limit`. A question on a connection that
    /// turns out to be closed is asked again on a new one: questions change
    /// nothing at the engine.
    ///
    /// # Errors
    /// See [`LinkError`]; the connection is dropped.
    pub async fn get(
        &mut self,
        path: &str,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), LinkError> {
        // Dropped at the limit, it leaves no connection behind: a late answer
        // must not be taken for that to the next question.
        match tokio::time::timeout(limit, self.get_unbounded(path)).await {
            Ok(result) => result,
            Err(_) => Err(LinkError::Timeout(limit)),
        }
    }

    async fn get_unbounded(&mut self, path: &str) -> Result<(StatusCode, Bytes), LinkError> {
        if let Some(mut sender) = self.sender.take() {
            if !sender.is_closed()
                && let Ok(answer) = ask(&mut sender, &self.authority, path).await
            {
                self.sender = Some(sender);
                return Ok(answer);
            }
            self.breaks.lost += 1;
        }
        let answer = async {
            let mut sender = self.connect().await?;
            let answer = ask(&mut sender, &self.authority, path).await?;
            self.sender = Some(sender);
            Ok(answer)
        }
        .await;
        match &answer {
            Err(LinkError::Refused(_)) => self.breaks.refused += 1,
            Err(LinkError::Lost(_)) => self.breaks.lost += 1,
            Ok(_) | Err(LinkError::Timeout(_)) => {}
        }
        answer
    }

    async fn connect(&self) -> Result<SendRequest<Empty<Bytes>>, LinkError> {
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|e| match e.kind() {
                std::io::ErrorKind::ConnectionRefused => LinkError::Refused(e.to_string()),
                _ => LinkError::Lost(e.to_string()),
            })?;
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(1024 * 1024)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|e| LinkError::Lost(e.to_string()))?;
        // Ends when the sender is dropped or the engine closes.
        tokio::spawn(connection);
        Ok(sender)
    }
}

async fn ask(
    sender: &mut SendRequest<Empty<Bytes>>,
    authority: &str,
    path: &str,
) -> Result<(StatusCode, Bytes), LinkError> {
    let lost = |e: hyper::Error| LinkError::Lost(e.to_string());
    sender.ready().await.map_err(lost)?;
    let request = Request::get(path)
        .header(header::HOST, authority)
        .body(Empty::new())
        .map_err(|e| LinkError::Lost(e.to_string()))?;
    let mut response = sender.send_request(request).await.map_err(lost)?;
    let mut body = BytesMut::new();
    while let Some(frame) = response.body_mut().frame().await {
        if let Ok(data) = frame.map_err(lost)?.into_data() {
            if body.len() + data.len() > MAX_BODY {
                return Err(LinkError::Lost("an answer is too large".into()));
            }
            body.extend_from_slice(&data);
        }
    }
    Ok((response.status(), body.freeze()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_before_anything_is_sent() {
        for good in ["http://127.0.0.1:30000", "http://host/", "http://[::1]:3"] {
            assert!(Link::new(good).is_ok(), "{good}");
        }
        for bad in [
            "https://host",
            "host:1",
            "http://host/v1",
            "http://host?x",
            "http://host:99999",
            "",
        ] {
            assert!(Link::new(bad).is_err(), "{bad}");
        }
        let scheme = Link::new("host:1").unwrap_err();
        assert!(scheme.contains("write http://host:1"), "{scheme}");
        for with in [
            "http://u:secret@host:1",
            "u:secret@host:1",
            "http://h/?secret",
        ] {
            let fault = Link::new(with).unwrap_err();
            assert!(!fault.contains("secret"), "{fault}");
        }
        assert_eq!(Link::new("http://[::1]:3").unwrap().host, "::1");
    }
}
