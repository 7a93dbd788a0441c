//! The ablation harness against a real gRPC server whose every cache hit can be
//! computed by hand.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod fake;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use berth::{
    harness::{
        self, AffinityBench, Arm, Report,
        affinity::{ArmOrder, Baseline},
        progress::{Progress, Silent},
    },
    proto as pb,
};
use fake::{Fake, Options, expected_hits, replicas, retry_later};
use tonic::{Code, Status};

/// Small and quick; the origin's ratios do not matter to most tests.
fn small(fake: &Fake) -> AffinityBench {
    AffinityBench {
        control_plane: fake.url.clone(),
        trajectories: 2,
        turns: 3,
        initial_prompt_tokens: 100,
        output_tokens: 10,
        run_id: Some("t".to_owned()),
        ..AffinityBench::default()
    }
}

/// Runs it; a run that hangs fails.
async fn run(bench: AffinityBench) -> anyhow::Result<Report> {
    tokio::time::timeout(Duration::from_secs(60), harness::run(bench, Silent))
        .await
        .expect("the run ends")
}

async fn failure(bench: AffinityBench) -> String {
    format!("{:#}", run(bench).await.expect_err("the run fails"))
}

#[tokio::test]
async fn the_origins_workload_on_a_perfect_fleet() {
    let fake = Fake::start(Options::default()).await;
    let report = run(AffinityBench {
        control_plane: fake.url.clone(),
        replicas: Some(8),
        ..AffinityBench::default()
    })
    .await
    .unwrap();

    assert_eq!(report.replicas, 8);
    let with = &report.arms.affinity;
    assert_eq!(with.trajectories, 4);
    assert_eq!(with.all_prompt_tokens, 188_416);
    assert_eq!(with.all_prompt_cache_hit_tokens, 172_004);
    assert_eq!(with.reusable_prefix_tokens, 172_004);
    assert_eq!(with.reusable_cache_hit_tokens, 172_004);
    assert_eq!(with.reusable_prefix_hit_rate, 1.0);
    assert_eq!(with.overall_input_cache_hit_rate, 172_004.0 / 188_416.0);
    assert_eq!((with.full_hit_turns, with.measured_turns), (28, 28));
    assert_eq!((with.requests, with.generated_tokens), (32, 16_384));
    assert_eq!(with.placement.distinct_replicas, 4);
    for trajectory in &with.placement.trajectories {
        assert_eq!(trajectory.distinct_replicas, 1);
        assert_eq!(trajectory.counts[0].turns, 8);
        assert_eq!(trajectory.turns.len(), 8);
    }

    // The other arm did the same work, and hit what its placement implies.
    let log = fake.log();
    let without = &report.arms.no_affinity;
    assert_eq!((without.requests, without.generated_tokens), (32, 16_384));
    assert_eq!(without.all_prompt_tokens, 188_416);
    assert_eq!(
        without.all_prompt_cache_hit_tokens,
        expected_hits(&log, false)
    );
    assert_eq!(
        without.reusable_prefix_hit_rate,
        without.reusable_cache_hit_tokens as f64 / 172_004.0
    );
    assert_eq!(
        report.absolute_reusable_prefix_hit_rate_lift,
        1.0 - without.reusable_prefix_hit_rate
    );
    assert!(with.total_wall_seconds > 0.0 && with.elapsed_seconds >= with.total_wall_seconds);
    assert!(report.check(Some(1.0), Some(0.2)).is_ok());
    assert_eq!(report.notes, Vec::<String>::new());
    assert!(report.table().contains("28/28"), "{}", report.table());
}

