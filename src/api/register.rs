//! A registration becomes facts, or every fault that it has. A replica's word is
//! a stranger's word: everything is bounded and checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU32,
    sync::Arc,
    time::Duration,
};

use futures_util::{StreamExt, stream};

use crate::{
    call::LogprobMode,
    engine::egress::Egress,
    error::{Error, Reason, Violation},
    fleet::facts::{
        Accelerator, AdapterFacts, Capabilities, EngineKind, RankFacts, RankReport, ReplicaFacts,
        ReportedState,
    },
    ids::{BootId, ReplicaId},
    proto,
};

const MAX_ID: usize = 128;
const MAX_NAME: usize = 256;
const MAX_RANKS: usize = 1024;
const MAX_ADAPTERS: usize = 1024;
const MAX_LABELS: usize = 32;
const MAX_GPUS: usize = 64;

/// What a server allows.
pub(super) struct Rules {
    pub(super) allow_unknown_vocabulary: bool,
}

#[derive(Default)]
struct Faults(Vec<Violation>);

impl Faults {
    fn add(&mut self, field: impl Into<std::borrow::Cow<'static, str>>, what: impl Into<String>) {
        self.0.push(Violation::new(field, what));
    }

    fn check(&mut self, ok: bool, field: &'static str, what: &str) {
        if !ok {
            self.add(field, what);
        }
    }
}

pub(super) const ID_RULE: &str = "must have 1 to 128 characters of [A-Za-z0-9._:-]";

pub(super) fn is_id(text: &str) -> bool {
    (1..=MAX_ID).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._:-".contains(&b))
}

pub(super) fn is_id_or_empty(text: &str) -> bool {
    text.is_empty() || is_id(text)
}

/// A name that requests use: as in `SampleRequest`.
fn is_name(text: &str) -> bool {
    !text.trim().is_empty() && text.chars().count() <= MAX_NAME && is_plain(text)
}

