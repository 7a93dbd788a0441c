//! TLS handshakes that fail: counted by why, and told.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::{debug, warn};

use super::limits::{Counts, HandshakeFailure, Limit, Port};
use crate::auth::tls::Unshaken;

/// Failures are told so often at most; each is at level debug.
const TELL: Duration = Duration::from_secs(10);

/// Those of one listener.
#[derive(Debug)]
pub(super) struct Handshakes {
    counts: Arc<Counts>,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    last: Option<Instant>,
    /// Failures that were not told since.
    more: u64,
}

impl Handshakes {
    pub(super) fn new(counts: Arc<Counts>) -> Self {
        Self {
            counts,
            told: Mutex::default(),
        }
    }

    /// A peer's handshake has failed. What is told of it is where it came from and
    /// what rustls says, which is of certificates and protocols, never of keys.
    pub(super) fn failed(&self, peer: SocketAddr, failed: &Unshaken) {
        let why = failed.why;
        self.counts.fails_to_shake_hands(why);
        let (reason, error) = (why.name(), &failed.error);
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

    /// What of this level and above is written while this is done.
    fn written(level: Level, done: impl FnOnce()) -> String {
        let text = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&text);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_ansi(false)
            .with_writer(move || Lines(Arc::clone(&into)))
            .finish();
        tracing::subscriber::with_default(subscriber, done);
        let text = text.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn unshaken(error: rustls::Error) -> Unshaken {
        io::Error::new(io::ErrorKind::InvalidData, error).into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_says_who_and_why() {
        let counts = Arc::new(Counts::default());
        let shaken = Handshakes::new(Arc::clone(&counts));
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
    async fn a_flood_of_them_is_told_now_and_then_and_counted() {
        let shaken = Handshakes::new(Arc::default());
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
