//! Every state that the life of a key can reach, together with a model of its
//! callers, of the layer that drives it, of the disk, of the network and of two
//! engines. The life is the real code, `life::apply`; the rest is the protocol
//! as the layers keep it:
//!
//! - two callers, one with a retry (`BERTH_LIFE_CALLS=2`: both), whose deadlines
//!   may pass at any moment;
//! - one crash of Berth at any step, with any part of the last batch on disk;
//! - two replicas, one of which may be lost at any step;
//! - requests, replies and aborts arrive in any order, late or never, except
//!   that a request which was sent has arrived, or never will, a moment after
//!   its first abort was answered (the second abort waits for that moment);
//! - one reply comes twice.
//!
//! In every state: a key has one result, what was told is on disk, at most one
//! copy lives at engines that can be reached, and no result of a fenced attempt
//! is committed. Mutations of the protocol show that each of these can fail.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::LazyLock,
    time::SystemTime,
};

use berth::{
    ids::{EngineRequestId, Incarnation, ReplicaId, Target, Tenant},
    store::{
        AttemptRecord, Fingerprint, OwnerId,
        life::{self, Applied, Command, Event, Record, Rejection, Reply, SampleState},
    },
};

/// Attempts that the layer makes at one key, over crashes too: enough for every
/// fault that the model has, each at its worst moment.
const ATTEMPTS: u8 = 3;

/// What is changed in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    None,
    /// The store commits whatever result comes.
    NoCompareAndSwap,
    /// The next attempt is sent before the old one is aborted.
    SendBeforeAbort,
    /// A result is told before it is on disk.
    ToldBeforeDurable,
    /// One abort is enough.
    OneAbort,
    /// An attempt is sent before it is on disk.
    SentBeforeDurable,
}

/// An event of the key as the model keeps it. The result of an attempt is the
/// attempt's number: two attempts never give the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ev {
    Sent { n: u8, replica: u8 },
    Fenced { n: u8 },
    Done { n: u8, result: u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    Request { n: u8, replica: u8, run: u8 },
    Abort { n: u8, replica: u8, run: u8 },
    Reply { n: u8, run: u8 },
}

/// How far the fencing of an attempt is. Each abort is sent, and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    ToSend(u8),
    Sent(u8),
    Answered(u8),
}

