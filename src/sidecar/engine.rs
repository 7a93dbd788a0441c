//! The engine as its sidecar sees it: its facts, and one look per beat. A look
//! asks only cheap routes that no scheduler has to answer; `/server_info` asks
//! every scheduler, and a message to a dead one hangs the server, so it is read
//! only where a restart has to be told from a hiccup.

use std::{path::Path, time::Duration};

use http::{Method, StatusCode};
use tokio::io::AsyncReadExt;

use super::{
    config::SidecarConfig,
    dialect,
    frozen::{FrozenWatch, Pulse},
    link::{Breaks, Link, LinkError},
    vllm::Vllm,
};
use crate::{
    engine::{
        facts::{AdapterFact, Facts, FactsError, RankLoad, vocab_size_of_config},
        http::{HttpClient, HttpConfig, HttpError},
        sglang::facts::{self, Bodies},
    },
    fleet::facts::EngineKind,
};

/// Why the engine told nothing, or nothing of use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineTrouble {
    /// The connection.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// An answer.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// A status.
    #[error("{path} answers {status}")]
    Status {
        /// Of the question.
        path: &'static str,
        /// Of the answer.
        status: StatusCode,
    },
    /// It says that it takes no work yet.
    #[error("the engine is not ready yet")]
    NotReady,
    /// It speaks otherwise than was said.
    #[error(
        "{} seems to answer there, and not {}: set --engine {} (BERTH_SIDECAR_ENGINE), or \
         --engine-url to another engine",
        dialect::name(*.seems), dialect::name(*.told), dialect::option(*.seems)
    )]
    Dialect {
        /// As the options say.
        told: EngineKind,
        /// As it answers.
        seems: EngineKind,
    },
}

impl EngineTrouble {
    /// Nobody listens: the process is gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Link(LinkError::Refused(_)))
    }
}

/// Whether the engine takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It does.
    Serving,
    /// Generation is paused: new requests would hang.
    Paused,
    /// It finishes what it has and ends.
    Draining,
}

/// What one look saw.
#[derive(Clone, Debug)]
pub struct Sighting {
    /// Of the server.
    pub standing: Standing,
    /// Of every registered rank, in their order.
    pub ranks: Vec<RankSighting>,
    /// The adapters that it has now; unset where it can have none.
    pub adapters: Option<Vec<AdapterFact>>,
}

/// What one look saw of a rank.
#[derive(Clone, Debug)]
pub struct RankSighting {
    /// Zeros where the engine lists it no more.
    pub load: RankLoad,
    /// Its scheduler.
    pub pulse: Pulse,
    /// The weights that it serves now; empty where the engine does not tell.
    pub weight_version: String,
}

/// How often an engine that is not ready is asked why.
const ASK_WHY_EVERY: u32 = 5;

/// An engine and the connections to it, by what it speaks.
#[derive(Debug)]
pub enum Engine {
    /// SGLang.
    Sglang(Box<Sglang>),
    /// vLLM.
    Vllm(Box<Vllm>),
}

impl Engine {
    pub(super) fn new(config: &SidecarConfig) -> Result<Self, String> {
        Ok(match config.engine {
            EngineKind::Sglang => {
                Self::Sglang(Box::new(Sglang::new(&config.engine_url, &config.timing)?))
            }
            EngineKind::Vllm => Self::Vllm(Box::new(Vllm::new(config)?)),
        })
    }

    /// How often the engine's side broke a connection.
    pub(super) fn breaks(&self) -> Breaks {
        match self {
            Self::Sglang(engine) => engine.breaks(),
            Self::Vllm(engine) => engine.breaks(),
        }
    }

    /// Whether it takes work.
    pub(super) async fn ready(&mut self) -> Result<(), EngineTrouble> {
        match self {
            Self::Sglang(engine) => engine.ready().await,
            Self::Vllm(engine) => engine.ready().await,
        }
    }

