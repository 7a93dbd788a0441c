//! Reading traces, and what an infinite cache would have found in them.

use std::time::Duration;

use berth::simulate::{
    generate::Workload,
    oracle::Reachable,
    read::{MAX_LINE, TraceError, read},
    trace::{Origin, Trace},
};

fn text(trace: &str) -> Result<Trace, TraceError> {
    read("test", trace.as_bytes(), usize::MAX)
}

const SESSIONS: &str = "\
7 1000 100 0 0
7 1200 50 1100 2.5

7 1300 50 1000 60
3 500 10 0 0
";

#[test]
fn sessions() {
    let trace = text(SESSIONS).unwrap();
    assert_eq!((trace.sessions.len(), trace.turns()), (2, 4));
    assert_eq!(trace.tokens(), (4000, 210));
    let turn = &trace.sessions[0].turns[1];
    assert_eq!((turn.prompt(), turn.reuse, turn.output), (1200, 1100, 50));
    assert_eq!(turn.think, Duration::from_millis(2500));
    assert!(trace.sessions[0].keyed && trace.sessions[0].starts.is_none());
    let reachable = Reachable::of(&trace);
    assert_eq!(reachable.turns, [vec![0, 1100, 1000], vec![0]]);
    assert_eq!((reachable.tokens, reachable.blocks), (2100, None));

    let longer = trace.scaled(4).unwrap();
    assert_eq!(longer.tokens(), (16_000, 210));
    // The history of the first turn is 4,100 tokens long now, not 4,400.
    assert_eq!(Reachable::of(&longer).turns[0], [0, 4100, 4000]);
    assert!(longer.scaled(u32::MAX).is_err());
    let first = read("test", SESSIONS.as_bytes(), 1).unwrap();
    assert_eq!((first.sessions.len(), first.turns()), (1, 3));
}

/// A prompt that is a prefix of the history is reached up to its last token.
#[test]
fn the_last_token_of_a_prompt_is_always_computed() {
    let trace = text("0 1000 100 0 0\n0 1100 5 1100 0\n0 900 5 900 0\n").unwrap();
    assert_eq!(Reachable::of(&trace).turns, [[0, 1099, 899]]);
}

