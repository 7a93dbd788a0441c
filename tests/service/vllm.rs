//! Replicas that speak vLLM: behind the same service, and beside SGLang.

use std::{collections::BTreeSet, time::Duration};

use berth::{
    engine::sim::{Dialect, DropStream, Faults, How, SimConfig, SimEngine, SimHandle, Times},
    fleet::facts::EngineKind,
    harness::playground,
    proto::{
        self, AttemptFailure, CancelSampleRequest, LogprobMode, Logprobs, OnAbort, OnLost,
        RouteReason, SampleRequest, SampleResponse, SampleStreamResponse, Sampling, StopReason,
        StopStrings, TokenIds, WeightsConstraint, sample_request::Prompt,
        sample_stream_response::Event, weights_constraint::Constraint,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};

use crate::cluster::{
    Cluster, VOCAB, cached, eventually, expected, home, ids, instant, keyed, only, refused,
    request, route, stepping,
};

/// Tokens of a block.
const BLOCK: u32 = 16;

fn vllm(engine: SimConfig) -> SimConfig {
    SimConfig {
        dialect: Dialect::Vllm,
        page_size: BLOCK as usize,
        // There is no such choice: its streams are always of what is new.
        incremental_streaming_output: false,
        ..engine
    }
}

fn two_ranks() -> SimConfig {
    SimConfig {
        ranks: 2,
        ..vllm(instant())
    }
}

/// A fleet of one replica of each kind, of the same model.
async fn mixed(engine: SimConfig) -> Cluster {
    let mut cluster = Cluster::start(0, instant()).await;
    let h100 = || playground::accelerator("NVIDIA H100 80GB HBM3", 81_559);
    let add = &mut cluster.playground;
    add.add("sglang", engine.clone(), h100()).await.unwrap();
    add.add("vllm", vllm(engine), h100()).await.unwrap();
    cluster
}

/// From here on steps take no time.
fn hurry(engine: &SimHandle) {
    engine.set_faults(Faults {
        slow: Some(0.0),
        ..Faults::default()
    });
}

/// Waits until tokens have come.
async fn first_tokens(stream: &mut Streaming<SampleStreamResponse>) {
    loop {
        let message = stream.message().await.unwrap().unwrap();
        if let Some(Event::Delta(_)) = message.event {
            return;
        }
    }
}

/// The response at the end.
async fn last(stream: &mut Streaming<SampleStreamResponse>) -> SampleResponse {
    loop {
        let message = stream.message().await.unwrap().unwrap();
        if let Some(Event::Final(response)) = message.event {
            return response;
        }
    }
}

/// Its API takes no number of samples: each is a request of its own.
#[tokio::test]
async fn all_samples_that_are_asked_for_come_back() {
    let cluster = Cluster::start(2, two_ranks()).await;
    let prompt = ids(1, 50);
    let mut asked = request(&prompt, 5);
    asked.num_samples = Some(8);
    asked.sampling.as_mut().unwrap().seed = Some(100);
    let response = cluster.sample(asked).await.unwrap();
    assert_eq!(response.samples.len(), 8);
    for (sample, seed) in response.samples.iter().zip(100..) {
        let tokens = berth::engine::sim::tokens::expected(&prompt, seed, 5, VOCAB);
        assert_eq!(sample.token_ids, tokens);
    }
    let mut calls: Vec<String> = Vec::new();
    for engine in cluster.engines() {
        calls.extend(
            engine
                .history()
                .into_iter()
                .map(|record| record.rid.to_string()),
        );
    }
    assert_eq!(calls.len(), 8);
    assert_eq!(calls.iter().collect::<BTreeSet<_>>().len(), 8);
    cluster.stop().await;
}

#[tokio::test]
async fn trajectories_keep_their_rank_and_its_cache() {
    let cluster = Cluster::start(2, two_ranks()).await;
    let mut homes = Vec::new();
    for t in 0..4 {
        let key = format!("t{t}");
        let mut prompt = ids(t, 100);
        let mut held = 0;
        let mut first = None;
        for turn in 0..4_u32 {
            let response = cluster.sample(keyed(&key, &prompt, 23)).await.unwrap();
            let sample = only(&response);
            assert_eq!(sample.token_ids, expected(&prompt, 23));
            let here = home(sample);
            assert_eq!(first.get_or_insert_with(|| here.clone()), &here);
            let receipt = route(sample);
            let reason = match turn {
                0 => RouteReason::NewKey,
                _ => RouteReason::Pinned,
            };
            assert_eq!(receipt.reason(), reason);
            // vLLM does not say which rank has served.
            assert_eq!(receipt.served_rank, None);
            // Whole blocks of what was computed the turn before.
            assert_eq!(cached(sample), u64::from(held / BLOCK * BLOCK));
            assert_eq!(receipt.expected_cached_tokens, cached(sample));
            prompt.extend_from_slice(&sample.token_ids);
            held = prompt.len() as u32 - 1;
            prompt.extend(ids(100 + turn, 7));
        }
        homes.push(first.unwrap());
    }
    let distinct: BTreeSet<_> = homes.iter().collect();
    assert_eq!(distinct.len(), 4, "{homes:?}");
    // The engines know: each request was given to the rank that was asked for.
    for engine in cluster.engines() {
        for record in engine.history() {
            assert!(record.stream);
            assert_eq!(record.asked_rank, record.rank);
            assert!(record.rank.is_some());
        }
        assert_eq!(engine.counters().finished, 8);
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_replica_that_is_killed_midway_is_replaced_within_the_turn() {
    for (on_lost, resumed) in [(OnLost::Restart, false), (OnLost::Resume, true)] {
        let cluster = Cluster::start(2, vllm(stepping(Duration::from_millis(50)))).await;
        let prompt = ids(1, 64);
        let first = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
        let victim = home(only(&first)).0;
        for engine in cluster.engines() {
            if engine.url() != cluster.engine(&victim).url() {
                hurry(engine);
            }
        }
        let mut request = keyed("t", &prompt, 100);
        request.on_lost = on_lost.into();
        let mut turn = cluster.client().sample_stream(request).await.unwrap();
        first_tokens(turn.get_mut()).await;
        cluster.engine(&victim).kill().await;
        let response = last(turn.get_mut()).await;
        let sample = only(&response);
        assert_eq!(sample.token_ids, expected(&prompt, 100));
        let receipt = route(sample);
        assert_ne!(receipt.replica_id, victim);
        assert_eq!(receipt.reason(), RouteReason::ReplicaLost);
        assert_eq!(receipt.attempts.len(), 2);
        assert_eq!(receipt.attempts[0].failure(), AttemptFailure::Lost);
        let kept = receipt.attempts[0].kept_tokens;
        assert_eq!(kept > 0, resumed, "{kept}");
        // Which weights made what was kept was never said.
        let spans: Vec<_> = sample
            .weight_spans
            .iter()
            .map(|s| (s.version.as_str(), s.start, s.end))
            .collect();
        if resumed {
            assert_eq!(spans, [("", 0, kept), ("default", kept, 100)]);
        } else {
            assert_eq!(spans, [("default", 0, 100)]);
        }
        cluster.stop().await;
    }
}

#[tokio::test]
async fn what_was_kept_of_unknown_weights_is_not_kept_under_a_condition_on_them() {
    let cluster = Cluster::start(2, vllm(instant())).await;
    for engine in cluster.engines() {
        engine.set_faults(Faults {
            drop_stream: Some(DropStream {
                times: Times::Next(1),
                after_tokens: 10,
            }),
            ..Faults::default()
        });
    }
    let prompt = ids(1, 64);
    let mut asked = keyed("t", &prompt, 40);
    asked.on_lost = OnLost::Resume.into();
    asked.weights = Some(WeightsConstraint {
        constraint: Some(Constraint::Exact("default".into())),
        wait: false,
    });
    let response = cluster.sample(asked).await.unwrap();
    let sample = only(&response);
    assert_eq!(sample.token_ids, expected(&prompt, 40));
    assert_eq!(sample.weight_spans.len(), 1);
    assert_eq!(sample.weight_spans[0].version, "default");
    let attempts = &route(sample).attempts;
    assert_eq!(attempts.len(), 3, "both engines drop one");
    assert!(attempts[..2].iter().all(|a| a.kept_tokens == 0));
    cluster.stop().await;
}

/// With a route for aborts and without one: there the closed connection tells.
#[tokio::test]
async fn a_cancelled_generation_ends_at_the_engine() {
    for dev_mode in [true, false] {
        let engine = SimConfig {
            dev_mode,
            ..vllm(stepping(Duration::from_millis(10)))
        };
        let cluster = Cluster::start(1, engine).await;
        let run = tokio::spawn({
            let mut client = cluster.client();
            let mut request = keyed("t", &ids(1, 64), 1000);
            request.idempotency_key = Some("k".to_owned());
            async move { client.sample(request).await }
        });
        cluster.one_has_started("r0").await;
        let cancel = CancelSampleRequest {
            idempotency_key: "k".to_owned(),
        };
        cluster.client().cancel_sample(cancel).await.unwrap();
        let status = run.await.unwrap().unwrap_err();
        assert_eq!(status.code(), Code::Cancelled);
        cluster.nothing_runs("r0").await;
        let engine = cluster.engine("r0");
        assert_eq!(engine.history()[0].how, How::Aborted);
        if dev_mode {
            eventually("it is aborted by its id as well", async || {
                engine.counters().aborts_received >= 1
            })
            .await;
        }
        // A caller without a key that goes away is noticed too.
        let call = tokio::spawn({
            let mut client = cluster.client();
            async move { client.sample(request(&ids(2, 64), 1000)).await }
        });
        eventually("it runs", async || engine.counters().started == 2).await;
        call.abort();
        cluster.nothing_runs("r0").await;
        assert_eq!(engine.history()[1].how, How::Aborted);
        cluster.stop().await;
    }
}

#[tokio::test]
async fn load_is_not_death() {
    let cluster = Cluster::start(2, vllm(instant())).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let here = home(only(&first));
    cluster.engine(&here.0).set_faults(Faults {
        queue_full: Some(Times::Next(2)),
        ..Faults::default()
    });
    let again = cluster.sample(keyed("t", &prompt, 4)).await.unwrap();
    let receipt = route(only(&again));
    assert_eq!(home(only(&again)), here, "backed off, not moved");
    assert_eq!(receipt.reason(), RouteReason::Pinned);
    assert_eq!(receipt.attempts.len(), 3);
    assert_eq!(receipt.attempts[1].failure(), AttemptFailure::Busy);
    assert_eq!(cached(only(&again)), 48);
    cluster.stop().await;
}

#[tokio::test]
async fn what_the_engine_ends_early_goes_on_or_is_returned() {
    for (on_abort, whole) in [(OnAbort::Continue, true), (OnAbort::ReturnPartial, false)] {
        let cluster = Cluster::start(1, vllm(stepping(Duration::from_millis(50)))).await;
        let prompt = ids(1, 64);
        let mut request = keyed("t", &prompt, 100);
        request.on_abort = on_abort.into();
        let mut run = cluster.client().sample_stream(request).await.unwrap();
        first_tokens(run.get_mut()).await;
        cluster.engine("r0").set_weight_version("v2", true);
        hurry(cluster.engine("r0"));
        let response = last(run.get_mut()).await;
        let sample = only(&response);
        let all = expected(&prompt, 100);
        let first = &sample.weight_spans[0];
        assert_eq!(first.version, "default");
        if whole {
            assert_eq!(sample.token_ids, all);
            assert_eq!(sample.stop_reason(), StopReason::Length);
            assert_eq!(sample.weight_spans[1].version, "v2");
            let attempts = &route(sample).attempts;
            assert_eq!(attempts[0].failure(), AttemptFailure::Aborted);
            // The step under way when the weights came was still finished.
            assert!((first.end..=first.end + 1).contains(&attempts[0].kept_tokens));
            assert_eq!(sample.weight_spans[1].end, 100);
        } else {
            assert_eq!(sample.stop_reason(), StopReason::Aborted);
            let got = sample.token_ids.len();
            assert!(got > 0 && got < 100);
            assert_eq!(sample.token_ids, all[..got]);
        }
        cluster.stop().await;
    }
}

#[tokio::test]
async fn a_pause_is_seen_and_weights_are_known() {
    let cluster = Cluster::with(1, vllm(instant()), |c| {
        c.fleet.lease.interval = Duration::from_millis(50);
    })
    .await;
    let fleet = &cluster.playground.server().parts().fleet;
    let id = berth::ids::ReplicaId::new("r0");
    let engine = cluster.engine("r0");
    engine.pause(berth::engine::sim::PauseMode::InPlace).await;
    eventually("its ranks are paused", async || {
        fleet
            .get(&id)
            .is_some_and(|s| s.ranks.iter().all(|r| !r.routable()))
    })
    .await;
    engine.set_weight_version("7", false);
    engine.resume();
    let mut asked = request(&ids(1, 16), 4);
    asked.weights = Some(WeightsConstraint {
        constraint: Some(Constraint::AtLeast(7)),
        wait: true,
    });
    let response = cluster.sample(asked).await.unwrap();
    assert_eq!(only(&response).weight_spans[0].version, "7");
    cluster.stop().await;
}

#[tokio::test]
async fn log_probabilities_come_with_their_mode() {
    let cluster = Cluster::start(1, vllm(instant())).await;
    let prompt = ids(1, 20);
    let mut asked = request(&prompt, 6);
    asked.logprobs = Some(Logprobs {
        output: true,
        top_k: 3,
        prompt: true,
        prompt_top_k: 2,
    });
    let response = cluster.sample(asked).await.unwrap();
    assert_eq!(response.logprob_mode(), LogprobMode::Raw);
    let sample = only(&response);
    assert_eq!(sample.token_ids, expected(&prompt, 6));
    assert_eq!(sample.logprobs.len(), 6);
    let top = sample.top_logprobs.as_ref().unwrap();
    assert_eq!((top.stride, top.token_ids.len()), (3, 18));
    assert_eq!(top.token_ids[0], sample.token_ids[0]);
    let of_prompt = response.prompt_logprobs.unwrap();
    assert_eq!(of_prompt.logprobs.len(), 20);
    assert!(of_prompt.logprobs[0].is_nan() && of_prompt.logprobs[1] <= 0.0);
    assert_eq!(of_prompt.top_logprobs.unwrap().token_ids.len(), 40);
    // A stream of the same: the tokens come in one piece.
    assert!(!cluster.engine("r0").history()[0].stream);

    let mut most = request(&prompt, 2);
    most.logprobs = Some(Logprobs {
        output: true,
        top_k: 20,
        ..Logprobs::default()
    });
    refused(
        cluster.sample(most.clone()).await,
        Code::FailedPrecondition,
        "NOT_SUPPORTED",
    );
    most.logprobs.as_mut().unwrap().top_k = 19;
    cluster.sample(most).await.unwrap();
    cluster.stop().await;
}

fn sampling(change: impl FnOnce(&mut Sampling)) -> SampleRequest {
    let mut asked = request(&ids(1, 16), 4);
    change(asked.sampling.as_mut().unwrap());
    asked
}

/// What no client of vLLM can ask for, because it would be dropped in silence.
fn not_honoured() -> Vec<(&'static str, SampleRequest)> {
    let text = SampleRequest {
        prompt: Some(Prompt::Text("hello".into())),
        ..request(&[1], 4)
    };
    let experts = SampleRequest {
        return_routed_experts: true,
        ..request(&ids(1, 16), 4)
    };
    let priority = SampleRequest {
        priority: Some(3),
        ..request(&ids(1, 16), 4)
    };
    vec![
        ("text", text),
        ("experts", experts),
        ("priority", priority),
        (
            "stop strings",
            sampling(|s| {
                s.stop = Some(StopStrings {
                    strings: vec!["x".into()],
                });
            }),
        ),
        (
            "structured output",
            sampling(|s| {
                s.structured = Some(proto::sampling::Structured::Regex("a+".into()));
            }),
        ),
        ("cold", sampling(|s| s.temperature = Some(0.005))),
        ("hot", sampling(|s| s.temperature = Some(2.5))),
    ]
}

#[tokio::test]
async fn what_it_cannot_honour_is_refused_and_reaches_no_engine() {
    let cluster = Cluster::start(1, vllm(instant())).await;
    for (what, asked) in not_honoured() {
        let result = cluster.sample(asked).await;
        let status = result.expect_err(what);
        assert_eq!(status.code(), Code::FailedPrecondition, "{what}: {status}");
        assert!(status.message().contains("cannot do"), "{what}: {status}");
    }
    assert_eq!(cluster.received(), 0);
    cluster.stop().await;
}

/// In a mixed fleet each request goes where it can be honoured.
#[tokio::test]
async fn beside_sglang_capabilities_decide() {
    let engine = SimConfig {
        priority_scheduling: false,
        ..instant()
    };
    let cluster = mixed(engine).await;
    let at = async |asked: SampleRequest| {
        let response = cluster.sample(asked).await.unwrap();
        home(only(&response)).0
    };
    let past_eos = sampling(|s| {
        s.ignore_eos = true;
        s.stop_token_ids = Some(TokenIds { ids: vec![7] });
    });
    for _ in 0..3 {
        assert_eq!(at(past_eos.clone()).await, "vllm");
        assert_eq!(at(sampling(|s| s.min_tokens = Some(2))).await, "vllm");
        assert_eq!(
            at(sampling(|s| s.temperature = Some(0.005))).await,
            "sglang"
        );
        let twenty = SampleRequest {
            logprobs: Some(Logprobs {
                output: true,
                top_k: 20,
                ..Logprobs::default()
            }),
            ..request(&ids(1, 16), 4)
        };
        assert_eq!(at(twenty).await, "sglang");
    }
    // What both can do is spread over both, and each trajectory stays.
    let mut used = BTreeSet::new();
    for t in 0..4 {
        let prompt = ids(t, 64);
        let key = format!("t{t}");
        let first = at(keyed(&key, &prompt, 4)).await;
        assert_eq!(at(keyed(&key, &prompt, 4)).await, first);
        used.insert(first);
    }
    assert_eq!(used.len(), 2);
    // A trajectory whose engine is gone goes on at the other kind.
    let prompt = ids(50, 64);
    let first = cluster.sample(keyed("moves", &prompt, 4)).await.unwrap();
    let victim = home(only(&first)).0;
    cluster.engine(&victim).kill().await;
    let second = cluster.sample(keyed("moves", &prompt, 8)).await.unwrap();
    assert_ne!(home(only(&second)).0, victim);
    assert_eq!(only(&second).token_ids, expected(&prompt, 8));
    cluster.stop().await;
}

/// A server for each rank: one replica, several endpoints, each wanting rank 0.
#[tokio::test]
async fn a_replica_may_have_a_server_for_each_rank() {
    let cluster = Cluster::start(0, instant()).await;
    let mut servers: Vec<SimHandle> = Vec::new();
    for _ in 0..3 {
        servers.push(SimEngine::start(vllm(instant())).await.unwrap());
    }
    let mut config = SidecarConfig::new(cluster.playground.url(), servers[0].url(), "r");
    config.engine = EngineKind::Vllm;
    config.rank_urls = servers[1..].iter().map(SimHandle::url).collect();
    config.vocab_size = Some(VOCAB);
    config.accelerator = playground::accelerator("NVIDIA H200", 143_771);
    let stop = CancellationToken::new();
    let sidecar = tokio::spawn(Box::pin(Sidecar::new(config).unwrap().run(stop.clone())));
    let fleet = &cluster.playground.server().parts().fleet;
    let id = berth::ids::ReplicaId::new("r");
    eventually("three ranks are routable", async || {
        fleet
            .get(&id)
            .is_some_and(|s| s.ranks.iter().filter(|r| r.routable()).count() == 3)
    })
    .await;
    let mut ranks = BTreeSet::new();
    for t in 0..3 {
        let (key, prompt) = (format!("t{t}"), ids(t, 64));
        let first = cluster.sample(keyed(&key, &prompt, 4)).await.unwrap();
        let second = cluster.sample(keyed(&key, &prompt, 4)).await.unwrap();
        assert_eq!(home(only(&first)), home(only(&second)));
        assert_eq!(cached(only(&second)), 48);
        ranks.insert(home(only(&first)).1);
    }
    assert_eq!(ranks, BTreeSet::from([0, 1, 2]));
    for server in &servers {
        assert_eq!(server.counters().finished, 2);
        assert!(server.history().iter().all(|r| r.asked_rank == Some(0)));
    }
    // One of them is the end of the replica's start.
    servers[1].kill().await;
    eventually("it is out of routing", async || {
        let dead = request(&ids(9, 16), 1);
        fleet
            .get(&id)
            .is_none_or(|s| s.ranks.iter().all(|r| !r.routable()))
            || cluster.sample(dead).await.is_err()
    })
    .await;
    stop.cancel();
    let _ = sidecar.await;
    for server in &servers {
        server.stop().await;
    }
    cluster.stop().await;
}

/// Engines with a vocabulary of 1,000 that are registered with a larger one, and
/// no sidecar that would know better. Their servers outlive them by `linger`.
async fn liars(cluster: &Cluster, count: usize, linger: Duration) -> Vec<SimHandle> {
    let mut engines = Vec::new();
    for i in 0..count {
        let engine = SimEngine::start(SimConfig {
            vocab_size: 1000,
            linger,
            ..vllm(stepping(Duration::from_millis(1)))
        })
        .await
        .unwrap();
        cluster.register(&format!("liar{i}"), &engine).await;
        engines.push(engine);
    }
    engines
}

/// An id that the engine does not have ends it: it says so, then its port refuses.
/// The prompt is not tried on the whole fleet.
#[tokio::test]
async fn a_prompt_that_kills_engines_is_condemned_after_the_second() {
    let cluster = Cluster::start(0, instant()).await;
    let engines = liars(&cluster, 4, Duration::from_millis(200)).await;
    let deadly = request(&[1, 5000, 3], 4);
    refused(
        cluster.sample(deadly.clone()).await,
        Code::FailedPrecondition,
        "PROMPT_CONDEMNED",
    );
    let alive = || engines.iter().filter(|e| e.is_alive()).count();
    // Their servers linger for a moment, as real ones do.
    eventually("two have ended", async || alive() == 2).await;
    refused(
        cluster.sample(deadly).await,
        Code::FailedPrecondition,
        "PROMPT_CONDEMNED",
    );
    assert_eq!(alive(), 2);
    for engine in &engines {
        engine.stop().await;
    }
    cluster.stop().await;
}

/// Such a server fails whatever it is sent at once and so looks idle: it would draw
/// every new request for as long as it lingers.
#[tokio::test]
async fn a_server_that_says_its_engine_is_dead_gets_nothing_more_and_is_dead_when_it_ends() {
    let cluster = Cluster::with(0, instant(), |c| {
        // One attempt each: one that went to the dead engine would be seen.
        c.stack.max_attempts = 1;
        c.fleet.lease.interval = Duration::from_secs(60);
        c.fleet.health.first_term = Duration::from_millis(100);
    })
    .await;
    let engines = liars(&cluster, 3, Duration::from_secs(600)).await;
    refused(
        cluster.sample(request(&[1, 5000, 3], 4)).await,
        Code::Unavailable,
        "REPLICA_LOST",
    );
    let fleet = &cluster.playground.server().parts().fleet;
    let says = |r: &berth::fleet::ReplicaStatus| r.reason.contains("says that its engine is dead");
    let dead: Vec<_> = fleet.list().into_iter().filter(|r| says(r)).collect();
    assert_eq!(dead.len(), 1);
    assert_eq!(dead[0].health, berth::fleet::Health::Unhealthy);
    let dead = dead[0].facts.id.clone();
    for t in 0..30 {
        let key = format!("t{t}");
        let asked = [request(&[1, t, 3], 4), keyed(&key, &[1, t, 3], 4)];
        for asked in asked {
            let response = cluster.sample(asked).await.unwrap();
            assert_ne!(home(only(&response)).0, dead.as_str());
        }
    }
    let engine = engines
        .iter()
        .zip(0..)
        .find(|(_, i)| format!("liar{i}") == dead.as_str())
        .unwrap()
        .0;
    assert!(engine.is_alive(), "it lingers all the time");
    engine.kill().await;
    eventually("its refused port ends it", async || {
        let known = fleet.get(&dead);
        known.is_none_or(|r| r.health == berth::fleet::Health::Dead)
    })
    .await;
    for engine in &engines {
        engine.stop().await;
    }
    cluster.stop().await;
}

/// Behind vLLM as behind SGLang: asked for by name, sent to who has it, and known
/// to be gone by the next beat.
#[tokio::test]
async fn adapters_of_vllm_are_known_as_they_come_and_go() {
    let soon = Duration::from_millis(100);
    for dev_mode in [true, false] {
        let mut cluster = Cluster::with(0, instant(), |c| c.fleet.lease.interval = soon).await;
        for (id, adapters) in [("with", vec![("a", "/a")]), ("without", Vec::new())] {
            let named = |(name, path): (&str, &str)| (name.to_owned(), path.to_owned());
            let engine = SimConfig {
                adapters: Some(adapters.into_iter().map(named).collect()),
                dev_mode,
                ..vllm(instant())
            };
            cluster
                .playground
                .add_with(id, engine, |_| {})
                .await
                .unwrap();
        }
        let prompt = ids(1, 40);
        let asked = |adapter: &str| SampleRequest {
            adapter: Some(adapter.to_owned()),
            ..keyed("t", &prompt, 4)
        };
        for _ in 0..2 {
            let response = cluster.sample(asked("a")).await.unwrap();
            assert_eq!(home(only(&response)).0, "with");
        }
        cluster.engine("without").load_adapter("b", "/b");
        eventually("b is known", async || {
            let answer = cluster.sample(asked("b")).await;
            answer.is_ok_and(|response| home(only(&response)).0 == "without")
        })
        .await;
        cluster.engine("without").unload_adapter("b");
        eventually("b is gone", async || {
            cluster
                .sample(asked("b"))
                .await
                .is_err_and(|status| status.code() == Code::FailedPrecondition)
        })
        .await;
        cluster.stop().await;
    }
}

/// The registry is behind: vLLM says that there is no such model.
#[tokio::test]
async fn an_adapter_that_vllm_lost_behind_our_back_costs_one_attempt() {
    let late = Duration::from_secs(30);
    let mut cluster = Cluster::with(0, instant(), |c| c.fleet.lease.interval = late).await;
    for id in ["r0", "r1"] {
        let engine = SimConfig {
            adapters: Some(vec![("a".to_owned(), "/a".to_owned())]),
            ..vllm(instant())
        };
        cluster
            .playground
            .add_with(id, engine, |_| {})
            .await
            .unwrap();
    }
    cluster.engine("r0").unload_adapter("a");
    let mut met = 0;
    for i in 0..8 {
        let asked = SampleRequest {
            adapter: Some("a".to_owned()),
            ..request(&ids(i, 32), 4)
        };
        let response = cluster.sample(asked).await.unwrap();
        assert_eq!(home(only(&response)).0, "r1");
        let attempts = &route(only(&response)).attempts;
        if attempts.len() > 1 {
            assert_eq!(attempts[0].failure(), AttemptFailure::Adapter);
            met += 1;
        }
    }
    assert_eq!(met, 1, "known after the first");
    cluster.stop().await;
}
