//! A control plane that remembers what sidecars say and answers as a test
//! wants it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::proto::{
    DeregisterReplicaRequest, DeregisterReplicaResponse, Directive, HeartbeatRequest,
    HeartbeatResponse, RegisterReplicaRequest, RegisterReplicaResponse,
    replica_service_server::{ReplicaService, ReplicaServiceServer},
};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::{LONG, Port};

#[derive(Clone, Debug)]
pub enum Said {
    Register(Box<RegisterReplicaRequest>),
    Beat(HeartbeatRequest),
    Leave(DeregisterReplicaRequest),
}

#[derive(Default)]
struct Inner {
    said: Vec<Said>,
    /// By (replica, boot).
    given: HashMap<(String, String), u64>,
    /// Incarnations that beats are taken of.
    live: HashMap<String, u64>,
    directive: Directive,
    in_flight: u64,
    refuse: Option<Status>,
    beats_refused: Option<Status>,
}

#[derive(Clone)]
pub struct FakeControl {
    inner: Arc<Mutex<Inner>>,
    news: Arc<watch::Sender<u64>>,
    port: Arc<Port>,
    /// A runtime of its own, so that its end closes every connection.
    serving: Arc<Mutex<Option<Runtime>>>,
}

impl FakeControl {
    pub async fn start() -> Self {
        let control = Self {
            inner: Arc::default(),
            news: Arc::new(watch::Sender::new(0)),
            port: Arc::new(Port::reserve()),
            serving: Arc::default(),
        };
        control.listen().await;
        control
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    pub async fn listen(&self) {
        let listener = self.port.listen().await.into_std().unwrap();
        let service = ReplicaServiceServer::new(self.clone());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        *self.serving.lock().unwrap() = Some(runtime);
    }

    /// Its port refuses; its connections are closed.
    pub fn stop(&self) {
        let runtime = self.serving.lock().unwrap().take();
        runtime.unwrap().shutdown_background();
    }

    /// As after a restart: nothing is known.
    pub fn forget(&self) {
        self.inner.lock().unwrap().live.clear();
    }

    /// A newer start is registered by somebody else.
    pub fn supersede(&self, replica: &str) {
        *self.inner.lock().unwrap().live.get_mut(replica).unwrap() += 1;
    }

    pub fn direct(&self, directive: Directive) {
        self.inner.lock().unwrap().directive = directive;
    }

    /// What beats are told to be on its way or running.
    pub fn in_flight(&self, samples: u64) {
        self.inner.lock().unwrap().in_flight = samples;
    }

    pub fn refuse_registrations(&self, with: Option<Status>) {
        self.inner.lock().unwrap().refuse = with;
    }

    pub fn refuse_beats(&self, with: Option<Status>) {
        self.inner.lock().unwrap().beats_refused = with;
    }

    pub fn said(&self) -> Vec<Said> {
        self.inner.lock().unwrap().said.clone()
    }

    pub fn clear(&self) {
        self.inner.lock().unwrap().said.clear();
    }

    pub fn registrations(&self) -> Vec<RegisterReplicaRequest> {
        self.said()
            .into_iter()
            .filter_map(|said| match said {
                Said::Register(request) => Some(*request),
                _ => None,
            })
            .collect()
    }

    pub fn beats(&self) -> Vec<HeartbeatRequest> {
        self.said()
            .into_iter()
            .filter_map(|said| match said {
                Said::Beat(request) => Some(request),
                _ => None,
            })
            .collect()
    }

    /// Waits until what was said satisfies `wanted`.
    pub async fn hears(&self, what: &str, wanted: impl Fn(&Self) -> bool) {
        let mut news = self.news.subscribe();
        let waited = tokio::time::timeout(LONG, async {
            while !wanted(self) {
                news.changed().await.unwrap();
            }
        });
        if waited.await.is_err() {
            panic!("never heard {what}: {:#?}", self.said());
        }
    }

    /// Waits for a registration; the first that came.
    pub async fn hears_registration(&self) -> RegisterReplicaRequest {
        self.hears("a registration", |control| {
            !control.registrations().is_empty()
        })
        .await;
        self.registrations().remove(0)
    }

    /// Waits for a beat like this among those still to come.
    pub async fn hears_beat(&self, what: &str, wanted: impl Fn(&HeartbeatRequest) -> bool) {
        self.clear();
        self.hears(what, |control| control.beats().iter().any(&wanted))
            .await;
    }

    fn note(&self, said: Said) {
        self.inner.lock().unwrap().said.push(said);
        self.news.send_modify(|n| *n += 1);
    }
}

#[tonic::async_trait]
impl ReplicaService for FakeControl {
    async fn register_replica(
        &self,
        request: Request<RegisterReplicaRequest>,
    ) -> Result<Response<RegisterReplicaResponse>, Status> {
        let request = request.into_inner();
        let answer = {
            let mut inner = self.inner.lock().unwrap();
            match &inner.refuse {
                Some(status) => Err(status.clone()),
                None => {
                    let key = (request.replica_id.clone(), request.boot_id.clone());
                    let next = inner
                        .given
                        .iter()
                        .filter(|((replica, _), _)| *replica == request.replica_id)
                        .map(|(_, n)| *n)
                        .max()
                        .unwrap_or(0)
                        + 1;
                    let incarnation = *inner.given.entry(key).or_insert(next);
                    inner.live.insert(request.replica_id.clone(), incarnation);
                    if inner.directive == Directive::Reregister {
                        inner.directive = Directive::Continue;
                    }
                    Ok(incarnation)
                }
            }
        };
        self.note(Said::Register(Box::new(request)));
        let beat = Duration::from_millis(40);
        Ok(Response::new(RegisterReplicaResponse {
            incarnation: answer?,
            lease_ttl: Some((beat * 6).try_into().unwrap()),
            heartbeat_interval: Some(beat.try_into().unwrap()),
            epoch: 1,
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let request = request.into_inner();
        let answer = {
            let inner = self.inner.lock().unwrap();
            match (&inner.beats_refused, inner.live.get(&request.replica_id)) {
                (Some(status), _) => Err(status.clone()),
                (None, None) => Err(Status::not_found("register again")),
                (None, Some(live)) if *live != request.incarnation => {
                    Err(Status::failed_precondition("stale"))
                }
                (None, Some(_)) => Ok((inner.directive, inner.in_flight)),
            }
        };
        self.note(Said::Beat(request));
        let (directive, in_flight) = answer?;
        Ok(Response::new(HeartbeatResponse {
            directive: directive.into(),
            in_flight,
        }))
    }

    async fn deregister_replica(
        &self,
        request: Request<DeregisterReplicaRequest>,
    ) -> Result<Response<DeregisterReplicaResponse>, Status> {
        self.note(Said::Leave(request.into_inner()));
        Ok(Response::new(DeregisterReplicaResponse {}))
    }
}
