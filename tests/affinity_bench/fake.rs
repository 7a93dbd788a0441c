//! A control plane and its fleet in one: a real gRPC server whose caches are
//! sets of prefixes, so that every hit can be computed by hand.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use berth::proto::{
    self as pb, fleet_service_server::FleetServiceServer, sample_request::Prompt,
    sampling_service_server::SamplingServiceServer,
};
use futures_util::stream::BoxStream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Looks at each request and its try number (1 is the first); may refuse it.
pub type Refuse = Box<dyn Fn(&pb::SampleRequest, usize) -> Option<Status> + Send + Sync>;
/// Changes a response before it is sent.
pub type Tamper = Box<dyn Fn(&mut pb::SampleResponse) + Send + Sync>;

/// How the fake behaves.
pub struct Options {
    pub replicas: Vec<pb::Replica>,
    /// `ListReplicas` calls after which replica `i` is healthy: `i * this`.
    pub slow_start: usize,
    pub refuse: Refuse,
    pub tamper: Tamper,
    /// Routes keyed requests round robin.
    pub ignores_keys: bool,
    /// Never answers a request whose idempotency key ends with this.
    pub hangs_on: Option<String>,
    /// First turns wait until this many of them are in flight.
    pub first_turns_together: usize,
    /// Replaces the list of replicas once something was sampled.
    pub replicas_after: Option<Vec<pb::Replica>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            replicas: replicas(8),
            slow_start: 0,
            refuse: Box::new(|_, _| None),
            tamper: Box::new(|_| {}),
            ignores_keys: false,
            hangs_on: None,
            first_turns_together: 1,
            replicas_after: None,
        }
    }
}

/// `n` healthy one-H100 replicas.
pub fn replicas(n: usize) -> Vec<pb::Replica> {
    (0..n)
        .map(|i| pb::Replica {
            replica_id: format!("r{i}"),
            incarnation: 1,
            health: pb::ReplicaHealth::Healthy.into(),
            endpoint: format!("http://127.0.0.1:{}", 30_000 + i),
            model: "Qwen3-8B".to_owned(),
            context_length: 16_384,
            vocab_size: 151_936,
            page_size: 1,
            capabilities: Some(pb::Capabilities {
                seed: true,
                ..Default::default()
            }),
            accelerator: Some(pb::Accelerator {
                name: "NVIDIA H100 80GB HBM3".to_owned(),
                memory_bytes: 80 << 30,
                count: 1,
            }),
            ranks: vec![pb::FleetRank {
                kv_capacity_tokens: 375_000,
                routable: true,
                ..Default::default()
            }],
            ..Default::default()
        })
        .collect()
}

/// One `Sample` as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    pub request: pb::SampleRequest,
    pub request_id: String,
    pub has_deadline: bool,
    pub tokens: Vec<u32>,
    /// Replica it was put on; unset where it was refused or replayed.
    pub replica: Option<usize>,
}

impl Seen {
    pub fn key(&self) -> &str {
        self.request.idempotency_key()
    }

    pub fn is_affinity(&self) -> bool {
        self.request.cache_affinity_key.is_some()
    }
}

#[derive(Default)]
struct Tables {
    /// Sequences whose KV a replica holds.
    caches: HashMap<usize, Vec<Vec<u32>>>,
    pins: HashMap<String, usize>,
    results: HashMap<String, pb::SampleResponse>,
    tries: HashMap<String, usize>,
    log: Vec<Seen>,
    finished: Vec<String>,
}

struct State {
    options: Options,
    tables: Mutex<Tables>,
    list_calls: AtomicUsize,
    next: AtomicU64,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    barrier: tokio::sync::Barrier,
}

