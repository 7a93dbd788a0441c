//! Whether a pin's rank takes its key's request, and why not.

use std::time::Duration;

use tokio::time::Instant;

use super::{Plan, Router, place::keeps};
use crate::{
    call::RouteReason,
    fleet::snapshot::{RankState, Snapshot},
    routing::{
        config::KvAdmission,
        moves::MoveConfig,
        pins::{Came, MINUTES, Pinned, Seen},
        request::RouteRequest,
    },
};

/// For so long after its rank was lost a trajectory may go on from where it found
/// refuge: a fleet that restarts is back by then.
const REFUGE_MINUTES: u16 = 15;

/// Whether a pin's rank takes its key's request.
pub(super) enum Home<'f> {
    Here(Plan<'f>),
    /// So it does, and the queue there is so long that a move may pay.
    Busy(Plan<'f>, MoveConfig, Duration),
    /// So it does, as it did when many had lost their ranks and few were left.
    Refuge(Plan<'f>),
    /// So it would, and its KV cache has no room for this trajectory beside those
    /// that live there.
    Full(Plan<'f>, KvAdmission),
    /// Not now, and it will again.
    Away(RouteReason),
    /// Never again.
    Gone(RouteReason),
}

impl Router {
    /// Whether a pin's rank takes its key's request.
    pub(super) fn home<'f>(
        &self,
        fleet: &'f Snapshot,
        request: &RouteRequest<'_>,
        seen: Seen,
        now: Instant,
    ) -> Home<'f> {
        let pin = seen.at;
        if request.avoid.contains(&pin.slot) {
            return Home::Gone(RouteReason::ReplicaLost);
        }
        let Some(rank) = fleet.rank(pin.slot) else {
            return Home::Gone(if fleet.departed.contains(&pin.slot) {
                RouteReason::Draining
            } else {
                RouteReason::ReplicaLost
            });
        };
        match rank.state {
            RankState::Drained => return Home::Gone(RouteReason::Draining),
            RankState::Ejected(_) | RankState::Held => return Home::Gone(RouteReason::ReplicaLost),
            RankState::Closed(_) | RankState::Paused | RankState::Suspect => {
                return Home::Away(RouteReason::Detour);
            }
            RankState::Open | RankState::PinnedOnly => {}
        }
        if request.needs.permanent_lack(rank).is_some() {
            return Home::Away(RouteReason::Detour);
        }
        if !request.needs.admits_weights(rank) {
            return Home::Away(RouteReason::Weights);
        }
        let plan = Plan::warm(rank, request, pin);
        if let Some(admission) = self.config.kv_admission
            && !admission.is_over(request.hints.waited)
            && (self.gets_in_line(request, Some(seen)) || !keeps(rank, request, seen, &admission))
        {
            return Home::Full(plan, admission);
        }
        match self.config.moves {
            Some(moves) if self.may_move(&moves, pin, now) => {
                let wait = rank.load.queue().length();
                if wait > moves.margin {
                    return Home::Busy(plan, moves, wait);
                }
            }
            _ => {}
        }
        if pin.came.is_refuge() && self.minutes_since(pin.came, now) < REFUGE_MINUTES {
            return Home::Refuge(plan);
        }
        Home::Here(plan)
    }

    /// Others wait for room, and it neither does yet nor counts as one that has some.
    pub(super) fn gets_in_line(&self, request: &RouteRequest<'_>, pin: Option<Seen>) -> bool {
        request.hints.waited.is_none()
            && !pin.is_some_and(|pin| pin.live)
            && self.lines.waiting(&request.needs.model) > 0
    }

    fn may_move(&self, moves: &MoveConfig, pin: Pinned, now: Instant) -> bool {
        let age = self.minutes_since(pin.came, now);
        let cooled = u64::from(age) * 60 >= moves.cooldown.as_secs();
        pin.tokens <= moves.max_context && (pin.came.minute() == 0 || cooled)
    }

    fn minutes_since(&self, came: Came, now: Instant) -> u16 {
        (self.minute(now) + MINUTES - came.minute()) % MINUTES
    }

    /// Minutes since moves were first looked at, from 1, going round.
    pub(super) fn minute(&self, now: Instant) -> u16 {
        let born = *self.born.get_or_init(|| now);
        let minutes = now.saturating_duration_since(born).as_secs() / 60;
        u16::try_from(minutes % u64::from(MINUTES)).unwrap_or(0) + 1
    }
}
