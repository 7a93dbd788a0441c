//! `berth simulate`: routing policies compared on a trace, in virtual time.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};

use super::operator::usage;
use crate::{
    engine::sim::{Profile, SimConfig},
    simulate::{
        self, Arrival, Policy, Setup, Shape,
        events::{self, Event},
        generate::Workload,
        read,
        trace::Trace,
    },
};

/// Bytes of a file of events at most.
const MAX_EVENTS: u64 = 1 << 20;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A trace: `session in out reuse think` a line, or the JSON lines with
    /// `hash_ids` of the Mooncake traces. `-` reads standard input.
    #[arg(long, required_unless_present = "workload")]
    trace: Option<PathBuf>,
    /// A made workload instead of a trace.
    #[arg(long, value_enum, conflicts_with = "trace")]
    workload: Option<Workload>,
    /// Sessions to take from the trace or to make (groups of 8, for grpo)
    /// [default: all, or the workload's own number].
    #[arg(long)]
    sessions: Option<NonZeroUsize>,
    /// Makes all prompts so many times as long; outputs stay.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    scale: u32,
    /// Policies, separated by commas: affinity, bounded_hash (or
    /// bounded_hash:FACTOR), hash, kv_admission (or kv_admission:SHARE), moves (or
    /// moves:PER_MINUTE), prefix, round_robin, random, least_loaded [default: all].
    #[arg(long, value_delimiter = ',')]
    policies: Vec<Policy>,
    /// Replicas.
    #[arg(long, default_value_t = 8)]
    replicas: usize,
    /// Data-parallel ranks of each replica.
    #[arg(long, default_value_t = 1)]
    ranks: usize,
    /// Times of a step, and KV tokens of a rank.
    #[arg(long, value_enum, default_value_t = Profile::H100)]
    accelerator: Profile,
    /// KV tokens of a rank [default: the accelerator's].
    #[arg(long)]
    kv_tokens: Option<usize>,
    /// Tokens of a cache page.
    #[arg(long, default_value_t = 1)]
    page_size: usize,
    /// Requests that a rank runs at once.
    #[arg(long, default_value_t = 256)]
    max_running: usize,
    /// Prompt tokens that a rank computes in one step.
    #[arg(long, default_value_t = 8192)]
    chunk: usize,
    /// Time between the starts of two sessions [default: 250ms, or as the trace
    /// says].
    #[arg(long, value_parser = humantime::parse_duration)]
    arrival: Option<Duration>,
    /// Sessions that are live at once: the next one starts when one ends.
    #[arg(long, conflicts_with = "arrival")]
    live: Option<NonZeroUsize>,
    /// An event, such as "600s die 3", "900s return 3", "100s drain 2 grace 30s"
    /// or "300s weights v2 pause 10s"; can be repeated.
    #[arg(long = "event", value_name = "EVENT")]
    events: Vec<Event>,
    /// A file of events, one a line.
    #[arg(long, value_name = "FILE")]
    events_file: Option<PathBuf>,
    /// Names sessions and requests, and draws made workloads.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Policies simulated at once [default: one for each processor].
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Print JSON instead of the table.
    #[arg(long)]
    json: bool,
    /// Directory for simulate.json and simulate.svg; made if need be.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Runs it.
///
/// # Errors
/// A trace, an event or an option that makes no sense, and a run without end.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let (json, out) = (args.json, args.out.clone());
    // Minutes of computing are no task for the runtime's own threads.
    let report = tokio::task::spawn_blocking(move || simulate(&args)).await??;
    if let Some(out) = &out {
        let written = report.write(out);
        written.with_context(|| format!("--out: cannot write into {}", out.display()))?;
    }
    super::print(&if json { report.json()? } else { report.table() })?;
    Ok(())
}

fn simulate(args: &Args) -> anyhow::Result<simulate::Report> {
    let trace = trace(args)?;
    let setup = setup(args, &trace)?;
    let mut policies = args.policies.clone();
    if policies.is_empty() {
        policies = Policy::all();
    }
    for (at, policy) in policies.iter().enumerate() {
        if policies[..at].iter().any(|p| p.name == policy.name) {
            let fault = anyhow!("--policies: {} is there twice", policy.name);
            return Err(usage(fault));
        }
    }
    let threads = args
        .threads
        .or_else(|| std::thread::available_parallelism().ok())
        .unwrap_or(NonZeroUsize::MIN);
    // What it is run with does not fit the trace.
    let fits = setup.check(&trace).map_err(anyhow::Error::msg);
    fits.map_err(usage)?;
    Ok(simulate::compare(&trace, &setup, &policies, threads)?)
}

