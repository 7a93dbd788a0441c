//! A prompt that kills engines must not kill a fleet through retries.
//!
//! ```text
//!           an engine died with it                 another one did, in its turn
//!  unknown ───────────────────────▶ suspect ─────────────────────────▶ condemned
//!     ▲                                │                                   │
//!     └──── answered, or SUSPECT_FOR ──┘                                   │
//!     └──────────────────────────── CONDEMNED_FOR ─────────────────────────┘
//! ```
//!
//! Everybody in flight on an engine when it died is suspect. Suspects are sent one
//! at a time, so that when the next engine dies it is known with which of them;
//! all others go freely. Only after a death in a crowd do its many suspects go
//! freely once more, since one after the other they would wait for minutes after
//! every lost replica: a prompt among them that is to blame costs a third engine.
//! A crowd's death thus condemns nobody, and neither does a death at a moment when
//! replicas die that did not run the prompt: then the cause is something else.
//!
//! By a hash of the prompt, under whatever key. Suspicions are in memory; what is
//! condemned stays so over a restart of the control plane (`keeper`).

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::OwnedSemaphorePermit, sync::Semaphore, time::Instant};

use crate::{
    call::{Prompt, SampleParams},
    error::{Error, Reason},
    ids::Target,
};

/// A suspicion that nothing confirms ends.
const SUSPECT_FOR: Duration = Duration::from_secs(10 * 60);
/// A condemned prompt may be tried again after this: engines get updates.
const CONDEMNED_FOR: Duration = Duration::from_secs(60 * 60);
/// More samples than this in flight are a crowd.
const CROWD: u64 = 8;
/// Deaths this close to each other have one cause.
const TOGETHER: Duration = Duration::from_secs(5);
/// A server may go on to say that its engine is dead. What is told within this of
/// the first time was there when it died; the rest came too late to be to blame.
const TOLD: Duration = Duration::from_secs(2);
/// So long such a server may linger.
const LINGERS: Duration = Duration::from_secs(60);
/// Deaths remembered within a moment.
const MANY_DEATHS: usize = 1024;
/// Prompts remembered at most; the oldest suspicions go first.
const MOST: usize = 10_000;

/// A prompt's name here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromptHash([u8; 16]);

impl PromptHash {
    /// Of what is sent to the engine as its prompt.
    pub fn of(params: &SampleParams) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(params.adapter.as_deref().unwrap_or_default().as_bytes());
        match &params.prompt {
            Prompt::Tokens(ids) => {
                hasher.update(b"\0tokens");
                for chunk in ids.chunks(1024) {
                    let bytes: Vec<u8> = chunk.iter().flat_map(|id| id.to_le_bytes()).collect();
                    hasher.update(&bytes);
                }
            }
            Prompt::Text(text) => {
                hasher.update(b"\0text");
                hasher.update(text.as_bytes());
            }
        }
        let mut short = [0; 16];
        short.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(short)
    }
}

impl PromptHash {
    /// Tells requests apart, for who counts failures.
    pub fn evidence(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(first)
    }
}

/// What is known of prompts that engines died with.
#[derive(Debug)]
pub struct Poison {
    known: Mutex<Known>,
    /// One suspect at a time.
    turn: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct Known {
    prompts: HashMap<PromptHash, Suspicion>,
    /// Starts of replicas that died lately, each once.
    deaths: VecDeque<(Instant, Target)>,
    /// Starts of replicas that say they are dead, and since when.
    dead: VecDeque<(Instant, Target)>,
    /// Starts of replicas whose death was logged.
    logged: VecDeque<Target>,
}

#[derive(Clone, Debug)]
struct Suspicion {
    /// When engines died with it; at most three are of interest.
    deaths: Vec<Instant>,
    /// It goes one at a time.
    in_turn: bool,
    condemned: bool,
}

impl Suspicion {
    fn holds(&self, now: Instant) -> bool {
        let term = if self.condemned {
            CONDEMNED_FOR
        } else {
            SUSPECT_FOR
        };
        self.deaths
            .last()
            .is_some_and(|last| now.saturating_duration_since(*last) < term)
    }
}

/// A suspect's turn; dropping it ends it.
#[derive(Debug)]
pub struct SuspectTurn {
    _permit: OwnedSemaphorePermit,
}

impl Default for Poison {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
        }
    }
}

