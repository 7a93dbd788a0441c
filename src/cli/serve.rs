//! `berth serve`: the control plane.

use std::path::{Path, PathBuf};

use clap::CommandFactory;

use super::operator::usage;
use crate::{
    auth::Files,
    config::{Config, Found, Options, file, unknown_variables, unusable},
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

    /// Check the configuration, print what it comes to as such a file has it, and end.
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
    let configured = configured(args.config.as_deref(), args.options);
    let (mut config, files) = configured.map_err(usage)?;
    if args.check_config {
        return Ok(super::print(&config.shown())?);
    }
    let logs = Logs::init(config.log_format, &config.log, config.otlp.as_ref())?;
    config.spans = logs.spans();
    if let Ok(said) = std::env::var(failpoint::VARIABLE) {
        failpoint::arm(&said).map_err(anyhow::Error::msg)?;
    }
    descriptors::raise(config.limits.connections.all);
    let server = Server::start_with(config, files).await?;
    drain_on_signals(server.drain_token())?;
    let ended = server.ended().await;
    logs.flush().await;
    ended
}

/// What file, environment and flags come to, and what the files that they name hold.
fn configured(file: Option<&Path>, options: Options) -> anyhow::Result<(Config, Files)> {
    let unknown = unknown_variables(std::env::vars().map(|(name, _)| name), &known_variables());
    let unknown = unknown.iter().map(|name| {
        format!("{name}: is no option's environment variable (see `berth serve --help`)")
    });
    let mut faults: Vec<String> = unknown.collect();
    let (from_file, found) = match file.map(file::read).transpose() {
        Ok(read) => read.unwrap_or_default(),
        Err(fault) => {
            // What the options come to is not known.
            faults.push(fault);
            return Err(unusable(&faults));
        }
    };
    faults.extend(found.faults);
    let found = Found { faults, ..found };
    Config::resolve_with(options.or(from_file), found, |config| {
        Files::read(&config.auth)
    })
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
