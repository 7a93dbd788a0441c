//! `berth replicas`: what runs where, and how it is.

use std::{collections::BTreeMap, io::IsTerminal, time::Duration};

use serde_json::{Value, json};
use tonic::Response;

use super::operator::{self, Connection, Failure, Operator, health, in_flight, seconds, table};
use crate::{
    listing,
    proto::{FleetRank, RankAffinity, Replica, WatchFleetRequest},
};

/// Load is shown as new as this.
const LOAD_INTERVAL: Duration = Duration::from_secs(1);

/// Ranks that are named by weights.
const MAX_NAMED: usize = 8;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Go on and show each change, until the control plane ends.
    #[arg(long)]
    watch: bool,
    /// JSON: one document, or with --watch one line for each message.
    #[arg(long)]
    json: bool,
    /// Only those of this model.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    connection: Connection,
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.clone().open()?;
    if args.watch {
        return watch(&operator, &args).await;
    }
    let all = listing::replicas(operator.client.clone(), args.model.clone());
    let all = async { all.await.map(Response::new) };
    let replicas = operator.call(all).await?;
    if args.json {
        operator::print_json(&json!({"replicas": values(replicas.iter())}), false)?;
    } else {
        super::print(&shown(replicas.iter(), &args.model))?;
    }
    Ok(())
}

async fn watch(operator: &Operator, args: &Args) -> anyhow::Result<()> {
    let request = WatchFleetRequest {
        load_interval: (!args.json)
            .then(|| LOAD_INTERVAL.try_into().ok())
            .flatten(),
    };
    let mut client = operator.client.clone();
    let mut stream = operator.call(client.watch_fleet(request)).await?;
    let mut fleet: BTreeMap<String, Replica> = BTreeMap::new();
    let mut complete = false;
    let on_terminal = std::io::stdout().is_terminal();
    loop {
        let message = stream.message().await;
        let Some(mut message) = message.map_err(|status| operator.failure(&status))? else {
            return Err(Failure::new(Failure::UNAVAILABLE, "the watch has ended").into());
        };
        let wanted = |r: &Replica| args.model.as_ref().is_none_or(|model| r.model == *model);
        message.replicas.retain(wanted);
        let news = !message.replicas.is_empty() || !message.removed.is_empty();
        if args.json {
            if news || message.snapshot_end {
                let line = json!({
                    "replicas": values(message.replicas.iter()),
                    "removed": message.removed,
                    "snapshot_end": message.snapshot_end,
                });
                operator::print_json(&line, true)?;
            }
            continue;
        }
        for id in &message.removed {
            fleet.remove(id);
        }
        for replica in message.replicas {
            fleet.insert(replica.replica_id.clone(), replica);
        }
        complete |= message.snapshot_end;
        if complete && (news || message.snapshot_end) {
            // To the top of an empty screen; else one table below the other.
            let (before, after) = if on_terminal {
                ("\u{1b}[H\u{1b}[2J", "")
            } else {
                ("", "\n")
            };
            super::print(&format!(
                "{before}{}{after}",
                shown(fleet.values(), &args.model)
            ))?;
        }
    }
}

fn values<'a>(replicas: impl Iterator<Item = &'a Replica>) -> Vec<Value> {
    replicas.map(operator::json::replica).collect()
}

/// The table; or that there is nothing, of the model that was asked for.
fn shown<'a>(replicas: impl Iterator<Item = &'a Replica>, model: &Option<String>) -> String {
    let mut replicas = replicas.peekable();
    match model {
        Some(model) if replicas.peek().is_none() => {
            format!("no replica of model {} is known\n", table::plain(model))
        }
        _ => page(replicas),
    }
}

