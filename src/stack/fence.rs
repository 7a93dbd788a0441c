//! Never two live copies: before a sample runs again, its old attempt is fenced.
//!
//! An attempt is fenced when its engine has answered an abort by its id, or its
//! port refuses connections, or the fleet knows that its start of the replica is
//! over, or that its rank hangs and has been out of use for so long (`fence_after`)
//! that whoever waits is better served elsewhere: then aborts go on behind, for
//! the moment in which the engine wakes up. An abort is sent a second time after a moment, because an engine answers
//! 200 for an id that it has not parsed yet. Only then is the attempt fenced: were
//! that written down before, a crash in between would leave nobody who sends the
//! second abort, and a copy that runs to its end beside the next attempt. A third
//! abort follows in the background, for engines that parse very late: two copies
//! run beside each other for less than a second then, unless this process dies
//! meanwhile.
//!
//! ```text
//! abort ──answered──▶ a moment, abort again ──answered──▶ fenced
//!   │ ──refused────▶ fenced
//!   └──silence──▶ is the start over, or was its rank ejected
//!                 for hanging long enough ago? ──yes──▶ fenced
//!                     │ no: pause, abort again, for PATIENCE at most
//!                     └────────────────────────────────▶ OUTCOME_UNKNOWN
//! ```

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use crate::{
    engine::{EngineClient, EngineError},
    error::{Error, Reason},
    failpoint::{self, Point},
    fleet::{Fleet, facts::EngineKind},
    ids::{EngineRequestId, Target},
    stack::Engines,
};

/// An abort that overtook its request did nothing: it is sent again after this.
pub const ABORT_AGAIN: Duration = Duration::from_millis(250);

/// An engine that parses a request later than the second abort runs a copy that
/// nobody waits for: it is aborted so long after the first one.
pub const ABORT_LATE: Duration = Duration::from_millis(900);

/// An engine that does not answer an abort within this is silent.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Between aborts to a silent engine.
const PAUSE: Duration = Duration::from_millis(500);

/// Between aborts of an attempt that was left behind, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// So long they go on.
const GO_ON_FOR: Duration = Duration::from_secs(600);

/// So long a silent engine whose start is not over is waited for. Longer than a
/// lease: a replica that is gone without a word is dead by then.
const PATIENCE: Duration = Duration::from_secs(15);

/// What fences attempts.
#[derive(Clone)]
pub struct Fence {
    fleet: Arc<Fleet>,
    engines: Engines,
}

/// How an attempt was fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// The engine answered both aborts.
    Aborted,
    /// Its port refuses: nothing runs there.
    Refused,
    /// That start of the replica is over.
    Over,
    /// Its rank hangs: it is not waited for any longer.
    LeftBehind,
}

enum Answer {
    Aborted,
    Refused,
    Silent,
}

impl Fence {
    /// Over this fleet.
    pub fn new(fleet: Arc<Fleet>, engines: Engines) -> Self {
        Self { fleet, engines }
    }

    /// Fences the attempt `id` that was sent to `target` at `url`.
    ///
    /// # Errors
    /// OUTCOME_UNKNOWN when the engine stays silent and is not known to be over.
    pub async fn attempt(
        &self,
        target: &Target,
        url: &Arc<str>,
        id: &EngineRequestId,
    ) -> Result<Fenced, Error> {
        let begun = Instant::now();
        // Which API it speaks: all of a known replica's starts speak one.
        let kind = self
            .fleet
            .get(&target.replica)
            .map_or(EngineKind::Sglang, |status| status.facts.engine);
        let client = self.engines.client(kind);
        let mut answered = false;
        loop {
            if self.fleet.is_over(target) {
                // A lease that ran out says nothing of the engine. If it is there
                // after all, the old copy stops as well; nobody waits for that.
                let (client, url, id) = (Arc::clone(client), Arc::clone(url), id.clone());
                tokio::spawn(async move { abort(&client, &url, &id).await });
                return Ok(Fenced::Over);
            }
            let bound = self.fleet.config().health.fence_after;
            let hangs = self.fleet.hangs_since(target);
            if !answered && hangs.is_some_and(|since| since.elapsed() >= bound) {
                tokio::spawn(self.clone().go_on(
                    Arc::clone(client),
                    target.clone(),
                    Arc::clone(url),
                    id.clone(),
                ));
                return Ok(Fenced::LeftBehind);
            }
            failpoint::pass(if answered {
                Point::AbortAgain
            } else {
                Point::Abort
            });
            match abort(client, url, id).await {
                Answer::Aborted if answered => {
                    let late = ABORT_LATE.saturating_sub(ABORT_AGAIN);
                    let (client, url, id) = (Arc::clone(client), Arc::clone(url), id.clone());
                    tokio::spawn(async move {
                        sleep(late).await;
                        abort(&client, &url, &id).await
                    });
                    return Ok(Fenced::Aborted);
                }
                Answer::Aborted => {
                    self.fleet.aborted(target);
                    answered = true;
                    sleep(ABORT_AGAIN).await;
                }
                Answer::Refused => {
                    self.fleet.unreachable(target);
                    return Ok(Fenced::Refused);
                }
                Answer::Silent if begun.elapsed() >= PATIENCE => return Err(unknown(target)),
                Answer::Silent => {
                    self.fleet.unanswered(target);
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Aborts an attempt that was left behind until its engine answers or is over,
    /// so that an engine that wakes up does not go on with it.
    async fn go_on(
        self,
        client: Arc<dyn EngineClient>,
        target: Target,
        url: Arc<str>,
        id: EngineRequestId,
    ) {
        let begun = Instant::now();
        let mut answers = 0;
        let mut pause = PAUSE;
        while begun.elapsed() < GO_ON_FOR && !self.fleet.is_over(&target) {
            match abort(&client, &url, &id).await {
                Answer::Aborted if answers > 0 => return,
                Answer::Aborted => answers += 1,
                Answer::Refused => return self.fleet.unreachable(&target),
                Answer::Silent => pause = (pause * 2).min(LONGEST_PAUSE),
            }
            sleep(pause).await;
        }
    }
}

async fn abort(client: &Arc<dyn EngineClient>, url: &str, id: &EngineRequestId) -> Answer {
    match timeout(ABORT_TIMEOUT, client.abort(url, id)).await {
        // A refusal by status is an answer as well: the engine is there and does
        // not know the id.
        Ok(
            Ok(())
            | Err(
                EngineError::Rejected(_)
                | EngineError::BadReply(_)
                | EngineError::AdapterMissing(_),
            ),
        ) => Answer::Aborted,
        // A dead engine runs nothing.
        Ok(Err(EngineError::Refused(_) | EngineError::Died(_))) => Answer::Refused,
        Ok(Err(EngineError::Lost(_) | EngineError::Failed(_) | EngineError::Busy { .. }))
        | Err(_) => Answer::Silent,
    }
}

fn unknown(target: &Target) -> Error {
    Error::new(
        Reason::OutcomeUnknown,
        format!(
            "an earlier attempt at {target} may still run and cannot be stopped: it does not \
             answer and is not known to be dead; retry"
        ),
    )
}
