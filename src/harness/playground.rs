//! A whole Berth in one process: the control plane on its embedded store, and
//! simulated engines that register through real sidecars, all on loopback ports
//! of the system's choice. For the demo and for tests.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    engine::sim::{Dialect, SimConfig, SimEngine, SimHandle},
    fleet::facts::EngineKind,
    ids::ReplicaId,
    server::Server,
    sidecar::{AcceleratorConfig, Sidecar, SidecarConfig, SidecarError},
};

/// How long replicas may take to register.
const READY: Duration = Duration::from_secs(30);

/// A control plane with its replicas.
pub struct Playground {
    server: Server,
    tls: bool,
    replicas: Vec<Replica>,
}

/// One replica: an engine and its sidecar.
pub struct Replica {
    /// Its id.
    pub id: ReplicaId,
    /// The engine.
    pub engine: SimHandle,
    stop: CancellationToken,
    sidecar: JoinHandle<Result<(), SidecarError>>,
}

/// What the simulated engines say that they run on.
pub fn accelerator(name: &str, mebibytes: u64) -> AcceleratorConfig {
    AcceleratorConfig {
        name: Some(name.to_owned()),
        memory_bytes: Some(mebibytes << 20),
        count: Some(1),
        ask_driver: false,
    }
}

/// A configuration for a control plane beside others in one process: ports of
/// the system's choice; the store in `data_dir`, or in memory.
pub fn config(data_dir: Option<PathBuf>) -> Config {
    Config {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        admin_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        data_dir,
        ..Config::default()
    }
}

impl Playground {
    /// A control plane alone.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        Ok(Self {
            tls: config.auth.tls.is_some(),
            server: Server::start(config).await?,
            replicas: Vec::new(),
        })
    }

    /// The control plane.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Its gRPC address as a URL.
    pub fn url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://{}", self.server.grpc_address())
    }

    /// The replicas, in the order in which they were added.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// The replica of this id.
    pub fn replica(&self, id: &str) -> Option<&Replica> {
        self.replicas.iter().find(|r| r.id.as_str() == id)
    }

    /// Adds a replica and waits until it takes requests.
    ///
    /// # Errors
    /// When the engine or the sidecar cannot start, or it is not ready in time.
    pub async fn add(
        &mut self,
        id: &str,
        engine: SimConfig,
        accelerator: AcceleratorConfig,
    ) -> anyhow::Result<&Replica> {
        self.add_with(id, engine, |sidecar| sidecar.accelerator = accelerator)
            .await
    }

    /// The same, with a change to what its sidecar is told.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub async fn add_with(
        &mut self,
        id: &str,
        engine: SimConfig,
        change: impl FnOnce(&mut SidecarConfig),
    ) -> anyhow::Result<&Replica> {
        let engine = SimEngine::start(engine)
            .await
            .context("a simulated engine cannot start")?;
        let mut config = SidecarConfig::new(self.url(), engine.url(), id);
        config.accelerator.ask_driver = false;
        if engine.config().dialect == Dialect::Vllm {
            config.engine = EngineKind::Vllm;
            // vLLM leaves it to the model's config.json, which there is none of.
            config.vocab_size = Some(engine.config().vocab_size);
        }
        change(&mut config);
        let sidecar = Sidecar::new(config)?;
        let stop = CancellationToken::new();
        let replica = Replica {
            id: ReplicaId::new(id),
            engine,
            sidecar: tokio::spawn(sidecar.run(stop.clone())),
            stop,
        };
        self.wait_for(&replica.id).await?;
        self.replicas.push(replica);
        self.replicas.last().context("just added")
    }

    /// Waits until the replica takes requests.
    async fn wait_for(&self, id: &ReplicaId) -> anyhow::Result<()> {
        let fleet = &self.server.parts().fleet;
        let mut changes = fleet.changes();
        let deadline = Instant::now() + READY;
        loop {
            let ready = fleet
                .get(id)
                .is_some_and(|status| status.ranks.iter().all(|rank| rank.routable()));
            if ready {
                return Ok(());
            }
            match tokio::time::timeout_at(deadline, changes.changed()).await {
                Ok(changed) => changed?,
                Err(_) => bail!("replica {id} is not ready after {READY:?}"),
            }
        }
    }

    /// Ends everything: sidecars take their leave, the control plane drains.
    ///
    /// # Errors
    /// What did not end well.
    pub async fn stop(self) -> anyhow::Result<()> {
        for replica in &self.replicas {
            replica.stop.cancel();
        }
        for replica in self.replicas {
            // One that had failed before says so to those who look at it; here
            // all are only to end.
            let _ = replica.sidecar.await;
            replica.engine.stop().await;
        }
        self.server.stop().await
    }
}
