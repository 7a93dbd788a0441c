//! `berth drain REPLICA`: prepares a replica to leave.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::operator::{self, Connection, Failure, Operator, in_flight, json, seconds, table};
use crate::{
    fleet::drain::MAX_GRACE,
    proto::{DrainReplicaRequest, GetReplicaRequest, Replica, ReplicaHealth},
};

/// Between looks while it waits.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Beyond what clocks can count nobody waits.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Looks in a row that must see nothing left: a choice that was made the moment
/// before one is seen by the next.
const CONFIRMED: u32 = 2;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its id, as `berth replicas` shows it.
    replica: String,
    /// How long trajectories that live there may take more turns there; 0s: they
    /// move at their next turn. At most 24h. Default: the server's.
    #[arg(long, value_name = "TIME", value_parser = grace)]
    grace: Option<Duration>,
    /// Drain the next start of the replica as well, until `berth resume`. Without,
    /// a restart of the engine ends the drain.
    #[arg(long)]
    hold: bool,
    /// Drain it even where nobody else takes new work for what it serves.
    #[arg(long)]
    force: bool,
    /// Wait until nothing is in flight there and no trajectory will come back, so
    /// that the engine can be stopped; at most so long [without a value: 10min].
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "10min", value_parser = humantime::parse_duration)]
    wait: Option<Duration>,
    /// The replica as one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

fn grace(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(grace) if grace <= MAX_GRACE => Ok(grace),
        Ok(_) => Err("must be at most 24h".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.open()?;
    let grace = args
        .grace
        .map(prost_types::Duration::try_from)
        .transpose()
        .map_err(|_| Failure::new(Failure::USAGE, "--grace must be at most 24h"))?;
    let request = DrainReplicaRequest {
        replica_id: args.replica.clone(),
        grace,
        hold: args.hold,
        allow_last: args.force,
    };
    let mut client = operator.client.clone();
    let answer = operator.call(client.drain_replica(request)).await?;
    let mut replica = operator::some(answer.replica)?;
    if let Some(limit) = args.wait {
        replica = wait(&operator, &args.replica, limit).await?;
    }
    show(&replica, args.json)?;
    Ok(())
}

/// Tells how it stands: as one JSON document, or in one line.
pub(super) fn show(replica: &Replica, as_json: bool) -> std::io::Result<()> {
    if as_json {
        operator::print_json(&json::replica(replica), false)
    } else {
        super::print(&format!("{}\n", table::plain(&line(replica))))
    }
}

fn line(replica: &Replica) -> String {
    format!(
        "{} is {}: {}; {} in flight",
        replica.replica_id,
        operator::health(replica),
        replica.health_reason,
        in_flight(replica)
    )
}

/// What a look says of a replica that is to leave.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    /// Nothing is there, and nothing will come.
    Nothing,
    /// Turns in flight, or trajectories that may come back.
    Some,
    /// Somebody ended the drain, or a new start serves.
    Undrained,
}

fn left(replica: &Replica) -> Left {
    if replica.health() == ReplicaHealth::Dead {
        return Left::Nothing;
    }
    let Some(drain) = &replica.drain else {
        return Left::Undrained;
    };
    let over = seconds(drain.grace_left.as_ref()) <= 0.0;
    let nobody = replica.ranks.iter().all(|rank| rank.live_pins == 0);
    if in_flight(replica) == 0 && (over || nobody) {
        Left::Nothing
    } else {
        Left::Some
    }
}

async fn wait(operator: &Operator, id: &str, limit: Duration) -> Result<Replica, Failure> {
    let deadline = Instant::now() + limit.min(LONGEST_WAIT);
    let mut confirmed = 0;
    loop {
        let mut client = operator.client.clone();
        let request = GetReplicaRequest {
            replica_id: id.to_owned(),
        };
        let answer = operator.call(client.get_replica(request)).await?;
        let replica = operator::some(answer.replica)?;
        match left(&replica) {
            Left::Nothing => confirmed += 1,
            Left::Some => confirmed = 0,
            Left::Undrained => {
                let message = format!(
                    "{id} is not drained any more: somebody has resumed it, or a new start of it \
                     serves (--hold drains that as well)"
                );
                return Err(Failure::new(Failure::REFUSED, message));
            }
        }
        if confirmed >= CONFIRMED {
            return Ok(replica);
        }
        if Instant::now() >= deadline {
            let message = format!("it still drains after {limit:?}: {}", line(&replica));
            return Err(Failure::new(Failure::LATE, message));
        }
        sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Drain, FleetRank};

    fn replica(grace: Option<i64>, pins: u64, in_flight: u64) -> Replica {
        Replica {
            health: ReplicaHealth::Draining.into(),
            drain: grace.map(|seconds| Drain {
                grace_left: Some(prost_types::Duration { seconds, nanos: 0 }),
                ..Drain::default()
            }),
            ranks: vec![
                FleetRank::default(),
                FleetRank {
                    live_pins: pins,
                    in_flight,
                    ..FleetRank::default()
                },
            ],
            ..Replica::default()
        }
    }

    #[test]
    fn when_nothing_is_left() {
        assert_eq!(
            left(&replica(Some(5), 1, 0)),
            Left::Some,
            "it may come back"
        );
        assert_eq!(left(&replica(Some(5), 0, 0)), Left::Nothing);
        assert_eq!(left(&replica(Some(0), 1, 0)), Left::Nothing, "it moves");
        assert_eq!(left(&replica(Some(0), 0, 1)), Left::Some);
        assert_eq!(left(&replica(None, 0, 0)), Left::Undrained);
        let mut dead = replica(None, 1, 1);
        dead.health = ReplicaHealth::Dead.into();
        assert_eq!(left(&dead), Left::Nothing);
    }
}
