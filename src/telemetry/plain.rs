//! Fields of log lines for people, as `name=value`: a text is quoted only where it
//! would not be told from what stands around it, and nothing that it holds can
//! begin a line or steer a terminal.
//!
//! Written by hand, since every request has a line: tracing-subscriber's own way
//! takes some three times the instructions.

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing_subscriber::{
    field::RecordFields,
    fmt::{FormatFields, format::Writer},
};

/// Writes fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain;

impl<'w> FormatFields<'w> for Plain {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut line = Line {
            writer,
            begun: false,
            result: Ok(()),
        };
        fields.record(&mut line);
        line.result
    }
}

struct Line<'w> {
    writer: Writer<'w>,
    begun: bool,
    result: fmt::Result,
}

impl Line<'_> {
    fn put(&mut self, field: &Field, value: impl FnOnce(&mut Writer<'_>, bool) -> fmt::Result) {
        let is_message = field.name() == "message";
        let name = if is_message { "" } else { field.name() };
        // tracing-log's copies of what the event says anyway.
        if self.result.is_err() || name.starts_with("log.") {
            return;
        }
        let writer = &mut self.writer;
        let begun = std::mem::replace(&mut self.begun, true);
        self.result = (|| {
            if begun {
                writer.write_char(' ')?;
            }
            if !is_message {
                writer.write_str(name)?;
                writer.write_char('=')?;
            }
            value(writer, is_message)
        })();
    }
}

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, |writer, _| write!(Safe(writer), "{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, |writer, is_message| {
            if is_message {
                Safe(writer).write_str(value)
            } else if value.bytes().all(stands_alone) && !value.is_empty() {
                writer.write_str(value)
            } else {
                write!(Safe(writer), "{value:?}")
            }
        });
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, |writer, _| write!(writer, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, |writer, _| write!(writer, "{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, |writer, _| {
            writer.write_str(if value { "true" } else { "false" })
        });
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, |writer, _| write!(writer, "{value:.6}"));
    }
}

fn stands_alone(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b'=')
}

/// Escapes what would begin a line or steer a terminal.
struct Safe<'a, 'w>(&'a mut Writer<'w>);

impl Write for Safe<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(char::is_control) {
            let (plain, after) = rest.split_at(at);
            self.0.write_str(plain)?;
            let mut letters = after.chars();
            for escaped in letters.next().into_iter().flat_map(char::escape_default) {
                self.0.write_char(escaped)?;
            }
            rest = letters.as_str();
        }
        self.0.write_str(rest)
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::telemetry::kept::Kept;

    #[test]
    fn a_value_is_told_from_the_next_and_stays_on_its_line() {
        let kept = Kept::default();
        let to = kept.clone();
        let lines = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .without_time()
            .with_target(false)
            .fmt_fields(Plain)
            .with_writer(move || to.clone());
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("request", id = "a b");
            let _entered = span.enter();
            tracing::info!(
                plain = "x/y-1",
                spaced = "a b=c",
                empty = "",
                broken = "a\nb\u{1b}[2J",
                shown = %"a\nb",
                number = -3,
                large = u64::MAX,
                truth = true,
                part = 0.25,
                absent = None::<u64>,
                "it is\nsaid"
            );
        });
        assert_eq!(
            kept.text(),
            " INFO request{id=\"a b\"}: it is\\nsaid plain=x/y-1 spaced=\"a b=c\" empty=\"\" \
             broken=\"a\\nb\\u{1b}[2J\" shown=a\\nb number=-3 large=18446744073709551615 truth=true \
             part=0.250000\n"
        );
    }
}
