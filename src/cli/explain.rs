//! `berth explain`: where a request would go now, and why no other rank gets it.

use serde_json::{Value, json};

use super::{
    operator::{self, Connection, Failure, table},
    replicas::percent,
};
use crate::{
    error::Reason,
    proto::{
        Candidate, ExplainRouteRequest, ExplainRouteResponse, Group, RoutingPolicy, SampleRequest,
        Sampling, TokenIds, WeightsConstraint, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient, weights_constraint::Constraint,
    },
};

/// The most tokens that a prompt may be said to have.
const MOST_TOKENS: u32 = 1 << 20;

/// The candidates of a large fleet are more than what clients decode by default.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The trajectory's cache_affinity_key. None: a request without one.
    key: Option<String>,
    /// Its model; may be left out where one is served.
    #[arg(long)]
    model: Option<String>,
    /// A LoRA adapter.
    #[arg(long)]
    adapter: Option<String>,
    /// Tokens of its prompt.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_TOKENS)))]
    prompt_tokens: u32,
    /// Tokens to generate.
    #[arg(long, default_value_t = 1)]
    max_tokens: u32,
    /// Completions of the prompt.
    #[arg(long, default_value_t = 1)]
    num_samples: u32,
    /// The group that shares the prompt.
    #[arg(long)]
    group: Option<String>,
    /// All of the group on one rank.
    #[arg(long, requires = "group")]
    share: bool,
    /// Weights of exactly this version.
    #[arg(long)]
    weights: Option<String>,
    /// Weights of at least this version.
    #[arg(long, value_name = "N", conflicts_with = "weights")]
    weights_at_least: Option<u64>,
    /// Another policy than that of the server.
    #[arg(long, value_enum)]
    policy: Option<Policy>,
    /// One JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Policy {
    Affinity,
    Random,
    RoundRobin,
    LeastLoaded,
    Prefix,
}

impl From<Policy> for RoutingPolicy {
    fn from(policy: Policy) -> Self {
        match policy {
            Policy::Affinity => Self::Affinity,
            Policy::Random => Self::Random,
            Policy::RoundRobin => Self::RoundRobin,
            Policy::LeastLoaded => Self::LeastLoaded,
            Policy::Prefix => Self::Prefix,
        }
    }
}

/// Runs it.
///
/// # Errors
/// Failures with their exit codes, and what is wrong with standard output. That no
/// rank takes the request now is one, after what each rank says.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let operator = args.connection.clone().open()?;
    let mut client = SamplingServiceClient::new(operator.channel.clone())
        .max_decoding_message_size(MAX_RESPONSE_BYTES);
    let request = ExplainRouteRequest {
        request: Some(request(&args)),
    };
    let answer = operator.call(client.explain_route(request)).await?;
    if args.json {
        operator::print_json(&value(&answer), false)?;
    } else {
        super::print(&page(&answer))?;
    }
    if answer.route.is_none() {
        // As `Sample` would answer: what the fleet lacks does not come by waiting.
        let mut known = Reason::ALL.iter();
        let reason = known.find(|reason| reason.name() == answer.no_route_reason);
        let exit = reason.map_or(Failure::UNAVAILABLE, |r| Failure::exit(r.code()));
        return Err(Failure::new(exit, answer.no_route).into());
    }
    Ok(())
}

fn request(args: &Args) -> SampleRequest {
    SampleRequest {
        cache_affinity_key: args.key.clone(),
        model: args.model.clone(),
        adapter: args.adapter.clone(),
        // Which tokens they are decides nothing but the `prefix` policy.
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: vec![0; args.prompt_tokens as usize],
        })),
        sampling: Some(Sampling {
            max_tokens: Some(args.max_tokens),
            ..Sampling::default()
        }),
        num_samples: Some(args.num_samples),
        group: args.group.clone().map(|key| Group {
            key,
            share: args.share,
        }),
        weights: weights(args).map(|constraint| WeightsConstraint {
            constraint: Some(constraint),
            wait: false,
        }),
        routing_policy: args
            .policy
            .map_or(RoutingPolicy::Unspecified, RoutingPolicy::from)
            .into(),
        ..SampleRequest::default()
    }
}

