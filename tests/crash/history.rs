//! What was answered and what the engines ran, and whether that can be.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write},
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use berth::{
    engine::sim::{Record, tokens::Rolling},
    proto::SampleResponse,
};
use prost::Message;
use tokio::time::Instant;
use tonic::Status;
use tonic_types::StatusExt;

use crate::{Rng, clients::Asked};

/// Copies of one sample may run beside each other for so long.
const COPIES: Duration = Duration::from_secs(1);

/// A request that was sent before the key's answer may arrive late.
const LATE: Duration = Duration::from_secs(1);

/// What the server may say to a caller whose key is good.
const RETRIABLE: [&str; 7] = [
    "NO_REPLICA",
    "REPLICA_LOST",
    "OUTCOME_UNKNOWN",
    "DEADLINE",
    "SHUTTING_DOWN",
    "ENGINE_BUSY",
    "TOO_MANY_WAITERS",
];

#[derive(Default)]
pub(crate) struct History {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    answered: HashMap<String, Answered>,
    order: Vec<String>,
    answers: u64,
    replays: u64,
    refusals: BTreeMap<String, u64>,
    faults: Vec<String>,
}

struct Answered {
    asked: Asked,
    first: Instant,
    bytes: Vec<u8>,
}

/// What counts of an answer.
fn bytes(response: &SampleResponse) -> Vec<u8> {
    SampleResponse {
        replayed: false,
        timing: None,
        request_id: String::new(),
        ..response.clone()
    }
    .encode_to_vec()
}

impl History {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn fault(&self, fault: String) {
        eprintln!("FAULT {fault}");
        self.lock().faults.push(fault);
    }

    pub(crate) fn must_be_sound(&self) {
        let faults = self.lock().faults.clone();
        assert!(faults.is_empty(), "{faults:#?}");
    }

    pub(crate) fn answered(&self, asked: &Asked, response: &SampleResponse) {
        let key = &asked.key;
        let right = response.samples.len() == asked.samples as usize
            && (0..)
                .zip(&response.samples)
                .all(|(i, sample)| sample.token_ids == asked.expected(i));
        if !right {
            self.fault(format!("{key}: wrong tokens: {response:?}"));
        }
        if response.not_stored {
            self.fault(format!("{key}: not stored"));
        }
        let new = bytes(response);
        let mut state = self.lock();
        state.answers += 1;
        state.replays += u64::from(response.replayed);
        match state.answered.get(key) {
            Some(known) if known.bytes != new => {
                let first = SampleResponse::decode(known.bytes.as_slice());
                drop(state);
                self.fault(format!("{key}: two results: {first:?} and {response:?}"));
            }
            Some(_) => {}
            None => {
                state.order.push(key.clone());
                state.answered.insert(
                    key.clone(),
                    Answered {
                        asked: asked.clone(),
                        first: Instant::now(),
                        bytes: new,
                    },
                );
            }
        }
    }

    /// It was asked for after it had been answered.
    pub(crate) fn must_be_replayed(&self, asked: &Asked, response: &SampleResponse) {
        if !response.replayed {
            self.fault(format!("{}: answered, and then not replayed", asked.key));
        }
    }

    pub(crate) fn refused(&self, asked: &Asked, status: &Status) {
        let reason = status.get_details_error_info().map(|info| info.reason);
        if let Some(reason) = &reason
            && !RETRIABLE.contains(&reason.as_str())
            && !(asked.may_be_cancelled() && reason == "CANCELLED")
        {
            self.fault(format!("{}: refused: {reason}: {status}", asked.key));
        }
        // Without a reason it is the transport's word.
        let name = reason.unwrap_or_else(|| format!("{:?}", status.code()));
        *self.lock().refusals.entry(name).or_default() += 1;
    }

    /// A caller was told so.
    pub(crate) fn was_cancelled(&self) -> bool {
        self.lock().refusals.contains_key("CANCELLED")
    }

