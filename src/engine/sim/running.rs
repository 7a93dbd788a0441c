//! A `/generate` call of SGLang's API on its way.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    engine::Engine,
    flight::{self, Call, Flight, fresh_rid},
    reply::{Said, Sequence, Style},
    request::{Fault, Parsed},
};

/// One call on its way: dropped before its end, it aborts what it started.
pub(super) struct Running {
    pub(super) flight: Flight,
    pub(super) sequences: Vec<Sequence>,
    pub(super) list: bool,
}

impl Running {
    /// The next event as it is told. Unset: all sequences are over.
    pub(super) async fn next(&mut self, stream: bool) -> Option<(usize, Said)> {
        let (index, event) = self.flight.next().await?;
        let engine = &self.flight.engine;
        let version = engine.version();
        let style = Style {
            clock: &engine.clock,
            version: &version,
            stream,
            incremental: engine.config.incremental_streaming_output,
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
    let start = usize::try_from(parsed.logprob_start).ok();
    let logprobs = parsed
        .return_logprob
        .then(|| (start.unwrap_or(usize::MAX), parsed.top_logprobs.min(128)));
    let mut sequences: Vec<Sequence> = prompts
        .iter()
        .zip(rids.chunks(n))
        .flat_map(|(prompt, rids)| rids.iter().map(move |rid| (prompt, rid)))
        .map(|(prompt, rid)| {
            let rid = Arc::clone(rid);
            Sequence::new(rid, prompt, logprobs, config.vocab_size, arrived)
        })
        .collect();
    let load = parsed
        .lora
        .as_deref()
        .map(|name| engine.adapters.lock().find(name))
        .transpose()
        .map_err(|why| reject(Fault::Message(why)))?;
    // KV of one load of an adapter is no other's.
    let namespace: Arc<str> = match load {
        Some(load) => format!("{load}@{}", parsed.namespace).into(),
        None => parsed.namespace.as_str().into(),
    };
    let call = Call {
        live,
        rids,
        n,
        rank: parsed.rank.and_then(|rank| u32::try_from(rank).ok()),
        stream: parsed.stream,
        namespace,
        priority: parsed.priority,
        arrived,
        queue_full,
        prompts,
    };
    let flight = flight::start(engine, call, |config| {
        parsed.check_values(config)?;
        let prompts = parsed.prompts.iter().flatten().enumerate();
        Ok(prompts
            .map(|(at, prompt)| flight::Sampling {
                compute_from: start.filter(|&s| parsed.return_logprob && s < prompt.len()),
                ..parsed.sampling(at)
            })
            .collect())
    })
    .await?;
    for (sequence, rank) in sequences.iter_mut().zip(&flight.ranks) {
        sequence.served_by((config.ranks > 1).then_some(*rank));
    }
    Ok(Running {
        list: parsed.list || n > 1,
        flight,
        sequences,
    })
}
