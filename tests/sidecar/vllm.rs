//! A sidecar beside vLLM: simulated servers, since they speak as the recorded ones
//! do.

use std::time::Duration;

use berth::{
    call,
    engine::sim::{Dialect, PauseMode, SimConfig, SimEngine, SimHandle},
    fleet::facts,
    proto::{EngineKind, LogprobMode, RegisterReplicaRequest, ReplicaState},
    sidecar::{Sidecar, SidecarConfig, SidecarError},
};
use serde_json::json;

use crate::{FakeControl, Running, is};

fn engine(dev_mode: bool) -> SimConfig {
    SimConfig {
        dialect: Dialect::Vllm,
        dev_mode,
        ranks: 2,
        page_size: 16,
        model: "tiny".into(),
        vocab_size: 32_000,
        max_running_requests: 64,
        step: Some(Duration::from_millis(5)),
        weight_version: "7".into(),
        ..SimConfig::instant()
    }
}

fn config(control: &FakeControl, engine: &SimHandle) -> SidecarConfig {
    let mut config = SidecarConfig {
        engine: facts::EngineKind::Vllm,
        ..crate::config_of(control, &engine.url())
    };
    config.vocab_size = Some(32_000);
    config
}

/// Registered, and what it was registered with.
async fn registered(
    dev_mode: bool,
    change: impl FnOnce(&mut SidecarConfig),
) -> (FakeControl, SimHandle, Running, RegisterReplicaRequest) {
    let control = FakeControl::start().await;
    let engine = SimEngine::start(engine(dev_mode)).await.unwrap();
    let mut config = config(&control, &engine);
    change(&mut config);
    let running = Running::start(config);
    control
        .hears("a beat of a ready engine", |control| {
            control.beats().iter().any(is(ReplicaState::Ready))
        })
        .await;
    let told = control.registrations().remove(0);
    (control, engine, running, told)
}

#[tokio::test]
async fn the_facts_of_a_server_in_development_mode_are_registered() {
    let (_control, engine, running, told) = registered(true, |_| {}).await;
    assert_eq!(told.engine(), EngineKind::Vllm);
    assert_eq!(
        (told.engine_version.as_str(), told.model.as_str()),
        ("0.32.0", "tiny")
    );
    assert_eq!((told.vocab_size, told.context_length), (32_000, 16_384));
    assert_eq!((told.page_size, told.weight_version.as_str()), (16, "7"));
    assert_eq!(told.logprob_mode(), LogprobMode::Raw);
    let ranks: Vec<_> = told
        .ranks
        .iter()
        .map(|r| (r.rank, r.engine_rank, r.endpoint.clone()))
        .collect();
    assert_eq!(ranks, [(0, Some(0), None), (1, Some(1), None)]);
    assert!(
        told.ranks
            .iter()
            .all(|r| r.kv_capacity_tokens == 375_000 && r.max_running_requests == 64)
    );
    let can = told.capabilities.unwrap();
    assert!(can.output_logprobs && can.prompt_logprobs && can.seed && can.incremental_streaming);
    assert!(!can.tokenizer && !can.structured_output && !can.priority && !can.routed_experts);
    assert_eq!(can.max_top_logprobs, 19);
    running.stops().await;
    engine.stop().await;
}

#[tokio::test]
async fn what_a_server_does_not_tell_is_not_promised_and_can_be_said() {
    let (_control, engine, running, told) = registered(false, |config| {
        config.logprob_mode = Some(call::LogprobMode::Processed);
    })
    .await;
    assert_eq!(told.logprob_mode(), LogprobMode::Processed);
    assert_eq!(told.weight_version, "");
    assert!(told.ranks.iter().all(|r| r.max_running_requests == 0));
    running.stops().await;
    engine.stop().await;
}

