//! The command itself.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

fn berth(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.arg("simulate").args(args);
    command
}

#[test]
fn a_table_json_and_a_chart() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("made/here");
    let args = [
        "--workload",
        "ablation",
        "--live",
        "1",
        "--policies",
        "affinity,random",
        "--seed",
        "7",
        "--out",
        out.to_str().unwrap(),
    ];
    let table = berth(&args).output().unwrap();
    assert!(table.status.success(), "{table:?}");
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(
        text.contains("ablation: 4 sessions, 32 turns, 188,416 prompt tokens"),
        "{text}"
    );
    let row = text
        .lines()
        .find(|line| line.starts_with("affinity"))
        .unwrap();
    assert!(row.contains("100.00") && row.contains("91.29"), "{text}");

    let json = berth(&args).arg("--json").output().unwrap();
    let written = std::fs::read(out.join("simulate.json")).unwrap();
    assert_eq!(json.stdout, written);
    let report: serde_json::Value = serde_json::from_slice(&written).unwrap();
    assert_eq!(report["policies"][0]["cached_tokens"], 172_004);
    assert_eq!(report["policies"][1]["policy"], "random");

    let chart = std::fs::read_to_string(out.join("simulate.svg")).unwrap();
    assert!(chart.starts_with("<svg ") && chart.ends_with("</svg>\n"));
    assert!(
        chart.contains(">affinity</text>") && !chart.contains("NaN"),
        "{chart}"
    );
    // Twice from the same seed.
    assert_eq!(berth(&args).output().unwrap().stdout, text.as_bytes());
}

#[test]
fn a_trace_from_a_pipe_and_events() {
    let mut child = berth(&["--trace", "-", "--replicas", "2", "--event", "1s die 0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let trace = b"1 1000 300 0 0\n1 1300 300 1300 0\n2 900 300 0 0\n";
    child.stdin.take().unwrap().write_all(trace).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("standard input: 2 sessions, 3 turns"),
        "{text}"
    );
    assert!(text.contains("affinity: `1s die 0`:"), "{text}");
    for policy in [
        "affinity",
        "bounded_hash",
        "hash",
        "kv_admission",
        "moves",
        "prefix",
        "round_robin",
        "random",
        "least_loaded",
    ] {
        assert!(
            text.lines()
                .any(|line| line.starts_with(&format!("{policy} "))),
            "{text}"
        );
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.txt");
    std::fs::write(&bad, "0 10 5 0 0\n0 20 five 10 0\n").unwrap();
    let bad = bad.to_str().unwrap();
    for (args, code, message) in [
        (
            &["--trace", bad][..],
            1,
            "line 2, field `out`: \"five\" is no whole number",
        ),
        (
            &["--trace", "nowhere.txt"],
            2,
            "--trace: cannot open nowhere.txt",
        ),
        (
            &["--workload", "ablation", "--event", "1s die 8"],
            2,
            "replicas are numbered 0 to 7",
        ),
        (
            &["--workload", "ablation", "--policies", "hash,hash"],
            2,
            "--policies: hash is there twice",
        ),
        (
            &["--workload", "ablation", "--kv-tokens", "5000"],
            2,
            "KV cache holds 5000",
        ),
        (
            &["--workload", "ablation", "--replicas", "0"],
            2,
            "1 to 4096 replicas",
        ),
        (
            &[
                "--workload",
                "ablation",
                "--replicas",
                "1",
                "--event",
                "1s die 0",
            ],
            1,
            "no event changes that",
        ),
    ] {
        let output = berth(args).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(message), "{args:?}: {error}");
    }
}
