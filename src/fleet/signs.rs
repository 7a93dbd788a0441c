//! Signs of life of one rank, as the data path sees them: which attempts are
//! under way there, how patient each may be, and when any of them last got a
//! token or its end.
//!
//! What it guarantees: one attempt that gets nothing while others on the same
//! rank get something is no silence; a long prompt's attempt makes the rank's
//! silence longer before it counts; who is told to give up is told once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The attempts under way on one rank.
#[derive(Debug)]
pub struct Watch {
    epoch: Instant,
    /// Microseconds from `epoch` to the last sign, and 1; 0: there was none.
    last_sign: AtomicU64,
    /// The same of the last moment in which nobody could expect a sign.
    excused: AtomicU64,
    flights: Mutex<Flights>,
}

#[derive(Debug, Default)]
struct Flights {
    next: u64,
    by_id: BTreeMap<u64, Sent>,
    /// Of those that are under way now.
    given_up: CancellationToken,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    at: Instant,
    patience: Duration,
}

/// How long a rank with work has shown no sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silence {
    /// Since the last sign, or since the first of the attempts was sent.
    pub lasts: Duration,
    /// What the most patient of its attempts allows.
    pub patience: Duration,
}

impl Default for Watch {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            last_sign: AtomicU64::new(0),
            excused: AtomicU64::new(0),
            flights: Mutex::default(),
        }
    }
}

impl Watch {
    /// An attempt is sent. `patience`: until its first token.
    pub fn begin(self: &Arc<Self>, patience: Duration) -> Flight {
        let mut flights = self.lock();
        flights.next += 1;
        let id = flights.next;
        let at = Instant::now();
        flights.by_id.insert(id, Sent { at, patience });
        Flight {
            watch: Arc::clone(self),
            id,
            given_up: flights.given_up.clone(),
        }
    }

    /// An attempt got something.
    pub fn sign(&self) {
        self.last_sign.store(self.stamp(), Ordering::Relaxed);
    }

    /// Nobody can expect a sign now: the rank is paused, or this process itself
    /// did not run.
    pub fn excuse(&self) {
        self.excused.store(self.stamp(), Ordering::Relaxed);
    }

    /// When any attempt last got something.
    pub fn last_sign(&self) -> Option<Instant> {
        self.at(&self.last_sign)
    }

    /// The same, or when nobody could last expect it.
    pub fn last_heard(&self) -> Option<Instant> {
        self.last_sign().max(self.at(&self.excused))
    }

    fn stamp(&self) -> u64 {
        let since = Instant::now().saturating_duration_since(self.epoch);
        u64::try_from(since.as_micros()).map_or(u64::MAX, |micros| micros.saturating_add(1))
    }

    fn at(&self, stamp: &AtomicU64) -> Option<Instant> {
        match stamp.load(Ordering::Relaxed) {
            0 => None,
            micros => self.epoch.checked_add(Duration::from_micros(micros - 1)),
        }
    }

    /// Whether attempts are under way and none gets anything.
    pub fn silence(&self, now: Instant) -> Option<Silence> {
        let flights = self.lock();
        let first = flights.by_id.values().map(|sent| sent.at).min()?;
        let patience = flights.by_id.values().map(|sent| sent.patience).max()?;
        let since = first
            .max(self.last_sign().unwrap_or(first))
            .max(self.at(&self.excused).unwrap_or(first));
        Some(Silence {
            lasts: now.saturating_duration_since(since),
            patience,
        })
    }

    /// Tells all attempts that are under way to give up. Returns how many.
    pub fn give_up(&self) -> usize {
        let mut flights = self.lock();
        std::mem::take(&mut flights.given_up).cancel();
        flights.by_id.len()
    }

    fn lock(&self) -> MutexGuard<'_, Flights> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One attempt under way; dropping it ends it.
#[derive(Debug)]
pub struct Flight {
    watch: Arc<Watch>,
    id: u64,
    given_up: CancellationToken,
}

impl Flight {
    /// It got its first tokens: from now on `patience` is for the next ones.
    pub fn begun(&self, patience: Duration) {
        self.watch.sign();
        if let Some(sent) = self.watch.lock().by_id.get_mut(&self.id) {
            sent.patience = patience;
        }
    }

    /// It got something.
    pub fn sign(&self) {
        self.watch.sign();
    }

    /// Waits until it is told to give up.
    pub async fn given_up(&self) {
        self.given_up.cancelled().await;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.watch.lock().by_id.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn pass(seconds: u32) -> Instant {
        tokio::time::advance(SECOND * seconds).await;
        Instant::now()
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_rank_is_not_silent() {
        let watch = Arc::new(Watch::default());
        assert_eq!(watch.silence(pass(100).await), None);
        drop(watch.begin(SECOND));
        assert_eq!(watch.silence(pass(100).await), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_attempt_that_gets_nothing_beside_others_is_no_silence() {
        let watch = Arc::new(Watch::default());
        let _stuck = watch.begin(SECOND * 10);
        for _ in 0..100 {
            let other = watch.begin(SECOND * 10);
            pass(5).await;
            other.sign();
        }
        let silence = watch.silence(Instant::now()).unwrap();
        assert!(silence.lasts < silence.patience, "{silence:?}");
        let silence = watch.silence(pass(11).await).unwrap();
        assert!(silence.lasts > silence.patience, "now nobody gets anything");
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_prompt_is_waited_for_until_its_first_token() {
        let watch = Arc::new(Watch::default());
        let _short = watch.begin(SECOND * 10);
        let long = watch.begin(SECOND * 90);
        let silence = watch.silence(pass(80).await).unwrap();
        assert_eq!(silence.patience, SECOND * 90);
        long.begun(SECOND * 10);
        let silence = watch.silence(pass(11).await).unwrap();
        assert_eq!(
            (silence.lasts, silence.patience),
            (SECOND * 11, SECOND * 10)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_excuse_is_no_sign_of_life() {
        let watch = Arc::new(Watch::default());
        let _flight = watch.begin(SECOND * 10);
        pass(9).await;
        watch.excuse();
        let silence = watch.silence(pass(2).await).unwrap();
        assert_eq!(silence.lasts, SECOND * 2);
        assert_eq!(watch.last_sign(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn those_under_way_are_told_once_and_later_ones_not() {
        let watch = Arc::new(Watch::default());
        let first = watch.begin(SECOND);
        assert_eq!(watch.give_up(), 1);
        first.given_up().await;
        let second = watch.begin(SECOND);
        let told = tokio::time::timeout(SECOND * 60, second.given_up()).await;
        assert!(told.is_err());
    }
}
