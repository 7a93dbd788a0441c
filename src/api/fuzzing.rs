//! Messages and URLs of strangers. See `crate::fuzzing`.

#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a panic is how a fuzzer learns of a fault"
)]

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use prost::{Message, encoding as wire};

use super::{
    read::{self, Context},
    register::{self, Rules},
};
use crate::{
    auth::Caller,
    call::{Prompt, SampleCall, SampleParams},
    engine::{
        self,
        egress::{self, Egress},
    },
    error::{Error, Reason},
    fleet::facts::ReplicaFacts,
    fuzzing::Feed,
    proto,
    stack::{fingerprint, validate::ValidCall},
    store,
};

/// Nobody's list of headers is smaller, in bytes.
const HEADERS: usize = 8 << 10;

/// A message of a client or a sidecar, as bytes.
pub fn messages(data: &[u8]) {
    let mut feed = Feed(data);
    match feed.byte() % 3 {
        0 => sample(feed.0),
        1 => {
            let rules = Rules {
                allow_unknown_vocabulary: feed.byte().is_multiple_of(2),
            };
            let caller = SocketAddr::from(([10, 0, 0, 1], 4000));
            let caller = feed.byte().is_multiple_of(2).then_some(caller);
            if let Ok(message) = proto::RegisterReplicaRequest::decode(feed.0) {
                match register::facts(message, caller, &rules) {
                    Ok(facts) => registered(&facts),
                    Err(error) => refused(error),
                }
            }
        }
        _ => {
            if let Ok(message) = proto::HeartbeatRequest::decode(feed.0) {
                beat(message);
            }
        }
    }
}

/// A refusal says what is wrong, and fits the headers that it goes in.
fn refused(error: Error) {
    assert_eq!(error.reason, Reason::InvalidRequest);
    assert!(!error.violations.is_empty());
    let status = tonic::Status::from(error);
    let bytes = status.message().len() + status.details().len() * 4 / 3;
    assert!(bytes < HEADERS, "{bytes} bytes of a refusal");
}

fn call(message: proto::SampleRequest) -> SampleCall {
    let context = Context {
        caller: Caller::of(&tonic::Request::new(())),
        request_id: "r".into(),
        deadline: None,
    };
    read::call(message, context)
}

fn sample(bytes: &[u8]) {
    let Ok(message) = proto::SampleRequest::decode(Bytes::copy_from_slice(bytes)) else {
        return;
    };
    let call_of = |bytes: &[u8]| {
        let message = proto::SampleRequest::decode(Bytes::copy_from_slice(bytes));
        call(message.expect("the same fields in another order"))
    };
    // What means the same has the same fingerprint, however it is written.
    let canonical = message.encode_to_vec();
    let asked = call(message);
    let mark = fingerprint::of(&asked.params);
    assert_eq!(mark, fingerprint::of(&call_of(&canonical).params));
    let backwards = backwards(&canonical);
    assert_eq!(mark, fingerprint::of(&call_of(&backwards).params));
    let other = |change: &dyn Fn(&mut SampleParams)| {
        let mut params = (*asked.params).clone();
        change(&mut params);
        fingerprint::of(&params)
    };
    let packed = |p: &mut SampleParams| p.packed_output = !p.packed_output;
    assert_ne!(mark, other(&packed));
    assert_ne!(
        mark,
        other(&|p| p.num_samples = p.num_samples.wrapping_add(1))
    );
    assert_ne!(mark, other(&longer));

    let params = Arc::clone(&asked.params);
    match ValidCall::check(asked) {
        Ok(valid) => {
            assert!(valid.call().malformed.is_empty());
            in_range(&params);
            engine::fuzzing::asked(&params);
        }
        Err(error) => refused(error),
    }
}

/// With one more token or letter.
fn longer(params: &mut SampleParams) {
    params.prompt = match &params.prompt {
        Prompt::Tokens(ids) => Prompt::Tokens(ids.iter().copied().chain([0]).collect()),
        Prompt::Text(text) => Prompt::Text(format!("{text}\0").into()),
    };
}

/// The fields of a message in the opposite order; those of one number keep theirs.
fn backwards(message: &[u8]) -> Vec<u8> {
    let mut left = message;
    let mut fields: Vec<(u32, &[u8])> = Vec::new();
    while !left.is_empty() {
        let all = left;
        let (number, kind) = wire::decode_key(&mut left).expect("a field");
        wire::skip_field(kind, number, &mut left, wire::DecodeContext::default()).expect("a value");
        fields.push((number, &all[..all.len() - left.len()]));
    }
    fields.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    fields.into_iter().flat_map(|(_, f)| f).copied().collect()
}

