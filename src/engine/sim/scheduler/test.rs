use std::{collections::BTreeMap, sync::Arc};

use proptest::prelude::*;

use super::*;
use crate::engine::sim::{
    timing::Timing,
    tokens::{DEFAULT_EOS, Eos, expected},
};

const VOCAB: u32 = 151_936;

fn config() -> RankConfig {
    RankConfig {
        vocab: VOCAB,
        eos: Eos {
            id: DEFAULT_EOS,
            one_in: 0,
        },
        page: 1,
        kv_tokens: 375_000,
        max_running: 256,
        max_queued: None,
        chunk: 8192,
        priorities: false,
        timing: Timing::instant(),
    }
}

fn rank(config: RankConfig) -> Rank {
    Rank::new(config, "default".into())
}

fn job(id: u64, prompt: Vec<u32>, max_new: u32) -> Job {
    Job {
        id: JobId(id),
        prompt,
        max_new,
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

fn prompt(from: u32, len: u32) -> Vec<u32> {
    (from..from + len).collect()
}

/// Steps until nothing is left; the time that took and how every job ended.
fn run(rank: &mut Rank) -> (Duration, BTreeMap<u64, Done>) {
    let (mut took, mut all) = (Duration::ZERO, BTreeMap::new());
    while let Some(step) = rank.step() {
        took += step.took;
        for event in step.events {
            if let Event::Done { job, done } = event {
                assert!(all.insert(job.0, *done).is_none(), "ended twice");
            }
        }
    }
    assert!(rank.is_idle());
    assert_eq!(rank.load().used, 0);
    (took, all)
}

#[test]
fn a_turn_finds_all_of_the_turn_before_but_the_last_token() {
    let mut rank = rank(config());
    assert!(rank.submit(job(1, prompt(0, 3000), 8)).is_empty());
    let (_, done) = run(&mut rank);
    assert_eq!(done[&1].cached, 0);
    let mut next = prompt(0, 3000);
    next.extend(&done[&1].tokens);
    next.extend(prompt(90_000, 100));
    rank.submit(job(2, next, 8));
    assert_eq!(run(&mut rank).1[&2].cached, 3007);
    rank.submit(job(3, prompt(0, 3000), 8));
    assert_eq!(run(&mut rank).1[&3].cached, 2999);
}

#[test]
fn logprobs_of_the_prompt_are_computed_and_not_counted_as_cached() {
    let mut rank = rank(config());
    for (id, from, cached) in [
        (1, None, 0),
        (2, Some(0), 0),
        (3, Some(4), 4),
        (4, None, 15),
    ] {
        rank.submit(Job {
            compute_from: from,
            ..job(id, prompt(0, 16), 4)
        });
        assert_eq!(run(&mut rank).1[&id].cached, cached, "job {id}");
    }
}

#[test]
fn whole_pages_only() {
    let mut rank = rank(RankConfig {
        page: 16,
        ..config()
    });
    rank.submit(job(1, prompt(0, 100), 4));
    run(&mut rank);
    // 103 tokens have KV, 96 of them in whole pages.
    for (id, len, cached) in [(2, 100, 96), (3, 96, 80), (4, 97, 96)] {
        rank.submit(job(id, prompt(0, len), 1));
        assert_eq!(run(&mut rank).1[&id].cached, cached);
    }
}

#[test]
fn the_origins_workload_through_the_scheduler() {
    let mut rank = rank(RankConfig {
        timing: Timing::h100(),
        ..config()
    });
    let mut history = prompt(0, 4096);
    let mut times = Vec::new();
    let (mut cached, mut asked) = (0, 0);
    for turn in 0..8 {
        rank.submit(job(turn, history.clone(), 512));
        let (took, done) = run(&mut rank);
        times.push(took.as_secs_f64());
        asked += history.len();
        cached += done[&turn].cached;
        history.extend(&done[&turn].tokens);
    }
    assert_eq!((cached, asked), (43_001, 47_104));
    let warm = times[1..].iter().sum::<f64>() / 7.0;
    assert!((times[0] / 4.648 - 1.0).abs() < 0.015, "{times:?}");
    assert!((warm / 4.403 - 1.0).abs() < 0.01, "{warm}");
}

#[test]
fn long_prompts_are_computed_in_chunks_beside_those_who_run() {
    let mut rank = rank(RankConfig {
        timing: Timing::h100(),
        ..config()
    });
    rank.submit(job(1, prompt(0, 10), 100));
    rank.step().unwrap();
    rank.submit(job(2, prompt(1000, 20_000), 1));
    let steps = (0..3)
        .map(|_| {
            let step = rank.step().unwrap();
            assert!(step.took < Duration::from_millis(700), "{:?}", step.took);
            step.events
        })
        .collect::<Vec<_>>();
    assert!(matches!(steps[0][..], [Event::Started { .. }]));
    assert!(steps[1].is_empty());
    assert!(matches!(steps[2][..], [Event::Done { job: JobId(2), .. }]));
}

#[test]
fn an_abort_ends_a_waiting_one_now_and_a_running_one_after_one_more_token() {
    let mut rank = rank(RankConfig {
        max_running: 1,
        ..config()
    });
    rank.submit(job(1, prompt(0, 10), 100));
    for _ in 0..5 {
        rank.step();
    }
    rank.submit(job(2, prompt(50, 10), 100));
    assert!(matches!(
        rank.abort(JobId(2)),
        Some(Event::Refused {
            job: JobId(2),
            why: Refusal::AbortedWaiting,
            ..
        })
    ));
    assert!(rank.abort(JobId(3)).is_none());
    assert!(rank.abort(JobId(1)).is_none());
    let (_, done) = run(&mut rank);
    assert_eq!(done[&1].ended, Ended::Aborted);
    assert_eq!(done[&1].tokens, expected(&prompt(0, 10), 0, 6, VOCAB));
}

#[test]
fn a_full_queue_refuses_and_priority_takes_a_place() {
    let mut rank = rank(RankConfig {
        max_running: 1,
        max_queued: Some(1),
        priorities: true,
        ..config()
    });
    rank.submit(job(1, prompt(0, 10), 100));
    rank.step();
    assert!(rank.submit(job(2, prompt(0, 10), 1)).is_empty());
    assert!(matches!(
        rank.submit(job(3, prompt(0, 10), 1))[..],
        [Event::Refused {
            job: JobId(3),
            why: Refusal::QueueFull,
            ..
        }]
    ));
    let high = Job {
        priority: 10,
        ..job(4, prompt(0, 10), 1)
    };
    assert!(matches!(
        rank.submit(high)[..],
        [Event::Refused {
            job: JobId(2),
            why: Refusal::Displaced,
            ..
        }]
    ));
    assert_eq!(run(&mut rank).1.len(), 2);
}

#[test]
fn new_weights_midway_give_two_spans() {
    let mut rank = rank(config());
    rank.submit(job(1, prompt(0, 10), 60));
    for _ in 0..22 {
        rank.step();
    }
    rank.retract_all();
    assert!(rank.flush());
    rank.set_version("w2".into());
    let (_, done) = run(&mut rank);
    let done = &done[&1];
    let spans: Vec<_> = done
        .spans
        .iter()
        .map(|s| (&*s.version, s.start, s.end))
        .collect();
    assert_eq!(spans, [("default", 0, 22), ("w2", 22, 60)]);
    assert_eq!(done.retractions, 1);
    assert_eq!(done.cached, 0);
    assert_eq!(done.tokens, expected(&prompt(0, 10), 0, 60, VOCAB));
}

#[test]
fn stops_end_unless_ignored_and_length_comes_first() {
    let first = expected(&prompt(0, 10), 0, 1, VOCAB)[0];
    for (id, ignore, max_new, ended) in [
        (1, false, 8, Ended::Stop(first)),
        (2, true, 8, Ended::Length),
        (3, false, 1, Ended::Length),
    ] {
        let mut rank = rank(config());
        rank.submit(Job {
            stop_ids: vec![first],
            ignore_eos: ignore,
            ..job(id, prompt(0, 10), max_new)
        });
        assert_eq!(run(&mut rank).1[&id].ended, ended);
    }
}

#[test]
fn progress_comes_at_the_first_token_and_then_at_the_interval() {
    let mut rank = rank(config());
    rank.submit(Job {
        notify_every: 4,
        ..job(1, prompt(0, 10), 11)
    });
    let mut totals = Vec::new();
    let mut tokens = Vec::new();
    while let Some(step) = rank.step() {
        for event in step.events {
            match event {
                Event::Progress {
                    total,
                    tokens: more,
                    ..
                } => {
                    totals.push(total);
                    tokens.extend(more);
                }
                Event::Done { done, .. } => tokens.extend(done.tokens),
                _ => {}
            }
        }
    }
    assert_eq!(totals, [1, 5, 9]);
    assert_eq!(tokens, expected(&prompt(0, 10), 0, 11, VOCAB));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// With far too little KV: everybody ends once, with exactly the tokens
    /// that belong to its prompt, and the capacity is kept at every step.
    #[test]
    fn nobody_is_lost_and_nothing_overflows(
        page in 1_usize..5,
        chunk in 8_usize..40,
        kv in 60_usize..140,
        max_running in 1_usize..8,
        jobs in proptest::collection::vec((0_u32..4, 1_u32..40, 0_u32..30, 0_u64..20), 1..20),
        aborts in proptest::collection::vec((0_u64..20, 0_u64..60), 0..6),
    ) {
        let mut rank = rank(RankConfig { page, chunk, kv_tokens: kv, max_running, ..config() });
        let mut ended: BTreeMap<u64, (Vec<u32>, Ended)> = BTreeMap::new();
        let mut given_up = 0;
        for now in 0..4000_u64 {
            for (id, &(from, len, max_new, at)) in jobs.iter().enumerate() {
                if at == now {
                    let events = rank.submit(job(id as u64, prompt(from * 10, len), max_new));
                    prop_assert!(events.is_empty());
                }
            }
            for &(id, at) in &aborts {
                if at == now && let Some(event) = rank.abort(JobId(id)) {
                    let is_refusal = matches!(event, Event::Refused { .. });
                    prop_assert!(is_refusal);
                    given_up += 1;
                }
            }
            let Some(step) = rank.step() else {
                if now > 20 { break } else { continue }
            };
            let held = rank.cache.evictable() + rank.cache.protected() + rank.private;
            prop_assert!(held <= kv, "{held} of {kv}");
            for event in step.events {
                if let Event::Done { job, done } = event {
                    let tokens = done.tokens;
                    prop_assert!(ended.insert(job.0, (tokens, done.ended)).is_none());
                }
            }
        }
        prop_assert!(rank.is_idle());
        prop_assert_eq!(rank.load().used, 0);
        prop_assert_eq!(ended.len() + given_up, jobs.len());
        for (id, (tokens, how)) in ended {
            let (from, len, max_new, _) = jobs[usize::try_from(id).unwrap()];
            let whole = expected(&prompt(from * 10, len), 0, max_new as usize, VOCAB);
            prop_assert_eq!(&tokens[..], &whole[..tokens.len()]);
            if how == Ended::Length {
                let room = kv - kv % page - 1 - len as usize;
                prop_assert_eq!(tokens.len(), whole.len().min(room));
            }
        }
    }
}

#[test]
fn a_prompt_that_never_fits_is_refused_and_a_long_output_is_cut() {
    let mut rank = rank(RankConfig {
        kv_tokens: 100,
        ..config()
    });
    assert!(matches!(
        rank.submit(job(1, prompt(0, 99), 1))[..],
        [Event::Refused {
            why: Refusal::TooLarge,
            ..
        }]
    ));
    rank.submit(job(2, prompt(0, 90), 50));
    assert_eq!(run(&mut rank).1[&2].total, 9);
}

#[test]
fn an_eviction_takes_the_oldest_and_the_next_turn_is_cold() {
    let mut rank = rank(RankConfig {
        kv_tokens: 250,
        ..config()
    });
    for (id, from) in [(1, 0), (2, 1000), (3, 2000)] {
        rank.submit(job(id, prompt(from, 100), 1));
        run(&mut rank);
    }
    for (id, from, cached) in [(4, 2000, 99), (5, 1000, 99), (6, 0, 0)] {
        rank.submit(job(id, prompt(from, 100), 1));
        assert_eq!(run(&mut rank).1[&id].cached, cached, "job {id}");
    }
    assert!(rank.load().totals.evicted >= 100);
}

#[test]
fn a_prompt_outside_the_vocabulary_ends_the_engine_when_it_is_computed() {
    let mut rank = rank(config());
    assert!(
        rank.submit(Job {
            poison: true,
            ..job(1, prompt(0, 3), 4)
        })
        .is_empty()
    );
    let step = rank.step().unwrap();
    assert!(step.events.contains(&Event::Crashed { job: JobId(1) }));
}

#[test]
fn load_counts_what_runs_waits_and_is_held() {
    let mut rank = rank(RankConfig {
        max_running: 1,
        ..config()
    });
    rank.submit(job(1, prompt(0, 16), 100));
    for _ in 0..46 {
        rank.step();
    }
    rank.submit(job(2, prompt(0, 16), 4));
    let load = rank.load();
    assert_eq!((load.running, load.waiting), (1, 1));
    // 16 + 46 tokens, the last one's KV not computed yet.
    assert_eq!((load.used, load.waiting_tokens), (61, 16));
    assert_eq!(load.waiting_uncached, 1);
    let version: Arc<str> = "x".into();
    rank.set_version(version);
}
