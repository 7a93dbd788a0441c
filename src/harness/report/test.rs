use super::*;
use crate::harness::workload::reusable_tokens;

fn workload(trajectories: u32, turns: u32) -> Workload {
    Workload::new(
        &AffinityBench {
            trajectories,
            turns,
            ..AffinityBench::default()
        },
        "test",
    )
}

fn fleet(page_size: u32) -> FleetSummary {
    FleetSummary {
        replicas: 8,
        ranks: 8,
        model: "Qwen3-8B".to_owned(),
        accelerators: BTreeMap::from([("NVIDIA H100 80GB HBM3".to_owned(), 8)]),
        page_size,
    }
}

/// A run of the origin's lengths. `hit(trajectory, turn, reusable)` are the
/// cached tokens, `ms(trajectory, turn)` the latency; both count from 0.
fn origin(hit: impl Fn(u32, u32, u32) -> u32, ms: impl Fn(u32, u32) -> u64) -> ArmRun {
    let trajectories = (0..4)
        .map(|trajectory| {
            let mut previous = None;
            (0..8)
                .map(|turn| {
                    let prompt = 4096 + turn * 512;
                    let reusable = reusable_tokens(previous, prompt);
                    previous = Some((prompt, 512));
                    Turn {
                        prompt_tokens: prompt,
                        output_tokens: 512,
                        cached_tokens: hit(trajectory, turn, reusable),
                        reusable_tokens: reusable,
                        latency: Duration::from_millis(ms(trajectory, turn)),
                        place: Place {
                            replica: format!("r{trajectory}"),
                            rank: 0,
                        },
                        wrong_rank: false,
                        retries: 0,
                    }
                })
                .collect()
        })
        .collect();
    ArmRun {
        trajectories,
        elapsed: Duration::from_secs(150),
    }
}

pub(crate) fn sample() -> Report {
    let without = origin(
        |_, turn, reusable| if turn == 4 { reusable } else { 0 },
        |_, turn| if turn == 4 { 4400 } else { 4700 },
    );
    let with = origin(
        |_, _, reusable| reusable,
        |_, turn| if turn == 0 { 4650 } else { 4400 },
    );
    Report::new(workload(4, 8), fleet(1), &without, &with, Vec::new())
}

#[test]
fn the_origins_workload_at_full_reuse() {
    let run = origin(|_, _, reusable| reusable, |_, _| 4400);
    let arm = ArmReport::new(&run, 1, 1.0);
    assert_eq!(arm.trajectories, 4);
    assert_eq!(arm.all_prompt_tokens, 188_416);
    assert_eq!(arm.all_prompt_cache_hit_tokens, 172_004);
    assert!((arm.overall_input_cache_hit_rate - 0.912_89).abs() < 5e-6);
    assert_eq!(arm.reusable_prefix_tokens, 172_004);
    assert_eq!(arm.reusable_cache_hit_tokens, 172_004);
    assert_eq!(arm.reusable_prefix_hit_rate, 1.0);
    assert_eq!((arm.full_hit_turns, arm.measured_turns), (28, 28));
    assert_eq!((arm.requests, arm.generated_tokens), (32, 16_384));
}

#[test]
fn nothing_cached_and_nothing_to_cache() {
    let arm = ArmReport::new(&origin(|_, _, _| 0, |_, _| 1), 1, 1.0);
    assert_eq!(arm.reusable_prefix_hit_rate, 0.0);
    assert_eq!(arm.overall_input_cache_hit_rate, 0.0);
    assert_eq!((arm.full_hit_turns, arm.measured_turns), (0, 28));

    let empty = ArmRun {
        trajectories: Vec::new(),
        elapsed: Duration::ZERO,
    };
    let arm = ArmReport::new(&empty, 1, 1.0);
    assert_eq!(arm.p95_request_latency_ms, 0.0);
    assert_eq!(arm.reusable_prefix_hit_rate, 0.0);
}

