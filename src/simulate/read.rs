//! Traces from files. Two forms are told apart by their first line:
//!
//! - sessions: `session in out reuse think` a line, the turns of a session in
//!   order and sessions one after the other;
//! - blocks: `{"timestamp": ms, "input_length": n, "output_length": n,
//!   "hash_ids": [..]}` a line, in order of time, blocks of 512 tokens; an id
//!   names the block and all before it.
//!
//! A line that is not what it should be is refused with its number, its field
//! and what is wrong. Lines are read one by one and may not be longer than
//! [`MAX_LINE`].

use std::{collections::HashSet, io::BufRead, time::Duration};

use serde::Deserialize;

use super::trace::{Origin, Piece, Session, Trace, Turn};

/// Bytes of a line at most.
pub const MAX_LINE: usize = 1 << 20;

/// Tokens of a block of the blocks form.
const BLOCK: u32 = 512;

/// Tokens of one turn at most: prompt and output.
const MAX_TOKENS: u32 = 100_000_000;

/// Seconds that a client thinks at most, and milliseconds of a timestamp.
const MAX_THINK: f64 = 1e7;
const MAX_TIMESTAMP: f64 = 1e12;

/// What is wrong with a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A field of a line.
    #[error("line {line}, field `{field}`: {what}")]
    Field {
        /// Counted from 1.
        line: usize,
        /// By its name in the description of the form.
        field: &'static str,
        /// In a few words.
        what: String,
    },
    /// A line as a whole.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// In a few words.
        what: String,
    },
    /// There is no request in it.
    #[error("the trace is empty")]
    Empty,
    /// It could not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Reads a trace of either form. `sessions` bounds how many are taken.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn read(name: &str, input: impl BufRead, sessions: usize) -> Result<Trace, TraceError> {
    let mut lines = Lines {
        input,
        number: 0,
        buffer: Vec::new(),
    };
    let mut reader = Reader::default();
    let mut blocks = None;
    while let Some((number, text)) = lines.next()? {
        let blocks = *blocks.get_or_insert(text.starts_with('{'));
        let more = if blocks {
            reader.request(number, text, sessions)?
        } else {
            reader.turn(number, text, sessions)?
        };
        if !more {
            break;
        }
    }
    if reader.sessions.is_empty() {
        return Err(TraceError::Empty);
    }
    Ok(Trace {
        name: name.to_owned(),
        sessions: reader.sessions,
    })
}

struct Lines<R> {
    input: R,
    number: usize,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// The next line that is not blank, with its number.
    fn next(&mut self) -> Result<Option<(usize, &str)>, TraceError> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let line = self.number;
            let most = MAX_LINE as u64 + 1;
            let read =
                std::io::Read::take(&mut self.input, most).read_until(b'\n', &mut self.buffer)?;
            if read == 0 {
                return Ok(None);
            }
            if read > MAX_LINE {
                let what = format!("it is longer than {MAX_LINE} bytes");
                return Err(TraceError::Line { line, what });
            }
            let blank = self.buffer.iter().all(u8::is_ascii_whitespace);
            if !blank {
                break;
            }
        }
        match std::str::from_utf8(&self.buffer) {
            Ok(text) => Ok(Some((self.number, text.trim()))),
            Err(_) => Err(TraceError::Line {
                line: self.number,
                what: "it is no text (if the file is compressed, decompress it first)".to_owned(),
            }),
        }
    }
}

#[derive(Default)]
struct Reader {
    sessions: Vec<Session>,
    /// Of the sessions form: the session that is being read, and those before.
    current: Option<u64>,
    ended: HashSet<u64>,
    /// Prompt and output of the turn before in this session.
    history: u32,
}

