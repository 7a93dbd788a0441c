use super::*;
use crate::harness::report::tests::sample;

/// Tags nest and close, attributes are quoted, no bare `&` or `<`.
fn assert_well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        assert!(!rest[..at].contains('>'), "stray >: {}", &rest[..at]);
        for (i, _) in rest[..at].match_indices('&') {
            let entity = &rest[i..at];
            let known = ["&amp;", "&lt;", "&gt;", "&quot;", "&apos;"];
            assert!(known.iter().any(|k| entity.starts_with(k)), "{entity}");
        }
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        assert!(!tag.contains('<'), "{tag}");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(tag.split(' ').next().unwrap());
        }
        rest = &rest[end + 1..];
    }
    assert_eq!(rest, "\n");
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn shows_both_arms_in_both_panels_with_labels_and_totals() {
    let svg = svg(&sample());
    assert_well_formed(&svg);
    // Legend and two panels.
    for class in ["with", "without"] {
        assert_eq!(svg.matches(&format!("class=\"line {class}\"")).count(), 3);
        assert_eq!(svg.matches(&format!("class=\"dot {class}\"")).count(), 17);
    }
    for text in [
        "Prompt tokens from the cache (%)",
        "Mean request latency (s)",
        ">turn</text>",
        "no affinity (random)",
        "full hits 4/28 and 28/28",
        "91.29 %",
        "prefers-color-scheme:dark",
    ] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}

#[test]
fn hostile_names_and_degenerate_numbers_stay_well_formed() {
    let mut report = sample();
    report.workload.run_id = "</svg><script>&\u{1b}[2J\"'".to_owned();
    for arm in [&mut report.arms.no_affinity, &mut report.arms.affinity] {
        for turn in &mut arm.turns {
            turn.mean_request_latency_ms = 0.0;
        }
    }
    assert_well_formed(&svg(&report));
    assert!(svg(&report).contains("(ms)"));
    report.arms.affinity.turns.clear();
    report.arms.no_affinity.turns.truncate(1);
    let drawn = svg(&report);
    assert_well_formed(&drawn);
    assert!(!drawn.contains("NaN"));
}

#[test]
fn axes_are_round() {
    assert_eq!(scale(4.7), (1.0, 5.0));
    assert_eq!(scale(62.0), (20.0, 80.0));
    assert_eq!(scale(100.0), (20.0, 100.0));
    assert_eq!(scale(0.0), (1.0, 1.0));
    assert_eq!(scale(f64::NAN), (1.0, 1.0));
    assert_eq!(tick_label(0.25, 0.05), "0.25");
    assert_eq!(tick_label(4.0, 1.0), "4");
}