/// What an engine may rely on, said once more without the words of `validate`.
fn in_range(params: &SampleParams) {
    let sampling = &params.sampling;
    assert!((1..=128).contains(&params.num_samples));
    assert_ne!(params.prompt.token_count(), Some(0));
    assert!(
        sampling
            .max_tokens
            .is_none_or(|n| (1..=1 << 20).contains(&n))
    );
    assert!(sampling.min_tokens.unwrap_or(0) <= sampling.max_tokens.unwrap_or(1 << 20));
    let floats = [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty,
    ];
    let floats = floats.into_iter().flatten();
    for number in floats.chain(sampling.logit_bias.values().copied()) {
        assert!(number.is_finite() && number.abs() <= 100.0, "{number}");
    }
    assert!(sampling.top_p.is_none_or(|p| p > 0.0 && p <= 1.0));
    assert!(sampling.repetition_penalty.is_none_or(|p| p > 0.0));
    assert!(sampling.stop.iter().flatten().all(|stop| !stop.is_empty()));
    assert!(sampling.logit_bias.len() <= 1024);
    assert!(params.logprobs.top_k <= 20 && params.logprobs.prompt_top_k <= 20);
}

fn registered(facts: &ReplicaFacts) {
    called(&facts.url);
    let numbers: Vec<u32> = facts.ranks.iter().map(|rank| rank.rank).collect();
    assert!((1..=1024).contains(&numbers.len()) && numbers.is_sorted_by(|a, b| a < b));
    for rank in &facts.ranks {
        called(&rank.url);
        assert!((1..=1 << 40).contains(&rank.kv_capacity));
        assert!(u64::from(facts.page_size) <= rank.kv_capacity && facts.page_size > 0);
    }
    assert!(facts.context_length >= 2);
    assert!(facts.adapters.is_sorted_by(|a, b| a.name < b.name));
    // What is shown stays on its line.
    let adapters = facts.adapters.iter();
    let shown = [
        facts.id.as_str(),
        facts.boot.as_str(),
        &facts.engine_version,
        &facts.model,
        &facts.weight_version,
        &facts.accelerator.name,
    ];
    let shown = shown
        .into_iter()
        .chain(facts.labels.iter().flat_map(|(k, v)| [&**k, &**v]))
        .chain(adapters.flat_map(|a| [&*a.name, &*a.load_id]))
        .chain(
            facts
                .ranks
                .iter()
                .flat_map(|r| r.gpu_uuids.iter().map(|u| &**u)),
        );
    for text in shown {
        assert!(
            text.len() <= 1024 && !text.chars().any(char::is_control),
            "{text:?}"
        );
    }
    store::sled::fuzzing::comes_back(facts);
}

fn beat(message: proto::HeartbeatRequest) {
    let told = message.clone();
    match register::beat(message) {
        Ok(beat) => {
            assert!(proto::ReplicaState::try_from(told.state).is_ok());
            let grace = beat.drain_grace;
            assert!(grace.is_none_or(|grace| grace.as_secs() <= 24 * 3600));
            let ranks: BTreeSet<u32> = beat.ranks.iter().map(|report| report.rank).collect();
            assert!(ranks.len() <= 1024 && ranks.len() == told.ranks.len());
            let adapters = beat.adapters.unwrap_or_default();
            assert!(adapters.is_sorted_by(|a, b| a.name < b.name));
        }
        Err(error) => refused(error),
    }
}

/// An endpoint that a replica gives.
pub fn addresses(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(url) = register::base_url(text)
    {
        called(&url);
        // And nothing of what was asked for is dropped.
        called(text);
    }
}

/// A URL that Berth will call means to others what it means to Berth: the host that
/// was checked is the one that another reader of URLs would go to.
fn called(url: &str) {
    let uri: http::Uri = url.parse().expect("a URL");
    let host = uri.host().expect("a host");
    let read = match url::Url::parse(url) {
        Ok(read) => read,
        // It goes nowhere with a name that begins with xn-- and is no such name.
        Err(url::ParseError::IdnaError) if host.to_ascii_lowercase().contains("xn--") => return,
        Err(why) => panic!("{url}: {why}"),
    };
    assert_eq!(read.scheme(), "http");
    assert!(
        read.username().is_empty() && read.password().is_none(),
        "{url}"
    );
    assert_eq!(
        (read.path(), read.query(), read.fragment()),
        ("/", None, None)
    );
    let port = uri.port_u16().unwrap_or(80);
    assert_eq!(read.port_or_known_default(), Some(port), "{url}");
    let ip: IpAddr = match read.host() {
        Some(url::Host::Domain(name)) => {
            assert_eq!(egress::literal(host), None, "{url}");
            assert!(name.eq_ignore_ascii_case(host), "{url} is of {name}");
            return;
        }
        Some(url::Host::Ipv4(ip)) => ip.into(),
        Some(url::Host::Ipv6(ip)) => ip.into(),
        None => panic!("{url} has no host"),
    };
    assert_eq!(egress::literal(host), Some(ip), "{url}");
    let closed = Egress {
        loopback: false,
        ..Egress::default()
    };
    if closed.check(SocketAddr::new(ip, port)).is_ok() {
        let inner = match ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(ip) => ip.to_ipv4(),
        };
        assert!(
            !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast(),
            "{url}"
        );
        assert!(
            inner.is_none_or(|v4| !v4.is_loopback() && !v4.is_link_local() && !v4.is_broadcast()),
            "{url}"
        );
    }
}
