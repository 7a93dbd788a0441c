use serde_json::{Value, json};

use super::*;

macro_rules! recorded {
    ($name:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/vllm/",
            $name
        ))
    };
}

fn bodies<'a>(metrics: &'a [u8], server_info: Option<&'a [u8]>) -> Bodies<'a> {
    Bodies {
        endpoint: None,
        version: recorded!("version.response.json"),
        models: recorded!("v1_models.response.json"),
        metrics,
        server_info,
        pending: false,
        weight_info: server_info.map(|_| &recorded!("weight_info.response.json")[..]),
    }
}

const ONE: &[u8] = recorded!("metrics.response.txt");
const TWO: &[u8] = recorded!("dp_metrics.response.txt");
const INFO: &[u8] = recorded!("server_info.response.json");

fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut info: Value = serde_json::from_slice(INFO).unwrap();
    change(&mut info["vllm_config"]);
    info.to_string().into_bytes()
}

#[test]
fn the_recorded_server_in_development_mode() {
    let facts = facts(&[bodies(ONE, Some(INFO))], None).unwrap();
    assert_eq!(
        (facts.version.as_str(), facts.model.as_str()),
        ("0.32.0", "tiny")
    );
    assert_eq!(facts.model_path.as_deref(), Some("MODEL_DIR"));
    assert_eq!((facts.context_length, facts.page_size), (16_384, 128));
    assert_eq!(facts.weight_version, "v1");
    assert_eq!(
        facts.ranks,
        [RankFact {
            rank: 0,
            engine_rank: 0,
            endpoint: None,
            kv_capacity_tokens: 262_144,
            max_running_requests: 8,
        }]
    );
    assert_eq!(facts.logprob_mode, LogprobMode::Raw);
    assert_eq!(facts.max_top_logprobs, 19);
    assert!(facts.logprobs && facts.deterministic && facts.incremental_streaming);
    assert!(!facts.tokenizer && !facts.structured_output && !facts.priority);
    assert!(!facts.routed_experts);
    assert_eq!(facts.start.as_deref(), Some("1795982364994859113"));
}

#[test]
fn a_server_of_two_ranks_that_tells_little_promises_little() {
    let told = facts(&[bodies(TWO, None)], Some(LogprobMode::Processed)).unwrap();
    assert_eq!(told.ranks.len(), 2);
    assert_eq!(
        (
            told.ranks[1].rank,
            told.ranks[1].engine_rank,
            told.ranks[1].kv_capacity_tokens
        ),
        (1, 1, 262_144)
    );
    assert_eq!(told.logprob_mode, LogprobMode::Processed);
    assert_eq!(
        (told.weight_version.as_str(), told.start.as_deref()),
        ("", None)
    );
    let unknown = facts(&[bodies(TWO, None)], None).unwrap();
    assert_eq!(unknown.logprob_mode, LogprobMode::Unknown);
    assert!(!unknown.structured_output && !unknown.priority && !unknown.routed_experts);
}

#[test]
fn the_mode_of_log_probabilities_is_the_servers_own_word() {
    for (mode, said, has) in [
        ("processed_logprobs", LogprobMode::Processed, true),
        ("raw_logprobs", LogprobMode::Raw, true),
        ("raw_logits", LogprobMode::Unknown, false),
        ("processed_logits", LogprobMode::Unknown, false),
    ] {
        let info = changed(|c| c["model_config"]["logprobs_mode"] = json!(mode));
        let facts = facts(&[bodies(ONE, Some(&info))], None).unwrap();
        assert_eq!((facts.logprob_mode, facts.logprobs), (said, has), "{mode}");
    }
}

