//! A control plane with one simulated engine and small limits.

use std::{net::SocketAddr, time::Duration};

use berth::{
    config::Config,
    engine::sim::SimConfig,
    harness::playground::{self, Playground},
    proto::{
        SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use tonic::transport::Channel;

use crate::{wait::eventually, wire};

pub const SAMPLE: &str = "/berth.v1.SamplingService/Sample";

pub struct Plane {
    pub playground: Playground,
    pub channel: Channel,
}

impl Plane {
    /// With an engine of 50 ms a token.
    pub async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = playground::config(None);
        change(&mut config);
        let mut playground = Playground::start(config).await.unwrap();
        let engine = SimConfig {
            step: Some(Duration::from_millis(50)),
            ..SimConfig::instant()
        };
        let h100 = playground::accelerator("NVIDIA H100 80GB HBM3", 81_559);
        playground.add("r", engine, h100).await.unwrap();
        let channel = Channel::from_shared(playground.url()).unwrap();
        Self {
            channel: channel.connect_lazy(),
            playground,
        }
    }

    pub fn grpc(&self) -> SocketAddr {
        self.playground.server().grpc_address()
    }

    pub fn admin(&self) -> SocketAddr {
        self.playground.server().admin_address()
    }

    pub fn client(&self) -> SamplingServiceClient<Channel> {
        SamplingServiceClient::new(self.channel.clone())
    }

    /// It serves.
    pub async fn serves(&self) {
        self.client().sample(request(1)).await.unwrap();
    }

    pub async fn metric(&self, series: &str) -> f64 {
        wire::metric(self.admin(), series).await
    }

    /// Waits until the series has this value.
    pub async fn counts(&self, series: &str, value: f64) {
        eventually(&format!("{series} {value}"), async || {
            (self.metric(series).await - value).abs() < f64::EPSILON
        })
        .await;
    }

    /// A connection met this limit, once.
    pub async fn limited(&self, limit: &str, times: f64) {
        let series = format!("berth_connections_limited_total{{port=\"grpc\",limit=\"{limit}\"}}");
        self.counts(&series, times).await;
    }

    /// A request met this limit, so often.
    pub async fn refused(&self, limit: &str, times: f64) {
        let series = format!("berth_requests_limited_total{{limit=\"{limit}\"}}");
        self.counts(&series, times).await;
    }
}

pub fn request(tokens: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1, 2, 3] })),
        sampling: Some(Sampling {
            max_tokens: Some(tokens),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}
