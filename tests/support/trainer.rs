//! A trainer that runs one trajectory and does not give up.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::time::{Duration, SystemTime};

use berth::{
    engine::sim::tokens::Rolling,
    proto::{
        Attempt, RouteReason, SampleRequest, Sampling, TokenIds, sample_request::Prompt,
        sampling_service_client::SamplingServiceClient,
    },
};
use tonic::{Code, transport::Channel};

const PROMPT: u32 = 600;
const TOKENS: u32 = 24;

/// One turn as its trainer saw it.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Of the trajectory.
    pub(crate) key: String,
    /// When it was first asked for.
    pub(crate) began: SystemTime,
    /// When it was answered.
    pub(crate) ended: SystemTime,
    /// Calls that failed before.
    pub(crate) failed_calls: u64,
    /// As simulated engines hash prompts.
    pub(crate) prompt_hash: u64,
    pub(crate) replica: String,
    pub(crate) incarnation: u64,
    pub(crate) rank: u32,
    pub(crate) reason: RouteReason,
    pub(crate) attempts: Vec<Attempt>,
}

/// What trainers saw.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) turns: u64,
    pub(crate) failed_calls: u64,
    pub(crate) reusable: u64,
    pub(crate) cached: u64,
    pub(crate) moved: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.failed_calls += other.failed_calls;
        self.reusable += other.reusable;
        self.cached += other.cached;
        self.moved += other.moved;
    }
}

pub(crate) struct Trainer {
    client: SamplingServiceClient<Channel>,
    n: usize,
    keyed: bool,
    history: Vec<u32>,
    home: String,
    last: String,
    tally: Tally,
    patience: Duration,
    quiet: bool,
    turns: Vec<Turn>,
}

impl Trainer {
    pub(crate) fn new(url: &str, n: usize, keyed: bool) -> Self {
        let channel = Channel::from_shared(url.to_owned()).unwrap().connect_lazy();
        // No two share a prefix.
        let start = 1 + 700 * (n as u32 % 200) + n as u32 / 200;
        Self {
            client: SamplingServiceClient::new(channel),
            n,
            keyed,
            history: (start..start + PROMPT).collect(),
            home: String::new(),
            last: String::new(),
            tally: Tally::default(),
            patience: Duration::from_secs(20),
            quiet: false,
            turns: Vec::new(),
        }
    }

    /// A call is given up after so long, and made again.
    pub(crate) fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Nothing is printed where it moves.
    pub(crate) fn quiet(self) -> Self {
        Self {
            quiet: true,
            ..self
        }
    }

    /// All turns so far.
    pub(crate) fn turns(&self) -> &[Turn] {
        &self.turns
    }

    pub(crate) fn home(&self) -> &str {
        &self.home
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    pub(crate) async fn run(mut self, turns: u32) -> Tally {
        for _ in 0..turns {
            self.turn().await;
        }
        self.tally
    }

    /// One turn, asked for until it is answered. Returns the attempts that the
    /// answer took.
    pub(crate) async fn turn(&mut self) -> usize {
        let turn = self.tally.turns;
        let request = SampleRequest {
            idempotency_key: self.keyed.then(|| format!("t{}-{turn}", self.n)),
            cache_affinity_key: Some(format!("t{}", self.n)),
            prompt: Some(Prompt::TokenIds(TokenIds {
                ids: self.history.clone(),
            })),
            sampling: Some(Sampling {
                max_tokens: Some(TOKENS),
                ignore_eos: true,
                ..Sampling::default()
            }),
            ..SampleRequest::default()
        };
        let (began, failed_before) = (SystemTime::now(), self.tally.failed_calls);
        let mut tries = 0;
        let response = loop {
            let mut call = tonic::Request::new(request.clone());
            call.set_timeout(self.patience);
            match self.client.sample(call).await {
                Ok(response) => break response.into_inner(),
                Err(status) => {
                    let passing = [
                        Code::Unavailable,
                        Code::Unknown,
                        Code::Cancelled,
                        Code::DeadlineExceeded,
                    ];
                    assert!(passing.contains(&status.code()), "{status}");
                    self.tally.failed_calls += 1;
                    tries += 1;
                    assert!(tries < 400, "{status}");
                    tokio::time::sleep(Duration::from_millis(25)).await;
                }
            }
        };
        let sample = &response.samples[0];
        let route = sample.route.as_ref().unwrap();
        let home = format!("{}/{}", route.replica_id, route.rank);
        if turn > 0 {
            if home != self.home {
                self.tally.moved += 1;
                if !self.quiet {
                    let (n, from, why) = (self.n, &self.home, route.reason());
                    println!(
                        "trajectory {n}: turn {turn} went from {from} to {home}: {why:?} {:?} prev {:?} replayed {}",
                        route.attempts, self.last, response.replayed
                    );
                }
            }
            // All but the last generated token of the turn before, whose KV nobody
            // has computed yet.
            self.tally.reusable += self.history.len() as u64 - 1;
            let usage = sample.usage.as_ref().unwrap();
            self.tally.cached += usage.cached_tokens;
        }
        self.home = home;
        self.last = format!(
            "{:?} {:?} replayed {}",
            route.reason(),
            route.attempts,
            response.replayed
        );
        self.turns.push(Turn {
            key: format!("t{}", self.n),
            began,
            ended: SystemTime::now(),
            failed_calls: self.tally.failed_calls - failed_before,
            prompt_hash: Rolling::of(&self.history).value(),
            replica: route.replica_id.clone(),
            incarnation: route.incarnation,
            rank: route.rank,
            reason: route.reason(),
            attempts: route.attempts.clone(),
        });
        self.history.extend(&sample.token_ids);
        self.tally.turns += 1;
        route.attempts.len()
    }
}
