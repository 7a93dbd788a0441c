//! A control plane that knows its callers.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use berth::{
    auth::{
        AuthConfig,
        client::{Access, Wire, unsent},
        token::Token,
    },
    config::Config,
    engine::sim::{SimConfig, SimHandle},
    harness::playground::{self, Playground},
    proto::{
        self, SampleRequest, SampleResponse, Sampling, TokenIds,
        fleet_service_client::FleetServiceClient, replica_service_client::ReplicaServiceClient,
        sample_request::Prompt, sampling_service_client::SamplingServiceClient,
    },
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic_types::StatusExt;

pub use crate::wait::eventually;

/// Callers that every world knows: principal and the rest of its line.
const CALLERS: [(&str, &str); 5] = [
    ("trainer-a", "role=sample tenant=a"),
    ("trainer-b", "role=sample tenant=b"),
    ("sidecars", "role=replica"),
    ("ops", "role=admin"),
    ("bench", "role=sample,admin tenant=a"),
];

pub struct World {
    pub playground: Playground,
    pub dir: tempfile::TempDir,
}

impl World {
    /// The first replica's.
    pub fn engine(&self) -> &SimHandle {
        &self.playground.replica("r0").unwrap().engine
    }

    /// With this many replicas, whose sidecars call with their token.
    pub async fn start(replicas: u32, change: impl FnOnce(&mut Config)) -> Self {
        Self::with(replicas, SimConfig::instant(), |_, config| change(config)).await
    }

    pub async fn with(
        replicas: u32,
        engine: SimConfig,
        change: impl FnOnce(&Path, &mut Config),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut lines = String::new();
        for (principal, rest) in CALLERS {
            let token = Token::mint().unwrap();
            std::fs::write(dir.path().join(principal), token.expose()).unwrap();
            lines.push_str(&line(principal, rest, &token));
        }
        std::fs::write(dir.path().join("credentials"), lines).unwrap();
        let mut playground = serve(dir.path(), change).await;
        for i in 0..replicas {
            let access = token_of(dir.path(), "sidecars");
            let engine = SimConfig {
                incremental_streaming_output: true,
                ..engine.clone()
            };
            playground
                .add_with(&format!("r{i}"), engine, |sidecar| sidecar.access = access)
                .await
                .unwrap();
        }
        Self { playground, dir }
    }

    /// The same control plane, started again.
    pub async fn restart(self, change: impl FnOnce(&mut Config)) -> Self {
        self.playground.stop().await.unwrap();
        Self {
            playground: serve(self.dir.path(), |_, config| change(config)).await,
            dir: self.dir,
        }
    }

    /// What the admin port answers this principal.
    pub async fn admin_page(&self, principal: &str, path: &str) -> String {
        let token = std::fs::read_to_string(self.path(principal)).unwrap();
        let admin = self.playground.server().admin_address();
        let mut stream = TcpStream::connect(admin).await.unwrap();
        let asked = format!(
            "GET {path} HTTP/1.1\r\nhost: berth\r\nauthorization: Bearer {}\r\n\
             connection: close\r\n\r\n",
            token.trim()
        );
        stream.write_all(asked.as_bytes()).await.unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).await.unwrap();
        page
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A channel on which this principal calls; of a name that nobody has, a
    /// caller without a token.
    pub fn wire(&self, principal: &str) -> Wire {
        let mut access = token_of(self.dir.path(), principal);
        if !self.path(principal).exists() {
            access.token_file = None;
        }
        self.wire_with(&access)
    }

    pub fn wire_with(&self, access: &Access) -> Wire {
        let url = self.playground.url();
        access.wire(&url, |endpoint| endpoint).unwrap()
    }

    pub fn sampling(&self, principal: &str) -> SamplingServiceClient<Wire> {
        SamplingServiceClient::new(self.wire(principal))
    }

    pub fn fleet(&self, principal: &str) -> FleetServiceClient<Wire> {
        FleetServiceClient::new(self.wire(principal))
    }

    pub fn replicas(&self, principal: &str) -> ReplicaServiceClient<Wire> {
        ReplicaServiceClient::new(self.wire(principal))
    }

    pub async fn sample(
        &self,
        principal: &str,
        request: SampleRequest,
    ) -> Result<SampleResponse, Status> {
        let mut client = self.sampling(principal);
        client
            .sample(request)
            .await
            .map(tonic::Response::into_inner)
    }

