//! What one engine is, seen from its HTTP routes: its ranks, the ids that are
//! live, pause, weight version and faults.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::{Notify, OnceCell, mpsc, oneshot, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    adapters::Adapters,
    config::{Dialect, SimConfig},
    driver::{Command, Driver, Selector, Snapshot, Submission, parking::Mutex},
    faults::Faults,
    history::{Clock, History},
    scheduler::{JobId, Rank},
};

/// How long a health check waits between two looks, on the engine's clock.
pub(super) const HEALTH_POLL: Duration = Duration::from_secs(1);
/// After how long it gives up.
pub(super) const HEALTH_TIMEOUT: Duration = Duration::from_secs(20);
/// How often the front looks whether a plain request's client is still there.
pub(super) const DISCONNECT_POLL: Duration = Duration::from_secs(4);
/// How long after its last request a terminated engine ends.
const AFTER_DRAIN: Duration = Duration::from_secs(2);

/// After how long vLLM's front ends when the engine of one rank has died.
const AFTER_RANK: Duration = Duration::from_secs(11);

/// The front says that its engine is dead, and ends after a while.
fn outlive(errored: &watch::Sender<bool>, root: &CancellationToken, wait: Duration) {
    errored.send_replace(true);
    let root = root.clone();
    tokio::spawn(async move {
        tokio::time::sleep(wait).await;
        root.cancel();
    });
}

/// Why an engine is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Stopped or killed from outside.
    Stopped,
    /// It computed a token id outside its vocabulary.
    OutOfVocabulary,
    /// It was told to end and has finished its work.
    Drained,
    /// A fault.
    Died,
}

/// How generation is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Everything is aborted.
    Abort,
    /// What runs loses its KV and waits.
    Retract,
    /// What runs stands still.
    InPlace,
}

/// One rank, seen from outside.
#[derive(Debug)]
pub(super) struct RankLink {
    commands: mpsc::UnboundedSender<Command>,
    pub(super) snapshot: Arc<Mutex<Snapshot>>,
    dead: AtomicBool,
}

/// One engine.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) config: SimConfig,
    /// Cancelled when the engine is no more: everything that belongs to it
    /// ends with it.
    pub(super) root: CancellationToken,
    pub(super) tasks: TaskTracker,
    pub(super) ranks: Vec<RankLink>,
    pub(super) clock: Clock,
    /// Seconds that the start is said to have taken: a number of its own.
    pub(super) startup: f64,
    pub(super) history: Arc<Mutex<History>>,
    pub(super) paused: watch::Sender<bool>,
    /// A message went to a dead rank: nothing is dispatched any more.
    pub(super) wedged: AtomicBool,
    pub(super) draining: AtomicBool,
    /// The engine behind a vLLM front has died: the front says so for a moment.
    pub(super) errored: watch::Sender<bool>,
    /// What is slow to tell at first has been told.
    pub(super) told: OnceCell<()>,
    pub(super) refuse: watch::Sender<bool>,
    pub(super) faults: Mutex<Faults>,
    pub(super) adapters: Mutex<Adapters>,
    version: Mutex<Arc<str>>,
    /// Ids that are live, and how often.
    live: Mutex<HashMap<Arc<str>, usize>>,
    /// Calls of `/generate` that have not been answered.
    calls: AtomicUsize,
    call_ended: Notify,
    dispatched: Arc<AtomicUsize>,
    next_rank: AtomicU64,
    next_job: AtomicU64,
    end: Arc<Mutex<Option<End>>>,
}

/// Keeps ids live; they are free again when it is dropped.
#[derive(Debug)]
pub(super) struct Live {
    engine: Arc<Engine>,
    rids: Vec<Arc<str>>,
}

impl Drop for Live {
    fn drop(&mut self) {
        let mut live = self.engine.live.lock();
        for rid in &self.rids {
            if let Some(times) = live.get_mut(rid) {
                *times -= 1;
                if *times == 0 {
                    live.remove(rid);
                }
            }
        }
    }
}