#[tokio::test]
async fn what_is_sent() {
    let fake = Fake::start(Options::default()).await;
    run(AffinityBench {
        new_tokens_per_turn: 5,
        ..small(&fake)
    })
    .await
    .unwrap();

    let log = fake.log();
    assert_eq!(log.len(), 12);
    // The baseline first.
    assert!(log[..6].iter().all(|s| !s.is_affinity()));
    assert!(log[6..].iter().all(|s| s.is_affinity()));
    let keys: HashSet<&str> = log.iter().map(|s| s.key()).collect();
    assert_eq!(keys.len(), 12, "a key per request");
    for seen in &log {
        assert_eq!(seen.key(), seen.request_id);
        assert!(seen.has_deadline);
        let sampling = seen.request.sampling.clone().unwrap();
        assert_eq!(sampling.max_tokens, Some(10));
        assert_eq!(sampling.temperature, Some(1.0));
        assert!(sampling.ignore_eos);
        assert!(sampling.seed.unwrap() < 1 << 62);
        assert_eq!(seen.request.model.as_deref(), Some("Qwen3-8B"));
        assert_eq!(
            seen.request.output_encoding(),
            pb::OutputEncoding::Packed,
            "packed"
        );
        let policy = match seen.is_affinity() {
            true => pb::RoutingPolicy::Unspecified,
            false => pb::RoutingPolicy::Random,
        };
        assert_eq!(seen.request.routing_policy(), policy);
    }
    assert_eq!(log[0].key(), "t/no_affinity/1/1");
    assert_eq!(log[6].request.cache_affinity_key(), "t/affinity/1");

    // The next prompt is prompt, output and new tokens.
    for trajectory in log.chunks(3) {
        let lengths: Vec<usize> = trajectory.iter().map(|s| s.tokens.len()).collect();
        assert_eq!(lengths, [100, 115, 130]);
        for pair in trajectory.windows(2) {
            assert_eq!(pair[1].tokens[..pair[0].tokens.len()], pair[0].tokens[..]);
        }
    }
    // No prefix in common between trajectories and arms.
    let firsts: HashSet<u32> = log.chunks(3).map(|t| t[0].tokens[0]).collect();
    assert_eq!(firsts.len(), 4);
    // Pins are freed, when all is done.
    assert_eq!(fake.finished(), ["t/affinity/1", "t/affinity/2"]);
}

#[tokio::test]
async fn new_tokens_are_not_reusable() {
    let fake = Fake::start(Options::default()).await;
    let report = run(AffinityBench {
        new_tokens_per_turn: 5,
        ..small(&fake)
    })
    .await
    .unwrap();
    let with = &report.arms.affinity;
    // 100, 115 and 130 tokens, of which 0, 109 and 124 reusable.
    assert_eq!(with.all_prompt_tokens, 2 * 345);
    assert_eq!(with.reusable_prefix_tokens, 2 * (109 + 124));
    assert_eq!(with.reusable_cache_hit_tokens, 2 * (109 + 124));
    assert_eq!((with.full_hit_turns, with.measured_turns), (4, 4));
    assert_eq!(with.turns[2].reusable_prefix_tokens, 2 * 124);
}

#[tokio::test]
async fn round_robin_by_hand() {
    let fake = Fake::start(Options {
        replicas: replicas(2),
        ..Options::default()
    })
    .await;
    let report = run(AffinityBench {
        turns: 4,
        baseline: Baseline::RoundRobin,
        ..small(&fake)
    })
    .await
    .unwrap();
    // Turns 3 and 4 return to where turns 1 and 2 left 109 and 119 tokens.
    let without = &report.arms.no_affinity;
    assert_eq!(without.all_prompt_cache_hit_tokens, 2 * (109 + 119));
    assert_eq!(without.reusable_prefix_tokens, 2 * (109 + 119 + 129));
    assert_eq!((without.full_hit_turns, without.measured_turns), (0, 6));
    let hits: Vec<u64> = without.turns.iter().map(|t| t.cache_hit_tokens).collect();
    assert_eq!(hits, [0, 0, 218, 238]);
    let placed = &without.placement.trajectories[0];
    let order: Vec<&str> = placed.turns.iter().map(|p| p.replica.as_str()).collect();
    assert_eq!(order, ["r0", "r1", "r0", "r1"]);
    assert_eq!(
        report.absolute_reusable_prefix_hit_rate_lift,
        1.0 - 456.0 / 714.0
    );
}

