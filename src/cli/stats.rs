//! `berth stats`: what happened since the control plane's start.

use std::{collections::BTreeMap, time::Duration};

use super::operator::{self, Connection, json, seconds, table};
use crate::proto::{GetStatsRequest, GetStatsResponse};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
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
    let stats = operator.call(client.get_stats(GetStatsRequest {})).await?;
    if args.json {
        operator::print_json(&json::stats(&stats), false)?;
    } else {
        super::print(&page(&stats))?;
    }
    Ok(())
}

fn page(stats: &GetStatsResponse) -> String {
    // Whole seconds are enough for an uptime.
    let uptime = seconds(stats.uptime.as_ref()).max(0.0).floor();
    let uptime = Duration::try_from_secs_f64(uptime).unwrap_or_default();
    let mut rows = vec![
        vec!["version".to_owned(), stats.version.clone()],
        vec![
            "uptime".to_owned(),
            humantime::format_duration(uptime).to_string(),
        ],
        vec!["pins now".to_owned(), stats.pins.to_string()],
        vec!["in flight now".to_owned(), stats.in_flight.to_string()],
    ];
    let counters: BTreeMap<_, _> = stats.counters.iter().collect();
    rows.extend(
        counters
            .into_iter()
            .map(|(name, count)| vec![name.clone(), count.to_string()]),
    );
    table::render(&["WHAT", "COUNT"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_come_in_order() {
        let stats = GetStatsResponse {
            counters: [("b", 2), ("a", 1)]
                .map(|(name, count)| (name.to_owned(), count))
                .into(),
            uptime: Some(prost_types::Duration {
                seconds: 3661,
                nanos: 5,
            }),
            version: "1".to_owned(),
            ..GetStatsResponse::default()
        };
        let text = page(&stats);
        assert!(text.contains("uptime         1h 1m 1s\n"), "{text}");
        assert!(
            text.ends_with("a              1\nb              2\n"),
            "{text}"
        );
    }
}
