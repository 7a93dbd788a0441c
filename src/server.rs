//! The control plane as one thing that is bound, runs and is stopped.
//!
//! Everything that can be wrong with the configuration or the store is found
//! before a port is bound; both ports are bound before anything is served.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, anyhow};
use futures_util::FutureExt;
use http::{HeaderName, header};
use tokio::{net::TcpListener, task::JoinHandle, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::service::Routes;
use tower::ServiceBuilder;
use tower_http::{
    catch_panic::CatchPanicLayer,
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    sensitive_headers::SetSensitiveRequestHeadersLayer,
};
use tracing::{info, warn};

use crate::{
    admin,
    api::{
        explained::{Explained, FLEET_MESSAGE, REPLICA_MESSAGE},
        fleet::FleetView,
        replica::Replicas,
        sampling::Sampling,
    },
    auth::{Files, Guard, layer::Authenticate},
    config::Config,
    engine::{
        ClientConfig,
        egress::Egress,
        http::{HttpClient, HttpConfig},
        sglang::SglangClient,
        vllm::VllmClient,
    },
    fleet::Fleet,
    keeper::Keeper,
    listen::{self, limits::Counts, request::Bounded},
    proto::{
        self, fleet_service_server::FleetServiceServer,
        replica_service_server::ReplicaServiceServer,
        sampling_service_server::SamplingServiceServer,
    },
    routing::{Router, RouterConfig},
    stack::{self, Engines, Parts, admission::Admission, deadline::TakeTimeout},
    store::{OwnerId, Store, memory::MemoryStore, sled::SledStore},
    telemetry::{self, metrics::Metrics, rpc::Observed},
};

/// How often idle pins are looked for.
const SWEEP: Duration = Duration::from_secs(5);

/// After the drain: generations that nobody waits for are told to stop, and so
/// long waited for.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A running control plane.
pub struct Server {
    grpc: SocketAddr,
    admin: SocketAddr,
    parts: Parts,
    drain: CancellationToken,
    ended: JoinHandle<anyhow::Result<()>>,
}

impl Server {
    /// Opens the store, binds both ports and serves.
    ///
    /// # Errors
    /// When a file that the configuration names is of no use, the store cannot be
    /// opened or a port cannot be bound.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let files = Files::read(&config.auth).map_err(|faults| anyhow!(faults.join("; ")))?;
        Self::start_with(config, files).await
    }

    /// As [`start`](Self::start), with the files of credentials and of TLS as they
    /// were read when the configuration was checked.
    ///
    /// # Errors
    /// When the audit log or the store cannot be opened or a port cannot be bound.
    pub async fn start_with(config: Config, files: Files) -> anyhow::Result<Self> {
        let guard = Guard::new(&config.auth, files)?;
        let store = open_store(&config)
            .await
            .context("data-dir is not usable")?;
        let grpc = bind(config.listen, "gRPC").await?;
        let admin = bind(config.admin_listen, "admin HTTP").await?;
        let (grpc_address, admin_address) = (grpc.local_addr()?, admin.local_addr()?);

        let mut egress = config.egress.clone();
        egress.own = vec![grpc_address, admin_address];
        let egress = Arc::new(egress);
        let fleet = Fleet::within(
            config.fleet,
            Arc::clone(&store),
            Arc::clone(&egress),
            guard.gate.audit().clone(),
        );
        let router = Arc::new(Router::new(RouterConfig {
            keep_changes: true,
            ..config.router
        }));
        let http = HttpClient::within(HttpConfig::default(), Arc::clone(&egress));
        let parts = Parts {
            store,
            owner: OwnerId::mint(),
            fleet,
            router,
            engines: Engines {
                sglang: Arc::new(SglangClient::new(http.clone(), ClientConfig::default())),
                vllm: Arc::new(VllmClient::new(http.clone(), ClientConfig::default())),
            },
            running: Arc::default(),
            admission: Admission::new(config.stack.admission),
            counters: Arc::default(),
            metrics: Arc::new(Metrics::new(config.measured)),
            poison: Arc::default(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        };
        // Before anything is served: nobody is routed to unasked, and no trajectory
        // moves because its replica is not back yet.
        let keeper = Keeper::new(&parts);
        let written = keeper
            .bring_back(&http)
            .await
            .context("the store's notes cannot be read")?;
        let noted = CancellationToken::new();
        let keeping = tokio::spawn(keeper.keep(written, noted.clone()));
        let drain = CancellationToken::new();
        let ended = tokio::spawn(serve(
            config,
            parts.clone(),
            (guard, egress),
            (noted, keeping),
            grpc,
            admin,
            drain.clone(),
        ));
        info!(grpc = %grpc_address, admin = %admin_address, "listening");
        Ok(Self {
            grpc: grpc_address,
            admin: admin_address,
            parts,
            drain,
            ended,
        })
    }

    /// Where the gRPC API listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    /// Where the admin HTTP listens.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// What it is made of.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// What to cancel to begin the drain.
    pub fn drain_token(&self) -> CancellationToken {
        self.drain.clone()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// What ended it, if that was no drain.
    pub async fn ended(self) -> anyhow::Result<()> {
        self.ended.await.context("the server's task failed")?
    }

    /// Drains it and waits.
    ///
    /// # Errors
    /// As [`ended`](Self::ended).
    pub async fn stop(self) -> anyhow::Result<()> {
        self.drain.cancel();
        self.ended().await
    }
}

async fn open_store(config: &Config) -> anyhow::Result<Arc<dyn Store>> {
    let Some(dir) = config.data_dir.clone() else {
        return Ok(Arc::new(MemoryStore::default()));
    };
    let options = config.store.clone();
    // Opening reads the disk: not on a thread that serves.
    let store = tokio::task::spawn_blocking(move || SledStore::open(dir, options))
        .await
        .context("opening the store failed")??;
    Ok(Arc::new(store))
}

async fn bind(address: SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} for {what}"))
}

async fn serve(
    config: Config,
    parts: Parts,
    (guard, egress): (Guard, Arc<Egress>),
    (noted, keeping): (CancellationToken, JoinHandle<()>),
    grpc: TcpListener,
    admin: TcpListener,
    drain: CancellationToken,
) -> anyhow::Result<()> {
    // Ends with this function, however it ends.
    let stop = CancellationToken::new();
    let _stop_all = stop.clone().drop_guard();
    tokio::spawn(Arc::clone(&parts.fleet).keep(stop.clone()));
    tokio::spawn(stack::trials::keep(parts.clone(), stop.clone()));
    tokio::spawn(sweep_pins(Arc::clone(&parts.router), stop.clone()));
    let counts = Arc::new(Counts::default());
    let registry = telemetry::registry(&parts, Arc::clone(&config.spans), Arc::clone(&counts));
    let page = admin::Page::new(registry, Arc::clone(&parts.store), drain.clone());
    let gate = Arc::clone(&guard.gate);
    tokio::spawn(admin::serve(
        admin,
        gate,
        page,
        config.admin_limits,
        Arc::clone(&counts),
        stop.clone(),
    ));
    guard.keep(stop.clone());

    let (health, health_service) = tonic_health::server::health_reporter();
    health
        .set_serving::<SamplingServiceServer<Sampling>>()
        .await;
    health.set_serving::<ReplicaServiceServer<Replicas>>().await;
    health.set_serving::<FleetServiceServer<FleetView>>().await;

    let stack = stack::assemble(&parts, config.stack);
    let limit = config.max_message_bytes;
    let sampling = SamplingServiceServer::new(Sampling::new(stack, parts.clone()))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit);
    let replicas = ReplicaServiceServer::new(Replicas::new(
        Arc::clone(&parts.fleet),
        egress,
        config.allow_unknown_vocabulary,
    ))
    .max_decoding_message_size(REPLICA_MESSAGE);
    let fleet_view = FleetServiceServer::new(FleetView::new(parts.clone(), drain.clone()))
        .max_decoding_message_size(FLEET_MESSAGE)
        .max_encoding_message_size(limit);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // So that grpcurl can show the details of an error.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
    };

    // Whether anybody may call it is the guard's to say.
    let routes = Routes::new(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?)
        .add_service(sampling)
        .add_service(replicas)
        .add_service(fleet_view)
        .prepare();
    let service = ServiceBuilder::new()
        // Outermost: whatever fails below is an answer, not a cut connection.
        .layer(CatchPanicLayer::custom(on_panic))
        .layer(SetSensitiveRequestHeadersLayer::new([
            header::AUTHORIZATION,
            header::COOKIE,
        ]))
        // One id for a request, in logs and in the answer; a client may bring it.
        .layer(SetRequestIdLayer::new(REQUEST_ID, MakeRequestUuid))
        .layer(PropagateRequestIdLayer::new(REQUEST_ID))
        // Outside of all that may refuse: a refusal counts too.
        .layer_fn(|inner| Observed::new(inner, Arc::clone(&parts.metrics)))
        // Nothing below is reached by a caller who may not.
        .layer(Authenticate(Arc::clone(&guard.gate)))
        // What is too large or too slow is refused to callers who may, and counted.
        .layer_fn(|inner| Bounded::new(inner, config.limits, Arc::clone(&counts)))
        // The stack keeps the deadline: see `listen`.
        .layer_fn(TakeTimeout::new)
        // Below all that counts or tells errors: those of tonic have a reason too.
        .layer_fn(Explained::new)
        .service(routes);

    let server = listen::serve(
        grpc,
        service,
        config.limits,
        guard.tls,
        counts,
        guard.gate.audit().clone(),
        drain.clone(),
    );
    tokio::pin!(server);

    tokio::select! {
        () = &mut server => {}
        () = drain.cancelled() => {
            info!(bound = ?config.drain_timeout, "draining");
            health.set_not_serving::<SamplingServiceServer<Sampling>>().await;
            if tokio::time::timeout(config.drain_timeout, &mut server).await.is_err() {
                warn!("calls are still in flight: ending them");
            }
        }
    }
    close(&parts).await;
    // What the last turns changed is noted before the store closes.
    noted.cancel();
    let _ = keeping.await;
    parts
        .store
        .close()
        .await
        .context("the store did not close well")
}