fn weights(args: &Args) -> Option<Constraint> {
    let exact = args.weights.clone().map(Constraint::Exact);
    exact.or(args.weights_at_least.map(Constraint::AtLeast))
}

fn reason(answer: &ExplainRouteResponse) -> Option<String> {
    let route = answer.route.as_ref()?;
    let name = route.reason().as_str_name();
    Some(name.trim_start_matches("ROUTE_REASON_").to_owned())
}

fn page(answer: &ExplainRouteResponse) -> String {
    let mut text = match &answer.route {
        Some(route) => format!(
            "{}/{} (start {}): {}, {} cached tokens expected\n\n",
            route.replica_id,
            route.rank,
            route.incarnation,
            reason(answer).unwrap_or_default(),
            route.expected_cached_tokens,
        ),
        None => "nowhere\n\n".to_owned(),
    };
    let head = ["", "RANK", "PINS", "IN-FLIGHT", "LOAD", "KV", "WHY"];
    let rows: Vec<Vec<String>> = answer.candidates.iter().map(row).collect();
    text.push_str(&table::render(&head, &rows));
    text
}

fn row(candidate: &Candidate) -> Vec<String> {
    let mark = match (candidate.chosen, candidate.eligible) {
        (true, _) => ">",
        (false, true) => "",
        (false, false) => "x",
    };
    vec![
        mark.to_owned(),
        format!("{}/{}", candidate.replica_id, candidate.rank),
        candidate.live_pins.to_string(),
        candidate.in_flight.to_string(),
        // In pins and samples on a million tokens of KV.
        format!("{:.1}", candidate.load * 1e6),
        percent(candidate.kv_live_tokens, candidate.kv_capacity_tokens),
        candidate.why.clone(),
    ]
}

fn value(answer: &ExplainRouteResponse) -> Value {
    let route = answer.route.as_ref().map(|route| {
        json!({
            "replica_id": route.replica_id,
            "incarnation": route.incarnation,
            "rank": route.rank,
            "reason": reason(answer).unwrap_or_default().to_lowercase(),
            "expected_cached_tokens": route.expected_cached_tokens,
        })
    });
    let candidates = answer.candidates.iter().map(|c| {
        json!({
            "replica_id": c.replica_id,
            "incarnation": c.incarnation,
            "rank": c.rank,
            "chosen": c.chosen,
            "eligible": c.eligible,
            "why": c.why,
            "live_pins": c.live_pins,
            "in_flight": c.in_flight,
            "load": c.load,
            "kv_live_tokens": c.kv_live_tokens,
            "kv_capacity_tokens": c.kv_capacity_tokens,
        })
    });
    json!({
        "route": route,
        "no_route": answer.no_route,
        "no_route_reason": answer.no_route_reason,
        "candidates": candidates.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Route, RouteReason};

    #[test]
    fn the_chosen_and_those_that_cannot_are_marked() {
        let candidate = |rank, chosen, eligible, why: &str| Candidate {
            replica_id: "a".to_owned(),
            rank,
            chosen,
            eligible,
            why: why.to_owned(),
            kv_live_tokens: 500,
            kv_capacity_tokens: 1000,
            load: 2e-6,
            ..Candidate::default()
        };
        let answer = ExplainRouteResponse {
            route: Some(Route {
                replica_id: "a".to_owned(),
                incarnation: 3,
                rank: 1,
                reason: RouteReason::NewKey.into(),
                ..Route::default()
            }),
            candidates: vec![
                candidate(0, false, false, "it\u{1b}drains"),
                candidate(1, true, true, "least loaded"),
                candidate(2, false, true, "busier"),
            ],
            ..ExplainRouteResponse::default()
        };
        let text = page(&answer);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "a/1 (start 3): NEW_KEY, 0 cached tokens expected");
        assert!(lines[3].starts_with("x  a/0"), "{text}");
        assert!(lines[3].ends_with("50%  it\u{fffd}drains"), "{text}");
        assert!(
            lines[4].starts_with(">  a/1") && lines[4].contains("2.0"),
            "{text}"
        );
        assert!(lines[5].starts_with("   a/2"), "{text}");
        assert_eq!(value(&answer)["route"]["reason"], "new_key");
    }
}