/// The one task that generates the key in this run of Berth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Task {
    Idle,
    Fencing {
        n: u8,
        replica: u8,
        stage: Stage,
    },
    /// Waits for the disk.
    FenceWritten,
    /// Waits for the disk.
    Dispatching {
        n: u8,
        replica: u8,
    },
    Sending {
        n: u8,
        replica: u8,
    },
    Waiting {
        n: u8,
        replica: u8,
    },
    /// Waits for the disk.
    Committing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Caller {
    Away { calls: u8 },
    Waits { calls: u8 },
    Told(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    disk: Vec<Ev>,
    /// In memory, not yet on disk.
    pending: Vec<Ev>,
    /// This run of Berth owns the key.
    owned: bool,
    run: u8,
    task: Task,
    callers: [Caller; 2],
    alive: [bool; 2],
    /// Copies that run: attempt, replica, and the run that holds the connection.
    copies: BTreeSet<(u8, u8, u8)>,
    network: BTreeSet<Message>,
    fenced: BTreeSet<u8>,
    told: Option<u8>,
    crashes: u8,
    losses: u8,
    doubles: u8,
}

impl World {
    /// Nothing has happened. The second caller may call this often.
    fn start(second: u8) -> Self {
        Self {
            disk: Vec::new(),
            pending: Vec::new(),
            owned: false,
            run: 1,
            task: Task::Idle,
            callers: [Caller::Away { calls: 2 }, Caller::Away { calls: second }],
            alive: [true; 2],
            copies: BTreeSet::new(),
            network: BTreeSet::new(),
            fenced: BTreeSet::new(),
            told: None,
            crashes: 1,
            losses: 1,
            doubles: 1,
        }
    }

    fn owner(&self) -> OwnerId {
        OwnerId(u64::from(self.run))
    }

    /// The record as these events make it: the real code folds them.
    fn fold(events: impl Iterator<Item = Ev>) -> Option<Record<u8>> {
        let mut record = None;
        for event in events {
            record
                .get_or_insert_with(blank)
                .replay(match event {
                    Ev::Sent { n, replica } => Event::Dispatched {
                        sample: 0,
                        attempt: attempt(n, replica),
                    },
                    Ev::Fenced { n } => Event::Fenced {
                        sample: 0,
                        attempt: u32::from(n),
                    },
                    Ev::Done { n, result } => Event::Committed {
                        sample: 0,
                        attempt: u32::from(n),
                        result,
                    },
                })
                .unwrap();
        }
        record
    }

    /// The record as this run of Berth has it in memory.
    fn record(&self) -> Option<Record<u8>> {
        let events = self.disk.iter().chain(&self.pending).copied();
        let mut record = Self::fold(events);
        if self.owned {
            record.get_or_insert_with(blank).owner = Some(self.owner());
        }
        record
    }

    /// Sends a command to the store. What it decides is pending until the sync.
    fn store(&mut self, command: Command<u8>) -> Result<Reply, Rejection> {
        let mut slot = self.record();
        let Applied { reply, event } = life::apply(&mut slot, command)?;
        self.owned = slot.is_some_and(|record| record.owner.is_some());
        self.pending.extend(event.map(|event| match event {
            Event::Dispatched { attempt, .. } => Ev::Sent {
                n: attempt.number as u8,
                replica: attempt.target.rank as u8,
            },
            Event::Fenced { attempt, .. } => Ev::Fenced { n: attempt as u8 },
            Event::Committed {
                attempt, result, ..
            } => Ev::Done {
                n: attempt as u8,
                result,
            },
            other => panic!("{other:?}"),
        }));
        Ok(reply)
    }

    fn waits(&self) -> bool {
        self.callers
            .iter()
            .any(|c| matches!(c, Caller::Waits { .. }))
    }

    /// Tells every caller that waits.
    fn tell(&mut self, result: u8) -> Result<(), String> {
        for caller in &mut self.callers {
            if matches!(caller, Caller::Waits { .. }) {
                *caller = Caller::Told(result);
                if self.told.is_some_and(|first| first != result) {
                    return Err("one key, two results".into());
                }
                self.told = Some(result);
            }
        }
        Ok(())
    }

    /// Nobody gets a result from this task; the key is given up.
    fn give_up(&mut self) {
        for caller in &mut self.callers {
            if let Caller::Waits { calls } = *caller {
                *caller = Caller::Away { calls };
            }
        }
        let owner = self.owner();
        if self.owned {
            self.store(Command::Release { owner }).unwrap();
        }
        self.task = Task::Idle;
    }

    /// The next thing to do for a key that is owned. One world for each replica
    /// that may be chosen.
    fn go_on(mut self) -> Vec<Self> {
        let record = self.record().unwrap();
        let (last, orphan) = match &record.samples[0] {
            SampleState::Dispatched(a) => (a.number as u8, Some(a.target.rank as u8)),
            other => (other.last_attempt() as u8, None),
        };
        if let Some(replica) = orphan {
            self.task = Task::Fencing {
                n: last,
                replica,
                stage: Stage::ToSend(1),
            };
            return vec![self];
        }
        let n = last + 1;
        if n > ATTEMPTS {
            self.give_up();
            return vec![self];
        }
        let owner = self.owner();
        let mut worlds = Vec::new();
        let choices = if self.replicas_are_alike() { 1 } else { 2 };
        for replica in 0..choices {
            if !self.alive[usize::from(replica)] {
                continue;
            }
            let mut world = self.clone();
            let command = Command::Dispatch {
                owner,
                sample: 0,
                attempt: attempt(n, replica),
            };
            assert_eq!(world.store(command), Ok(Reply::Accepted));
            world.task = Task::Dispatching { n, replica };
            worlds.push(world);
        }
        worlds
    }

    /// The same world without what cannot matter any more, so that states which
    /// behave alike are one: callers have no names, connections of earlier runs
    /// are all alike, and a message that finds nobody is gone.
    fn reduced(mut self) -> Self {
        self.callers.sort_unstable();
        let run = self.run;
        self.copies = std::mem::take(&mut self.copies)
            .into_iter()
            .map(|(n, replica, of)| (n, replica, if of == run { of } else { 0 }))
            .collect();
        let alive = self.alive;
        let replies = self
            .network
            .iter()
            .any(|m| matches!(m, Message::Reply { .. }));
        let is_final = replies && self.record().is_some_and(|record| record.is_final());
        self.network = std::mem::take(&mut self.network)
            .into_iter()
            .filter_map(|message| match message {
                Message::Request { replica, .. } if !alive[usize::from(replica)] => None,
                Message::Request {
                    n,
                    replica,
                    run: of,
                } => Some(Message::Request {
                    n,
                    replica,
                    run: if of == run { of } else { 0 },
                }),
                // Stale, and every later answer to it too.
                Message::Reply { run: of, .. } if of != run || is_final => None,
                other => Some(other),
            })
            .collect();
        let (network, copies, task) = (self.network.clone(), &self.copies, self.task);
        self.network.retain(|message| match message {
            Message::Abort { n, run: of, .. } => {
                let waited_for =
                    matches!(task, Task::Fencing { n: fencing, .. } if fencing == *n && *of == run);
                let coming = |m: &Message| matches!(m, Message::Request { n: of, .. } if of == n);
                waited_for || copies.iter().any(|c| c.0 == *n) || network.iter().any(coming)
            }
            _ => true,
        });
        self
    }

    /// Replicas are alike as long as nothing has happened to either.
    fn replicas_are_alike(&self) -> bool {
        self.alive == [true; 2] && self.disk.is_empty() && self.pending.is_empty()
    }

    /// What must hold in every state.
    fn check(&self) -> Result<(), String> {
        let result_of = |record: &Option<Record<u8>>| match record.as_ref().map(|r| &r.samples[0]) {
            Some(SampleState::Done { result, .. }) => Some(*result),
            _ => None,
        };
        let durable = || Self::fold(self.disk.iter().copied());
        if self.told.is_some() && result_of(&durable()) != self.told {
            return Err("a result that was told is not on disk".into());
        }
        if !self.fenced.is_empty()
            && result_of(&self.record()).is_some_and(|result| self.fenced.contains(&result))
        {
            return Err("a result of a fenced attempt is committed".into());
        }
        let reachable = |replica: u8| self.alive[usize::from(replica)];
        let running = self
            .copies
            .iter()
            .filter(|(_, replica, _)| reachable(*replica));
        let coming = self
            .network
            .iter()
            .filter(|m| matches!(m, Message::Request { replica, .. } if reachable(*replica)));
        if running.count() + coming.count() > 1 {
            return Err("two copies live at engines that can be reached".into());
        }
        Ok(())
    }
}

/// A key as it is claimed first. Made once: it is cloned millions of times.
static BLANK: LazyLock<Record<u8>> = LazyLock::new(|| {
    let fingerprint = Fingerprint([0; 32]);
    Record::new(Tenant::default(), fingerprint, 1, SystemTime::UNIX_EPOCH).unwrap()
});

static ATTEMPT: LazyLock<AttemptRecord> = LazyLock::new(|| AttemptRecord {
    number: 0,
    id: EngineRequestId::mint(),
    target: Target {
        replica: ReplicaId::new("r"),
        incarnation: Incarnation(1),
        rank: 0,
    },
    url: String::new(),
    binds: Some(7),
});

fn blank() -> Record<u8> {
    BLANK.clone()
}

fn attempt(n: u8, replica: u8) -> AttemptRecord {
    let mut attempt = ATTEMPT.clone();
    attempt.number = u32::from(n);
    attempt.target.rank = u32::from(replica);
    attempt
}

/// One step and where it leads: a world, or what it broke.
type Step = (String, Result<World, String>);

fn steps(world: &World, mutation: Mutation) -> Vec<Step> {
    let mut steps = Steps {
        world,
        mutation,
        found: Vec::new(),
    };
    steps.callers();
    steps.task();
    steps.disk();
    steps.network();
    steps.faults();
    steps.found
}

struct Steps<'a> {
    world: &'a World,
    mutation: Mutation,
    found: Vec<Step>,
}