    /// Its facts as they are now. What may be pending is waited for only for so
    /// long.
    pub(super) async fn facts(&mut self, patience: Duration) -> Result<Facts, EngineTrouble> {
        match self {
            Self::Sglang(engine) => engine.facts().await,
            Self::Vllm(engine) => engine.facts(patience).await,
        }
    }

    /// Waits until what was pending can be read by [`facts`](Self::facts); for ever
    /// where nothing is.
    pub(super) async fn told(&mut self) {
        match self {
            Self::Sglang(_) => std::future::pending().await,
            Self::Vllm(engine) => engine.told().await,
        }
    }

    /// Whether something was asked for and not read yet.
    pub(super) fn awaits(&self) -> bool {
        match self {
            Self::Sglang(_) => false,
            Self::Vllm(engine) => engine.awaits(),
        }
    }

    /// One look, all within the probe's time.
    pub(super) async fn look(&mut self, facts: &Facts) -> Result<Sighting, EngineTrouble> {
        let limit = match self {
            Self::Sglang(engine) => engine.probe_timeout,
            Self::Vllm(engine) => engine.probe_timeout(),
        };
        let looked = async {
            match self {
                Self::Sglang(engine) => engine.look(facts).await,
                Self::Vllm(engine) => engine.look(facts).await,
            }
        };
        let looked = tokio::time::timeout(limit, looked).await;
        looked.unwrap_or(Err(LinkError::Timeout(limit).into()))
    }
}

/// An SGLang server and the connection to it.
#[derive(Debug)]
pub struct Sglang {
    url: String,
    link: Link,
    /// For what is asked while another question waits for its answer.
    aside: Link,
    http: HttpClient,
    frozen: FrozenWatch,
    probe_timeout: Duration,
    facts_timeout: Duration,
    /// Since it is not ready: why, and looks since.
    not_ready: Option<(Standing, u32)>,
}

