//! How a sidecar takes its leave, all within the drain timeout: no turn fails if
//! what is in flight ends in time.
//!
//! ```text
//! it drains, keys may stay ──idle, or half the time is over──▶ it drains, keys move
//!                                                                   │ nothing runs, and
//!                                                                   ▼ nothing is on its way
//!                                                            deregistered, gone
//! ```

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Event, Sidecar,
    control::{CallError, Grant},
};
use crate::proto::{DeregisterReplicaRequest, ReplicaState as WireState};

/// Beats that the control plane takes, with the grace over, until nothing can be
/// on its way any more: what was chosen a moment before the first is counted in
/// the answer to the second.
const CONFIRMED: u32 = 2;
/// Beats of a leaving sidecar that nobody answers until it leaves without a word.
const UNHEARD: u32 = 3;
/// Between beats of one that has nothing to do any more.
const CONFIRM_EVERY: Duration = Duration::from_millis(100);

impl Sidecar {
    /// Says that no new work is wanted, lets what runs finish, deregisters; all
    /// within the drain timeout.
    pub(super) async fn leave(&mut self) -> Event {
        let Some(grant) = self.grant else {
            return Event::Left;
        };
        let limit = self.config.drain_timeout;
        let last_call = (limit / 2).min(Duration::from_secs(2));
        let time = limit - last_call;
        let registered = tokio::time::timeout(time, self.drain(grant, time / 2))
            .await
            // Out of time, with work left.
            .unwrap_or(true);
        if registered {
            let leave = DeregisterReplicaRequest {
                replica_id: self.config.replica_id.clone(),
                incarnation: grant.incarnation,
            };
            if let Err(error) = self.control.deregister(leave, last_call).await {
                tracing::warn!(replica = %self.config.replica_id, %error, "left without a word: the lease will end it");
            }
        }
        Event::Left
    }

    /// Until nothing runs at the engine and nothing is on its way there. While
    /// turns are in flight, and for `grace` at most, the trajectories that live
    /// there may take more; then none may, and what is in flight finishes. False:
    /// the control plane has forgotten this replica already.
    async fn drain(&mut self, grant: Grant, grace: Duration) -> bool {
        let begun = Instant::now();
        let interval = grant.interval;
        let pace = interval.min(Duration::from_millis(500));
        // No turn is to come any more.
        let mut closed = false;
        // Beats since that were taken.
        let mut confirmed = 0;
        let mut unheard = 0;
        loop {
            let left = grace.saturating_sub(begun.elapsed());
            closed |= left.is_zero();
            let mut beat = self.heartbeat(grant.incarnation, WireState::Draining);
            let left = if closed { Duration::ZERO } else { left };
            beat.drain_grace = left.try_into().ok();
            let in_flight = match self.control.heartbeat(beat, interval).await {
                Ok(heard) => {
                    confirmed += u32::from(closed);
                    heard.in_flight
                }
                Err(CallError::Unknown(_) | CallError::Stale(_) | CallError::Dead(_)) => {
                    return false;
                }
                Err(_) => {
                    unheard += 1;
                    if unheard >= UNHEARD {
                        // Nobody is there who could send anything.
                        confirmed = CONFIRMED;
                    }
                    0
                }
            };
            let Some(known) = &self.known else {
                return true;
            };
            // Looked at after the word was heard: what was sent before is seen.
            let idle = match self.engine.look(&known.facts).await {
                Ok(seen) => {
                    let idle = seen
                        .ranks
                        .iter()
                        .all(|rank| rank.load.running + rank.load.waiting == 0);
                    self.last = Some(seen);
                    idle
                }
                Err(trouble) => trouble.is_gone(),
            };
            let idle = idle && in_flight == 0;
            if idle && confirmed >= CONFIRMED {
                return true;
            }
            closed |= idle;
            tokio::time::sleep(if idle { pace.min(CONFIRM_EVERY) } else { pace }).await;
        }
    }
}
