//! A control plane with simulated engines, and a client.

use berth::{
    config::Config,
    engine::sim::{Dialect, SimConfig, SimHandle, tokens},
    harness::playground::{self, Playground},
    proto::{
        self, Capabilities, Rank, RegisterReplicaRequest, SampleRequest, SampleResponse,
        SampleResult, Sampling, TokenIds, fleet_service_client::FleetServiceClient,
        register_replica_request::Address, replica_service_client::ReplicaServiceClient,
        sample_request::Prompt, sampling_service_client::SamplingServiceClient,
    },
};
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt;

pub use crate::{
    engines::{instant, stepping},
    wait::eventually,
};

pub const VOCAB: u32 = 151_936;

pub struct Cluster {
    pub playground: Playground,
    pub channel: Channel,
    _dir: tempfile::TempDir,
}

/// A control plane that notices deaths soon.
pub fn quick(dir: &tempfile::TempDir) -> Config {
    playground::config(Some(dir.path().join("store")))
}

impl Cluster {
    pub async fn start(replicas: u32, engine: SimConfig) -> Self {
        Self::with(replicas, engine, |_| {}).await
    }

    pub async fn with(replicas: u32, engine: SimConfig, change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = quick(&dir);
        change(&mut config);
        let mut playground = Playground::start(config).await.unwrap();
        for i in 0..replicas {
            let h100 = playground::accelerator("NVIDIA H100 80GB HBM3", 81_559);
            playground
                .add(&format!("r{i}"), engine.clone(), h100)
                .await
                .unwrap();
        }
        let channel = Channel::from_shared(playground.url())
            .unwrap()
            .connect()
            .await
            .unwrap();
        Self {
            playground,
            channel,
            _dir: dir,
        }
    }

    /// Registers an engine beside which no sidecar is: nobody beats, and what is said
    /// of its vocabulary is not its own word.
    pub async fn register(&self, id: &str, engine: &SimHandle) {
        let config = engine.config();
        let kind = match config.dialect {
            Dialect::Sglang => proto::EngineKind::Sglang,
            Dialect::Vllm => proto::EngineKind::Vllm,
        };
        ReplicaServiceClient::new(self.channel.clone())
            .register_replica(RegisterReplicaRequest {
                replica_id: id.to_owned(),
                boot_id: "boot".to_owned(),
                address: Some(Address::Endpoint(engine.url())),
                engine: kind.into(),
                model: config.model.clone(),
                vocab_size: VOCAB,
                context_length: 16_384,
                page_size: u32::try_from(config.page_size).unwrap(),
                capabilities: Some(Capabilities {
                    incremental_streaming: config.incremental_streaming_output,
                    ..Capabilities::default()
                }),
                ranks: vec![Rank {
                    kv_capacity_tokens: 375_000,
                    ..Rank::default()
                }],
                ..RegisterReplicaRequest::default()
            })
            .await
            .unwrap();
    }

    pub fn client(&self) -> SamplingServiceClient<Channel> {
        SamplingServiceClient::new(self.channel.clone())
    }

    pub fn operator(&self) -> FleetServiceClient<Channel> {
        FleetServiceClient::new(self.channel.clone())
    }

    pub async fn sample(&self, request: SampleRequest) -> Result<SampleResponse, Status> {
        self.client()
            .sample(request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub fn engine(&self, replica: &str) -> &SimHandle {
        &self.playground.replica(replica).unwrap().engine
    }

    pub fn engines(&self) -> impl Iterator<Item = &SimHandle> {
        self.playground.replicas().iter().map(|r| &r.engine)
    }

    /// Calls of `/generate` at all engines.
    pub fn received(&self) -> u64 {
        self.engines().map(|e| e.counters().received).sum()
    }

    /// Waits until the engine has begun to run its first request.
    pub async fn one_has_started(&self, replica: &str) {
        eventually("it runs", async || {
            self.engine(replica).counters().started == 1
        })
        .await;
    }

    /// Waits until every request that the engine has seen is over there.
    pub async fn nothing_runs(&self, replica: &str) {
        eventually("the engine has stopped", async || {
            let history = self.engine(replica).history();
            history.iter().all(|r| r.ended.is_some())
        })
        .await;
    }

    pub async fn stop(self) {
        self.playground.stop().await.unwrap();
    }
}

pub fn ids(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed.wrapping_mul(7919).wrapping_add(i * 31)) % VOCAB)
        .collect()
}

/// A request for `output` tokens, past any end of sequence.
pub fn request(prompt: &[u32], output: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(Sampling {
            max_tokens: Some(output),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}

pub fn keyed(key: &str, prompt: &[u32], output: u32) -> SampleRequest {
    SampleRequest {
        cache_affinity_key: Some(key.to_owned()),
        ..request(prompt, output)
    }
}

/// What the simulated engines generate after `prompt`.
pub fn expected(prompt: &[u32], output: u32) -> Vec<u32> {
    tokens::expected(prompt, 0, output as usize, VOCAB)
}

pub fn only(response: &SampleResponse) -> &SampleResult {
    assert_eq!(response.samples.len(), 1);
    &response.samples[0]
}

pub fn route(sample: &SampleResult) -> &proto::Route {
    sample.route.as_ref().unwrap()
}

pub fn home(sample: &SampleResult) -> (String, u32) {
    let route = route(sample);
    (route.replica_id.clone(), route.rank)
}

pub fn cached(sample: &SampleResult) -> u64 {
    sample.usage.unwrap().cached_tokens
}

/// The machine-readable reason of a refusal.
pub fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info().expect("every error has an ErrorInfo");
    assert_eq!(info.domain, "berth.dev");
    info.reason.clone()
}

pub fn refused(result: Result<SampleResponse, Status>, code: Code, why: &str) -> Status {
    let status = result.expect_err("refused");
    assert_eq!(
        (status.code(), reason(&status).as_str()),
        (code, why),
        "{status}"
    );
    status
}
