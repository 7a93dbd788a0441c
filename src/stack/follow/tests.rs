use std::sync::Arc;

use super::*;
use crate::{
    call::{Completion, LogprobMode, RouteReason},
    error::Reason,
    ids::{Incarnation, ReplicaId, Target},
    stack::generation::Generation,
};

const QUIET: Duration = Duration::from_secs(5);

fn receipt() -> RouteReceipt {
    RouteReceipt {
        target: Target {
            replica: ReplicaId::new("r"),
            incarnation: Incarnation(1),
            rank: 0,
        },
        served_rank: None,
        reason: RouteReason::NoKey,
        attempts: Vec::new(),
        expected_cached_tokens: 0,
    }
}

fn chunk(tokens: &[u32]) -> TokenChunk {
    TokenChunk {
        tokens: tokens.to_vec(),
        ..TokenChunk::default()
    }
}

fn kept(tokens: &[u32]) -> Partial {
    Partial {
        tokens: tokens.to_vec(),
        ..Partial::default()
    }
}

fn done() -> Outcome {
    Ok(Finished {
        completion: Arc::new(Completion {
            samples: Vec::new(),
            prompt_logprobs: None,
            logprob_mode: LogprobMode::Unknown,
            produced_at: std::time::SystemTime::UNIX_EPOCH,
            total: Duration::ZERO,
            first_token: None,
        }),
        replayed: false,
        stored: true,
    })
}

/// The tokens that a reader holds who obeys the events so far.
async fn read(follower: &mut Follower, events: usize) -> Vec<u32> {
    let mut held: Vec<u32> = Vec::new();
    for _ in 0..events {
        match follower.next().await.unwrap().unwrap() {
            Event::Delta { offset, tokens, .. } => {
                assert_eq!(offset as usize, held.len());
                held.extend(tokens);
            }
            Event::Reset { keep, .. } => held.truncate(keep as usize),
            Event::Started(_) | Event::Alive | Event::Final(_) => {}
        }
    }
    held
}

#[tokio::test(start_paused = true)]
async fn a_late_reader_catches_up_then_follows() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    generation.attempt(0, 1, &Partial::default(), receipt());
    generation.push(0, &chunk(&[1, 2]));
    generation.push(0, &chunk(&[3]));
    let mut follower = Follower::new(ticket, QUIET);
    assert_eq!(read(&mut follower, 2).await, [1, 2, 3]);
    generation.push(0, &chunk(&[4]));
    assert!(matches!(
        follower.next().await,
        Some(Ok(Event::Delta { offset: 3, .. }))
    ));
    generation.end(done());
    assert!(matches!(follower.next().await, Some(Ok(Event::Final(_)))));
    assert!(follower.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_lost_attempt_is_taken_back_to_what_is_kept() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    let late = generation.follow().unwrap();
    generation.attempt(0, 1, &Partial::default(), receipt());
    generation.push(0, &chunk(&[1, 2, 3]));
    let mut follower = Follower::new(ticket, QUIET);
    assert_eq!(read(&mut follower, 2).await, [1, 2, 3]);
    // Two attempts come and go before the reader looks again: the second
    // kept nothing.
    generation.attempt(0, 2, &Partial::default(), receipt());
    generation.push(0, &chunk(&[7, 8]));
    generation.attempt(0, 3, &kept(&[7, 8]), receipt());
    generation.push(0, &chunk(&[9]));
    let held = read(&mut follower, 2).await;
    assert_eq!(held, [7, 8, 9]);
    // Who comes now never sees what was lost.
    assert_eq!(read(&mut Follower::new(late, QUIET), 2).await, [7, 8, 9]);
}

#[tokio::test(start_paused = true)]
async fn silence_is_broken_and_the_deadline_ends_it() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(12);
    let mut follower = Follower::new(ticket.until(deadline), QUIET);
    assert!(matches!(follower.next().await, Some(Ok(Event::Alive))));
    assert!(matches!(follower.next().await, Some(Ok(Event::Alive))));
    let end = follower.next().await.unwrap().unwrap_err();
    assert_eq!(end.reason, Reason::Deadline);
    assert!(follower.next().await.is_none());
    drop(generation);
}

#[tokio::test(start_paused = true)]
async fn a_replay_is_told_once() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    let mut finished = done().unwrap();
    Arc::get_mut(&mut finished.completion)
        .unwrap()
        .samples
        .push(crate::call::SampleOutput {
            tokens: vec![1, 2, 3],
            logprobs: None,
            top_logprobs: None,
            text: None,
            stop_reason: crate::call::StopReason::Length,
            matched: None,
            weight_spans: Vec::new(),
            routed_experts: None,
            usage: Default::default(),
            route: receipt(),
        });
    generation.end(Ok(finished));
    let mut follower = Follower::new(ticket, QUIET);
    assert_eq!(read(&mut follower, 3).await, [1, 2, 3]);
    assert!(follower.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_delta_is_bounded() {
    let (generation, ticket) = Generation::begin(None, 1, 8);
    generation.attempt(0, 1, &Partial::default(), receipt());
    generation.push(0, &chunk(&vec![7; MAX_DELTA + 1]));
    let mut follower = Follower::new(ticket, QUIET);
    assert_eq!(read(&mut follower, 2).await.len(), MAX_DELTA);
}
