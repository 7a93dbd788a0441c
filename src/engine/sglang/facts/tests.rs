use serde_json::json;

use super::*;

macro_rules! recorded {
    ($name:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/sglang/",
            $name,
            ".response.json"
        ))
    };
}

fn facts(server: &[u8], loads: &[u8]) -> Result<Facts, FactsError> {
    Bodies {
        server_info: server,
        model_info: recorded!("model_info"),
        models: recorded!("v1_models"),
        loads,
    }
    .facts()
}

fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut server: Value = serde_json::from_slice(recorded!("dp_server_info")).unwrap();
    change(&mut server);
    server.to_string().into_bytes()
}

#[test]
fn the_recorded_server_of_one_rank() {
    let facts = facts(recorded!("server_info"), recorded!("v1_loads")).unwrap();
    assert_eq!(facts.version, "0.5.23");
    assert_eq!(facts.model, "MODEL_DIR");
    assert_eq!(facts.context_length, 32768);
    assert_eq!(facts.weight_version, "default");
    assert_eq!(facts.page_size, 1);
    assert_eq!(
        facts.ranks,
        [RankFact {
            rank: 0,
            engine_rank: 0,
            endpoint: None,
            kv_capacity_tokens: 32768,
            max_running_requests: 2048
        }]
    );
    assert!(!facts.tokenizer && !facts.structured_output && !facts.priority);
    assert!(!facts.incremental_streaming && !facts.deterministic);
    assert!(facts.start.is_some());
    assert_eq!(facts.vocab_size, None);
}

#[test]
fn the_recorded_server_of_two_ranks() {
    let facts = facts(recorded!("dp_server_info"), recorded!("dp_loads")).unwrap();
    assert_eq!(facts.ranks.len(), 2);
    assert_eq!(facts.ranks[1].rank, 1);
    assert!(!facts.devices.shared);
}

#[test]
fn ranks_are_counted_in_every_layout() {
    for (dp, attention, flag, good) in [
        (2, 1, false, true),
        (1, 2, false, true),
        (1, 2, true, true),
        (2, 2, true, true),
        (2, 2, false, false),
        (1, 1, false, false),
        (4, 1, false, false),
    ] {
        let server = changed(|s| {
            s["dp_size"] = json!(dp);
            s["attn_dp_size"] = json!(attention);
            s["enable_dp_attention"] = json!(flag);
        });
        assert_eq!(
            facts(&server, recorded!("dp_loads")).is_ok(),
            good,
            "{dp} {attention} {flag}"
        );
    }
}

#[test]
fn a_small_kv_cache_bounds_the_context() {
    let server = changed(|s| s["max_req_input_len"] = json!(994));
    let facts = facts(&server, recorded!("dp_loads")).unwrap();
    assert_eq!(facts.context_length, 1000);
}

#[test]
fn another_start_is_told_from_the_same_one() {
    let one = facts(recorded!("dp_server_info"), recorded!("dp_loads")).unwrap();
    let same = facts(recorded!("dp_server_info"), recorded!("dp_loads_busy")).unwrap();
    assert!(one.same_start(&same) && one.same_registration(&same));
    let server = changed(|s| s["startup_time"]["tokenizer_e2e"] = json!(52.015_645_83));
    let other = facts(&server, recorded!("dp_loads")).unwrap();
    assert!(!one.same_start(&other));
    let server = changed(|s| s["incremental_streaming_output"] = json!(true));
    let other = facts(&server, recorded!("dp_loads")).unwrap();
    assert!(!one.same_registration(&other));
    // A fixed seed or a repeated pid alone tells no start.
    let server = changed(|s| s["startup_time"] = Value::Null);
    assert_eq!(facts(&server, recorded!("dp_loads")).unwrap().start, None);
}

#[test]
fn priorities_in_reverse_are_no_priorities() {
    let server = changed(|s| {
        s["enable_priority_scheduling"] = json!(true);
    });
    assert!(facts(&server, recorded!("dp_loads")).unwrap().priority);
    let server = changed(|s| {
        s["enable_priority_scheduling"] = json!(true);
        s["schedule_low_priority_values_first"] = json!(true);
    });
    assert!(!facts(&server, recorded!("dp_loads")).unwrap().priority);
}

#[test]
fn loads_of_a_busy_and_of_a_dead_rank() {
    let busy = parse_loads(recorded!("dp_loads_busy")).unwrap();
    assert_eq!(busy.len(), 2);
    let dead = parse_loads(recorded!("dp_loads_rank1_killed")).unwrap();
    assert_eq!((dead[1].running, dead[1].kv_used_tokens), (1, 35));
    assert!(dead[1].timestamp < dead[0].timestamp);
    let twice = br#"{"loads":[{"dp_rank":0},{"dp_rank":0}]}"#;
    assert!(parse_loads(twice).is_err());
    assert!(parse_loads(b"Internal Server Error").is_err());
}
