//! TLS on the gRPC port. It guarantees:
//!
//! - certificate, key and authorities are exchanged while connections live; a set
//!   that does not fit together changes nothing;
//! - a client's certificate counts for a call only while it is valid and its
//!   authority is trusted, though the connection is older;
//! - a client's name is its certificate's one URI; one with several is nobody's;
//! - connections of clients with certificates end by themselves, gracefully, so
//!   that a client which renews its certificate in time never has a call refused.

use std::{
    fmt, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::{net::TcpStream, sync::watch, time::Instant};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    TlsConfig,
    files::{self, Content},
    reload::Tried,
};
use crate::listen::limits::HandshakeFailure;

/// A certificate that was found good counts as good for so long.
const RECHECK: Duration = Duration::from_secs(1);

/// What is served with.
#[derive(Debug)]
pub struct ServerTls {
    config: TlsConfig,
    current: ArcSwap<Loaded>,
    tried: Tried,
    /// Counts exchanges of the authorities.
    authorities: watch::Sender<u64>,
}

#[derive(Debug)]
struct Loaded {
    server: Arc<ServerConfig>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
    /// The authorities as they were read.
    client_ca: Option<Vec<u8>>,
    /// Of the authorities.
    generation: u64,
    /// Everybody on this machine may read the key.
    open_key: bool,
}

/// A connection's client, as an extension of its requests.
#[derive(Clone)]
pub struct ClientName(Arc<Client>);

struct Client {
    tls: Arc<ServerTls>,
    chain: Vec<CertificateDer<'static>>,
    name: Result<Option<Arc<str>>, &'static str>,
    /// By which authorities, and when, it was found good.
    good: Mutex<Option<(u64, Instant)>>,
}

/// A handshake that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unshaken {
    /// Why, in a word.
    pub why: HandshakeFailure,
    /// What is known of it.
    pub error: io::Error,
}

impl Unshaken {
    fn late() -> Self {
        Self {
            why: HandshakeFailure::Timeout,
            error: io::Error::new(io::ErrorKind::TimedOut, "no handshake in time"),
        }
    }
}

impl From<io::Error> for Unshaken {
    fn from(error: io::Error) -> Self {
        use rustls::Error as Tls;
        let inner = error.get_ref();
        let why = match inner.and_then(|inner| inner.downcast_ref::<Tls>()) {
            // Not of TLS: the connection itself.
            None => HandshakeFailure::Closed,
            Some(Tls::NoCertificatesPresented) => HandshakeFailure::NoCertificate,
            Some(Tls::InvalidCertificate(_)) => HandshakeFailure::Certificate,
            Some(Tls::AlertReceived(_)) => HandshakeFailure::Alert,
            Some(_) => HandshakeFailure::Protocol,
        };
        Self { why, error }
    }
}

impl fmt::Debug for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClientName").field(&self.0.name).finish()
    }
}

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl ServerTls {
    /// Loads the files.
    ///
    /// # Errors
    /// All that is wrong with them, by the options that name them.
    pub fn new(config: TlsConfig) -> Result<Arc<Self>, Vec<String>> {
        let tried = Tried::default();
        let files = read(&config);
        tried.is_news(&files);
        let current = load(&config, files, 0)?;
        Ok(Arc::new(Self {
            config,
            current: ArcSwap::from_pointee(current),
            tried,
            authorities: watch::channel(0).0,
        }))
    }

    /// Shakes hands.
    ///
    /// # Errors
    /// When the client does not, or not in time.
    pub async fn accept(
        self: &Arc<Self>,
        stream: TcpStream,
    ) -> Result<(TlsStream<TcpStream>, Option<ClientName>), Unshaken> {
        let server = Arc::clone(&self.current.load().server);
        let shaking = TlsAcceptor::from(server).accept(stream);
        let shaken = tokio::time::timeout(self.config.handshake_timeout, shaking).await;
        let stream = match shaken {
            Ok(shaken) => shaken.map_err(Unshaken::from)?,
            Err(_) => return Err(Unshaken::late()),
        };
        let chain = stream.get_ref().1.peer_certificates();
        let client = chain.and_then(|chain| {
            let name = uri_of(chain.first()?);
            Some(ClientName(Arc::new(Client {
                tls: Arc::clone(self),
                chain: chain.iter().map(|cert| cert.clone().into_owned()).collect(),
                name,
                good: Mutex::default(),
            })))
        });
        Ok((stream, client))
    }

    /// Until a connection with a client's certificate should be made anew.
    pub async fn aged(&self) {
        let mut authorities = self.authorities.subscribe();
        tokio::select! {
            () = tokio::time::sleep(self.config.connection_age) => {}
            _ = authorities.changed() => {}
        }
    }

    /// Says in the log what is unwise about the files.
    pub(super) fn warn(&self) {
        if self.current.load().open_key {
            files::should_be_secret(&self.config.key);
        }
    }

    /// Reads the files again. `None`: they are as they were. A set with a fault
    /// changes nothing.
    pub(super) fn reload(&self) -> Option<(&Path, Result<String, String>)> {
        let files = read(&self.config);
        if !self.tried.is_news(&files) {
            return None;
        }
        let old = self.current.load();
        let generation = match &files[2] {
            Ok(ca) if old.client_ca.as_ref().is_some_and(|old| *old != ca.bytes) => {
                old.generation + 1
            }
            _ => old.generation,
        };
        let loaded = load(&self.config, files, generation).map_err(|faults| faults.join("; "));
        let exchanged = loaded.map(|loaded| {
            self.current.store(Arc::new(loaded));
            self.warn();
            if generation == old.generation {
                return "the server's certificate".to_owned();
            }
            self.authorities.send_modify(|count| *count += 1);
            "authorities of clients".to_owned()
        });
        Some((&self.config.cert, exchanged))
    }
}

