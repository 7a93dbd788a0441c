//! `WatchFleet`: the fleet as it is, then what changes.
//!
//! Nothing is queued for a watcher. It is asked for its next message when the
//! connection has room for one, looks at the fleet then, and sends what differs
//! from what it sent before. A slow one misses what lies between. What is kept of
//! each is two hashes a replica and what is left to send of one look; the number
//! of watchers is bounded.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hasher,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use futures_util::{Stream, stream};
use prost::Message;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use xxhash_rust::xxh3::Xxh3;

use super::{message::replica, pages::PAGE_BYTES};
use crate::{
    error::{Error, Reason},
    fleet::Fleet,
    proto,
};

/// What a watch answers with.
pub type WatchStream =
    Pin<Box<dyn Stream<Item = Result<proto::WatchFleetResponse, Status>> + Send>>;

/// Each looks at the whole fleet at every change.
const MAX_WATCHERS: u32 = 64;

/// Between two looks of one watcher at least.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// A watch is silent for at most so long: proxies cut calls that are silent for
/// longer.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);

/// Those who watch.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    pub(super) count: AtomicU32,
}

/// One watcher's place; free again when it is dropped.
pub(super) struct Place(Arc<Watchers>);

impl Watchers {
    pub(super) fn admit(self: &Arc<Self>) -> Result<Place, Error> {
        let taken = self
            .count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| {
                (n < MAX_WATCHERS).then_some(n + 1)
            });
        match taken {
            Ok(_) => Ok(Place(Arc::clone(self))),
            Err(_) => Err(Error::new(
                Reason::TooManyWaiters,
                format!("{MAX_WATCHERS} watch the fleet already, as many as may"),
            )),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What was sent of a replica, as hashes: of what it is, and of that with its
/// load.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Sent {
    state: u64,
    all: u64,
}

struct Watcher {
    fleet: Arc<Fleet>,
    changes: watch::Receiver<u64>,
    load: Option<Duration>,
    drain: CancellationToken,
    sent: HashMap<String, Sent>,
    /// Of the last look, not yet sent.
    pending: VecDeque<proto::WatchFleetResponse>,
    snapshot_sent: bool,
    looked: Option<Instant>,
    /// When load counts as a change next.
    load_due: Option<Instant>,
    over: bool,
    _place: Place,
}

/// The messages of one watcher.
pub(super) fn stream(
    fleet: Arc<Fleet>,
    load: Option<Duration>,
    place: Place,
    drain: CancellationToken,
) -> WatchStream {
    let watcher = Watcher {
        changes: fleet.changes(),
        fleet,
        load: load.map(|every| every.max(LEAST_PAUSE)),
        drain,
        sent: HashMap::new(),
        pending: VecDeque::new(),
        snapshot_sent: false,
        looked: None,
        load_due: None,
        over: false,
        _place: place,
    };
    Box::pin(stream::unfold(watcher, |mut watcher| async move {
        let message = watcher.next().await?;
        Some((message, watcher))
    }))
}

impl Watcher {
    async fn next(&mut self) -> Option<Result<proto::WatchFleetResponse, Status>> {
        if self.over {
            return None;
        }
        let silent_until = Instant::now() + SIGN_OF_LIFE;
        loop {
            if let Some(message) = self.pending.pop_front() {
                return Some(Ok(message));
            }
            if self.looked.is_some() {
                tokio::select! {
                    biased;
                    () = self.drain.clone().cancelled_owned() => {
                        self.over = true;
                        let why = "the control plane shuts down: watch again";
                        return Some(Err(Error::new(Reason::ShuttingDown, why).into()));
                    }
                    () = self.due() => {}
                    () = tokio::time::sleep_until(silent_until) => {
                        return Some(Ok(proto::WatchFleetResponse::default()));
                    }
                }
            }
            self.look();
        }
    }

