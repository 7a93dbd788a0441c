//! The page that Prometheus reads. OpenMetrics where it is asked for, else the
//! classic text format, which every reader and `promtool check metrics` takes.
//!
//! The two differ here in the names of counters and infos, whose suffix the
//! classic format has in `HELP` and `TYPE` as well, and in `UNIT` and `EOF`, which
//! it does not have.

use std::fmt::Write;

use prometheus_client::{encoding::text::encode, registry::Registry};

/// The type of OpenMetrics.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The type of the classic format.
pub const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The page and its type, for a reader that accepts this.
///
/// # Errors
/// None but a failure of the encoder itself.
pub fn page(
    registry: &Registry,
    accept: Option<&str>,
) -> Result<(&'static str, String), std::fmt::Error> {
    let mut text = String::with_capacity(32 << 10);
    encode(&mut text, registry)?;
    if accept.is_some_and(|accept| accept.contains("application/openmetrics-text")) {
        return Ok((OPENMETRICS, text));
    }
    Ok((CLASSIC, classic(&text)))
}

fn classic(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut help: Option<(&str, &str)> = None;
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // Its name depends on the type, which comes next.
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", "counter"),
                "info" => ("_info", "gauge"),
                other => ("", other),
            };
            if let Some((_, help)) = help.take() {
                // A String takes whatever is written.
                let _ = writeln!(text, "# HELP {name}{suffix} {help}");
            }
            let _ = writeln!(text, "# TYPE {name}{suffix} {kind}");
        } else if !line.starts_with("# ") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// A label's value as both formats want it: the encoder writes it as it is.
pub(super) fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use prometheus_client::{
        metrics::{counter::Counter, gauge::Gauge, info::Info},
        registry::Unit,
    };

    use super::*;

    #[test]
    fn both_forms_are_as_their_readers_want_them() {
        let mut registry = Registry::default();
        let sub = registry.sub_registry_with_prefix("berth");
        let tokens = Unit::Other("tokens".into());
        sub.register_with_unit("prompt", "Read", tokens, Counter::<u64>::default());
        sub.register("pins", "Kept", Gauge::<i64>::default());
        sub.register("build", "This", Info::new([("version", "1")]));
        let (kind, open) = page(&registry, Some("application/openmetrics-text;q=0.5")).unwrap();
        assert_eq!(kind, OPENMETRICS);
        assert!(open.ends_with("# EOF\n"), "{open}");
        let (kind, text) = page(&registry, None).unwrap();
        assert_eq!(kind, CLASSIC);
        assert_eq!(
            text,
            "# HELP berth_prompt_tokens_total Read.\n# TYPE berth_prompt_tokens_total counter\n\
             berth_prompt_tokens_total 0\n# HELP berth_pins Kept.\n# TYPE berth_pins gauge\n\
             berth_pins 0\n# HELP berth_build_info This.\n# TYPE berth_build_info gauge\n\
             berth_build_info{version=\"1\"} 1\n"
        );
    }

    #[test]
    fn a_value_cannot_leave_its_quotes() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