#[tokio::test]
async fn hits_in_whole_pages_are_full_hits() {
    let mut fleet = replicas(2);
    for replica in &mut fleet {
        replica.page_size = 64;
    }
    let fake = Fake::start(Options {
        replicas: fleet,
        ..Options::default()
    })
    .await;
    let report = run(AffinityBench {
        initial_prompt_tokens: 250,
        ..small(&fake)
    })
    .await
    .unwrap();
    let with = &report.arms.affinity;
    // 259 and 269 tokens reusable, 256 in whole pages.
    assert_eq!(with.reusable_cache_hit_tokens, 4 * 256);
    assert_eq!(with.reusable_prefix_tokens, 2 * (259 + 269));
    assert_eq!(with.full_hit_turns, 4);
    assert_eq!(report.fleet.page_size, 64);
}

#[tokio::test]
async fn a_run_id_repeats_a_run_and_another_shares_nothing_with_it() {
    let runs = async |id: &str| {
        let fake = Fake::start(Options::default()).await;
        let report = run(AffinityBench {
            run_id: Some(id.to_owned()),
            turns: 6,
            ..small(&fake)
        })
        .await
        .unwrap();
        let prompts: Vec<Vec<u32>> = fake.log().into_iter().map(|s| s.tokens).collect();
        (prompts, report.arms.no_affinity.placement)
    };
    let (first, placement) = runs("a").await;
    assert_eq!((first.clone(), placement), runs("a").await);
    let (second, _) = runs("b").await;
    let firsts = |prompts: &[Vec<u32>]| prompts.iter().map(|p| p[0]).collect::<HashSet<_>>();
    assert!(firsts(&first).is_disjoint(&firsts(&second)));
}

#[tokio::test]
async fn a_second_run_on_a_live_server_is_cold_again() {
    let fake = Fake::start(Options::default()).await;
    let bench = AffinityBench {
        run_id: None,
        baseline: Baseline::LeastLoaded,
        ..small(&fake)
    };
    for _ in 0..2 {
        let report = run(bench.clone()).await.unwrap();
        for arm in [&report.arms.no_affinity, &report.arms.affinity] {
            assert_eq!(arm.turns[0].cache_hit_tokens, 0);
            assert_eq!(arm.reusable_prefix_hit_rate, 1.0);
        }
    }
    let keys: HashSet<String> = fake.log().iter().map(|s| s.key().to_owned()).collect();
    assert_eq!(keys.len(), 24);
}

#[tokio::test]
async fn a_run_id_used_before_is_refused_as_a_replay() {
    let fake = Fake::start(Options::default()).await;
    run(small(&fake)).await.unwrap();
    let error = failure(small(&fake)).await;
    assert!(error.contains("run id t was used before"), "{error}");
}

#[tokio::test]
async fn affinity_may_go_first() {
    let fake = Fake::start(Options::default()).await;
    let report = run(AffinityBench {
        arm_order: ArmOrder::AffinityFirst,
        baseline: Baseline::RoundRobin,
        ..small(&fake)
    })
    .await
    .unwrap();
    assert!(fake.log()[..6].iter().all(|s| s.is_affinity()));
    assert_eq!(report.arms.affinity.reusable_prefix_hit_rate, 1.0);
    assert_eq!(report.arms.no_affinity.reusable_prefix_hit_rate, 0.0);
}

#[tokio::test]
async fn waits_for_every_replica() {
    let fake = Fake::start(Options {
        replicas: replicas(3),
        slow_start: 1,
        ..Options::default()
    })
    .await;
    let bench = AffinityBench {
        replicas: Some(3),
        ..small(&fake)
    };
    let report = run(bench).await.unwrap();
    assert_eq!(report.replicas, 3);
    // The third is healthy at the third look; the last look is after the run.
    assert_eq!(fake.list_calls(), 4);
}

#[tokio::test]
async fn a_fleet_that_stays_incomplete_is_named_and_nothing_is_sent() {
    let mut fleet = replicas(3);
    fleet[1].health = pb::ReplicaHealth::Suspect.into();
    fleet[1].health_reason = "missed 3 heartbeats".to_owned();
    fleet[2].endpoint = fleet[0].endpoint.clone();
    let fake = Fake::start(Options {
        replicas: fleet,
        ..Options::default()
    })
    .await;
    let error = failure(AffinityBench {
        replicas: Some(3),
        wait: Duration::from_millis(300),
        ..small(&fake)
    })
    .await;
    for part in [
        "not complete within 300ms",
        "r0 and r2 are one engine",
        "2 of 3 expected replicas healthy",
        "r1 is suspect (missed 3 heartbeats)",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(fake.log().is_empty());
}

#[tokio::test]
async fn a_control_plane_that_is_not_there_is_an_error_in_time() {
    // Bound, so that nobody else gets the port, and not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let bench = AffinityBench {
        control_plane: format!("http://{}", socket.local_addr().unwrap()),
        wait: Duration::from_millis(300),
        ..AffinityBench::default()
    };
    let error = failure(bench).await;
    assert!(error.contains("ListReplicas: Unavailable"), "{error}");
}

