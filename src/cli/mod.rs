//! The subcommands of `berth`, one file each.

pub mod bench;
pub mod demo;
pub mod drain;
pub mod explain;
mod operator;
pub mod pin;
pub mod purge;
pub mod replica;
pub mod replicas;
pub mod resume;
pub mod serve;
pub mod sidecar;
pub mod sim_engine;
pub mod simulate;
pub mod stats;
pub mod token;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

/// Routes LLM sampling for reinforcement learning: every trajectory to the rank
/// that holds its KV cache, every idempotency key generated once.
#[derive(Debug, Parser)]
#[command(name = "berth", version, about)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the control plane.
    Serve(Box<serve::Args>),
    /// Run beside an engine: register it, report its health, drain it.
    Sidecar(sidecar::Args),
    /// Run a simulated engine that speaks SGLang's or vLLM's HTTP.
    SimEngine(sim_engine::Args),
    /// The control plane, eight simulated H100 replicas and the ablation, in one go.
    Demo(demo::Args),
    /// Measure a running control plane.
    Bench(bench::Args),
    /// Show what runs where, and how it is.
    Replicas(replicas::Args),
    /// Show all that is known of one replica.
    Replica(replica::Args),
    /// Prepare a replica to leave: no new keys, and those that live there move
    /// once the grace is over.
    Drain(drain::Args),
    /// End a drain.
    Resume(resume::Args),
    /// Show where a trajectory lives.
    Pin(pin::Args),
    /// Show where a request would go now, and why no other rank gets it.
    Explain(explain::Args),
    /// Show what happened since the control plane's start.
    Stats(stats::Args),
    /// Remove what is kept of a tenant.
    Purge(purge::Args),
    /// Make a token for a caller, and the line by which the control plane knows it.
    Token(token::Args),
    /// Compare routing policies on a trace, in virtual time.
    Simulate(Box<simulate::Args>),
}

impl Cli {
    /// Runs the subcommand to its end. What it fails with is printed, and said by
    /// the exit code: an operator's command says why, others fail with 1.
    pub async fn run(self) -> ExitCode {
        operator::report(self.end().await)
    }

    async fn end(self) -> anyhow::Result<()> {
        match self.command {
            Command::Serve(args) => serve::run(*args).await,
            Command::Sidecar(args) => sidecar::run(args).await,
            Command::SimEngine(args) => sim_engine::run(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Bench(args) => bench::run(args).await,
            Command::Replicas(args) => replicas::run(args).await,
            Command::Replica(args) => replica::run(args).await,
            Command::Drain(args) => drain::run(args).await,
            Command::Resume(args) => resume::run(args).await,
            Command::Pin(args) => pin::run(args).await,
            Command::Explain(args) => explain::run(args).await,
            Command::Stats(args) => stats::run(args).await,
            Command::Purge(args) => purge::run(args).await,
            Command::Token(args) => token::run(&args),
            Command::Simulate(args) => simulate::run(*args).await,
        }
    }
}

/// `print!` panics where the reader of a pipe has gone.
fn print(text: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Makes the folder that `--out` names.
fn make(out: &std::path::Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("--out: cannot make {}", out.display()))
}

/// Logging of the subcommands that run beside an engine.
#[derive(Debug, clap::Args)]
struct LogArgs {
    /// Log format.
    #[arg(long, env = "BERTH_LOG_FORMAT", value_enum, default_value = "human")]
    log_format: crate::config::LogFormat,
    /// What to log, as tracing's filters are written.
    #[arg(long, env = "BERTH_LOG", default_value = "info")]
    log: String,
}

impl LogArgs {
    /// Sets up logging of a subcommand, once for the process, to standard error.
    ///
    /// # Errors
    /// When the filter is none.
    fn init(&self) -> anyhow::Result<()> {
        if !crate::telemetry::logs::is_filter(&self.log) {
            let fault = anyhow::anyhow!(
                "--log (BERTH_LOG): {:?} is no filter as \"info\" or \"berth=debug\"",
                self.log
            );
            return Err(operator::usage(fault));
        }
        // Without a collector there is nothing to flush.
        let _ = crate::telemetry::logs::Logs::init(self.log_format, &self.log, None)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_options_of_all_subcommands_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wait_without_a_time_does_not_swallow_the_replica() {
        assert!(Cli::try_parse_from(["berth", "drain", "--wait", "r"]).is_ok());
        assert!(Cli::try_parse_from(["berth", "drain", "--wait=5s", "r"]).is_ok());
        assert!(Cli::try_parse_from(["berth", "drain", "--wait=soon", "r"]).is_err());
    }
}
