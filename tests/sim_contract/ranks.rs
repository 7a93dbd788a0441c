//! Two ranks: pins, loads, a dead one.

use serde_json::json;

use super::*;

#[tokio::test]
async fn two_ranks() {
    let engine = start(SimConfig {
        ranks: 2,
        ..config()
    })
    .await;
    let url = engine.url();
    for name in [
        "dp_rank0_first",
        "dp_rank0_again",
        "dp_rank1_first",
        "dp_rank1_again",
    ] {
        check(name, &url).await;
    }
    // Each in its turn, beginning with rank 0.
    for name in [
        "dp_no_rank",
        "dp_header_rank",
        "dp_old_name",
        "dp_bad_rank_0",
        "dp_bad_rank_1.0",
        "dp_bad_rank_2",
        "dp_bad_rank_99",
        "dp_bad_rank_True",
        "dp_bad_rank_neg1",
        "dp_loads_dp_rank_7",
        "dp_loads_include_bogus",
    ] {
        check(name, &url).await;
    }
    for name in [
        "dp_loads",
        "dp_loads_dp_rank_1",
        "dp_loads_include_all",
        "dp_loads_include_core_memory_queues",
    ] {
        let recording = Recording::load(name);
        let got = recording.send(&url).await.unwrap();
        recording.assert_like_but(&got, &["decode_moments", "total_prefill_uncached_tokens"]);
    }
    // The recording has 5 requests of 2 tokens more behind it; every one of
    // them computed 1 or 3 prompt tokens. What ours did is exact:
    let loads = get(&url, "/v1/loads").await.unwrap().json();
    assert_eq!(
        loads["loads"][0]["total_prefill_uncached_tokens"],
        2000 + 1 + 3
    );
    assert_eq!(
        loads["loads"][1]["total_prefill_uncached_tokens"],
        2000 + 1 + 3 + 1
    );
    for name in [
        "dp_small_rank0",
        "dp_small_rank0_again",
        "dp_small_rank1",
        "dp_pause",
        "dp_continue",
        "dp_flush",
    ] {
        check(name, &url).await;
    }

    let recording = Recording::load("dp_server_info");
    let got = recording.send(&url).await.unwrap();
    compare_info(&recording, &got);
    assert_eq!(got.json()["dp_size"], 2);
    assert_eq!(got.json()["internal_states"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn busy_and_dead_ranks() {
    let engine = start(SimConfig { ranks: 2, ..slow() }).await;
    let url = engine.url();
    let recording = Recording::load("dp_loads_busy");
    for (rid, rank) in [("a", 0), ("b", 0), ("c", 0), ("d", 1)] {
        let url = url.clone();
        tokio::spawn(async move {
            let body = json!({
                "input_ids": [rank, 1, 2], "rid": rid, "routed_dp_rank": rank,
                "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": true},
            });
            support::post(&url, "/generate", body).await
        });
        runs(&engine, rid).await;
    }
    let free = &[
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "token_usage",
        "total_prefill_uncached_tokens",
        "decode_moments",
        "cache_hit_rate",
    ];
    let mut got = recording.send(&url).await.unwrap();
    within("all four are shown", async {
        while got.json()["loads"][0]["num_running_reqs"] != 3
            || got.json()["loads"][1]["num_running_reqs"] != 1
        {
            got = recording.send(&url).await.unwrap();
        }
    })
    .await;
    let alike = {
        let mut got = got.json();
        // The recording was written by another JSON library: only its form differs.
        got["loads"][0]["num_running_reqs"] = 3.into();
        got
    };
    Compare {
        free,
        ..Compare::default()
    }
    .assert(
        "dp_loads_busy",
        &serde_json::from_str(&recording.response).unwrap(),
        &alike,
    );

    engine.set_faults(Faults {
        dead_ranks: vec![1],
        ..Faults::default()
    });
    engine.abort_all();
    let recording = Recording::load("dp_loads_rank1_killed");
    let mut got = recording.send(&url).await.unwrap();
    within("rank 0 is idle", async {
        while got.json()["loads"][0]["num_running_reqs"] != 0 {
            got = recording.send(&url).await.unwrap();
        }
    })
    .await;
    recording.assert_like_but(&got, free);
    let stamp = |got: &Got, rank: usize| got.json()["loads"][rank]["timestamp"].as_f64().unwrap();
    let later = recording.send(&url).await.unwrap();
    assert!(stamp(&later, 0) > stamp(&got, 0));
    assert!((stamp(&later, 1) - stamp(&got, 1)).abs() < 1e-9);
}