const BLOCKS: &str = r#"{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 3], "type": "text"}
{"timestamp": 1500, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 4]}
{"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [0]}
{"timestamp": 1501, "input_length": 1024, "output_length": 1, "hash_ids": [5, 1]}
"#;

#[test]
fn blocks() {
    let trace = text(BLOCKS).unwrap();
    assert_eq!((trace.sessions.len(), trace.turns()), (5, 5));
    assert_eq!(trace.sessions[2].starts, Some(Duration::from_millis(1500)));
    assert!(!trace.sessions[0].keyed);
    let last = trace.sessions[0].turns[0].fresh.last().unwrap();
    assert_eq!((last.origin, last.tokens), (Origin::Shared(2), 176));
    let reachable = Reachable::of(&trace);
    // Block 1 of the last one stands behind another beginning.
    assert_eq!(reachable.blocks, Some((4, 11)));
    let found: Vec<u32> = reachable.turns.iter().map(|turns| turns[0]).collect();
    assert_eq!(found, [0, 512, 1024, 511, 0]);
    let first = read("test", BLOCKS.as_bytes(), 2).unwrap();
    assert_eq!(first.turns(), 2);
}

#[test]
fn what_is_wrong_is_said_with_line_and_field() {
    for (trace, message) in [
        ("", "the trace is empty"),
        ("\n \n", "the trace is empty"),
        (
            "0 10 5 0 0\n0 20 5 15",
            "line 2, field `think`: it is missing",
        ),
        (
            "x 10 5 0 0",
            "line 1, field `session`: \"x\" is no whole number",
        ),
        ("0 0 5 0 0", "line 1, field `in`: it is less than 1"),
        (
            "0 -4 5 0 0",
            "line 1, field `in`: \"-4\" is no whole number",
        ),
        ("0 10 0 0 0", "line 1, field `out`: it is less than 1"),
        ("0 10 99999999999 0 0", "line 1, field `out`"),
        (
            "\n0 10 5 11 0",
            "line 2, field `reuse`: 11 is more than the prompt's 10",
        ),
        (
            "0 10 5 1 0",
            "line 1, field `reuse`: 1 is more than the 0 tokens",
        ),
        (
            "0 10 5 0 0\n0 99 5 16 0",
            "line 2, field `reuse`: 16 is more than the 15 tokens",
        ),
        ("0 10 5 0 nan", "line 1, field `think`"),
        ("0 10 5 0 -1", "line 1, field `think`"),
        ("0 10 5 0 1 9", "line 1: \"9\" stands after the last field"),
        (
            "0 9 5 0 0\n1 9 5 0 0\n0 9 5 0 0",
            "line 3, field `session`: turns of session 0 stand apart",
        ),
        (
            "{\"timestamp\": 0}",
            "line 1, field `input_length`: it is missing",
        ),
        (
            "{\"timestamp\": \"0\", \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [0]}",
            "line 1, field `timestamp`",
        ),
        (
            "{\"timestamp\": 0, \"input_length\": 5.5, \"output_length\": 5, \"hash_ids\": [0]}",
            "line 1, field `input_length`",
        ),
        (
            "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 5, \"hash_ids\": [0]}",
            "line 1, field `hash_ids`: 1 blocks",
        ),
        (
            "{\"timestamp\": 0, \"input_length\": 13, \"output_length\": 5, \"hash_ids\": [-1]}",
            "line 1, field `hash_ids`: -1",
        ),
        (
            "{\"timestamp\": 9, \"input_length\": 3, \"output_length\": 5, \"hash_ids\": [0]}\n{\"timestamp\": 8, \"input_length\": 3, \"output_length\": 5, \"hash_ids\": [0]}",
            "line 2, field `timestamp`",
        ),
        ("{\"timestamp\": 0,", "line 1: EOF while parsing"),
        (
            "{\"timestamp\": 0, \"input_length\": 3, \"output_length\": 5, \"hash_ids\": [0]}\n0 10 5 0 0",
            "line 2:",
        ),
    ] {
        let error = text(trace).unwrap_err().to_string();
        assert!(error.starts_with(message), "{trace:?}: {error}");
    }
    let error = read("test", &b"\x1f\x8b\x08\x00"[..], 1).unwrap_err();
    assert!(error.to_string().contains("decompress"), "{error}");
    let long = "1".repeat(MAX_LINE + 1);
    let error = text(&long).unwrap_err().to_string();
    assert!(error.starts_with("line 1: it is longer than"), "{error}");
}

#[test]
fn made_workloads_are_what_they_are_called() {
    let ablation = Workload::Ablation.generate(None, 0);
    assert_eq!((ablation.sessions.len(), ablation.turns()), (4, 32));
    assert_eq!(ablation.tokens(), (188_416, 16_384));
    assert_eq!(Reachable::of(&ablation).tokens, 172_004);

    let grpo = Workload::Grpo.generate(Some(3), 1);
    assert_eq!(grpo.sessions.len(), 24);
    let reachable = Reachable::of(&grpo);
    for (number, session) in grpo.sessions.iter().enumerate() {
        let first = &session.turns[0];
        let shared = if number % 8 == 0 {
            0
        } else {
            first.prompt() - 1
        };
        assert_eq!(reachable.turns[number][0], shared, "session {number}");
    }

    let one_shot = Workload::OneShot.generate(Some(50), 2);
    assert!(
        one_shot
            .sessions
            .iter()
            .all(|s| s.turns.len() == 1 && s.keyed)
    );
    assert_eq!(Reachable::of(&one_shot).tokens, 0);

    let skewed = Workload::Skewed.generate(None, 3);
    let mut lengths: Vec<usize> = skewed.sessions.iter().map(|s| s.turns.len()).collect();
    lengths.sort_unstable();
    assert!(
        lengths[lengths.len() / 2] <= 10 && lengths[lengths.len() - 1] >= 60,
        "{lengths:?}"
    );
    for workload in [Workload::Grpo, Workload::Skewed, Workload::OneShot] {
        assert_eq!(workload.generate(Some(9), 5), workload.generate(Some(9), 5));
        assert_ne!(workload.generate(Some(9), 5), workload.generate(Some(9), 6));
    }
}
