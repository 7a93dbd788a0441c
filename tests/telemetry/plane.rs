//! `berth serve` as a process whose log is kept, with simulated engines.

use std::{
    cell::Cell,
    io::Read,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::{
    auth::client::Access,
    engine::{
        http::HttpClient,
        sim::{SimConfig, SimEngine, SimHandle},
    },
    proto::{
        GetReplicaRequest, fleet_service_client::FleetServiceClient,
        sampling_service_client::SamplingServiceClient,
    },
    sidecar::{Sidecar, SidecarConfig},
};
use http::Method;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Channel;

use crate::{
    front::Front,
    process::{Process, berth},
};

pub use crate::{
    engines::{instant, stepping},
    wait::eventually,
};

pub struct Plane {
    process: Process,
    told: Cell<bool>,
    pub url: String,
    pub admin: String,
    pub channel: Channel,
    /// How its sidecars and its operator show who they are.
    pub access: Access,
    log: Arc<Mutex<Vec<u8>>>,
    _dir: tempfile::TempDir,
}

/// An engine, the front before it, and its sidecar.
pub struct Engine {
    pub sim: SimHandle,
    pub front: Front,
    _sidecar: DropGuard,
}

impl Plane {
    pub async fn start(options: &[&str], log: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut child = berth()
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(["--admin-listen", "127.0.0.1:0", "--data-dir"])
            .arg(dir.path().join("store"))
            .args(options)
            .env("BERTH_LOG", log)
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        keep(child.stderr.take().unwrap(), &log);
        keep(child.stdout.take().unwrap(), &log);
        let process = Process(child);
        let (url, admin) = loop {
            let text = text(&log);
            if let Some((url, admin)) = address(&text, "grpc").zip(address(&text, "admin")) {
                break (url, admin);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        let channel = Channel::from_shared(url.clone()).unwrap().connect_lazy();
        Self {
            process,
            told: Cell::new(false),
            url,
            admin,
            channel,
            access: Access::default(),
            log,
            _dir: dir,
        }
    }

    /// Adds a replica and waits until it takes requests.
    pub async fn add(&self, id: &str, config: SimConfig) -> Engine {
        let sim = SimEngine::start(config).await.unwrap();
        let front = Front::start(sim.url()).await;
        let mut config = SidecarConfig::new(&self.url, front.url(), id);
        config.accelerator.ask_driver = false;
        config.access = self.access.clone();
        let stop = CancellationToken::new();
        tokio::spawn(Sidecar::new(config).unwrap().run(stop.clone()));
        let wire = self.access.wire(&self.url, |endpoint| endpoint).unwrap();
        let mut fleet = FleetServiceClient::new(wire);
        eventually("it is registered", async || {
            let replica_id = id.to_owned();
            let asked = fleet.get_replica(GetReplicaRequest { replica_id }).await;
            asked.is_ok_and(|replica| {
                let ranks = replica.into_inner().replica.unwrap().ranks;
                ranks.iter().all(|rank| rank.routable)
            })
        })
        .await;
        Engine {
            sim,
            front,
            _sidecar: stop.drop_guard(),
        }
    }

    pub fn client(&self) -> SamplingServiceClient<Channel> {
        SamplingServiceClient::new(self.channel.clone())
    }

    /// What the admin listener answers: status, type and text.
    pub async fn get(&self, path: &str, accept: Option<&str>) -> (u16, String, String) {
        let mut headers = http::HeaderMap::new();
        if let Some(accept) = accept {
            headers.insert("accept", accept.parse().unwrap());
        }
        if let Some(token) = &self.access.token_file {
            let token = std::fs::read_to_string(token).unwrap();
            headers.insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        let http = HttpClient::default();
        let reply = http
            .send(Method::GET, &self.admin, path, headers, None)
            .await
            .unwrap();
        let kind = reply.headers.get("content-type");
        let kind = kind.map_or(String::new(), |k| k.to_str().unwrap().to_owned());
        let body = reply.body.collect(16 << 20).await.unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        (reply.status.as_u16(), kind, text)
    }

    pub async fn metrics(&self) -> String {
        let (status, _, text) = self.get("/metrics", None).await;
        assert_eq!(status, 200);
        text
    }

    /// All that it has logged so far.
    pub fn log(&self) -> String {
        text(&self.log)
    }

    /// Tells it to end, once.
    pub fn drain(&self) {
        // A second signal would end it at once.
        if !self.told.replace(true) {
            self.process.signal("-TERM");
        }
    }

    /// Ends it, unless it was told to before, and gives all that it has logged.
    pub async fn stop(mut self) -> String {
        self.drain();
        assert!(self.process.ended().await.success());
        // The pipes' readers are at their ends soon.
        let mut before = usize::MAX;
        eventually("all is read", async || {
            let now = self.log.lock().unwrap().len();
            std::mem::replace(&mut before, now) == now
        })
        .await;
        self.log()
    }
}

fn keep(mut from: impl Read + Send + 'static, log: &Arc<Mutex<Vec<u8>>>) {
    let log = Arc::clone(log);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            log.lock().unwrap().extend_from_slice(&buffer[..read]);
        }
    });
}

fn text(log: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&log.lock().unwrap()).into_owned()
}

/// Where it says that it listens, in either form of its log.
fn address(log: &str, what: &str) -> Option<String> {
    let line = log.lines().find(|line| line.contains("listening"))?;
    // A line that is not whole yet has an address that is not.
    log.contains('\n').then_some(())?;
    let at = [format!("{what}="), format!("\"{what}\":\"")];
    let rest = at.iter().find_map(|at| line.split_once(&**at))?.1;
    let end = rest.find([' ', '"', ',', '}']).unwrap_or(rest.len());
    let address: std::net::SocketAddr = rest[..end].parse().ok()?;
    Some(format!("http://{address}"))
}
