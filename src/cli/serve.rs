//! `berth serve`: the control plane.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::CommandFactory;

use super::operator::usage;
use crate::{
    auth::Guard,
    config::{Config, Options, unknown_variables},
    failpoint,
    listen::descriptors,
    server::{Server, drain_on_signals},
    telemetry::logs::Logs,
};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A TOML file with any of these options, as `max-pins = 1000`. What flags or
    /// environment say goes before it.
    #[arg(long, env = "BERTH_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration, print what it comes to, and end.
    #[arg(long)]
    check_config: bool,

    #[command(flatten)]
    options: Options,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// A configuration that is not usable, a store that cannot be opened, a port
/// that cannot be bound.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let mut config = configured(args.config.as_deref(), args.options).map_err(usage)?;
    if args.check_config {
        println!("{config:#?}");
        return Ok(());
    }
    let logs = Logs::init(config.log_format, &config.log, config.otlp.as_ref())?;
    config.spans = logs.spans();
    if let Ok(said) = std::env::var(failpoint::VARIABLE) {
        failpoint::arm(&said).map_err(anyhow::Error::msg)?;
    }
    descriptors::raise(config.limits.connections.all);
    let server = Server::start(config).await?;
    drain_on_signals(server.drain_token())?;
    let ended = server.ended().await;
    logs.flush().await;
    ended
}

/// What file, environment and flags come to.
fn configured(file: Option<&Path>, options: Options) -> anyhow::Result<Config> {
    let unknown = unknown_variables(std::env::vars().map(|(name, _)| name), &known_variables());
    if !unknown.is_empty() {
        bail!(
            "unknown environment variables: {} (see `berth serve --help`)",
            unknown.join(", ")
        );
    }
    let file = file.map(Options::from_file).transpose()?;
    let options = options.or(file.unwrap_or_default());
    Config::resolve_with(options, |config| Guard::faults(&config.auth))
}

/// The variables that any subcommand knows.
fn known_variables() -> Vec<String> {
    fn collect(command: &clap::Command, into: &mut Vec<String>) {
        into.extend(
            command
                .get_arguments()
                .filter_map(|a| a.get_env())
                .map(|name| name.to_string_lossy().into_owned()),
        );
        command.get_subcommands().for_each(|c| collect(c, into));
    }
    // For tests that kill: no option, so not in the help.
    let mut known = vec![failpoint::VARIABLE.to_owned()];
    collect(&super::Cli::command(), &mut known);
    known
}
