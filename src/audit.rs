//! What was done, by whom, and how it ended: one JSON object a line, appended to
//! a file that only its owner reads, or to the log as target `audit`. It holds
//! names and reasons, and never a token, a key, a prompt or a completion.
//!
//! Who has no credentials can have lines written by being refused: of those, so
//! many a minute are written, and of the others their number.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    net::SocketAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use serde::Serialize;
use tokio::time::Instant;

use crate::auth::Roles;

/// Lines about refused strangers in one minute at most.
const STRANGERS: u32 = 600;
const WINDOW: Duration = Duration::from_secs(60);
/// Of an object's name that a caller chose, in characters.
const MAX_OBJECT: usize = 256;
/// Likewise of what is told beside it: a request has as many faults as its sender likes.
const MAX_DETAIL: usize = 2000;

/// The log. Clones write to the same one.
#[derive(Clone, Debug, Default)]
pub struct Audit(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    path: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    file: Option<File>,
    window: Option<Instant>,
    strangers: u32,
    /// The file could not be written to: said once.
    failed: bool,
}

/// One line.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// What was done: `register`, `drain`, `refused`.
    pub event: &'a str,
    /// By whom; `None`: by nobody known, or by the server itself.
    pub principal: Option<&'a str>,
    /// The principal's tenant.
    pub tenant: Option<&'a str>,
    /// Its roles.
    pub roles: Option<Roles>,
    /// Where it called from.
    pub peer: Option<SocketAddr>,
    /// To what: a replica, a method, a file, the TLS handshake.
    pub object: Option<&'a str>,
    /// `OK`, or the reason of the error.
    pub outcome: &'a str,
    /// More, where that helps; of more than 2,000 characters the first.
    pub detail: Option<&'a str>,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    event: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    principal: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<String>,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

impl Audit {
    /// Appends to this file; without one, to the log.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: Option<&Path>) -> io::Result<Self> {
        let file = path.map(append).transpose()?;
        Ok(Self(Arc::new(Inner {
            path: path.map(Path::to_owned),
            state: Mutex::new(State {
                file,
                ..State::default()
            }),
        })))
    }

    /// Whether this file can be appended to, as far as that is seen without making it.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(path: &Path) -> io::Result<()> {
        match fs::metadata(path) {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            // To open a pipe would wait for its reader.
            Ok(there) if !there.is_file() => Ok(()),
            Ok(_) => OpenOptions::new().append(true).open(path).map(drop),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = path.parent().filter(|folder| *folder != Path::new(""));
                if fs::metadata(folder.unwrap_or(Path::new(".")))?.is_dir() {
                    Ok(())
                } else {
                    Err(io::ErrorKind::NotADirectory.into())
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Opens the file again, which was moved away to be kept.
    ///
    /// # Errors
    /// When that fails; the lines then go where they went.
    pub fn reopen(&self) -> io::Result<()> {
        let Some(path) = &self.0.path else {
            return Ok(());
        };
        let file = append(path)?;
        self.lock().file = Some(file);
        Ok(())
    }

    /// Writes a line.
    pub fn write(&self, entry: &Entry<'_>) {
        self.put(&mut self.lock(), entry);
    }

    /// Writes a line about somebody who has shown no credentials that are known,
    /// unless there are too many of them.
    pub fn write_stranger(&self, entry: &Entry<'_>) {
        let mut state = self.lock();
        let now = Instant::now();
        let begun = *state.window.get_or_insert(now);
        if now.duration_since(begun) >= WINDOW {
            let untold = state.strangers.saturating_sub(STRANGERS);
            state.window = Some(now);
            state.strangers = 0;
            if untold > 0 {
                let detail = format!("{untold} more were refused before, in one minute");
                let more = Entry {
                    event: "refused",
                    principal: None,
                    tenant: None,
                    roles: None,
                    peer: None,
                    object: None,
                    outcome: entry.outcome,
                    detail: Some(&detail),
                };
                self.put(&mut state, &more);
            }
        }
        state.strangers = state.strangers.saturating_add(1);
        if state.strangers <= STRANGERS {
            self.put(&mut state, entry);
        }
    }

    fn put(&self, state: &mut State, entry: &Entry<'_>) {
        let line = Line {
            time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            event: entry.event,
            principal: entry.principal,
            tenant: entry.tenant,
            roles: entry.roles.map(|roles| roles.to_string()),
            peer: entry.peer,
            object: entry
                .object
                .map(|object| object.chars().take(MAX_OBJECT).collect()),
            outcome: entry.outcome,
            detail: entry
                .detail
                .map(|detail| detail.chars().take(MAX_DETAIL).collect()),
        };
        let Ok(mut text) = serde_json::to_string(&line) else {
            return;
        };
        let Some(file) = &mut state.file else {
            tracing::info!(target: "audit", "{text}");
            return;
        };
        text.push('\n');
        // One write: lines of two processes do not mix.
        let written = file.write_all(text.as_bytes());
        match written {
            Ok(()) => state.failed = false,
            Err(error) => {
                if !std::mem::replace(&mut state.failed, true) {
                    tracing::error!(%error, "the audit log cannot be written: its lines go to this log");
                }
                tracing::info!(target: "audit", "{}", text.trim_end());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::auth::Role;

    fn entry<'a>(event: &'a str, object: &'a str) -> Entry<'a> {
        Entry {
            event,
            principal: Some("ops"),
            tenant: None,
            roles: Some(Roles::NONE.and(Role::Admin)),
            peer: Some("10.0.0.1:5".parse().unwrap()),
            object: Some(object),
            outcome: "OK",
            detail: None,
        }
    }

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn lines_are_appended_and_only_the_owner_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        for event in ["drain", "resume"] {
            let audit = Audit::open(Some(&path)).unwrap();
            audit.write(&entry(event, "r\n\"1"));
        }
        let told = lines(&path);
        assert_eq!(told.len(), 2);
        assert_eq!(told[1]["event"], "resume");
        assert_eq!(told[1]["object"], "r\n\"1");
        assert_eq!(told[1]["roles"], "admin");
        assert_eq!(told[1]["peer"], "10.0.0.1:5");
        assert!(told[1].get("tenant").is_none());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_that_was_moved_away_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (path, old) = (dir.path().join("a"), dir.path().join("a.1"));
        let audit = Audit::open(Some(&path)).unwrap();
        audit.write(&entry("drain", "1"));
        std::fs::rename(&path, &old).unwrap();
        audit.reopen().unwrap();
        audit.write(&entry("drain", "2"));
        assert_eq!((lines(&old).len(), lines(&path).len()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_cannot_fill_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let audit = Audit::open(Some(&path)).unwrap();
        for _ in 0..5000 {
            audit.write_stranger(&entry("refused", &"x".repeat(10_000)));
        }
        // Others are still heard.
        let faults = "fault; ".repeat(20_000);
        audit.write(&Entry {
            detail: Some(&faults),
            ..entry("register", "r")
        });
        assert_eq!(lines(&path).len(), STRANGERS as usize + 1);
        assert!(std::fs::metadata(&path).unwrap().len() < 400 * 1024);
        tokio::time::advance(WINDOW).await;
        audit.write_stranger(&entry("refused", "x"));
        let told = lines(&path);
        assert_eq!(told.len(), STRANGERS as usize + 3);
        let more = told[STRANGERS as usize + 1]["detail"].as_str().unwrap();
        assert!(more.starts_with("4400 more"), "{more}");
    }
}
