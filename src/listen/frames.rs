//! HTTP/2 frames as they pass (RFC 9113, 4.1): their heads, and of some the
//! first bytes of what they carry. Nothing is kept and nothing is changed.

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const PING: u8 = 6;
pub(super) const GOAWAY: u8 = 7;
/// Of DATA and HEADERS.
pub(super) const END_STREAM: u8 = 1;
/// Of PING and SETTINGS.
pub(super) const ACK: u8 = 1;

/// Error codes (RFC 9113, 7).
pub(super) const REFUSED_STREAM: u32 = 7;
pub(super) const ENHANCE_YOUR_CALM: u32 = 11;

const HEAD: usize = 9;
/// Of a GOAWAY, up to its error code.
const CARRIED: usize = 8;

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
    /// Bytes that it carries.
    pub(super) len: u32,
    /// Of RST_STREAM and GOAWAY: its error code.
    pub(super) code: Option<u32>,
}

/// Finds the frames in one direction of a connection, after the preface.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    head: [u8; HEAD],
    /// Of the head.
    read: usize,
    carried: [u8; CARRIED],
    /// Of what is carried, as far as it is looked at.
    looked_at: usize,
    /// Of the frame whose head was read, still to come.
    left: u32,
}

impl Scanner {
    /// Goes on with the next bytes; tells each frame once, as soon as its head, or
    /// its error code, has passed.
    pub(super) fn pass(&mut self, mut bytes: &[u8], mut tell: impl FnMut(Frame)) {
        while let Some((&next, rest)) = bytes.split_first() {
            if self.read < HEAD {
                self.head[self.read] = next;
                self.read += 1;
                bytes = rest;
                if self.read == HEAD {
                    self.looked_at = 0;
                    let frame = self.frame();
                    self.left = frame.len;
                    if !has_code(&frame) {
                        tell(frame);
                    }
                }
            } else {
                let mut frame = self.frame();
                let most = usize::try_from(self.left).unwrap_or(usize::MAX);
                let (now, after) = bytes.split_at(bytes.len().min(most));
                if has_code(&frame) && self.looked_at < CARRIED {
                    for byte in now.iter().take(CARRIED - self.looked_at) {
                        self.carried[self.looked_at] = *byte;
                        self.looked_at += 1;
                    }
                    let at = if frame.kind == GOAWAY { 4 } else { 0 };
                    if let Some(code) = self.carried[..self.looked_at].get(at..at + 4) {
                        if let Ok(code) = code.try_into() {
                            frame.code = Some(u32::from_be_bytes(code));
                        }
                        self.looked_at = CARRIED;
                        tell(frame);
                    }
                }
                self.left -= u32::try_from(now.len()).unwrap_or(self.left);
                bytes = after;
            }
            if self.read == HEAD && self.left == 0 {
                self.read = 0;
            }
        }
    }

    /// Whether the last frame is whole.
    pub(super) fn is_between(&self) -> bool {
        self.read == 0
    }

    /// Whether the frame that is not whole yet is one of DATA.
    pub(super) fn is_within_data(&self) -> bool {
        self.read == HEAD && self.frame().kind == DATA
    }

    /// Bytes of the frame that is not whole yet, where it carries at least `least`.
    pub(super) fn unfinished(&self, least: u32) -> u32 {
        if self.read < HEAD {
            return 0;
        }
        let len = self.frame().len;
        if len < least { 0 } else { len - self.left }
    }

    fn frame(&self) -> Frame {
        let [a, b, c, kind, flags, stream @ ..] = self.head;
        Frame {
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            len: u32::from_be_bytes([0, a, b, c]),
            code: None,
        }
    }
}

fn has_code(frame: &Frame) -> bool {
    match frame.kind {
        RST_STREAM => frame.len >= 4,
        GOAWAY => frame.len >= 8,
        _ => false,
    }
}

/// The bytes of a frame.
pub(super) fn write(kind: u8, flags: u8, stream: u32, carried: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = u32::try_from(carried.len()).unwrap_or(0).to_be_bytes();
    let mut bytes = vec![a, b, c, kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(carried);
    bytes
}

/// A GOAWAY that says why.
pub(super) fn goaway(last_stream: u32, code: u32, why: &str) -> Vec<u8> {
    let mut carried = Vec::from(last_stream.to_be_bytes());
    carried.extend(code.to_be_bytes());
    carried.extend(why.as_bytes());
    write(GOAWAY, 0, 0, &carried)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn told(chunks: &[&[u8]]) -> (Vec<Frame>, Scanner) {
        let mut scanner = Scanner::default();
        let mut frames = Vec::new();
        for chunk in chunks {
            scanner.pass(chunk, |frame| frames.push(frame));
        }
        (frames, scanner)
    }

    fn frame(kind: u8, flags: u8, stream: u32, len: u32, code: Option<u32>) -> Frame {
        Frame {
            kind,
            flags,
            stream,
            len,
            code,
        }
    }

    proptest! {
        #[test]
        fn frames_are_found_however_the_bytes_are_cut(cuts in prop::collection::vec(0usize..90, 0..9)) {
            let bytes = [
                write(PING, ACK, 0, &[7; 8]),
                write(4, 0, 0, &[]),
                write(DATA, END_STREAM, 5, &[1; 20]),
                write(RST_STREAM, 0, 5, &REFUSED_STREAM.to_be_bytes()),
                goaway(5, ENHANCE_YOUR_CALM, "calm"),
                write(RST_STREAM, 0, 7, &[9]),
            ]
            .concat();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|two| &bytes[two[0]..two[1]]).collect();
            let (frames, scanner) = told(&chunks);
            prop_assert_eq!(frames, vec![
                frame(PING, ACK, 0, 8, None),
                frame(4, 0, 0, 0, None),
                frame(DATA, END_STREAM, 5, 20, None),
                frame(RST_STREAM, 0, 5, 4, Some(REFUSED_STREAM)),
                frame(GOAWAY, 0, 0, 12, Some(ENHANCE_YOUR_CALM)),
                frame(RST_STREAM, 0, 7, 1, None),
            ]);
            prop_assert!(scanner.is_between());
        }
    }

    #[test]
    fn what_of_a_large_frame_has_come_is_known() {
        let bytes = write(DATA, 0, 1, &[0; 100]);
        let (_, scanner) = told(&[&bytes[..49]]);
        assert!(!scanner.is_between() && scanner.is_within_data());
        assert_eq!(scanner.unfinished(100), 40);
        assert_eq!(scanner.unfinished(101), 0);
        let (_, scanner) = told(&[&bytes]);
        assert_eq!(scanner.unfinished(0), 0);
    }
}
