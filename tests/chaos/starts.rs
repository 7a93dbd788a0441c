//! From the start of a sidecar beside a ready engine to the first token.

use std::time::{Duration, SystemTime};

use berth::{
    engine::sim::{SimConfig, SimEngine},
    proto::{
        SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use tonic::Code;

use crate::{
    process::Serve,
    sidecar, variable,
    watcher::{operator, replicas},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sidecars_start_is_soon_followed_by_the_first_token() {
    let starts = variable("BERTH_CHAOS_STARTS", 5);
    let serve = Serve::start(&[]);
    let mut operator = operator(&serve.url);
    let mut client = SamplingServiceClient::connect(serve.url.clone())
        .await
        .unwrap();
    let request = SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1; 64] })),
        sampling: Some(Sampling {
            max_tokens: Some(1),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    };
    let mut took = Vec::new();
    for i in 0..starts {
        let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
        let id = format!("r{i}");
        assert!(client.sample(request.clone()).await.is_err());
        let begun = SystemTime::now();
        let mut sidecar = sidecar(&serve.url, &engine.url(), &id);
        let route = loop {
            match client.sample(request.clone()).await {
                Ok(response) => break response.into_inner().samples.remove(0).route.unwrap(),
                Err(status) => {
                    let nobody = [Code::Unavailable, Code::NotFound];
                    assert!(nobody.contains(&status.code()), "{status}");
                    assert!(
                        begun.elapsed().unwrap() < Duration::from_secs(60),
                        "{status}"
                    );
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        };
        let token = SystemTime::now();
        assert_eq!(route.replica_id, id);
        let shown = replicas(&mut operator).await;
        let shown = shown.iter().find(|r| r.replica_id == id).unwrap();
        assert_eq!(shown.incarnation, route.incarnation);
        let registered = SystemTime::try_from(shown.registered_at.unwrap()).unwrap();
        assert!(begun <= registered && registered <= token);
        took.push(token.duration_since(begun).unwrap());
        // It takes its leave: nobody is there for the next one.
        sidecar.signal("-TERM");
        assert!(sidecar.ended().await.success());
        engine.stop().await;
    }
    took.sort();
    println!(
        "{starts} starts of a sidecar, to the first token: median {:.0?}, slowest {:.0?}",
        took[took.len() / 2],
        took.last().unwrap()
    );
}
