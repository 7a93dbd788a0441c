//! Argument parsing, nothing else.

use std::process::ExitCode;

use berth::cli::Cli;
use clap::Parser;

/// Gives back to the system what a flood of connections took, most of which glibc's
/// keeps.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