/// What is shown in logs and lists stays on its line.
fn is_plain(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

pub(super) fn facts(
    message: proto::RegisterReplicaRequest,
    caller: Option<SocketAddr>,
    rules: &Rules,
) -> Result<ReplicaFacts, Error> {
    let mut faults = Faults::default();
    faults.check(is_id(&message.replica_id), "replica_id", ID_RULE);
    faults.check(
        (1..=MAX_ID).contains(&message.boot_id.len())
            && message.boot_id.bytes().all(|b| b.is_ascii_graphic()),
        "boot_id",
        "must have 1 to 128 printable ASCII characters",
    );
    faults.check(
        message.engine_start.len() <= MAX_ID
            && message.engine_start.bytes().all(|b| b.is_ascii_graphic()),
        "engine_start",
        "may have 128 printable ASCII characters at most",
    );
    let url = address(&message, caller, &mut faults);
    let engine = match message.engine() {
        proto::EngineKind::Sglang => Some(EngineKind::Sglang),
        proto::EngineKind::Vllm => Some(EngineKind::Vllm),
        proto::EngineKind::Unspecified => None,
    };
    faults.check(engine.is_some(), "engine", "must be SGLANG or VLLM");
    faults.check(
        message.engine_version.len() <= 64 && is_plain(&message.engine_version),
        "engine_version",
        "may have 64 bytes at most and hold no control character",
    );
    faults.check(
        is_name(&message.model),
        "model",
        "must have 1 to 256 characters, not be blank and hold no control character",
    );
    let vocab_size = NonZeroU32::new(message.vocab_size);
    faults.check(
        vocab_size.is_some() || rules.allow_unknown_vocabulary,
        "vocab_size",
        "is unknown (0): one token id beyond it ends an engine, so it must be given (the \
         sidecar's --vocab-size), unless the server runs with allow-unknown-vocabulary",
    );
    faults.check(
        message.context_length >= 2,
        "context_length",
        "must be at least 2 tokens",
    );
    faults.check(
        message.weight_version.len() <= MAX_NAME && is_plain(&message.weight_version),
        "weight_version",
        "may have 256 bytes at most and hold no control character",
    );
    check_adapters(&message.adapters, &mut faults);
    faults.check(message.page_size >= 1, "page_size", "must be at least 1");
    labels(&message, &mut faults);
    let accelerator = message.accelerator.clone().unwrap_or_default();
    faults.check(
        accelerator.name.len() <= MAX_NAME && is_plain(&accelerator.name),
        "accelerator.name",
        "may have 256 bytes at most and hold no control character",
    );
    faults.check(
        message
            .ranks
            .iter()
            .all(|r| u64::from(message.page_size) <= r.kv_capacity_tokens.max(1)),
        "page_size",
        "may not be larger than a rank's KV cache",
    );
    let ranks = ranks(&message.ranks, url.as_ref(), &mut faults);

    match (url, engine) {
        (Some(url), Some(engine)) if faults.0.is_empty() => Ok(ReplicaFacts {
            id: ReplicaId::new(message.replica_id),
            boot: BootId::new(message.boot_id),
            url,
            engine,
            engine_version: message.engine_version,
            model: message.model.into(),
            vocab_size,
            context_length: message.context_length,
            weight_version: message.weight_version.into(),
            adapters: sorted(message.adapters),
            capabilities: capabilities(message.capabilities.unwrap_or_default()),
            accelerator: Accelerator {
                name: accelerator.name,
                memory_bytes: accelerator.memory_bytes,
                count: accelerator.count,
            },
            ranks,
            page_size: message.page_size,
            logprob_mode: match proto::LogprobMode::try_from(message.logprob_mode) {
                Ok(proto::LogprobMode::Processed) => LogprobMode::Processed,
                Ok(proto::LogprobMode::Raw) => LogprobMode::Raw,
                Ok(proto::LogprobMode::Unspecified) | Err(_) => LogprobMode::Unknown,
            },
            labels: message.labels.into_iter().collect(),
            engine_start: Some(message.engine_start).filter(|start| !start.is_empty()),
        }),
        _ => Err(Error::invalid(Reason::InvalidRequest, faults.0)),
    }
}

/// Names are looked up, of one registration so many at once, for so long.
const LOOKUPS: usize = 16;
const LOOKUP_LIMIT: Duration = Duration::from_secs(2);

/// Whether Berth may call every address that the replica gives. Nothing is
/// called.
///
/// # Errors
/// Each that it may not.
pub(super) async fn reachable(facts: &ReplicaFacts, egress: &Egress) -> Result<(), Error> {
    let mut urls: BTreeMap<Arc<str>, String> = BTreeMap::new();
    for (i, rank) in facts.ranks.iter().enumerate().rev() {
        urls.insert(Arc::clone(&rank.url), format!("ranks[{i}].endpoint"));
    }
    urls.insert(Arc::clone(&facts.url), "endpoint".to_owned());
    let checks = urls.into_iter().map(|(url, field)| async move {
        let checked = egress.check_url(&url, LOOKUP_LIMIT).await;
        checked.err().map(|why| (field, why))
    });
    let mut faults = Faults::default();
    let mut refused = stream::iter(checks).buffered(LOOKUPS);
    while let Some(refusal) = refused.next().await {
        if let Some((field, why)) = refusal {
            faults.add(field, format!("may not be called: {why}"));
        }
    }
    if faults.0.is_empty() {
        Ok(())
    } else {
        Err(Error::invalid(Reason::InvalidRequest, faults.0))
    }
}

fn address(
    message: &proto::RegisterReplicaRequest,
    caller: Option<SocketAddr>,
    faults: &mut Faults,
) -> Option<Arc<str>> {
    use proto::register_replica_request::Address;
    match &message.address {
        Some(Address::Endpoint(endpoint)) => match base_url(endpoint) {
            Ok(url) => Some(url),
            Err(what) => {
                faults.add("endpoint", what);
                None
            }
        },
        Some(Address::Port(port)) => match (u16::try_from(*port), caller) {
            (Ok(port @ 1..), Some(caller)) => Some(match caller.ip().to_canonical() {
                IpAddr::V4(ip) => format!("http://{ip}:{port}").into(),
                IpAddr::V6(ip) => format!("http://[{ip}]:{port}").into(),
            }),
            (Ok(1..), None) => {
                faults.add(
                    "port",
                    "the caller's address is not known: give an endpoint",
                );
                None
            }
            _ => {
                faults.add("port", "must be from 1 to 65535");
                None
            }
        },
        None => {
            faults.add("endpoint", "is missing: give endpoint or port");
            None
        }
    }
}

/// An absolute http URL of host and port, without anything else.
pub(super) fn base_url(text: &str) -> Result<Arc<str>, &'static str> {
    const FORM: &str =
        "must be an absolute URL as \"http://host:port\", without user, path, query or fragment";
    if text.len() > 512 {
        return Err("may have 512 bytes at most");
    }
    let uri: http::Uri = text.parse().map_err(|_| FORM)?;
    let authority = uri.authority().ok_or(FORM)?;
    const HOST: &str = "its host must be a name, or an address written as 10.0.0.1 or [fd00::1]";
    if uri.scheme_str() != Some("http")
        || !matches!(uri.path(), "" | "/")
        || uri.query().is_some()
        || authority.as_str().contains('@')
        || authority.host().is_empty()
        || !is_port(authority.as_str().strip_prefix(authority.host()))
        || authority.as_str().contains('%')
    {
        return Err(FORM);
    }
    if !is_host(authority.host()) {
        return Err(HOST);
    }
    let url = format!("http://{authority}");
    // The parser drops some parts without a word, as what follows a `#`.
    if !text
        .strip_suffix('/')
        .unwrap_or(text)
        .eq_ignore_ascii_case(&url)
    {
        return Err(FORM);
    }
    Ok(url.into())
}

