//! The way of a turn: a session asks, the router chooses a rank, the rank answers
//! or is lost, and the session goes on.
//!
//! It guarantees: a session has one request at a time; an answer that nobody waits
//! for ends the simulation; what no rank takes now waits until the fleet changes.

use std::time::Duration;

use super::{
    Arrival,
    fleet::MODEL,
    outcome::TurnDone,
    trace::History,
    world::{Plan, Stuck, World, nanos},
};
use crate::{
    call::{RouteReason, RoutingPolicy},
    engine::sim::{
        radix::NodeId,
        scheduler::{Event, JobId},
    },
    fleet::snapshot::{LoadTicket, RankSlot},
    ids::{AffinityKey, Tenant},
    routing::{self, Hints, Needs, NoRoute, PinKey, RouteRequest, moves::Queued},
};

/// A request that a rank has.
pub(super) struct Placed {
    lane: usize,
    slot: RankSlot,
    job: JobId,
    /// Counts as load while it lives.
    _ticket: LoadTicket,
    /// Its prompt waits to be computed while this lives.
    queued: Option<Queued>,
}

/// A session that waits for room in some KV cache.
pub(super) struct InLine {
    session: usize,
    since: u64,
    /// As the router sees it.
    place: routing::InLine,
}

/// A session that has begun.
pub(super) struct Live {
    key: Option<PinKey>,
    history: History,
    turn: usize,
    sent: u64,
    attempts: u32,
    moved: bool,
    over: bool,
    placed: Option<Placed>,
    pooled: Option<NodeId>,
    /// Of the last request.
    last: Option<RankSlot>,
}

impl Live {
    /// Session `number`, not begun.
    pub(super) fn new(number: usize, keyed: bool, seed: u64) -> Self {
        let key = AffinityKey::new(format!("{seed}/{number}"));
        Self {
            key: keyed.then(|| PinKey::new(&Tenant::default(), MODEL, None, &key)),
            history: History::new(number),
            turn: 0,
            sent: 0,
            attempts: 0,
            moved: false,
            over: false,
            placed: None,
            pooled: None,
            last: None,
        }
    }
}

