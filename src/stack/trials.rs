//! Probes of ejected ranks. Only a token tells that a rank generates: an engine can
//! hang behind routes that all look well. So the probe is a request for one token,
//! of our own: no caller's is put at risk.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{Engines, Parts};
use crate::{
    call::{LogprobsWanted, Prompt, Sampling},
    engine::{
        EngineClient, EngineError, EngineEvent, EngineRequest, FinishReason, SamplingRef,
        StreamMode,
    },
    fleet::{Fleet, Trial, health::Probe},
    ids::EngineRequestId,
};

/// How often ranks that are due are looked for.
const LOOK: Duration = Duration::from_millis(250);

/// Probes ranks as they become due, until told to stop.
pub async fn keep(parts: Parts, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        for trial in parts.fleet.trials() {
            let probing = one(Arc::clone(&parts.fleet), parts.engines.clone(), trial);
            let stop = stop.clone();
            tokio::spawn(async move { stop.run_until_cancelled(probing).await });
        }
    }
}

async fn one(fleet: Arc<Fleet>, engines: Engines, trial: Trial) {
    let target = &trial.target;
    let client = engines.client(trial.replica.facts.engine);
    let request = request(&trial);
    let (url, id) = (Arc::clone(&request.url), request.id.clone());
    let limit = fleet.config().health.hang_after;
    let asked = timeout(limit, ask(client, request)).await;
    if asked.is_err() {
        // What was asked for is not wanted any more.
        drop(client.abort(&url, &id).await);
    }
    let probe = match asked {
        Ok(Ok(())) => Probe::Passed,
        Ok(Err(EngineError::Busy { .. })) => Probe::Busy,
        // The front answers, and a prompt of one token may be below what it
        // takes: nothing is wrong with the rank.
        Ok(Err(EngineError::Rejected(_))) => Probe::Passed,
        Ok(Err(error)) => {
            tracing::info!(%target, %error, "probe failed");
            fleet.unreachable(target);
            Probe::Failed
        }
        Err(_) => {
            tracing::info!(%target, "probe got no answer");
            Probe::Failed
        }
    };
    fleet.probed(target, probe);
}

/// One token after a prompt of one.
fn request(trial: &Trial) -> EngineRequest {
    EngineRequest {
        url: Arc::clone(&trial.facts.url),
        id: EngineRequestId::mint(),
        rank: trial.facts.engine_rank,
        // In every vocabulary.
        prompt: Prompt::Tokens([0].into()),
        max_tokens: 1,
        sampling: SamplingRef {
            shared: Arc::new(Sampling {
                ignore_eos: true,
                ..Sampling::default()
            }),
            seed: None,
            min_tokens: 0,
        },
        logprobs: LogprobsWanted::default(),
        adapter: None,
        priority: None,
        routed_experts: false,
        stream: StreamMode::Plain,
        traceparent: None,
    }
}

async fn ask(client: &Arc<dyn EngineClient>, request: EngineRequest) -> Result<(), EngineError> {
    let mut events = client.generate(request);
    while let Some(event) = events.next().await {
        match event? {
            EngineEvent::Tokens(_) => {}
            EngineEvent::Finished(finish) => {
                return match finish.reason {
                    FinishReason::Stop(_) | FinishReason::Length => Ok(()),
                    FinishReason::Aborted { message } => Err(EngineError::Failed(message)),
                };
            }
        }
    }
    Err(EngineError::Lost("the reply ended without its end".into()))
}