#[tokio::test]
async fn load_weights_and_pauses_are_in_the_beats() {
    let (control, engine, running, _) = registered(true, |_| {}).await;
    let url = engine.url();
    let call = tokio::spawn(async move {
        let body = json!({
            "token_ids": [1, 2, 3],
            "sampling_params": {"max_tokens": 10_000, "ignore_eos": true},
        });
        let headers = [("x-data-parallel-rank".to_owned(), "1".to_owned())];
        let url = format!("{url}/inference/v1/generate");
        crate::support::call("POST", &url, &headers, &body.to_string()).await
    });
    control
        .hears("the load of rank 1", |control| {
            control.beats().iter().any(|beat| {
                let [idle, busy] = &beat.ranks[..] else {
                    return false;
                };
                idle.running == 0
                    && (busy.rank, busy.running) == (1, 1)
                    && busy.kv_used_tokens > 3
                    && busy.weight_version == "7"
                    && busy.healthy
            })
        })
        .await;
    engine.pause(PauseMode::InPlace).await;
    engine.set_weight_version("8", false);
    control
        .hears("the pause and the new weights", |control| {
            control.beats().iter().any(|beat| {
                beat.state() == ReplicaState::Ready
                    && beat
                        .ranks
                        .iter()
                        .all(|r| r.paused && r.weight_version == "8")
            })
        })
        .await;
    engine.resume();
    control.clear();
    control
        .hears("its end", |control| {
            let beats = control.beats();
            beats.iter().any(|b| b.ranks.iter().all(|r| !r.paused))
        })
        .await;
    call.abort();
    running.stops().await;
    engine.stop().await;
}

#[tokio::test]
async fn another_start_has_another_boot_id_whether_or_not_it_tells() {
    for dev_mode in [true, false] {
        let (control, engine, running, first) = registered(dev_mode, |_| {}).await;
        engine.kill().await;
        control
            .hears("that it is unwell", |control| {
                control.beats().iter().any(is(ReplicaState::Unhealthy))
            })
            .await;
        let second = engine.restart().await.unwrap();
        control
            .hears("the new start", |control| {
                let told = control.registrations();
                told.iter().any(|r| r.boot_id != first.boot_id)
            })
            .await;
        running.stops().await;
        second.stop().await;
    }
}

#[tokio::test]
async fn a_sidecar_that_is_restarted_does_not_make_a_running_engine_look_new() {
    let (control, engine, running, first) = registered(true, |_| {}).await;
    running.stops().await;
    control.clear();
    let again = Running::start(config(&control, &engine));
    let told = control.hears_registration().await;
    assert_eq!(told.boot_id, first.boot_id);
    again.stops().await;
    engine.stop().await;
}

/// Its first answer about its arguments takes a second.
fn slow_to_tell() -> SimConfig {
    SimConfig {
        info_delay: Duration::from_secs(1),
        ..engine(true)
    }
}

#[tokio::test]
async fn what_an_engine_is_slow_to_tell_follows_the_registration() {
    let control = FakeControl::start().await;
    let engine = SimEngine::start(slow_to_tell()).await.unwrap();
    let running = Running::start(config(&control, &engine));
    control
        .hears("a second registration", |control| {
            control.registrations().len() > 1
        })
        .await;
    let [first, second]: [RegisterReplicaRequest; 2] =
        control.registrations()[..2].to_vec().try_into().unwrap();
    let can = first.capabilities.unwrap();
    assert!(can.more_follow && can.seed && can.incremental_streaming);
    assert!(!can.output_logprobs && !can.prompt_logprobs && can.max_top_logprobs == 0);
    assert_eq!((first.ranks.len(), &*first.engine_start), (2, ""));
    let can = second.capabilities.unwrap();
    assert!(!can.more_follow && can.output_logprobs && can.max_top_logprobs == 19);
    assert_eq!(second.boot_id, first.boot_id, "it is the same start");
    assert!(!second.engine_start.is_empty());
    assert!(second.ranks.iter().all(|r| r.max_running_requests == 64));
    // A sidecar that comes later knows no other name of it.
    running.stops().await;
    control.clear();
    let again = Running::start(config(&control, &engine));
    let third = control.hears_registration().await;
    assert_eq!(third.engine_start, second.engine_start);
    assert_ne!(third.boot_id, second.boot_id);
    again.stops().await;
    engine.stop().await;
}

/// What the one before said is not taken for the word of the one that runs.
#[tokio::test]
async fn an_engine_that_restarts_before_it_has_told_everything_is_another() {
    let control = FakeControl::start().await;
    let engine = SimEngine::start(slow_to_tell()).await.unwrap();
    let running = Running::start(config(&control, &engine));
    let first = control.hears_registration().await;
    assert!(first.capabilities.unwrap().more_follow);
    engine.kill().await;
    control
        .hears("that it is unwell", |control| {
            control.beats().iter().any(is(ReplicaState::Unhealthy))
        })
        .await;
    let engine = engine.restart().await.unwrap();
    let full = |r: &RegisterReplicaRequest| !r.capabilities.unwrap().more_follow;
    control
        .hears("all of the new start", |control| {
            control.registrations().iter().any(full)
        })
        .await;
    let told = control.registrations();
    let last = told.iter().find(|r| full(r)).unwrap();
    assert_ne!(last.boot_id, first.boot_id);
    let names = told.iter().filter(|r| r.boot_id != first.boot_id);
    assert!(
        names.clone().all(|r| r.boot_id == last.boot_id),
        "one start, one name"
    );
    running.stops().await;
    engine.stop().await;
}

