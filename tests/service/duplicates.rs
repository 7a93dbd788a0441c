//! One key, one generation.

use std::time::Duration;

use berth::proto::{
    CancelSampleRequest, GenerationState, GetSampleRequest, SampleRequest, sample_request::Prompt,
    sampling_service_client::SamplingServiceClient,
};
use futures_util::future::join_all;
use tonic::Code;

use crate::cluster::{
    Cluster, expected, ids, instant, keyed, only, reason, refused, request, stepping,
};

fn once(key: &str, prompt: &[u32], output: u32) -> SampleRequest {
    SampleRequest {
        idempotency_key: Some(key.to_owned()),
        ..request(prompt, output)
    }
}

#[tokio::test]
async fn a_retry_is_replayed_to_the_byte_and_other_parameters_are_refused() {
    let cluster = Cluster::start(1, instant()).await;
    let prompt = ids(1, 64);
    let first = cluster.sample(once("k", &prompt, 8)).await.unwrap();
    let mut packed = once("k", &prompt, 8);
    // The other encoding of the prompt is the same request.
    packed.prompt = Some(Prompt::TokenIdsLe(
        prompt
            .iter()
            .flat_map(|t| t.to_le_bytes())
            .collect::<Vec<_>>()
            .into(),
    ));
    let again = cluster.sample(packed).await.unwrap();
    assert!(!first.replayed && again.replayed);
    assert_eq!(first.samples, again.samples);
    assert_eq!(first.produced_at, again.produced_at);
    assert_eq!(cluster.received(), 1);

    let other = once("k", &prompt, 9);
    let status = refused(
        cluster.sample(other).await,
        Code::AlreadyExists,
        "IDEMPOTENCY_KEY_REUSED",
    );
    assert!(
        !status.message().contains("8"),
        "nothing of the first is told"
    );
    assert_eq!(cluster.received(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn duplicates_in_flight_join_one_generation() {
    let cluster = Cluster::start(2, stepping(Duration::from_millis(2))).await;
    let prompt = ids(1, 64);
    let all = join_all((0..32).map(|_| cluster.sample(once("k", &prompt, 100)))).await;
    for response in &all {
        let response = response.as_ref().unwrap();
        assert_eq!(only(response).token_ids, expected(&prompt, 100));
    }
    assert_eq!(cluster.received(), 1);
    let different = join_all([
        cluster.sample(once("m", &prompt, 100)),
        cluster.sample(once("m", &prompt, 101)),
    ])
    .await;
    assert_eq!(different.iter().filter(|r| r.is_ok()).count(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn joiners_are_bounded_with_a_clear_refusal() {
    let cluster = Cluster::with(1, stepping(Duration::from_millis(5)), |c| {
        c.stack.max_followers = 4;
    })
    .await;
    let prompt = ids(1, 64);
    let all = join_all((0..6).map(|_| cluster.sample(once("k", &prompt, 100)))).await;
    let refusals: Vec<_> = all.iter().filter_map(|r| r.as_ref().err()).collect();
    assert_eq!(refusals.len(), 2);
    for status in refusals {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(reason(status), "TOO_MANY_WAITERS");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn each_caller_has_its_own_deadline_and_a_key_outlives_it() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(5))).await;
    let prompt = ids(1, 64);
    let mut hasty = tonic::Request::new(once("k", &prompt, 100));
    hasty.set_timeout(Duration::from_millis(100));
    let mut client = cluster.client();
    let (hasty, patient) = tokio::join!(
        client.sample(hasty),
        cluster.sample(once("k", &prompt, 100))
    );
    let status = hasty.unwrap_err();
    // The client's own timer and the server's run side by side; the server's
    // word, if it comes first, is DEADLINE_EXCEEDED as well.
    assert!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status}"
    );
    assert_eq!(only(&patient.unwrap()).token_ids, expected(&prompt, 100));
    assert_eq!(cluster.received(), 1);
    cluster.stop().await;
}

/// The server's own word, heard by a client that does not enforce it itself.
#[tokio::test]
async fn an_expired_deadline_is_deadline_exceeded_and_reaches_the_engine() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(20))).await;
    let mut late = tonic::Request::new(request(&ids(1, 64), 2000));
    late.metadata_mut()
        .insert("grpc-timeout", "150m".parse().unwrap());
    // Not tonic's channel, which would enforce the header itself.
    let http = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .http2_only(true)
        .build_http();
    let origin = cluster.playground.url().parse().unwrap();
    let mut client = SamplingServiceClient::with_origin(http, origin);
    let status = client.sample(late).await.unwrap_err();
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::DeadlineExceeded, "DEADLINE")
    );
    cluster.nothing_runs("r0").await;
    assert!(cluster.engine("r0").counters().aborts_received >= 1);
    cluster.stop().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_without_a_key_stops_the_engine_at_once() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(20))).await;
    let call = {
        let mut client = cluster.client();
        tokio::spawn(async move { client.sample(request(&ids(1, 64), 2000)).await })
    };
    cluster.one_has_started("r0").await;
    call.abort();
    cluster.nothing_runs("r0").await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_with_a_key_is_waited_for() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(3))).await;
    let prompt = ids(1, 64);
    let call = {
        let mut client = cluster.client();
        let request = once("k", &prompt, 150);
        tokio::spawn(async move { client.sample(request).await })
    };
    cluster.one_has_started("r0").await;
    call.abort();
    let retry = cluster.sample(once("k", &prompt, 150)).await.unwrap();
    assert_eq!(only(&retry).token_ids, expected(&prompt, 150));
    assert_eq!(cluster.received(), 1);
    cluster.stop().await;
}