/// Counts a call while it lives.
#[derive(Debug)]
pub(super) struct Call(Arc<Engine>);

impl Drop for Call {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
        self.0.call_ended.notify_waiters();
    }
}

impl Engine {
    /// Starts its ranks on the current runtime.
    pub(super) fn start(config: SimConfig) -> Arc<Self> {
        let (root, tasks) = (CancellationToken::new(), TaskTracker::new());
        let history = Arc::new(Mutex::new(History::new(config.history)));
        let clock = Clock::start();
        let version: Arc<str> = config.weight_version.as_str().into();
        let dispatched = Arc::new(AtomicUsize::new(0));
        let end = Arc::new(Mutex::new(None));
        let errored = watch::Sender::new(false);
        let crash = {
            let (root, end) = (root.clone(), Arc::clone(&end));
            let (errored, dialect, linger) = (errored.clone(), config.dialect, config.linger);
            Arc::new(move || {
                end.lock().get_or_insert(End::OutOfVocabulary);
                match dialect {
                    Dialect::Sglang => root.cancel(),
                    Dialect::Vllm => outlive(&errored, &root, linger),
                }
            })
        };
        let ranks = (0..config.ranks).map(|_| {
            let (commands, receiver) = mpsc::unbounded_channel();
            let snapshot = Arc::new(Mutex::new(Snapshot {
                at: clock.now(),
                fresh: true,
                ..Snapshot::default()
            }));
            let driver = Driver {
                rank: Rank::new(config.rank(), Arc::clone(&version)),
                time_scale: config.time_scale,
                snapshot: Arc::clone(&snapshot),
                history: Arc::clone(&history),
                clock,
                dispatched: Arc::clone(&dispatched),
                crash: Arc::clone(&crash) as _,
                jobs: std::collections::HashMap::new(),
                slow: 1.0,
                paused: false,
                dead: false,
                anchor: None,
                idle_since: tokio::time::Instant::now(),
            };
            let root = root.clone();
            tasks.spawn(async move { root.run_until_cancelled(driver.run(receiver)).await });
            RankLink {
                commands,
                snapshot,
                dead: AtomicBool::new(false),
            }
        });
        let ranks = ranks.collect();
        Arc::new(Self {
            adapters: Mutex::new(Adapters::new(config.adapters.as_deref())),
            config,
            root,
            tasks,
            ranks,
            clock,
            // 53 bits: as many as a JSON number holds.
            startup: (uuid::Uuid::new_v4().as_u64_pair().1 & ((1 << 53) - 1)) as f64 * 1e-15,
            history,
            paused: watch::Sender::new(false),
            wedged: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            errored,
            told: OnceCell::new(),
            refuse: watch::Sender::new(false),
            faults: Mutex::new(Faults::default()),
            version: Mutex::new(version),
            live: Mutex::new(HashMap::new()),
            calls: AtomicUsize::new(0),
            call_ended: Notify::new(),
            dispatched,
            next_rank: AtomicU64::new(0),
            next_job: AtomicU64::new(0),
            end,
        })
    }

    /// What becomes of a vLLM server when the engine of one rank dies: what runs
    /// on the others is aborted, whoever waits for the dead one waits on, and the
    /// server ends.
    fn lose_rank(self: &Arc<Self>) {
        self.abort(&Selector::All);
        let (engine, wait) = (Arc::clone(self), self.config.scaled(AFTER_RANK));
        let root = self.root.clone();
        self.tasks.spawn(async move {
            root.run_until_cancelled(tokio::time::sleep(wait)).await;
            engine.end(End::Died);
        });
    }

    /// Ends everything now.
    pub(super) fn end(&self, why: End) {
        self.end.lock().get_or_insert(why);
        self.root.cancel();
    }

    /// Why it has ended.
    pub(super) fn ended(&self) -> End {
        (*self.end.lock()).unwrap_or(End::Stopped)
    }

