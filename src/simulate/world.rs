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
    fleet::Fleet,
    lane::Lane,
    oracle::Pool,
    outcome::{Effect, Outcome, TurnDone},
    policy::Policy,
    trace::Trace,
    turns::{InLine, Live},
};
use crate::{fleet::snapshot::RankSlot, routing::Router};

/// Between two looks for idle pins, as the server takes them.
const SWEEP: u64 = 5_000_000_000;

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
    /// The grace of the drain that this event began is over.
    Grace(usize),
    /// The replicas that this event paused compute again.
    Resume(usize),
    /// A session's next turn.
    Send(usize),
    /// Somebody has waited for room as long as anybody does.
    Room,
    /// A rank's step ends, unless it came to nothing.
    Step { lane: usize, epoch: u64 },
}

/// All of it.
pub(super) struct World<'a> {
    pub(super) trace: &'a Trace,
    pub(super) setup: &'a Setup,
    pub(super) policy: &'a Policy,
    pub(super) router: Router,
    pub(super) fleet: Fleet,
    pub(super) lanes: Vec<Lane>,
    pub(super) sessions: Vec<Live>,
    pub(super) begun: usize,
    pub(super) answered: usize,
    epoch: Instant,
    pub(super) clock: u64,
    next_sweep: u64,
    plans: BinaryHeap<Reverse<(u64, u64, Plan)>>,
    planned: u64,
    pub(super) jobs: u64,
    /// Ranks that may have something to do now.
    pub(super) woken: BTreeSet<usize>,
    /// Sessions whose request no rank takes now.
    pub(super) stranded: BTreeSet<usize>,
    /// Sessions that wait for room.
    pub(super) line: Vec<InLine>,
    /// Ranks that died, with the event; and those that came back.
    pub(super) gone: HashMap<RankSlot, usize>,
    pub(super) returned: BTreeSet<usize>,
    /// By replica: the event whose drain or pause it is in.
    pub(super) drained_by: Vec<Option<usize>>,
    pub(super) paused_by: Vec<Option<usize>>,
    pub(super) pool: Pool,
    pub(super) turns: Vec<TurnDone>,
    pub(super) ended: Vec<Duration>,
    pub(super) moves: BTreeMap<String, u64>,
    pub(super) moves_to_returned: u64,
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
            line: Vec::new(),
            gone: HashMap::new(),
            returned: BTreeSet::new(),
            drained_by: vec![None; shape.replicas],
            paused_by: vec![None; shape.replicas],
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
            let live = Live::new(number, session.keyed, self.setup.seed);
            self.sessions.push(live);
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

    pub(super) fn plan(&mut self, at: u64, plan: Plan) {
        self.planned += 1;
        self.plans.push(Reverse((at, self.planned, plan)));
    }

    pub(super) fn now(&self) -> Instant {
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
            self.unstrand()?;
        }
        Ok(())
    }

    fn carry_out(&mut self, plan: Plan) -> Result<(), Stuck> {
        match plan {
            Plan::Send(session) => {
                self.ask(session);
                self.dispatch(session, &[])
            }
            Plan::Room => self.let_in(),
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
            Plan::Grace(event) => {
                self.grace_over(event);
                self.unstrand()
            }
            Plan::Resume(event) => {
                self.resume(event);
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

    pub(super) fn failed(&self, what: String) -> Stuck {
        Stuck::Engine {
            at: Duration::from_nanos(self.clock),
            what,
        }
    }

    fn stuck(&self) -> Stuck {
        if self.stranded.is_empty() && self.line.is_empty() {
            return self.failed("it stands still with requests waiting".to_owned());
        }
        Stuck::NoRank {
            at: Duration::from_nanos(self.clock),
            waiting: self.stranded.len() + self.line.len(),
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
            What::Drain { replica, grace } => self.drain(number, replica, grace),
            What::Weights {
                version,
                replica,
                pause,
            } => self.load(number, &version, replica, pause),
        }
        self.unstrand()
    }
}

/// Saturates after 584 years.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