impl Steps<'_> {
    fn to(&mut self, what: impl Into<String>, world: World) {
        self.found.push((what.into(), Ok(world)));
    }

    fn all(&mut self, what: &str, worlds: Vec<World>) {
        for world in worlds {
            self.to(what, world);
        }
    }

    fn callers(&mut self) {
        for (index, caller) in self.world.callers.into_iter().enumerate() {
            match caller {
                Caller::Away { calls } if calls > 0 => {
                    let mut world = self.world.clone();
                    world.callers[index] = Caller::Waits { calls: calls - 1 };
                    if world.task == Task::Idle {
                        self.claim(index, world);
                    } else {
                        self.to(format!("caller {index} joins"), world);
                    }
                }
                Caller::Waits { calls } => {
                    let mut world = self.world.clone();
                    world.callers[index] = Caller::Away { calls };
                    self.to(format!("caller {index}'s deadline passes"), world);
                }
                _ => {}
            }
        }
    }

    fn claim(&mut self, index: usize, mut world: World) {
        let what = format!("caller {index} claims");
        let claim = Command::Claim {
            owner: world.owner(),
            tenant: Tenant::default(),
            fingerprint: Fingerprint([0; 32]),
            num_samples: 1,
            now: SystemTime::UNIX_EPOCH,
        };
        match world.store(claim).unwrap() {
            Reply::Claimed => {
                let next = world.go_on();
                self.all(&what, next);
            }
            Reply::Finished => {
                let SampleState::Done { result, .. } = world.record().unwrap().samples[0] else {
                    panic!("finished without a result");
                };
                let told = world.tell(result);
                self.found.push((what, told.map(|()| world)));
            }
            other => panic!("{other:?}: the key is owned, but no task runs"),
        }
    }

    fn task(&mut self) {
        let world = self.world.clone();
        let owner = world.owner();
        match world.task {
            Task::Sending { n, replica } => {
                let mut world = world;
                let run = world.run;
                world.network.insert(Message::Request { n, replica, run });
                world.task = Task::Waiting { n, replica };
                self.to(format!("attempt {n} is sent to {replica}"), world);
            }
            Task::Waiting { n, replica } => {
                let mut lost = world.clone();
                lost.task = Task::Fencing {
                    n,
                    replica,
                    stage: Stage::ToSend(1),
                };
                self.to(format!("the connection of attempt {n} breaks"), lost);
                if !world.waits() {
                    let mut left = world;
                    let run = left.run;
                    left.network.insert(Message::Abort { n, replica, run });
                    left.give_up();
                    self.to("nobody waits any more", left);
                }
            }
            Task::Fencing { n, replica, stage } => self.fence(world, owner, n, replica, stage),
            Task::Idle | Task::FenceWritten | Task::Dispatching { .. } | Task::Committing => {}
        }
    }

    fn fence(&mut self, world: World, owner: OwnerId, n: u8, replica: u8, stage: Stage) {
        let aborts = if self.mutation == Mutation::OneAbort {
            1
        } else {
            2
        };
        let dead = !world.alive[usize::from(replica)];
        let early = self.mutation == Mutation::SendBeforeAbort && stage == Stage::ToSend(1);
        if dead || early || stage == Stage::Answered(aborts) {
            let mut fenced = world.clone();
            let fence = Command::Fence {
                owner,
                sample: 0,
                attempt: u32::from(n),
            };
            assert_eq!(fenced.store(fence), Ok(Reply::Accepted));
            fenced.fenced.insert(n);
            fenced.task = Task::FenceWritten;
            if early {
                // Its abort is sent all the same, only later.
                let run = fenced.run;
                fenced.network.insert(Message::Abort { n, replica, run });
            }
            self.to(format!("attempt {n} is fenced"), fenced);
            return;
        }
        let mut world = world;
        match stage {
            Stage::ToSend(which) => {
                let run = world.run;
                world.network.insert(Message::Abort { n, replica, run });
                world.task = Task::Fencing {
                    n,
                    replica,
                    stage: Stage::Sent(which),
                };
                self.to(format!("abort {which} of attempt {n} is sent"), world);
            }
            Stage::Answered(which) => {
                let arriving = world
                    .network
                    .iter()
                    .any(|m| matches!(m, Message::Request { n: other, .. } if *other == n));
                if !arriving {
                    world.task = Task::Fencing {
                        n,
                        replica,
                        stage: Stage::ToSend(which + 1),
                    };
                    self.to("a moment passes", world);
                }
            }
            Stage::Sent(_) => {}
        }
    }

    /// The batch becomes durable, and what waits for it goes on.
    fn disk(&mut self) {
        let mut world = self.world.clone();
        if world.pending.is_empty() {
            return;
        }
        let pending = std::mem::take(&mut world.pending);
        world.disk.extend(pending);
        match world.task {
            Task::FenceWritten => {
                let next = world.go_on();
                self.all("the fence is on disk", next);
            }
            Task::Dispatching { n, replica } => {
                world.task = Task::Sending { n, replica };
                self.to(format!("the dispatch of attempt {n} is on disk"), world);
            }
            Task::Committing => {
                let SampleState::Done { result, .. } = world.record().unwrap().samples[0] else {
                    panic!("committed without a result");
                };
                world.task = Task::Idle;
                let told = world.tell(result);
                self.found.push((
                    "the result is on disk and told".into(),
                    told.map(|()| world),
                ));
            }
            // A mutation has gone on without waiting.
            _ => self.to("the batch is on disk", world),
        }
    }

    fn network(&mut self) {
        for message in &self.world.network {
            let mut world = self.world.clone();
            world.network.remove(message);
            match *message {
                Message::Request { n, replica, run } => {
                    if world.alive[usize::from(replica)] {
                        world.copies.insert((n, replica, run));
                    }
                    self.to(format!("attempt {n} arrives at {replica}"), world);
                }
                Message::Abort { n, replica, run } => {
                    let mut lost = world.clone();
                    let answered = |world: &mut World, ok: bool| {
                        if let Task::Fencing {
                            n: fencing,
                            replica,
                            stage: Stage::Sent(which),
                        } = world.task
                            && fencing == n
                            && run == world.run
                        {
                            let stage = if ok {
                                Stage::Answered(which)
                            } else {
                                Stage::ToSend(which)
                            };
                            world.task = Task::Fencing { n, replica, stage };
                        }
                    };
                    answered(&mut lost, false);
                    self.to(format!("an abort of attempt {n} is lost"), lost);
                    if world.alive[usize::from(replica)] {
                        world.copies.retain(|copy| (copy.0, copy.1) != (n, replica));
                        answered(&mut world, true);
                        self.to(format!("an abort of attempt {n} arrives"), world);
                    }
                }
                Message::Reply { n, run } => {
                    // One that is lost is one that never arrives.
                    if run == world.run {
                        self.reply(n, world.clone(), "arrives");
                        if world.doubles > 0 {
                            world.doubles -= 1;
                            world.network.insert(*message);
                            self.reply(n, world, "arrives, and will again");
                        }
                    }
                }
            }
        }
        for (n, replica, run) in &self.world.copies {
            let mut world = self.world.clone();
            world.copies.remove(&(*n, *replica, *run));
            world.network.insert(Message::Reply { n: *n, run: *run });
            self.to(format!("attempt {n} is generated"), world);
        }
    }

    /// Whatever the task does by now, the reply's handler commits it: the store
    /// decides.
    fn reply(&mut self, n: u8, mut world: World, how: &str) {
        let what = format!("the reply of attempt {n} {how}");
        let mut attempt = u32::from(n);
        if self.mutation == Mutation::NoCompareAndSwap
            && let Some(record) = world.record()
            && let SampleState::Dispatched(current) = &record.samples[0]
        {
            attempt = current.number;
        }
        let commit = Command::Commit {
            owner: world.owner(),
            sample: 0,
            attempt,
            result: n,
        };
        match world.store(commit) {
            Ok(Reply::Accepted) => {
                world.task = Task::Committing;
                let mut told = Ok(());
                if self.mutation == Mutation::ToldBeforeDurable {
                    told = world.tell(n);
                }
                self.found.push((what, told.map(|()| world)));
            }
            Ok(Reply::Stale) | Err(Rejection::NotOwner) => self.to(what, world),
            other => panic!("{other:?}"),
        }
    }

    fn faults(&mut self) {
        if self.world.crashes > 0 {
            // Any part of the last batch may be on disk.
            for kept in 0..=self.world.pending.len() {
                let mut world = self.world.clone();
                let pending = std::mem::take(&mut world.pending);
                world.disk.extend(&pending[..kept]);
                world.crashes -= 1;
                world.run += 1;
                world.owned = false;
                world.task = Task::Idle;
                for caller in &mut world.callers {
                    if let Caller::Waits { calls } = *caller {
                        *caller = Caller::Away { calls };
                    }
                }
                self.to(format!("Berth crashes with {kept} events on disk"), world);
            }
        }
        if self.world.losses > 0 {
            let choices = if self.world.replicas_are_alike() {
                1
            } else {
                2
            };
            for replica in 0..choices {
                let mut world = self.world.clone();
                world.losses -= 1;
                world.alive[usize::from(replica)] = false;
                world.copies.retain(|copy| copy.1 != replica);
                self.to(format!("replica {replica} is lost"), world);
            }
        }
        if self.mutation == Mutation::SentBeforeDurable
            && let Task::Dispatching { n, replica } = self.world.task
        {
            let mut world = self.world.clone();
            world.task = Task::Sending { n, replica };
            self.to("the dispatch is not waited for", world);
        }
    }
}

