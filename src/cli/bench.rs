//! `berth bench`: measures a running control plane through its public API.

use std::{path::PathBuf, time::Duration};

use clap::Subcommand;

use super::{make, operator::usage};
use crate::{
    auth::client::Access,
    harness::{
        self, AffinityBench,
        affinity::{ArmOrder, Baseline},
        progress::Bar,
    },
};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The ablation of cache affinity: one multi-turn workload with affinity
    /// keys and without, and what the difference is.
    Affinity(Box<AffinityArgs>),
}

/// `berth bench affinity`.
#[derive(Debug, clap::Args)]
struct AffinityArgs {
    /// gRPC address of the control plane.
    #[arg(
        long,
        env = "BERTH_CONTROL_PLANE",
        default_value = "http://127.0.0.1:7700"
    )]
    control_plane: String,
    #[command(flatten)]
    access: Access,
    /// Model to sample from; may be left out where one is served.
    #[arg(long)]
    model: Option<String>,
    /// Replicas that must be healthy and distinct before the first request, no
    /// fewer and no more [default: however many are, at least 1].
    #[arg(long)]
    replicas: Option<u32>,
    /// How long to wait for them.
    #[arg(long, default_value = "2min", value_parser = humantime::parse_duration)]
    wait: Duration,
    /// Trajectories in each arm.
    #[arg(long, default_value_t = 4)]
    trajectories: u32,
    /// Turns of each trajectory, at least 2.
    #[arg(long, default_value_t = 8)]
    turns: u32,
    /// Random tokens in the first turn's prompt.
    #[arg(long, default_value_t = 4096)]
    initial_prompt_tokens: u32,
    /// Tokens to generate in each turn.
    #[arg(long, default_value_t = 512)]
    output_tokens: u32,
    /// Random tokens appended after each turn's output, as an environment would.
    #[arg(long, default_value_t = 0)]
    new_tokens_per_turn: u32,
    /// Generate exactly --output-tokens, past any end of sequence (the default):
    /// both arms then do equal work.
    #[arg(long, overrides_with = "no_ignore_eos")]
    ignore_eos: bool,
    /// Let a generation end by itself. The arms may then do unequal work, and
    /// the report says so.
    #[arg(long)]
    no_ignore_eos: bool,
    /// Trajectories in flight at once; the turns of each stay in order.
    #[arg(long, default_value_t = 1)]
    concurrency: u32,
    /// Routing of the arm without affinity.
    #[arg(long, value_enum, default_value_t = Baseline::Random)]
    baseline: Baseline,
    /// Which arm runs first.
    #[arg(long, value_enum, default_value_t = ArmOrder::NoAffinityFirst)]
    arm_order: ArmOrder,
    /// Fail when the affinity arm's reusable-prefix hit rate is below this
    /// fraction.
    #[arg(long, value_parser = fraction)]
    min_hit_rate: Option<f64>,
    /// Fail when that rate less the baseline's is below this fraction.
    #[arg(long, value_parser = fraction)]
    min_lift: Option<f64>,
    /// Seed of prompts and sampling, together with the run id.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Name of the run in all prompts and keys [default: random]. With the same
    /// one and the same seed a run can be repeated on a fresh control plane.
    #[arg(long)]
    run_id: Option<String>,
    /// Bound of one request with its retries.
    #[arg(long, default_value = "10min", value_parser = humantime::parse_duration)]
    request_timeout: Duration,
    /// Measured seconds that one simulated second takes: below 1 for simulated
    /// engines that run fast. Reported times are divided by it.
    #[arg(long, default_value_t = 1.0)]
    time_scale: f64,
    /// Directory for report.json and chart.svg; made if need be.
    #[arg(long)]
    out: Option<PathBuf>,
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a fraction from 0 to 1".to_owned()),
    }
}

/// Runs it.
///
/// # Errors
/// What stops it, and a result below a minimum that was asked for.
pub async fn run(args: Args) -> anyhow::Result<()> {
    match args.what {
        What::Affinity(args) => affinity(*args).await,
    }
}

async fn affinity(args: AffinityArgs) -> anyhow::Result<()> {
    let bench = AffinityBench {
        control_plane: args.control_plane,
        access: args.access,
        model: args.model,
        replicas: args.replicas,
        wait: args.wait,
        trajectories: args.trajectories,
        turns: args.turns,
        initial_prompt_tokens: args.initial_prompt_tokens,
        output_tokens: args.output_tokens,
        new_tokens_per_turn: args.new_tokens_per_turn,
        ignore_eos: !args.no_ignore_eos,
        concurrency: args.concurrency,
        baseline: args.baseline,
        arm_order: args.arm_order,
        seed: args.seed,
        run_id: args.run_id,
        request_timeout: args.request_timeout,
        time_scale: args.time_scale,
    };
    bench.check().map_err(usage)?;
    // Before minutes of measuring, not after.
    if let Some(dir) = &args.out {
        make(dir)?;
    }
    let report = harness::run(bench, Bar::new()).await?;
    super::print(&report.table())?;
    if let Some(dir) = &args.out {
        report.write(dir)?;
        super::print(&format!(
            "wrote {} and {}\n",
            dir.join("report.json").display(),
            dir.join("chart.svg").display()
        ))?;
    }
    report.check(args.min_hit_rate, args.min_lift)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<AffinityArgs, clap::Error> {
        let words = ["bench", "affinity"].into_iter().chain(line.split(' '));
        let What::Affinity(args) = Cli::try_parse_from(words.filter(|w| !w.is_empty()))?
            .args
            .what;
        Ok(*args)
    }

    #[test]
    fn options() {
        Cli::command().debug_assert();
        let args = parse("").unwrap();
        assert!(!args.no_ignore_eos);
        assert_eq!((args.trajectories, args.turns), (4, 8));
        assert_eq!(args.wait, Duration::from_secs(120));

        assert!(parse("--no-ignore-eos").unwrap().no_ignore_eos);
        assert!(!parse("--no-ignore-eos --ignore-eos").unwrap().no_ignore_eos);
        let args = parse("--baseline least_loaded --min-hit-rate 0.9 --min-lift 0.5").unwrap();
        assert_eq!(args.baseline, Baseline::LeastLoaded);
        assert_eq!((args.min_hit_rate, args.min_lift), (Some(0.9), Some(0.5)));
        // Percent where a fraction is wanted.
        assert!(parse("--min-hit-rate 91").is_err());
        assert!(parse("--min-lift nan").is_err());
    }
}