impl Sglang {
    fn new(url: &str, timing: &super::Timing) -> Result<Self, String> {
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            link: Link::new(url)?,
            aside: Link::new(url)?,
            http: HttpClient::new(HttpConfig {
                max_idle_per_host: 0,
                ..HttpConfig::default()
            }),
            frozen: FrozenWatch::new(timing.frozen_after),
            probe_timeout: timing.probe_timeout,
            facts_timeout: timing.facts_timeout,
            not_ready: None,
        })
    }

    /// That nobody listens, either connection may be the first to see. The other
    /// one lies idle, and idle connections are closed by engines that live.
    fn breaks(&self) -> Breaks {
        let (link, aside) = (self.link.breaks(), self.aside.breaks());
        Breaks {
            lost: link.lost,
            refused: link.refused + aside.refused,
        }
    }

    /// Whether it takes work, as `/ready` says.
    async fn ready(&mut self) -> Result<(), EngineTrouble> {
        match self.link.get("/ready", self.probe_timeout).await?.0 {
            status if status.is_success() => Ok(()),
            StatusCode::SERVICE_UNAVAILABLE => Err(EngineTrouble::NotReady),
            status => Err(EngineTrouble::Status {
                path: "/ready",
                status,
            }),
        }
    }

    /// Its facts as they are now.
    async fn facts(&mut self) -> Result<Facts, EngineTrouble> {
        let limit = self.facts_timeout;
        // The first asks every scheduler, between two of its steps: what the front
        // answers by itself is asked meanwhile.
        let (link, aside) = (&mut self.link, &mut self.aside);
        let (server_info, (model_info, models, loads)) =
            tokio::try_join!(body(link, "/server_info", limit), async {
                Ok((
                    body(aside, "/model_info", limit).await?,
                    body(aside, "/v1/models", limit).await?,
                    body(aside, LOADS, limit).await?,
                ))
            })?;
        self.frozen.reset();
        let bodies = Bodies {
            server_info: &server_info,
            model_info: &model_info,
            models: &models,
            loads: &loads,
        };
        Ok(bodies.facts()?)
    }

    async fn look(&mut self, facts: &Facts) -> Result<Sighting, EngineTrouble> {
        let standing = match self.ready().await {
            Ok(()) => {
                self.not_ready = None;
                Standing::Serving
            }
            Err(EngineTrouble::NotReady) => self.why_not_ready().await,
            Err(trouble) => return Err(trouble),
        };
        let loads = facts::parse_loads(&self.body(LOADS, self.probe_timeout).await?)?;
        let model_info = self.body("/model_info", self.probe_timeout).await?;
        let weight_version = facts::parse_weight_version(&model_info)?;
        let adapters = if facts.lora {
            let models = self.body("/v1/models", self.probe_timeout).await?;
            Some(facts::parse_adapters(&models)?)
        } else {
            None
        };
        if standing == Standing::Paused {
            self.frozen.reset();
        }
        let ranks = facts
            .ranks
            .iter()
            .map(|fact| {
                let load = loads.iter().find(|load| load.rank == fact.rank);
                let busy = load.is_none_or(|load| load.running + load.waiting > 0);
                let judge = standing != Standing::Paused && (busy || !facts.sleeps_when_idle);
                RankSighting {
                    load: load.copied().unwrap_or(RankLoad {
                        rank: fact.rank,
                        ..RankLoad::default()
                    }),
                    pulse: self.frozen.observe(fact.rank, load, judge),
                    weight_version: weight_version.clone(),
                }
            })
            .collect();
        Ok(Sighting {
            standing,
            ranks,
            adapters,
        })
    }

    /// A paused engine leaves `/health` unanswered, since that generates a
    /// token; one that has been told to end answers 503 at once. Asked on a
    /// connection of its own, and seldom: the token waits for the resumption.
    async fn why_not_ready(&mut self) -> Standing {
        if let Some((why, looks)) = &mut self.not_ready
            && *looks < ASK_WHY_EVERY
        {
            *looks += 1;
            return *why;
        }
        let limit = self.probe_timeout / 3;
        let asked = self
            .http
            .call(Method::GET, &self.url, "/health", None, 64 * 1024, limit)
            .await;
        let why = match asked {
            Ok((status, ..)) if status.is_success() => Standing::Paused,
            Err(HttpError::Timeout(_)) => Standing::Paused,
            Ok(_) | Err(_) => Standing::Draining,
        };
        self.not_ready = Some((why, 0));
        why
    }

    async fn body(
        &mut self,
        path: &'static str,
        limit: Duration,
    ) -> Result<bytes::Bytes, EngineTrouble> {
        body(&mut self.link, path, limit).await
    }
}

/// The body of an answer that is a success.
pub(super) async fn body(
    link: &mut Link,
    path: &'static str,
    limit: Duration,
) -> Result<bytes::Bytes, EngineTrouble> {
    let (status, body) = link.get(path, limit).await?;
    if status.is_success() {
        Ok(body)
    } else {
        Err(EngineTrouble::Status { path, status })
    }
}

/// `include` must name known parts: an unknown one is answered 500.
const LOADS: &str = "/v1/loads?include=core";

/// The size of the vocabulary: from the model's `config.json` where this
/// machine has it, else as the engine tells, else as configured, else 0.
pub(super) async fn vocab_size(facts: &Facts, configured: Option<u32>) -> u32 {
    let of_config = match &facts.model_path {
        Some(path) if Path::new(path).is_absolute() => {
            read_bounded(&Path::new(path).join("config.json"))
                .await
                .and_then(|config| vocab_size_of_config(&config))
        }
        _ => None,
    };
    of_config
        .or(facts.vocab_size)
        .or(configured)
        .unwrap_or_default()
}

async fn read_bounded(path: &Path) -> Option<Vec<u8>> {
    const MAX: u64 = 4 * 1024 * 1024;
    let file = tokio::fs::File::open(path).await.ok()?;
    if !file.metadata().await.ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX).read_to_end(&mut bytes).await.ok()?;
    Some(bytes)
}
