//! `berth sim-engine`.

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs it.
///
/// # Errors
/// What stops it.
pub async fn run(_args: Args) -> anyhow::Result<()> {
    Ok(())
}