    pub(crate) fn any(&self, rng: &mut Rng) -> Option<Asked> {
        let state = self.lock();
        let count = state.order.len() as u64;
        let key = state.order.get(rng.below(count) as usize)?;
        Some(state.answered[key].asked.clone())
    }

    pub(crate) fn all(&self) -> Vec<Asked> {
        let state = self.lock();
        state.answered.values().map(|a| a.asked.clone()).collect()
    }

    pub(crate) fn summary(&self) -> String {
        let state = self.lock();
        format!(
            "{} keys answered {} times, {} of them replays; retries after {:?}",
            state.order.len(),
            state.answers,
            state.replays,
            state.refusals,
        )
    }

    /// Looks at what the engines ran.
    pub(crate) fn look_through(&self, records: &[Record]) -> Copies {
        let mut by_prompt: HashMap<u64, Vec<&Record>> = HashMap::new();
        for record in records {
            by_prompt
                .entry(record.prompt_hash)
                .or_default()
                .push(record);
        }
        let mut copies = Copies::default();
        let mut faults = Vec::new();
        let state = self.lock();
        for (key, answered) in &state.answered {
            let hash = Rolling::of(&answered.asked.prompt).value();
            let Some(runs) = by_prompt.remove(&hash) else {
                faults.push(format!("{key}: no engine ran it"));
                continue;
            };
            copies.attempts += runs.len();
            copies.again += usize::from(runs.len() > answered.asked.samples as usize);
            if let Some(late) = runs.iter().find(|r| r.arrived > answered.first + LATE) {
                faults.push(format!("{key}: generated again when done: {late:?}"));
            }
            let beside = longest_beyond(answered.asked.samples as usize, &runs);
            if beside > COPIES {
                faults.push(format!(
                    "{key}: copies ran for {beside:?}: {}",
                    lives(&runs)
                ));
            }
            copies.beside += usize::from(!beside.is_zero());
            copies.longest = copies.longest.max(beside);
        }
        copies.strangers = by_prompt.len();
        drop(state);
        faults.into_iter().for_each(|fault| self.fault(fault));
        copies
    }
}

/// For a person: when each arrived, started and ended, in seconds.
fn lives(runs: &[&Record]) -> String {
    let zero = runs.iter().map(|run| run.arrived).min();
    let after = |at: Option<Instant>| {
        at.zip(zero)
            .map_or(f64::NAN, |(at, zero)| (at - zero).as_secs_f64())
    };
    let mut text = String::new();
    for run in runs {
        let _ = write!(
            text,
            "\n  {} arrived {:.3} started {:.3} ended {:.3} {:?}",
            run.rid,
            after(Some(run.arrived)),
            after(run.started),
            after(run.ended),
            run.how
        );
    }
    text
}

/// The longest time for which more than `samples` ran at once: with one sample,
/// every copy; with two, which an engine's history does not tell apart, one
/// beside both.
fn longest_beyond(samples: usize, runs: &[&Record]) -> Duration {
    let now = Instant::now();
    let mut changes: Vec<(Instant, bool)> = runs
        .iter()
        .filter_map(|run| Some((run.started?, run.ended.unwrap_or(now))))
        .flat_map(|(start, end)| [(start, true), (end, false)])
        .collect();
    // An end before a start at the same moment.
    changes.sort();
    let (mut live, mut since, mut longest) = (0, now, Duration::ZERO);
    for (at, starts) in changes {
        if starts {
            live += 1;
            if live == samples + 1 {
                since = at;
            }
        } else {
            if live == samples + 1 {
                longest = longest.max(at - since);
            }
            live -= 1;
        }
    }
    longest
}

#[derive(Default)]
pub(crate) struct Copies {
    attempts: usize,
    again: usize,
    beside: usize,
    longest: Duration,
    /// Prompts whose keys are not answered yet.
    pub(crate) strangers: usize,
}

impl fmt::Display for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} attempts at the engines; {} keys were generated by more than one each; of {} \
             some copies ran at once, for {:?} at most",
            self.attempts, self.again, self.beside, self.longest
        )
    }
}
