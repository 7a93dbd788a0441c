//! `berth pin KEY`: where a trajectory lives.

use super::operator::{self, Connection, Failure, json, seconds, table};
use crate::proto::GetPinRequest;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trajectory's cache_affinity_key.
    key: String,
    /// Its model; may be left out where one is served.
    #[arg(long)]
    model: Option<String>,
    /// Its LoRA adapter.
    #[arg(long)]
    adapter: Option<String>,
    /// Whose key it is [default: the caller's own tenant].
    #[arg(long)]
    tenant: Option<String>,
    /// One JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output. A key
/// without a pin is one.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.open()?;
    let mut client = operator.client.clone();
    let request = GetPinRequest {
        model: args.model,
        adapter: args.adapter,
        cache_affinity_key: args.key,
        tenant: args.tenant,
    };
    let answer = operator.call(client.get_pin(request)).await?;
    let Some(pin) = answer.pin else {
        let message = "this key has no pin: it was never used, is finished or forgotten, or its \
                       rank is gone; its next turn is placed anew";
        return Err(Failure::new(Failure::NOT_FOUND, message).into());
    };
    if args.json {
        operator::print_json(&json::pin(&pin), false)?;
        return Ok(());
    }
    let row = vec![
        pin.replica_id.clone(),
        pin.incarnation.to_string(),
        pin.rank.to_string(),
        pin.tokens.to_string(),
        format!("{:.1}s", seconds(pin.idle.as_ref())),
        if pin.live { "yes" } else { "no" }.to_owned(),
    ];
    let head = ["REPLICA", "START", "RANK", "TOKENS", "IDLE", "LIVE"];
    super::print(&table::render(&head, &[row]))?;
    Ok(())
}
