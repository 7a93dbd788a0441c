//! What the tests of stores share: made-up results that can be checked from
//! their key alone, and short forms of the trait's calls.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use berth::{
    call::{
        AttemptReceipt, Completion, LogprobMode, RouteReason, RouteReceipt, SampleOutput,
        StopReason, Usage, WeightSpan,
    },
    ids::{EngineRequestId, IdempotencyKey, Incarnation, ReplicaId, Target, Tenant},
    store::{
        AttemptRecord, Claim, ClaimRequest, Claimed, Commit, Fingerprint, FinishedSample, KeyHash,
        OwnerId, Store,
    },
};

pub const OWNER: OwnerId = OwnerId(1);

pub fn key(n: u64) -> KeyHash {
    KeyHash::of(&Tenant::default(), &IdempotencyKey::new(format!("key-{n}")))
}

pub fn fingerprint(n: u64) -> Fingerprint {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    Fingerprint(bytes)
}

pub fn request(n: u64, owner: OwnerId, num_samples: u32) -> ClaimRequest {
    ClaimRequest {
        key: key(n),
        tenant: Tenant::default(),
        fingerprint: fingerprint(n),
        num_samples,
        owner,
    }
}

pub fn target() -> Target {
    Target {
        replica: ReplicaId::new("replica-1"),
        incarnation: Incarnation(3),
        rank: 0,
    }
}

pub fn attempt(number: u32) -> AttemptRecord {
    AttemptRecord {
        number,
        id: EngineRequestId::mint(),
        target: target(),
        url: "http://127.0.0.1:30000".into(),
        binds: Some(7),
    }
}

/// A result that belongs to this key, sample and attempt and to no other, with
/// `len` tokens.
pub fn sample(n: u64, index: u32, attempt: u32, len: usize) -> FinishedSample {
    let mut state = n ^ (u64::from(index) << 40) ^ (u64::from(attempt) << 52);
    let tokens: Vec<u32> = (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32 & 0x1_ffff
        })
        .collect();
    FinishedSample {
        output: SampleOutput {
            logprobs: Some(tokens.iter().map(|t| -(*t as f32) / 1e5).collect()),
            tokens,
            top_logprobs: None,
            text: None,
            stop_reason: StopReason::Length,
            matched: None,
            weight_spans: vec![WeightSpan {
                version: "7".into(),
                start: 0,
                end: len as u32,
            }],
            routed_experts: None,
            usage: Usage {
                prompt_tokens: n as u32,
                cached_tokens: 0,
                completion_tokens: len as u32,
            },
            route: RouteReceipt {
                target: target(),
                served_rank: Some(0),
                reason: RouteReason::NewKey,
                attempts: vec![AttemptReceipt {
                    number: attempt,
                    target: target(),
                    failure: None,
                    kept_tokens: 0,
                }],
                expected_cached_tokens: 0,
            },
        },
        prompt_logprobs: None,
        logprob_mode: LogprobMode::Processed,
        finished_at: SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + n),
        first_token: Some(Duration::from_millis(20)),
    }
}

/// Claims a key that must be free.
pub async fn claimed(store: &dyn Store, request: ClaimRequest) -> Claimed {
    match store.claim(request).await.unwrap() {
        Claim::Claimed(claimed) => claimed,
        other => panic!("not claimed: {other:?}"),
    }
}

/// The finished result under a key that must have one.
pub async fn done(store: &dyn Store, request: ClaimRequest) -> Arc<Completion> {
    match store.claim(request).await.unwrap() {
        Claim::Done(completion) => completion,
        other => panic!("not done: {other:?}"),
    }
}

/// A whole generation of one sample with `len` tokens.
pub async fn generate(store: &dyn Store, n: u64, len: usize) -> Commit {
    claimed(store, request(n, OWNER, 1)).await;
    store.dispatch(key(n), OWNER, 0, attempt(1)).await.unwrap();
    let finished = sample(n, 0, 1, len);
    store.commit(key(n), OWNER, 0, 1, finished).await.unwrap()
}

/// Whether a result is the one of [`generate`].
pub fn is_result_of(completion: &Completion, n: u64, len: usize) -> bool {
    let [only] = &completion.samples[..] else {
        return false;
    };
    *only == sample(n, 0, 1, len).output
}
