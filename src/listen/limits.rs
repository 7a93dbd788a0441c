//! What a connection may take of the server, and how often it was too much.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Limits of the gRPC listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections open at once, and those of one address.
    pub connections: Connections,
    /// Streams open at once on one connection. A trainer runs thousands of
    /// trajectories on one channel; a lower limit queues them unseen in the client.
    pub max_streams: u32,
    /// From a connection, or its TLS handshake, to the end of its first request's
    /// headers.
    pub first_request: Duration,
    /// How long a connection may be without an open stream.
    pub idle: Duration,
    /// From a request's headers to the end of its body.
    pub body: Duration,
    /// Bytes of one request's headers, 32 for each of them included.
    pub header_bytes: u32,
    /// Bytes of requests, of all connections together, that have begun and are not
    /// whole.
    pub unfinished_bytes: u64,
    /// Frames of one connection in a second that carry no request: pings, settings,
    /// resets, window updates, priorities; three more for each frame of an answer.
    pub control_frames: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: Connections {
                // A fleet of thousands of sidecars and trainers, each with some channels.
                all: 10_000,
                // They may all come from behind one address.
                of_address: 5_000,
            },
            max_streams: 4096,
            first_request: Duration::from_secs(30),
            idle: Duration::from_secs(15 * 60),
            body: Duration::from_secs(60),
            header_bytes: 16 << 10,
            unfinished_bytes: 2 << 30,
            control_frames: 500,
        }
    }
}

/// How many connections a listener has at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connections {
    /// In all.
    pub all: usize,
    /// Of one IPv4 address, or of one IPv6 network of 64 bits.
    pub of_address: usize,
}

/// Limits of the admin listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminLimits {
    /// Connections open at once, and those of one address.
    pub connections: Connections,
    /// From a connection, or the request before, to the end of a request's headers.
    pub first_request: Duration,
    /// Bytes of one request's headers.
    pub header_bytes: u32,
}

impl Default for AdminLimits {
    fn default() -> Self {
        let grpc = Limits::default();
        Self {
            connections: Connections {
                all: 512,
                of_address: 128,
            },
            first_request: grpc.first_request,
            header_bytes: grpc.header_bytes,
        }
    }
}

macro_rules! names {
    ($(#[$doc:meta])* $of:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $of {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $of {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Its name in metrics.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

names! {
    /// A port that is listened to.
    Port {
        /// gRPC.
        Grpc = "grpc",
        /// Admin HTTP.
        Admin = "admin",
    }
}

names! {
    /// Why a connection was refused or ended: the limit that it met.
    Limit {
        /// As many as may be are open.
        Connections = "connections",
        /// As many as may be of its address are open.
        Address = "address",
        /// It did not shake hands, or say what it speaks, in time.
        Handshake = "handshake",
        /// Its first request did not come in time.
        FirstRequest = "first_request",
        /// It had no open stream for too long.
        Idle = "idle",
        /// It sent too many frames that carry no request, for too long.
        ControlFrames = "control_frames",
        /// It announced a frame of headers or control larger than any needs to be.
        FrameSize = "frame_size",
        /// Too many bytes of unfinished requests were there already.
        UnfinishedBytes = "unfinished_bytes",
        /// HTTP/2 itself was at its end with it: resets, empty frames, headers beyond
        /// all measure.
        Calm = "calm",
    }
}

names! {
    /// Why a TLS handshake failed.
    HandshakeFailure {
        /// It was not done in time.
        Timeout = "timeout",
        /// The client went away.
        Closed = "closed",
        /// The client showed no certificate, and must.
        NoCertificate = "no_certificate",
        /// The client's certificate is not trusted, or its time is over.
        Certificate = "certificate",
        /// The client refused: it does not trust the server's certificate, most likely.
        Alert = "alert",
        /// What came was no TLS, or of no version or suite that is spoken here.
        Protocol = "protocol",
    }
}

names! {
    /// Why a request was refused: the limit that it met.
    RequestLimit {
        /// Streams of its connection.
        Streams = "streams",
        /// Bytes of its headers.
        Headers = "headers",
        /// Time for its body.
        Body = "body",
        /// Bytes of unfinished requests.
        UnfinishedBytes = "unfinished_bytes",
    }
}

const PORTS: usize = Port::ALL.len();

/// What listeners have counted.
#[derive(Debug, Default)]
pub struct Counts {
    open: [AtomicU64; PORTS],
    accepted: [AtomicU64; PORTS],
    accept_failures: [AtomicU64; PORTS],
    limited: [[AtomicU64; Limit::ALL.len()]; PORTS],
    handshakes: [AtomicU64; HandshakeFailure::ALL.len()],
    requests: [AtomicU64; RequestLimit::ALL.len()],
    throttled: AtomicU64,
    unfinished: AtomicU64,
}

impl Counts {
    /// Connections that are open.
    pub fn open(&self, port: Port) -> u64 {
        self.open[port as usize].load(Ordering::Relaxed)
    }

    /// Connections that were accepted, refused ones included.
    pub fn accepted(&self, port: Port) -> u64 {
        self.accepted[port as usize].load(Ordering::Relaxed)
    }

    /// Times that no connection could be accepted.
    pub fn accept_failures(&self, port: Port) -> u64 {
        self.accept_failures[port as usize].load(Ordering::Relaxed)
    }

    /// Connections that met a limit.
    pub fn limited(&self, port: Port, limit: Limit) -> u64 {
        self.limited[port as usize][limit as usize].load(Ordering::Relaxed)
    }

    /// TLS handshakes that failed.
    pub fn unshaken(&self, why: HandshakeFailure) -> u64 {
        self.handshakes[why as usize].load(Ordering::Relaxed)
    }

    /// Requests that met a limit.
    pub fn refused(&self, limit: RequestLimit) -> u64 {
        self.requests[limit as usize].load(Ordering::Relaxed)
    }

    /// Connections that were read from more slowly for their control frames.
    pub fn throttled(&self) -> u64 {
        self.throttled.load(Ordering::Relaxed)
    }

    /// Bytes of requests that have begun and are not whole.
    pub fn unfinished(&self) -> u64 {
        self.unfinished.load(Ordering::Relaxed)
    }

    pub(super) fn opens(&self, port: Port) {
        self.open[port as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn closes(&self, port: Port) {
        self.open[port as usize].fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn accepts(&self, port: Port) {
        self.accepted[port as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn fails_to_accept(&self, port: Port) {
        self.accept_failures[port as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn limits(&self, port: Port, limit: Limit) {
        self.limited[port as usize][limit as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn fails_to_shake_hands(&self, why: HandshakeFailure) {
        self.handshakes[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refuses(&self, limit: RequestLimit) {
        self.requests[limit as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn throttles(&self) {
        self.throttled.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes so many bytes of unfinished requests, unless there would be more than
    /// `most`.
    pub(super) fn takes(&self, bytes: u64, most: u64) -> bool {
        let before = self.unfinished.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > most {
            self.gives_back(bytes);
            return false;
        }
        true
    }

    pub(super) fn gives_back(&self, bytes: u64) {
        self.unfinished.fetch_sub(bytes, Ordering::Relaxed);
    }
}
