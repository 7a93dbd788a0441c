//! Faults on demand. Each is something that real engines have been seen to do.

use serde::{Deserialize, Serialize};

/// How often something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Times {
    /// To the next so many requests.
    Next(u32),
    /// Until it is cleared.
    Always,
}

/// What a hung engine still answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hang {
    /// Everything but `/generate`: its health looks good.
    Generate,
    /// Nothing at all.
    All,
}

/// Connections that are closed without one byte of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// How often.
    pub times: Times,
    /// When.
    pub when: CutWhen,
}

/// When a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CutWhen {
    /// Once the request is read: it never runs.
    AtOnce,
    /// In place of its reply: it ran to its end. A stream is cut at once.
    WhenDone,
}

/// Streams that end without error frame and without `[DONE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DropStream {
    /// How often.
    pub times: Times,
    /// Frames that carry up to this many tokens of the output are sent, but
    /// never the last one.
    pub after_tokens: u32,
}

/// The faults in force. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Steps take this many times as long.
    pub slow: Option<f64>,
    /// Connections are taken and never answered.
    pub hang: Option<Hang>,
    /// `/generate` answers 503, streamed or not, as a server in front of the
    /// engine does.
    pub unavailable: Option<Times>,
    /// `/generate` answers that the queue is full, in the engine's own forms.
    pub queue_full: Option<Times>,
    /// `/generate` answers 500.
    pub failing: Option<Times>,
    /// Streams are dropped.
    pub drop_stream: Option<DropStream>,
    /// Replies are cut.
    pub cut: Option<Cut>,
    /// The rank in the request is not looked at: another one serves and is
    /// reported. Needs two ranks.
    pub ignore_rank: bool,
    /// The port refuses; what is under way is finished.
    pub refuse: bool,
    /// Schedulers that are dead: their entries in `/v1/loads` stand still, and
    /// the first message to one of them hangs every `/generate` from then on.
    /// For good: a rank cannot be taken off this list.
    pub dead_ranks: Vec<u32>,
}

impl Faults {
    /// Whether this fault strikes now; counts it where it is counted.
    pub(super) fn strike(times: &mut Option<Times>) -> bool {
        match times {
            None => false,
            Some(Times::Always) => true,
            Some(Times::Next(left)) => {
                let strikes = *left > 0;
                *left = left.saturating_sub(1);
                if *left == 0 {
                    *times = None;
                }
                strikes
            }
        }
    }
}

/// The body of `POST /sim/faults`: the faults in force from now on (what is
/// left out is cleared), and what happens once.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Order {
    pub(super) slow: Option<f64>,
    pub(super) hang: Option<Hang>,
    pub(super) unavailable: Option<Times>,
    pub(super) queue_full: Option<Times>,
    pub(super) failing: Option<Times>,
    pub(super) drop_stream: Option<DropStream>,
    pub(super) cut: Option<Cut>,
    pub(super) ignore_rank: bool,
    pub(super) refuse: bool,
    pub(super) dead_ranks: Vec<u32>,
    /// Everything that runs or waits is aborted.
    pub(super) abort_all: bool,
    /// The engine dies: every connection is cut and its port refuses.
    pub(super) die: bool,
}

impl Order {
    pub(super) fn faults(&self) -> Faults {
        Faults {
            slow: self.slow,
            hang: self.hang,
            unavailable: self.unavailable,
            queue_full: self.queue_full,
            failing: self.failing,
            drop_stream: self.drop_stream,
            cut: self.cut,
            ignore_rank: self.ignore_rank,
            refuse: self.refuse,
            dead_ranks: self.dead_ranks.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counted_fault_strikes_as_often_as_said() {
        let mut times = Some(Times::Next(2));
        let strikes = (0..4).filter(|_| Faults::strike(&mut times)).count();
        assert_eq!((strikes, times), (2, None));
        let mut always = Some(Times::Always);
        assert!((0..9).all(|_| Faults::strike(&mut always)));
    }

    #[test]
    fn an_order_reads_as_it_is_documented() {
        let order: Order = serde_json::from_str(
            r#"{"unavailable": {"next": 3}, "queue_full": "always", "hang": "generate",
                "cut": {"times": {"next": 1}, "when": "at_once"},
                "drop_stream": {"times": "always", "after_tokens": 5}, "die": true}"#,
        )
        .unwrap();
        assert_eq!(order.faults().unavailable, Some(Times::Next(3)));
        assert!(order.die);
        assert!(serde_json::from_str::<Order>(r#"{"typo": 1}"#).is_err());
    }
}
