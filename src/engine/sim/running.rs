//! A call on its way: from the checks to its jobs' last events.

use std::sync::Arc;

use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::Instant,
};

use super::{
    driver::{Selector, Submission, Waiter},
    engine::{Engine, Live},
    history::{How, Record, RecordId},
    reply::{Said, Sequence, Style},
    request::{Fault, Parsed},
    scheduler::{Event, Job, JobId, Refusal},
    tokens::Rolling,
};

/// One call on its way: dropped before its end, it aborts what it started.
pub(super) struct Running {
    pub(super) engine: Arc<Engine>,
    _live: Live,
    pub(super) sequences: Vec<Sequence>,
    records: Vec<RecordId>,
    pub(super) jobs: Vec<Option<JobId>>,
    events: UnboundedReceiver<(usize, Event)>,
    /// Kept, so that a call that nobody will answer waits.
    _sender: UnboundedSender<(usize, Event)>,
    pub(super) list: bool,
    left: usize,
}

impl Drop for Running {
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

impl Running {
    /// The next event as it is told. Unset: all sequences are over.
    pub(super) async fn next(&mut self, stream: bool) -> Option<(usize, Said)> {
        if self.left == 0 {
            return None;
        }
        let (index, event) = self.events.recv().await?;
        if matches!(event, Event::Done { .. } | Event::Refused { .. }) {
            self.left -= 1;
            self.jobs[index] = None;
        }
        let version = self.engine.version();
        let style = Style {
            clock: &self.engine.clock,
            version: &version,
            stream,
            incremental: self.engine.config.incremental_streaming_output,
            index: self.list.then_some(index),
        };
        let said = self.sequences[index].take(&event, style);
        Some((index, said))
    }
}

/// Everything between parsing and the first event.
pub(super) async fn start(
    engine: &Arc<Engine>,
    parsed: Parsed,
    arrived: Instant,
    queue_full: bool,
) -> Result<Running, Fault> {
    let reject = |fault| {
        engine.history.lock().counters.refused += 1;
        fault
    };
    let config = &engine.config;
    parsed.check_shape(config.ranks).map_err(reject)?;
    let n = parsed.n();
    let count = parsed.prompts.as_ref().map_or(1, Vec::len) * n;
    let rids: Vec<Arc<str>> = match &parsed.rids {
        Some(rids) if n == 1 => rids.iter().map(|rid| rid.as_str().into()).collect(),
        // Ids of several samples are made anew, whatever was given.
        _ => (0..count).map(|_| fresh_rid()).collect(),
    };
    let live = engine.make_live(&rids).map_err(|rid| {
        reject(Fault::Message(format!(
            "Duplicate request ID detected: {rid}"
        )))
    })?;
    let asked = parsed.rank.and_then(|rank| u32::try_from(rank).ok());
    let (sender, events) = unbounded_channel();
    let list = parsed.list || n > 1;
    let mut running = Running {
        engine: Arc::clone(engine),
        _live: live,
        sequences: Vec::new(),
        records: Vec::new(),
        jobs: vec![None; rids.len()],
        events,
        _sender: sender.clone(),
        list,
        left: rids.len(),
    };
    // An id outside the range of the type is outside the vocabulary too.
    let prompts: Vec<Vec<u32>> = parsed
        .prompts
        .iter()
        .flatten()
        .map(|ids| {
            let id = |&id| u32::try_from(id).unwrap_or(u32::MAX);
            ids.iter().map(id).collect()
        })
        .collect();
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
                stream: parsed.stream,
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
    if let Err(fault) = parsed.check_values(config) {
        let mut history = engine.history.lock();
        for &record in &running.records {
            history.ended(record, How::Rejected, 0, 0);
        }
        return Err(fault);
    }

    let mut submissions: Vec<Vec<Submission>> = (0..config.ranks).map(|_| Vec::new()).collect();
    let mut scouts = Vec::new();
    let stream = parsed.stream;
    let every = |interval: Option<u32>| {
        if stream {
            interval.unwrap_or(config.stream_interval)
        } else {
            0
        }
    };
    let namespace: Arc<str> = parsed.namespace.as_str().into();
    for (at, prompt) in prompts.into_iter().enumerate() {
        let poison = prompt.iter().any(|&id| id >= config.vocab_size);
        let sampling = parsed.sampling(at);
        let room = config.context_length as usize - prompt.len();
        let start = usize::try_from(parsed.logprob_start).ok();
        let compute_from = start.filter(|&s| parsed.return_logprob && s < prompt.len());
        let logprobs = parsed
            .return_logprob
            .then(|| (start.unwrap_or(usize::MAX), parsed.top_logprobs.min(128)));
        let job = Job {
            id: engine.next_job(),
            max_new: sampling
                .max_new
                .unwrap_or_else(|| u32::try_from(room).unwrap_or(u32::MAX)),
            seed: sampling.seed,
            stop_ids: sampling.stop_ids,
            ignore_eos: sampling.ignore_eos,
            compute_from,
            namespace: Arc::clone(&namespace),
            priority: parsed.priority,
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
            let shown = (config.ranks > 1).then_some(rank);
            let id = if sample == 0 {
                job.id
            } else {
                engine.next_job()
            };
            running.sequences.push(Sequence::new(
                Arc::clone(&rids[index]),
                &job.prompt,
                logprobs,
                config.vocab_size,
                shown,
                arrived,
            ));
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

fn fresh_rid() -> Arc<str> {
    uuid::Uuid::new_v4().simple().to_string().into()
}