#[tokio::test]
async fn refusals_for_now_are_retried_under_the_same_key() {
    let fake = Fake::start(Options {
        refuse: Box::new(|request, tries| {
            let code = match request.idempotency_key() {
                "t/affinity/1/2" => Code::Unavailable,
                "t/affinity/2/3" => Code::ResourceExhausted,
                _ => return None,
            };
            (tries <= 2).then(|| retry_later(code, Duration::from_millis(30)))
        }),
        ..Options::default()
    })
    .await;
    let report = run(small(&fake)).await.unwrap();
    let with = &report.arms.affinity;
    assert_eq!(with.retries, 4);
    assert_eq!(with.requests, 6);
    assert_eq!(with.reusable_prefix_hit_rate, 1.0);
    // The waits are part of the latency.
    assert!(with.turns[1].mean_request_latency_ms >= 30.0);
    assert!(with.total_wall_seconds >= 0.120);
    assert_eq!(
        report.notes,
        ["affinity: 4 retries are part of the latencies"]
    );

    let log = fake.log();
    assert_eq!(log.len(), 12 + 4);
    let tries: Vec<_> = log.iter().filter(|s| s.key() == "t/affinity/1/2").collect();
    assert_eq!(tries.len(), 3);
    assert!(tries.iter().all(|s| s.request == tries[0].request));
}

#[tokio::test]
async fn a_replay_after_a_retry_is_this_runs_own_result() {
    // The first try is done, but its answer says "lost".
    let fake = Fake::start(Options {
        refuse: Box::new(|request, tries| {
            let own = request.idempotency_key() == "t/affinity/1/2";
            (own && tries == 1).then(|| retry_later(Code::Unavailable, Duration::ZERO))
        }),
        tamper: Box::new(|response| response.replayed = true),
        ..Options::default()
    })
    .await;
    // Every other response is a replay of a first try: refused.
    let error = failure(small(&fake)).await;
    assert!(
        error.contains("no affinity, trajectory 1, turn 1"),
        "{error}"
    );

    let fake = Fake::start(Options {
        refuse: Box::new(|_, tries| {
            (tries == 1).then(|| retry_later(Code::Unavailable, Duration::ZERO))
        }),
        tamper: Box::new(|response| response.replayed = true),
        ..Options::default()
    })
    .await;
    assert!(run(small(&fake)).await.is_ok());
}