/// What a walk through all states found.
struct Explored {
    states: usize,
    steps: usize,
    /// States in which both callers have the result.
    both_told: usize,
    broken: Option<(String, Vec<String>)>,
}

/// Breadth first, so that a counter-example is a shortest one.
fn explore(mutation: Mutation) -> Explored {
    let second = std::env::var("BERTH_LIFE_CALLS").map_or(1, |n| n.parse().unwrap());
    let start = World::start(second);
    let mut seen: HashMap<World, u32> = HashMap::from([(start.clone(), 0)]);
    let mut came_from: Vec<(u32, String)> = vec![(0, String::new())];
    let mut queue = VecDeque::from([(0u32, start)]);
    let mut explored = Explored {
        states: 0,
        steps: 0,
        both_told: 0,
        broken: None,
    };
    while let Some((index, world)) = queue.pop_front() {
        explored.states += 1;
        if world.callers.iter().all(|c| matches!(c, Caller::Told(_))) {
            explored.both_told += 1;
        }
        for (what, next) in steps(&world, mutation) {
            explored.steps += 1;
            let broken = match &next {
                Ok(next) => next.check().err(),
                Err(broken) => Some(broken.clone()),
            };
            if let Some(broken) = broken {
                let mut path = vec![what];
                let mut at = index;
                while at != 0 {
                    let (from, what) = &came_from[at as usize];
                    path.push(what.clone());
                    at = *from;
                }
                path.reverse();
                explored.broken = Some((broken, path));
                return explored;
            }
            let Ok(next) = next.map(World::reduced) else {
                continue;
            };
            if !seen.contains_key(&next) {
                let number = came_from.len() as u32;
                seen.insert(next.clone(), number);
                came_from.push((index, what));
                queue.push_back((number, next));
            }
        }
    }
    explored
}

