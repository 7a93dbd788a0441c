//! The simulation: sessions, the router, the fleet and its ranks under one
//! virtual clock, event by event.
//!
//! It guarantees:
//! - the clock only moves forward, and what happens at one moment happens in the
//!   order in which it was planned: the same setup gives the same run;
//! - every decision is the serving router's, over a snapshot of the fleet such as
//!   the server has;
//! - every turn is answered once. One whose rank dies is sent again as a whole,
//!   and its time goes on counting.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Arrival, Setup,
    events::What,
    fleet::{Fleet, MODEL},
    lane::Lane,
    oracle::Pool,
    outcome::{Effect, Outcome, TurnDone},
    policy::Policy,
    trace::{History, Trace},
};
use crate::{
    call::RouteReason,
    engine::sim::{
        radix::NodeId,
        scheduler::{Event, JobId},
    },
    fleet::snapshot::{LoadTicket, RankSlot},
    ids::{AffinityKey, Tenant},
    routing::{Needs, PinKey, RouteRequest, Router},
};

/// Between two looks for idle pins, as the server takes them.
const SWEEP: u64 = 10_000_000_000;

/// Why a simulation has no end.
#[derive(Debug, thiserror::Error)]
pub enum Stuck {
    /// Requests wait for a rank, and none will come.
    #[error(
        "after {} no rank takes the {waiting} waiting requests, and no event changes that",
        humantime::format_duration(*at)
    )]
    NoRank {
        /// Virtual time.
        at: Duration,
        /// How many.
        waiting: usize,
    },
    /// An engine refused what fits it, or stopped.
    #[error("a simulated engine failed after {}: {what}", humantime::format_duration(*at))]
    Engine {
        /// Virtual time.
        at: Duration,
        /// What it said.
        what: String,
    },
}

/// Something that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Plan {
    /// An event of the setup, by its number.
    Event(usize),
    /// A drain's grace is over, unless another drain has begun since.
    Grace { replica: usize, drain: u64 },
    /// A replica computes again, unless another pause has begun since.
    Resume { replica: usize, pause: u64 },
    /// A session's next turn.
    Send(usize),
    /// A rank's step ends, unless it came to nothing.
    Step { lane: usize, epoch: u64 },
}

/// A request that a rank has.
pub(super) struct Placed {
    pub(super) lane: usize,
    slot: RankSlot,
    job: JobId,
    /// Counts as load while it lives.
    _ticket: LoadTicket,
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
    pub(super) placed: Option<Placed>,
    pooled: Option<NodeId>,
    /// Of the last request.
    pub(super) last: Option<RankSlot>,
}

/// All of it.
pub(super) struct World<'a> {
    trace: &'a Trace,
    pub(super) setup: &'a Setup,
    policy: &'a Policy,
    router: Router,
    pub(super) fleet: Fleet,
    pub(super) lanes: Vec<Lane>,
    pub(super) sessions: Vec<Live>,
    begun: usize,
    answered: usize,
    epoch: Instant,
    clock: u64,
    next_sweep: u64,
    plans: BinaryHeap<Reverse<(u64, u64, Plan)>>,
    planned: u64,
    jobs: u64,
    /// Ranks that may have something to do now.
    pub(super) woken: BTreeSet<usize>,
    /// Sessions whose request no rank takes now.
    stranded: BTreeSet<usize>,
    /// Ranks that died, with the event; and those that came back.
    pub(super) gone: HashMap<RankSlot, usize>,
    pub(super) returned: BTreeSet<usize>,
    /// Drains and pauses by replica, to tell them apart.
    pub(super) drains: Vec<u64>,
    pub(super) pauses: Vec<u64>,
    pool: Pool,
    turns: Vec<TurnDone>,
    ended: Vec<Duration>,
    moves: BTreeMap<String, u64>,
    moves_to_returned: u64,
    pub(super) effects: Vec<Effect>,
}

/// Runs one policy over a trace.
///
/// # Errors
/// When requests wait for ranks that no event brings back.
pub fn run(trace: &Trace, setup: &Setup, policy: &Policy) -> Result<Outcome, Stuck> {
    let mut world = World::new(trace, setup, policy);
    world.begin();
    while world.answered < world.trace.sessions.len() {
        let Some(Reverse((at, _, plan))) = world.plans.pop() else {
            return Err(world.stuck());
        };
        world.advance(at)?;
        world.carry_out(plan)?;
        // What happens at one moment is seen by the steps that begin in it.
        if world
            .plans
            .peek()
            .is_none_or(|Reverse((next, ..))| *next > at)
        {
            world.begin_steps();
        }
    }
    Ok(world.outcome())
}

