//! Trainers of every temper: patient, impatient, double, gone and back. Each
//! asks under one key until it is answered.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use berth::{
    engine::sim::tokens,
    proto::{
        CancelSampleRequest, SampleRequest, SampleResponse, Sampling, TokenIds,
        sample_request::Prompt, sample_stream_response::Event,
        sampling_service_client::SamplingServiceClient,
    },
};
use futures_util::{StreamExt, future::join_all, stream};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use crate::{Rng, history::History};

pub(crate) const VOCAB: u32 = 151_936;

/// Nobody has to wait for longer, kills and calm times included.
const ANSWERED_WITHIN: Duration = Duration::from_secs(240);

/// A trajectory ends at this many tokens.
const LONGEST: usize = 600;

/// How a key is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Temper {
    Patient,
    /// Its calls have short deadlines.
    Impatient,
    /// Its calls are dropped midway.
    Leaving,
    /// Asks from several places at once.
    Doubled,
    Streaming,
    /// Cancels by key, and then wants it after all.
    Cancelling,
}

/// One key and what is asked under it.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) key: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) samples: u32,
    output: u32,
    seed: Option<u64>,
    affinity: Option<String>,
    temper: Temper,
}

impl Asked {
    fn request(&self) -> SampleRequest {
        SampleRequest {
            idempotency_key: Some(self.key.clone()),
            cache_affinity_key: self.affinity.clone(),
            prompt: Some(Prompt::TokenIds(TokenIds {
                ids: self.prompt.clone(),
            })),
            sampling: Some(Sampling {
                max_tokens: Some(self.output),
                ignore_eos: true,
                seed: self.seed,
                ..Sampling::default()
            }),
            num_samples: Some(self.samples),
            ..SampleRequest::default()
        }
    }

    /// A long one that is cancelled first.
    pub(crate) fn cancelled(output: u32) -> Self {
        Self {
            key: "cancelled".to_owned(),
            prompt: vec![1, 2, 3],
            samples: 1,
            output,
            seed: None,
            affinity: None,
            temper: Temper::Cancelling,
        }
    }

    pub(crate) fn may_be_cancelled(&self) -> bool {
        self.temper == Temper::Cancelling
    }

    pub(crate) fn expected(&self, sample: u32) -> Vec<u32> {
        let seed = self.seed.map_or(0, |seed| seed + u64::from(sample));
        tokens::expected(&self.prompt, seed, self.output as usize, VOCAB)
    }
}

#[derive(Clone)]
struct Client {
    stub: SamplingServiceClient<Channel>,
    history: Arc<History>,
}

impl Client {
    fn new(url: &str, history: &Arc<History>) -> Self {
        let channel = Endpoint::from_shared(url.to_owned())
            .unwrap()
            .connect_timeout(Duration::from_secs(1))
            .tcp_nodelay(true)
            .connect_lazy();
        Self {
            stub: SamplingServiceClient::new(channel),
            history: Arc::clone(history),
        }
    }

    /// Until it is answered.
    async fn ask(&self, asked: &Asked, rng: &mut Rng, temper: Temper) -> SampleResponse {
        let begun = Instant::now();
        let mut cancels = 3;
        loop {
            let result = match temper {
                Temper::Patient | Temper::Doubled => self.once(asked, None).await,
                Temper::Impatient => {
                    let limit = Duration::from_millis(50 + rng.below(600));
                    self.once(asked, Some(limit)).await
                }
                Temper::Leaving => {
                    let limit = Duration::from_millis(10 + rng.below(600));
                    timeout(limit, self.once(asked, None))
                        .await
                        .unwrap_or_else(|_| Err(Status::cancelled("left")))
                }
                Temper::Streaming => self.streamed(asked).await,
                Temper::Cancelling if cancels > 0 => {
                    cancels -= 1;
                    let soon = Duration::from_millis(rng.below(150));
                    let (result, ()) =
                        tokio::join!(self.once(asked, None), self.cancel(asked, soon));
                    result
                }
                Temper::Cancelling => self.once(asked, None).await,
            };
            let status = match result {
                Ok(response) => {
                    self.history.answered(asked, &response);
                    return response;
                }
                Err(status) => {
                    self.history.refused(asked, &status);
                    status
                }
            };
            if begun.elapsed() > ANSWERED_WITHIN {
                self.history
                    .fault(format!("{}: never answered, at last {status}", asked.key));
                return pending_forever().await;
            }
            sleep(Duration::from_millis(20 + rng.below(60))).await;
        }
    }

    async fn once(&self, asked: &Asked, limit: Option<Duration>) -> Result<SampleResponse, Status> {
        let mut request = tonic::Request::new(asked.request());
        if let Some(limit) = limit {
            request.set_timeout(limit);
        }
        let answer = self.stub.clone().sample(request).await?;
        Ok(answer.into_inner())
    }

    async fn cancel(&self, asked: &Asked, soon: Duration) {
        sleep(soon).await;
        let cancel = CancelSampleRequest {
            idempotency_key: asked.key.clone(),
        };
        // Whatever comes of it: the key is asked for again.
        let _ = self.stub.clone().cancel_sample(cancel).await;
    }

    async fn streamed(&self, asked: &Asked) -> Result<SampleResponse, Status> {
        let answer = self.stub.clone().sample_stream(asked.request()).await?;
        let mut events = answer.into_inner();
        while let Some(message) = events.message().await? {
            if let Some(Event::Final(response)) = message.event {
                return Ok(response);
            }
        }
        Err(Status::unknown("the stream ended without its last message"))
    }
}