/// The table, and which weights live where.
fn page<'a>(replicas: impl Iterator<Item = &'a Replica>) -> String {
    let replicas: Vec<&Replica> = replicas.collect();
    if replicas.is_empty() {
        return "no replica is known\n".to_owned();
    }
    let rows: Vec<Vec<String>> = replicas.iter().map(|r| row(r)).collect();
    let head = [
        "REPLICA",
        "START",
        "HEALTH",
        "MODEL",
        "WEIGHTS",
        "OPEN",
        "IN-FLIGHT",
        "PINS",
        "KV",
        "BEAT",
        "ACCELERATOR",
    ];
    let mut text = table::render(&head, &rows);
    text.push_str(&weights(&replicas));
    for replica in &replicas {
        text.push_str(&closed(replica));
        for rank in &replica.ranks {
            let what = match rank.affinity() {
                RankAffinity::IgnoresPins => format!(
                    "ignores pins: {} samples were served on other ranks",
                    rank.wrong_rank
                ),
                RankAffinity::LosesCache => format!(
                    "loses its cache: the last warm turns found {}% of what they should",
                    rank.recent_found_percent()
                ),
                RankAffinity::Unspecified | RankAffinity::Holds => continue,
            };
            let line = format!("{}/{} {what}", replica.replica_id, rank.rank);
            text.push_str(&table::plain(&line));
            text.push('\n');
        }
        if let Some(drain) = &replica.drain {
            let left = seconds(drain.grace_left.as_ref());
            text.push_str(&table::plain(&format!(
                "{} drains, {left:.0} s of grace left: {}",
                replica.replica_id, replica.health_reason
            )));
            text.push('\n');
        }
    }
    text
}

/// Why ranks of a replica that lives take nothing new, one line a reason.
fn closed(replica: &Replica) -> String {
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    // That it is dead, or drains and why, is told otherwise.
    if health(replica) != "dead" && replica.drain.is_none() {
        for rank in replica.ranks.iter().filter(|rank| !rank.routable) {
            let place = format!("{}/{}", replica.replica_id, rank.rank);
            reasons.entry(&rank.not_routable).or_default().push(place);
        }
    }
    let lines = reasons.iter().map(|(why, places)| {
        let line = format!("{}: {}", named(places), table::or_dash(why));
        format!("{}\n", table::plain(&line))
    });
    lines.collect()
}

