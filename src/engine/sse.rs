//! Server-sent events, as far as engines use them: `data` lines and comments.
//! Whatever the pieces in which bytes arrive, the events are the same; no
//! event, with the line under way, is larger than the limit; bytes that are no
//! events are skipped and never panic.

use bytes::{Buf, Bytes, BytesMut};

/// An event exceeds the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge;

/// Takes bytes as they come and gives the data of one event after another.
#[derive(Debug)]
pub struct SseParser {
    /// Bytes of lines that have not been taken yet.
    buffer: BytesMut,
    /// Bytes at the start of `buffer` known to hold no line feed.
    scanned: usize,
    /// Data lines of the event under way.
    event: Event,
    limit: usize,
}

/// Nearly every event has one line, whose bytes need not be copied.
#[derive(Debug)]
enum Event {
    Empty,
    One(BytesMut),
    Many(BytesMut),
}

impl Event {
    fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::One(data) | Self::Many(data) => data.len(),
        }
    }

    fn push(&mut self, line: BytesMut) {
        *self = match std::mem::replace(self, Self::Empty) {
            Self::Empty => Self::One(line),
            Self::One(mut data) | Self::Many(mut data) => {
                data.extend_from_slice(b"\n");
                data.extend_from_slice(&line);
                Self::Many(data)
            }
        };
    }

    fn take(&mut self) -> Option<Bytes> {
        match std::mem::replace(self, Self::Empty) {
            Self::Empty => None,
            Self::One(data) | Self::Many(data) => Some(data.freeze()),
        }
    }
}

impl SseParser {
    /// A parser of events of at most `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            scanned: 0,
            event: Event::Empty,
            limit,
        }
    }

    /// Takes the next bytes. Call [`Self::next_event`] until it gives nothing
    /// before the next call: only then is what is held bounded.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole event's data; `None`: more bytes are needed. An event
    /// that no blank line has ended is never given.
    ///
    /// # Errors
    /// [`TooLarge`]; nothing can be read after it.
    pub fn next_event(&mut self) -> Result<Option<Bytes>, TooLarge> {
        while let Some(line) = self.next_line() {
            if line.is_empty() {
                if let Some(data) = self.event.take() {
                    return Ok(Some(data));
                }
                continue;
            }
            // Of what is skipped too, since what is held before it ends is bounded: one
            // rule for a line in one piece and in many.
            if self.event.len() + line.len() > self.limit {
                return Err(TooLarge);
            }
            if let Some(data) = data_of(line) {
                self.event.push(data);
            }
        }
        // A carriage return may be the line's end, and is no part of it then.
        let held = self.buffer.strip_suffix(b"\r").unwrap_or(&self.buffer);
        if self.event.len() + held.len() > self.limit {
            return Err(TooLarge);
        }
        Ok(None)
    }

    /// The next line without its end: a line feed, or carriage return and line
    /// feed.
    fn next_line(&mut self) -> Option<BytesMut> {
        let Some(found) = self.buffer[self.scanned..].iter().position(|b| *b == b'\n') else {
            self.scanned = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.scanned + found);
        self.buffer.advance(1);
        self.scanned = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Some(line)
    }
}

/// The value of a `data` field; other fields and comments say nothing here.
fn data_of(mut line: BytesMut) -> Option<BytesMut> {
    let rest = line.strip_prefix(b"data")?;
    let skip = match rest {
        [] => 4,
        [b':', b' ', ..] => 6,
        [b':', ..] => 5,
        _ => return None,
    };
    line.advance(skip);
    Some(line)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(pieces: &[&[u8]], limit: usize) -> Result<Vec<String>, TooLarge> {
        let mut parser = SseParser::new(limit);
        let mut all = Vec::new();
        for piece in pieces {
            parser.push(piece);
            while let Some(event) = parser.next_event()? {
                all.push(String::from_utf8_lossy(&event).into_owned());
            }
        }
        Ok(all)
    }

    #[test]
    fn events_are_what_stands_between_blank_lines() {
        let text = b"data: {\"a\":1}\n\n: a comment\r\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\n\
                     id: 7\n\ndata\n\ndatabase: no\n\ndata: [DONE]\n\ndata: cut";
        assert_eq!(
            events(&[text], 100).unwrap(),
            ["{\"a\":1}", "two\nlines", "", "[DONE]"]
        );
    }

    #[test]
    fn an_event_without_a_blank_line_is_none() {
        assert!(events(&[b"data: [DONE]\n"], 100).unwrap().is_empty());
    }

    #[test]
    fn what_is_held_is_bounded_whether_or_not_a_line_ends() {
        assert_eq!(events(&[&[b'x'; 101]], 100), Err(TooLarge));
        let many = b"data: 0123456789\n".repeat(11);
        assert_eq!(events(&[&many], 100), Err(TooLarge));
        // Many events that are each within the limit are fine, in one piece.
        let fine = b"data: 0123456789\n\n".repeat(1000);
        assert_eq!(events(&[&fine], 100).unwrap().len(), 1000);
    }

    proptest! {
        #[test]
        fn splitting_changes_nothing(
            bodies in prop::collection::vec("[ -~]{0,40}", 0..8),
            crlf in any::<bool>(),
            cuts in prop::collection::vec(1usize..9, 0..400),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut text = String::new();
            for body in &bodies {
                text.push_str(&format!("data: {body}{end}: note{end}{end}"));
            }
            let whole = events(&[text.as_bytes()], 1000).unwrap();
            prop_assert_eq!(&whole, &bodies);
            let mut rest = text.as_bytes();
            let mut pieces = Vec::new();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            prop_assert_eq!(events(&pieces, 1000).unwrap(), whole);
        }

        #[test]
        fn arbitrary_bytes_give_the_same_in_any_pieces_and_never_panic(
            bytes in prop::collection::vec(
                prop_oneof![Just(b'\n'), Just(b'\r'), Just(b':'), Just(b'd'), any::<u8>()],
                0..300,
            ),
            at in 0usize..300,
        ) {
            let (a, b) = bytes.split_at(at.min(bytes.len()));
            for limit in [1000, 20] {
                prop_assert_eq!(events(&[a, b], limit), events(&[&bytes], limit));
            }
        }
    }
}
