//! Before the first request: every expected replica is there, healthy, and no
//! other replica under a second name. Afterwards: they still are the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::bail;
use tokio::time::{Instant, sleep};

use super::{client::Client, progress::Progress};
use crate::proto::{Replica, ReplicaHealth};

const POLL: Duration = Duration::from_millis(200);

/// What the workload must know of the replicas that will serve it.
#[derive(Clone, Debug)]
pub(super) struct Fleet {
    /// Models served, by name: one, unless none was asked for.
    pub(super) models: BTreeSet<String>,
    /// Start of each replica, by id.
    pub(super) incarnations: BTreeMap<String, u64>,
    /// Least vocabulary; 0 where a replica does not say.
    pub(super) vocab_size: u32,
    /// Least context, in tokens.
    pub(super) context_length: u32,
    /// Least KV capacity of a rank, in tokens.
    pub(super) kv_capacity: u64,
    /// Greatest page, in tokens.
    pub(super) page_size: u32,
    /// All of them honour a sampling seed.
    pub(super) seeds: bool,
    /// Ranks in all.
    pub(super) ranks: u64,
    /// Names of accelerators, with how many there are.
    pub(super) accelerators: BTreeMap<String, u64>,
}

/// Waits until exactly `expected` replicas (of `model`, where given) are
/// healthy and distinct, or any where it is unset, for `wait` at most. A control
/// plane that does not answer yet is waited for as well.
pub(super) async fn complete(
    client: &Client,
    model: Option<&str>,
    expected: Option<u32>,
    wait: Duration,
    progress: &impl Progress,
) -> anyhow::Result<Fleet> {
    let deadline = Instant::now() + wait;
    loop {
        let status = match client.list_replicas(model.map(str::to_owned)).await {
            Ok(replicas) => match judge(&replicas, expected) {
                Ok(healthy) => return Ok(facts(&healthy)),
                Err(missing) => missing,
            },
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() + POLL > deadline {
            bail!(
                "the fleet was not complete within {}: {status}",
                humantime::format_duration(wait)
            );
        }
        progress.waiting(&status);
        sleep(POLL).await;
    }
}

/// The healthy ones if they are as expected, else what is missing.
fn judge(replicas: &[Replica], expected: Option<u32>) -> Result<Vec<&Replica>, String> {
    let (healthy, others): (Vec<&Replica>, Vec<&Replica>) =
        replicas.iter().partition(|r| is_healthy(r));
    let mut faults = Vec::new();

    // Two names for one engine would count one cache twice.
    let mut by_endpoint: BTreeMap<&str, &str> = BTreeMap::new();
    for replica in &healthy {
        if let Some(other) = by_endpoint.insert(&replica.endpoint, &replica.replica_id) {
            faults.push(format!(
                "{other} and {} are one engine ({})",
                replica.replica_id, replica.endpoint
            ));
        }
    }
    match expected {
        Some(n) if healthy.len() as u64 != u64::from(n) => faults.push(format!(
            "{} of {n} expected replicas healthy",
            healthy.len()
        )),
        None if healthy.is_empty() => faults.push("no healthy replica".to_owned()),
        _ => {}
    }
    if faults.is_empty() {
        return Ok(healthy);
    }
    // A dead one may be forgotten history: it is named, not counted.
    faults.extend(others.iter().take(8).map(|r| {
        let mut state = format!("{} is {}", r.replica_id, health_name(r.health()));
        if r.health() == ReplicaHealth::Healthy {
            state = format!("{} has ranks that take no requests", r.replica_id);
        }
        if !r.health_reason.is_empty() {
            state.push_str(&format!(" ({})", r.health_reason));
        }
        state
    }));
    Err(faults.join("; "))
}

/// All of its ranks take requests.
fn is_healthy(replica: &Replica) -> bool {
    replica.health() == ReplicaHealth::Healthy
        && !replica.ranks.is_empty()
        && replica.ranks.iter().all(|rank| rank.routable)
}

fn health_name(health: ReplicaHealth) -> String {
    let name = health.as_str_name();
    name.strip_prefix("REPLICA_HEALTH_")
        .unwrap_or(name)
        .to_lowercase()
}

fn facts(replicas: &[&Replica]) -> Fleet {
    let ranks = || replicas.iter().flat_map(|r| &r.ranks);
    let mut accelerators = BTreeMap::new();
    // An engine that runs on a CPU has none, and says so by an empty name.
    let named = replicas
        .iter()
        .filter_map(|r| r.accelerator.as_ref())
        .filter(|accelerator| !accelerator.name.is_empty());
    for accelerator in named {
        *accelerators.entry(accelerator.name.clone()).or_default() += u64::from(accelerator.count);
    }
    Fleet {
        models: replicas.iter().map(|r| r.model.clone()).collect(),
        incarnations: replicas
            .iter()
            .map(|r| (r.replica_id.clone(), r.incarnation))
            .collect(),
        vocab_size: replicas.iter().map(|r| r.vocab_size).min().unwrap_or(0),
        context_length: replicas.iter().map(|r| r.context_length).min().unwrap_or(0),
        kv_capacity: ranks().map(|r| r.kv_capacity_tokens).min().unwrap_or(0),
        page_size: replicas
            .iter()
            .map(|r| r.page_size)
            .max()
            .unwrap_or(1)
            .max(1),
        seeds: replicas
            .iter()
            .all(|r| r.capabilities.as_ref().is_some_and(|c| c.seed)),
        ranks: ranks().count() as u64,
        accelerators,
    }
}

/// What is not as it was before the run: a replica that restarted took its
/// cache with it, one that joined took load.
pub(super) fn changes(before: &Fleet, after: &[Replica]) -> Vec<String> {
    let mut notes = Vec::new();
    let now: BTreeMap<&str, &Replica> = after
        .iter()
        .filter(|r| r.health() != ReplicaHealth::Dead)
        .map(|r| (r.replica_id.as_str(), r))
        .collect();
    for (id, incarnation) in &before.incarnations {
        match now.get(id.as_str()) {
            None => notes.push(format!("replica {id} was lost during the run")),
            Some(r) if r.incarnation != *incarnation => {
                notes.push(format!("replica {id} restarted during the run"));
            }
            Some(_) => {}
        }
    }
    for (id, replica) in now {
        if !before.incarnations.contains_key(id) && is_healthy(replica) {
            notes.push(format!("replica {id} joined during the run"));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Accelerator, Capabilities, FleetRank};

    fn replica(id: &str, health: ReplicaHealth) -> Replica {
        Replica {
            replica_id: id.to_owned(),
            incarnation: 1,
            health: health.into(),
            endpoint: format!("http://127.0.0.1/{id}"),
            model: "m".to_owned(),
            vocab_size: 1000,
            context_length: 4096,
            page_size: 1,
            capabilities: Some(Capabilities {
                seed: true,
                ..Default::default()
            }),
            accelerator: Some(Accelerator {
                name: "NVIDIA H100 80GB HBM3".to_owned(),
                memory_bytes: 0,
                count: 1,
            }),
            ranks: vec![FleetRank {
                kv_capacity_tokens: 9000,
                routable: true,
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn counts_healthy_and_distinct_replicas_only() {
        use ReplicaHealth::{Dead, Healthy, Suspect};
        let mut fleet = vec![replica("a", Healthy), replica("b", Suspect)];
        let missing = judge(&fleet, Some(2)).unwrap_err();
        assert_eq!(missing, "1 of 2 expected replicas healthy; b is suspect");
        assert_eq!(judge(&fleet, None).unwrap().len(), 1);

        fleet[1] = replica("b", Healthy);
        assert_eq!(judge(&fleet, Some(2)).unwrap().len(), 2);
        // More than expected is another experiment.
        assert!(judge(&fleet, Some(1)).is_err());

        fleet[1].endpoint = fleet[0].endpoint.clone();
        let missing = judge(&fleet, Some(2)).unwrap_err();
        assert!(missing.contains("a and b are one engine"), "{missing}");

        let missing = judge(&[replica("a", Dead)], None).unwrap_err();
        assert_eq!(missing, "no healthy replica; a is dead");
    }

    #[test]
    fn a_rank_that_takes_no_requests_is_waited_for() {
        let mut paused = replica("a", ReplicaHealth::Healthy);
        paused.ranks[0].routable = false;
        let missing = judge(&[paused], Some(1)).unwrap_err();
        assert!(missing.contains("ranks that take no requests"), "{missing}");
    }

    #[test]
    fn the_least_of_what_the_replicas_allow() {
        let a = replica("a", ReplicaHealth::Healthy);
        let mut b = replica("b", ReplicaHealth::Healthy);
        b.vocab_size = 500;
        b.context_length = 8192;
        b.page_size = 64;
        b.ranks[0].kv_capacity_tokens = 100;
        b.capabilities = None;
        let fleet = facts(&[&a, &b]);
        assert_eq!(fleet.vocab_size, 500);
        assert_eq!(fleet.context_length, 4096);
        assert_eq!(fleet.kv_capacity, 100);
        assert_eq!(fleet.page_size, 64);
        assert_eq!(fleet.ranks, 2);
        assert!(!fleet.seeds);
        assert_eq!(fleet.accelerators["NVIDIA H100 80GB HBM3"], 2);
    }

    #[test]
    fn replicas_without_an_accelerator_name_none() {
        let mut on_cpu = replica("a", ReplicaHealth::Healthy);
        on_cpu.accelerator = Some(Accelerator::default());
        let mut silent = replica("b", ReplicaHealth::Healthy);
        silent.accelerator = None;
        assert!(facts(&[&on_cpu, &silent]).accelerators.is_empty());
    }

    #[test]
    fn notices_what_changed() {
        let healthy = ReplicaHealth::Healthy;
        let before = facts(&[
            &replica("a", healthy),
            &replica("b", healthy),
            &replica("c", healthy),
        ]);
        let mut b = replica("b", healthy);
        b.incarnation = 2;
        let after = [
            replica("a", healthy),
            b,
            replica("c", ReplicaHealth::Dead),
            replica("d", healthy),
        ];
        assert_eq!(
            changes(&before, &after),
            [
                "replica b restarted during the run",
                "replica c was lost during the run",
                "replica d joined during the run"
            ]
        );
        assert!(changes(&before, &[]).len() == 3);
    }
}
