//! How Berth's own clients (sidecar, operator's commands, bench) show who they
//! are: a token from a file, or a certificate. Files are read again, the token's
//! within a second and the others at every connection, so that both can be
//! exchanged while a client runs. A token is never an argument: those of a process
//! are open to everybody on its machine.

use std::{
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::Instant,
};
use tonic::{
    Request, Status,
    metadata::AsciiMetadataValue,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

use super::{files, tls, token::Token};

/// How often a token's file is read again, while calls are made.
const FRESH: Duration = Duration::from_secs(1);

/// A channel on which every call shows who makes it.
pub type Wire = InterceptedService<Channel, Bearer>;

/// How a client shows who it is, and knows whom it speaks to.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct Access {
    /// A file that holds the token to call with, alone. Read again when it changes.
    #[arg(long, env = "BERTH_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Authorities of the control plane's certificate, PEM. Needed for https URLs.
    #[arg(long, env = "BERTH_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// This client's certificate with its chain, PEM.
    #[arg(
        long,
        env = "BERTH_CLIENT_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key"
    )]
    pub tls_cert: Option<PathBuf>,
    /// Its key, PEM.
    #[arg(
        long,
        env = "BERTH_CLIENT_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,
}

impl Access {
    /// A channel to `endpoint`; nothing is connected yet.
    ///
    /// # Errors
    /// What is wrong with the URL or with a file.
    pub fn wire(&self, endpoint: &Endpoint) -> Result<Wire, String> {
        let uri = endpoint.uri();
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        // Not shown: there may be a password in it.
        if authority.contains('@') || uri.path().len() > 1 || uri.query().is_some() {
            return Err(
                "the URL of the control plane must be http://host:port or https://host:port, \
                 without user, path or query: gRPC has paths of its own, and credentials go in \
                 a file"
                    .to_owned(),
            );
        }
        let channel = match (uri.host(), uri.scheme_str()) {
            (Some(_), Some("http")) => endpoint.connect_lazy(),
            (Some(_), Some("https")) => {
                if self.tls_ca.is_none() {
                    return Err(format!(
                        "{uri}: tls-ca is needed, the authorities by which its certificate is known"
                    ));
                }
                // Told now, not at the first call.
                self.client_config()?;
                endpoint.connect_with_connector_lazy(Connector(Arc::new(self.clone())))
            }
            _ => {
                return Err(format!(
                    "{uri}: http://host:port or https://host:port is needed"
                ));
            }
        };
        let bearer = Bearer::new(self.token_file.clone());
        bearer.value()?;
        Ok(InterceptedService::new(channel, bearer))
    }

    fn client_config(&self) -> Result<ClientConfig, String> {
        let ca = self.tls_ca.as_ref().ok_or("tls-ca is needed")?;
        let roots = tls::authorities(ca, &files::read(ca)?.bytes)?;
        let builder = ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| e.to_string())?
            .with_root_certificates(roots);
        let mut config = match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => {
                let chain = tls::certificates(cert, &files::read(cert)?.bytes)?;
                let key_bytes = files::read(key)?.bytes;
                builder
                    .with_client_auth_cert(chain, tls::private_key(key, &key_bytes)?)
                    .map_err(|e| format!("{}: {e}", cert.display()))?
            }
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }

    async fn connect(&self, uri: &Uri) -> io::Result<Box<dyn Stream>> {
        let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidInput, why);
        let host = uri.host().ok_or_else(|| invalid("no host".to_owned()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|e| invalid(e.to_string()))?;
        let access = self.clone();
        let config = tokio::task::spawn_blocking(move || access.client_config());
        let config = config.await.map_err(io::Error::other)?.map_err(invalid)?;
        let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await?;
        stream.set_nodelay(true)?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        Ok(Box::new(connector.connect(name, stream).await?))
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// TLS connections; the endpoint's time limit is around it.
#[derive(Clone, Debug)]
struct Connector(Arc<Access>);

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let access = Arc::clone(&self.0);
        Box::pin(async move { access.connect(&uri).await.map(TokioIo::new) })
    }
}

/// Whether a call failed before anything of it was sent, because its connection
/// ended at that moment: it may be made again at once, whatever it asks for. Most
/// gRPC clients do so by themselves; tonic leaves it to its caller.
pub fn unsent(status: &Status) -> bool {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            return error.is_canceled();
        }
        cause = error.source();
    }
    false
}