    /// Until there may be something to send.
    async fn due(&mut self) {
        let load_due = self.load_due;
        let load = async {
            match load_due {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = self.changes.changed() => if changed.is_err() {
                // The fleet is gone, and so will be the server.
                std::future::pending::<()>().await;
            },
            () = load => {}
        }
        if let Some(looked) = self.looked {
            tokio::time::sleep_until(looked + LEAST_PAUSE).await;
        }
    }

    /// Looks at the fleet and notes what to send of it.
    fn look(&mut self) {
        let now = Instant::now();
        // Seen before the look: what comes later is another change.
        self.changes.borrow_and_update();
        let with_load = self.load_due.is_some_and(|at| at <= now);
        if with_load || self.looked.is_none() {
            self.load_due = self.load.map(|every| now + every);
        }
        self.looked = Some(now);
        let mut seen = HashMap::new();
        let mut changed = Vec::new();
        for status in self.fleet.list() {
            let message = replica(status);
            let is = hashes(&message);
            let was = self.sent.get(&message.replica_id);
            let differs =
                was.is_none_or(|was| was.state != is.state || (with_load && was.all != is.all));
            let keep = match was {
                Some(was) if !differs => *was,
                _ => is,
            };
            seen.insert(message.replica_id.clone(), keep);
            if differs {
                changed.push(message);
            }
        }
        let removed: Vec<String> = self
            .sent
            .keys()
            .filter(|id| !seen.contains_key(*id))
            .cloned()
            .collect();
        self.sent = seen;
        self.pending = messages(changed, removed);
        if !self.snapshot_sent {
            self.snapshot_sent = true;
            if self.pending.is_empty() {
                self.pending.push_back(proto::WatchFleetResponse::default());
            }
            if let Some(last) = self.pending.back_mut() {
                last.snapshot_end = true;
            }
        }
    }
}

/// In pieces that clients can decode.
fn messages(
    changed: Vec<proto::Replica>,
    removed: Vec<String>,
) -> VecDeque<proto::WatchFleetResponse> {
    let mut pieces = Pieces::default();
    for id in removed {
        pieces.room_for(id.len()).removed.push(id);
    }
    for replica in changed {
        let bytes = replica.encoded_len();
        pieces.room_for(bytes).replicas.push(replica);
    }
    pieces.all
}

#[derive(Default)]
struct Pieces {
    all: VecDeque<proto::WatchFleetResponse>,
    /// Of the last.
    bytes: usize,
}

impl Pieces {
    /// The piece for what has so many bytes.
    fn room_for(&mut self, bytes: usize) -> &mut proto::WatchFleetResponse {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.all.is_empty() || self.bytes > PAGE_BYTES {
            self.all.push_back(proto::WatchFleetResponse::default());
            self.bytes = bytes;
        }
        let last = self.all.len() - 1;
        &mut self.all[last]
    }
}

fn hashes(replica: &proto::Replica) -> Sent {
    let mut bare = replica.clone();
    // Ages are no change, and maps have no order.
    bare.heartbeat_age = None;
    if let Some(drain) = &mut bare.drain {
        // Only whether it is over.
        drain.grace_left = drain
            .grace_left
            .filter(|left| left.seconds == 0 && left.nanos == 0);
    }
    // It names times that pass; another reason comes with another health.
    bare.health_reason.clear();
    let labels = std::mem::take(&mut bare.labels);
    let mut labels: Vec<_> = labels.iter().collect();
    labels.sort();
    let hash = |message: &proto::Replica| {
        let mut hasher = Xxh3::new();
        hasher.update(&message.encode_to_vec());
        for (key, value) in &labels {
            for part in [key, value] {
                hasher.write_usize(part.len());
                hasher.update(part.as_bytes());
            }
        }
        hasher.digest()
    };
    let all = hash(&bare);
    for rank in &mut bare.ranks {
        (rank.live_pins, rank.live_pin_tokens, rank.in_flight) = (0, 0, 0);
        (rank.cached_tokens_expected, rank.cached_tokens_found) = (0, 0);
        (rank.wrong_rank, rank.recent_found_percent) = (0, None);
        if let Some(report) = &mut rank.reported {
            (report.running, report.waiting) = (0, 0);
            (report.waiting_uncached_tokens, report.kv_used_tokens) = (0, 0);
        }
    }
    Sent {
        state: hash(&bare),
        all,
    }
}

#[cfg(test)]
mod tests;