impl<'a> World<'a> {
    fn new(trace: &'a Trace, setup: &'a Setup, policy: &'a Policy) -> Self {
        let weights: Arc<str> = "v1".into();
        let shape = &setup.shape;
        let lanes = shape.replicas * shape.ranks;
        Self {
            router: Router::new(policy.router),
            fleet: Fleet::new(shape.clone(), &weights),
            lanes: (0..lanes)
                .map(|_| Lane::new(setup.rank(), Arc::clone(&weights)))
                .collect(),
            sessions: Vec::with_capacity(trace.sessions.len()),
            begun: 0,
            answered: 0,
            // Only differences of it are used.
            epoch: Instant::now(),
            clock: 0,
            next_sweep: SWEEP,
            plans: BinaryHeap::new(),
            planned: 0,
            jobs: 0,
            woken: BTreeSet::new(),
            stranded: BTreeSet::new(),
            gone: HashMap::new(),
            returned: BTreeSet::new(),
            drains: vec![0; shape.replicas],
            pauses: vec![0; shape.replicas],
            pool: Pool::new(shape.kv_tokens.saturating_mul(lanes), shape.page),
            turns: Vec::with_capacity(trace.turns()),
            ended: vec![Duration::ZERO; trace.sessions.len()],
            moves: BTreeMap::new(),
            moves_to_returned: 0,
            effects: Vec::new(),
            trace,
            setup,
            policy,
        }
    }

    fn begin(&mut self) {
        for (number, event) in self.setup.events.iter().enumerate() {
            self.effects.push(Effect {
                event: event.clone(),
                there: 0,
                moved: 0,
                lost: 0,
            });
            self.plan(nanos(event.at), Plan::Event(number));
        }
        for (number, session) in self.trace.sessions.iter().enumerate() {
            let key = AffinityKey::new(format!("{}/{number}", self.setup.seed));
            self.sessions.push(Live {
                key: session
                    .keyed
                    .then(|| PinKey::new(&Tenant::default(), MODEL, None, &key)),
                history: History::new(number),
                turn: 0,
                sent: 0,
                attempts: 0,
                moved: false,
                over: false,
                placed: None,
                pooled: None,
                last: None,
            });
        }
        let all = self.sessions.len();
        let at_once = match self.setup.arrival {
            Arrival::Live(most) => most.min(all),
            Arrival::Every(_) | Arrival::Recorded => all,
        };
        for _ in 0..at_once {
            self.begin_session();
        }
    }

    /// Plans the first turn of the next session.
    fn begin_session(&mut self) {
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

    pub(super) fn plan(&mut self, at: u64, plan: Plan) {
        self.planned += 1;
        self.plans.push(Reverse((at, self.planned, plan)));
    }

    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    fn now(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.clock)
    }

    fn advance(&mut self, to: u64) -> Result<(), Stuck> {
        if to < self.clock {
            return Err(self.failed("time went back".to_owned()));
        }
        self.clock = to;
        if to >= self.next_sweep {
            self.router.sweep(self.now());
            self.next_sweep = to - to % SWEEP + SWEEP;
        }
        Ok(())
    }

    fn carry_out(&mut self, plan: Plan) -> Result<(), Stuck> {
        match plan {
            Plan::Send(session) => {
                self.ask(session);
                self.dispatch(session, &[])
            }
            Plan::Step { lane, epoch } => {
                if self.lanes[lane].epoch != epoch {
                    return Ok(());
                }
                self.woken.insert(lane);
                for event in self.lanes[lane].end() {
                    self.take(event)?;
                }
                Ok(())
            }
            Plan::Event(number) => self.happen(number),
            Plan::Grace { replica, drain } => {
                self.grace_over(replica, drain);
                self.unstrand()
            }
            Plan::Resume { replica, pause } => {
                self.resume(replica, pause);
                self.unstrand()
            }
        }
    }

    fn begin_steps(&mut self) {
        while let Some(lane) = self.woken.pop_first() {
            if let Some(took) = self.lanes[lane].begin() {
                let epoch = self.lanes[lane].epoch;
                let at = self.clock.saturating_add(nanos(took));
                self.plan(at, Plan::Step { lane, epoch });
            }
        }
    }

