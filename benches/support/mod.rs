//! A server with four replicas of one engine each, and clients of it.

use std::time::Duration;

use berth::{
    config::Config,
    proto::{
        Capabilities, EngineKind, Rank, RegisterReplicaRequest, register_replica_request::Address,
        replica_service_client::ReplicaServiceClient,
        sampling_service_client::SamplingServiceClient,
    },
    server::Server,
};
use tonic::{Request, transport::Channel};

/// Engines behind the server.
pub const REPLICAS: usize = 4;

/// What clients show where it is asked for.
pub const TOKEN: &str = "berth_a-token-of-benchmarks-that-is-long-enough";

/// A call that shows it. Servers that know nobody do not look.
pub fn shown<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let token = format!("Bearer {TOKEN}").parse().unwrap();
    request.metadata_mut().insert("authorization", token);
    request
}

/// Starts it, and registers engines of these routes and capabilities. Nobody beats:
/// leases are long.
pub async fn serve(
    mut config: Config,
    capabilities: Capabilities,
    routes: axum::Router,
    channels: usize,
) -> (Server, Vec<SamplingServiceClient<Channel>>) {
    config.fleet.lease.interval = Duration::from_secs(60);
    let server = Server::start(config).await.unwrap();
    let url = format!("http://{}", server.grpc_address());
    for i in 0..REPLICAS {
        ReplicaServiceClient::connect(url.clone())
            .await
            .unwrap()
            .register_replica(shown(RegisterReplicaRequest {
                replica_id: format!("r{i}"),
                boot_id: "b".to_owned(),
                address: Some(Address::Endpoint(engine(routes.clone()).await)),
                engine: EngineKind::Sglang.into(),
                model: "m".to_owned(),
                vocab_size: 1000,
                context_length: 16_384,
                page_size: 1,
                capabilities: Some(capabilities),
                ranks: vec![Rank {
                    kv_capacity_tokens: 375_000,
                    ..Rank::default()
                }],
                ..RegisterReplicaRequest::default()
            }))
            .await
            .unwrap();
    }
    let mut clients = Vec::new();
    for _ in 0..channels {
        let client = SamplingServiceClient::connect(url.clone()).await.unwrap();
        clients.push(client);
    }
    (server, clients)
}

/// Serves an engine's routes on a port of their own. Returns its address.
async fn engine(routes: axum::Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}