fn trace(args: &Args) -> anyhow::Result<Trace> {
    let sessions = args.sessions.map(NonZeroUsize::get);
    let trace = match (&args.trace, args.workload) {
        (Some(path), _) => {
            let (name, input): (_, Box<dyn BufRead>) = if path == Path::new("-") {
                ("standard input".into(), Box::new(std::io::stdin().lock()))
            } else {
                let file = File::open(path)
                    .with_context(|| format!("--trace: cannot open {}", path.display()))
                    .map_err(usage)?;
                let name = path.file_name().unwrap_or(path.as_os_str());
                (name.to_string_lossy(), Box::new(BufReader::new(file)))
            };
            read::read(&name, input, sessions.unwrap_or(usize::MAX))
                .with_context(|| format!("the trace {}", path.display()))?
        }
        (None, Some(workload)) => workload.generate(sessions, args.seed),
        (None, None) => bail!("a trace or a workload is needed"),
    };
    let scaled = trace.scaled(args.scale).map_err(anyhow::Error::msg);
    scaled.context("--scale").map_err(usage)
}

fn setup(args: &Args, trace: &Trace) -> anyhow::Result<Setup> {
    let mut events = args.events.clone();
    if let Some(path) = &args.events_file {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_EVENTS).read_to_string(&mut text))
            .with_context(|| format!("--events-file: cannot read {}", path.display()))?;
        let more = events::parse(&text).map_err(anyhow::Error::msg);
        let more = more.with_context(|| format!("--events-file: {}", path.display()));
        events.extend(more.map_err(usage)?);
    }
    let engine = SimConfig {
        profile: args.accelerator,
        kv_tokens: args.kv_tokens,
        ..SimConfig::default()
    };
    let recorded = trace.sessions.iter().all(|s| s.starts.is_some());
    Ok(Setup {
        shape: Shape {
            replicas: args.replicas,
            ranks: args.ranks,
            accelerator: match args.accelerator {
                Profile::H100 => "NVIDIA H100 80GB HBM3",
                Profile::H200 => "NVIDIA H200",
                Profile::Instant => "no time",
            },
            kv_tokens: engine.kv_capacity(),
            page: args.page_size,
            max_running: args.max_running,
        },
        timing: engine.timing(),
        chunk: args.chunk,
        arrival: match (args.live, args.arrival) {
            (Some(live), _) => Arrival::Live(live.get()),
            (None, Some(gap)) => Arrival::Every(gap),
            (None, None) if recorded => Arrival::Recorded,
            (None, None) => Arrival::Every(Duration::from_millis(250)),
        },
        seed: args.seed,
        events,
    })
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

    fn parse(line: &[&str]) -> Result<Args, clap::Error> {
        let words = ["simulate"].iter().chain(line);
        Ok(Cli::try_parse_from(words)?.args)
    }

    #[test]
    fn options() {
        Cli::command().debug_assert();
        let args = parse(&["--workload", "ablation", "--event", "600s die 3"]).unwrap();
        let trace = trace(&args).unwrap();
        let setup = setup(&args, &trace).unwrap();
        assert_eq!(setup.arrival, Arrival::Every(Duration::from_millis(250)));
        assert_eq!((setup.shape.kv_tokens, setup.events.len()), (375_000, 1));
        let args = parse(&["--trace", "-", "--policies", "hash,bounded_hash:1.5"]).unwrap();
        assert_eq!(args.policies.len(), 2);
        for wrong in [
            &[][..],
            &["--trace", "a", "--workload", "grpo"],
            &["--workload", "grpo", "--live", "3", "--arrival", "1s"],
            &["--workload", "grpo", "--policies", "fastest"],
            &["--workload", "grpo", "--event", "later die 1"],
            &["--workload", "grpo", "--scale", "0"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