impl Reader {
    /// A line of the sessions form. Returns whether another is wanted.
    fn turn(&mut self, line: usize, text: &str, most: usize) -> Result<bool, TraceError> {
        let wrong = |field, what: String| TraceError::Field { line, field, what };
        let mut fields = text.split_ascii_whitespace();
        let mut next = |field| {
            fields
                .next()
                .ok_or_else(|| wrong(field, "it is missing".to_owned()))
        };
        let session = next("session")?;
        let session = whole(session, u64::MAX).map_err(|what| wrong("session", what))?;
        let mut tokens = |field, least: u32| {
            let value =
                whole(next(field)?, u64::from(MAX_TOKENS)).map_err(|what| wrong(field, what))?;
            match u32::try_from(value) {
                Ok(value) if value >= least => Ok(value),
                _ => Err(wrong(field, format!("it is less than {least}"))),
            }
        };
        let (prompt, output, reuse) = (tokens("in", 1)?, tokens("out", 1)?, tokens("reuse", 0)?);
        let think = next("think")?;
        let think = number(think, MAX_THINK).map_err(|what| wrong("think", what))?;
        if let Some(more) = fields.next() {
            let what = format!("{more:?} stands after the last field");
            return Err(TraceError::Line { line, what });
        }

        if self.current != Some(session) {
            if let Some(before) = self.current.replace(session) {
                self.ended.insert(before);
            }
            if self.ended.contains(&session) {
                let what = format!("turns of session {session} stand apart");
                return Err(wrong("session", what));
            }
            if self.sessions.len() == most {
                return Ok(false);
            }
            self.history = 0;
            self.sessions.push(Session {
                keyed: true,
                starts: None,
                turns: Vec::new(),
            });
        }
        if reuse > prompt {
            let what = format!("{reuse} is more than the prompt's {prompt} tokens");
            return Err(wrong("reuse", what));
        }
        if reuse > self.history {
            let what = format!(
                "{reuse} is more than the {} tokens of the turn before",
                self.history
            );
            return Err(wrong("reuse", what));
        }
        self.history = prompt + output;
        if let Some(session) = self.sessions.last_mut() {
            session.turns.push(Turn {
                reuse,
                fresh: vec![Piece {
                    origin: Origin::Own,
                    tokens: prompt - reuse,
                }],
                output,
                think: Duration::from_secs_f64(think),
            });
        }
        Ok(true)
    }

    /// A line of the blocks form. Returns whether another is wanted.
    fn request(&mut self, line: usize, text: &str, most: usize) -> Result<bool, TraceError> {
        if self.sessions.len() == most {
            return Ok(false);
        }
        let wrong = |field, what: String| TraceError::Field { line, field, what };
        let request: Request = serde_json::from_str(text).map_err(|error| TraceError::Line {
            line,
            what: error.to_string(),
        })?;
        let missing = |field| wrong(field, "it is missing".to_owned());
        let tokens = |field, value: Option<serde_json::Value>| {
            let value = value.ok_or_else(|| missing(field))?;
            match value.as_u64().map(u32::try_from) {
                Some(Ok(value)) if (1..=MAX_TOKENS).contains(&value) => Ok(value),
                _ => {
                    let what = format!("{value} is no whole number from 1 to {MAX_TOKENS}");
                    Err(wrong(field, what))
                }
            }
        };
        let at = request.timestamp.ok_or_else(|| missing("timestamp"))?;
        let at = match at.as_f64() {
            Some(at) if (0.0..=MAX_TIMESTAMP).contains(&at) => Duration::from_secs_f64(at / 1e3),
            _ => {
                let what = format!("{at} is no number of milliseconds from 0 to {MAX_TIMESTAMP}");
                return Err(wrong("timestamp", what));
            }
        };
        let before = self.sessions.last().and_then(|s| s.starts);
        if before.is_some_and(|before| at < before) {
            return Err(wrong(
                "timestamp",
                "it is before that of the line before".into(),
            ));
        }
        let prompt = tokens("input_length", request.input_length)?;
        let output = tokens("output_length", request.output_length)?;
        let ids = request.hash_ids.ok_or_else(|| missing("hash_ids"))?;
        if ids.len() != prompt.div_ceil(BLOCK) as usize {
            let what = format!(
                "{} blocks for a prompt of {prompt} tokens, which has {}",
                ids.len(),
                prompt.div_ceil(BLOCK)
            );
            return Err(wrong("hash_ids", what));
        }
        let mut fresh = Vec::with_capacity(ids.len());
        let mut left = prompt;
        for id in ids {
            // The topmost bit tells shared texts from others.
            let Some(id) = id.as_u64().filter(|id| *id < 1 << 63) else {
                return Err(wrong(
                    "hash_ids",
                    format!("{id} is no whole number below 2^63"),
                ));
            };
            let tokens = left.min(BLOCK);
            left -= tokens;
            fresh.push(Piece {
                origin: Origin::Shared(id),
                tokens,
            });
        }
        self.sessions.push(Session {
            keyed: false,
            starts: Some(at),
            turns: vec![Turn {
                reuse: 0,
                fresh,
                output,
                think: Duration::ZERO,
            }],
        });
        Ok(true)
    }
}

/// A line of the blocks form, so that each field is checked by itself.
#[derive(Deserialize)]
struct Request {
    timestamp: Option<serde_json::Value>,
    input_length: Option<serde_json::Value>,
    output_length: Option<serde_json::Value>,
    hash_ids: Option<Vec<serde_json::Value>>,
}

fn whole(text: &str, most: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(value) if value <= most => Ok(value),
        _ => Err(format!("{text:?} is no whole number from 0 to {most}")),
    }
}

fn number(text: &str, most: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=most).contains(&value) => Ok(value),
        _ => Err(format!("{text:?} is no number from 0 to {most}")),
    }
}