#[test]
fn rates_are_sums_over_sums() {
    // Only the last turn of each trajectory hits, wholly: 7,679 of 43,001.
    let arm = ArmReport::new(
        &origin(|_, turn, r| if turn == 7 { r } else { 0 }, |_, _| 1),
        1,
        1.0,
    );
    assert_eq!(arm.reusable_prefix_hit_rate, 7679.0 / 43_001.0);
    assert_eq!(arm.overall_input_cache_hit_rate, 7679.0 / 47_104.0);
    assert_eq!(arm.full_hit_turns, 4);
}

#[test]
fn a_hit_beyond_the_reusable_prefix_does_not_count_as_reuse() {
    let arm = ArmReport::new(&origin(|_, _, r| r + 1, |_, _| 1), 1, 1.0);
    assert_eq!(arm.reusable_prefix_hit_rate, 1.0);
    // Raw, first turns included: 43,001 + 8 a trajectory.
    assert_eq!(arm.all_prompt_cache_hit_tokens, 4 * (43_001 + 8));
}

#[test]
fn a_full_hit_is_whole_pages() {
    let paged = |_, _, r: u32| r / 64 * 64;
    assert_eq!(
        ArmReport::new(&origin(paged, |_, _| 1), 64, 1.0).full_hit_turns,
        28
    );
    assert_eq!(
        ArmReport::new(&origin(paged, |_, _| 1), 1, 1.0).full_hit_turns,
        0
    );
    // One page short is no full hit.
    let short = |_, _, r: u32| (r / 64 * 64).saturating_sub(64);
    assert_eq!(
        ArmReport::new(&origin(short, |_, _| 1), 64, 1.0).full_hit_turns,
        0
    );
    // The rates stay raw.
    let arm = ArmReport::new(&origin(paged, |_, _| 1), 64, 1.0);
    assert!(arm.reusable_prefix_hit_rate < 1.0);
}

#[test]
fn latencies() {
    // 0..31 ms in some order, the four cold turns 0, 8, 16 and 24.
    let run = origin(
        |_, _, _| 0,
        |trajectory, turn| u64::from(trajectory * 8 + turn),
    );
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    let arm = ArmReport::new(&run, 1, 1.0);
    close(arm.mean_request_latency_ms, 15.5);
    close(arm.p50_request_latency_ms, 15.5);
    // Position 31 * 0.95 = 29.45.
    close(arm.p95_request_latency_ms, 29.45);
    close(arm.mean_warm_turn_latency_ms, (496.0 - 48.0) / 28.0);
    close(arm.total_wall_seconds, 0.496);
    close(arm.elapsed_seconds, 150.0);
    // Turn 2 of the four trajectories: 1, 9, 17, 25.
    close(arm.turns[1].mean_request_latency_ms, 13.0);
    assert_eq!(arm.turns[1].turn, 2);

    // Fifty times as fast as real: reported times are the simulated ones.
    let arm = ArmReport::new(&run, 1, 0.02);
    close(arm.mean_request_latency_ms, 775.0);
    close(arm.total_wall_seconds, 24.8);
    close(arm.elapsed_seconds, 7500.0);
}

#[test]
fn percentiles_interpolate() {
    assert_eq!(percentile(&[], 0.5), 0.0);
    assert_eq!(percentile(&[3.0], 0.95), 3.0);
    assert_eq!(percentile(&[1.0, 2.0], 0.5), 1.5);
    assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.5), 3.0);
    assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], 1.0), 5.0);
}