/// Whether what follows a host is nothing, or a port that there is: `:+80` is one to some
/// readers only.
fn is_port(behind: Option<&str>) -> bool {
    let Some(digits) = behind.and_then(|behind| behind.strip_prefix(':')) else {
        return behind == Some("");
    };
    digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Whether everybody who reads this host means the same by it. `127.1`, `0x7f000001` and
/// `127.0.0.1.` are numbers to some and names to others.
fn is_host(host: &str) -> bool {
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']');
        return inner.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    }
    if host.parse::<Ipv4Addr>().is_ok() {
        return true;
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let last = name.rsplit('.').next().unwrap_or(name);
    let number = last.bytes().all(|b| b.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .or_else(|| last.strip_prefix("0X"))
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    name.len() <= 253 && name.split('.').all(label) && !number
}

fn labels(message: &proto::RegisterReplicaRequest, faults: &mut Faults) {
    faults.check(
        message.labels.len() <= MAX_LABELS,
        "labels",
        "may hold 32 at most",
    );
    faults.check(
        message
            .labels
            .iter()
            .all(|(k, v)| (1..=63).contains(&k.len()) && v.len() <= 255),
        "labels",
        "each key must have 1 to 63 bytes, each value 255 at most",
    );
    faults.check(
        message
            .labels
            .iter()
            .all(|(k, v)| is_plain(k) && is_plain(v)),
        "labels",
        "may hold no control character",
    );
}

fn ranks(ranks: &[proto::Rank], url: Option<&Arc<str>>, faults: &mut Faults) -> Vec<RankFacts> {
    faults.check(
        (1..=MAX_RANKS).contains(&ranks.len()),
        "ranks",
        "must list 1 to 1,024",
    );
    let numbers: BTreeSet<u32> = ranks.iter().map(|r| r.rank).collect();
    faults.check(numbers.len() == ranks.len(), "ranks", "two have one number");
    let at: BTreeSet<_> = ranks
        .iter()
        .map(|r| (&r.endpoint, r.engine_rank.unwrap_or(r.rank)))
        .collect();
    faults.check(
        at.len() == ranks.len(),
        "ranks",
        "two have one engine_rank at one endpoint",
    );
    let mut facts: Vec<RankFacts> = ranks
        .iter()
        .take(MAX_RANKS)
        .enumerate()
        .filter_map(|(i, rank)| {
            if rank.kv_capacity_tokens == 0 || rank.kv_capacity_tokens > 1 << 40 {
                faults.add(
                    format!("ranks[{i}].kv_capacity_tokens"),
                    "must be at least 1 and at most 2^40",
                );
            }
            if rank.gpu_uuids.len() > MAX_GPUS
                || rank.gpu_uuids.iter().any(|u| u.len() > 128 || !is_plain(u))
            {
                faults.add(
                    format!("ranks[{i}].gpu_uuids"),
                    "may list 64 at most, each of 128 bytes at most and without control character",
                );
            }
            let own = match rank.endpoint.as_deref().map(base_url) {
                Some(Err(what)) => {
                    faults.add(format!("ranks[{i}].endpoint"), what);
                    None
                }
                Some(Ok(own)) => Some(own),
                None => url.cloned(),
            };
            own.map(|url| RankFacts {
                rank: rank.rank,
                url,
                engine_rank: rank.engine_rank.unwrap_or(rank.rank),
                gpu_uuids: rank.gpu_uuids.clone(),
                kv_capacity: rank.kv_capacity_tokens,
                max_running: rank.max_running_requests,
            })
        })
        .collect();
    facts.sort_by_key(|r| r.rank);
    facts
}

fn check_adapters(adapters: &[proto::Adapter], faults: &mut Faults) {
    faults.check(
        adapters.len() <= MAX_ADAPTERS,
        "adapters",
        "may list 1,024 at most",
    );
    faults.check(
        adapters
            .iter()
            .all(|a| is_name(&a.name) && a.load_id.len() <= MAX_NAME && is_plain(&a.load_id)),
        "adapters",
        "each name must have 1 to 256 characters, each load_id 256 bytes at most, and none a \
         control character",
    );
    let names: BTreeSet<&str> = adapters.iter().map(|a| a.name.as_str()).collect();
    faults.check(
        names.len() == adapters.len(),
        "adapters",
        "two have one name",
    );
}

pub(super) fn adapters(list: proto::AdapterList) -> Result<Vec<AdapterFacts>, Error> {
    let mut faults = Faults::default();
    check_adapters(&list.adapters, &mut faults);
    if !faults.0.is_empty() {
        return Err(Error::invalid(Reason::InvalidRequest, faults.0));
    }
    Ok(sorted(list.adapters))
}

/// By name, so that the same ones in another order are no news.
fn sorted(adapters: Vec<proto::Adapter>) -> Vec<AdapterFacts> {
    let mut adapters: Vec<AdapterFacts> = adapters.into_iter().map(adapter).collect();
    adapters.sort_by(|a, b| a.name.cmp(&b.name));
    adapters
}

fn adapter(adapter: proto::Adapter) -> AdapterFacts {
    AdapterFacts {
        name: adapter.name.into(),
        load_id: adapter.load_id,
        resident: adapter.resident,
    }
}

fn capabilities(c: proto::Capabilities) -> Capabilities {
    Capabilities {
        tokenizer: c.tokenizer,
        output_logprobs: c.output_logprobs,
        prompt_logprobs: c.prompt_logprobs,
        seed: c.seed,
        routed_experts: c.routed_experts,
        structured_output: c.structured_output,
        priority: c.priority,
        incremental_streaming: c.incremental_streaming,
        max_top_logprobs: c.max_top_logprobs,
        more_follow: c.more_follow,
    }
}

pub(super) fn reported_state(state: proto::ReplicaState) -> ReportedState {
    match state {
        proto::ReplicaState::Draining => ReportedState::Draining,
        proto::ReplicaState::Unhealthy => ReportedState::Unhealthy,
        proto::ReplicaState::Ready | proto::ReplicaState::Unspecified => ReportedState::Ready,
    }
}

pub(super) fn reports(ranks: Vec<proto::RankStatus>) -> Result<Vec<RankReport>, Error> {
    let mut faults = Faults::default();
    faults.check(ranks.len() <= MAX_RANKS, "ranks", "may list 1,024 at most");
    faults.check(
        ranks
            .iter()
            .all(|r| r.weight_version.len() <= MAX_NAME && is_plain(&r.weight_version)),
        "ranks.weight_version",
        "may have 256 bytes at most and hold no control character",
    );
    if !faults.0.is_empty() {
        return Err(Error::invalid(Reason::InvalidRequest, faults.0));
    }
    Ok(ranks
        .into_iter()
        .map(|r| RankReport {
            rank: r.rank,
            healthy: r.healthy,
            running: r.running,
            waiting: r.waiting,
            waiting_uncached_tokens: r.waiting_uncached_tokens,
            kv_used_tokens: r.kv_used_tokens,
            weight_version: r.weight_version.into(),
            paused: r.paused,
        })
        .collect())
}

#[cfg(test)]
mod tests;