impl Poison {
    /// Lets everything pass that is not condemned.
    ///
    /// # Errors
    /// PROMPT_CONDEMNED.
    pub fn admit(&self, prompt: &PromptHash) -> Result<(), Error> {
        let now = Instant::now();
        match self.lock().prompts.get(prompt) {
            Some(s) if s.condemned && s.holds(now) => Err(Error::new(
                Reason::PromptCondemned,
                format!(
                    "{} engines died while they ran this prompt, so it is not sent to another; \
                     if the engines were mended, it is taken again {} min after the last death",
                    s.deaths.len(),
                    CONDEMNED_FOR.as_secs() / 60
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Waits for this prompt's turn, if it is suspect.
    pub async fn turn(&self, prompt: &PromptHash) -> Option<SuspectTurn> {
        let now = Instant::now();
        if !self
            .lock()
            .prompts
            .get(prompt)
            .is_some_and(|s| s.in_turn && s.holds(now))
        {
            return None;
        }
        // The semaphore is never closed.
        let permit = Arc::clone(&self.turn).acquire_owned().await.ok()?;
        Some(SuspectTurn { _permit: permit })
    }

    /// This start of a replica died while it ran the prompt, among `in_flight`
    /// samples on its ranks; `turn` says that it was the prompt's turn.
    pub fn died(&self, prompt: &PromptHash, target: &Target, in_flight: u64, turn: bool) {
        let now = Instant::now();
        let mut known = self.lock();
        // Each of its requests comes by here.
        if known.is_news(target) {
            tracing::warn!(
                %target, in_flight,
                "an engine is gone, and its requests with it: the prompts that it ran are suspect"
            );
        }
        let others = known.note_death(now, target);
        if known.prompts.len() >= MOST {
            known.make_room(now);
        }
        let own = known.prompts.get(prompt).map_or(0, |s| s.close_to(now));
        if others > own {
            // Replicas die that did not run it.
            return;
        }
        let suspicion = known.prompts.entry(*prompt).or_insert(Suspicion {
            deaths: Vec::new(),
            in_turn: false,
            condemned: false,
        });
        if !suspicion.holds(now) {
            suspicion.deaths.clear();
            suspicion.in_turn = false;
        }
        suspicion.condemned = turn && !suspicion.deaths.is_empty();
        suspicion.in_turn = in_flight <= CROWD || !suspicion.deaths.is_empty();
        suspicion.deaths.push(now);
        let (deaths, condemned) = (suspicion.deaths.len(), suspicion.condemned);
        drop(known);
        if condemned {
            tracing::warn!(%target, deaths, "a prompt is condemned: engines died while they ran it");
        } else {
            tracing::debug!(%target, deaths, in_flight, "a prompt is suspect");
        }
    }

    /// Prompts that are refused, and for how much longer.
    pub fn condemned(&self) -> Vec<([u8; 16], Duration)> {
        let now = Instant::now();
        let known = self.lock();
        let condemned = known.prompts.iter().filter(|(_, s)| s.condemned);
        condemned
            .filter_map(|(prompt, s)| {
                let left = CONDEMNED_FOR
                    .checked_sub(now.saturating_duration_since(*s.deaths.last()?))
                    .filter(|left| !left.is_zero())?;
                Some((prompt.0, left))
            })
            .collect()
    }

    /// A prompt that was condemned before a restart is refused for so much longer.
    pub fn restore(&self, prompt: [u8; 16], left: Duration) {
        let now = Instant::now();
        let since = CONDEMNED_FOR.saturating_sub(left);
        let Some(died) = now.checked_sub(since) else {
            return;
        };
        let mut known = self.lock();
        if known.prompts.len() >= MOST {
            known.make_room(now);
        }
        known
            .prompts
            .entry(PromptHash(prompt))
            .or_insert(Suspicion {
                deaths: vec![died; 2],
                in_turn: true,
                condemned: true,
            });
    }

    /// As [`died`](Self::died), for a start whose server says itself that its engine
    /// is dead. Who comes only after that is not suspect.
    pub fn said_dead(&self, prompt: &PromptHash, target: &Target, in_flight: u64, turn: bool) {
        let fresh = self.lock().told_dead(Instant::now(), target);
        if fresh {
            self.died(prompt, target, in_flight, turn);
        }
    }

    /// The prompt was answered.
    pub fn cleared(&self, prompt: &PromptHash) {
        self.lock().prompts.remove(prompt);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Suspicion {
    /// Its deaths within a moment.
    fn close_to(&self, now: Instant) -> usize {
        self.deaths
            .iter()
            .filter(|at| now.saturating_duration_since(**at) < TOGETHER)
            .count()
    }
}

impl Known {
    /// Notes that a start says it is dead; whether it has only just begun to.
    fn told_dead(&mut self, now: Instant, target: &Target) -> bool {
        let since = |at: &Instant| now.saturating_duration_since(*at);
        self.dead.retain(|(at, _)| since(at) < LINGERS);
        let known = self
            .dead
            .iter()
            .find(|(_, t)| t.replica == target.replica && t.incarnation == target.incarnation);
        if let Some((at, _)) = known {
            return since(at) < TOLD;
        }
        if self.dead.len() >= MANY_DEATHS {
            self.dead.pop_front();
        }
        self.dead.push_back((now, target.clone()));
        true
    }

    /// Whether the death of this start is to be logged, which it then is.
    fn is_news(&mut self, target: &Target) -> bool {
        let same = |t: &Target| t.replica == target.replica && t.incarnation == target.incarnation;
        let news = !self.logged.iter().any(same);
        if news {
            if self.logged.len() >= MANY_DEATHS {
                self.logged.pop_front();
            }
            self.logged.push_back(target.clone());
        }
        news
    }

    /// Notes a death once; returns how many other replicas died within a moment.
    fn note_death(&mut self, now: Instant, target: &Target) -> usize {
        let same = |t: &Target| t.replica == target.replica && t.incarnation == target.incarnation;
        self.deaths
            .retain(|(at, _)| now.saturating_duration_since(*at) < TOGETHER);
        if !self.deaths.iter().any(|(_, t)| same(t)) && self.deaths.len() < MANY_DEATHS {
            self.deaths.push_back((now, target.clone()));
        }
        self.deaths.iter().filter(|(_, t)| !same(t)).count()
    }

    fn make_room(&mut self, now: Instant) {
        self.prompts.retain(|_, s| s.holds(now));
        if self.prompts.len() >= MOST
            && let Some(oldest) = self
                .prompts
                .iter()
                .min_by_key(|(_, s)| (s.condemned, s.deaths.last().copied()))
                .map(|(p, _)| *p)
        {
            self.prompts.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests;