#[test]
fn lifts_speedup_and_minima() {
    let report = sample();
    let without = 4.0 * 6143.0 / 172_004.0;
    assert_eq!(report.arms.no_affinity.reusable_prefix_hit_rate, without);
    assert_eq!(report.absolute_reusable_prefix_hit_rate_lift, 1.0 - without);
    assert_eq!(
        report.absolute_overall_input_cache_hit_rate_lift,
        (172_004.0 / 188_416.0) - (4.0 * 6143.0 / 188_416.0)
    );
    let mean_without = (6.0 * 4700.0 + 4400.0) / 7.0;
    assert!((report.warm_turn_latency_speedup - mean_without / 4400.0).abs() < 1e-12);
    assert!((report.warm_turn_latency_reduction - (1.0 - 4400.0 / mean_without)).abs() < 1e-12);
    assert!(report.check_equal_work().is_ok());

    assert_eq!(report.check(None, None), Ok(()));
    assert_eq!(report.check(Some(1.0), Some(0.85)), Ok(()));
    let missed = report.check(Some(1.01), Some(0.99)).unwrap_err();
    assert_eq!(missed.misses.len(), 2, "{missed}");
    assert_eq!(
        report
            .check(Some(1.0), Some(0.99))
            .unwrap_err()
            .misses
            .len(),
        1
    );
    assert!(report.check(Some(f64::NAN), None).is_err());
}

#[test]
fn unequal_work_is_found_and_noted() {
    let with = origin(|_, _, r| r, |_, _| 1);
    let mut without = origin(|_, _, _| 0, |_, _| 1);
    without.trajectories[3][7].output_tokens = 500;
    without.trajectories[0][1].retries = 2;
    without.trajectories[0][2].wrong_rank = true;
    let report = Report::new(workload(4, 8), fleet(1), &without, &with, Vec::new());
    assert!(report.check_equal_work().is_err());
    assert_eq!(report.notes.len(), 3, "{:?}", report.notes);
}

#[test]
fn placement() {
    let mut run = origin(|_, _, r| r, |_, _| 1);
    run.trajectories[1][7].place = Place {
        replica: "r0".to_owned(),
        rank: 1,
    };
    let placement = ArmReport::new(&run, 1, 1.0).placement;
    assert_eq!(placement.distinct_replicas, 4);
    assert_eq!(placement.distinct_ranks, 5);
    let counts: Vec<u64> = placement.counts.iter().map(|c| c.turns).collect();
    assert_eq!(counts, [8, 1, 7, 8, 8]);
    let moved = &placement.trajectories[1];
    assert_eq!(moved.distinct_replicas, 2);
    assert_eq!(moved.turns.len(), 8);
    assert_eq!(placement.trajectories[0].distinct_replicas, 1);
}

#[test]
fn the_json_has_the_origins_fields_and_reads_back() {
    let report = sample();
    let json = serde_json::to_value(&report).unwrap();
    for field in [
        "replicas",
        "absolute_reusable_prefix_hit_rate_lift",
        "absolute_overall_input_cache_hit_rate_lift",
        "warm_turn_latency_speedup",
        "warm_turn_latency_reduction",
        "time_scale",
    ] {
        assert!(json[field].is_number(), "{field}");
    }
    for arm in ["no_affinity", "affinity"] {
        for field in [
            "trajectories",
            "reusable_prefix_tokens",
            "reusable_cache_hit_tokens",
            "reusable_prefix_hit_rate",
            "all_prompt_tokens",
            "all_prompt_cache_hit_tokens",
            "overall_input_cache_hit_rate",
            "full_hit_turns",
            "measured_turns",
            "mean_request_latency_ms",
            "p50_request_latency_ms",
            "p95_request_latency_ms",
            "mean_warm_turn_latency_ms",
            "total_wall_seconds",
            "elapsed_seconds",
        ] {
            assert!(json["arms"][arm][field].is_number(), "{arm}.{field}");
        }
        let place = &json["arms"][arm]["placement"]["trajectories"][0];
        assert_eq!(place["turns"][0]["replica"], "r0");
        assert_eq!(place["counts"][0]["turns"], 8);
    }
    let text = serde_json::to_string(&report).unwrap();
    let back: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(back.workload, report.workload);
    assert_eq!(back.arms.affinity.placement, report.arms.affinity.placement);
    // The parser may be off by the last bit of a number.
    let (a, b) = (&back.arms.affinity, &report.arms.affinity);
    assert!((a.overall_input_cache_hit_rate - b.overall_input_cache_hit_rate).abs() < 1e-12);
}
