//! The page of metrics, read strictly: what a lenient reader lets pass fails.

use std::collections::{BTreeMap, BTreeSet};

/// A family of series.
#[derive(Clone, Debug, Default)]
pub struct Family {
    pub kind: String,
    pub help: String,
    pub series: Vec<Series>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// The families of a page in the classic text format, by name.
pub fn read(page: &str) -> BTreeMap<String, Family> {
    assert!(page.ends_with('\n'), "the last line ends");
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut current: Option<(String, Family)> = None;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            if let Some((name, family)) = current.take() {
                close(&mut families, name, family);
            }
            let (name, help) = rest.split_once(' ').expect(line);
            let family = Family {
                help: help.to_owned(),
                ..Family::default()
            };
            current = Some((name.to_owned(), family));
            continue;
        }
        let (name, family) = current.as_mut().expect("HELP is first");
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (of, kind) = rest.split_once(' ').expect(line);
            assert_eq!((of, &*family.kind), (&**name, ""), "{line}");
            kind.clone_into(&mut family.kind);
            continue;
        }
        assert!(!family.kind.is_empty(), "TYPE is before {line}");
        let series = series(line);
        let suffixes: &[&str] = match &*family.kind {
            "histogram" => &["_bucket", "_sum", "_count"],
            "counter" | "gauge" => &[""],
            other => panic!("{other}"),
        };
        let belongs = |suffix: &&str| series.name == format!("{name}{suffix}");
        assert!(suffixes.iter().any(belongs), "{line} under {name}");
        assert!(
            seen.insert(format!("{} {:?}", series.name, series.labels)),
            "twice: {line}"
        );
        family.series.push(series);
    }
    let (name, family) = current.expect("there is a family");
    close(&mut families, name, family);
    families
}

fn close(families: &mut BTreeMap<String, Family>, name: String, family: Family) {
    assert!(!family.help.trim().is_empty(), "{name} has no help");
    if family.kind == "histogram" {
        histogram(&name, &family);
    }
    assert!(
        families.insert(name.clone(), family).is_none(),
        "{name} comes twice"
    );
}

fn series(line: &str) -> Series {
    let (name, rest) = match line.split_once('{') {
        Some((name, rest)) => (name, rest),
        None => {
            let (name, value) = line.split_once(' ').expect(line);
            return Series {
                name: named(name),
                labels: BTreeMap::new(),
                value: value.parse().expect(line),
            };
        }
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest;
    let value = loop {
        let (label, after) = rest.split_once("=\"").expect(line);
        let mut value = String::new();
        let mut letters = after.char_indices();
        let end = loop {
            match letters.next().expect(line) {
                (at, '"') => break at,
                (_, '\\') => match letters.next().expect(line).1 {
                    'n' => value.push('\n'),
                    c @ ('\\' | '"') => value.push(c),
                    other => panic!("\\{other} in {line}"),
                },
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(named(label), value).is_none(), "{line}");
        match after[end + 1..].split_at(1) {
            (",", more) => rest = more,
            ("}", value) => break value.strip_prefix(' ').expect(line),
            _ => panic!("{line}"),
        }
    };
    Series {
        name: named(name),
        labels,
        value: value.parse().expect(line),
    }
}

fn named(name: &str) -> String {
    let begins = |c: char| c.is_ascii_lowercase() || c == '_';
    let goes_on = |c: char| begins(c) || c.is_ascii_digit();
    assert!(
        name.starts_with(begins) && name.chars().all(goes_on),
        "{name}"
    );
    name.to_owned()
}

fn histogram(name: &str, family: &Family) {
    type Of = BTreeMap<String, String>;
    let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    for series in &family.series {
        let mut labels: Of = series.labels.clone();
        match series.name.strip_prefix(name).unwrap() {
            "_bucket" => {
                let le = labels.remove("le").expect("le");
                let bound = if le == "+Inf" {
                    f64::INFINITY
                } else {
                    le.parse().unwrap()
                };
                let of = buckets.entry(format!("{labels:?}")).or_default();
                of.push((bound, series.value));
            }
            "_count" => {
                counts.insert(format!("{labels:?}"), series.value);
            }
            _ => {}
        }
    }
    assert_eq!(buckets.len(), counts.len(), "{name}");
    for (labels, buckets) in buckets {
        let grows = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        assert!(buckets.windows(2).all(grows), "{name} {labels}");
        let (bound, all) = buckets.last().unwrap();
        assert_eq!((*bound, *all), (f64::INFINITY, counts[&labels]), "{name}");
    }
}

impl Family {
    /// The sum of the series with these labels.
    pub fn sum(&self, labels: &[(&str, &str)]) -> f64 {
        let has = |series: &&Series| {
            let mut labels = labels.iter();
            labels.all(|(label, value)| series.labels.get(*label).is_some_and(|v| v == value))
        };
        self.series
            .iter()
            .filter(has)
            .map(|series| series.value)
            .sum()
    }

    /// Names of its labels, a histogram's bounds aside.
    pub fn labels(&self) -> BTreeSet<String> {
        let names = self.series.iter().flat_map(|series| series.labels.keys());
        names.filter(|name| *name != "le").cloned().collect()
    }
}
