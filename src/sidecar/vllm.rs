//! vLLM as its sidecar sees it: one server with any number of ranks, or one for
//! each rank. Whether it is well is judged by what the server's front answers by
//! itself. In development mode two more questions go to the engine: whether it is
//! paused, and which weights it serves. It answers them between two steps, and a
//! step may take seconds (a long prompt, a kernel compiled at its first use): asked
//! on a connection of their own, they hold nothing up, and until they are answered
//! the last answers count. What the server tells of its arguments takes seconds when
//! it is asked for the first time, since it looks through the machine for it: who
//! cannot wait goes on without, and the rest follows.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::{
    SidecarConfig,
    engine::{EngineTrouble, RankSighting, Sighting, Standing, body},
    frozen::Pulse,
    link::{Breaks, Link},
};
use crate::{
    call::LogprobMode,
    engine::{
        facts::{Facts, RankLoad},
        vllm::{
            GENERATE,
            facts::{self, Bodies},
            metrics,
        },
    },
};

/// The servers of a replica and the connections to them.
#[derive(Debug)]
pub struct Vllm {
    servers: Vec<Server>,
    logprob_mode: Option<LogprobMode>,
    probe_timeout: Duration,
    facts_timeout: Duration,
}

#[derive(Debug)]
struct Server {
    /// Where it listens, if that is not where the replica does.
    endpoint: Option<String>,
    link: Link,
    /// For what the engine has to answer.
    aside: Link,
    /// What it tells of its arguments.
    info: Info,
    /// It answers the questions of development mode.
    tells: bool,
    /// What its engine said last.
    told: Word,
}

/// What a server tells of its arguments, which comes when it comes.
#[derive(Debug)]
struct Info {
    link: Link,
    /// Gives the connection back.
    asked: Option<AbortOnDropHandle<(Link, Told<Bytes>)>>,
    /// Nobody has read it yet.
    come: Option<Told<Bytes>>,
    /// As they were when it was asked.
    breaks: Breaks,
}

/// The answer to a question that not every server knows.
type Told<T> = Result<Option<T>, EngineTrouble>;

/// What only the engine knows.
#[derive(Clone, Debug, Default)]
struct Word {
    paused: bool,
    weight_version: String,
}

/// Answers of one server.
struct Answers {
    version: Bytes,
    models: Bytes,
    metrics: Bytes,
    server_info: Option<Bytes>,
    /// That one has not come yet.
    pending: bool,
    weight_info: Option<Bytes>,
}

const METRICS: &str = "/metrics";
const MODELS: &str = "/v1/models";
const SERVER_INFO: &str = "/server_info?config_format=json";
const WEIGHT_INFO: &str = "/weight_info";
const PAUSED: &str = "/is_paused";

impl Vllm {
    pub(super) fn new(config: &SidecarConfig) -> Result<Self, String> {
        let server = |url: &String, endpoint| {
            Ok::<_, String>(Server {
                endpoint,
                link: Link::new(url)?,
                aside: Link::new(url)?,
                info: Info::new(Link::new(url)?),
                tells: false,
                told: Word::default(),
            })
        };
        let mut servers = vec![server(&config.engine_url, None)?];
        for url in &config.rank_urls {
            let endpoint = url.trim_end_matches('/').to_owned();
            servers.push(server(url, Some(endpoint))?);
        }
        Ok(Self {
            servers,
            logprob_mode: config.logprob_mode,
            probe_timeout: config.timing.probe_timeout,
            facts_timeout: config.timing.facts_timeout,
        })
    }

    pub(super) fn probe_timeout(&self) -> Duration {
        self.probe_timeout
    }

    /// Of all servers: any that restarts ends the replica's start.
    pub(super) fn breaks(&self) -> Breaks {
        self.servers.iter().map(|server| server.link.breaks()).fold(
            Breaks::default(),
            |all, one| Breaks {
                lost: all.lost + one.lost,
                refused: all.refused + one.refused,
            },
        )
    }

    /// `/health` answers without generating anything.
    pub(super) async fn ready(&mut self) -> Result<(), EngineTrouble> {
        for server in &mut self.servers {
            server.health(self.probe_timeout).await?;
        }
        Ok(())
    }

