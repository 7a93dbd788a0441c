//! The file of credentials: one credential a line, so that a token is added by
//! appending a line and taken back by removing one, and so that the whole file is
//! one value of a Kubernetes Secret.
//!
//! ```text
//! # Trainers of team a, for the time of an exchange with two tokens.
//! principal=trainer-a role=sample tenant=team-a sha256=9f86…
//! principal=trainer-a role=sample tenant=team-a sha256=60ac… not-after=2027-01-31T00:00:00Z
//! principal=trainer-b role=sample tenant=team-b uri=spiffe://cluster/ns/rl/sa/trainer-b
//! principal=sidecars  role=replica              sha256=fcde…
//! principal=ops       role=admin                sha256=2c26…
//! ```
//!
//! All lines of one principal give the same roles and tenant. A file with any
//! fault is refused as a whole, and no fault repeats what the line holds.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::SystemTime,
};

use super::{Role, Roles, token::TokenHash};
use crate::ids::Tenant;

/// Credentials of one file at most.
const MAX_LINES: usize = 16_384;
/// Of a principal's and of a tenant's name.
const MAX_NAME: usize = 128;
/// Of a certificate's name.
const MAX_URI: usize = 2048;
/// Faults of one file that are told; of the others their number.
pub const MAX_FAULTS: usize = 64;

/// Somebody who may call.
#[derive(Debug, PartialEq, Eq)]
pub struct Principal {
    /// Its name, for logs.
    pub name: Arc<str>,
    /// What it may do.
    pub roles: Roles,
    /// Whose it is.
    pub tenant: Tenant,
}

/// What a token or a certificate's name stands for.
#[derive(Clone, Debug)]
pub struct Credential {
    /// Whose it is.
    pub principal: Arc<Principal>,
    /// It counts until then.
    pub not_after: Option<SystemTime>,
}

/// A file's credentials.
#[derive(Debug, Default)]
pub struct Directory {
    tokens: HashMap<TokenHash, Credential>,
    uris: HashMap<Box<str>, Credential>,
    principals: HashSet<Arc<str>>,
}

impl Directory {
    /// Reads it.
    ///
    /// # Errors
    /// All its faults, with the numbers of their lines.
    pub fn parse(text: &str) -> Result<Self, Vec<String>> {
        let mut directory = Self::default();
        let mut principals = HashMap::new();
        let mut seen = HashSet::new();
        let mut faults = Vec::new();
        let mut untold = 0_usize;
        let lines = text
            .lines()
            .enumerate()
            .map(|(i, line)| (i + 1, line.trim()));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        for (count, (number, line)) in lines.enumerate() {
            let found = if count == MAX_LINES {
                vec![format!("more than {MAX_LINES} credentials")]
            } else {
                let mut line = Line::read(line);
                directory.add(&mut line, &mut principals, &mut seen);
                line.faults
            };
            for fault in found {
                if faults.len() < MAX_FAULTS {
                    faults.push(format!("line {number}: {fault}"));
                } else {
                    untold += 1;
                }
            }
            if count == MAX_LINES {
                break;
            }
        }
        if untold > 0 {
            faults.push(format!("and {untold} more faults"));
        }
        if faults.is_empty() && directory.is_empty() {
            faults.push("it holds no credential: nobody could call".to_owned());
        }
        if faults.is_empty() {
            Ok(directory)
        } else {
            Err(faults)
        }
    }

