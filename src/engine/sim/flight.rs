//! A call on its way: from its arrival to its jobs' last events, whatever API it
//! came by.

use std::sync::Arc;

use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::Instant,
};

use super::{
    config::SimConfig,
    driver::{Selector, Submission, Waiter},
    engine::{Engine, Live},
    history::{How, Record, RecordId},
    scheduler::{Event, Job, JobId, Refusal},
    tokens::Rolling,
};

/// One call on its way: dropped before its end, it aborts what it started.
pub(super) struct Flight {
    pub(super) engine: Arc<Engine>,
    _live: Live,
    records: Vec<RecordId>,
    pub(super) jobs: Vec<Option<JobId>>,
    events: UnboundedReceiver<(usize, Event)>,
    /// Kept, so that a call that nobody will answer waits.
    _sender: UnboundedSender<(usize, Event)>,
    left: usize,
    /// The rank of each sequence.
    pub(super) ranks: Vec<u32>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        for job in self.jobs.iter().flatten() {
            self.engine.abort(&Selector::Job(*job));
        }
        // A record that a rank has ended is not touched.
        let mut history = self.engine.history.lock();
        for (record, job) in self.records.iter().zip(&self.jobs) {
            if job.is_none() {
                history.ended(*record, How::Gone, 0, 0);
            }
        }
    }
}

impl Flight {
    /// The next event of a sequence. Unset: all are over.
    pub(super) async fn next(&mut self) -> Option<(usize, Event)> {
        if self.left == 0 {
            return None;
        }
        let (index, event) = self.events.recv().await?;
        if matches!(event, Event::Done { .. } | Event::Refused { .. }) {
            self.left -= 1;
            self.jobs[index] = None;
        }
        Some((index, event))
    }
}

/// A call that has passed its first checks.
pub(super) struct Call {
    /// Its ids, live.
    pub(super) live: Live,
    /// One for each sequence: `n` for each prompt in turn.
    pub(super) rids: Vec<Arc<str>>,
    pub(super) n: usize,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) rank: Option<u32>,
    pub(super) stream: bool,
    /// Prefixes are shared within one of these.
    pub(super) namespace: Arc<str>,
    pub(super) priority: i64,
    pub(super) arrived: Instant,
    /// Refuse it as if the queue were full.
    pub(super) queue_full: bool,
}

/// How one prompt is continued.
pub(super) struct Sampling {
    /// Unset: as many as fit.
    pub(super) max_new: Option<u32>,
    pub(super) min_new: u32,
    pub(super) stop_ids: Vec<u32>,
    pub(super) ignore_eos: bool,
    pub(super) stops_past_eos: bool,
    pub(super) seed: u64,
    pub(super) stream_interval: Option<u32>,
    /// Prompt tokens from here on are computed, cached or not.
    pub(super) compute_from: Option<usize>,
}

