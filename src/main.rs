//! Argument parsing, nothing else.

use std::process::ExitCode;

use berth::cli::Cli;
use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