/// Generations that run on without a caller stop at their engines.
async fn close(parts: &Parts) {
    parts.closing.cancel();
    parts.tasks.close();
    let begun = Instant::now();
    if tokio::time::timeout(STOP_TIMEOUT, parts.tasks.wait())
        .await
        .is_err()
    {
        warn!(left = parts.tasks.len(), "generations did not stop in time");
    } else {
        info!(took = ?begun.elapsed(), "stopped");
    }
}

async fn sweep_pins(router: Arc<Router>, stop: CancellationToken) {
    loop {
        if tokio::time::timeout(SWEEP, stop.cancelled()).await.is_ok() {
            return;
        }
        router.sweep(Instant::now());
    }
}

fn on_panic(_: Box<dyn std::any::Any + Send>) -> http::Response<tonic::body::Body> {
    // The panic itself is in the log; what it says may hold anything.
    crate::api::status::internal().into_http()
}

/// Waits for SIGTERM or SIGINT, begins the drain, and ends the process at once
/// on the second one.
///
/// # Errors
/// When the signals cannot be listened to.
pub fn drain_on_signals(drain: CancellationToken) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        let mut next = async || {
            futures_util::future::select(term.recv().boxed(), int.recv().boxed()).await;
        };
        next().await;
        drain.cancel();
        next().await;
        warn!("second signal: ending at once");
        std::process::exit(130);
    });
    Ok(())
}