impl World<'_> {
    /// Plans the first turn of the next session.
    pub(super) fn begin_session(&mut self) {
        let number = self.begun;
        let Some(session) = self.trace.sessions.get(number) else {
            return;
        };
        self.begun += 1;
        let at = match self.setup.arrival {
            Arrival::Live(_) => self.clock,
            Arrival::Every(gap) => nanos(gap).saturating_mul(number as u64),
            Arrival::Recorded => nanos(session.starts.unwrap_or_default()),
        };
        let think = session.turns.first().map_or(0, |turn| nanos(turn.think));
        self.plan(at.saturating_add(think), Plan::Send(number));
    }

    /// A session sends its turn.
    pub(super) fn ask(&mut self, session: usize) {
        let live = &mut self.sessions[session];
        let turn = &self.trace.sessions[session].turns[live.turn];
        live.sent = self.clock;
        live.attempts = 0;
        live.moved = false;
        live.history.ask(live.turn, turn);
    }

    /// A rank for a session's request. `avoid`: where it has just failed.
    pub(super) fn dispatch(&mut self, session: usize, avoid: &[RankSlot]) -> Result<(), Stuck> {
        match self.try_dispatch(session, avoid, None)? {
            Ok(()) => {}
            Err(NoRoute::KvFull) => {
                let wait = self.policy.router.kv_admission.unwrap_or_default().wait;
                self.plan(self.clock.saturating_add(nanos(wait)), Plan::Room);
                let key = self.sessions[session].key;
                self.line.push(InLine {
                    session,
                    since: self.clock,
                    place: self.router.wait_for_room(&MODEL.into(), key),
                });
                // It may have left its rank to others.
                self.let_in()?;
            }
            Err(_) => {
                self.stranded.insert(session);
            }
        }
        Ok(())
    }

    /// The same. `waited`: in line for room, for so long.
    fn try_dispatch(
        &mut self,
        session: usize,
        avoid: &[RankSlot],
        waited: Option<Duration>,
    ) -> Result<Result<(), NoRoute>, Stuck> {
        let now = self.now();
        let live = &mut self.sessions[session];
        let turn = &self.trace.sessions[session].turns[live.turn];
        live.attempts += 1;
        let needs = Needs {
            model: MODEL.into(),
            context: turn.prompt().saturating_add(turn.output),
            ..Needs::default()
        };
        let blocks = if self.policy.routing == RoutingPolicy::Prefix {
            live.history.text().blocks()
        } else {
            Vec::new()
        };
        let request = RouteRequest {
            key: live.key,
            request: request_id(self.setup.seed, session, live.turn, live.attempts),
            samples: 1,
            prompt_tokens: turn.prompt(),
            needs: &needs,
            policy: self.policy.routing,
            avoid,
            hints: Hints {
                blocks: &blocks,
                waited,
                ..Hints::default()
            },
        };
        let decision = match self.router.route(self.fleet.snapshot(), &request, now) {
            Ok(decision) => decision,
            Err(none) => {
                live.attempts -= 1;
                return Ok(Err(none));
            }
        };
        let Some(lane) = self.fleet.rank_of(decision.slot) else {
            return Err(self.failed("the router chose a rank that is gone".to_owned()));
        };
        self.jobs += 1;
        let job = JobId((self.jobs << 32) | session as u64);
        let before = live.last.replace(decision.slot);
        let text = live.history.prompt(live.turn);
        live.placed = Some(Placed {
            lane,
            slot: decision.slot,
            job,
            _ticket: decision.ticket,
            queued: Some(decision.queued),
        });
        match before {
            None => self.lanes[lane].begins_trajectory(),
            Some(before) if before != decision.slot => {
                live.moved = true;
                *self.moves.entry(name(decision.reason)).or_default() += 1;
                if let Some(&event) = self.gone.get(&before) {
                    // It looks for a new home, and may find it at the same place.
                    self.effects[event].moved += 1;
                } else if self.returned.contains(&lane) {
                    self.moves_to_returned += 1;
                }
            }
            Some(_) => {}
        }
        self.woken.insert(lane);
        for event in self.lanes[lane].submit(self.clock, job, text, turn.output) {
            self.take(event)?;
        }
        Ok(Ok(()))
    }

    /// Tries again what found no rank.
    pub(super) fn unstrand(&mut self) -> Result<(), Stuck> {
        for session in std::mem::take(&mut self.stranded) {
            self.dispatch(session, &[])?;
        }
        self.let_in()
    }

    /// Those who wait for room, in the router's order.
    pub(super) fn let_in(&mut self) -> Result<(), Stuck> {
        let longest = nanos(self.policy.router.kv_admission.unwrap_or_default().wait);
        let clock = self.clock;
        loop {
            let tries = |waits: &InLine| {
                waits.place.is_first() || clock.saturating_sub(waits.since) >= longest
            };
            let Some(next) = self.line.iter().position(tries) else {
                return Ok(());
            };
            let session = self.line[next].session;
            let waited = Duration::from_nanos(clock.saturating_sub(self.line[next].since));
            match self.try_dispatch(session, &[], Some(waited))? {
                Err(NoRoute::KvFull) => return Ok(()),
                Ok(()) => {}
                Err(_) => {
                    self.stranded.insert(session);
                }
            }
            self.line.remove(next);
        }
    }

    /// Takes the requests that ranks have away from them, to be sent again.
    pub(super) fn lose(&mut self, lanes: &std::ops::Range<usize>) -> Vec<(usize, RankSlot)> {
        let mut lost = Vec::new();
        for (number, live) in self.sessions.iter_mut().enumerate() {
            if let Some(placed) = live.placed.take_if(|p| lanes.contains(&p.lane)) {
                self.lanes[placed.lane].left(self.clock);
                lost.push((number, placed.slot));
            }
        }
        lost
    }

    /// Sessions that are not over and whose last request went to one of these.
    pub(super) fn living_at(&self, slots: &[RankSlot]) -> u64 {
        let there =
            |live: &&Live| !live.over && live.last.is_some_and(|last| slots.contains(&last));
        self.sessions.iter().filter(there).count() as u64
    }

    pub(super) fn take(&mut self, event: Event) -> Result<(), Stuck> {
        match event {
            Event::Started { job, .. } => {
                self.started(job);
                Ok(())
            }
            Event::Progress { .. } => Ok(()),
            Event::Done { job, done } => self.answered(job, done.total, done.cached),
            Event::Refused { why, .. } => Err(self.failed(format!("it refused: {why:?}"))),
            Event::Crashed { .. } => Err(self.failed("it crashed".to_owned())),
        }
    }

    /// The pool of all caches sees a turn when its prompt begins to be computed,
    /// as ranks do; one that is lost and sent again is seen once.
    fn started(&mut self, job: JobId) {
        if let Some(live) = self.sessions.get_mut(session_of(job)) {
            if let Some(placed) = live.placed.as_mut().filter(|p| p.job == job) {
                placed.queued = None;
            }
            if live.pooled.is_none() {
                live.pooled = Some(self.pool.ask(live.history.text()));
            }
        }
    }

    fn answered(&mut self, job: JobId, output: u32, cached: u32) -> Result<(), Stuck> {
        let session = session_of(job);
        let now = self.now();
        let known = self.sessions.get_mut(session);
        let Some((live, placed)) = known.and_then(|live| {
            let placed = live.placed.take_if(|placed| placed.job == job)?;
            Some((live, placed))
        }) else {
            return Err(self.failed("it answered what nobody waits for".to_owned()));
        };
        let turns = &self.trace.sessions[session].turns;
        let prompt = turns[live.turn].prompt();
        self.lanes[placed.lane].left(self.clock);
        self.turns.push(TurnDone {
            session,
            turn: live.turn,
            rank: placed.lane,
            sent: Duration::from_nanos(live.sent),
            done: Duration::from_nanos(self.clock),
            prompt,
            output,
            cached,
            attempts: live.attempts,
            moved: live.moved,
        });
        if let Some(key) = live.key {
            // The last token's KV is not computed.
            let held = (prompt + output).saturating_sub(1);
            self.router
                .grown(self.fleet.snapshot(), key, placed.slot, held, None, now);
        }
        let text = live.history.answered(live.turn, output);
        if self.policy.routing == RoutingPolicy::Prefix {
            self.router.prefix_seen(&text.blocks(), placed.slot, now);
        }
        if let Some(node) = live.pooled.take() {
            self.pool.answered(node, text);
        }
        live.turn += 1;
        if let Some(next) = turns.get(live.turn) {
            let at = self.clock.saturating_add(nanos(next.think));
            self.plan(at, Plan::Send(session));
            return Ok(());
        }
        live.over = true;
        if let Some(key) = live.key {
            self.router.finish(key);
        }
        self.answered += 1;
        self.ended[session] = Duration::from_nanos(self.clock);
        if matches!(self.setup.arrival, Arrival::Live(_)) {
            self.begin_session();
        }
        // Its KV is free: whoever waits for room may have some now.
        self.unstrand()
    }
}

/// Which session's request a job is.
fn session_of(job: JobId) -> usize {
    usize::try_from(job.0 & u64::from(u32::MAX)).unwrap_or(usize::MAX)
}

/// Names an attempt, and is what `random` draws from.
fn request_id(seed: u64, session: usize, turn: usize, attempt: u32) -> u128 {
    let mut bytes = [0; 32];
    let parts = [seed, session as u64, turn as u64, u64::from(attempt)];
    for (place, part) in bytes.chunks_exact_mut(8).zip(parts) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    xxhash_rust::xxh3::xxh3_128(&bytes)
}

/// As the API writes it, in small letters: `replica_lost`.
fn name(reason: RouteReason) -> String {
    let mut name = String::new();
    for letter in format!("{reason:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}