    /// Their facts; what they are slow to tell is waited for only for so long.
    pub(super) async fn facts(&mut self, patience: Duration) -> Result<Facts, EngineTrouble> {
        let mut all = Vec::with_capacity(self.servers.len());
        // Side by side, what takes long of them.
        for server in &mut self.servers {
            let breaks = server.link.breaks();
            server.info.ask(self.facts_timeout, breaks);
        }
        let until = Instant::now() + patience;
        for server in &mut self.servers {
            all.push(server.answers(self.facts_timeout, until).await?);
        }
        let bodies: Vec<Bodies<'_>> = self
            .servers
            .iter()
            .zip(&all)
            .map(|(server, answers)| Bodies {
                endpoint: server.endpoint.as_deref(),
                version: &answers.version,
                models: &answers.models,
                metrics: &answers.metrics,
                server_info: answers.server_info.as_deref(),
                pending: answers.pending,
                weight_info: answers.weight_info.as_deref(),
            })
            .collect();
        Ok(facts::facts(&bodies, self.logprob_mode)?)
    }

    /// Waits until all that was awaited has come. For ever where nothing is.
    pub(super) async fn told(&mut self) {
        let mut come = false;
        for server in &mut self.servers {
            server.info.settle().await;
            come |= server.info.come.is_some();
        }
        if !come {
            std::future::pending::<()>().await;
        }
    }

    /// Whether an answer is awaited, or was not read yet.
    pub(super) fn awaits(&self) -> bool {
        self.servers.iter().any(|server| server.info.awaits())
    }

    pub(super) async fn look(&mut self, known: &Facts) -> Result<Sighting, EngineTrouble> {
        let limit = self.probe_timeout;
        let mut standing = Standing::Serving;
        let mut ranks = Vec::with_capacity(known.ranks.len());
        let mut adapters = None;
        for server in &mut self.servers {
            let facts: Vec<_> = known
                .ranks
                .iter()
                .filter(|fact| fact.endpoint == server.endpoint)
                .cloned()
                .collect();
            match server.health(limit).await {
                Ok(()) => {}
                // The server lives on for a moment; the engine behind it does not.
                Err(EngineTrouble::NotReady) => return Ok(dead(known)),
                Err(trouble) => return Err(trouble),
            }
            let scrape = metrics::parse(&server.body(METRICS, limit).await?)?;
            if known.lora {
                let listed = facts::adapters(&server.body(MODELS, limit).await?)?;
                adapters = Some(match adapters {
                    None => listed,
                    Some(all) => facts::common(all, &listed),
                });
            }
            server.ask_engine(limit / 3).await;
            let asleep = scrape.engines.values().any(|engine| engine.asleep);
            if asleep || server.told.paused {
                standing = Standing::Paused;
            }
            let loads = facts::loads(&scrape, &facts);
            ranks.extend(facts.iter().zip(loads).map(|(fact, load)| RankSighting {
                pulse: match load {
                    Some(_) => Pulse::Alive,
                    None => Pulse::Frozen,
                },
                load: load.unwrap_or(RankLoad {
                    rank: fact.rank,
                    ..RankLoad::default()
                }),
                weight_version: server.told.weight_version.clone(),
            }));
        }
        Ok(Sighting {
            standing,
            ranks,
            adapters,
        })
    }
}

/// The engine has died behind its server: nothing that it was given will be
/// answered.
fn dead(known: &Facts) -> Sighting {
    Sighting {
        standing: Standing::Serving,
        adapters: None,
        ranks: known
            .ranks
            .iter()
            .map(|fact| RankSighting {
                load: RankLoad {
                    rank: fact.rank,
                    ..RankLoad::default()
                },
                pulse: Pulse::Dead,
                weight_version: known.weight_version.clone(),
            })
            .collect(),
    }
}

impl Info {
    fn new(link: Link) -> Self {
        Self {
            link,
            asked: None,
            come: None,
            breaks: Breaks::default(),
        }
    }