impl ClientName {
    /// The certificate's URI; `None`: it has none.
    ///
    /// # Errors
    /// Why it counts no more, or never did.
    pub(super) fn name(&self) -> Result<Option<Arc<str>>, String> {
        let client = &self.0;
        let Some(name) = client.name.clone().map_err(str::to_owned)? else {
            return Ok(None);
        };
        let current = client.tls.current.load();
        let now = Instant::now();
        let mut good = client.good.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = good.is_some_and(|(generation, at)| {
            generation == current.generation && now.duration_since(at) < RECHECK
        });
        if !fresh {
            let verifier = current.clients.as_ref();
            let verifier = verifier.ok_or("no authority of clients is trusted here")?;
            let (first, rest) = client.chain.split_first().ok_or("it is empty")?;
            verifier
                .verify_client_cert(first, rest, UnixTime::now())
                .map_err(|why| why.to_string())?;
            *good = Some((current.generation, now));
        }
        Ok(Some(name))
    }
}

/// The one URI among a certificate's names.
fn uri_of(cert: &CertificateDer<'_>) -> Result<Option<Arc<str>>, &'static str> {
    let cert = webpki::EndEntityCert::try_from(cert).map_err(|_| "it cannot be read")?;
    let mut names = cert.valid_uri_names();
    let name = names.next().map(Arc::from);
    if names.next().is_some() {
        return Err("it has more than one URI name, so whose it is cannot be said");
    }
    Ok(name)
}

/// Certificate, key, authorities; the last one empty where there is none.
fn read(config: &TlsConfig) -> [Result<Content, String>; 3] {
    let authorities = config.client_ca.as_deref();
    [
        files::read(&config.cert),
        files::read(&config.key),
        authorities.map_or_else(|| Ok(Content::none()), files::read),
    ]
}

fn load(
    config: &TlsConfig,
    [cert, key, client_ca]: [Result<Content, String>; 3],
    generation: u64,
) -> Result<Loaded, Vec<String>> {
    const CERT: &str = "tls-cert";
    const CLIENT_CA: &str = "tls-client-ca";
    let of = |option: &str, fault| format!("{option}: {fault}");
    let open_key = key.as_ref().is_ok_and(|key| key.open);
    let chain = cert.and_then(|cert| certificates(&config.cert, &cert.bytes));
    let chain = chain.map_err(|fault| of(CERT, fault));
    let key = key.and_then(|key| private_key(&config.key, &key.bytes));
    let key = key.map_err(|fault| of("tls-key", fault));
    let client_ca = config.client_ca.as_ref().map(|path| {
        let bytes = client_ca?.bytes;
        let roots = authorities(path, &bytes)?;
        Ok((path, roots, bytes))
    });
    let client_ca = client_ca.transpose().map_err(|fault| of(CLIENT_CA, fault));
    let (chain, key, client_ca) = match (chain, key, client_ca) {
        (Ok(chain), Ok(key), Ok(client_ca)) => (chain, key, client_ca),
        (chain, key, client_ca) => {
            let faults = [chain.err(), key.err(), client_ca.err()];
            return Err(faults.into_iter().flatten().collect());
        }
    };
    let provider = provider();
    let (mut clients, mut client_ca_bytes) = (None, None);
    if let Some((path, roots, bytes)) = client_ca {
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let verifier = if config.require_client_cert {
            verifier
        } else {
            verifier.allow_unauthenticated()
        };
        let verifier: Arc<dyn ClientCertVerifier> = verifier
            .build()
            .map_err(|e| vec![of(CLIENT_CA, format!("{}: {e}", path.display()))])?;
        (clients, client_ca_bytes) = (Some(verifier), Some(bytes));
    }
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| vec![e.to_string()])?;
    let builder = match &clients {
        Some(clients) => builder.with_client_cert_verifier(Arc::clone(clients)),
        None => builder.with_no_client_auth(),
    };
    let mut server = builder
        .with_single_cert(chain, key)
        .map_err(|e| vec![of(CERT, format!("{}: {e}", config.cert.display()))])?;
    server.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Loaded {
        server: Arc::new(server),
        clients,
        client_ca: client_ca_bytes,
        generation,
        open_key,
    })
}

pub(super) fn certificates(
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(format!("{}: holds no certificate in PEM", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

pub(super) fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    // What the reader's error shows is no more than which part is missing.
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|_| format!("{}: holds no private key in PEM", path.display()))
}

pub(super) fn authorities(path: &Path, pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, pem)? {
        roots
            .add(certificate)
            .map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(roots)
}
