//! Asks a port whether anybody listens. Not more: an engine that is busy is not
//! to be asked for more while it is suspected. What may not be called is not
//! asked either.

use std::{io::ErrorKind, time::Duration};

use http::Uri;
use tokio::{net::TcpStream, time::timeout};

use crate::engine::egress::Egress;

const TIMEOUT: Duration = Duration::from_secs(1);

/// Whether connections to `url`'s port are refused. Anything else is not a
/// refusal: silence, a name that does not resolve, an address that `egress` does
/// not allow and that is therefore not asked.
pub(crate) async fn port_refuses(url: &str, egress: &Egress) -> bool {
    let Ok(uri) = url.parse::<Uri>() else {
        return false;
    };
    let (Some(host), port) = (uri.host(), uri.port_u16().unwrap_or(80)) else {
        return false;
    };
    let asked = async {
        // The addresses that were checked are the ones that are used.
        let Ok(addresses) = egress.resolve(host, port).await else {
            return false;
        };
        match TcpStream::connect(&addresses[..]).await {
            Ok(_) => false,
            Err(error) => error.kind() == ErrorKind::ConnectionRefused,
        }
    };
    timeout(TIMEOUT, asked).await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    fn closed() -> Egress {
        Egress {
            loopback: false,
            ..Egress::default()
        }
    }

    #[tokio::test]
    async fn a_port_refuses_or_does_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        assert!(!port_refuses(&url, &Egress::default()).await);
        drop(listener);
        assert!(port_refuses(&url, &Egress::default()).await);
        assert!(!port_refuses("no url", &Egress::default()).await);
    }

    #[tokio::test]
    async fn what_may_not_be_called_is_not_asked() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "[::ffff:127.0.0.1]", "localhost"] {
            assert!(!port_refuses(&format!("http://{host}:{port}"), &closed()).await);
        }
        // Whoever had asked would stand in the queue before this one.
        let mine = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (_, first) = listener.accept().await.unwrap();
        assert_eq!(first, mine.local_addr().unwrap());
        // A port that would refuse says nothing either.
        drop(listener);
        assert!(!port_refuses(&format!("http://127.0.0.1:{port}"), &closed()).await);
    }
}
