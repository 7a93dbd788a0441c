//! How Berth's own clients (sidecar, operator's commands, bench) show who they
//! are: a token from a file, or a certificate. Files are read again, the token's
//! within a second and the others at every connection, so that both can be
//! exchanged while a client runs. A token is never an argument: those of a process
//! are open to everybody on its machine.

use std::{
    future::Future,
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
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

use super::{
    files,
    scheme::{self, Sniffed},
    tls,
    token::Token,
};
use crate::engine::url::is_port;

/// How often a token's file is read again, while calls are made.
const FRESH: Duration = Duration::from_secs(1);

const TOKEN: &str = "--token-file (BERTH_TOKEN_FILE)";

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

/// Why there is no channel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWire {
    /// The URL is none of a control plane.
    #[error("{0}")]
    Url(String),
    /// A file is missing or of no use. It says which, and by which option it was named.
    #[error("{0}")]
    File(String),
}

impl NoWire {
    /// All of them for people, the URL's by the option that gave it.
    pub fn told(faults: Vec<Self>, option: &str) -> Vec<String> {
        let told = |fault| match fault {
            Self::Url(fault) => format!("{option}: {fault}"),
            Self::File(fault) => fault,
        };
        faults.into_iter().map(told).collect()
    }
}

impl Access {
    /// A channel to the control plane at `url`, as `set_up` wants it; nothing is
    /// connected yet.
    ///
    /// # Errors
    /// All that is wrong with the URL and with the files.
    pub fn wire(
        &self,
        url: &str,
        set_up: impl FnOnce(Endpoint) -> Endpoint,
    ) -> Result<Wire, Vec<NoWire>> {
        let mut faults = Vec::new();
        let endpoint = endpoint(url).map_err(|fault| faults.push(NoWire::Url(fault)));
        let https = url
            .get(..6)
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"));
        if https {
            // Told now, not at the first call.
            let config = self.client_config();
            faults.extend(config.err().into_iter().flatten().map(NoWire::File));
        }
        let bearer = Bearer::new(self.token_file.clone());
        faults.extend(bearer.value().err().map(NoWire::File));
        match endpoint {
            Ok(endpoint) if faults.is_empty() => {
                let endpoint = set_up(endpoint);
                let connector = if https {
                    Connector::Tls(Arc::new(self.clone()))
                } else {
                    Connector::Plain(scheme::plain(&endpoint))
                };
                let channel = endpoint.connect_with_connector_lazy(connector);
                Ok(InterceptedService::new(channel, bearer))
            }
            _ => Err(faults),
        }
    }

    fn client_config(&self) -> Result<ClientConfig, Vec<String>> {
        const CA: &str = "--tls-ca (BERTH_TLS_CA)";
        const CERT: &str = "--tls-cert (BERTH_CLIENT_TLS_CERT)";
        const KEY: &str = "--tls-key (BERTH_CLIENT_TLS_KEY)";
        let mut faults = Vec::new();
        let roots = match &self.tls_ca {
            Some(ca) => of_file(CA, ca, tls::authorities),
            None => Err(format!(
                "{CA}: an https URL needs it, the authorities by which the control plane's \
                 certificate is known"
            )),
        };
        let roots = roots.map_err(|fault| faults.push(fault));
        let own = self.tls_cert.as_ref().zip(self.tls_key.as_ref());
        let own = own.map(|(cert, key)| {
            let chain = of_file(CERT, cert, tls::certificates);
            let key = of_file(KEY, key, tls::private_key);
            let chain = chain.map_err(|fault| faults.push(fault));
            let key = key.map_err(|fault| faults.push(fault));
            chain.ok().zip(key.ok()).zip(Some(cert))
        });
        let Ok(roots) = roots else {
            return Err(faults);
        };
        let one = |fault: String| vec![fault];
        let builder = ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| one(e.to_string()))?
            .with_root_certificates(roots);
        let mut config = match own {
            Some(Some(((chain, key), cert))) => builder
                .with_client_auth_cert(chain, key)
                .map_err(|e| one(format!("{CERT}: {}: {e}", cert.display())))?,
            Some(None) => return Err(faults),
            None => builder.with_no_client_auth(),
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
        let config = config.await.map_err(io::Error::other)?;
        let config = config.map_err(|faults| invalid(faults.join("; ")))?;
        let stream = TcpStream::connect((host, uri.port_u16().unwrap_or(443))).await?;
        stream.set_nodelay(true)?;
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let shaken = connector.connect(name, stream).await;
        Ok(Box::new(shaken.map_err(scheme::unshaken)?))
    }
}

/// What a file holds, or what is wrong with it, by its option and its name.
fn of_file<T>(
    option: &str,
    path: &Path,
    parse: impl FnOnce(&Path, &[u8]) -> Result<T, String>,
) -> Result<T, String> {
    files::read(path)
        .and_then(|content| parse(path, &content.bytes))
        .map_err(|fault| format!("{option}: {fault}"))
}

