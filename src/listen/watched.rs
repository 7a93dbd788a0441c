//! A connection's bytes as they pass: what HTTP/2's implementation leaves
//! unbounded is bounded here, and what it refuses by itself is counted.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{
    PREFACE,
    control::Control,
    frames::{
        DATA, ENHANCE_YOUR_CALM, Frame, GOAWAY, HEADERS, REFUSED_STREAM, RST_STREAM, Scanner,
        goaway,
    },
    life::Life,
    limits::{Counts, Limit, Limits, Port, RequestLimit},
};

/// Frames of at least so many bytes are held against the bound of unfinished
/// requests while they come.
const LARGE: u32 = 64 << 10;

/// A connection after the preface, which is read from it once more.
#[derive(Debug)]
pub(super) struct Watched<S> {
    io: S,
    preface: &'static [u8],
    life: Arc<Life>,
    counts: Arc<Counts>,
    read: Scanner,
    written: Scanner,
    control: Control,
    throttled: bool,
    /// Of the frame that is not whole yet.
    held: u64,
    last_stream: u32,
    most_unfinished: u64,
    largest_head: u32,
    /// The limit that it met.
    over: Option<Limit>,
    /// It has been told.
    told: bool,
}

impl<S> Watched<S> {
    pub(super) fn new(io: S, limits: &Limits, life: Arc<Life>, counts: Arc<Counts>) -> Self {
        Self {
            io,
            preface: PREFACE,
            life,
            counts,
            read: Scanner::default(),
            written: Scanner::default(),
            control: Control::new(limits.control_frames),
            throttled: false,
            held: 0,
            last_stream: 0,
            most_unfinished: limits.unfinished_bytes,
            // Compressed headers are no longer than themselves; SETTINGS and GOAWAY are
            // shorter than HTTP/2's least limit of frames.
            largest_head: super::h2_header_bytes(limits).max(16 << 10),
            over: None,
            told: false,
        }
    }

    /// Bytes that came.
    fn came(&mut self, bytes: &[u8]) {
        let Self {
            read,
            control,
            last_stream,
            over,
            largest_head,
            ..
        } = self;
        read.pass(bytes, |frame| {
            control.came(frame);
            if frame.kind == HEADERS {
                *last_stream = (*last_stream).max(frame.stream);
            }
            if frame.kind != DATA && frame.len > *largest_head {
                over.get_or_insert(Limit::FrameSize);
            }
        });
        let held = u64::from(read.unfinished(LARGE));
        if held > self.held {
            if self.counts.takes(held - self.held, self.most_unfinished) {
                self.held = held;
            } else {
                self.over.get_or_insert(Limit::UnfinishedBytes);
            }
        } else {
            self.counts.gives_back(self.held - held);
            self.held = held;
        }
    }

    /// Bytes that went.
    fn went(&mut self, bytes: &[u8]) {
        let Self {
            written,
            control,
            life,
            counts,
            ..
        } = self;
        written.pass(bytes, |frame| {
            control.went(frame);
            match frame {
                Frame { kind: DATA, .. } => life.answers(),
                Frame {
                    kind: RST_STREAM,
                    code: Some(REFUSED_STREAM),
                    ..
                } => counts.refuses(RequestLimit::Streams),
                Frame {
                    kind: GOAWAY,
                    code: Some(ENHANCE_YOUR_CALM),
                    ..
                } => counts.limits(Port::Grpc, Limit::Calm),
                _ => {}
            }
        });
        // A large one may take its time.
        if written.is_within_data() {
            life.answers();
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Watched<S> {
    /// Says why, where there is room for it, and fails.
    fn end(&mut self, cx: &mut Context<'_>, limit: Limit) -> io::Error {
        self.over = Some(limit);
        if !std::mem::replace(&mut self.told, true) {
            self.counts.limits(Port::Grpc, limit);
            if self.written.is_between() {
                let bytes = goaway(self.last_stream, ENHANCE_YOUR_CALM, limit.name());
                // No more than the socket takes at once: nobody is waited for.
                let _ = Pin::new(&mut self.io).poll_write(cx, &bytes);
                let _ = Pin::new(&mut self.io).poll_flush(cx);
            }
        }
        io::Error::other(format!("it met the limit {}", limit.name()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let me = self.get_mut();
        if !me.preface.is_empty() {
            let (now, later) = me.preface.split_at(me.preface.len().min(buf.remaining()));
            buf.put_slice(now);
            me.preface = later;
            return Poll::Ready(Ok(()));
        }
        let ready = me.control.poll_ready(cx);
        if me.control.is_noisy() != me.throttled {
            me.throttled = !me.throttled;
            if me.throttled {
                me.counts.throttles();
            }
        }
        if let Err(limit) = ready!(ready) {
            return Poll::Ready(Err(me.end(cx, limit)));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut me.io).poll_read(cx, buf))?;
        me.came(&buf.filled()[before..]);
        if let Some(limit) = me.over {
            buf.set_filled(before);
            return Poll::Ready(Err(me.end(cx, limit)));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let me = self.get_mut();
        let written = ready!(Pin::new(&mut me.io).poll_write(cx, buf))?;
        me.went(buf.get(..written).unwrap_or(buf));
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let me = self.get_mut();
        let written = ready!(Pin::new(&mut me.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let (now, _) = buf.split_at(left.min(buf.len()));
            me.went(now);
            left -= now.len();
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

impl<S> Drop for Watched<S> {
    fn drop(&mut self) {
        self.counts.gives_back(self.held);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::Instant,
    };

    use super::*;
    use crate::listen::frames::{PING, write};

    #[tokio::test(start_paused = true)]
    async fn who_does_not_stop_flooding_is_told_to_calm_down_and_ended() {
        let counts = Arc::new(Counts::default());
        let (mut client, server) = duplex(64 << 10);
        let limits = Limits::default();
        let mut watched = Watched::new(server, &limits, Life::new(), Arc::clone(&counts));
        let begun = Instant::now();
        let reading = async {
            let mut bytes = vec![0; 8 << 10];
            loop {
                if let Err(error) = watched.read(&mut bytes).await {
                    return error.to_string();
                }
            }
        };
        let pings = write(PING, 0, 0, &[0; 8]).repeat(1000);
        let flood = async {
            client
                .write_all(&write(HEADERS, 4, 7, b"\x83"))
                .await
                .unwrap();
            loop {
                client.write_all(&pings).await.unwrap();
            }
        };
        let error = tokio::select! {
            error = reading => error,
            () = flood => unreachable!(),
        };
        assert!(error.contains("control_frames"), "{error}");
        assert!(begun.elapsed() >= Duration::from_secs(30));
        assert_eq!(counts.limited(Port::Grpc, Limit::ControlFrames), 1);
        assert_eq!(counts.throttled(), 1);
        drop(watched);
        let mut said = Vec::new();
        client.read_to_end(&mut said).await.unwrap();
        assert_eq!(said, goaway(7, ENHANCE_YOUR_CALM, "control_frames"));
    }
}
