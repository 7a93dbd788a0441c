//! `berth replica ID`: all that is known of one replica.

use super::{
    operator::{self, Connection, health, json, seconds, table},
    replicas::percent,
};
use crate::proto::{Capabilities, FleetRank, GetReplicaRequest, Replica};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its id, as `berth replicas` shows it.
    replica: String,
    /// One JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.open()?;
    let mut client = operator.client.clone();
    let request = GetReplicaRequest {
        replica_id: args.replica,
    };
    let answer = operator.call(client.get_replica(request)).await?;
    let replica = operator::some(answer.replica)?;
    if args.json {
        operator::print_json(&json::replica(&replica), false)?;
    } else {
        super::print(&page(&replica))?;
    }
    Ok(())
}

fn page(r: &Replica) -> String {
    // An engine on a CPU has none, and says so by an empty name.
    let named = r.accelerator.as_ref().filter(|a| !a.name.is_empty());
    let accelerator = named.map(|a| {
        let mebibytes = a.memory_bytes >> 20;
        format!("{} x {}, {mebibytes} MiB each", a.count, a.name)
    });
    let adapters = r.adapters.iter().map(|a| {
        let resident = if a.resident { "" } else { " (not in memory)" };
        format!("{}{resident}", a.name)
    });
    let mut labels: Vec<String> = r.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    labels.sort();
    let facts = [
        ("replica", r.replica_id.clone()),
        ("health", format!("{}: {}", health(r), r.health_reason)),
        ("start", format!("{} ({})", r.incarnation, r.boot_id)),
        (
            "registered",
            r.registered_at
                .as_ref()
                .map_or_else(String::new, ToString::to_string),
        ),
        (
            "last beat",
            format!("{:.1} s ago", seconds(r.heartbeat_age.as_ref())),
        ),
        ("endpoint", r.endpoint.clone()),
        (
            "engine",
            format!("{} {}", json::engine(r), r.engine_version),
        ),
        (
            "model",
            format!(
                "{} (context {}, vocabulary {}, page {})",
                r.model, r.context_length, r.vocab_size, r.page_size
            ),
        ),
        ("adapters", adapters.collect::<Vec<_>>().join(", ")),
        ("accelerator", accelerator.unwrap_or_default()),
        ("can", r.capabilities.as_ref().map_or_else(String::new, can)),
        ("labels", labels.join(" ")),
    ];
    let mut text = String::new();
    for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
        text.push_str(&format!("{name:<12} {}\n", table::plain(value)));
    }
    text.push('\n');
    let draining = r.drain.is_some();
    let rows: Vec<Vec<String>> = r.ranks.iter().map(|rank| row(rank, draining)).collect();
    let head = [
        "RANK",
        "STATE",
        "WEIGHTS",
        "IN-FLIGHT",
        "RUNNING",
        "WAITING",
        "PINS",
        "PIN-TOKENS",
        "KV-USED",
        "KV-TOKENS",
        "AFFINITY",
        "FOUND",
    ];
    text.push_str(&table::render(&head, &rows));
    for rank in r.ranks.iter().filter(|rank| !rank.not_routable.is_empty()) {
        let why = table::plain(&rank.not_routable);
        text.push_str(&format!("\nrank {} takes no new work: {why}\n", rank.rank));
    }
    text
}

fn row(rank: &FleetRank, draining: bool) -> Vec<String> {
    let told = rank.reported.as_ref();
    let state = match told {
        _ if rank.routable => "open",
        Some(told) if !told.healthy => "unhealthy",
        Some(told) if told.paused => "paused",
        _ if draining => "draining",
        _ => "closed",
    };
    vec![
        rank.rank.to_string(),
        state.to_owned(),
        table::or_dash(&rank.weight_version),
        rank.in_flight.to_string(),
        told.map_or_else(|| "-".to_owned(), |t| t.running.to_string()),
        told.map_or_else(|| "-".to_owned(), |t| t.waiting.to_string()),
        rank.live_pins.to_string(),
        rank.live_pin_tokens.to_string(),
        told.map_or_else(
            || "-".to_owned(),
            |t| percent(t.kv_used_tokens, rank.kv_capacity_tokens),
        ),
        rank.kv_capacity_tokens.to_string(),
        json::affinity(rank).to_owned(),
        // Of the cached tokens that warm turns should have found.
        percent(rank.cached_tokens_found, rank.cached_tokens_expected),
    ]
}

fn can(c: &Capabilities) -> String {
    let flags = [
        (c.tokenizer, "text"),
        (c.output_logprobs, "output logprobs"),
        (c.prompt_logprobs, "prompt logprobs"),
        (c.seed, "seeds"),
        (c.routed_experts, "routed experts"),
        (c.structured_output, "structured output"),
        (c.priority, "priorities"),
    ];
    let mut can: Vec<String> = flags
        .iter()
        .filter(|(has, _)| *has)
        .map(|(_, name)| (*name).to_owned())
        .collect();
    if c.max_top_logprobs > 0 {
        can.push(format!("{} top logprobs", c.max_top_logprobs));
    }
    if c.more_follow {
        can.push("more that its engine has not told yet".to_owned());
    }
    can.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Drain, RankStatus, ReplicaHealth};

    #[test]
    fn each_rank_has_its_state() {
        let rank = |rank, routable, healthy, paused| FleetRank {
            rank,
            routable,
            kv_capacity_tokens: 1000,
            reported: Some(RankStatus {
                healthy,
                paused,
                kv_used_tokens: 500,
                ..RankStatus::default()
            }),
            ..FleetRank::default()
        };
        let mut replica = Replica {
            replica_id: "a".to_owned(),
            health: ReplicaHealth::Healthy.into(),
            health_reason: "heartbeats\u{1b}arrive".to_owned(),
            ranks: vec![
                rank(0, true, true, false),
                rank(1, false, false, false),
                rank(2, false, true, true),
                FleetRank::default(),
            ],
            ..Replica::default()
        };
        let states = |replica: &Replica| -> Vec<String> {
            let text = page(replica);
            let (_, ranks) = text.split_once("RANK").unwrap();
            ranks
                .lines()
                .skip(1)
                .map(|l| l.split_whitespace().nth(1).unwrap().to_owned())
                .collect()
        };
        assert_eq!(states(&replica), ["open", "unhealthy", "paused", "closed"]);
        replica.drain = Some(Drain::default());
        assert_eq!(states(&replica)[3], "draining");
        let text = page(&replica);
        assert!(text.contains("healthy: heartbeats\u{fffd}arrive"), "{text}");
        assert!(text.contains("50%"), "{text}");
        assert!(!text.contains("labels"), "what is empty is left out");
    }
}
