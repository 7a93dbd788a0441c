//! Good traffic: samples with keys, at a steady rate whatever becomes of them.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use berth::{
    engine::sim::{SimConfig, SimEngine, SimHandle},
    proto::{
        SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;

use crate::wait::eventually;

/// Requests a second.
const RATE: u64 = 50;
const CHANNELS: usize = 4;

pub struct Good {
    clients: Vec<SamplingServiceClient<Channel>>,
    count: AtomicU64,
    over: AtomicBool,
    _engine: SimHandle,
    _sidecar: DropGuard,
}

/// In milliseconds, sorted.
pub struct Latencies(Vec<f64>);

impl Latencies {
    fn at(&self, quantile: f64) -> f64 {
        let last = self.0.len() - 1;
        self.0[(last as f64 * quantile).round() as usize]
    }

    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|quantile| self.at(quantile));
        write!(
            f,
            "{} calls, p50 {p50:.1} ms, p99 {p99:.1}, max {max:.1}",
            self.0.len()
        )
    }
}

impl Good {
    pub async fn start(to: SocketAddr) -> Self {
        let url = format!("http://{to}");
        let engine = SimEngine::start(SimConfig::instant()).await.unwrap();
        let mut config = SidecarConfig::new(&url, engine.url(), "r");
        config.accelerator.ask_driver = false;
        let stop = CancellationToken::new();
        tokio::spawn(Sidecar::new(config).unwrap().run(stop.clone()));
        let clients: Vec<_> = (0..CHANNELS)
            .map(|_| Channel::from_shared(url.clone()).unwrap().connect_lazy())
            .map(SamplingServiceClient::new)
            .collect();
        for (n, client) in clients.iter().enumerate() {
            eventually("it serves", async || {
                client
                    .clone()
                    .sample(request(n as u64, "first"))
                    .await
                    .is_ok()
            })
            .await;
        }
        Self {
            clients,
            count: AtomicU64::new(0),
            over: AtomicBool::new(false),
            _engine: engine,
            _sidecar: stop.drop_guard(),
        }
    }

    /// Whether the last run has ended.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Asks for so long. Every call must be answered.
    pub async fn run(&self, long: Duration) -> Latencies {
        self.over.store(false, Ordering::Relaxed);
        let latencies = Arc::new(Mutex::new(Vec::new()));
        let mut calls = JoinSet::new();
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / RATE as u32);
        let begun = Instant::now();
        while begun.elapsed() < long {
            ticks.tick().await;
            let n = self.count.fetch_add(1, Ordering::Relaxed);
            let mut client = self.clients[n as usize % CHANNELS].clone();
            let latencies = Arc::clone(&latencies);
            calls.spawn(async move {
                let begun = Instant::now();
                client.sample(request(n, "key")).await.unwrap();
                let took = begun.elapsed().as_secs_f64() * 1e3;
                latencies.lock().unwrap().push(took);
            });
        }
        while let Some(call) = calls.join_next().await {
            call.unwrap();
        }
        self.over.store(true, Ordering::Relaxed);
        let mut latencies = std::mem::take(&mut *latencies.lock().unwrap());
        latencies.sort_by(f64::total_cmp);
        Latencies(latencies)
    }
}

fn request(n: u64, kind: &str) -> SampleRequest {
    let ids = (0..512).map(|i| 1 + (n as u32 * 7 + i) % 100_000).collect();
    SampleRequest {
        idempotency_key: Some(format!("{kind}-{n}")),
        cache_affinity_key: Some(format!("trajectory-{}", n % 64)),
        prompt: Some(Prompt::TokenIds(TokenIds { ids })),
        sampling: Some(Sampling {
            max_tokens: Some(16),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}
