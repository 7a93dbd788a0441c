//! HTTP/2 by its bytes: what no client library would send.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const NO_ERROR: u32 = 0;
pub const REFUSED_STREAM: u32 = 7;
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(40);

/// The head of a frame that carries so many bytes.
pub fn head(kind: u8, flags: u8, stream: u32, len: usize) -> Vec<u8> {
    let [_, a, b, c] = u32::try_from(len).unwrap().to_be_bytes();
    let mut bytes = vec![a, b, c, kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes
}

pub fn frame(kind: u8, flags: u8, stream: u32, carried: &[u8]) -> Vec<u8> {
    let mut bytes = head(kind, flags, stream, carried.len());
    bytes.extend(carried);
    bytes
}

pub fn ping() -> Vec<u8> {
    frame(PING, 0, 0, b"01234567")
}

pub fn reset(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &8u32.to_be_bytes())
}

/// Preface and SETTINGS, as every client begins.
pub fn hello() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

fn literal(name: &[u8], value: &str, into: &mut Vec<u8>) {
    into.extend(name);
    into.push(u8::try_from(value.len()).unwrap());
    into.extend(value.as_bytes());
}

/// The headers of a gRPC call (RFC 7541: indexed, or literal and not indexed).
pub fn call_headers(path: &str) -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    literal(&[0x04], path, &mut block);
    literal(&[0x01], "berth", &mut block);
    literal(&[0x0f, 0x10], "application/grpc", &mut block);
    literal(b"\x00\x02te", "trailers", &mut block);
    block
}

/// Begins a call; its body is still to come.
pub fn call(stream: u32, path: &str) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &call_headers(path))
}

/// A frame as it was read.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub carried: Vec<u8>,
}

impl Frame {
    /// Of RST_STREAM and GOAWAY.
    pub fn code(&self) -> u32 {
        let at = if self.kind == GOAWAY { 4 } else { 0 };
        u32::from_be_bytes(self.carried[at..at + 4].try_into().unwrap())
    }
}

/// A connection.
pub struct Wire(pub TcpStream);

impl Wire {
    pub async fn connect(to: SocketAddr) -> Self {
        Self(TcpStream::connect(to).await.unwrap())
    }

    /// From this address.
    pub async fn connect_from(from: &str, to: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        let from = SocketAddr::new(from.parse().unwrap(), 0);
        socket.bind(from).unwrap();
        Self(socket.connect(to).await.unwrap())
    }

    /// Connected, and greeted by the server.
    pub async fn open(to: SocketAddr) -> Self {
        let mut wire = Self::connect(to).await;
        wire.send(&hello()).await;
        wire.until(SETTINGS).await;
        wire
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// The next frame; `None`: the connection has ended.
    pub async fn next(&mut self) -> Option<Frame> {
        let next = async {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let [a, b, c, kind, flags, stream @ ..] = head;
            let len = u32::from_be_bytes([0, a, b, c]);
            let mut carried = vec![0; usize::try_from(len).unwrap()];
            self.0.read_exact(&mut carried).await.ok()?;
            Some(Frame {
                kind,
                flags,
                stream: u32::from_be_bytes(stream),
                carried,
            })
        };
        timeout(LONG, next).await.expect("nothing comes")
    }

    /// The next frame of this kind.
    pub async fn until(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.next().await.expect("it ended");
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// Reads to the end; the codes of its GOAWAYs. Answers no ping.
    pub async fn goaways(&mut self) -> Vec<u32> {
        let mut codes = Vec::new();
        while let Some(frame) = self.next().await {
            if frame.kind == GOAWAY {
                codes.push(frame.code());
            }
        }
        codes
    }

    /// All that comes until the end.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let read = self.0.read_to_end(&mut bytes);
        // A reset is an end too.
        let _ = timeout(LONG, read).await.expect("it does not end");
        bytes
    }
}

/// `GET path` of a port that speaks HTTP/1.
pub async fn get(admin: SocketAddr, path: &str) -> String {
    let mut wire = Wire::connect(admin).await;
    let request = format!("GET {path} HTTP/1.1\r\nhost: berth\r\nconnection: close\r\n\r\n");
    wire.send(request.as_bytes()).await;
    String::from_utf8(wire.rest().await).unwrap()
}

/// The value of a series as it is written on the page of metrics.
pub async fn metric(admin: SocketAddr, series: &str) -> f64 {
    let page = get(admin, "/metrics").await;
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    let value = line.unwrap_or_else(|| panic!("{series} is not in {page}"));
    value.trim().parse().unwrap()
}
