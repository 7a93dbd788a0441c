//! Argument parsing, nothing else.

use std::process::ExitCode;

use berth::cli::Cli;
use clap::Parser;

/// Gives memory back to the system, which glibc keeps after a flood is over.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    Cli::parse().run().await
}
