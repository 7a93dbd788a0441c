//! What was done, by whom, and how it ended: one JSON object a line, appended to
//! a file that only its owner reads, or to the log as target `audit`. It holds
//! names and reasons, and never a token, a key, a prompt or a completion.
//!
//! Callers have lines written. Of what one principal does, and of what it is refused,
//! so many a minute are written and of the others their number; all who have shown no
//! credentials that are known share one part. What operators do is always written.

use std::{
    collections::BTreeMap,
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

/// Lines in one minute at most of one principal's refusals.
const REFUSED: u32 = 600;
/// Likewise of what it did: all sidecars of a fleet may be one principal, and register
/// at once.
const DONE: u32 = 6000;
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
    /// By principal, of this minute. As many as there are credentials, and one.
    parts: BTreeMap<Option<String>, Part>,
    /// The file could not be written to: said once.
    failed: bool,
}

/// What of one principal came in one minute.
#[derive(Debug)]
struct Part {
    begun: Instant,
    refused: u32,
    done: u32,
}

impl Part {
    /// What was left out.
    fn untold(&self) -> Option<String> {
        let refused = self.refused.saturating_sub(REFUSED);
        let done = self.done.saturating_sub(DONE);
        match (refused, done) {
            (0, 0) => None,
            (_, 0) => Some(format!("{refused} more were refused in one minute")),
            _ => Some(format!(
                "{refused} more were refused and {done} more done in one minute"
            )),
        }
    }
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

    /// Writes a line that a caller causes, unless there are too many of its principal.
    pub fn write_bounded(&self, entry: &Entry<'_>) {
        let mut state = self.lock();
        self.tell(&mut state, false);
        let of = entry.principal.map(str::to_owned);
        let part = state.parts.entry(of).or_insert_with(|| Part {
            begun: Instant::now(),
            refused: 0,
            done: 0,
        });
        let (count, most) = match entry.outcome {
            "OK" => (&mut part.done, DONE),
            _ => (&mut part.refused, REFUSED),
        };
        *count = count.saturating_add(1);
        if *count <= most {
            self.put(&mut state, entry);
        }
    }

    /// Writes how many lines were left out, of each principal whose minute is over; at
    /// the end of all.
    pub fn tell_untold(&self, end: bool) {
        self.tell(&mut self.lock(), end);
    }

    fn tell(&self, state: &mut State, end: bool) {
        let now = Instant::now();
        let mut told = Vec::new();
        state.parts.retain(|principal, part| {
            let over = end || now.duration_since(part.begun) >= WINDOW;
            if over {
                told.extend(part.untold().map(|untold| (principal.clone(), untold)));
            }
            !over
        });
        for (principal, detail) in told {
            let left_out = Entry {
                event: "left-out",
                principal: principal.as_deref(),
                tenant: None,
                roles: None,
                peer: None,
                object: None,
                outcome: "OK",
                detail: Some(&detail),
            };
            self.put(state, &left_out);
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

    fn stranger<'a>(object: &'a str) -> Entry<'a> {
        Entry {
            principal: None,
            outcome: "NO_CREDENTIALS",
            ..entry("refused", object)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn callers_cannot_fill_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let audit = Audit::open(Some(&path)).unwrap();
        for _ in 0..5000 {
            audit.write_bounded(&stranger(&"x".repeat(10_000)));
        }
        // Those that are known are still heard, each up to a bound of its own.
        let faults = "fault; ".repeat(20_000);
        let faulty = Entry {
            outcome: "INVALID_REQUEST",
            detail: Some(&faults),
            ..entry("register", "r")
        };
        audit.write_bounded(&faulty);
        assert_eq!(lines(&path).len(), REFUSED as usize + 1);
        assert!(std::fs::metadata(&path).unwrap().len() < 400 * 1024);
        for _ in 0..999 {
            audit.write_bounded(&faulty);
        }
        for _ in 0..7000 {
            audit.write_bounded(&entry("deregister", "r"));
        }
        audit.write(&entry("drain", "r"));
        let before = 2 * REFUSED as usize + DONE as usize + 1;
        assert_eq!(lines(&path).len(), before);

        // Nobody has to come again for the rest to be told.
        audit.tell_untold(false);
        assert_eq!(lines(&path).len(), before);
        tokio::time::advance(WINDOW).await;
        audit.tell_untold(false);
        let told = &lines(&path)[before..];
        let detail = |n: usize| told[n]["detail"].as_str().unwrap();
        assert_eq!(told.len(), 2);
        assert!(told[0].get("principal").is_none());
        assert!(detail(0).starts_with("4400 more were refused"), "{told:?}");
        assert_eq!(told[1]["principal"], "ops");
        assert!(detail(1).starts_with("400 more were refused and 1000 more done"));
        audit.write_bounded(&stranger("x"));
        assert_eq!(lines(&path).len(), before + 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_left_out_is_told_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let audit = Audit::open(Some(&path)).unwrap();
        for _ in 0..900 {
            audit.write_bounded(&stranger("x"));
        }
        audit.tell_untold(true);
        let told = lines(&path);
        let last = told.last().unwrap();
        assert_eq!((told.len(), &last["event"]), (601, &"left-out".into()));
    }
}
