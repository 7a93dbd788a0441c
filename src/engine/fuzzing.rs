//! What engines may answer. See `crate::fuzzing`.

#![allow(
    clippy::expect_used,
    reason = "a panic is how a fuzzer learns of a fault"
)]

use std::sync::{Arc, OnceLock};

use http::{HeaderMap, HeaderValue, StatusCode, header};

use super::{
    EngineError, EngineEvent, EngineRequest, Finish, FinishReason, SamplingRef, StreamMode,
    attempt::{self, Dialect, Frames, Next, Transcript},
    sglang::{self, SglangClient},
    vllm::{self, VllmClient},
};
use crate::{
    call::{LogprobsWanted, Prompt, SampleParams, Sampling},
    fuzzing::Feed,
    ids::EngineRequestId,
};

/// Small, so that it is met.
const LIMIT: usize = 4096;
/// By which a reply is known to be one to the request.
const ID: &str = "b0";
/// The longest word about an engine, in bytes.
const MAX_TOLD: usize = 1024;

/// An engine's answer: a plain reply, a stream in pieces, a refusal, or what it says
/// of itself.
pub fn replies(data: &[u8]) {
    let mut feed = Feed(data);
    let choice = feed.byte();
    let vllm = choice & 1 == 1;
    match (choice >> 1) % 4 {
        0 | 1 => {
            let request = request(&mut feed, (choice >> 1) % 4 == 0);
            if vllm {
                answered(clients().1.clone(), &request, feed);
            } else {
                answered(clients().0.clone(), &request, feed);
            }
        }
        2 => refused(feed),
        _ => facts(feed, vllm),
    }
}

fn clients() -> &'static (SglangClient, VllmClient) {
    static CLIENTS: OnceLock<(SglangClient, VllmClient)> = OnceLock::new();
    CLIENTS.get_or_init(|| (SglangClient::default(), VllmClient::default()))
}

/// What a valid request asks of each engine is JSON, or it is refused before it is
/// sent.
pub(crate) fn asked(params: &SampleParams) {
    let request = EngineRequest {
        prompt: params.prompt.clone(),
        max_tokens: params.sampling.max_tokens.unwrap_or(16),
        sampling: SamplingRef {
            shared: Arc::clone(&params.sampling),
            seed: params.sampling.seed,
            min_tokens: params.sampling.min_tokens.unwrap_or(0),
        },
        logprobs: params.logprobs,
        adapter: params.adapter.clone(),
        routed_experts: params.routed_experts,
        ..request(&mut Feed(&[]), false)
    };
    let (sglang, vllm) = clients();
    for ask in [sglang.ask(&request), vllm.ask(&request)] {
        match ask {
            Ok(ask) => {
                let body: serde_json::Value = serde_json::from_slice(&ask.body).expect("JSON");
                assert!(body.is_object());
            }
            Err(error) => assert!(matches!(error, EngineError::Rejected(_)), "{error:?}"),
        }
    }
}

fn request(feed: &mut Feed<'_>, plain: bool) -> EngineRequest {
    let (flags, prompt, max_tokens) = (feed.byte(), feed.byte(), feed.byte());
    EngineRequest {
        url: "http://e:1".into(),
        id: serde_json::from_value(ID.into()).unwrap_or_else(|_| EngineRequestId::mint()),
        rank: 0,
        prompt: Prompt::Tokens((1..=u32::from(prompt % 32) + 1).collect()),
        max_tokens: u32::from(max_tokens) + 1,
        sampling: SamplingRef {
            shared: Arc::new(Sampling::default()),
            seed: None,
            min_tokens: 0,
        },
        logprobs: LogprobsWanted {
            output: flags & 1 > 0,
            top_k: if flags & 3 == 3 { 2 } else { 0 },
            prompt: flags & 4 > 0,
            prompt_top_k: if flags & 12 == 12 { 2 } else { 0 },
        },
        adapter: None,
        priority: None,
        routed_experts: flags & 16 > 0,
        stream: match (plain, flags & 32 > 0) {
            (true, _) => StreamMode::Plain,
            (false, true) => StreamMode::Incremental,
            (false, false) => StreamMode::Cumulative { interval: 8 },
        },
        traceparent: None,
    }
}

/// Numbers that are none are equal here.
type Told = Vec<Result<EngineEvent, EngineError>>;

fn answered<D: Dialect>(dialect: D, request: &EngineRequest, mut feed: Feed<'_>) {
    let transcript = || dialect.transcript(request);
    if request.stream == StreamMode::Plain {
        match attempt::whole(feed.0, &mut transcript()) {
            Ok(events) => checked(&events.into_iter().map(Ok).collect(), request),
            Err(error) => short(&error),
        }
        return;
    }
    let (cut, body) = (feed.byte(), feed.0);
    let limit = if cut & 1 == 0 { LIMIT } else { 64 };
    let at_once = streamed(transcript(), limit, body, body.len().max(1));
    for pieces in [1, usize::from(cut >> 1) + 1] {
        let in_pieces = streamed(transcript(), limit, body, pieces);
        assert_eq!(format!("{at_once:?}"), format!("{in_pieces:?}"));
    }
    checked(&at_once, request);
}

