//! What a sidecar is told. Checked by [`super::Sidecar::new`] before anything
//! is sent.

use std::{collections::BTreeMap, time::Duration};

use crate::{auth::client::Access, call::LogprobMode, fleet::facts::EngineKind};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// What a sidecar is told.
#[derive(Clone, Debug)]
pub struct SidecarConfig {
    /// The control plane, `http://host:port` or `https://host:port`.
    pub control_plane: String,
    /// How to show it who calls.
    pub access: Access,
    /// The engine as the sidecar reaches it, `http://host:port`.
    pub engine_url: String,
    /// What it speaks.
    pub engine: EngineKind,
    /// Servers of the same replica's further ranks, where each rank has one of
    /// its own (vLLM's external load balancing), as the control plane reaches
    /// them too.
    pub rank_urls: Vec<String>,
    /// Stable over restarts: 1 to 128 characters of `[A-Za-z0-9._:-]`.
    pub replica_id: String,
    /// The engine as the control plane reaches it. Unset: `engine_url`; or, for
    /// an engine on the loopback of another machine than the control plane's,
    /// its port on the address that the sidecar calls from.
    pub advertise_url: Option<String>,
    /// Replaces the model's name.
    pub model: Option<String>,
    /// For where neither the engine nor its model's `config.json` tells.
    pub vocab_size: Option<u32>,
    /// At most 32.
    pub labels: BTreeMap<String, String>,
    /// Replaces what the driver tells.
    pub accelerator: AcceleratorConfig,
    /// Replaces what the engine tells of repeatable sampling.
    pub seed: Option<bool>,
    /// What log probabilities are taken from, where the engine does not tell.
    pub logprob_mode: Option<LogprobMode>,
    /// From the shutdown to the end at most: what runs may finish, then the
    /// replica is deregistered. For the first half of it, trajectories may take
    /// more turns there while it is busy.
    pub drain_timeout: Duration,
    /// How long things take.
    pub timing: Timing,
}

/// What to say of the accelerator, field by field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceleratorConfig {
    /// As NVML prints it.
    pub name: Option<String>,
    /// Of one device, in bytes.
    pub memory_bytes: Option<u64>,
    /// Devices of the replica.
    pub count: Option<u32>,
    /// Ask `nvidia-smi` for what is not given.
    pub ask_driver: bool,
}

/// How long things take. The control plane tells the interval of beats.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// For all questions of one beat to the engine.
    pub probe_timeout: Duration,
    /// For reading the engine's facts.
    pub facts_timeout: Duration,
    /// For one call to the control plane.
    pub call_timeout: Duration,
    /// First wait after a failure; doubled each time.
    pub backoff: Duration,
    /// Longest wait after a failure.
    pub max_backoff: Duration,
    /// Wait after the control plane found the facts at fault: somebody has to
    /// change something.
    pub refused_wait: Duration,
    /// Longest random wait before registering again, so that a restarted
    /// control plane does not hear everybody at once.
    pub reregister_jitter: Duration,
    /// A rank whose timestamp stands still for this long, and for three beats,
    /// is taken for dead.
    pub frozen_after: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            probe_timeout: Duration::from_secs(1),
            facts_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(3),
            backoff: Duration::from_millis(250),
            max_backoff: Duration::from_secs(10),
            refused_wait: Duration::from_secs(30),
            reregister_jitter: Duration::from_secs(1),
            frozen_after: Duration::from_secs(5),
        }
    }
}

impl SidecarConfig {
    /// With the defaults for everything else.
    pub fn new(
        control_plane: impl Into<String>,
        engine_url: impl Into<String>,
        replica_id: impl Into<String>,
    ) -> Self {
        Self {
            control_plane: control_plane.into(),
            access: Access::default(),
            engine_url: engine_url.into(),
            engine: EngineKind::Sglang,
            rank_urls: Vec::new(),
            replica_id: replica_id.into(),
            advertise_url: None,
            model: None,
            vocab_size: None,
            labels: BTreeMap::new(),
            accelerator: AcceleratorConfig {
                ask_driver: true,
                ..AcceleratorConfig::default()
            },
            seed: None,
            logprob_mode: None,
            drain_timeout: Duration::from_secs(30),
            timing: Timing::default(),
        }
    }

    /// Every fault that can be seen without asking anybody.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let urls = [("--engine-url", &self.engine_url)].into_iter();
        let urls = urls
            .chain(
                self.advertise_url
                    .iter()
                    .map(|url| ("--advertise-url", url)),
            )
            .chain(self.rank_urls.iter().map(|url| ("--rank-url", url)));
        for (option, url) in urls {
            if let Err(fault) = super::link::Link::new(url) {
                faults.push(format!("{option}: {fault}"));
            }
        }
        let id = &self.replica_id;
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._:-".contains(c);
        if id.is_empty() || id.len() > 128 || !id.chars().all(allowed) {
            faults.push(format!(
                "--replica-id: {id:?}: 1 to 128 characters of [A-Za-z0-9._:-] are needed"
            ));
        }
        if !self.rank_urls.is_empty() && self.engine != EngineKind::Vllm {
            faults.push("--rank-url: only vLLM has a server for each rank".into());
        }
        let local = |url: &String| super::register::loopback_port(url).is_some();
        if self.rank_urls.iter().any(local) && !local(&self.control_plane) {
            faults.push(
                "--rank-url: one is a loopback address, and the control plane's is not: it could not \
                 reach it"
                    .into(),
            );
        }
        if self.rank_urls.len() >= crate::engine::facts::MAX_RANKS {
            faults.push("--rank-url: too many ranks".into());
        }
        if self.labels.len() > 32 {
            faults.push("--label: at most 32".into());
        }
        for (key, value) in &self.labels {
            if key.is_empty() || key.len() > 63 || value.len() > 255 {
                faults.push(format!(
                    "--label: {key:?}: keys have 1 to 63, values at most 255 characters"
                ));
            }
        }
        // Half of it is the grace that the control plane is told, which takes a day.
        if self.drain_timeout > DAY {
            faults.push("--drain-timeout: at most 24h".into());
        }
        if self.timing.frozen_after.is_zero() || self.timing.frozen_after > DAY {
            faults.push("--frozen-after: above 0s and at most 24h".into());
        }
        if self.vocab_size == Some(0) {
            faults.push("--vocab-size: at least 1".into());
        }
        faults
    }
}
