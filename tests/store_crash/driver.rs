//! The process that dies. It keeps a journal of what the store has told it, one
//! line per answer, each written before the next request is made.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use berth::{
    ids::{BootId, ReplicaId},
    store::{
        Claim, Commit, Store,
        sled::{Clock, Durability, SledOptions, SledStore, Step, SystemClock},
    },
};

use super::{Rng, support::*};

/// What the driver is to do.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) callers: u64,
    pub(super) requests: u64,
    pub(super) keys: u64,
    /// Dies when this step is reached for the so manieth time.
    pub(super) die: Option<(Step, u64)>,
    pub(super) relaxed: bool,
    /// Small, so that sled gets its half again and again.
    pub(super) redo_bytes: u64,
    /// The least key.
    pub(super) first_key: u64,
    /// How far the driver's clocks are behind.
    pub(super) hours_ago: u64,
    pub(super) retention_hours: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seed: 1,
            callers: 6,
            requests: 60,
            keys: 1000,
            die: None,
            relaxed: false,
            redo_bytes: 64 << 10,
            first_key: 0,
            hours_ago: 0,
            retention_hours: 30,
        }
    }
}

impl Plan {
    /// A command that runs the driver; `wrap` comes before it.
    pub(super) fn command(&self, wrap: &[&str], dir: &Path, journal: &Path) -> Command {
        let this = std::env::current_exe().unwrap();
        let mut command = match wrap {
            [] => Command::new(this),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(this);
                command
            }
        };
        let die = self
            .die
            .map_or(String::new(), |(step, at)| format!("{step:?}:{at}"));
        command
            .args(["--exact", "driver::driver", "--nocapture"])
            .env("BERTH_DRIVER_DIR", dir)
            .env("BERTH_DRIVER_JOURNAL", journal)
            .env("BERTH_DRIVER_SEED", self.seed.to_string())
            .env("BERTH_DRIVER_CALLERS", self.callers.to_string())
            .env("BERTH_DRIVER_REQUESTS", self.requests.to_string())
            .env("BERTH_DRIVER_KEYS", self.keys.to_string())
            .env("BERTH_DRIVER_DIE", die)
            .env("BERTH_DRIVER_RELAXED", self.relaxed.to_string())
            .env("BERTH_DRIVER_REDO", self.redo_bytes.to_string())
            .env("BERTH_DRIVER_FIRST", self.first_key.to_string())
            .env("BERTH_DRIVER_AGO", self.hours_ago.to_string())
            .env("BERTH_DRIVER_RETENTION", self.retention_hours.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    pub(super) fn start(&self, dir: &Path, journal: &Path) -> Child {
        self.command(&[], dir, journal).spawn().unwrap()
    }
}

/// Does nothing unless it is started as the driver.
#[test]
fn driver() {
    let Ok(dir) = std::env::var("BERTH_DRIVER_DIR") else {
        return;
    };
    let text = |name: &str| std::env::var(format!("BERTH_DRIVER_{name}")).unwrap();
    let number = |name: &str| text(name).parse::<u64>().unwrap();
    let die = text("DIE");
    let die = die.split_once(':').map(|(step, at)| {
        let step = Step::ALL.into_iter().find(|s| format!("{s:?}") == step);
        (step.unwrap(), at.parse().unwrap())
    });
    let plan = Plan {
        seed: number("SEED"),
        callers: number("CALLERS"),
        requests: number("REQUESTS"),
        keys: number("KEYS"),
        die,
        relaxed: text("RELAXED") == "true",
        redo_bytes: number("REDO"),
        first_key: number("FIRST"),
        hours_ago: number("AGO"),
        retention_hours: number("RETENTION"),
    };
    let journal = OpenOptions::new()
        .append(true)
        .create(true)
        .open(text("JOURNAL"))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(drive(plan, dir.as_ref(), journal));
}

const HOUR: Duration = Duration::from_secs(3600);

/// A clock that is behind.
#[derive(Debug)]
struct Behind {
    clock: SystemClock,
    by: Duration,
}

impl Clock for Behind {
    fn wall(&self) -> SystemTime {
        self.clock.wall() - self.by
    }
    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }
}

fn options(plan: &Plan) -> SledOptions {
    let reached = AtomicU64::new(0);
    let die = plan.die;
    SledOptions {
        durability: if plan.relaxed {
            Durability::Relaxed
        } else {
            Durability::Fsync
        },
        observer: die.map(|(at, count)| {
            Arc::new(move |step| {
                if step == at && reached.fetch_add(1, Ordering::Relaxed) + 1 == count {
                    // Like kill -9: nothing is unwound, nothing is written.
                    std::process::abort();
                }
            }) as _
        }),
        free_space_floor: 0,
        redo_bytes: plan.redo_bytes,
        retention: HOUR * plan.retention_hours as u32,
        // Expiry begins at once; a sync that may be late comes very late.
        tick: if plan.relaxed {
            HOUR
        } else {
            Duration::from_millis(20)
        },
        clock: Arc::new(Behind {
            clock: SystemClock::default(),
            by: HOUR * plan.hours_ago as u32,
        }),
        ..SledOptions::default()
    }
}

