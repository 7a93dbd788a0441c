//! vLLM as its sidecar sees it: one server with any number of ranks, or one for
//! each rank. Whether it is well is judged by what the server's front answers by
//! itself. In development mode two more questions go to the engine: whether it is
//! paused, and which weights it serves. It answers them between two steps, and a
//! step may take seconds (a long prompt, a kernel compiled at its first use): asked
//! on a connection of their own, they hold nothing up, and until they are answered
//! the last answers count.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

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
    /// It answers the questions of development mode.
    tells: bool,
    /// What its engine said last.
    told: Told,
}

/// What only the engine knows.
#[derive(Clone, Debug, Default)]
struct Told {
    paused: bool,
    weight_version: String,
}

/// Answers of one server.
struct Answers {
    version: Bytes,
    models: Bytes,
    metrics: Bytes,
    server_info: Option<Bytes>,
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
                tells: false,
                told: Told::default(),
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

    pub(super) async fn facts(&mut self) -> Result<Facts, EngineTrouble> {
        let mut all = Vec::with_capacity(self.servers.len());
        for server in &mut self.servers {
            all.push(server.answers(self.facts_timeout).await?);
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
                weight_info: answers.weight_info.as_deref(),
            })
            .collect();
        Ok(facts::facts(&bodies, self.logprob_mode)?)
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

impl Server {
    async fn health(&mut self, limit: Duration) -> Result<(), EngineTrouble> {
        let path = "/health";
        match self.link.get(path, limit).await?.0 {
            status if status.is_success() => Ok(()),
            StatusCode::SERVICE_UNAVAILABLE => Err(EngineTrouble::NotReady),
            status => Err(EngineTrouble::Status { path, status }),
        }
    }

    async fn answers(&mut self, limit: Duration) -> Result<Answers, EngineTrouble> {
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
        let server_info = optional(&mut self.link, SERVER_INFO, limit).await?;
        let weight_info = optional(&mut self.aside, WEIGHT_INFO, limit).await?;
        self.tells = server_info.is_some() || weight_info.is_some();
        // Another start than the one that said it, perhaps.
        self.told = Told {
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
            Ok::<_, EngineTrouble>(Told {
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
async fn optional(
    link: &mut Link,
    path: &'static str,
    limit: Duration,
) -> Result<Option<Bytes>, EngineTrouble> {
    match body(link, path, limit).await {
        Ok(body) => Ok(Some(body)),
        Err(EngineTrouble::Status {
            status: StatusCode::NOT_FOUND,
            ..
        }) => Ok(None),
        Err(trouble) => Err(trouble),
    }
}