/// What a stream says that comes in pieces of so many bytes.
fn streamed<T: Transcript>(transcript: T, limit: usize, body: &[u8], pieces: usize) -> Told {
    let mut frames = Frames::new(transcript, limit);
    let mut told = Told::new();
    let mut pieces = body.chunks(pieces);
    loop {
        match frames.next() {
            Ok(Next::Tokens(chunk)) => told.push(Ok(EngineEvent::Tokens(chunk))),
            Ok(Next::Starved) => match pieces.next() {
                Some(piece) => frames.push(piece),
                None => {
                    told.push(Err(frames.cut()));
                    return told;
                }
            },
            Ok(Next::End) => {
                told.push(frames.end().map(EngineEvent::Finished));
                return told;
            }
            Err(error) => {
                told.push(Err(error));
                return told;
            }
        }
    }
}

/// A reply that is believed agrees with itself and with what was asked.
fn checked(told: &Told, request: &EngineRequest) {
    let mut tokens = 0;
    for event in told {
        match event {
            Ok(EngineEvent::Tokens(chunk)) => {
                let new = chunk.tokens.len();
                tokens += new;
                assert!(tokens <= request.max_tokens as usize);
                assert!(chunk.logprobs.as_ref().is_none_or(|l| l.len() == new));
                assert!(chunk.logprobs.is_some() || !request.logprobs.output || new == 0);
                let top = chunk.top_logprobs.as_ref();
                assert!(top.is_none_or(|top| {
                    let all = new * top.stride as usize;
                    top.token_ids.len() == all && top.logprobs.len() == all
                }));
            }
            Ok(EngineEvent::Finished(finish)) => finished(finish, tokens, request),
            Err(error) => short(error),
        }
    }
}

fn finished(finish: &Finish, tokens: usize, request: &EngineRequest) {
    let usage = finish.usage;
    assert_eq!(usage.completion_tokens as usize, tokens);
    assert_eq!(
        Some(usage.prompt_tokens as usize),
        request.prompt.token_count()
    );
    assert!(usage.cached_tokens <= usage.prompt_tokens);
    let mut at = 0;
    for span in &finish.weight_spans {
        assert!(span.start == at && span.end >= span.start);
        at = span.end;
    }
    // An abort may name no weights for what was never made.
    let aborted = matches!(finish.reason, FinishReason::Aborted { .. });
    assert!(at as usize == tokens || (aborted && finish.weight_spans.is_empty()));
    if let Some(prompt) = &finish.prompt_logprobs {
        assert_eq!(Some(prompt.logprobs.len()), request.prompt.token_count());
    }
    if let FinishReason::Aborted { message } = &finish.reason {
        assert!(message.len() <= MAX_TOLD);
    }
}

/// An error is no way for an engine's text.
fn short(error: &EngineError) {
    assert!(error.to_string().len() <= MAX_TOLD, "{error}");
}

fn refused(mut feed: Feed<'_>) {
    let status = 300 + u16::from(feed.byte()) + u16::from(feed.byte());
    let status = StatusCode::from_u16(status).expect("a status");
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(feed.piece()) {
        headers.insert(header::RETRY_AFTER, value);
    }
    let (sglang, vllm) = clients();
    for error in [
        sglang.refused(status, &headers, feed.0),
        vllm.refused(status, &headers, feed.0),
    ] {
        short(&error);
        if let EngineError::Busy { retry_after, .. } = error {
            assert!(retry_after.is_none_or(|wait| wait.as_secs() <= 60));
        }
    }
}

/// What an engine says of itself is read or refused.
fn facts(mut feed: Feed<'_>, vllm: bool) {
    let bodies: [&[u8]; 5] = std::array::from_fn(|_| feed.piece());
    let [first, second, models, loads, more] = bodies;
    let read = if vllm {
        let servers = [vllm::facts::Bodies {
            pending: false,
            endpoint: None,
            version: first,
            models,
            metrics: loads,
            server_info: Some(second).filter(|body| !body.is_empty()),
            weight_info: Some(more).filter(|body| !body.is_empty()),
        }];
        let _ = vllm::facts::is_paused(first);
        let _ = vllm::facts::weight_version(more);
        let read = vllm::facts::facts(&servers, None);
        if let (Ok(metrics), Ok(facts)) = (vllm::metrics::parse(loads), &read) {
            assert!(vllm::facts::loads(&metrics, &facts.ranks).len() == facts.ranks.len());
        }
        read
    } else {
        let _ = sglang::facts::parse_weight_version(second);
        let _ = sglang::facts::parse_adapters(models);
        if let Ok(loads) = sglang::facts::parse_loads(loads) {
            assert!(loads.len() <= sglang::facts::MAX_RANKS);
        }
        let bodies = sglang::facts::Bodies {
            server_info: first,
            model_info: second,
            models,
            loads,
        };
        bodies.facts()
    };
    match read {
        Ok(facts) => assert!((1..=sglang::facts::MAX_RANKS).contains(&facts.ranks.len())),
        Err(error) => assert!(error.to_string().len() <= MAX_TOLD),
    }
}