/// An endpoint of this URL.
fn endpoint(url: &str) -> Result<Endpoint, String> {
    const FORM: &str = "http://host:port, or https://host:port where it speaks TLS";
    let (_, behind) = url.split_once("://").unwrap_or(("", url));
    // Not shown: there may be a password or a token in it.
    if behind.trim_end_matches('/').contains(['@', '/', '?', '#']) {
        return Err(format!(
            "the URL of the control plane must be {FORM}, without user, path, query or \
             fragment: credentials go in a file, and gRPC has paths of its own"
        ));
    }
    let is_one = |url: &str| {
        let uri: Option<Uri> = url.parse().ok();
        let web = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https"));
        let place = |uri: &Uri| {
            let authority = uri.authority()?;
            let host = Some(authority.host()).filter(|host| !host.is_empty())?;
            // A port that is none would be left out, and another be called.
            is_port(authority.as_str().strip_prefix(host)).then_some(())
        };
        uri.is_some_and(|uri| web(&uri) && place(&uri).is_some())
    };
    if !is_one(url) {
        let with = format!("http://{url}");
        return Err(if !url.contains("://") && is_one(&with) {
            format!("{url:?} has no scheme: write {with}, or https://{url} where it speaks TLS")
        } else {
            format!("{url:?} is no address of a control plane: write {FORM}")
        });
    }
    Endpoint::from_shared(url.to_owned())
        .map_err(|_| format!("{url:?} is no address of a control plane: write {FORM}"))
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Connections; the endpoint's time limit is around them.
#[derive(Clone, Debug)]
enum Connector {
    Plain(HttpConnector),
    Tls(Arc<Access>),
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = tower::BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, tower::BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), tower::BoxError>> {
        match self {
            Self::Plain(plain) => plain.poll_ready(context).map_err(Into::into),
            Self::Tls(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        match self {
            Self::Plain(plain) => {
                let connecting = plain.call(uri);
                Box::pin(async move {
                    let stream = connecting.await?.into_inner();
                    Ok(TokioIo::new(
                        Box::new(Sniffed::new(stream)) as Box<dyn Stream>
                    ))
                })
            }
            Self::Tls(access) => {
                let access = Arc::clone(access);
                Box::pin(async move { Ok(TokioIo::new(access.connect(&uri).await?)) })
            }
        }
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

/// The innermost reason that a transport gives: "transport error" says nothing.
pub fn cause(status: &Status) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    let mut text = status.message().to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
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
        let token = of_file(TOKEN, &self.path, |path, bytes| {
            let fault = |what: String| format!("{}: {what}", path.display());
            let text = std::str::from_utf8(bytes).map_err(|_| fault("is not UTF-8".to_owned()))?;
            Token::parse(text).map_err(|why| fault(format!("holds no token: {why}")))
        })?;
        let mut value: AsciiMetadataValue = format!("Bearer {}", token.expose())
            .parse()
            .map_err(|_| format!("{TOKEN}: {}: holds no token", self.path.display()))?;
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

    fn told(faults: &[NoWire]) -> String {
        let faults: Vec<String> = faults.iter().map(NoWire::to_string).collect();
        faults.join("; ")
    }

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
        let wire = |access: Access, url: &str| access.wire(url, |endpoint| endpoint).map(drop);
        let fault = |access: Access, url: &str| told(&wire(access, url).unwrap_err());
        assert_eq!(wire(Access::default(), "http://127.0.0.1:7700"), Ok(()));
        let https = fault(Access::default(), "https://127.0.0.1:7700");
        assert!(https.contains("--tls-ca"), "{https}");
        for (url, say) in [
            ("ftp://127.0.0.1:7700", "write http://host:port"),
            ("127.0.0.1:7700", "write http://127.0.0.1:7700,"),
            ("berth", "write http://berth,"),
            ("http://", "write http://host:port"),
            ("nonsense x", "write http://host:port"),
            ("", "write http://host:port"),
            ("http://127.0.0.1:99999", "write http://host:port"),
        ] {
            let fault = fault(Access::default(), url);
            assert!(fault.contains(say), "{fault}");
        }
        for dropped in [
            "http://127.0.0.1:7700/berth",
            "http://127.0.0.1:7700?secret",
            "https://127.0.0.1:7700/secret/",
            "http://127.0.0.1:7700/#secret",
            "http://user:secret@127.0.0.1:7700",
            "user:secret@127.0.0.1:7700",
        ] {
            let fault = fault(Access::default(), dropped);
            assert!(fault.contains("without user, path, query"), "{fault}");
            assert!(!fault.contains("secret"), "{fault}");
        }
        assert_eq!(wire(Access::default(), "http://127.0.0.1:7700/"), Ok(()));
    }

    #[tokio::test]
    async fn all_files_that_are_of_no_use_are_told_by_their_options_and_names() {
        let dir = tempfile::tempdir().unwrap();
        let cert = dir.path().join("cert");
        std::fs::write(&cert, "no PEM").unwrap();
        let access = Access {
            token_file: Some("/nonexistent/token".into()),
            tls_ca: Some("/nonexistent/ca".into()),
            tls_cert: Some(cert.clone()),
            tls_key: Some("/nonexistent/key".into()),
        };
        let faults = access.wire("https://", |endpoint| endpoint).unwrap_err();
        assert_eq!(faults.len(), 5, "{faults:?}");
        assert!(matches!(faults[0], NoWire::Url(_)), "{faults:?}");
        let told = told(&faults);
        for (option, path) in [
            ("--token-file (BERTH_TOKEN_FILE)", "/nonexistent/token"),
            ("--tls-ca (BERTH_TLS_CA)", "/nonexistent/ca"),
            ("--tls-cert (BERTH_CLIENT_TLS_CERT)", cert.to_str().unwrap()),
            ("--tls-key (BERTH_CLIENT_TLS_KEY)", "/nonexistent/key"),
        ] {
            assert!(told.contains(&format!("{option}: {path}: ")), "{told}");
        }
        // Nobody needs the others where nothing is encrypted.
        let plain = access.wire("http://h:1", |endpoint| endpoint).unwrap_err();
        assert!(matches!(&plain[..], [NoWire::File(_)]), "{plain:?}");
    }
}
