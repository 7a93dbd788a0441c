//! A client that speaks another way than the server it reaches: what the two make
//! of each other's first bytes says nothing to people, so it is told in words.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use hyper_util::client::legacy::connect::HttpConnector;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tonic::transport::Endpoint;

const USE_HTTPS: &str = "the server speaks TLS there: use https:// in the URL";
const USE_HTTP: &str = "the server does not speak TLS there: use http:// in the URL";
const TLS_OR_NOT: &str = "the connection ended in the TLS handshake: where the server does not \
                          speak TLS, use http:// in the URL";
const NO_GRPC: &str = "what answers there is no gRPC port of a control plane (by default 7700; \
                       its admin port is 7701)";
const NO_WORD: &str = "the server closed the connection without a word: is it the gRPC port of a \
                       control plane (by default 7700; its admin port is 7701)?";

/// Makes plain connections, as tonic does.
pub(super) fn plain(endpoint: &Endpoint) -> HttpConnector {
    let mut plain = HttpConnector::new();
    plain.set_nodelay(true);
    plain.set_connect_timeout(endpoint.get_connect_timeout());
    plain
}

/// Why there was no handshake.
pub(super) fn unshaken(error: io::Error) -> io::Error {
    if let io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset = error.kind() {
        return io::Error::new(error.kind(), format!("{TLS_OR_NOT} ({error})"));
    }
    let inner = error.get_ref();
    match inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidMessage(_)) => invalid(USE_HTTP),
        _ => error,
    }
}

/// A server that went before it said anything.
fn no_word(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{NO_WORD} ({error})"))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// What the first bytes of an answer say that is none of HTTP/2's.
fn other(first: &[u8]) -> Option<&'static str> {
    match first {
        // An alert, to somebody who shakes no hands. As the length of HTTP/2's first
        // frame it would be beyond what any server sends.
        [0x15, 0x03, ..] => Some(USE_HTTPS),
        // Some say in HTTP/1 that this is their port for TLS.
        [b'H', b'T', b'T', b'P', ..] => Some(NO_GRPC),
        _ => None,
    }
}

/// A plain connection whose first bytes are looked at.
#[derive(Debug)]
pub(super) struct Sniffed {
    stream: TcpStream,
    looked: bool,
}

impl Sniffed {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            looked: false,
        }
    }
}

impl Sniffed {
    /// HTTP/2 keeps from its callers why it could not write, and tells why it could
    /// not read. Where the server went before it said anything, reading ends as well:
    /// that is where it is told.
    fn written(&self, written: Poll<io::Result<usize>>, all: usize) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Err(error)) if !self.looked && is_gone(&error) => Poll::Ready(Ok(all)),
            written => written,
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

impl AsyncRead for Sniffed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        read.map_err(|error| if self.looked { error } else { no_word(&error) })?;
        let first = buffer.filled().get(before..).unwrap_or_default();
        if !self.looked && buffer.capacity() > before {
            let fault = match first {
                [] => Some(io::Error::new(io::ErrorKind::ConnectionAborted, NO_WORD)),
                _ => other(first).map(invalid),
            };
            self.looked = true;
            if let Some(fault) = fault {
                return Poll::Ready(Err(fault));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Sniffed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(written, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.written(written, parts.iter().map(|part| part.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// What the first read gives from a server that says this and leaves.
    async fn first(said: &[u8]) -> io::Result<usize> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        server.write_all(said).await.unwrap();
        drop(server);
        Sniffed::new(stream).read(&mut [0; 64]).await
    }

    #[tokio::test]
    async fn who_does_not_speak_http_2_is_told_by_its_first_bytes() {
        for (said, told) in [
            (&[0x15, 0x03, 0x03, 0, 2, 2, 50][..], "https://"),
            (b"HTTP/1.1 400 Bad Request\r\n", "7701"),
            (b"", "without a word"),
        ] {
            let fault = first(said).await.unwrap_err().to_string();
            assert!(fault.contains(told), "{fault}");
        }
        let settings = [0, 0, 0x15, 4, 0, 0, 0, 0, 0];
        assert_eq!(first(&settings).await.unwrap(), settings.len());
    }
}