#[test]
fn what_a_server_can_do_follows_from_its_arguments() {
    let info = changed(|c| {
        c["model_config"]["skip_tokenizer_init"] = json!(false);
        c["model_config"]["max_logprobs"] = json!(-1);
        c["scheduler_config"]["policy"] = json!("priority");
        c["aux_output_config"]["enable_return_routed_experts"] = json!(true);
        c["parallel_config"]["world_size"] = json!(4);
    });
    let facts = facts(&[bodies(ONE, Some(&info))], None).unwrap();
    assert!(facts.structured_output && facts.priority && facts.routed_experts);
    assert!(!facts.tokenizer, "text is not taken by this route");
    assert_eq!((facts.max_top_logprobs, facts.devices.per_rank), (20, 4));
    assert_eq!(max_top_logprobs(Some(0)), 0);
    assert_eq!(max_top_logprobs(Some(500)), 20);
}

#[test]
fn a_server_for_each_rank_makes_one_replica() {
    // Its label is its rank among all; the number that it wants is 0.
    let second = String::from_utf8(ONE.to_vec())
        .unwrap()
        .replace("engine=\"0\"", "engine=\"1\"");
    let servers = [
        bodies(ONE, Some(INFO)),
        Bodies {
            endpoint: Some("http://127.0.0.1:8001"),
            ..bodies(second.as_bytes(), Some(INFO))
        },
    ];
    let one = facts(&servers, None).unwrap();
    let at: Vec<_> = one
        .ranks
        .iter()
        .map(|r| (r.rank, r.engine_rank, r.endpoint.as_deref()))
        .collect();
    assert_eq!(at, [(0, 0, None), (1, 0, Some("http://127.0.0.1:8001"))]);
    let other = changed(|c| c["model_config"]["logprobs_mode"] = json!("processed_logprobs"));
    let servers = [bodies(ONE, Some(INFO)), bodies(ONE, Some(&other))];
    assert!(facts(&servers, None).is_err());
}

#[test]
fn another_start_is_told_from_the_same_one() {
    let one = facts(&[bodies(ONE, Some(INFO))], None).unwrap();
    let info = changed(|c| c["instance_id"] = json!("1795982364994859114"));
    let other = facts(&[bodies(ONE, Some(&info))], None).unwrap();
    assert!(one.same_start(&one.clone()) && !one.same_start(&other));
    // Each of several processes has a number of its own.
    let info = changed(|c| c["parallel_config"]["_api_process_count"] = json!(2));
    assert_eq!(
        facts(&[bodies(ONE, Some(&info))], None).unwrap().start,
        None
    );
    let with_time = [ONE, b"process_start_time_seconds 1.79e9\n"].concat();
    let timed = facts(&[bodies(&with_time, None)], None).unwrap();
    assert_eq!(timed.start.as_deref(), Some("1790000000"));
}

#[test]
fn capacity_falls_back_on_blocks() {
    let text = String::from_utf8(TWO.to_vec()).unwrap();
    let text = text.replace(
        "kv_cache_size_tokens=\"262144\"",
        "kv_cache_size_tokens=\"None\"",
    );
    let facts = facts(&[bodies(text.as_bytes(), None)], None).unwrap();
    // 4,096 blocks of 128 for both.
    assert!(facts.ranks.iter().all(|r| r.kv_capacity_tokens == 262_144));
    assert!(super::facts(&[bodies(b"", None)], None).is_err());
}

#[test]
fn adapters_are_asked_for_where_there_may_be_some() {
    let lora = |info: Option<&[u8]>| facts(&[bodies(ONE, info)], None).unwrap().lora;
    assert!(!lora(Some(INFO)), "it says that it takes none");
    let info = changed(|c| c["lora_config"] = json!({"max_loras": 4}));
    assert!(lora(Some(&info)));
    assert!(lora(None), "it does not say");
}

#[test]
fn loads_are_shares_of_the_capacity() {
    let facts = facts(&[bodies(TWO, None)], None).unwrap();
    let text = "vllm:num_requests_running{engine=\"0\"} 3\n\
                vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n";
    let loads = loads(&metrics::parse(text.as_bytes()).unwrap(), &facts.ranks);
    let first = loads[0].unwrap();
    assert_eq!((first.running, first.kv_used_tokens), (3, 131_072));
    assert_eq!(loads[1], None);
}
