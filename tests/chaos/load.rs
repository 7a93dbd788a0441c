//! Trajectories that run all the time, and what must hold of their turns whatever
//! happens.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::{
    eventually,
    trainer::{Trainer, Turn},
};

use berth::proto::RouteReason;

/// How trainers go about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// At once.
    pub(crate) trainers: usize,
    /// Of one trajectory; then another one begins.
    pub(crate) turns: usize,
    /// A call is given up after so long, and made again.
    pub(crate) patience: Duration,
}

pub(crate) struct Load {
    shape: Shape,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
    log: Arc<Mutex<Vec<Turn>>>,
}

impl Load {
    /// Every other trajectory sends no idempotency keys.
    pub(crate) fn start(url: &str, shape: Shape) -> Self {
        let (stop, log) = (CancellationToken::new(), Arc::<Mutex<Vec<Turn>>>::default());
        let tasks = (0..shape.trainers)
            .map(|first| {
                let (url, stop, log) = (url.to_owned(), stop.clone(), Arc::clone(&log));
                tokio::spawn(async move {
                    for n in (first..).step_by(shape.trainers) {
                        let mut trainer = Trainer::new(&url, n, n % 2 == 0)
                            .patience(shape.patience)
                            .quiet();
                        for _ in 0..shape.turns {
                            if stop.is_cancelled() {
                                return;
                            }
                            trainer.turn().await;
                            log.lock().unwrap().extend(trainer.turns().last().cloned());
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                })
            })
            .collect();
        Self {
            shape,
            stop,
            tasks,
            log,
        }
    }

    /// All turns that were answered so far.
    pub(crate) fn turns(&self) -> Vec<Turn> {
        self.log.lock().unwrap().clone()
    }

    /// Waits until there have been so many turns for every trainer from now on.
    pub(crate) async fn goes_on(&self, turns: usize) {
        let most = (self.log.lock().unwrap().len(), turns * self.shape.trainers);
        eventually("turns are answered", async || {
            for task in &self.tasks {
                assert!(!task.is_finished(), "a trainer has failed");
            }
            self.log.lock().unwrap().len() >= most.0 + most.1
        })
        .await;
        // Each of them, not only all together.
        let now = SystemTime::now();
        eventually("every trainer's turn is answered", async || {
            let log = self.log.lock().unwrap();
            let lately = log.iter().rev().take_while(|turn| turn.ended >= now);
            let keys: BTreeSet<_> = lately.map(|turn| &turn.key).collect();
            keys.len() >= self.shape.trainers
        })
        .await;
    }

    /// Lets every trainer finish its turn. Returns all turns.
    pub(crate) async fn stop(self) -> Vec<Turn> {
        self.stop.cancel();
        for task in self.tasks {
            task.await.unwrap();
        }
        self.log.lock().unwrap().clone()
    }
}

/// Turns by trajectory, each in order.
pub(crate) fn by_key(turns: &[Turn]) -> BTreeMap<&str, Vec<&Turn>> {
    let mut by_key: BTreeMap<&str, Vec<&Turn>> = BTreeMap::new();
    for turn in turns {
        by_key.entry(&turn.key).or_default().push(turn);
    }
    by_key
}

/// Where trajectories moved: the last turn at the old home and the first one at the
/// new one. A detour is no move: its pin stays.
pub(crate) fn moves(turns: &[Turn]) -> Vec<(Turn, Turn)> {
    let mut moves = Vec::new();
    for turns in by_key(turns).values() {
        let homes: Vec<_> = turns
            .iter()
            .filter(|turn| turn.reason != RouteReason::Detour)
            .collect();
        for pair in homes.windows(2) {
            let home = |turn: &Turn| (turn.replica.clone(), turn.incarnation, turn.rank);
            if home(pair[0]) != home(pair[1]) {
                moves.push(((**pair[0]).clone(), (**pair[1]).clone()));
            }
        }
    }
    moves
}

/// Turns that were served elsewhere while their pin stayed.
pub(crate) fn detours(turns: &[Turn]) -> usize {
    let detour = |turn: &&Turn| turn.reason == RouteReason::Detour;
    turns.iter().filter(detour).count()
}