    /// Counts a call.
    pub(super) fn call(self: &Arc<Self>) -> Call {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Call(Arc::clone(self))
    }

    /// Makes ids live, all or none. The one that is live already comes back.
    pub(super) fn make_live(self: &Arc<Self>, rids: &[Arc<str>]) -> Result<Live, Arc<str>> {
        let mut live = self.live.lock();
        for (at, rid) in rids.iter().enumerate() {
            if live.contains_key(rid) {
                for rid in &rids[..at] {
                    live.remove(rid);
                }
                return Err(Arc::clone(rid));
            }
            live.insert(Arc::clone(rid), 1);
        }
        Ok(Live {
            engine: Arc::clone(self),
            rids: rids.to_vec(),
        })
    }

    /// Makes ids live that may be live already.
    pub(super) fn make_live_again(self: &Arc<Self>, rids: &[Arc<str>]) -> Live {
        let mut live = self.live.lock();
        for rid in rids {
            *live.entry(Arc::clone(rid)).or_default() += 1;
        }
        Live {
            engine: Arc::clone(self),
            rids: rids.to_vec(),
        }
    }

    /// The rank that serves: the one asked for, else each in turn.
    pub(super) fn choose_rank(&self, asked: Option<u32>) -> u32 {
        let ranks = self.config.ranks;
        match asked {
            Some(rank) if self.faults.lock().ignore_rank => (rank + 1) % ranks,
            Some(rank) => rank,
            None => self.next_rank(),
        }
    }

    fn next_rank(&self) -> u32 {
        let turn = self.next_rank.fetch_add(1, Ordering::Relaxed);
        u32::try_from(turn % u64::from(self.config.ranks)).unwrap_or(0)
    }

    pub(super) fn next_job(&self) -> JobId {
        JobId(self.next_job.fetch_add(1, Ordering::Relaxed))
    }

    /// Gives jobs to a rank. `false`: nobody will ever answer.
    pub(super) fn dispatch(&self, rank: u32, jobs: Vec<Submission>) -> bool {
        if !self.reach(rank) {
            return false;
        }
        self.dispatched.fetch_add(jobs.len(), Ordering::SeqCst);
        self.tell(rank, Command::Submit(jobs));
        true
    }

    /// Whether a message to this rank is taken. The first one to a dead rank
    /// wedges all.
    fn reach(&self, rank: u32) -> bool {
        let dead = |link: &RankLink| link.dead.load(Ordering::SeqCst);
        if self.ranks.get(rank as usize).is_none_or(dead) {
            self.wedged.store(true, Ordering::SeqCst);
        }
        !self.wedged.load(Ordering::SeqCst)
    }

    fn tell(&self, rank: u32, command: Command) {
        if let Some(link) = self.ranks.get(rank as usize)
            && !link.dead.load(Ordering::SeqCst)
        {
            let _ = link.commands.send(command);
        }
    }

    fn tell_all(&self, command: impl Fn() -> Command) {
        for rank in 0..self.config.ranks {
            self.tell(rank, command());
        }
    }

    pub(super) fn abort(&self, selector: &Selector) {
        self.tell_all(|| Command::Abort(selector.clone()));
    }

    /// As a request to abort does it: whoever is not dispatched yet is not met.
    pub(super) fn abort_by_request(&self, selector: &Selector) {
        let met = match selector {
            Selector::Prefix(prefix) => {
                let live = self.live.lock();
                live.keys().any(|rid| rid.starts_with(&**prefix))
            }
            Selector::Exact(rids) => {
                let live = self.live.lock();
                rids.iter().any(|rid| live.contains_key(rid))
            }
            _ => true,
        };
        {
            let counters = &mut self.history.lock().counters;
            counters.aborts_received += 1;
            counters.aborts_missed += u64::from(!met);
        }
        self.abort(selector);
    }