    /// Takes what the line gives in, or says why not.
    fn add<'a>(
        &mut self,
        line: &mut Line<'a>,
        principals: &mut HashMap<&'a str, Arc<Principal>>,
        seen: &mut HashSet<What<'a>>,
    ) {
        if line.what.is_some_and(|what| !seen.insert(what)) {
            line.fault("this sha256 or uri stands in an earlier line too");
        }
        let (Some(name), Some(roles)) = (line.principal, line.roles) else {
            return;
        };
        let tenant = line.tenant.map_or_else(Tenant::default, Tenant::new);
        let principal = principals.entry(name).or_insert_with(|| {
            Arc::new(Principal {
                name: name.into(),
                roles,
                tenant: tenant.clone(),
            })
        });
        let principal = Arc::clone(principal);
        if principal.roles != roles || principal.tenant != tenant {
            line.fault("another line gives this principal another role or another tenant");
        }
        let Some(what) = line.what.filter(|_| line.faults.is_empty()) else {
            return;
        };
        self.principals.insert(Arc::clone(&principal.name));
        let credential = Credential {
            principal,
            not_after: line.not_after,
        };
        match what {
            What::Token(hash) => self.tokens.insert(hash, credential),
            What::Uri(uri) => self.uris.insert(uri.into(), credential),
        };
    }

    /// Whose token this is.
    pub fn by_token(&self, hash: &TokenHash) -> Option<&Credential> {
        self.tokens.get(hash)
    }

    /// Whose certificates have this name.
    pub fn by_uri(&self, uri: &str) -> Option<&Credential> {
        self.uris.get(uri)
    }

    /// Whether any of them is this principal's.
    pub fn has(&self, principal: &str) -> bool {
        self.principals.contains(principal)
    }

    /// Credentials in it.
    pub fn len(&self) -> usize {
        self.tokens.len() + self.uris.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A line, as far as it can be read.
#[derive(Default)]
struct Line<'a> {
    principal: Option<&'a str>,
    roles: Option<Roles>,
    tenant: Option<&'a str>,
    what: Option<What<'a>>,
    not_after: Option<SystemTime>,
    faults: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum What<'a> {
    Token(TokenHash),
    Uri(&'a str),
}

impl<'a> Line<'a> {
    /// A fault, once.
    fn fault(&mut self, fault: impl Into<String>) {
        let fault = fault.into();
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    /// What is good, and what is wrong is told.
    fn good<T>(&mut self, read: Result<T, impl Into<String>>) -> Option<T> {
        read.map_err(|fault| self.fault(fault)).ok()
    }

    fn read(text: &'a str) -> Self {
        let mut line = Self::default();
        let mut fields: HashMap<&str, &str> = HashMap::new();
        for word in text.split_whitespace() {
            let Some((name, value)) = word.split_once('=') else {
                line.fault("a word is none of name=value");
                continue;
            };
            let known = ["principal", "role", "tenant", "sha256", "uri", "not-after"];
            if !known.contains(&name) {
                line.fault(format!("a field is none of {}", known.join(", ")));
            } else if fields.insert(name, value).is_some() {
                line.fault(format!("{name} stands twice"));
            }
        }
        let named = |name: &'static str| {
            let value = fields.get(name).copied();
            value.map(|value| {
                let is_one = is_name(value).then_some(value);
                is_one.ok_or_else(|| name_fault(name))
            })
        };
        let principal = named("principal").unwrap_or(Err("principal is missing".to_owned()));
        line.principal = line.good(principal);
        let role = fields.get("role").copied();
        line.roles = line.good(role.map_or(Err("role is missing".to_owned()), roles));
        let tenant = named("tenant");
        if line.roles.is_some_and(|roles| roles.has(Role::Sample)) && tenant.is_none() {
            line.fault("the role sample needs a tenant");
        }
        line.tenant = tenant.and_then(|tenant| line.good(tenant));
        let what = match (fields.get("sha256"), fields.get("uri")) {
            (Some(hash), None) => hash.parse().map(What::Token).map_err(|()| {
                "sha256 must be the 64 hexadecimal digits that `berth token` prints, not the \
                 token itself"
                    .to_owned()
            }),
            (None, Some(uri)) => uri_name(uri).map(What::Uri),
            _ => Err("one of sha256 and uri is needed".to_owned()),
        };
        line.what = line.good(what);
        let not_after = fields.get("not-after").map(|text| {
            humantime::parse_rfc3339(text)
                .map_err(|_| "not-after must be a time as 2027-01-31T00:00:00Z")
        });
        line.not_after = not_after.and_then(|time| line.good(time));
        line
    }
}

/// Whether a principal or a tenant may be called so.
pub fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._:@/-".contains(&b))
}

fn name_fault(field: &str) -> String {
    format!("{field} must have 1 to {MAX_NAME} characters of [A-Za-z0-9._:@/-]")
}

fn roles(text: &str) -> Result<Roles, String> {
    text.split(',').try_fold(Roles::NONE, |roles, name| {
        let role = Role::ALL.into_iter().find(|role| role.name() == name);
        role.map(|role| roles.and(role))
            .ok_or_else(|| "role must be sample, replica or admin, or some of them".to_owned())
    })
}

