//! How an engine ends, and what its clients see.

use berth::engine::sim::{DropStream, Times};
use serde_json::json;

use super::*;

#[tokio::test]
async fn the_ends_of_an_engine() {
    let engine = start(slow()).await;
    let url = engine.url();
    engine.set_weight_version("v19", false);
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    let running = tokio::spawn({
        let url = url.clone();
        async move {
            let body = json!({
                "input_ids": [1, 2, 3], "rid": "draining",
                "sampling_params": {"max_new_tokens": 800, "ignore_eos": true},
            });
            support::post(&url, "/generate", body).await.unwrap()
        }
    });
    runs(&engine, "draining").await;
    engine.terminate();
    check("sigterm_health", &url).await;
    check("sigterm_ready", &url).await;
    check("sigterm_new_request", &url).await;
    let got = within("it drains", running).await.unwrap();
    assert_eq!(got.json()["meta_info"]["completion_tokens"], 800);
    assert_eq!(
        within("it ends", engine.ended()).await,
        berth::engine::sim::End::Drained
    );

    let engine = start(slow()).await;
    let url = engine.url();
    let other = tokio::spawn({
        let url = url.clone();
        async move {
            let body = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": true}});
            support::post(&url, "/generate", body).await
        }
    });
    until("the other runs", || engine.counters().started == 1).await;
    let recording = Recording::load("err_token_out_of_vocab");
    assert_eq!(recording.status, None);
    assert!(recording.send(&url).await.is_err());
    assert!(within("the other is cut", other).await.unwrap().is_err());
    let end = within("it ends", engine.ended()).await;
    assert_eq!(end, berth::engine::sim::End::OutOfVocabulary);
    assert!(get(&url, "/health").await.unwrap_err().contains("refused"));
}

#[tokio::test]
async fn a_stream_cut_by_a_dying_engine() {
    let engine = start(slow()).await;
    engine.set_weight_version("w-retract", false);
    let url = engine.url();
    support::post(&url, "/generate", Recording::load("gen_plain").request)
        .await
        .unwrap();
    engine.set_faults(Faults {
        drop_stream: Some(DropStream {
            times: Times::Next(1),
            after_tokens: 9,
        }),
        ..Faults::default()
    });
    let recording = Recording::load("stream_cut_engine_killed");
    let body = recording.request.to_string();
    let response = support::open("POST", &format!("{url}/generate"), &[], &body)
        .await
        .unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let mut body = response.into_body();
    let mut seen = Vec::new();
    let broken = within("it breaks", async {
        loop {
            match http_body_util::BodyExt::frame(&mut body).await {
                Some(Ok(frame)) => seen.extend(frame.into_data().unwrap()),
                Some(Err(_)) => break true,
                None => break false,
            }
        }
    })
    .await;
    assert!(broken, "the stream ended as if it were whole");
    let seen = frames(std::str::from_utf8(&seen).unwrap());
    let recorded = frames(&recording.response);
    // All nine; of the recording the last two are kept.
    assert_eq!(seen.len(), 9);
    for at in 1..=recorded.len() {
        Compare::default().assert(
            "stream_cut_engine_killed",
            &serde_json::from_str(&recorded[recorded.len() - at]).unwrap(),
            &serde_json::from_str(&seen[seen.len() - at]).unwrap(),
        );
    }
    until("it is aborted", || {
        engine.history().iter().all(|r| r.ended.is_some())
    })
    .await;
}
