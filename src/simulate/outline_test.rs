use proptest::prelude::*;

use super::*;
use crate::engine::sim::{
    radix::{RadixCache, RadixTree},
    scheduler::{Event, Job, JobId, Rank, RankConfig},
    text::TokenIds,
    timing::Timing,
    tokens::{DEFAULT_EOS, Eos},
};

/// Tokens of an outline as ids: one id for each origin and position.
fn ids(outline: &Outline) -> Vec<u32> {
    let mut out = Vec::new();
    for run in &outline.runs {
        while out.len() < run.end {
            let position = u32::try_from(out.len()).unwrap();
            out.push(u32::try_from(run.origin).unwrap() * 10_000 + position);
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

    /// Blocks are the same exactly as far as the tokens are.
    #[test]
    fn outlines_meet_in_blocks_as_far_as_their_tokens_do(
        same in proptest::collection::vec((0_u64..4, 1_usize..400), 0..6),
        one in proptest::collection::vec((0_u64..4, 1_usize..400), 0..4),
        other in proptest::collection::vec((0_u64..4, 1_usize..400), 0..4),
    ) {
        let long = |tail: &[(u64, usize)]| outline(&[&same[..], tail].concat());
        let (one, other) = (long(&one), long(&other));
        let tokens = ids(&one).iter().zip(&ids(&other)).take_while(|(a, b)| a == b).count();
        let (ours, theirs) = (one.blocks(), other.blocks());
        prop_assert_eq!(ours.len(), one.len() / BLOCK as usize);
        for (index, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            prop_assert_eq!(a == b, (index + 1) * BLOCK as usize <= tokens, "block {}", index);
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

/// One turn: how much of the history is kept in percent, new tokens, output.
type Turn = (usize, usize, u32);

fn job<P>(id: usize, prompt: P, output: u32) -> Job<P> {
    Job {
        id: JobId(id as u64),
        prompt,
        max_new: output,
        seed: 0,
        stop_ids: Vec::new(),
        ignore_eos: true,
        stops_past_eos: false,
        min_new: 0,
        compute_from: None,
        namespace: "".into(),
        priority: 0,
        notify_every: 0,
        poison: false,
    }
}

/// What can be seen of an event without its tokens.
fn seen(event: &Event) -> (u64, &'static str, u32, u32) {
    match event {
        Event::Started { job, cached } => (job.0, "started", *cached, 0),
        Event::Done { job, done } => (job.0, "done", done.total, done.retractions),
        other => panic!("{other:?}"),
    }
}

struct Session {
    ids: Vec<u32>,
    outline: Outline,
    turns: std::vec::IntoIter<Turn>,
    /// The origin of the output that is awaited.
    output: u64,
}

/// Sessions on two ranks, one over token ids and one over outlines.
struct Both {
    ids: Rank<TokenIds>,
    outlines: Rank<Outline>,
    sessions: Vec<Session>,
    asked: u64,
}

impl Both {
    fn send(&mut self, number: usize) {
        let session = &mut self.sessions[number];
        let Some((keep, fresh, output)) = session.turns.next() else {
            return;
        };
        let kept = session.ids.len() * keep / 100;
        session.ids.truncate(kept);
        session.outline.truncate(kept);
        self.asked += 1;
        // Above the vocabulary, so that nothing generated is ever the same.
        let first = u32::try_from(self.asked * 1000).unwrap() + 1_000_000;
        let ids = (0..fresh).map(|at| first + u32::try_from(at).unwrap());
        session.ids.extend(ids);
        session.outline.push(self.asked, fresh);
        session.output = self.asked | 1 << 32;
        let ids = job(number, session.ids.clone(), output);
        assert!(self.ids.submit(ids).is_empty());
        let outline = session.outline.prompt(session.output);
        let outline = job(number, outline, output);
        assert!(self.outlines.submit(outline).is_empty());
    }

    fn take(&mut self, event: &Event) {
        if let Event::Done { job, done } = event {
            let number = usize::try_from(job.0).unwrap();
            let session = &mut self.sessions[number];
            session.ids.extend(&done.tokens);
            session.outline.push(session.output, done.tokens.len());
            self.send(number);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The scheduler takes the same steps, of the same length, with the same
    /// hits, evictions and retractions.
    #[test]
    fn a_rank_cannot_tell_outlines_from_token_ids(
        sessions in proptest::collection::vec(
            proptest::collection::vec((0_usize..=100, 1_usize..60, 1_u32..40), 1..6), 1..7),
        page in 1_usize..5,
        chunk in 8_usize..100,
        max_running in 1_usize..6,
    ) {
        let config = RankConfig {
            vocab: 151_936,
            eos: Eos { id: DEFAULT_EOS, one_in: 0 },
            page,
            // Room for the longest, and little more.
            kv_tokens: 560,
            max_running,
            max_queued: None,
            chunk,
            priorities: false,
            timing: Timing::h100(),
        };
        let count = sessions.len();
        let mut both = Both {
            ids: Rank::new(config.clone(), "v1".into()),
            outlines: Rank::new(config, "v1".into()),
            sessions: sessions
                .into_iter()
                .map(|turns| Session {
                    ids: Vec::new(),
                    outline: Outline::empty(),
                    turns: turns.into_iter(),
                    output: 0,
                })
                .collect(),
            asked: 0,
        };
        for session in 0..count {
            both.send(session);
        }
        loop {
            let (a, b) = (both.ids.step(), both.outlines.step());
            let (Some(a), Some(b)) = (a, b) else {
                break;
            };
            prop_assert_eq!(a.took, b.took);
            let kinds = |events: &[Event]| events.iter().map(seen).collect::<Vec<_>>();
            prop_assert_eq!(kinds(&a.events), kinds(&b.events));
            for event in &a.events {
                both.take(event);
            }
        }
        prop_assert!(both.ids.is_idle() && both.outlines.is_idle());
        prop_assert_eq!(both.ids.load(), both.outlines.load());
    }
}
