//! What happens to the fleet during a simulation, one event a line:
//!
//! ```text
//! 600s die 3                        replica 3 is gone, and what ran there is lost
//! 900s return 3                     it is back: a new start, with an empty cache
//! 100s drain 2                      no new keys; pinned ones stay
//! 100s drain 2 grace 30s            ... and move at their next turn after 30 s
//! 300s weights v2                   every replica gets new weights: running requests are
//!                                   computed again, caches are emptied
//! 300s weights v2 on 5 pause 10s    ... one replica, which is paused for 10 s
//! ```
//!
//! Replicas are numbered from 0. `return` also ends a drain.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// From the beginning of the simulation.
    pub at: Duration,
    /// What.
    pub what: What,
}

/// What happens. Replicas are told by their number, from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A replica with all its ranks is gone.
    Die(usize),
    /// A dead one starts again, a draining one takes all requests again.
    Return(usize),
    /// A replica takes no new keys.
    Drain {
        /// Which.
        replica: usize,
        /// After so long its keys move; unset: never.
        grace: Option<Duration>,
    },
    /// New weights are loaded.
    Weights {
        /// Their version.
        version: Arc<str>,
        /// Where; unset: everywhere.
        replica: Option<usize>,
        /// Nothing is computed for so long.
        pause: Duration,
    },
}

impl What {
    /// The replica that it is about, where it is one.
    pub fn replica(&self) -> Option<usize> {
        match self {
            Self::Die(replica) | Self::Return(replica) | Self::Drain { replica, .. } => {
                Some(*replica)
            }
            Self::Weights { replica, .. } => *replica,
        }
    }
}

/// As it is written.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = |duration: Duration| humantime::format_duration(duration).to_string();
        write!(f, "{} ", span(self.at).replace(' ', ""))?;
        match &self.what {
            What::Die(replica) => write!(f, "die {replica}"),
            What::Return(replica) => write!(f, "return {replica}"),
            What::Drain { replica, grace } => {
                write!(f, "drain {replica}")?;
                grace.map_or(Ok(()), |grace| write!(f, " grace {}", span(grace)))
            }
            What::Weights {
                version,
                replica,
                pause,
            } => {
                write!(f, "weights {version}")?;
                if let Some(replica) = replica {
                    write!(f, " on {replica}")?;
                }
                if *pause > Duration::ZERO {
                    write!(f, " pause {}", span(*pause))?;
                }
                Ok(())
            }
        }
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = line.split_ascii_whitespace();
        let at = duration(words.next().ok_or("a time is missing")?)?;
        let kind = words.next().ok_or("what happens is missing")?;
        let first = words
            .next()
            .ok_or_else(|| format!("{kind} needs another word"))?;
        let mut what = match kind {
            "die" => What::Die(replica(first)?),
            "return" => What::Return(replica(first)?),
            "drain" => What::Drain {
                replica: replica(first)?,
                grace: None,
            },
            "weights" => What::Weights {
                version: first.into(),
                replica: None,
                pause: Duration::ZERO,
            },
            other => {
                return Err(format!(
                    "{other:?} is none of die, return, drain and weights"
                ));
            }
        };
        while let Some(name) = words.next() {
            let value = words
                .next()
                .ok_or_else(|| format!("{name} needs a value"))?;
            match (&mut what, name) {
                (What::Drain { grace, .. }, "grace") => *grace = Some(duration(value)?),
                (What::Weights { replica: on, .. }, "on") => *on = Some(replica(value)?),
                (What::Weights { pause, .. }, "pause") => *pause = duration(value)?,
                _ => return Err(format!("{kind} has no {name:?}")),
            }
        }
        Ok(Self { at, what })
    }
}

/// A year: times are counted in nanoseconds, and sums of them must fit.
const LONGEST: Duration = Duration::from_secs(366 * 86_400);

fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration <= LONGEST => Ok(duration),
        Ok(_) => Err(format!("{text:?} is more than a year")),
        Err(error) => Err(format!(
            "{text:?} is no duration such as 600s or 1.5s: {error}"
        )),
    }
}

fn replica(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is no number of a replica"))
}

/// Reads a file's lines; blank ones and those that begin with `#` are left out.
///
/// # Errors
/// The first line that is no event, with its number.
pub fn parse(text: &str) -> Result<Vec<Event>, String> {
    text.lines()
        .enumerate()
        .map(|(number, line)| (number + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| {
            line.parse()
                .map_err(|what: String| format!("line {number}: {what}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_reads_back_as_it_is_written() {
        let text = "\
# a comment
600s die 3

900s return 3
1m40s drain 2
100s drain 2 grace 30s
300s weights v2
300s weights v2 on 5 pause 10s
0s die 0
";
        let events = parse(text).unwrap();
        assert_eq!(events.len(), 7);
        for event in &events {
            assert_eq!(event.to_string().parse::<Event>().unwrap(), *event);
        }
        assert_eq!(
            events[5].what,
            What::Weights {
                version: "v2".into(),
                replica: Some(5),
                pause: Duration::from_secs(10),
            }
        );
    }

    #[test]
    fn what_is_wrong_is_said_with_the_line() {
        for (text, part) in [
            ("\n600s explode 3", "line 2: \"explode\""),
            ("soon die 3", "\"soon\" is no duration"),
            ("600s die x", "\"x\" is no number"),
            ("600s die", "die needs another word"),
            ("600s", "what happens is missing"),
            ("1s drain 1 pause 3s", "drain has no \"pause\""),
            ("1s drain 1 grace", "grace needs a value"),
            ("99years die 3", "more than a year"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
