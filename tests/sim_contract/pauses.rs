//! Pauses, and weights that change midway.

use berth::engine::sim::PauseMode;
use serde_json::json;

use super::*;

#[tokio::test]
async fn three_kinds_of_pause() {
    let engine = start(SimConfig {
        time_scale: 0.5,
        step: Some(Duration::from_millis(60)),
        ..slow()
    })
    .await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    let loads_free = &[
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "token_usage",
        "cache_hit_rate",
        "total_prefill_uncached_tokens",
        "decode_moments",
    ];

    for mode in ["abort", "retract", "in_place"] {
        let name = |what: &str| -> &'static str { Box::leak(format!("{what}_{mode}").into()) };
        let running = begin(name("paused_running_reply"), &url);
        runs(&engine, &format!("fx-p-{mode}")).await;
        check(name("pause_generation"), &url).await;
        assert_eq!(get(&url, "/ready").await.unwrap().status, 503);
        let new = begin(name("paused_new_reply"), &url);
        is_held(&engine, &format!("fx-w-{mode}")).await;
        let recording = Recording::load(name("loads_while_paused"));
        let got = recording.send(&url).await.unwrap();
        recording.assert_like_but(&got, loads_free);
        let first = got.json()["loads"][0]["timestamp"].clone();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let got = recording.send(&url).await.unwrap();
        let frozen = got.json()["loads"][0]["timestamp"] == first;
        assert_eq!(frozen, mode != "abort", "{mode}");
        check(name("flush_cache_while_paused"), &url).await;
        if mode == "in_place" {
            check("update_weight_version", &url).await;
        }
        assert!(!new.is_finished());
        check(name("continue_generation"), &url).await;
        let (recording, got) = ended("paused_running_reply", running).await;
        let free = match mode {
            "retract" => &[][..],
            _ => PARTIAL,
        };
        recording.assert_like_but(&got, free);
        assert_consistent(&got.json());
        let (recording, got) = ended("paused_new_reply", new).await;
        recording.assert_like(&got);
    }
}

#[tokio::test]
async fn weights_change_midway() {
    let engine = start(SimConfig {
        step: Some(Duration::from_millis(25)),
        ..slow()
    })
    .await;
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    for (mode, pause) in [
        ("in_place", PauseMode::InPlace),
        ("retract", PauseMode::Retract),
    ] {
        let name = |what: &str| -> &'static str { Box::leak(format!("{what}_{mode}").into()) };
        let running = begin(name("gen_version_changed_midway"), &url);
        runs(&engine, &format!("fx-ver-{mode}")).await;
        engine.pause(pause).await;
        check(name("update_weight_version_no_abort"), &url).await;
        engine.resume();
        let (recording, got) = ended("gen_version_changed_midway", running).await;
        recording.assert_like_but(&got, &["end", "start"]);
        assert_consistent(&got.json());
        let prompt: Vec<u32> =
            serde_json::from_value(recording.request["input_ids"].clone()).unwrap();
        assert_eq!(
            got.json()["output_ids"],
            json!(expected(&prompt, 0, 60, 32_000))
        );
    }
}
