//! `berth demo`: everything in one process, and the ablation that the project
//! started from.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::{make, operator::usage};
use crate::{
    engine::sim::SimConfig,
    harness::{
        self, AffinityBench,
        affinity::Baseline,
        playground::{self, Playground},
        progress::Bar,
    },
};

/// Replicas of one H100 each, as in the origin.
const REPLICAS: u32 = 8;

/// Slower ones nobody waits for.
const MAX_SCALE: f64 = 1000.0;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder for report.json and chart.svg.
    #[arg(long, default_value = "berth-demo")]
    out: PathBuf,
    /// Seconds that one second of the simulated engines takes. Reported times are
    /// simulated seconds.
    #[arg(long, default_value_t = 0.1)]
    time_scale: f64,
    /// Routing of the arm without affinity.
    #[arg(long, value_enum, default_value_t = Baseline::Random)]
    baseline: Baseline,
    /// Seed of the prompts.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Runs it.
///
/// # Errors
/// What stops it.
pub async fn run(args: Args) -> anyhow::Result<()> {
    if !(args.time_scale.is_finite() && args.time_scale > 0.0 && args.time_scale <= MAX_SCALE) {
        let fault = anyhow!("--time-scale: must be a number above 0 and at most {MAX_SCALE}");
        return Err(usage(fault));
    }
    make(&args.out)?;
    let store = args.out.join("store");
    remove(&store)?;
    let result = ablation(&args, &store).await;
    // The store of a demo is of no use to anybody afterwards.
    remove(&store)?;
    result
}

async fn ablation(args: &Args, store: &Path) -> anyhow::Result<()> {
    println!(
        "Starting a control plane and {REPLICAS} simulated replicas of one H100 each \
         (Qwen3-8B, 1 s takes {} s) ...",
        args.time_scale
    );
    let config = playground::config(Some(store.to_owned()));
    let mut playground = Playground::start(config).await?;
    for i in 0..REPLICAS {
        let engine = SimConfig {
            time_scale: args.time_scale,
            incremental_streaming_output: true,
            ..SimConfig::default()
        };
        let h100 = playground::accelerator("NVIDIA H100 80GB HBM3", 81_559);
        playground.add(&format!("h100-{i}"), engine, h100).await?;
    }
    let bench = AffinityBench {
        control_plane: playground.url(),
        replicas: Some(REPLICAS),
        time_scale: args.time_scale,
        baseline: args.baseline,
        seed: args.seed,
        ..AffinityBench::default()
    };
    let report = harness::run(bench, Bar::new()).await?;
    println!("{}", report.table());
    report.write(&args.out)?;
    println!(
        "wrote {} and {}",
        args.out.join("report.json").display(),
        args.out.join("chart.svg").display()
    );
    playground.stop().await
}

fn remove(dir: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}
