//! Who may do what. It guarantees:
//!
//! - a method that stands in no table is answered to nobody (`methods`);
//! - a caller is who its credentials say, and its tenant is theirs: nothing in a
//!   message or in other metadata changes either;
//! - tokens are known by their SHA-256 only, and neither a token nor a key is ever
//!   shown (`token`, `file`);
//! - credentials are exchanged without a restart, and a file with a fault changes
//!   nothing (`reload`).
//!
//! Without a file of credentials everybody may do everything, and the server
//! serves this machine only.

pub mod admin;
pub mod client;
pub mod file;
mod files;
mod gate;
pub mod layer;
pub mod methods;
mod reload;
mod scheme;
pub mod tls;
pub mod token;

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use self::tls::ServerTls;
use crate::{
    audit::{Audit, Entry},
    error::{Error, Reason},
    ids::Tenant,
};
pub use gate::Gate;

/// What stands before the services.
#[derive(Clone, Debug)]
pub struct Guard {
    /// Decides over calls.
    pub gate: Arc<Gate>,
    /// Of the gRPC port, where it speaks TLS.
    pub tls: Option<Arc<ServerTls>>,
}

/// What the files of credentials and of TLS hold. They are read once: what was found
/// good is what is served with.
#[derive(Debug)]
pub struct Files {
    known: Option<Arc<gate::Known>>,
    tls: Option<Arc<ServerTls>>,
}

impl Files {
    /// Reads them. The audit log is looked at, and neither made nor written to.
    ///
    /// # Errors
    /// All that is wrong with them, by the options that name them: nothing is served
    /// then.
    pub fn read(config: &AuthConfig) -> Result<Self, Vec<String>> {
        let mut faults = Vec::new();
        let known = config.credentials.as_deref().map(gate::Known::read);
        let known = known.transpose().map_err(|found| {
            faults.extend(found.iter().map(|fault| format!("credentials: {fault}")));
        });
        let audit = config.audit_log.as_deref();
        if let Some((path, Err(error))) = audit.map(|path| (path, Audit::check(path))) {
            faults.push(format!("audit-log: {}: {error}", path.display()));
        }
        let tls = config.tls.clone().map(ServerTls::new).transpose();
        let tls = tls.map_err(|found| faults.extend(found));
        match (known, tls) {
            (Ok(known), Ok(tls)) if faults.is_empty() => Ok(Self { known, tls }),
            _ => Err(faults),
        }
    }
}

impl Guard {
    /// With what was read.
    ///
    /// # Errors
    /// When the audit log cannot be opened: nothing is served then.
    pub fn new(config: &AuthConfig, files: Files) -> anyhow::Result<Self> {
        let path = config.audit_log.as_deref();
        let audit = Audit::open(path).with_context(|| {
            let path = path.unwrap_or(Path::new(""));
            format!("audit-log: cannot open {}", path.display())
        })?;
        if let Some(tls) = &files.tls {
            tls.warn();
        }
        Ok(Self {
            gate: Arc::new(Gate::new(files.known, config.reflection, audit)),
            tls: files.tls,
        })
    }

    /// Reads them again when they change, until `stop`.
    pub fn keep(&self, stop: CancellationToken) {
        tokio::spawn(reload::keep(Arc::clone(&self.gate), self.tls.clone(), stop));
    }
}

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Sample, as a trainer does.
    Sample,
    /// Register, beat and deregister, as a sidecar does.
    Replica,
    /// What operators do.
    Admin,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sample, Self::Replica, Self::Admin];

    /// As files write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sample => "sample",
            Self::Replica => "replica",
            Self::Admin => "admin",
        }
    }
}

/// A set of roles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Roles(u8);

impl Roles {
    /// None.
    pub const NONE: Self = Self(0);
    /// All.
    pub const ALL: Self = Self(0b111);

    fn bit(role: Role) -> u8 {
        match role {
            Role::Sample => 1,
            Role::Replica => 2,
            Role::Admin => 4,
        }
    }

    /// With this one too.
    #[must_use]
    pub fn and(self, role: Role) -> Self {
        Self(self.0 | Self::bit(role))
    }

    /// Whether it is one of them.
    pub fn has(self, role: Role) -> bool {
        self.0 & Self::bit(role) != 0
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for role in Role::ALL.into_iter().filter(|role| self.has(*role)) {
            if !std::mem::take(&mut first) {
                f.write_str(",")?;
            }
            f.write_str(role.name())?;
        }
        Ok(())
    }
}

/// Who calls, as an extension of every request that passed the [`layer`].
#[derive(Clone)]
pub struct Caller {
    /// The principal's name in the file of credentials.
    pub principal: Arc<str>,
    /// Its own.
    pub tenant: Tenant,
    /// What it may do.
    pub roles: Roles,
    /// Where it calls from.
    pub peer: Option<SocketAddr>,
    audit: Audit,
    /// What it has shown, and where that is known.
    standing: Option<(Arc<gate::Known>, gate::Proof)>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller")
            .field("principal", &self.principal)
            .field("tenant", &self.tenant)
            .field("roles", &self.roles)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Caller {
    /// Of this request. One that did not pass the layer may do nothing.
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        let known = request.extensions().get::<Self>();
        known.cloned().unwrap_or_else(|| Self {
            principal: "unknown".into(),
            tenant: Tenant::default(),
            roles: Roles::NONE,
            peer: None,
            audit: Audit::default(),
            standing: None,
        })
    }

    /// Its principal, where callers are known: without a file of credentials nothing
    /// is anybody's.
    pub fn known_as(&self) -> Option<&Arc<str>> {
        self.standing.as_ref().map(|_| &self.principal)
    }

