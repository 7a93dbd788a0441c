//! `berth purge`: removes what is kept of a tenant.

use serde_json::json;

use super::operator::{self, Connection};
use crate::proto::PurgeTenantRequest;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose results and pins are removed.
    #[arg(long)]
    tenant: String,
    /// One JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output. A tenant
/// of which nothing is kept is one, and one that is at work.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.open()?;
    let mut client = operator.client.clone();
    let request = PurgeTenantRequest {
        tenant: args.tenant,
    };
    let gone = operator.call(client.purge_tenant(request)).await?;
    if args.json {
        let document = json!({
            "keys": gone.keys,
            "bytes": gone.bytes,
            "pins": gone.pins,
            "kept": gone.kept,
        });
        operator::print_json(&document, false)?;
        return Ok(());
    }
    let mut text = format!(
        "removed {} keys ({} bytes) and {} pins\n",
        gone.keys, gone.bytes, gone.pins
    );
    if gone.kept > 0 {
        text.push_str(&format!(
            "{} keys stay: their generations began meanwhile; repeat this\n",
            gone.kept
        ));
    }
    super::print(&text)?;
    Ok(())
}
