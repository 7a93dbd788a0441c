//! The origin's ablation, small and large, without waiting for simulated time.

use berth::{
    engine::sim::SimConfig,
    harness::{self, AffinityBench, Report, affinity::Baseline, progress::Silent},
};

use crate::cluster::{Cluster, instant};

async fn run(cluster: &Cluster, bench: AffinityBench) -> Report {
    let bench = AffinityBench {
        control_plane: cluster.playground.url(),
        ..bench
    };
    harness::run(bench, Silent).await.unwrap()
}

#[tokio::test]
async fn the_origins_ablation_comes_out_to_the_digit() {
    let cluster = Cluster::start(8, instant()).await;
    let bench = AffinityBench {
        replicas: Some(8),
        run_id: Some("pinned".to_owned()),
        ..AffinityBench::default()
    };
    let report = run(&cluster, bench).await;
    let with = &report.arms.affinity;
    assert_eq!(with.all_prompt_tokens, 188_416);
    assert_eq!(with.all_prompt_cache_hit_tokens, 172_004);
    assert_eq!((with.full_hit_turns, with.measured_turns), (28, 28));
    assert!((with.reusable_prefix_hit_rate - 1.0).abs() < 1e-12);
    assert!((with.overall_input_cache_hit_rate - 0.9129).abs() < 1e-4);
    assert_eq!(with.placement.distinct_replicas, 4);
    for trajectory in &with.placement.trajectories {
        assert_eq!(trajectory.counts.len(), 1, "one rank for all turns");
    }
    cluster.stop().await;
}

/// Twenty repeatable runs: the random choice follows the request ids, which
/// follow from the run ids.
#[tokio::test]
async fn the_random_baseline_averages_what_chance_expects() {
    let cluster = Cluster::start(
        8,
        SimConfig {
            history: 64,
            ..instant()
        },
    )
    .await;
    let (mut reusable, mut hit, mut all, mut all_hit) = (0, 0, 0, 0);
    for seed in 0..20 {
        let bench = AffinityBench {
            seed,
            run_id: Some(format!("chance-{seed}")),
            baseline: Baseline::Random,
            // Lengths scale out of the rates; shorter ones are quicker.
            initial_prompt_tokens: 128,
            output_tokens: 16,
            concurrency: 4,
            ..AffinityBench::default()
        };
        let arm = run(&cluster, bench).await.arms.no_affinity;
        reusable += arm.reusable_prefix_tokens;
        hit += arm.reusable_cache_hit_tokens;
        all += arm.all_prompt_tokens;
        all_hit += arm.all_prompt_cache_hit_tokens;
    }
    let (reusable, cold) = (hit as f64 / reusable as f64, all_hit as f64 / all as f64);
    println!("reusable {reusable:.4}, cold-inclusive {cold:.4}");
    assert!((reusable - 0.366).abs() < 0.03, "reusable {reusable}");
    assert!((cold - 0.334).abs() < 0.03, "cold-inclusive {cold}");
    cluster.stop().await;
}