    /// Whether there are credentials of this principal, too.
    pub fn knows(&self, principal: &str) -> bool {
        let standing = self.standing.as_ref();
        standing.is_some_and(|(known, _)| known.has(principal))
    }

    /// Refuses what only this role may ask for.
    ///
    /// # Errors
    /// ROLE_MISSING.
    pub fn must_be(&self, role: Role, what: &str) -> Result<(), Error> {
        if self.roles.has(role) {
            return Ok(());
        }
        let error = Error::new(
            Reason::RoleMissing,
            format!("{what} needs the role {}", role.name()),
        );
        self.audit
            .write_bounded(&self.entry("refused", what, Some(&error)));
        Err(error)
    }

    /// Whether a call of this role that goes on and on may still go on.
    ///
    /// # Errors
    /// CREDENTIALS_REFUSED once its credentials do not count any more, ROLE_MISSING
    /// where they came to stand for less.
    pub fn is_still(&self, role: Role) -> Result<(), Error> {
        let Some((known, proof)) = &self.standing else {
            return Ok(());
        };
        if known.credential(proof)?.principal.roles.has(role) {
            return Ok(());
        }
        Err(Error::new(
            Reason::RoleMissing,
            format!("these credentials have the role {} no more", role.name()),
        ))
    }

    /// Writes down what this caller did to `object`, and how that ended; of any but an
    /// operator not without end.
    pub fn did<T>(&self, what: &str, object: &str, outcome: &Result<T, Error>) {
        let entry = self.entry(what, object, outcome.as_ref().err());
        if self.roles.has(Role::Admin) {
            self.audit.write(&entry);
        } else {
            self.audit.write_bounded(&entry);
        }
    }

    /// Writes down that this caller was refused, not without end.
    pub fn was_refused(&self, what: &str, object: &str, error: &Error) {
        self.audit
            .write_bounded(&self.entry(what, object, Some(error)));
    }

    fn entry<'a>(&'a self, event: &'a str, object: &'a str, error: Option<&'a Error>) -> Entry<'a> {
        Entry {
            event,
            principal: Some(&self.principal),
            tenant: Some(self.tenant.as_str()),
            roles: Some(self.roles),
            peer: self.peer,
            object: Some(object),
            outcome: error.map_or("OK", |error| error.reason.name()),
            // What a replica's registration named, and why it may not be called.
            detail: error.map(|error| error.message.as_str()),
        }
    }
}

/// Who may ask what services there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reflection {
    /// Every caller that is known.
    #[default]
    On,
    /// Those with the role admin.
    Admin,
    /// Nobody.
    Off,
}

/// How callers are known.
#[derive(Clone, Debug, Default)]
pub struct AuthConfig {
    /// The file of credentials; `None`: everybody may do everything.
    pub credentials: Option<PathBuf>,
    /// Reflection.
    pub reflection: Reflection,
    /// Where the audit log is written; `None`: to the log, as target `audit`.
    pub audit_log: Option<PathBuf>,
    /// TLS on the gRPC port.
    pub tls: Option<TlsConfig>,
}

/// TLS on the gRPC port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The server's certificate with its chain, PEM.
    pub cert: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// Authorities of clients' certificates, PEM; `None`: no client shows one.
    pub client_ca: Option<PathBuf>,
    /// A client without a certificate is not talked to.
    pub require_client_cert: bool,
    /// From the connection to the end of the handshake.
    pub handshake_timeout: Duration,
    /// A connection with a client's certificate is made anew after so long: a
    /// certificate must be renewed at least so long before its end.
    pub connection_age: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_found_good_is_what_is_served_with() {
        let dir = tempfile::tempdir().unwrap();
        let token = token::Token::mint().unwrap();
        let config = AuthConfig {
            credentials: Some(dir.path().join("credentials")),
            audit_log: Some(dir.path().join("audit")),
            ..AuthConfig::default()
        };
        let path = dir.path().join("credentials");
        let line = format!("principal=ops role=admin sha256={}", token.hash());
        std::fs::write(&path, line).unwrap();
        let files = Files::read(&config).unwrap();
        assert!(!dir.path().join("audit").exists());
        // Between the check and the start.
        std::fs::write(&path, "nonsense").unwrap();
        assert!(Files::read(&config).is_err());
        let guard = Guard::new(&config, files).unwrap();
        assert!(dir.path().join("audit").exists());
        let mut headers = http::HeaderMap::new();
        let bearer = format!("Bearer {}", token.expose());
        headers.insert("authorization", bearer.parse().unwrap());
        let method = "/berth.v1.FleetService/ListReplicas";
        let caller = guard.gate.admit(method, &headers, &http::Extensions::new());
        assert_eq!(&*caller.unwrap().principal, "ops");
    }

    #[test]
    fn every_file_of_no_use_is_told_by_its_option_and_its_name() {
        let at = |name: &str| PathBuf::from("/nonexistent").join(name);
        let config = AuthConfig {
            credentials: Some(at("credentials")),
            audit_log: Some(at("audit-log")),
            tls: Some(TlsConfig {
                cert: at("tls-cert"),
                key: at("tls-key"),
                client_ca: Some(at("tls-client-ca")),
                require_client_cert: false,
                handshake_timeout: Duration::from_secs(1),
                connection_age: Duration::from_secs(1),
            }),
            ..AuthConfig::default()
        };
        let faults = Files::read(&config).unwrap_err();
        assert_eq!(faults.len(), 5, "{faults:?}");
        for option in [
            "credentials",
            "audit-log",
            "tls-cert",
            "tls-key",
            "tls-client-ca",
        ] {
            let told = format!("{option}: /nonexistent/{option}: ");
            let is_told = faults.iter().any(|fault| fault.starts_with(&told));
            assert!(is_told, "{option} in {faults:?}");
        }
    }
}