async fn drive(plan: Plan, dir: &Path, journal: File) {
    let store = Arc::new(SledStore::open(dir, options(&plan)).unwrap());
    let journal = Arc::new(Mutex::new(journal));
    let note = move |line: String| {
        // One system call a line: a line is there whole or not at all.
        let mut journal = journal.lock().unwrap();
        journal.write_all(format!("{line}\n").as_bytes()).unwrap();
    };
    let boot = BootId::new(format!("boot-{}", plan.seed));
    let grant = store.incarnation(ReplicaId::new("replica-1"), boot).await;
    note(format!("boot {}", grant.unwrap().incarnation));
    let callers: Vec<_> = (0..plan.callers)
        .map(|caller| {
            let (store, note, plan) = (Arc::clone(&store), note.clone(), plan.clone());
            let mut rng = Rng(plan.seed.wrapping_mul(1000) + caller + 1);
            tokio::spawn(async move {
                for _ in 0..plan.requests {
                    one(
                        &store,
                        plan.first_key + rng.below(plan.keys),
                        &mut rng,
                        &note,
                    )
                    .await;
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    store.close().await.unwrap();
}

/// The tokens of a key's result.
pub(super) fn tokens_of(n: u64) -> usize {
    20 + (n as usize * 37) % 700
}

/// One request, as the layer above makes it.
async fn one(store: &SledStore, n: u64, rng: &mut Rng, note: &impl Fn(String)) {
    match store.claim(request(n, OWNER, 1)).await.unwrap() {
        Claim::Running { .. } => tokio::task::yield_now().await,
        Claim::Done(completion) => {
            let number = completion.samples[0].route.attempts[0].number;
            let expected = sample(n, 0, number, tokens_of(n)).output;
            assert_eq!(completion.samples, [expected], "key {n}");
            note(format!("done {n} {number}"));
        }
        Claim::Claimed(claimed) => {
            for (index, orphan) in &claimed.orphans {
                store
                    .fence(key(n), OWNER, *index, orphan.number)
                    .await
                    .unwrap();
            }
            let number = claimed.last_attempts[0] + 1;
            store
                .dispatch(key(n), OWNER, 0, attempt(number))
                .await
                .unwrap();
            note(format!("sent {n} {number}"));
            if rng.below(8) == 0 {
                store.release(key(n), OWNER).await.unwrap();
                return;
            }
            let finished = sample(n, 0, number, tokens_of(n));
            let commit = store.commit(key(n), OWNER, 0, number, finished).await;
            assert_eq!(commit.unwrap(), Commit::Stored);
            note(format!("done {n} {number}"));
        }
        other => panic!("key {n}: {other:?}"),
    }
}

/// What the journals say was acknowledged, and whether they contradict
/// themselves.
#[derive(Debug, Default)]
pub(super) struct History {
    /// Key to the attempt whose result was told.
    pub(super) done: BTreeMap<u64, u32>,
    /// Key to the greatest attempt that was sent.
    pub(super) sent: BTreeMap<u64, u32>,
    pub(super) boots: Vec<u64>,
}

impl History {
    pub(super) fn add(&mut self, journal: &str) {
        // A last line without an end was never acknowledged.
        for line in journal.split_inclusive('\n').filter(|l| l.ends_with('\n')) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<u64>().unwrap();
            match words[0] {
                "boot" => {
                    assert!(self.boots.last().is_none_or(|last| *last < number(1)));
                    self.boots.push(number(1));
                }
                "sent" => {
                    let last = self.sent.insert(number(1), number(2) as u32);
                    assert!(last.is_none_or(|last| last < number(2) as u32), "{line}");
                    let done = self.done.get(&number(1));
                    assert!(done.is_none(), "generated again: {line}");
                }
                "done" => {
                    let first = *self.done.entry(number(1)).or_insert(number(2) as u32);
                    assert_eq!(first, number(2) as u32, "two results: {line}");
                }
                other => panic!("{other}"),
            }
        }
    }

    /// Whether a store holds all of it, from this key on.
    pub(super) async fn check(&self, store: &SledStore, from: u64) {
        for (n, number) in self.done.range(from..) {
            let replay = match store.read(key(*n)).await.unwrap() {
                Some(Claim::Done(replay)) => replay,
                other => panic!("key {n}: an acknowledged result is lost: {other:?}"),
            };
            let expected = sample(*n, 0, *number, tokens_of(*n)).output;
            assert_eq!(replay.samples, [expected], "key {n}");
        }
        for (n, number) in self.sent.range(from..) {
            match store.read(key(*n)).await.unwrap() {
                Some(Claim::Done(_)) => {}
                Some(Claim::Claimed(left)) => {
                    assert!(left.last_attempts[0] >= *number, "key {n}: {left:?}");
                }
                other => panic!("key {n}: an attempt is forgotten: {other:?}"),
            }
        }
        assert_eq!(store.stats().losses, 0);
        assert_eq!(store.stats().damaged_records, 0);
    }
}
