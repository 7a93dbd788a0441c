//! What holds in every run, whatever the workload, the fleet and its fate.

use std::{collections::HashSet, num::NonZeroUsize, time::Duration};

use berth::{
    engine::sim::timing::Timing,
    simulate::{
        Arrival, Policy, Setup, Shape, compare,
        events::Event,
        oracle::Reachable,
        run,
        trace::{Origin, Piece, Session, Trace, Turn},
    },
};
use proptest::prelude::*;

fn turn() -> impl Strategy<Value = (u32, Vec<(Option<u64>, u32)>, u32, u64)> {
    let piece = (proptest::option::of(0_u64..4), 1_u32..300);
    (
        0_u32..=100,
        proptest::collection::vec(piece, 1..4),
        1_u32..60,
        0_u64..3000,
    )
}

/// Sessions with shared and own pieces, that keep some share of their history.
fn trace() -> impl Strategy<Value = Trace> {
    let session = (any::<bool>(), proptest::collection::vec(turn(), 1..8));
    proptest::collection::vec(session, 1..12).prop_map(|sessions| Trace {
        name: "any".to_owned(),
        sessions: sessions
            .into_iter()
            .map(|(keyed, turns)| {
                let mut history = 0;
                let turns = turns.into_iter().map(|(keep, pieces, output, think)| {
                    let fresh = pieces.into_iter().map(|(shared, tokens)| Piece {
                        origin: shared.map_or(Origin::Own, Origin::Shared),
                        tokens,
                    });
                    let turn = Turn {
                        reuse: history * keep / 100,
                        fresh: fresh.collect(),
                        output,
                        think: Duration::from_millis(think),
                    };
                    history = turn.prompt() + turn.output;
                    turn
                });
                Session {
                    keyed,
                    starts: None,
                    turns: turns.collect(),
                }
            })
            .collect(),
    })
}

/// Replica 0 always lives, so that every run ends.
fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = (0_u64..20_000, 1_usize..3, 0_u8..6).prop_map(|(at, replica, what)| {
        let line = match what {
            0 | 1 => format!("{at}ms die {replica}"),
            2 => format!("{at}ms return {replica}"),
            3 => format!("{at}ms drain {replica} grace 300ms"),
            4 => format!("{at}ms weights v{at}"),
            _ => format!("{at}ms weights v{at} on {replica} pause 700ms"),
        };
        line.parse().unwrap()
    });
    proptest::collection::vec(event, 0..8)
}

fn setup() -> impl Strategy<Value = Setup> {
    (
        (1_usize..3, 1_usize..17, 6_000_usize..20_000, 1_usize..9),
        (32_usize..600, proptest::option::of(1_usize..6)),
        (any::<u64>(), events()),
    )
        .prop_map(
            |((ranks, page, kv, running), (chunk, live), (seed, events))| Setup {
                shape: Shape {
                    replicas: 3,
                    ranks,
                    accelerator: "any",
                    kv_tokens: kv,
                    page,
                    max_running: running,
                },
                timing: Timing::h100(),
                chunk,
                arrival: live.map_or(Arrival::Every(Duration::from_millis(100)), Arrival::Live),
                seed,
                events,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_turn_is_served_once_in_order_and_time_goes_forward(
        trace in trace(),
        setup in setup(),
    ) {
        prop_assume!(setup.check(&trace).is_ok());
        let reachable = Reachable::of(&trace);
        let one_life = setup.events.is_empty();
        for policy in Policy::all() {
            let outcome = run(&trace, &setup, &policy).unwrap();
            let mut served = HashSet::new();
            let mut last = Duration::ZERO;
            let mut ends = vec![Duration::ZERO; trace.sessions.len()];
            let mut order = vec![0; trace.sessions.len()];
            for done in &outcome.turns {
                let turn = &trace.sessions[done.session].turns[done.turn];
                prop_assert!(served.insert((done.session, done.turn)), "served twice");
                prop_assert_eq!(done.turn, order[done.session]);
                order[done.session] += 1;
                prop_assert_eq!((done.prompt, done.output), (turn.prompt(), turn.output));
                prop_assert!(done.cached < done.prompt);
                prop_assert_eq!(done.cached as usize % setup.shape.page, 0);
                // What has never been there cannot be found. Sessions that share
                // texts may come in another order than the file's.
                if turn.fresh.iter().all(|piece| piece.origin == Origin::Own) && done.turn > 0 {
                    let shared = trace.sessions[done.session].turns[..done.turn]
                        .iter()
                        .flat_map(|t| &t.fresh)
                        .any(|piece| piece.origin != Origin::Own);
                    let reach = reachable.turns[done.session][done.turn];
                    prop_assert!(shared || done.cached <= reach);
                }
                prop_assert!(done.done >= last, "time went back");
                last = done.done;
                let rested = done.sent.checked_sub(ends[done.session]);
                prop_assert!(rested.is_some_and(|rested| rested >= turn.think));
                prop_assert!(done.sent < done.done);
                ends[done.session] = done.done;
            }
            prop_assert_eq!(served.len(), trace.turns());
            prop_assert_eq!(&ends, &outcome.sessions);
            let output: u64 = outcome.turns.iter().map(|t| u64::from(t.output)).sum();
            let generated: u64 = outcome.ranks.iter().map(|r| r.generated).sum();
            if one_life {
                prop_assert_eq!(generated, output);
                prop_assert!(outcome.turns.iter().all(|t| t.attempts == 1));
            } else {
                prop_assert!(generated >= output);
            }
            if setup.arrival == Arrival::Live(1) {
                let idle = outcome.turns.windows(2).all(|w| w[1].sent >= w[0].done);
                prop_assert!(idle, "two sessions were live");
            }
        }
    }

    /// The same seed gives the same report to the byte, on any number of threads.
    #[test]
    fn a_run_can_be_repeated(trace in trace(), setup in setup()) {
        prop_assume!(setup.check(&trace).is_ok());
        let on = |threads| {
            let threads = NonZeroUsize::new(threads).unwrap();
            let report = compare(&trace, &setup, &Policy::all(), threads).unwrap();
            (report.json().unwrap(), report.table(), report.chart())
        };
        prop_assert_eq!(on(1), on(4));
    }
}
