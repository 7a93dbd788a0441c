//! Decides over one call: who is it, and may it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use arc_swap::ArcSwap;
use http::{HeaderMap, header};

use super::{
    Caller, Reflection, Role, Roles,
    file::{Credential, Directory},
    files,
    methods::{self, Rule},
    reload::Tried,
    tls::ClientName,
    token::{Token, TokenHash},
};
use crate::{
    audit::{Audit, Entry},
    error::{Error, Reason},
    ids::Tenant,
    listen::Peer,
};

/// See the module. Shared by all connections.
#[derive(Debug)]
pub struct Gate {
    known: Option<Arc<Known>>,
    reflection: Reflection,
    audit: Audit,
}

/// Where callers are known.
#[derive(Debug)]
pub(super) struct Known {
    path: PathBuf,
    directory: ArcSwap<Directory>,
    tried: Tried,
}

/// What a caller has shown. It may count no more later.
#[derive(Clone, Debug)]
pub(super) enum Proof {
    Token(TokenHash),
    Certificate(ClientName),
}

impl Known {
    /// Those of this file.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub(super) fn read(path: &Path) -> Result<Arc<Self>, Vec<String>> {
        let read = files::read(path);
        let tried = Tried::default();
        tried.is_news([&read]);
        let content = read.map_err(|fault| vec![fault])?;
        Ok(Arc::new(Self {
            path: path.to_owned(),
            directory: ArcSwap::from_pointee(parse(path, &content.bytes)?),
            tried,
        }))
    }

    /// Whose this is.
    ///
    /// # Errors
    /// CREDENTIALS_REFUSED, now or by now.
    pub(super) fn credential(&self, proof: &Proof) -> Result<Credential, Error> {
        let directory = self.directory.load();
        let credential = match proof {
            Proof::Token(hash) => directory
                .by_token(hash)
                .ok_or_else(|| refused("this token is not known here, or not any more"))?,
            Proof::Certificate(client) => uri(client)?
                .as_deref()
                .and_then(|uri| directory.by_uri(uri))
                .ok_or_else(|| refused("the client certificate's name is not known here"))?,
        };
        if credential
            .not_after
            .is_some_and(|until| until <= SystemTime::now())
        {
            return Err(refused(
                "these credentials counted until some time that has passed: use newer ones",
            ));
        }
        Ok(credential.clone())
    }

    /// Whether any credentials are this principal's.
    pub(super) fn has(&self, principal: &str) -> bool {
        self.directory.load().has(principal)
    }
}

fn refused(why: &str) -> Error {
    Error::new(Reason::CredentialsRefused, why)
}

fn uri(client: &ClientName) -> Result<Option<Arc<str>>, Error> {
    client
        .name()
        .map_err(|why| refused(&format!("the client certificate is refused: {why}")))
}

impl Gate {
    /// Over those who are known; `None`: everybody may do everything.
    pub(super) fn new(known: Option<Arc<Known>>, reflection: Reflection, audit: Audit) -> Self {
        Self {
            known,
            reflection,
            audit,
        }
    }

    /// Where what is done is written down.
    pub fn audit(&self) -> &Audit {
        &self.audit
    }

    /// Reads the file of credentials again. `None`: it is as it was. A file with a
    /// fault changes nothing.
    pub(super) fn reload(&self) -> Option<(&Path, Result<String, String>)> {
        let known = self.known.as_ref()?;
        let read = files::read(&known.path);
        if !known.tried.is_news([&read]) {
            return None;
        }
        let parsed = read.and_then(|content| {
            parse(&known.path, &content.bytes).map_err(|faults| faults.join("; "))
        });
        let exchanged = parsed.map(|directory| {
            let count = directory.len();
            known.directory.store(Arc::new(directory));
            format!("{count} credentials")
        });
        Some((&known.path, exchanged))
    }

