use proptest::prelude::*;

use super::*;
use crate::engine::sim::radix::{RadixCache, RadixTree};

/// Tokens of an outline as ids: one id for each origin and position.
fn ids(outline: &Outline) -> Vec<u32> {
    let mut out = Vec::new();
    for run in &outline.runs {
        while out.len() < run.end {
            let position = u32::try_from(out.len()).unwrap();
            out.push(u32::try_from(run.origin).unwrap() * 1000 + position);
        }
    }
    out
}

fn outline(pieces: &[(u64, usize)]) -> Outline {
    let mut out = Outline::empty();
    for &(origin, tokens) in pieces {
        out.push(origin, tokens);
    }
    out
}

#[derive(Clone, Debug)]
enum Op {
    Find(Vec<(u64, usize)>),
    Insert(Vec<(u64, usize)>),
    Evict(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Few origins and short runs, so that prefixes are shared and cut all the
    // time, within pages and at their ends.
    let pieces = || proptest::collection::vec((0_u64..3, 1_usize..5), 0..6);
    let op = prop_oneof![
        2 => pieces().prop_map(Op::Find),
        4 => pieces().prop_map(Op::Insert),
        1 => (1_usize..20).prop_map(Op::Evict),
    ];
    proptest::collection::vec(op, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// A tree over outlines does what one over their token ids does.
    #[test]
    fn a_cache_cannot_tell_outlines_from_token_ids(page in 1_usize..5, ops in ops()) {
        let mut plain = RadixCache::new(page);
        let mut outlined = RadixTree::<Runs>::new(page);
        for op in ops {
            match op {
                Op::Find(pieces) => {
                    let text = outline(&pieces);
                    let found = outlined.find("", text.first(text.len()));
                    prop_assert_eq!(found, plain.find("", &ids(&text)));
                }
                Op::Insert(pieces) => {
                    let text = outline(&pieces);
                    let held = outlined.insert("", text.first(text.len()));
                    prop_assert_eq!(held, plain.insert("", &ids(&text)));
                }
                Op::Evict(tokens) => {
                    prop_assert_eq!(outlined.evict(tokens), plain.evict(tokens));
                }
            }
            prop_assert_eq!(outlined.evictable(), plain.evictable());
        }
    }

    #[test]
    fn truncating_keeps_a_prefix(
        pieces in proptest::collection::vec((0_u64..4, 1_usize..5), 0..6),
        keep in 0_usize..30,
    ) {
        let whole = outline(&pieces);
        let mut cut = whole.clone();
        cut.truncate(keep);
        let all = ids(&whole);
        prop_assert_eq!(&ids(&cut)[..], &all[..keep.min(all.len())]);
        prop_assert_eq!(cut.len(), keep.min(all.len()));
    }
}

#[test]
fn what_is_generated_comes_from_the_output() {
    let mut text = Outline::new(outline(&[(1, 10)]).prompt(9));
    for _ in 0..3 {
        text.generate(0, 0, None, 0);
    }
    assert_eq!(text.runs, outline(&[(1, 10), (9, 3)]).runs);
}