#[tokio::test]
async fn a_retry_past_the_deadline_fails_the_run() {
    let fake = Fake::start(Options {
        refuse: Box::new(|request, _| {
            request
                .idempotency_key()
                .ends_with("/2/2")
                .then(|| retry_later(Code::Unavailable, Duration::from_secs(3600)))
        }),
        ..Options::default()
    })
    .await;
    let error = failure(small(&fake)).await;
    for part in [
        "no affinity, trajectory 2, turn 2: ",
        "Unavailable / NO_REPLICA: no replica takes it now",
        "given up after 1 try",
        "--request-timeout",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_never_answers_fails_the_run_at_the_deadline() {
    let fake = Fake::start(Options {
        hangs_on: Some("/affinity/1/3".to_owned()),
        ..Options::default()
    })
    .await;
    let error = failure(AffinityBench {
        // Long enough for the requests that are answered.
        request_timeout: Duration::from_secs(4),
        ..small(&fake)
    })
    .await;
    assert!(error.contains("affinity, trajectory 1, turn 3"), "{error}");
    assert!(error.contains("--request-timeout"), "{error}");
    // Pins are freed even so.
    assert_eq!(fake.finished().len(), 2);
}

#[tokio::test]
async fn a_request_at_fault_is_not_retried_and_says_everything() {
    use tonic_types::{ErrorDetails, StatusExt};
    let fake = Fake::start(Options {
        refuse: Box::new(|request, _| {
            let mut details = ErrorDetails::new();
            details.add_bad_request_violation("sampling.seed", "is odd");
            details.add_bad_request_violation("model", "is unknown");
            let status =
                Status::with_error_details(Code::InvalidArgument, "invalid request", details);
            request.cache_affinity_key.is_some().then_some(status)
        }),
        ..Options::default()
    })
    .await;
    let error = failure(small(&fake)).await;
    assert!(error.contains("sampling.seed: is odd"), "{error}");
    assert!(error.contains("model: is unknown"), "{error}");
    assert_eq!(fake.log().len(), 6 + 1);
}

#[tokio::test]
async fn replies_that_contradict_the_request_fail_the_run() {
    type Change = fn(&mut pb::SampleResult);
    let cases: [(&str, Change); 6] = [
        ("exactly 10 tokens, got 9", |sample| {
            sample.token_ids_le.truncate(36);
            sample.usage.as_mut().unwrap().completion_tokens = 9;
        }),
        ("no whole number of 32-bit words", |sample| {
            sample.token_ids_le.truncate(39);
        }),
        ("token id 151936 is not below", |sample| {
            let mut bytes = sample.token_ids_le.to_vec();
            bytes[..4].copy_from_slice(&151_936u32.to_le_bytes());
            sample.token_ids_le = bytes.into();
        }),
        ("usage says 99 prompt", |sample| {
            sample.usage.as_mut().unwrap().prompt_tokens = 99;
        }),
        ("101 of 100 prompt tokens are said to be cached", |sample| {
            sample.usage.as_mut().unwrap().cached_tokens = 101;
        }),
        ("no route", |sample| sample.route = None),
    ];
    for (expected, change) in cases {
        let fake = Fake::start(Options {
            tamper: Box::new(move |response| change(&mut response.samples[0])),
            ..Options::default()
        })
        .await;
        let error = failure(small(&fake)).await;
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let fake = Fake::start(Options {
        tamper: Box::new(|response| response.samples.push(response.samples[0].clone())),
        ..Options::default()
    })
    .await;
    let error = failure(small(&fake)).await;
    assert!(error.contains("asked for 1 sample, got 2"), "{error}");
}

#[tokio::test]
async fn generations_may_end_by_themselves_where_asked_for() {
    let fake = Fake::start(Options::default()).await;
    let report = run(AffinityBench {
        ignore_eos: false,
        ..small(&fake)
    })
    .await
    .unwrap();
    let with = &report.arms.affinity;
    // 100 % 3 = 1: nine tokens; 109 % 3 = 1: nine; 118 % 3 = 1: nine.
    assert_eq!(with.generated_tokens, 2 * 27);
    assert_eq!(with.reusable_prefix_tokens, 2 * (108 + 117));
    assert_eq!(with.reusable_prefix_hit_rate, 1.0);
    assert!(report.table().contains("at most 10 generated"));
}

#[tokio::test]
async fn all_faulty_options_are_named_at_once_and_nothing_is_sent() {
    let fake = Fake::start(Options::default()).await;
    let error = failure(AffinityBench {
        control_plane: "localhost".to_owned(),
        replicas: Some(0),
        trajectories: 0,
        turns: 1,
        initial_prompt_tokens: 0,
        output_tokens: 0,
        concurrency: 0,
        request_timeout: Duration::ZERO,
        time_scale: f64::NAN,
        run_id: Some("a b".to_owned()),
        model: Some(String::new()),
        ..small(&fake)
    })
    .await;
    for option in [
        "--control-plane (BERTH_CONTROL_PLANE)",
        "--model",
        "--replicas",
        "--trajectories",
        "--turns",
        "--initial-prompt-tokens",
        "--output-tokens",
        "--concurrency",
        "--request-timeout",
        "--time-scale",
        "--run-id",
    ] {
        assert!(
            error.contains(&format!("\n  {option}: ")),
            "{option}: {error}"
        );
    }
    assert_eq!(fake.list_calls(), 0);
}

#[tokio::test]
async fn what_the_fleet_cannot_hold_is_refused_before_anything_is_sent() {
    let mut fleet = replicas(2);
    fleet[0].vocab_size = 0;
    fleet[1].context_length = 129;
    fleet[1].model = "other".to_owned();
    let fake = Fake::start(Options {
        replicas: fleet,
        ..Options::default()
    })
    .await;
    // 100 + 3 * 10 = 130.
    let error = failure(small(&fake)).await;
    for part in [
        "--model: name one of those that are served: Qwen3-8B, other",
        "vocabulary size",
        "130 tokens of prompt and output, the context is 129",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(fake.log().is_empty());

    let mut fleet = replicas(2);
    fleet[1].context_length = 130;
    fleet[1].ranks[0].kv_capacity_tokens = 129;
    let fake = Fake::start(Options {
        replicas: fleet,
        ..Options::default()
    })
    .await;
    let error = failure(small(&fake)).await;
    assert!(error.contains("smallest KV cache"), "{error}");
}

#[tokio::test]
async fn trajectories_run_at_once_and_turns_in_order() {
    let fake = Fake::start(Options {
        first_turns_together: 4,
        ..Options::default()
    })
    .await;
    // Passes only if four first turns are in flight together.
    let report = run(AffinityBench {
        trajectories: 8,
        concurrency: 4,
        ..small(&fake)
    })
    .await
    .unwrap();
    assert_eq!(fake.most_in_flight(), 4);
    assert_eq!(report.arms.affinity.reusable_prefix_hit_rate, 1.0);
    let log = fake.log();
    for number in 1..=8 {
        let prefix = format!("t/affinity/{number}/");
        let turns: Vec<&str> = log
            .iter()
            .filter_map(|s| s.key().strip_prefix(&prefix))
            .collect();
        assert_eq!(turns, ["1", "2", "3"]);
    }
    // In order of their numbers, whatever the order in which they ended.
    let pins = &report.arms.affinity.placement.trajectories;
    for (i, trajectory) in pins.iter().enumerate() {
        let key = format!("t/affinity/{}", i + 1);
        let first = log
            .iter()
            .find(|s| s.request.cache_affinity_key() == key)
            .unwrap();
        let replica = format!("r{}", first.replica.unwrap());
        assert_eq!(trajectory.turns[0].replica, replica);
    }
}

#[tokio::test]
async fn what_happened_to_the_fleet_meanwhile_is_in_the_notes() {
    let mut after = replicas(2);
    after[0].incarnation = 2;
    after[1].health = pb::ReplicaHealth::Dead.into();
    let mut fleet = replicas(2);
    fleet[0].capabilities = None;
    let fake = Fake::start(Options {
        replicas: fleet,
        replicas_after: Some(after),
        tamper: Box::new(|r| r.samples[0].route.as_mut().unwrap().served_rank = Some(3)),
        ..Options::default()
    })
    .await;
    let report = run(small(&fake)).await.unwrap();
    assert_eq!(
        report.notes,
        [
            "replica r0 restarted during the run",
            "replica r1 was lost during the run",
            "not every replica honours a seed: sampling is not repeatable",
            "no affinity: 6 requests were served on another rank than the one asked",
            "affinity: 6 requests were served on another rank than the one asked",
        ]
    );
    assert!(fake.log().iter().all(|s| {
        let sampling = s.request.sampling.as_ref().unwrap();
        sampling.seed.is_none()
    }));
    // Where it was served, not where it was asked.
    assert_eq!(report.arms.affinity.placement.counts[0].place.rank, 3);
}

#[tokio::test]
async fn simulated_seconds_are_measured_ones_over_the_scale() {
    let fake = Fake::start(Options::default()).await;
    let start = tokio::time::Instant::now();
    let report = run(AffinityBench {
        time_scale: 0.001,
        ..small(&fake)
    })
    .await
    .unwrap();
    let measured = start.elapsed().as_secs_f64();
    assert_eq!(report.time_scale, 0.001);
    let simulated = report.arms.no_affinity.elapsed_seconds + report.arms.affinity.elapsed_seconds;
    assert!(simulated > 0.0 && simulated <= measured / 0.001);
    assert!(report.arms.affinity.total_wall_seconds <= report.arms.affinity.elapsed_seconds);
    assert!(report.table().contains("divided by 0.001"));
}

#[derive(Clone, Default)]
struct Told {
    requests: Arc<AtomicUsize>,
    phases: Arc<Mutex<Vec<String>>>,
}

impl Progress for Told {
    fn waiting(&self, status: &str) {
        self.phases.lock().unwrap().push(format!("wait {status}"));
    }
    fn arm_started(&self, arm: Arm, requests: u64) {
        let line = format!("{} {requests}", arm.name());
        self.phases.lock().unwrap().push(line);
    }
    fn request_done(&self, _: Arm) {
        self.requests.fetch_add(1, Ordering::SeqCst);
    }
    fn arm_finished(&self, _: Arm) {
        self.phases.lock().unwrap().push("done".to_owned());
    }
}

#[tokio::test]
async fn progress_is_told() {
    let fake = Fake::start(Options {
        replicas: replicas(2),
        slow_start: 1,
        ..Options::default()
    })
    .await;
    let told = Told::default();
    let bench = AffinityBench {
        replicas: Some(2),
        ..small(&fake)
    };
    harness::run(bench, told.clone()).await.unwrap();
    assert_eq!(told.requests.load(Ordering::SeqCst), 12);
    assert_eq!(
        *told.phases.lock().unwrap(),
        [
            "wait 1 of 2 expected replicas healthy; r1 is unverified (not probed yet)",
            "no_affinity 6",
            "done",
            "affinity 6",
            "done"
        ]
    );
}

/// The command itself: status, standard output, standard error.
async fn command(fake: &Fake, extra: &[&str]) -> (Option<i32>, String, String) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_berth"));
    command
        .args(["bench", "affinity", "--control-plane", &fake.url])
        .args(["--trajectories", "2", "--turns", "3"])
        .args(["--initial-prompt-tokens", "100", "--output-tokens", "10"])
        .args(["--baseline", "round_robin"])
        .args(extra)
        .kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(60), command.output())
        .await
        .expect("the command ends")
        .unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[tokio::test]
async fn the_command_prints_writes_and_succeeds() {
    let fake = Fake::start(Options::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new").join("dir");
    let minima = ["--min-hit-rate", "1", "--min-lift", "1"];
    let mut args = vec!["--replicas", "8", "--out", out.to_str().unwrap()];
    args.extend(minima);
    let (code, stdout, stderr) = command(&fake, &args).await;
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("reusable-prefix hit rate"), "{stdout}");
    assert!(stdout.contains("+100.00 points"), "{stdout}");
    // No bar where there is no terminal.
    assert_eq!(stderr, "");
    let json = std::fs::read_to_string(out.join("report.json")).unwrap();
    let report: Report = serde_json::from_str(&json).unwrap();
    assert_eq!(report.arms.affinity.full_hit_turns, 4);
    let chart = std::fs::read_to_string(out.join("chart.svg")).unwrap();
    assert!(chart.starts_with("<svg") && chart.ends_with("</svg>\n"));
}

#[tokio::test]
async fn the_command_fails_below_a_minimum_and_still_reports() {
    // A server that takes keys and does nothing with them.
    let fake = Fake::start(Options {
        ignores_keys: true,
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let args = ["--run-id", "t", "--out", out, "--min-hit-rate", "0.99"];
    let (code, stdout, stderr) = command(&fake, &args).await;
    assert_eq!(code, Some(1), "{stdout}");
    assert!(stderr.contains("below the minimum"), "{stderr}");
    assert!(stdout.contains("full reusable-prefix hits"), "{stdout}");
    assert!(dir.path().join("report.json").exists());
}

#[tokio::test]
async fn the_command_reports_nothing_of_a_part() {
    let fake = Fake::start(Options {
        refuse: Box::new(|request, _| {
            let last = request.idempotency_key().ends_with("/affinity/2/3");
            last.then(|| Status::internal("a fault"))
        }),
        ..Options::default()
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = command(&fake, &["--out", dir.path().to_str().unwrap()]).await;
    assert_eq!(code, Some(1));
    assert_eq!(stdout, "");
    assert!(
        stderr.contains("affinity, trajectory 2, turn 3"),
        "{stderr}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