    /// Who calls this method, if it may.
    ///
    /// # Errors
    /// NO_CREDENTIALS, CREDENTIALS_REFUSED, ROLE_MISSING, NOT_IMPLEMENTED.
    pub fn admit(
        &self,
        path: &str,
        headers: &HeaderMap,
        extensions: &http::Extensions,
    ) -> Result<Caller, Error> {
        let needed = methods::rule(path)
            .and_then(|rule| methods::needed(rule, self.reflection).map(|roles| (rule, roles)));
        // As for a method of a later version: a client may do without it.
        let Some((rule, needed)) = needed else {
            return Err(Error::new(
                Reason::NotImplemented,
                "this control plane does not serve this method",
            ));
        };
        let anyone = |roles| Caller {
            principal: "anyone".into(),
            tenant: Tenant::default(),
            roles,
            peer: extensions.get::<Peer>().map(|peer| peer.0),
            audit: self.audit.clone(),
            standing: None,
        };
        let Some(known) = &self.known else {
            return Ok(anyone(Roles::ALL));
        };
        if rule == Rule::Everybody {
            return Ok(anyone(Roles::NONE));
        }
        self.caller(known, path, headers, extensions, needed)
    }

    /// Whether this request of the admin port may be answered: probes are, whoever
    /// asks, and the rest is for admins.
    ///
    /// # Errors
    /// NO_CREDENTIALS, CREDENTIALS_REFUSED, ROLE_MISSING.
    pub fn admit_to_admin_port(
        &self,
        path: &str,
        headers: &HeaderMap,
        extensions: &http::Extensions,
    ) -> Result<(), Error> {
        match &self.known {
            Some(known) if !matches!(path, "/livez" | "/healthz" | "/readyz") => self
                .caller(known, path, headers, extensions, &[Role::Admin])
                .map(drop),
            _ => Ok(()),
        }
    }

    /// Who shows these credentials, if one of these roles is theirs.
    fn caller(
        &self,
        known: &Arc<Known>,
        path: &str,
        headers: &HeaderMap,
        extensions: &http::Extensions,
        needed: &[Role],
    ) -> Result<Caller, Error> {
        let peer = extensions.get::<Peer>().map(|peer| peer.0);
        let tell = |error: Error| {
            self.audit.write_bounded(&Entry {
                event: "refused",
                principal: None,
                tenant: None,
                roles: None,
                peer,
                object: Some(path),
                outcome: error.reason.name(),
                detail: Some(&error.message),
            });
            error
        };
        let proof = proof(headers, extensions.get::<ClientName>()).map_err(tell)?;
        let Some(proof) = proof else {
            return Err(tell(Error::new(
                Reason::NoCredentials,
                "this control plane takes calls from those it knows: send `authorization: Bearer \
                 <token>`, or show a client certificate",
            )));
        };
        let credential = known.credential(&proof).map_err(tell)?;
        let principal = &credential.principal;
        let caller = Caller {
            principal: Arc::clone(&principal.name),
            tenant: principal.tenant.clone(),
            roles: principal.roles,
            peer,
            audit: self.audit.clone(),
            standing: Some((Arc::clone(known), proof)),
        };
        if !needed.iter().any(|role| caller.roles.has(*role)) {
            let names: Vec<&str> = needed.iter().map(|role| role.name()).collect();
            let error = Error::new(
                Reason::RoleMissing,
                format!(
                    "this needs the role {}, and these credentials have {}",
                    names.join(" or "),
                    caller.roles
                ),
            );
            self.audit
                .write_bounded(&caller.entry("refused", path, Some(&error)));
            return Err(error);
        }
        Ok(caller)
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Directory, Vec<String>> {
    let path = path.display();
    let text = std::str::from_utf8(bytes).map_err(|_| vec![format!("{path}: it is not UTF-8")])?;
    let of_file = |fault| format!("{path}: {fault}");
    Directory::parse(text).map_err(|faults| faults.into_iter().map(of_file).collect())
}

/// A token goes before a certificate: a call through somebody's proxy is the
/// caller's own. What is shown must be right, though, even where the other would
/// do.
fn proof(headers: &HeaderMap, client: Option<&ClientName>) -> Result<Option<Proof>, Error> {
    let name = client.map_or(Ok(None), uri)?;
    let mut tokens = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = tokens.next() else {
        let client = client.filter(|_| name.is_some());
        return Ok(client.cloned().map(Proof::Certificate));
    };
    if tokens.next().is_some() {
        return Err(refused("authorization is sent twice"));
    }
    let token = value.to_str().ok().and_then(|text| {
        let (scheme, token) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token)
    });
    let token = token.ok_or_else(|| refused("authorization must be `Bearer <token>`"))?;
    let token = Token::parse(token).map_err(|why| refused(&format!("the token: {why}")))?;
    Ok(Some(Proof::Token(token.hash())))
}

#[cfg(test)]
mod tests;
