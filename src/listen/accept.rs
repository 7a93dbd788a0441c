//! Accepting connections, so many at once in all and so many of one address.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    time::Instant,
};
use tracing::{debug, warn};

use super::limits::{Connections, Counts, Limit, Port};

/// After an accept that failed for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);
/// Failures are told so often at most.
const TELL: Duration = Duration::from_secs(10);

/// A listener that takes no more connections than it may.
#[derive(Debug)]
pub(crate) struct Acceptor {
    listener: TcpListener,
    port: Port,
    most: Connections,
    open: Arc<Mutex<Open>>,
    counts: Arc<Counts>,
    /// Failures, and refusals, told last.
    told: [Option<Instant>; 2],
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    /// No entry is 0, so there are no more than connections.
    of: HashMap<IpAddr, usize>,
}

/// A connection's place. Free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    from: IpAddr,
    port: Port,
    open: Arc<Mutex<Open>>,
    counts: Arc<Counts>,
}

impl Acceptor {
    pub(crate) fn new(
        listener: TcpListener,
        port: Port,
        most: Connections,
        counts: Arc<Counts>,
    ) -> Self {
        Self {
            listener,
            port,
            most,
            open: Arc::default(),
            counts,
            told: [None; 2],
        }
    }

    /// The next connection that has a place. Others are sent `refusal` and closed.
    /// It is cancel safe: a connection is given or was never accepted.
    pub(crate) async fn next(&mut self, refusal: &[u8]) -> (TcpStream, SocketAddr, Place) {
        loop {
            let (stream, peer) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    self.failed(&error).await;
                    continue;
                }
            };
            self.counts.accepts(self.port);
            match self.place(peer.ip()) {
                Ok(place) => {
                    // Answers are small and awaited; a socket that refuses the option
                    // works too.
                    let _ = stream.set_nodelay(true);
                    return (stream, peer, place);
                }
                Err(limit) => {
                    self.counts.limits(self.port, limit);
                    if self.tells(1) {
                        let (port, limit) = (self.port.name(), limit.name());
                        warn!(port, limit, %peer, "connections are refused: too many are open");
                    }
                    // A fresh socket has room for it, and nobody is waited for.
                    let _ = stream.try_write(refusal);
                }
            }
        }
    }

    /// Waits where it would fail again at once: never a loop that spins. Who drops
    /// the wait because a connection has ended is right to try again.
    async fn failed(&mut self, error: &io::Error) {
        self.counts.fails_to_accept(self.port);
        // The connection's fault: the next one is another.
        let theirs = [
            io::ErrorKind::ConnectionAborted,
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::Interrupted,
        ];
        if theirs.contains(&error.kind()) {
            debug!(%error, "a connection was gone before it was accepted");
            return;
        }
        if self.tells(0) {
            let port = self.port.name();
            warn!(port, %error, "cannot accept connections");
        }
        tokio::time::sleep(PAUSE).await;
    }

    fn tells(&mut self, what: usize) -> bool {
        let now = Instant::now();
        let due = self.told[what].is_none_or(|at| now.duration_since(at) >= TELL);
        if due {
            self.told[what] = Some(now);
        }
        due
    }

    fn place(&self, ip: IpAddr) -> Result<Place, Limit> {
        let from = neighbourhood(ip);
        let mut open = lock(&self.open);
        if open.all >= self.most.all {
            return Err(Limit::Connections);
        }
        if open.of.get(&from).copied().unwrap_or(0) >= self.most.of_address {
            return Err(Limit::Address);
        }
        open.all += 1;
        *open.of.entry(from).or_default() += 1;
        drop(open);
        self.counts.opens(self.port);
        Ok(Place {
            from,
            port: self.port,
            open: Arc::clone(&self.open),
            counts: Arc::clone(&self.counts),
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        open.all -= 1;
        if let Some(count) = open.of.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                open.of.remove(&self.from);
            }
        }
        drop(open);
        self.counts.closes(self.port);
    }
}

fn lock(open: &Mutex<Open>) -> std::sync::MutexGuard<'_, Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one caller has of addresses: an IPv4 address, or the 64 bits of IPv6 in
/// which it may choose as it likes.
fn neighbourhood(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_network_of_ipv6_counts_as_one_address() {
        let of = |text: &str| neighbourhood(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[tokio::test]
    async fn a_place_is_free_again_when_its_connection_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let most = Connections {
            all: 3,
            of_address: 2,
        };
        let counts = Arc::new(Counts::default());
        let acceptor = Acceptor::new(listener, Port::Grpc, most, Arc::clone(&counts));
        let (a, b, c) = ("10.0.0.1", "10.0.0.2", "10.0.0.3");
        let place = |ip: &str| acceptor.place(ip.parse().unwrap());
        let (first, _second) = (place(a).unwrap(), place(a).unwrap());
        assert_eq!(place(a).unwrap_err(), Limit::Address);
        let _third = place(b).unwrap();
        assert_eq!(place(c).unwrap_err(), Limit::Connections);
        assert_eq!(counts.open(Port::Grpc), 3);
        drop(first);
        assert_eq!(counts.open(Port::Grpc), 2);
        let _fourth = place(a).unwrap();
        assert_eq!(lock(&acceptor.open).of.len(), 2);
    }
}