#[tokio::test]
async fn after_the_grace_the_engine_is_stopped_and_a_retry_runs_anew_never_beside() {
    let cluster = Cluster::with(1, stepping(Duration::from_millis(20)), |c| {
        c.stack.grace = Duration::from_millis(100);
    })
    .await;
    let prompt = ids(1, 64);
    let call = {
        let mut client = cluster.client();
        let request = once("k", &prompt, 20);
        tokio::spawn(async move { client.sample(request).await })
    };
    cluster.one_has_started("r0").await;
    call.abort();
    cluster.nothing_runs("r0").await;
    let retry = cluster.sample(once("k", &prompt, 20)).await.unwrap();
    assert_eq!(only(&retry).token_ids, expected(&prompt, 20));
    let history = cluster.engine("r0").history();
    assert_eq!(history.len(), 2);
    assert!(history[0].overlap(&history[1]).is_none());
    cluster.stop().await;
}

#[tokio::test]
async fn a_result_can_be_fetched_and_a_run_cancelled_by_key() {
    let cluster = Cluster::start(1, stepping(Duration::from_millis(10))).await;
    let mut client = cluster.client();
    let get = |key: &str| GetSampleRequest {
        idempotency_key: key.to_owned(),
        ..GetSampleRequest::default()
    };
    let status = client.get_sample(get("k")).await.unwrap_err();
    assert_eq!(reason(&status), "KEY_NOT_FOUND");

    let prompt = ids(1, 64);
    let run = tokio::spawn({
        let mut client = cluster.client();
        let request = once("k", &prompt, 1000);
        async move { client.sample(request).await }
    });
    cluster.one_has_started("r0").await;
    let running = client.get_sample(get("k")).await.unwrap().into_inner();
    assert_eq!(running.state(), GenerationState::Running);
    assert_eq!((running.samples_done, running.num_samples), (0, 1));

    let cancel = CancelSampleRequest {
        idempotency_key: "k".to_owned(),
    };
    let cancelled = client
        .cancel_sample(cancel.clone())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(cancelled.state(), GenerationState::Running);
    assert_eq!(cancelled.attempts_aborted, 1);
    let status = run.await.unwrap().unwrap_err();
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (Code::Cancelled, "CANCELLED")
    );
    cluster.nothing_runs("r0").await;

    let short = cluster.sample(once("k2", &prompt, 4)).await.unwrap();
    let done = client.get_sample(get("k2")).await.unwrap().into_inner();
    assert_eq!(done.state(), GenerationState::Done);
    let stored = done.response.unwrap();
    assert!(stored.replayed);
    assert_eq!(stored.samples, short.samples);
    let cancel = CancelSampleRequest {
        idempotency_key: "k2".to_owned(),
    };
    let kept = client.cancel_sample(cancel).await.unwrap().into_inner();
    assert_eq!(kept.state(), GenerationState::Done);
    cluster.stop().await;
}

/// A finished result is replayed even when the fleet is gone.
#[tokio::test]
async fn a_replay_needs_no_fleet() {
    let cluster = Cluster::start(1, instant()).await;
    let mut asked = keyed("t", &ids(1, 64), 8);
    asked.idempotency_key = Some("k".to_owned());
    let first = cluster.sample(asked.clone()).await.unwrap();
    cluster.engine("r0").kill().await;
    let other = request(&ids(2, 8), 1);
    assert!(cluster.sample(other).await.is_err());
    let again = cluster.sample(asked).await.unwrap();
    assert!(again.replayed);
    assert_eq!(first.samples, again.samples);
    cluster.stop().await;
}

/// What depends on the fleet is never stored as a failure.
#[tokio::test]
async fn a_refusal_for_want_of_a_replica_leaves_the_key_free() {
    let mut cluster = Cluster::start(0, instant()).await;
    let asked = once("k", &ids(1, 64), 8);
    refused(
        cluster.sample(asked.clone()).await,
        Code::Unavailable,
        "NO_REPLICA",
    );
    let h100 = berth::harness::playground::accelerator("NVIDIA H100 80GB HBM3", 81_559);
    cluster
        .playground
        .add("late", instant(), h100)
        .await
        .unwrap();
    assert!(!cluster.sample(asked).await.unwrap().replayed);
    cluster.stop().await;
}
