//! `berth resume REPLICA`: ends a drain.

use super::{
    drain::show,
    operator::{self, Connection, Failure},
};
use crate::proto::ResumeReplicaRequest;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its id, as `berth replicas` shows it.
    replica: String,
    /// The replica as one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output. A
/// drain of the sidecar's own, which goes on, is one.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.open()?;
    let mut client = operator.client.clone();
    let request = ResumeReplicaRequest {
        replica_id: args.replica,
    };
    let answer = operator.call(client.resume_replica(request)).await?;
    let replica = operator::some(answer.replica)?;
    show(&replica, args.json)?;
    if replica.drain.is_some() {
        let message = format!(
            "{} goes on draining by its sidecar's own will: its process or its engine was told to \
             end; start it anew to have it back",
            replica.replica_id
        );
        return Err(Failure::new(Failure::REFUSED, message).into());
    }
    Ok(())
}
