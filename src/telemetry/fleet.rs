//! The fleet at the scrape: how many are how, and what each rank has to do.

use std::fmt;

use prometheus_client::{metrics::MetricType, registry::Unit};

use super::{
    families::{Page, counter, gauge, tokens},
    text::escaped,
};
use crate::fleet::{
    Fleet, Health, RankStatus, ReplicaStatus, snapshot::RankState, verified::Affinity,
};

/// Writes it.
pub(super) fn write(fleet: &Fleet, page: &mut Page<'_>) -> fmt::Result {
    let replicas = fleet.list();
    let health = [
        ("healthy", Health::Healthy),
        ("suspect", Health::Suspect),
        ("unverified", Health::Unverified),
        ("unhealthy", Health::Unhealthy),
        ("draining", Health::Draining),
        ("dead", Health::Dead),
    ];
    page.gauges(
        "replicas",
        "Replicas that are known, by health",
        health.map(|(name, health)| {
            let count = replicas.iter().filter(|r| r.health == health).count();
            ([("state", name)], count as f64)
        }),
    )?;
    let snapshot = fleet.snapshot();
    let states = [
        "open",
        "pinned_only",
        "closed",
        "paused",
        "suspect",
        "held",
        "ejected",
        "drained",
    ];
    page.gauges(
        "ranks",
        "Ranks of replicas that are not dead, by what they take",
        states.map(|name| {
            let ranks = snapshot.ranks.iter();
            let count = ranks.filter(|r| state_name(&r.state) == name).count();
            ([("state", name)], count as f64)
        }),
    )?;
    page.counters(
        "ejections",
        "Ranks that were trusted until they were ejected, by cause",
        fleet
            .ejections()
            .map(|(why, count)| ([("cause", why.name())], count)),
    )?;
    ranks(page, &replicas)
}

fn ranks(page: &mut Page<'_>, replicas: &[ReplicaStatus]) -> fmt::Result {
    let ranks: Vec<Row<'_>> = replicas
        .iter()
        .filter(|replica| replica.health != Health::Dead)
        .flat_map(|replica| {
            let model = escaped(&replica.facts.model);
            replica.ranks.iter().map(move |rank| Row {
                replica: replica.facts.id.as_str(),
                number: rank.facts.rank.to_string(),
                model: model.clone(),
                rank,
            })
        })
        .collect();
    type Value = fn(&RankStatus) -> Option<f64>;
    let gauges: [(&str, Option<Unit>, &str, Value); 8] = [
        (
            "rank_routable",
            None,
            "1: the rank takes new requests",
            |r| Some(f64::from(u8::from(r.routable()))),
        ),
        (
            "rank_in_flight_samples",
            None,
            "Samples sent to the rank and not yet answered",
            |r| Some(r.in_flight as f64),
        ),
        (
            "rank_live_pins",
            None,
            "Trajectories that live on the rank",
            |r| Some(r.live_pins as f64),
        ),
        (
            "rank_live",
            Some(tokens()),
            "Tokens of the trajectories that live on the rank",
            |r| Some(r.live_tokens as f64),
        ),
        (
            "rank_kv_capacity",
            Some(tokens()),
            "Tokens that the rank's KV cache holds",
            |r| Some(r.facts.kv_capacity as f64),
        ),
        (
            "rank_kv_used",
            Some(tokens()),
            "Tokens in the rank's KV cache, as its sidecar says",
            |r| Some(r.reported.as_ref()?.kv_used_tokens as f64),
        ),
        (
            "rank_running_requests",
            None,
            "Requests that the rank runs, as its sidecar says",
            |r| Some(f64::from(r.reported.as_ref()?.running)),
        ),
        (
            "rank_waiting_requests",
            None,
            "Requests that wait at the rank, as its sidecar says",
            |r| Some(f64::from(r.reported.as_ref()?.waiting)),
        ),
    ];
    for (name, unit, help, value) in gauges {
        let rows = ranks
            .iter()
            .filter_map(|row| Some((row.labels(), value(row.rank)?)));
        page.rows(name, unit.as_ref(), help, MetricType::Gauge, rows, gauge)?;
    }
    verified(page, &ranks)
}

/// Whether pins hold, rank by rank.
fn verified(page: &mut Page<'_>, ranks: &[Row<'_>]) -> fmt::Result {
    type Count = fn(&RankStatus) -> u64;
    let counts: [(&str, Option<Unit>, &str, Count); 3] = [
        (
            "rank_wrong_rank_samples",
            None,
            "Samples that another rank served than this one, which was asked",
            |r| r.verified.wrong_rank,
        ),
        (
            "rank_expected_cached",
            Some(tokens()),
            "Tokens that verified turns should have found in the rank's cache",
            |r| r.verified.expected,
        ),
        (
            "rank_found_cached",
            Some(tokens()),
            "Of those, the ones that they found",
            |r| r.verified.reported,
        ),
    ];
    for (name, unit, help, count) in counts {
        let rows = ranks.iter().map(|row| (row.name(), count(row.rank)));
        page.rows(
            name,
            unit.as_ref(),
            help,
            MetricType::Counter,
            rows,
            counter,
        )?;
    }
    page.rows(
        "rank_affinity",
        None,
        "1: pins hold on the rank; 0: too few turns to tell; -1: it ignores pins; -2: it loses \
         its cache",
        MetricType::Gauge,
        ranks.iter().map(|row| {
            let value = match row.rank.verified.affinity {
                Affinity::Holds => 1.0,
                Affinity::Unknown => 0.0,
                Affinity::IgnoresPins => -1.0,
                Affinity::LosesCache => -2.0,
            };
            (row.name(), value)
        }),
        gauge,
    )
}

/// A rank and its labels. Ids of replicas have no letter that must be escaped.
struct Row<'a> {
    replica: &'a str,
    number: String,
    model: String,
    rank: &'a RankStatus,
}

impl Row<'_> {
    fn name(&self) -> [(&'static str, &str); 2] {
        [("replica", self.replica), ("rank", &self.number)]
    }

    fn labels(&self) -> [(&'static str, &str); 3] {
        [
            ("model", &self.model),
            ("replica", self.replica),
            ("rank", &self.number),
        ]
    }
}

fn state_name(state: &RankState) -> &'static str {
    match state {
        RankState::Open => "open",
        RankState::PinnedOnly => "pinned_only",
        RankState::Closed(_) => "closed",
        RankState::Paused => "paused",
        RankState::Suspect => "suspect",
        RankState::Held => "held",
        RankState::Ejected(_) => "ejected",
        RankState::Drained => "drained",
    }
}
