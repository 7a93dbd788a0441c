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

use std::{fmt, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

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

impl Guard {
    /// Reads all files.
    ///
    /// # Errors
    /// What is wrong with them: nothing is served then.
    pub fn new(config: &AuthConfig) -> anyhow::Result<Self> {
        let audit = Audit::open(config.audit_log.as_deref()).context("the audit log")?;
        let gate = Gate::new(config, audit).map_err(anyhow::Error::msg);
        let tls = config.tls.clone().map(ServerTls::new).transpose();
        Ok(Self {
            gate: Arc::new(gate.context("the file of credentials is not usable")?),
            tls: tls.map_err(anyhow::Error::msg).context("TLS")?,
        })
    }

    /// What is wrong with the files of credentials and of TLS, all of them; the audit
    /// log is not opened.
    pub fn faults(config: &AuthConfig) -> Vec<String> {
        let gate = Gate::new(config, Audit::default()).err();
        let tls = config.tls.clone().and_then(|tls| ServerTls::new(tls).err());
        let gate = gate.map(|fault| format!("credentials: {fault}"));
        let tls = tls.map(|fault| format!("TLS: {fault}"));
        gate.into_iter().chain(tls).collect()
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
            .write_stranger(&self.entry("refused", what, Some(&error)));
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

    /// Writes down what this caller did to `object`, and how that ended.
    pub fn did<T>(&self, what: &str, object: &str, outcome: &Result<T, Error>) {
        self.audit
            .write(&self.entry(what, object, outcome.as_ref().err()));
    }

    /// Writes down that this caller was refused, as that of others is: not without
    /// end.
    pub fn was_refused(&self, what: &str, object: &str, error: &Error) {
        self.audit
            .write_stranger(&self.entry(what, object, Some(error)));
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