#[tokio::test]
async fn an_engine_that_died_behind_its_server_is_reported() {
    let (control, engine, running, _) = registered(true, |_| {}).await;
    let body = json!({"token_ids": [40_000], "sampling_params": {"max_tokens": 4}});
    let reply = crate::support::post(&engine.url(), "/inference/v1/generate", body).await;
    assert_eq!(reply.unwrap().status, 500);
    control
        .hears("that it is unwell", |control| {
            let beats = control.beats();
            let unwell = is(ReplicaState::Unhealthy);
            beats
                .iter()
                .any(|b| unwell(b) && b.ranks.iter().all(|r| !r.healthy))
        })
        .await;
    running.stops().await;
}

/// As vLLM is told over HTTP, and lists it; a load that follows an unload is another.
#[tokio::test]
async fn adapters_are_looked_for_at_each_beat() {
    let control = FakeControl::start().await;
    let engine = SimConfig {
        adapters: Some(vec![("a".to_owned(), "/a".to_owned())]),
        ..engine(true)
    };
    let engine = SimEngine::start(engine).await.unwrap();
    let running = Running::start(config(&control, &engine));
    let tell = async |path: &str, body: serde_json::Value| {
        let reply = crate::support::post(&engine.url(), path, body).await;
        let reply = reply.unwrap();
        (reply.status, reply.body)
    };
    let b = || json!({"lora_name": "b", "lora_path": "/b"});
    let listed = |control: &FakeControl| -> Option<Vec<(String, String)>> {
        let last = control.beats().pop()?;
        let adapters = last.adapters?.adapters.into_iter();
        Some(adapters.map(|a| (a.name, a.load_id)).collect())
    };
    let hears = async |what: &str, names: &[&str]| -> Vec<String> {
        control
            .hears(what, |control| {
                let listed = listed(control).unwrap_or_default();
                listed
                    .iter()
                    .map(|(name, _)| name.as_str())
                    .eq(names.iter().copied())
            })
            .await;
        let listed = listed(&control).unwrap_or_default();
        listed.into_iter().map(|(_, load_id)| load_id).collect()
    };
    assert_eq!(hears("the one of the start", &["a"]).await, ["/a"]);
    assert_eq!(
        tell("/v1/load_lora_adapter", b()).await,
        (
            200,
            "Success: LoRA adapter 'b' added successfully.".to_owned()
        )
    );
    assert_eq!(tell("/v1/load_lora_adapter", b()).await.0, 400);
    assert_eq!(hears("another", &["a", "b"]).await, ["/a", "/b"]);
    assert_eq!(tell("/v1/unload_lora_adapter", b()).await.0, 200);
    assert_eq!(tell("/v1/unload_lora_adapter", b()).await.0, 404);
    hears("that it is gone", &["a"]).await;
    assert_eq!(tell("/v1/load_lora_adapter", b()).await.0, 200);
    assert_eq!(hears("that it is back", &["a", "b"]).await, ["/a", "#1 /b"]);
    running.stops().await;
    engine.stop().await;
}

#[tokio::test]
async fn servers_of_ranks_are_for_vllm_and_reachable_ones() {
    let faults = |change: fn(&mut SidecarConfig)| {
        let mut config = SidecarConfig::new("http://10.0.0.1:7700", "http://10.0.0.2:8000", "r");
        config.engine = facts::EngineKind::Vllm;
        change(&mut config);
        match Sidecar::new(config) {
            Err(SidecarError::Config(faults)) => faults,
            other => format!("{other:?}"),
        }
    };
    let near = faults(|c| c.rank_urls = vec!["http://127.0.0.1:8001".into()]);
    assert!(near.contains("loopback"), "{near}");
    let sglang = faults(|c| {
        c.engine = facts::EngineKind::Sglang;
        c.rank_urls = vec!["http://10.0.0.3:8000".into()];
    });
    assert!(sglang.contains("only vLLM"), "{sglang}");
    let nonsense = faults(|c| c.rank_urls = vec!["10.0.0.3".into()]);
    assert!(nonsense.contains("10.0.0.3"), "{nonsense}");
}