    /// Asks, unless that was done since these breaks.
    fn ask(&mut self, limit: Duration, breaks: Breaks) {
        if self.breaks != breaks {
            // Of another start, perhaps.
            (self.asked, self.come) = (None, None);
        }
        if self.awaits() {
            return;
        }
        let mut link = self.link.take();
        self.breaks = breaks;
        self.asked = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let answer = optional(&mut link, SERVER_INFO, limit).await;
            (link, answer)
        })));
    }

    /// Waits for an answer that is awaited. Dropped, it changes nothing.
    async fn settle(&mut self) {
        let Some(asked) = &mut self.asked else {
            return;
        };
        let answered = asked.await;
        self.asked = None;
        if let Ok((link, answer)) = answered {
            self.link = link;
            self.come = Some(answer);
        }
    }

    /// It is awaited, or was not read yet.
    fn awaits(&self) -> bool {
        self.asked.is_some() || self.come.is_some()
    }
}

impl Server {
    async fn health(&mut self, limit: Duration) -> Result<(), EngineTrouble> {
        let path = "/health";
        match self.link.get(path, limit).await?.0 {
            status if status.is_success() => Ok(()),
            StatusCode::SERVICE_UNAVAILABLE => Err(EngineTrouble::NotReady),
            status => Err(EngineTrouble::Status { path, status }),
        }
    }

    async fn answers(&mut self, limit: Duration, until: Instant) -> Result<Answers, EngineTrouble> {
        // The route takes no such question. That it says so shows that it is there:
        // it answers 403 or 404 where the server does not offer it.
        let (status, _) = self.link.get(GENERATE, limit).await?;
        if matches!(status, StatusCode::FORBIDDEN | StatusCode::NOT_FOUND) {
            return Err(EngineTrouble::Status {
                path: GENERATE,
                status,
            });
        }
        let version = self.body("/version", limit).await?;
        let models = self.body(MODELS, limit).await?;
        let metrics = self.body(METRICS, limit).await?;
        let weight_info = optional(&mut self.aside, WEIGHT_INFO, limit).await?;
        // Again where the connection broke meanwhile.
        self.info.ask(limit, self.link.breaks());
        // Late is what it may be: it is read once it has come.
        let _ = timeout_at(until, self.info.settle()).await;
        let told = self.info.come.take().transpose()?;
        let pending = told.is_none();
        let server_info = told.flatten();
        self.tells = server_info.is_some() || weight_info.is_some();
        // Another start than the one that said it, perhaps.
        self.told = Word {
            paused: false,
            weight_version: match &weight_info {
                Some(body) => facts::weight_version(body)?,
                None => String::new(),
            },
        };
        Ok(Answers {
            version,
            models,
            metrics,
            server_info,
            pending,
            weight_info,
        })
    }

    /// Asks the engine, for as long as it may take.
    async fn ask_engine(&mut self, limit: Duration) {
        if !self.tells {
            return;
        }
        let link = &mut self.aside;
        let asked = async {
            let paused = match optional(link, PAUSED, limit).await? {
                Some(body) => facts::is_paused(&body)?,
                None => false,
            };
            let weight_version = match optional(link, WEIGHT_INFO, limit).await? {
                Some(body) => facts::weight_version(&body)?,
                None => String::new(),
            };
            Ok::<_, EngineTrouble>(Word {
                paused,
                weight_version,
            })
        };
        match tokio::time::timeout(limit, asked).await {
            Ok(Ok(told)) => self.told = told,
            Ok(Err(trouble)) => tracing::debug!(%trouble, "the engine does not tell"),
            Err(_) => tracing::debug!("the engine is busy"),
        }
    }

    async fn body(&mut self, path: &'static str, limit: Duration) -> Result<Bytes, EngineTrouble> {
        body(&mut self.link, path, limit).await
    }
}

/// `None`: there is no such route.
async fn optional(link: &mut Link, path: &'static str, limit: Duration) -> Told<Bytes> {
    match body(link, path, limit).await {
        Ok(body) => Ok(Some(body)),
        Err(EngineTrouble::Status {
            status: StatusCode::NOT_FOUND,
            ..
        }) => Ok(None),
        Err(trouble) => Err(trouble),
    }
}
