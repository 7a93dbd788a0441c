//! Argument parsing, nothing else.

use berth::cli::Cli;
use clap::Parser;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    Cli::parse().run().await
}