    pub(super) async fn pause(&self, mode: PauseMode) {
        self.paused.send_replace(true);
        match mode {
            PauseMode::InPlace => self.tell_all(|| Command::Pause { retract: false }),
            PauseMode::Retract => self.tell_all(|| Command::Pause { retract: true }),
            PauseMode::Abort => {
                while self.dispatched.load(Ordering::SeqCst) > 0 {
                    self.abort(&Selector::All);
                    let poll = self.config.scaled(HEALTH_POLL);
                    tokio::time::sleep(poll.max(Duration::from_millis(1))).await;
                }
            }
        }
    }

    /// Whether any rank has work.
    pub(super) fn runs(&self) -> bool {
        self.dispatched.load(Ordering::SeqCst) > 0
    }

    pub(super) fn resume(&self) {
        self.tell_all(|| Command::Continue);
        self.paused.send_replace(false);
    }

    /// Waits while paused.
    pub(super) async fn unpaused(&self) {
        // The sender lives as long as this engine.
        let _ = self.paused.subscribe().wait_for(|paused| !paused).await;
    }

    /// Empties all caches; `false` where one could not be.
    pub(super) async fn flush(&self) -> bool {
        let mut flushed = true;
        for link in &self.ranks {
            let (reply, answer) = oneshot::channel();
            // Inferred: a dead rank cannot be flushed.
            flushed &= !link.dead.load(Ordering::SeqCst)
                && link.commands.send(Command::Flush(reply)).is_ok()
                && answer.await.unwrap_or(false);
        }
        flushed
    }

    pub(super) fn version(&self) -> Arc<str> {
        Arc::clone(&self.version.lock())
    }

    pub(super) fn set_version(&self, version: &str, abort_all: bool) {
        if abort_all {
            self.abort(&Selector::All);
        }
        let version: Arc<str> = version.into();
        *self.version.lock() = Arc::clone(&version);
        self.tell_all(|| Command::Version(Arc::clone(&version)));
    }

    /// Puts these faults in force, in place of those before.
    pub(super) fn set_faults(self: &Arc<Self>, faults: Faults) {
        let slow = faults.slow.filter(|f| f.is_finite() && *f >= 0.0);
        self.tell_all(|| Command::Slow(slow.unwrap_or(1.0)));
        for &rank in &faults.dead_ranks {
            self.tell(rank, Command::Die);
            if let Some(link) = self.ranks.get(rank as usize)
                && !link.dead.swap(true, Ordering::SeqCst)
                && self.config.dialect == Dialect::Vllm
            {
                self.lose_rank();
            }
        }
        self.refuse.send_if_modified(|refuse| {
            let before = std::mem::replace(refuse, faults.refuse);
            before != *refuse
        });
        *self.faults.lock() = faults;
    }

    /// Whether a health check passes, once that is known.
    pub(super) async fn healthy(&self) -> bool {
        if self.draining.load(Ordering::SeqCst) {
            return false;
        }
        let checked = async {
            self.unpaused().await;
            // The check is a message to a rank like any other.
            if !self.reach(self.next_rank()) {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(self.config.scaled(HEALTH_POLL)).await;
        };
        let most = self.config.scaled(HEALTH_TIMEOUT);
        tokio::time::timeout(most.max(Duration::from_millis(20)), checked)
            .await
            .is_ok()
    }

    /// Refuses health from now on, and ends when all calls are answered.
    pub(super) fn terminate(self: &Arc<Self>) {
        if self.draining.swap(true, Ordering::SeqCst) {
            return;
        }
        let engine = Arc::clone(self);
        let root = self.root.clone();
        self.tasks.spawn(async move {
            root.run_until_cancelled(async {
                loop {
                    let ended = engine.call_ended.notified();
                    if engine.calls.load(Ordering::SeqCst) == 0 {
                        break;
                    }
                    ended.await;
                }
                tokio::time::sleep(engine.config.scaled(AFTER_DRAIN)).await;
                engine.end(End::Drained);
            })
            .await
        });
    }
}