fn uri_name(uri: &str) -> Result<&str, String> {
    let scheme = uri.split_once("://").map(|(scheme, _)| scheme);
    if uri.len() > MAX_URI || scheme.is_none_or(str::is_empty) {
        return Err("uri must be one as spiffe://domain/path".to_owned());
    }
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::{super::token::Token, *};

    fn fault(text: &str) -> String {
        Directory::parse(text).unwrap_err().join("\n")
    }

    #[test]
    fn a_principal_has_as_many_credentials_as_it_has_lines() {
        let (old, new) = (Token::mint().unwrap(), Token::mint().unwrap());
        let text = format!(
            "# two tokens, for the time of an exchange\n\n\
             principal=t role=sample,admin tenant=a sha256={}  not-after=2027-01-31T00:00:00Z\n  \
             principal=t role=admin,sample tenant=a sha256={}\n\
             principal=t role=sample,admin tenant=a uri=spiffe://c/t\r\n\
             principal=s role=replica uri=spiffe://c/s\n",
            old.hash(),
            new.hash()
        );
        let directory = Directory::parse(&text).unwrap();
        assert_eq!(directory.len(), 4);
        let first = directory.by_token(&old.hash()).unwrap();
        assert_eq!(first.principal.roles.to_string(), "sample,admin");
        assert_eq!(first.principal.tenant, Tenant::new("a"));
        assert!(first.not_after.is_some());
        assert!(directory.by_token(&new.hash()).unwrap().not_after.is_none());
        assert_eq!(
            &*directory.by_uri("spiffe://c/s").unwrap().principal.name,
            "s"
        );
        assert!(directory.by_uri("spiffe://c/other").is_none());
        assert!(directory.by_token(&Token::mint().unwrap().hash()).is_none());
    }

    #[test]
    fn every_fault_is_told_by_its_line_and_nothing_of_it_is_shown() {
        let secret = "berth_thisIsTheTokenItselfByMistake0123456789";
        let hash = "ab".repeat(32);
        let text = format!(
            "principal=a role=sample sha256={hash}\n\
             principal=b role=replica sha256={secret}\n\
             principal=c role=root sha256={hash}\n\
             principal=d role=replica\n\
             principal=e role=replica sha256={hash} uri=spiffe://x\n\
             principal=f role=replica token={secret}\n\
             {secret}\n\
             principal=g role=replica uri={secret}\n\
             principal=h role=replica not-after=tomorrow sha256={hash}\n\
             role=replica sha256={hash}\n\
             principal=g role=replica role=admin sha256={hash}\n\
             principal=g role=sample tenant=a\u{7f}b sha256={hash}\n"
        );
        let told = fault(&text);
        for number in 1..=12 {
            assert!(
                told.contains(&format!("line {number}:")),
                "{number} in {told}"
            );
        }
        assert!(!told.contains(secret) && !told.contains(&hash), "{told}");
    }

    #[test]
    fn every_fault_of_a_line_is_told() {
        let hash = "ab".repeat(32);
        let told = fault(&format!(
            "principal=p role=replica sha256={hash}\n\
             x y principal=a! role=king tenant=b! sha256={hash} token=t not-after=soon\n\
             role=sample role=sample\n\
             principal=p role=admin sha256=1\n"
        ));
        let told: Vec<&str> = told.lines().collect();
        let name = "must have 1 to 128 characters of [A-Za-z0-9._:@/-]";
        assert_eq!(
            told,
            [
                "line 2: a word is none of name=value",
                "line 2: a field is none of principal, role, tenant, sha256, uri, not-after",
                &format!("line 2: principal {name}"),
                "line 2: role must be sample, replica or admin, or some of them",
                &format!("line 2: tenant {name}"),
                "line 2: not-after must be a time as 2027-01-31T00:00:00Z",
                "line 2: this sha256 or uri stands in an earlier line too",
                "line 3: role stands twice",
                "line 3: principal is missing",
                "line 3: the role sample needs a tenant",
                "line 3: one of sha256 and uri is needed",
                "line 4: sha256 must be the 64 hexadecimal digits that `berth token` prints, not \
                 the token itself",
                "line 4: another line gives this principal another role or another tenant",
            ]
        );
    }

    #[test]
    fn lines_that_contradict_each_other_are_refused() {
        let (a, b) = ("ab".repeat(32), "cd".repeat(32));
        let two = |second: &str| {
            fault(&format!(
                "principal=p role=sample tenant=t sha256={a}\n{second}\n"
            ))
        };
        let other = format!("principal=p role=sample tenant=u sha256={b}");
        assert!(two(&other).contains("another tenant"));
        let other = format!("principal=p role=sample,admin tenant=t sha256={b}");
        assert!(two(&other).contains("another role"));
        let other = format!("principal=q role=replica sha256={a}");
        assert!(two(&other).contains("earlier line"));
        assert!(fault("# nothing\n").contains("no credential"));
        // Of each line, that it is no field and that three are missing.
        let many = fault(&"x\n".repeat(50));
        assert_eq!(many.lines().count(), MAX_FAULTS + 1, "{many}");
        assert!(many.ends_with("and 136 more faults"), "{many}");
    }
}
