//! The TOML file, read key by key: a value that is none of its option's hides
//! neither the faults of others nor those that are found later.

use std::path::Path;

use clap::Args as _;
use serde::Deserialize as _;
use toml::{Table, Value};

use super::Options;

/// Of a value that is shown, in characters.
const MAX_SHOWN: usize = 64;

/// What was found wrong before anything was judged as a whole.
#[derive(Debug, Default)]
pub struct Found {
    /// In a line each.
    pub faults: Vec<String>,
    /// Options whose values could not be read: what rests on them is not judged.
    pub unread: Vec<String>,
}

impl Found {
    /// Whether this fault rests on a value that could not be read.
    pub(super) fn hides(&self, fault: &str) -> bool {
        let mut words = fault.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        words.any(|word| self.unread.iter().any(|option| option == word))
    }
}

/// Reads a file: what it gives, and what of it gives nothing.
///
/// # Errors
/// When it cannot be read or is no TOML: nothing is known of what it would give.
pub fn read(path: &Path) -> Result<(Options, Found), String> {
    let option = "--config (BERTH_CONFIG)";
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{option}: cannot read {}: {error}", path.display()))?;
    parse(&text).map_err(|error| {
        // Not as it shows itself, which is with the line: it may be another file, and hold
        // a token.
        let before = error.span().and_then(|span| text.get(..span.start));
        let line = before.map_or(String::new(), |before| {
            format!("line {}: ", before.matches('\n').count() + 1)
        });
        let what = error.message();
        format!("{option}: {}: is no TOML: {line}{what}", path.display())
    })
}

/// As [`read`], of its text.
///
/// # Errors
/// When it is no TOML.
pub fn parse(text: &str) -> Result<(Options, Found), toml::de::Error> {
    let table: Table = toml::from_str(text)?;
    let known = Options::augment_args(clap::Command::new("serve"));
    let (mut options, mut found) = (Options::default(), Found::default());
    for (key, value) in table {
        let is_it = |arg: &&clap::Arg| arg.get_long() == Some(&key);
        let Some(arg) = known.get_arguments().find(is_it) else {
            let fault = format!("{key}: is no option (see `berth serve --help`)");
            found.faults.push(fault);
            continue;
        };
        let one = Table::from_iter([(key.clone(), value.clone())]);
        match Options::deserialize(Value::Table(one)) {
            Ok(read) => options = read.or(options),
            Err(_) => {
                found.faults.push(fault(&key, &value, arg));
                found.unread.push(key);
            }
        }
    }
    Ok((options, found))
}

/// What the option needs, and what it was given.
fn fault(key: &str, value: &Value, arg: &clap::Arg) -> String {
    let of = arg.get_value_names().and_then(|names| names.first());
    let needed = match of.map_or("", |name| name.as_str()) {
        "N" if value.as_integer().is_some_and(|n| n >= 0) => {
            return format!("{key}: {value} is too large");
        }
        "N" => "a whole number from 0".to_owned(),
        "FACTOR" | "SHARE" | "RATIO" => "a number".to_owned(),
        "BOOL" => "true or false".to_owned(),
        "TIME" => "a time in quotes, as \"2s\" or \"5m\"".to_owned(),
        "IP:PORT" => "an address and a port in quotes, as \"127.0.0.1:7700\"".to_owned(),
        "DIR" | "FILE" => "a path in quotes".to_owned(),
        _ => {
            let values = arg.get_possible_values();
            let names: Vec<String> = values
                .iter()
                .map(|value| format!("{:?}", value.get_name()))
                .collect();
            if names.is_empty() {
                "a text in quotes".to_owned()
            } else {
                format!("one of {}", names.join(", "))
            }
        }
    };
    let given = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Table(_) => "a table".to_owned(),
        value => {
            let text = value.to_string();
            match text.char_indices().nth(MAX_SHOWN) {
                Some((end, _)) => format!("{} ...", &text[..end]),
                None => text,
            }
        }
    };
    format!("{key}: must be {needed}, is {given}")
}