    /// A session sends its turn.
    fn ask(&mut self, session: usize) {
        let live = &mut self.sessions[session];
        let turn = &self.trace.sessions[session].turns[live.turn];
        live.sent = self.clock;
        live.attempts = 0;
        live.moved = false;
        let prompt = live.history.ask(live.turn, turn);
        live.pooled = Some(self.pool.ask(prompt));
    }

    /// A rank for a session's request. `avoid`: where it has just failed.
    pub(super) fn dispatch(&mut self, session: usize, avoid: &[RankSlot]) -> Result<(), Stuck> {
        let now = self.now();
        let live = &mut self.sessions[session];
        let turn = &self.trace.sessions[session].turns[live.turn];
        live.attempts += 1;
        let needs = Needs {
            model: MODEL.into(),
            context: turn.prompt().saturating_add(turn.output),
            ..Needs::default()
        };
        let request = RouteRequest {
            key: live.key,
            request: request_id(self.setup.seed, session, live.turn, live.attempts),
            samples: 1,
            prompt_tokens: turn.prompt(),
            needs: &needs,
            policy: self.policy.routing,
            avoid,
        };
        let Ok(decision) = self.router.route(self.fleet.snapshot(), &request, now) else {
            live.attempts -= 1;
            self.stranded.insert(session);
            return Ok(());
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
        });
        match before {
            None => self.lanes[lane].begins_trajectory(),
            Some(before) if before != decision.slot => {
                live.moved = true;
                *self.moves.entry(name(decision.reason)).or_default() += 1;
                if self.returned.contains(&lane) {
                    self.moves_to_returned += 1;
                }
                if let Some(&event) = self.gone.get(&before) {
                    self.effects[event].moved += 1;
                }
            }
            Some(_) => {}
        }
        self.woken.insert(lane);
        for event in self.lanes[lane].submit(self.clock, job, text, turn.output) {
            self.take(event)?;
        }
        Ok(())
    }

    /// Tries again what found no rank.
    pub(super) fn unstrand(&mut self) -> Result<(), Stuck> {
        for session in std::mem::take(&mut self.stranded) {
            self.dispatch(session, &[])?;
        }
        Ok(())
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

    fn take(&mut self, event: Event) -> Result<(), Stuck> {
        match event {
            Event::Started { .. } | Event::Progress { .. } => Ok(()),
            Event::Done { job, done } => self.answered(job, done.total, done.cached),
            Event::Refused { why, .. } => Err(self.failed(format!("it refused: {why:?}"))),
            Event::Crashed { .. } => Err(self.failed("it crashed".to_owned())),
        }
    }

    fn answered(&mut self, job: JobId, output: u32, cached: u32) -> Result<(), Stuck> {
        let session = usize::try_from(job.0 & u64::from(u32::MAX)).unwrap_or(usize::MAX);
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
                .grown(self.fleet.snapshot(), key, placed.slot, held, now);
        }
        let text = live.history.answered(live.turn, output);
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
        Ok(())
    }

    fn failed(&self, what: String) -> Stuck {
        Stuck::Engine {
            at: Duration::from_nanos(self.clock),
            what,
        }
    }

    fn stuck(&self) -> Stuck {
        if self.stranded.is_empty() {
            return self.failed("it stands still with requests waiting".to_owned());
        }
        Stuck::NoRank {
            at: Duration::from_nanos(self.clock),
            waiting: self.stranded.len(),
        }
    }

    fn outcome(self) -> Outcome {
        Outcome {
            turns: self.turns,
            sessions: self.ended,
            ranks: self.lanes.into_iter().map(Lane::finish).collect(),
            moves: self.moves,
            moves_to_returned: self.moves_to_returned,
            effects: self.effects,
            pooled: self.pool.found(),
        }
    }

    fn happen(&mut self, number: usize) -> Result<(), Stuck> {
        let what = self.setup.events[number].what.clone();
        match what {
            What::Die(replica) => self.die(number, replica)?,
            What::Return(replica) => self.back(replica),
            What::Drain { replica, grace } => self.drain(replica, grace),
            What::Weights {
                version,
                replica,
                pause,
            } => self.load(&version, replica, pause),
        }
        self.unstrand()
    }
}

/// Saturates after 584 years.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
