//! The vLLM client against recorded exchanges with a real vLLM, replayed to the
//! byte, and against servers that break the contract.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    unreachable_pub,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod asked;
mod broken;
mod connections;
mod fixtures;
mod replay;
#[path = "../sglang_contract/server.rs"]
mod server;

use std::time::Duration;

use berth::engine::{
    EngineClient, EngineError, EngineEvent, EngineRequest, Finish, vllm::VllmClient,
};
use futures_util::StreamExt;

/// Longer than anything here takes, on any machine.
const LONG: Duration = Duration::from_secs(60);

/// Everything that an attempt gives.
async fn run(client: &VllmClient, request: EngineRequest) -> Vec<Result<EngineEvent, EngineError>> {
    tokio::time::timeout(LONG, client.generate(request).collect())
        .await
        .expect("the attempt ends")
}

struct Outcome {
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    top: Vec<(u32, f32)>,
    /// Tokens of each chunk.
    chunks: Vec<usize>,
    finish: Finish,
}

fn outcome(events: Vec<Result<EngineEvent, EngineError>>) -> Outcome {
    let (mut tokens, mut logprobs, mut top, mut chunks) = (vec![], vec![], vec![], vec![]);
    let mut finish = None;
    for event in events {
        assert!(finish.is_none(), "nothing follows the finish");
        match event.expect("a result") {
            EngineEvent::Tokens(chunk) => {
                chunks.push(chunk.tokens.len());
                tokens.extend(chunk.tokens);
                logprobs.extend(chunk.logprobs.unwrap_or_default());
                if let Some(flat) = chunk.top_logprobs {
                    top.extend(flat.token_ids.into_iter().zip(flat.logprobs));
                }
            }
            EngineEvent::Finished(end) => finish = Some(*end),
        }
    }
    Outcome {
        tokens,
        logprobs,
        top,
        chunks,
        finish: finish.expect("a finish"),
    }
}

fn failure(mut events: Vec<Result<EngineEvent, EngineError>>) -> EngineError {
    events
        .pop()
        .expect("an event")
        .expect_err("the attempt fails")
}
