//! `docs/cases.md` says which test stages which failure: they are all there.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// Rows that need a store that several control planes share.
const WAITING: [u32; 2] = [1, 28];
const ROWS: u32 = 28;

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

/// Names of functions that carry a test attribute.
fn tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    sources(&root.join("tests"), &mut files);
    let mut names = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        let mut marked = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" || line.starts_with("#[tokio::test") || line == "proptest! {" {
                marked = true;
            } else if let Some((_, rest)) = line.split_once("fn ") {
                let name = rest.split('(').next().unwrap_or_default();
                if std::mem::take(&mut marked) {
                    names.insert(name.to_owned());
                }
            }
        }
    }
    names
}

#[test]
fn every_case_names_tests_that_exist() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/cases.md");
    let text = std::fs::read_to_string(path).unwrap();
    let known = tests();
    let mut rows = Vec::new();
    for line in text.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(row) = cells.get(1).and_then(|cell| cell.parse::<u32>().ok()) else {
            continue;
        };
        rows.push(row);
        let named: Vec<&str> = cells[4].split('`').skip(1).step_by(2).collect();
        assert_eq!(named.is_empty(), WAITING.contains(&row), "row {row}");
        for name in named {
            assert!(known.contains(name), "row {row}: there is no test {name}");
        }
    }
    assert_eq!(rows, (1..=ROWS).collect::<Vec<_>>());
}
