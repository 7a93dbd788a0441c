//! TLS handshakes that fail: counted by why, told, and, where it is the client's
//! certificate that is refused, audited.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::{debug, warn};

use super::limits::{Counts, HandshakeFailure, Limit, Port};
use crate::{
    audit::{Audit, Entry},
    auth::tls::Unshaken,
    error::Reason,
};

/// Failures are told so often at most; each is at level debug.
const TELL: Duration = Duration::from_secs(10);

/// Those of one listener.
#[derive(Debug)]
pub(super) struct Handshakes {
    counts: Arc<Counts>,
    audit: Audit,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    last: Option<Instant>,
    /// Failures that were not told since.
    more: u64,
}

impl Handshakes {
    pub(super) fn new(counts: Arc<Counts>, audit: Audit) -> Self {
        Self {
            counts,
            audit,
            told: Mutex::default(),
        }
    }

    /// A peer's handshake has failed. What is told of it is where it came from and
    /// what rustls says, which is of certificates and protocols, never of keys.
    pub(super) fn failed(&self, peer: SocketAddr, failed: &Unshaken) {
        let why = failed.why;
        self.counts.fails_to_shake_hands(why);
        let (reason, error) = (why.name(), &failed.error);
        let refused = match why {
            HandshakeFailure::NoCertificate => Some(Reason::NoCredentials),
            HandshakeFailure::Certificate => Some(Reason::CredentialsRefused),
            // Nobody has shown, or failed to show, who it is.
            HandshakeFailure::Timeout
            | HandshakeFailure::Closed
            | HandshakeFailure::Alert
            | HandshakeFailure::Protocol => None,
        };
        if let Some(refused) = refused {
            self.refused(peer, refused, &error.to_string());
        }
        match why {
            HandshakeFailure::Timeout => self.counts.limits(Port::Grpc, Limit::Handshake),
            // Probes of load balancers and scans of ports do nothing else.
            HandshakeFailure::Closed => {}
            HandshakeFailure::NoCertificate
            | HandshakeFailure::Certificate
            | HandshakeFailure::Alert
            | HandshakeFailure::Protocol => {
                if let Some(more) = self.tells() {
                    warn!(%peer, reason, %error, more, "a TLS handshake failed");
                    return;
                }
            }
        }
        debug!(%peer, reason, %error, "a TLS handshake failed");
    }

    /// As the refusal of a call without credentials that count: of a flood of both
    /// together, so many lines.
    fn refused(&self, peer: SocketAddr, reason: Reason, detail: &str) {
        self.audit.write_bounded(&Entry {
            event: "refused",
            principal: None,
            tenant: None,
            roles: None,
            peer: Some(peer),
            object: Some("TLS handshake"),
            outcome: reason.name(),
            detail: Some(detail),
        });
    }

    /// Whether one that fails now is told, and how many before it were not.
    fn tells(&self) -> Option<u64> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if told.last.is_some_and(|at| now.duration_since(at) < TELL) {
            told.more += 1;
            return None;
        }
        told.last = Some(now);
        Some(std::mem::take(&mut told.more))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use tracing::Level;

    use super::*;
    use crate::telemetry::kept::Kept;

    /// What of this level and above is written while this is done.
    fn written(level: Level, done: impl FnOnce()) -> String {
        let (kept, _guard) = Kept::from(level);
        done();
        kept.text()
    }

    fn unshaken(error: rustls::Error) -> Unshaken {
        io::Error::new(io::ErrorKind::InvalidData, error).into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_says_who_and_why() {
        let counts = Arc::new(Counts::default());
        let shaken = Handshakes::new(Arc::clone(&counts), Audit::default());
        let peer = "192.0.2.7:4711".parse().unwrap();
        let without = unshaken(rustls::Error::NoCertificatesPresented);
        let went = Unshaken::from(io::Error::from(io::ErrorKind::UnexpectedEof));
        let told = written(Level::WARN, || {
            shaken.failed(peer, &went);
            shaken.failed(peer, &without);
            shaken.failed(peer, &without);
        });
        assert_eq!(told.lines().count(), 1, "{told}");
        for word in ["192.0.2.7:4711", "no_certificate"] {
            assert!(told.contains(word), "{told}");
        }
        let told = written(Level::DEBUG, || {
            shaken.failed(peer, &went);
            shaken.failed(peer, &without);
        });
        assert!(
            told.contains("closed") && told.contains("no_certificate"),
            "{told}"
        );
        assert!(!told.contains("WARN"), "{told}");
        assert_eq!(counts.unshaken(HandshakeFailure::NoCertificate), 3);
        assert_eq!(counts.unshaken(HandshakeFailure::Closed), 2);
        assert_eq!(counts.limited(Port::Grpc, Limit::Handshake), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn certificates_that_are_refused_are_audited_and_a_flood_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit");
        let audit = Audit::open(Some(&path)).unwrap();
        let shaken = Handshakes::new(Arc::default(), audit);
        let peer = "192.0.2.7:4711".parse().unwrap();
        let lines = || -> Vec<serde_json::Value> {
            let text = std::fs::read_to_string(&path).unwrap();
            text.lines()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect()
        };
        let expired = rustls::Error::InvalidCertificate(rustls::CertificateError::Expired);
        shaken.failed(peer, &unshaken(rustls::Error::NoCertificatesPresented));
        shaken.failed(peer, &unshaken(expired.clone()));
        for other in [
            Unshaken::from(io::Error::from(io::ErrorKind::UnexpectedEof)),
            unshaken(rustls::Error::DecryptError),
            unshaken(rustls::Error::AlertReceived(
                rustls::AlertDescription::UnknownCA,
            )),
        ] {
            shaken.failed(peer, &other);
        }
        let told = lines();
        let outcomes: Vec<&serde_json::Value> = told.iter().map(|line| &line["outcome"]).collect();
        assert_eq!(outcomes, ["NO_CREDENTIALS", "CREDENTIALS_REFUSED"]);
        for line in &told {
            assert_eq!(line["event"], "refused");
            assert_eq!(line["peer"], "192.0.2.7:4711");
            assert_eq!(line["object"], "TLS handshake");
        }
        let detail = told[1]["detail"].as_str().unwrap();
        assert!(detail.contains("Expired"), "{detail}");

        for _ in 0..5000 {
            shaken.failed(peer, &unshaken(expired.clone()));
        }
        assert_eq!(lines().len(), 600);
        tokio::time::advance(Duration::from_secs(60)).await;
        shaken.failed(peer, &unshaken(expired));
        let told = lines();
        let detail = told[600]["detail"].as_str().unwrap();
        assert!(detail.starts_with("4402 more"), "{detail}");
        assert_eq!(told.len(), 602);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_them_is_told_now_and_then_and_counted() {
        let shaken = Handshakes::new(Arc::default(), Audit::default());
        assert_eq!(shaken.tells(), Some(0));
        for _ in 0..99 {
            tokio::time::advance(Duration::from_millis(100)).await;
            assert_eq!(shaken.tells(), None);
        }
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(shaken.tells(), Some(99));
        assert_eq!(shaken.tells(), None);
    }
}
