//! Credentials and certificates are read again while the server runs: once a
//! second, since what mounts them (a kubelet, a rotator) tells nobody, and at once
//! on SIGHUP. What has a fault changes nothing and is told once.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::{Gate, files::Content, tls::ServerTls};
use crate::audit::Entry;

/// How often files are looked at.
const EVERY: Duration = Duration::from_secs(1);

/// What was read last, as a hash: what was tried once is not tried again.
#[derive(Debug, Default)]
pub(super) struct Tried(Mutex<Option<[u8; 32]>>);

impl Tried {
    /// Whether this is another content, or another failure, than the last time.
    pub(super) fn is_news<'a>(
        &self,
        read: impl IntoIterator<Item = &'a Result<Content, String>>,
    ) -> bool {
        let mut hash = Sha256::new();
        for part in read {
            let (kind, bytes) = match part {
                Ok(content) => (0, &content.bytes[..]),
                Err(fault) => (1, fault.as_bytes()),
            };
            hash.update([kind]);
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        }
        let hash = hash.finalize().into();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.replace(hash) != Some(hash)
    }
}

/// Keeps what the files say, until `stop`.
pub(super) async fn keep(gate: Arc<Gate>, tls: Option<Arc<ServerTls>>, stop: CancellationToken) {
    let mut hangup = signal(SignalKind::hangup()).ok();
    loop {
        let told = async {
            match &mut hangup {
                Some(hangup) => hangup.recv().await.is_some(),
                None => std::future::pending().await,
            }
        };
        let hung_up = tokio::select! {
            () = stop.cancelled() => {
                gate.audit().tell_untold(true);
                return;
            }
            () = tokio::time::sleep(EVERY) => false,
            told = told => told,
        };
        let (gate, tls) = (Arc::clone(&gate), tls.clone());
        // A file may lie on a network's disk.
        let looked = tokio::task::spawn_blocking(move || look(&gate, tls.as_deref(), hung_up));
        let _ = looked.await;
    }
}

fn look(gate: &Gate, tls: Option<&ServerTls>, hung_up: bool) {
    if hung_up && let Err(error) = gate.audit().reopen() {
        error!(%error, "the audit log cannot be opened again");
    }
    gate.audit().tell_untold(false);
    if let Some((path, outcome)) = gate.reload() {
        tell(gate, "credentials-reloaded", path, &outcome);
    }
    if let Some(tls) = tls
        && let Some((path, outcome)) = tls.reload()
    {
        tell(gate, "certificates-reloaded", path, &outcome);
    }
}

fn tell(gate: &Gate, event: &str, path: &Path, outcome: &Result<String, String>) {
    let (outcome, detail) = match outcome {
        Ok(what) => {
            info!(file = %path.display(), "{event}: {what}");
            ("OK", what)
        }
        Err(fault) => {
            error!("{event}: REFUSED, what was in force stays in force: {fault}");
            ("REFUSED", fault)
        }
    };
    gate.audit().write(&Entry {
        event,
        principal: None,
        tenant: None,
        roles: None,
        peer: None,
        object: Some(&path.to_string_lossy()),
        outcome,
        detail: Some(detail),
    });
}