/// The running server; it ends with this value.
pub struct Fake {
    pub url: String,
    state: Arc<State>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Fake {
    pub async fn start(options: Options) -> Self {
        let barrier = tokio::sync::Barrier::new(options.first_turns_together);
        let state = Arc::new(State {
            options,
            tables: Mutex::default(),
            list_calls: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            barrier,
        });
        let listener = tokio::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))
            .await
            .unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let service = Service(Arc::clone(&state));
        let server = tokio::spawn(async move {
            tonic::transport::Server::builder()
                .add_service(SamplingServiceServer::new(service.clone()))
                .add_service(FleetServiceServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self { url, state, server }
    }

    pub fn log(&self) -> Vec<Seen> {
        self.state.tables.lock().unwrap().log.clone()
    }

    pub fn finished(&self) -> Vec<String> {
        self.state.tables.lock().unwrap().finished.clone()
    }

    pub fn list_calls(&self) -> usize {
        self.state.list_calls.load(Ordering::SeqCst)
    }

    pub fn most_in_flight(&self) -> usize {
        self.state.most_in_flight.load(Ordering::SeqCst)
    }
}

#[derive(Clone)]
struct Service(Arc<State>);

impl State {
    fn route(&self, request: &pb::SampleRequest, request_id: &str, tables: &mut Tables) -> usize {
        let n = self.options.replicas.len();
        // What counts is that the request id decides.
        let random = || {
            let hash = blake3::hash(request_id.as_bytes());
            hash.as_bytes()[0] as usize % n
        };
        let next = || self.next.fetch_add(1, Ordering::SeqCst) as usize % n;
        match (&request.cache_affinity_key, request.routing_policy()) {
            (Some(key), pb::RoutingPolicy::Unspecified) if !self.options.ignores_keys => {
                let at = tables.pins.len() % n;
                *tables.pins.entry(key.clone()).or_insert(at)
            }
            (None, pb::RoutingPolicy::RoundRobin) | (Some(_), _) => next(),
            (None, pb::RoutingPolicy::LeastLoaded) => 0,
            _ => random(),
        }
    }

    /// The longest prefix that a replica holds, never the whole prompt, in
    /// whole pages.
    fn cached(&self, replica: usize, prompt: &[u32], tables: &Tables) -> usize {
        let page = self.options.replicas[replica].page_size as usize;
        let longest = tables
            .caches
            .get(&replica)
            .into_iter()
            .flatten()
            .map(|held| {
                let same = held.iter().zip(prompt).take_while(|(a, b)| a == b);
                same.count()
            })
            .max()
            .unwrap_or(0);
        longest.min(prompt.len() - 1) / page * page
    }

    fn generate(
        &self,
        request: &pb::SampleRequest,
        request_id: &str,
        prompt: &[u32],
        tables: &mut Tables,
    ) -> (usize, pb::SampleResponse) {
        let sampling = request.sampling.clone().unwrap();
        let replica = self.route(request, request_id, tables);
        let cached = self.cached(replica, prompt, tables);
        let length = match sampling.ignore_eos {
            true => sampling.max_tokens(),
            // Ends early now and then.
            false => sampling.max_tokens() - u32::try_from(prompt.len()).unwrap() % 3,
        };
        let output: Vec<u32> = (0..length).map(|i| (prompt[0] + i * 7) % 151_936).collect();

        // The KV of the last token is not computed.
        let mut held = prompt.to_vec();
        held.extend(&output[..output.len().saturating_sub(1)]);
        tables.caches.entry(replica).or_default().push(held);

        let usage = pb::Usage {
            prompt_tokens: prompt.len() as u64,
            cached_tokens: cached as u64,
            completion_tokens: output.len() as u64,
        };
        let facts = &self.options.replicas[replica];
        let response = pb::SampleResponse {
            samples: vec![pb::SampleResult {
                token_ids_le: output.iter().flat_map(|id| id.to_le_bytes()).collect(),
                stop_reason: pb::StopReason::Length.into(),
                usage: Some(usage),
                route: Some(pb::Route {
                    replica_id: facts.replica_id.clone(),
                    incarnation: facts.incarnation,
                    ..Default::default()
                }),
                ..Default::default()
            }],
            usage: Some(usage),
            ..Default::default()
        };
        (replica, response)
    }

    async fn sample(&self, call: Request<pb::SampleRequest>) -> Result<pb::SampleResponse, Status> {
        let text = |name: &str| {
            let value = call.metadata().get(name)?;
            Some(value.to_str().unwrap().to_owned())
        };
        let request_id = text("x-request-id").unwrap();
        let has_deadline = text("grpc-timeout").is_some();
        let request = call.into_inner();
        let key = request.idempotency_key().to_owned();
        let Some(Prompt::TokenIdsLe(packed)) = &request.prompt else {
            return Err(Status::invalid_argument("not packed"));
        };
        let tokens: Vec<u32> = packed
            .chunks_exact(4)
            .map(|w| u32::from_le_bytes(w.try_into().unwrap()))
            .collect();
        if self
            .options
            .hangs_on
            .as_ref()
            .is_some_and(|end| key.ends_with(end))
        {
            std::future::pending::<()>().await;
        }
        if key.ends_with("/1") {
            self.barrier.wait().await;
        }

        let mut tables = self.tables.lock().unwrap();
        let tries = tables.tries.entry(key.clone()).or_default();
        *tries += 1;
        let refused = (self.options.refuse)(&request, *tries);
        let mut seen = Seen {
            request: request.clone(),
            request_id: request_id.clone(),
            has_deadline,
            tokens,
            replica: None,
        };
        if let Some(status) = refused {
            tables.log.push(seen);
            return Err(status);
        }
        if let Some(done) = tables.results.get(&key) {
            let mut response = done.clone();
            response.replayed = true;
            tables.log.push(seen);
            return Ok(response);
        }
        let (replica, mut response) =
            self.generate(&request, &request_id, &seen.tokens, &mut tables);
        (self.options.tamper)(&mut response);
        tables.results.insert(key, response.clone());
        seen.replica = Some(replica);
        tables.log.push(seen);
        Ok(response)
    }

    fn list(&self) -> Vec<pb::Replica> {
        let calls = self.list_calls.fetch_add(1, Ordering::SeqCst);
        let sampled = !self.tables.lock().unwrap().log.is_empty();
        if let (true, Some(after)) = (sampled, &self.options.replicas_after) {
            return after.clone();
        }
        let mut replicas = self.options.replicas.clone();
        for (i, replica) in replicas.iter_mut().enumerate() {
            if calls < i * self.options.slow_start {
                replica.health = pb::ReplicaHealth::Unverified.into();
                replica.health_reason = "not probed yet".to_owned();
            }
        }
        replicas
    }
}

#[tonic::async_trait]
impl pb::sampling_service_server::SamplingService for Service {
    async fn sample(
        &self,
        request: Request<pb::SampleRequest>,
    ) -> Result<Response<pb::SampleResponse>, Status> {
        let now = self.0.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most_in_flight.fetch_max(now, Ordering::SeqCst);
        let result = self.0.sample(request).await;
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
        result.map(Response::new)
    }

    type SampleStreamStream = BoxStream<'static, Result<pb::SampleStreamResponse, Status>>;

    async fn sample_stream(
        &self,
        _: Request<pb::SampleRequest>,
    ) -> Result<Response<Self::SampleStreamStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_sample(
        &self,
        _: Request<pb::GetSampleRequest>,
    ) -> Result<Response<pb::GetSampleResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn cancel_sample(
        &self,
        _: Request<pb::CancelSampleRequest>,
    ) -> Result<Response<pb::CancelSampleResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn finish_trajectory(
        &self,
        request: Request<pb::FinishTrajectoryRequest>,
    ) -> Result<Response<pb::FinishTrajectoryResponse>, Status> {
        let key = request.into_inner().cache_affinity_key;
        let mut tables = self.0.tables.lock().unwrap();
        let unpinned = tables.pins.remove(&key).is_some();
        tables.finished.push(key);
        Ok(Response::new(pb::FinishTrajectoryResponse { unpinned }))
    }

    async fn explain_route(
        &self,
        _: Request<pb::ExplainRouteRequest>,
    ) -> Result<Response<pb::ExplainRouteResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

#[tonic::async_trait]
impl pb::fleet_service_server::FleetService for Service {
    async fn list_replicas(
        &self,
        _: Request<pb::ListReplicasRequest>,
    ) -> Result<Response<pb::ListReplicasResponse>, Status> {
        let replicas = self.0.list();
        Ok(Response::new(pb::ListReplicasResponse {
            replicas,
            ..Default::default()
        }))
    }

    async fn get_replica(
        &self,
        _: Request<pb::GetReplicaRequest>,
    ) -> Result<Response<pb::GetReplicaResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn drain_replica(
        &self,
        _: Request<pb::DrainReplicaRequest>,
    ) -> Result<Response<pb::DrainReplicaResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn resume_replica(
        &self,
        _: Request<pb::ResumeReplicaRequest>,
    ) -> Result<Response<pb::ResumeReplicaResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    type WatchFleetStream = BoxStream<'static, Result<pb::WatchFleetResponse, Status>>;

    async fn watch_fleet(
        &self,
        _: Request<pb::WatchFleetRequest>,
    ) -> Result<Response<Self::WatchFleetStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_pin(
        &self,
        _: Request<pb::GetPinRequest>,
    ) -> Result<Response<pb::GetPinResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn purge_tenant(
        &self,
        _: Request<pb::PurgeTenantRequest>,
    ) -> Result<Response<pb::PurgeTenantResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_stats(
        &self,
        _: Request<pb::GetStatsRequest>,
    ) -> Result<Response<pb::GetStatsResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

/// What a request refused for now looks like.
pub fn retry_later(code: tonic::Code, wait: Duration) -> Status {
    use tonic_types::{ErrorDetails, StatusExt};
    let mut details = ErrorDetails::with_error_info("NO_REPLICA", "berth.dev", HashMap::new());
    details.set_retry_info(Some(wait));
    Status::with_error_details(code, "no replica takes it now", details)
}

/// Cached tokens that the log's placement implies: on the replica of a turn,
/// the longest history that an earlier turn of the same trajectory left there.
pub fn expected_hits(log: &[Seen], affinity: bool) -> u64 {
    let turns: Vec<&Seen> = log
        .iter()
        .filter(|s| s.is_affinity() == affinity && s.replica.is_some())
        .collect();
    let trajectory = |s: &Seen| s.key().rsplit_once('/').unwrap().0.to_owned();
    let names: HashSet<String> = turns.iter().map(|s| trajectory(s)).collect();
    let mut hits = 0;
    for name in names {
        let of: Vec<&&Seen> = turns.iter().filter(|s| trajectory(s) == name).collect();
        for (i, turn) in of.iter().enumerate() {
            let earlier = of[..i].iter().filter(|e| e.replica == turn.replica);
            let held = earlier.map(|e| {
                let output = e.request.sampling.as_ref().unwrap().max_tokens() as usize;
                e.tokens.len() + output - 1
            });
            hits += held.max().unwrap_or(0) as u64;
        }
    }
    hits
}
