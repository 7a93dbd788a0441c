//! How many frames a connection may send that carry no request. Each costs the
//! server about as much as a small request does and its sender next to nothing,
//! and HTTP/2 knows no bound for them.
//!
//! Too many are not an error at once: after a stall of ours all clients may give
//! up whole batches. The connection is read from more slowly, which TCP tells its
//! sender, and is ended when that goes on for long.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::{Instant, Sleep};

use super::{
    frames::{ACK, DATA, END_STREAM, Frame, HEADERS, PING},
    limits::Limit,
};

/// Seconds of frames that may come at once, of a connection that was quiet.
const SAVED: f64 = 8.0;
/// Likewise, of a new one: who connects anew gains nothing.
const AT_FIRST: f64 = 0.25;
/// A pause is at least so long: not a timer for each frame.
const PAUSE: f64 = 0.05;
/// A connection that was never quiet for so long is ended.
const PATIENCE: Duration = Duration::from_secs(30);
/// For a frame of an answer. Its reader updates two windows, of the stream and of
/// the connection, and may measure the way with a ping.
const EARNED: f64 = 3.0;
/// Of an answer to a ping that nobody sent: h2 logs a line for each.
const UNASKED: f64 = 50.0;

/// One connection's account.
#[derive(Debug)]
pub(super) struct Control {
    rate: f64,
    left: f64,
    at: Instant,
    /// Of ours.
    pings: u32,
    noisy_since: Option<Instant>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Control {
    /// Of so many frames a second.
    pub(super) fn new(rate: u32) -> Self {
        let rate = f64::from(rate);
        Self {
            rate,
            left: rate * AT_FIRST,
            at: Instant::now(),
            pings: 0,
            noisy_since: None,
            pause: None,
        }
    }

    /// A frame has come.
    pub(super) fn came(&mut self, frame: Frame) {
        self.left -= match frame.kind {
            HEADERS => 0.0,
            DATA if frame.len > 0 || frame.flags & END_STREAM != 0 => 0.0,
            PING if frame.flags & ACK != 0 => match self.pings.checked_sub(1) {
                Some(rest) => {
                    self.pings = rest;
                    0.0
                }
                None => UNASKED,
            },
            _ => 1.0,
        };
    }

    /// A frame of ours was sent.
    pub(super) fn went(&mut self, frame: Frame) {
        match frame.kind {
            HEADERS | DATA => self.left = (self.left + EARNED).min(self.rate * SAVED),
            PING if frame.flags & ACK == 0 => self.pings = self.pings.saturating_add(1),
            _ => {}
        }
    }

    /// Whether it is being read from more slowly.
    pub(super) fn is_noisy(&self) -> bool {
        self.noisy_since.is_some()
    }

    /// Ready when more may be read.
    pub(super) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Limit>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let now = Instant::now();
            let passed = now.duration_since(self.at).as_secs_f64();
            self.at = now;
            self.left = (self.left + passed * self.rate).min(self.rate * SAVED);
            if self.left >= 0.0 {
                if self.left >= self.rate * SAVED / 2.0 {
                    self.noisy_since = None;
                }
                return Poll::Ready(Ok(()));
            }
            let since = *self.noisy_since.get_or_insert(now);
            if now.duration_since(since) >= PATIENCE {
                return Poll::Ready(Err(Limit::ControlFrames));
            }
            let pause = Duration::from_secs_f64(PAUSE - self.left / self.rate);
            self.pause = Some(Box::pin(tokio::time::sleep(pause)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const RATE: u32 = 1000;

    fn frame(kind: u8, flags: u8, len: u32) -> Frame {
        Frame {
            kind,
            flags,
            stream: 0,
            len,
            code: None,
        }
    }

    fn ping() -> Frame {
        frame(PING, 0, 8)
    }

    /// Sends batches until it is ended, or for so long; how many frames were read.
    async fn flood(control: &mut Control, batch: u32, long: Duration) -> Result<u32, u32> {
        let begun = Instant::now();
        let mut read = 0;
        while begun.elapsed() < long {
            if poll_fn(|cx| control.poll_ready(cx)).await.is_err() {
                return Err(read);
            }
            for _ in 0..batch {
                control.came(ping());
            }
            read += batch;
        }
        Ok(read)
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_slowed_to_its_rate_and_ended_after_a_while() {
        let mut control = Control::new(RATE);
        let begun = Instant::now();
        let read = flood(&mut control, 480, Duration::from_secs(3600)).await;
        let (read, long) = (read.unwrap_err(), begun.elapsed());
        assert!(
            long >= PATIENCE && long < PATIENCE + Duration::from_secs(3),
            "{long:?}"
        );
        assert!((29_000..33_000).contains(&read), "{read}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_is_given_up_is_no_flood() {
        let mut control = Control::new(RATE);
        tokio::time::sleep(Duration::from_secs(10)).await;
        poll_fn(|cx| control.poll_ready(cx)).await.unwrap();
        for _ in 0..4000 {
            control.came(frame(3, 0, 4));
        }
        poll_fn(|cx| control.poll_ready(cx)).await.unwrap();
        assert!(!control.is_noisy());
        // Nor is a larger one that takes its time.
        for _ in 0..12_000 {
            control.came(frame(3, 0, 4));
        }
        poll_fn(|cx| control.poll_ready(cx)).await.unwrap();
        assert!(control.is_noisy());
        tokio::time::sleep(Duration::from_secs(5)).await;
        poll_fn(|cx| control.poll_ready(cx)).await.unwrap();
        assert!(!control.is_noisy());
    }

    #[tokio::test(start_paused = true)]
    async fn readers_of_answers_and_senders_of_requests_are_never_slowed() {
        let mut control = Control::new(RATE);
        for _ in 0..100_000 {
            control.came(frame(HEADERS, 0, 50));
            control.came(frame(DATA, 0, 10));
            control.came(frame(DATA, END_STREAM, 0));
            control.went(frame(DATA, 0, 10));
            for _ in 0..3 {
                control.came(frame(8, 0, 4));
            }
            control.went(ping());
            control.came(frame(PING, ACK, 8));
        }
        assert!(poll_fn(|cx| control.poll_ready(cx)).await.is_ok());
        assert!(!control.is_noisy());
        // Answers to what was not asked.
        for _ in 0..10 {
            control.came(frame(PING, ACK, 8));
        }
        poll_fn(|cx| control.poll_ready(cx)).await.unwrap();
        assert!(control.is_noisy());
    }
}