/// Sends the token of a file with every call.
#[derive(Clone, Debug)]
pub struct Bearer(Option<Arc<TokenFile>>);

#[derive(Debug)]
struct TokenFile {
    path: PathBuf,
    last: Mutex<Option<(Instant, Result<AsciiMetadataValue, String>)>>,
}

impl Bearer {
    /// Of this file, where there is one.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self(path.map(|path| {
            Arc::new(TokenFile {
                path,
                last: Mutex::default(),
            })
        }))
    }

    fn value(&self) -> Result<Option<AsciiMetadataValue>, String> {
        self.0.as_ref().map(|file| file.value()).transpose()
    }
}

impl TokenFile {
    fn value(&self) -> Result<AsciiMetadataValue, String> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match &*last {
            Some((at, value)) if now.duration_since(*at) < FRESH => value.clone(),
            old => {
                let mut read = self.read();
                // A file that is being exchanged: the token before it may still count.
                if let (Err(_), Some((_, Ok(value)))) = (&read, old) {
                    read = Ok(value.clone());
                }
                *last = Some((now, read.clone()));
                read
            }
        }
    }

    fn read(&self) -> Result<AsciiMetadataValue, String> {
        let fault = |what: &str| format!("{}: {what}", self.path.display());
        let bytes = files::read(&self.path)?.bytes;
        let text = std::str::from_utf8(&bytes).map_err(|_| fault("is not UTF-8"))?;
        let token = Token::parse(text).map_err(|why| fault(&why.to_string()))?;
        let mut value: AsciiMetadataValue = format!("Bearer {}", token.expose())
            .parse()
            .map_err(|_| fault("holds no token"))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let value = self
            .value()
            .map_err(|why| Status::unauthenticated(format!("no token to call with: {why}")))?;
        if let Some(value) = value {
            request.metadata_mut().insert("authorization", value);
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_token_is_exchanged_by_writing_the_file_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let mut bearer = Bearer::new(Some(path.clone()));
        let mut sent = || {
            let request = bearer.call(Request::new(()))?;
            let value = request.metadata().get("authorization").unwrap().clone();
            Ok::<_, Status>(value.to_str().unwrap().to_owned())
        };
        assert!(sent().is_err());
        let (first, second) = (Token::mint().unwrap(), Token::mint().unwrap());
        std::fs::write(&path, format!("{}\n", first.expose())).unwrap();
        tokio::time::advance(FRESH).await;
        assert_eq!(sent().unwrap(), format!("Bearer {}", first.expose()));
        std::fs::write(&path, second.expose()).unwrap();
        assert_eq!(sent().unwrap(), format!("Bearer {}", first.expose()));
        tokio::time::advance(FRESH).await;
        assert_eq!(sent().unwrap(), format!("Bearer {}", second.expose()));
        std::fs::remove_file(&path).unwrap();
        tokio::time::advance(FRESH).await;
        assert_eq!(sent().unwrap(), format!("Bearer {}", second.expose()));
        assert!(!format!("{bearer:?}").contains(second.expose()));
    }

    #[tokio::test]
    async fn what_cannot_work_is_said_before_the_first_call() {
        let wire =
            |access: Access, url: &'static str| access.wire(&Endpoint::from_static(url)).map(drop);
        assert_eq!(wire(Access::default(), "http://127.0.0.1:7700"), Ok(()));
        let fault = wire(Access::default(), "https://127.0.0.1:7700").unwrap_err();
        assert!(fault.contains("tls-ca"), "{fault}");
        assert!(wire(Access::default(), "ftp://127.0.0.1:7700").is_err());
        for dropped in [
            "http://127.0.0.1:7700/berth",
            "http://127.0.0.1:7700?x",
            "http://user:secret@127.0.0.1:7700",
        ] {
            let fault = wire(Access::default(), dropped).unwrap_err();
            assert!(fault.contains("without user, path or query"), "{fault}");
            assert!(!fault.contains("secret"), "{fault}");
        }
        assert_eq!(wire(Access::default(), "http://127.0.0.1:7700/"), Ok(()));
        let access = Access {
            token_file: Some("/nonexistent/token".into()),
            ..Access::default()
        };
        assert!(wire(access, "http://127.0.0.1:7700").is_err());
    }
}