#[test]
fn the_life_of_a_key_holds_in_every_reachable_state() {
    let explored = explore(Mutation::None);
    if let Some((broken, path)) = explored.broken {
        panic!("{broken}:\n  {}", path.join("\n  "));
    }
    println!(
        "{} states, {} steps, {} of them with both callers told",
        explored.states, explored.steps, explored.both_told
    );
    // A model in which nothing happens would hold, too.
    assert!(explored.states > 10_000, "{}", explored.states);
    assert!(explored.both_told > 10, "{}", explored.both_told);
}

fn finds(mutation: Mutation, expected: &str) {
    let explored = explore(mutation);
    let (broken, path) = explored
        .broken
        .unwrap_or_else(|| panic!("{mutation:?} found nothing in {} states", explored.states));
    println!("{mutation:?}: {broken}:\n  {}", path.join("\n  "));
    assert!(broken.contains(expected), "{mutation:?}: {broken}");
}

#[test]
fn without_compare_and_swap_a_fenced_result_is_committed() {
    finds(Mutation::NoCompareAndSwap, "fenced attempt");
}

#[test]
fn with_abort_and_send_exchanged_two_copies_live() {
    finds(Mutation::SendBeforeAbort, "two copies");
}

#[test]
fn a_result_told_before_it_is_durable_is_lost() {
    finds(Mutation::ToldBeforeDurable, "not on disk");
}

#[test]
fn with_one_abort_two_copies_live() {
    finds(Mutation::OneAbort, "two copies");
}

#[test]
fn an_attempt_sent_before_it_is_durable_lives_twice() {
    finds(Mutation::SentBeforeDurable, "two copies");
}