/// Everything between the first checks and the first event. While generation is
/// paused a call waits here; then `check` has the last word, and says how each
/// prompt is continued.
pub(super) async fn start<E>(
    engine: &Arc<Engine>,
    call: Call,
    check: impl FnOnce(&SimConfig) -> Result<Vec<Sampling>, E>,
) -> Result<Flight, E> {
    let Call {
        live,
        rids,
        n,
        prompts,
        rank: asked,
        stream,
        namespace,
        priority,
        arrived,
        queue_full,
    } = call;
    let config = &engine.config;
    let (sender, events) = unbounded_channel();
    let mut running = Flight {
        engine: Arc::clone(engine),
        _live: live,
        records: Vec::new(),
        jobs: vec![None; rids.len()],
        events,
        _sender: sender.clone(),
        left: rids.len(),
        ranks: vec![0; rids.len()],
    };
    for (prompt, rids) in prompts.iter().zip(rids.chunks(n)) {
        let prompt_hash = Rolling::of(prompt).value();
        let mut history = engine.history.lock();
        for rid in rids {
            running.records.push(history.add(Record {
                rid: Arc::clone(rid),
                asked_rank: asked,
                rank: None,
                prompt_tokens: prompt.len(),
                prompt_hash,
                stream,
                arrived,
                parsed: Instant::now(),
                queued: None,
                started: None,
                ended: None,
                how: How::Live,
                tokens: 0,
                cached: None,
                retractions: 0,
            }));
        }
    }
    let held = *engine.paused.borrow();
    engine.unpaused().await;
    // When the engine itself would have had it: what this process takes to read
    // a request is no time of the engine's.
    let since = if held {
        Instant::now()
    } else {
        arrived + config.parse_delay
    };
    let samplings = match check(config) {
        Ok(samplings) => samplings,
        Err(fault) => {
            let mut history = engine.history.lock();
            for &record in &running.records {
                history.ended(record, How::Rejected, 0, 0);
            }
            return Err(fault);
        }
    };

    let mut submissions: Vec<Vec<Submission>> = (0..config.ranks).map(|_| Vec::new()).collect();
    let mut scouts = Vec::new();
    let every = |interval: Option<u32>| {
        if stream {
            interval.unwrap_or(config.stream_interval)
        } else {
            0
        }
    };
    for (at, (prompt, sampling)) in prompts.into_iter().zip(samplings).enumerate() {
        let poison = prompt.iter().any(|&id| id >= config.vocab_size);
        let room = (config.context_length as usize).saturating_sub(prompt.len());
        let job = Job {
            id: engine.next_job(),
            max_new: sampling
                .max_new
                .unwrap_or_else(|| u32::try_from(room).unwrap_or(u32::MAX)),
            seed: sampling.seed,
            stop_ids: sampling.stop_ids,
            ignore_eos: sampling.ignore_eos,
            min_new: sampling.min_new,
            stops_past_eos: sampling.stops_past_eos,
            compute_from: sampling.compute_from,
            namespace: Arc::clone(&namespace),
            priority,
            notify_every: every(sampling.stream_interval),
            poison,
            prompt,
        };
        if n > 1 {
            // Several samples of a prompt find it cached: it is computed first.
            scouts.push(Job {
                id: engine.next_job(),
                max_new: 0,
                notify_every: 0,
                compute_from: None,
                ..job.clone()
            });
        }
        for sample in 0..n {
            let index = at * n + sample;
            let rank = engine.choose_rank(asked);
            let id = if sample == 0 {
                job.id
            } else {
                engine.next_job()
            };
            running.ranks[index] = rank;
            let record = running.records[index];
            if let Some(record) = engine.history.lock().get(record) {
                record.rank = Some(rank);
            }
            submissions[rank as usize].push(Submission {
                job: Job { id, ..job.clone() },
                waiter: Waiter {
                    rid: Arc::clone(&rids[index]),
                    index,
                    since,
                    events: sender.clone(),
                    record: Some(record),
                },
            });
        }
    }
    if queue_full {
        let mut history = engine.history.lock();
        for (index, &record) in running.records.iter().enumerate() {
            history.ended(record, How::QueueFull, 0, 0);
            let _ = sender.send((
                index,
                Event::Refused {
                    job: JobId(u64::MAX),
                    why: Refusal::QueueFull,
                    tokens: Vec::new(),
                },
            ));
        }
        drop(history);
        return Ok(running);
    }
    for scout in scouts {
        scouted(engine, scout, asked).await;
    }
    for (rank, jobs) in (0..config.ranks).zip(submissions) {
        if jobs.is_empty() {
            continue;
        }
        let ids: Vec<_> = jobs.iter().map(|s| (s.waiter.index, s.job.id)).collect();
        if engine.dispatch(rank, jobs) {
            for (index, id) in ids {
                running.jobs[index] = Some(id);
            }
        }
    }
    Ok(running)
}

/// Runs a job that nobody sees and waits for its end.
async fn scouted(engine: &Arc<Engine>, job: Job, asked: Option<u32>) {
    let (sender, mut events) = unbounded_channel();
    let rank = engine.choose_rank(asked);
    let submission = Submission {
        job,
        waiter: Waiter {
            rid: fresh_rid(),
            index: 0,
            since: Instant::now(),
            events: sender.clone(),
            record: None,
        },
    };
    engine.dispatch(rank, vec![submission]);
    while let Some((_, event)) = events.recv().await {
        if matches!(event, Event::Done { .. } | Event::Refused { .. }) {
            return;
        }
    }
}

/// An id of the engine's own making.
pub(super) fn fresh_rid() -> Arc<str> {
    uuid::Uuid::new_v4().simple().to_string().into()
}