    /// Adds lines to the file of credentials, or takes those away that hold this.
    pub fn credentials(&self, add: &str, remove: Option<&str>) {
        let path = self.path("credentials");
        let old = std::fs::read_to_string(&path).unwrap();
        let mut new: String = old
            .lines()
            .filter(|line| remove.is_none_or(|what| !line.contains(what)))
            .map(|line| format!("{line}\n"))
            .collect();
        new.push_str(add);
        replace(&path, &new);
    }

    /// The audit log.
    pub fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("audit")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Whether a line of the audit log has all of these.
    pub fn audited(&self, fields: &[(&str, &str)]) -> bool {
        self.audit()
            .iter()
            .any(|line| fields.iter().all(|(name, value)| line[*name] == *value))
    }

    pub async fn stop(self) {
        self.playground.stop().await.unwrap();
    }
}

async fn serve(dir: &Path, change: impl FnOnce(&Path, &mut Config)) -> Playground {
    let mut config = playground::config(Some(dir.join("store")));
    config.auth = AuthConfig {
        credentials: Some(dir.join("credentials")),
        audit_log: Some(dir.join("audit")),
        ..AuthConfig::default()
    };
    change(dir, &mut config);
    Playground::start(config).await.unwrap()
}

/// A line of the file of credentials.
pub fn line(principal: &str, rest: &str, token: &Token) -> String {
    format!("principal={principal} {rest} sha256={}\n", token.hash())
}

/// The authority of the server's certificate, in a world that speaks TLS.
pub const SERVER_CA: &str = "server-ca.pem";

pub fn token_of(dir: &Path, principal: &str) -> Access {
    Access {
        token_file: Some(dir.join(principal)),
        tls_ca: Some(dir.join(SERVER_CA)).filter(|path| path.exists()),
        ..Access::default()
    }
}

/// As rotators do it: nobody sees half a file.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

pub fn request(seed: u32, output: u32) -> SampleRequest {
    SampleRequest {
        prompt: Some(Prompt::TokenIds(TokenIds {
            ids: (seed + 1..seed + 65).collect(),
        })),
        sampling: Some(Sampling {
            max_tokens: Some(output),
            ignore_eos: true,
            ..Sampling::default()
        }),
        ..SampleRequest::default()
    }
}

pub fn named(idempotency_key: &str) -> SampleRequest {
    SampleRequest {
        idempotency_key: Some(idempotency_key.to_owned()),
        ..request(1, 4)
    }
}

pub fn keyed(cache_affinity_key: &str) -> SampleRequest {
    SampleRequest {
        cache_affinity_key: Some(cache_affinity_key.to_owned()),
        ..request(1, 4)
    }
}

/// The machine-readable reason of a refusal.
pub fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info().expect("every error has an ErrorInfo");
    assert_eq!(info.domain, "berth.dev");
    info.reason.clone()
}

pub fn why<T: std::fmt::Debug>(result: Result<T, Status>) -> String {
    reason(&result.expect_err("refused"))
}

pub fn finish(key: &str) -> proto::FinishTrajectoryRequest {
    proto::FinishTrajectoryRequest {
        cache_affinity_key: key.to_owned(),
        ..proto::FinishTrajectoryRequest::default()
    }
}

/// Trainers that never rest.
pub struct Load {
    stop: CancellationToken,
    trainers: Vec<Trainer>,
}

struct Trainer {
    calls: Arc<AtomicU32>,
    task: JoinHandle<Result<(), Status>>,
}

impl Load {
    pub fn start(wire: &Wire) -> Self {
        let stop = CancellationToken::new();
        let trainers = (0..8).map(|n| {
            let calls = Arc::new(AtomicU32::new(0));
            let (stop, counted) = (stop.clone(), Arc::clone(&calls));
            let mut client = SamplingServiceClient::new(wire.clone());
            let task = tokio::spawn(async move {
                while !stop.is_cancelled() {
                    match client.sample(request(n * 100, 2)).await {
                        Err(status) if unsent(&status) => continue,
                        called => called?,
                    };
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            });
            Trainer { calls, task }
        });
        Self {
            trainers: trainers.collect(),
            stop,
        }
    }

    /// Until each has made a whole call since this was asked.
    pub async fn each_goes_on(&self) {
        for Trainer { calls, task } in &self.trainers {
            let so_far = calls.load(Ordering::Relaxed);
            eventually("the load goes on", async || {
                task.is_finished() || calls.load(Ordering::Relaxed) > so_far + 1
            })
            .await;
        }
    }

    /// None of their calls has failed.
    pub async fn stop(self) {
        self.stop.cancel();
        for trainer in self.trainers {
            trainer.task.await.unwrap().unwrap();
        }
    }
}
