//! What a heartbeat says, or every fault that it has.

use std::collections::BTreeSet;

use super::{Faults, MAX_NAME, MAX_RANKS, check_adapters, is_plain, sorted};
use crate::{
    api::fleet::time,
    error::Error,
    fleet::{
        Beat,
        facts::{RankReport, ReportedState},
    },
    ids::{Incarnation, ReplicaId},
    proto,
};

/// Reads one; its replica id is taken as it is.
///
/// # Errors
/// INVALID_REQUEST, all that is wrong with it.
pub(in crate::api) fn beat(message: proto::HeartbeatRequest) -> Result<Beat, Error> {
    let mut faults = Faults::default();
    let state = state(message.state, &mut faults);
    let drain_grace = time("drain_grace", message.drain_grace)
        .map_err(|error| faults.0.extend(error.violations))
        .unwrap_or_default();
    check(&message.ranks, &mut faults);
    let adapters = message.adapters.map(|list| list.adapters);
    if let Some(adapters) = &adapters {
        check_adapters(adapters, &mut faults);
    }
    faults.or(state.map(|state| Beat {
        replica: ReplicaId::new(message.replica_id),
        incarnation: Incarnation(message.incarnation),
        sequence: message.sequence,
        state,
        drain_grace,
        ranks: message.ranks.into_iter().map(report).collect(),
        adapters: adapters.map(sorted),
    }))
}

fn state(told: i32, faults: &mut Faults) -> Option<ReportedState> {
    match proto::ReplicaState::try_from(told) {
        Ok(proto::ReplicaState::Draining) => Some(ReportedState::Draining),
        Ok(proto::ReplicaState::Unhealthy) => Some(ReportedState::Unhealthy),
        Ok(proto::ReplicaState::Ready | proto::ReplicaState::Unspecified) => {
            Some(ReportedState::Ready)
        }
        Err(_) => {
            faults.add(
                "state",
                format!("is {told}, which is none that is known: READY, DRAINING or UNHEALTHY"),
            );
            None
        }
    }
}

/// Which of them the replica has is the fleet's to know: a beat and a registration that
/// changes the ranks cross each other.
fn check(ranks: &[proto::RankStatus], faults: &mut Faults) {
    faults.check(ranks.len() <= MAX_RANKS, "ranks", "may list 1,024 at most");
    faults.check(
        ranks
            .iter()
            .all(|r| r.weight_version.len() <= MAX_NAME && is_plain(&r.weight_version)),
        "ranks.weight_version",
        "may have 256 bytes at most and hold no control character",
    );
    let mut seen = BTreeSet::new();
    for (i, status) in ranks.iter().take(MAX_RANKS).enumerate() {
        if !seen.insert(status.rank) {
            faults.add(
                format!("ranks[{i}].rank"),
                format!("is {}, which has an entry before", status.rank),
            );
        }
    }
}

fn report(status: proto::RankStatus) -> RankReport {
    RankReport {
        rank: status.rank,
        healthy: status.healthy,
        running: status.running,
        waiting: status.waiting,
        waiting_uncached_tokens: status.waiting_uncached_tokens,
        kv_used_tokens: status.kv_used_tokens,
        weight_version: status.weight_version.into(),
        paused: status.paused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32) -> proto::RankStatus {
        proto::RankStatus {
            rank,
            healthy: true,
            ..proto::RankStatus::default()
        }
    }

    fn message(ranks: impl IntoIterator<Item = u32>) -> proto::HeartbeatRequest {
        proto::HeartbeatRequest {
            replica_id: "r".to_owned(),
            incarnation: 3,
            sequence: 7,
            state: proto::ReplicaState::Draining.into(),
            ranks: ranks.into_iter().map(rank).collect(),
            ..proto::HeartbeatRequest::default()
        }
    }

    fn faults(message: proto::HeartbeatRequest) -> Vec<String> {
        let error = beat(message).unwrap_err();
        error
            .violations
            .iter()
            .map(|v| v.field.to_string())
            .collect()
    }

    #[test]
    fn a_good_beat_is_taken_as_it_is() {
        let beat = beat(message([1, 0])).unwrap();
        assert_eq!((beat.replica.as_str(), beat.sequence), ("r", 7));
        assert_eq!(beat.incarnation, Incarnation(3));
        assert_eq!(beat.state, ReportedState::Draining);
        let ranks: Vec<u32> = beat.ranks.iter().map(|report| report.rank).collect();
        assert_eq!(ranks, [1, 0]);
        assert_eq!((beat.adapters, beat.drain_grace), (None, None));
    }

    #[test]
    fn two_entries_of_one_rank_are_refused_and_named() {
        let error = beat(message([4, 0, 4, 9, 9])).unwrap_err();
        let told: Vec<(&str, &str)> = error
            .violations
            .iter()
            .map(|v| (&*v.field, &*v.description))
            .collect();
        assert_eq!(
            told,
            [
                ("ranks[2].rank", "is 4, which has an entry before"),
                ("ranks[4].rank", "is 9, which has an entry before"),
            ]
        );
    }

    #[test]
    fn a_state_that_is_not_known_is_no_state() {
        let mut later = message([0]);
        later.state = 99;
        let error = beat(later).unwrap_err();
        assert_eq!(error.violations.len(), 1);
        assert!(error.to_string().contains("99"), "{error}");
    }

    #[test]
    fn all_faults_come_at_once_and_are_no_more_than_a_beat_may_have_ranks() {
        let adapter = proto::Adapter {
            name: "\n".to_owned(),
            ..proto::Adapter::default()
        };
        let bad = proto::HeartbeatRequest {
            state: -1,
            drain_grace: Some(prost_types::Duration {
                seconds: -1,
                nanos: 0,
            }),
            adapters: Some(proto::AdapterList {
                adapters: vec![adapter],
            }),
            ..message([5, 5])
        };
        let found = faults(bad);
        assert_eq!(found, ["state", "drain_grace", "ranks[1].rank", "adapters"]);
        let many = faults(message(std::iter::repeat_n(5, 100_000)));
        assert_eq!(many.len(), MAX_RANKS);
    }
}