async fn pending_forever() -> SampleResponse {
    std::future::pending().await
}

/// Asks for it, cancels it as soon as an engine has it, and asks until it is
/// answered.
pub(crate) async fn cancel_once(url: String, history: Arc<History>, asked: Asked) {
    let client = Client::new(&url, &history);
    loop {
        let (result, ()) = tokio::join!(
            client.once(&asked, None),
            client.cancel(&asked, Duration::from_millis(50))
        );
        match result {
            Ok(response) => return history.answered(&asked, &response),
            Err(status) => history.refused(&asked, &status),
        }
        if history.was_cancelled() {
            break;
        }
        sleep(Duration::from_millis(20)).await;
    }
    client.ask(&asked, &mut Rng(1), Temper::Patient).await;
}

pub(crate) struct Clients {
    history: Arc<History>,
    url: String,
    over: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
    auditor: JoinHandle<()>,
}

impl Clients {
    pub(crate) fn start(url: &str, workers: u64, history: Arc<History>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let next = Arc::new(AtomicU64::new(0));
        let workers = (0..workers)
            .map(|number| {
                let worker = Worker {
                    number,
                    client: Client::new(url, &history),
                    rng: Rng(0xc11e_0000 + number),
                    next: Arc::clone(&next),
                    over: Arc::clone(&over),
                    trajectory: 0,
                    context: Vec::new(),
                };
                tokio::spawn(worker.run())
            })
            .collect();
        let auditor = tokio::spawn(audit(
            Client::new(url, &history),
            Arc::clone(&history),
            Arc::clone(&over),
        ));
        Self {
            history,
            url: url.to_owned(),
            over,
            workers,
            auditor,
        }
    }

    /// No new keys; those begun are answered.
    pub(crate) async fn finish(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let all = join_all(self.workers.drain(..));
        match timeout(ANSWERED_WITHIN, all).await {
            Ok(ended) => ended.into_iter().for_each(|worker| worker.unwrap()),
            Err(_) => self
                .history
                .fault("some keys are not answered in the end".to_owned()),
        }
        timeout(ANSWERED_WITHIN, &mut self.auditor)
            .await
            .unwrap()
            .unwrap();
    }

    /// Every key once more.
    pub(crate) async fn ask_all_again(&self) -> usize {
        let client = Client::new(&self.url, &self.history);
        let all = self.history.all();
        let count = all.len();
        stream::iter(all)
            .for_each_concurrent(16, |asked| {
                let client = client.clone();
                async move {
                    let mut rng = Rng(1);
                    let response = client.ask(&asked, &mut rng, Temper::Patient).await;
                    client.history.must_be_replayed(&asked, &response);
                }
            })
            .await;
        count
    }
}

/// Asks again for what was answered some time ago.
async fn audit(client: Client, history: Arc<History>, over: Arc<AtomicBool>) {
    let mut rng = Rng(0xa0d1);
    while !over.load(Ordering::Relaxed) {
        if let Some(asked) = history.any(&mut rng) {
            let response = client.ask(&asked, &mut rng, Temper::Patient).await;
            history.must_be_replayed(&asked, &response);
        }
        sleep(Duration::from_millis(30)).await;
    }
}

struct Worker {
    number: u64,
    client: Client,
    rng: Rng,
    next: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    trajectory: u64,
    context: Vec<u32>,
}

impl Worker {
    async fn run(mut self) {
        while !self.over.load(Ordering::Relaxed) {
            let asked = self.think();
            let times = match asked.temper {
                Temper::Doubled => 3,
                _ => 1,
            };
            let client = self.client.clone();
            let calls = (0..times).map(|_| {
                let (client, asked) = (client.clone(), asked.clone());
                let mut rng = Rng(self.rng.next() | 1);
                async move { client.ask(&asked, &mut rng, asked.temper).await }
            });
            let answers = join_all(calls).await;
            if asked.affinity.is_some()
                && let Some(sample) = answers[0].samples.first()
            {
                self.context.clone_from(&asked.prompt);
                self.context.extend_from_slice(&sample.token_ids);
            }
        }
    }

    /// The next key. No two have the same prompt.
    fn think(&mut self) -> Asked {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let unique = [(number >> 16) as u32, number as u32 & 0xffff];
        let affinity = self.number.is_multiple_of(2);
        if self.context.len() > LONGEST {
            self.context.clear();
            self.trajectory += 1;
        }
        let mut prompt = if affinity {
            self.context.clone()
        } else {
            Vec::new()
        };
        prompt.extend(unique);
        prompt.extend((0..8 + self.rng.below(40)).map(|_| self.rng.below(u64::from(VOCAB)) as u32));
        let samples = 1 + u32::from(self.rng.below(4) == 0);
        let temper = match self.rng.below(10) {
            0 => Temper::Impatient,
            1 => Temper::Leaving,
            2 => Temper::Doubled,
            3 => Temper::Streaming,
            4 => Temper::Cancelling,
            _ => Temper::Patient,
        };
        Asked {
            key: format!("key-{number}"),
            prompt,
            samples,
            output: match self.rng.below(12) {
                // Longer than a second: a copy of it would be seen.
                0 => 200,
                _ if temper == Temper::Cancelling => 200,
                _ => 4 + self.rng.below(40) as u32,
            },
            seed: (samples > 1).then_some(number),
            affinity: affinity.then(|| format!("t{}-{}", self.number, self.trajectory)),
            temper,
        }
    }
}