/// Places by name, as many as are read.
fn named(places: &[String]) -> String {
    let named = places.len().min(MAX_NAMED);
    let more = match places.len() - named {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", places[..named].join(" "))
}

fn row(replica: &Replica) -> Vec<String> {
    let ranks = &replica.ranks;
    let sum = |of: fn(&FleetRank) -> u64| ranks.iter().map(of).fold(0, u64::saturating_add);
    let capacity = sum(|r| r.kv_capacity_tokens);
    let held = sum(|r| r.live_pin_tokens);
    let accelerator = replica.accelerator.as_ref().map_or_else(String::new, |a| {
        if a.name.is_empty() {
            String::new()
        } else {
            format!("{} x {}", a.count, a.name)
        }
    });
    vec![
        replica.replica_id.clone(),
        replica.incarnation.to_string(),
        health(replica).to_owned(),
        replica.model.clone(),
        table::or_dash(&versions(replica)),
        format!(
            "{}/{}",
            ranks.iter().filter(|r| r.routable).count(),
            ranks.len()
        ),
        in_flight(replica).to_string(),
        sum(|r| r.live_pins).to_string(),
        percent(held, capacity),
        format!("{:.1}s", seconds(replica.heartbeat_age.as_ref())),
        table::or_dash(&accelerator),
    ]
}

/// Its weights, distinct.
fn versions(replica: &Replica) -> String {
    let mut versions: Vec<&str> = replica
        .ranks
        .iter()
        .map(|rank| rank.weight_version.as_str())
        .collect();
    versions.sort_unstable();
    versions.dedup();
    versions.join(",")
}

/// Of the tokens that fit, those of the trajectories that live there.
pub(super) fn percent(held: u64, capacity: u64) -> String {
    match u128::from(held).checked_mul(100) {
        Some(held) if capacity > 0 => format!("{}%", held / u128::from(capacity)),
        _ => "-".to_owned(),
    }
}

/// One line a model whose ranks serve several versions: which lives where.
fn weights(replicas: &[&Replica]) -> String {
    let mut models: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for replica in replicas.iter().filter(|r| health(r) != "dead") {
        let versions = models.entry(&replica.model).or_default();
        for rank in &replica.ranks {
            let place = format!("{}/{}", replica.replica_id, rank.rank);
            versions
                .entry(&rank.weight_version)
                .or_default()
                .push(place);
        }
    }
    let mut text = String::new();
    for (model, versions) in models.iter().filter(|(_, versions)| versions.len() > 1) {
        let parts: Vec<String> = versions
            .iter()
            .map(|(version, places)| format!("{} at {}", table::or_dash(version), named(places)))
            .collect();
        let line = format!("weights of {model}: {}", parts.join("; "));
        text.push_str(&table::plain(&line));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Drain, ReplicaHealth};

    fn replica(id: &str, weights: &[&str]) -> Replica {
        let ranks = (0..)
            .zip(weights)
            .map(|(rank, version)| FleetRank {
                rank,
                kv_capacity_tokens: 1000,
                live_pin_tokens: 250,
                live_pins: 2,
                in_flight: 1,
                routable: true,
                weight_version: (*version).to_owned(),
                ..FleetRank::default()
            })
            .collect();
        Replica {
            replica_id: id.to_owned(),
            incarnation: 3,
            health: ReplicaHealth::Healthy.into(),
            model: "m".to_owned(),
            ranks,
            ..Replica::default()
        }
    }

    #[test]
    fn a_row_sums_the_ranks() {
        let text = page([replica("a", &["7", "7"])].iter());
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            [
                "a", "3", "healthy", "m", "7", "2/2", "2", "4", "25%", "0.0s", "-"
            ]
        );
        assert_eq!(text.lines().count(), 2, "one version needs no second word");
        assert_eq!(page([].iter()), "no replica is known\n");
    }

    #[test]
    fn which_weights_live_where() {
        let mut gone = replica("c", &["1"]);
        gone.health = ReplicaHealth::Dead.into();
        let many = replica("d", &["8"; 9]);
        let text = page([replica("a", &["7", "8"]), replica("b", &["7"]), gone, many].iter());
        assert!(
            text.contains(
                "weights of m: 7 at a/0 b/0; 8 at a/1 d/0 d/1 d/2 d/3 d/4 d/5 d/6 and 2 more\n"
            ),
            "{text}"
        );
        assert!(text.contains(" 7,8 "), "{text}");
    }

    #[test]
    fn a_rank_whose_pins_do_not_hold_is_told() {
        let mut one = replica("a", &["7", "7", "7"]);
        one.ranks[1].affinity = RankAffinity::IgnoresPins.into();
        one.ranks[1].wrong_rank = 9;
        one.ranks[2].affinity = RankAffinity::LosesCache.into();
        one.ranks[2].recent_found_percent = Some(12);
        let text = page([one].iter());
        let told = "a/1 ignores pins: 9 samples were served on other ranks\n\
                    a/2 loses its cache: the last warm turns found 12% of what they should\n";
        assert!(text.ends_with(told), "{text}");
    }

    #[test]
    fn why_a_rank_is_not_open_is_told() {
        let mut one = replica("a", &["7", "7", "7"]);
        for rank in &mut one.ranks[1..] {
            rank.routable = false;
            rank.not_routable = "generation is paused".to_owned();
        }
        let mut gone = replica("b", &["7"]);
        gone.health = ReplicaHealth::Dead.into();
        gone.ranks[0].routable = false;
        gone.ranks[0].not_routable = "its replica is dead".to_owned();
        let text = page([one, gone].iter());
        assert!(text.contains(" 1/3 "), "{text}");
        assert!(
            text.ends_with("\na/1 a/2: generation is paused\n"),
            "{text}"
        );
    }

    #[test]
    fn a_drain_is_told() {
        let mut one = replica("a", &["7"]);
        one.health = ReplicaHealth::Draining.into();
        one.health_reason = "an operator drains it".to_owned();
        one.drain = Some(Drain {
            grace_left: Some(prost_types::Duration {
                seconds: 12,
                nanos: 0,
            }),
            ..Drain::default()
        });
        let text = page([one].iter());
        assert!(
            text.ends_with("a drains, 12 s of grace left: an operator drains it\n"),
            "{text}"
        );
    }

    #[test]
    fn shares_of_nothing_are_not_computed() {
        assert_eq!(percent(1, 0), "-");
        assert_eq!(percent(u64::MAX, u64::MAX), "100%");
    }
}
