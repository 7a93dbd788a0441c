//! Asks a port whether anybody listens. Not more: an engine that is busy is not
//! to be asked for more while it is suspected.

use std::{io::ErrorKind, time::Duration};

use http::Uri;
use tokio::{net::TcpStream, time::timeout};

const TIMEOUT: Duration = Duration::from_secs(1);

/// Whether connections to `url`'s port are refused. Anything else, silence
/// included, is not a refusal.
pub(crate) async fn port_refuses(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else {
        return false;
    };
    let (Some(host), port) = (uri.host(), uri.port_u16().unwrap_or(80)) else {
        return false;
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match timeout(TIMEOUT, TcpStream::connect((host, port))).await {
        Ok(Err(error)) => error.kind() == ErrorKind::ConnectionRefused,
        Ok(Ok(_)) | Err(_) => false,
    }
}
