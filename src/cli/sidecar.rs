//! `berth sidecar`.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::operator::usage;
use crate::{
    auth::client::Access,
    call,
    fleet::facts::EngineKind,
    sidecar::{AcceleratorConfig, Sidecar, SidecarConfig, Timing},
};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The control plane.
    #[arg(
        long,
        env = "BERTH_SIDECAR_CONTROL_PLANE",
        default_value = "http://127.0.0.1:7700"
    )]
    control_plane: String,
    #[command(flatten)]
    access: Access,
    /// The engine, as it is reached from here: `http://host:port`.
    #[arg(long, env = "BERTH_SIDECAR_ENGINE_URL")]
    engine_url: String,
    /// What the engine speaks.
    #[arg(long, env = "BERTH_SIDECAR_ENGINE", value_enum, default_value_t = Engine::Sglang)]
    engine: Engine,
    /// Server of a further rank, where each has one of its own (vLLM with
    /// external load balancing); may be repeated. The control plane must reach it
    /// under this URL too.
    #[arg(
        long = "rank-url",
        env = "BERTH_SIDECAR_RANK_URLS",
        value_delimiter = ','
    )]
    rank_urls: Vec<String>,
    /// Stable name of the replica. Default: host name and the engine's port.
    #[arg(long, env = "BERTH_SIDECAR_REPLICA_ID")]
    replica_id: Option<String>,
    /// The engine, as the control plane reaches it. Default: `--engine-url`,
    /// or its port on this machine's address where that is a loopback address
    /// and the control plane's is not.
    #[arg(long, env = "BERTH_SIDECAR_ADVERTISE_URL")]
    advertise_url: Option<String>,
    /// What the engine and the driver do not tell, or not as wanted.
    #[command(flatten)]
    overrides: Box<Overrides>,
    /// From SIGTERM to the end at most; what runs may finish within it. For the
    /// first half of it trajectories that live here may take more turns while the
    /// engine is busy, then they move, each at its next turn.
    #[arg(long, env = "BERTH_SIDECAR_DRAIN_TIMEOUT", default_value = "30s", value_parser = humantime::parse_duration)]
    drain_timeout: Duration,
    /// A busy rank of which nothing is heard for so long is taken for dead. An
    /// engine is silent during one step: more where a step of prefill takes
    /// longer, as on a CPU.
    #[arg(long, env = "BERTH_SIDECAR_FROZEN_AFTER", default_value = "5s", value_parser = humantime::parse_duration)]
    frozen_after: Duration,
    #[command(flatten)]
    log: super::LogArgs,
}

#[derive(Debug, clap::Args)]
struct Overrides {
    /// Name that requests use for the model. Default: as the engine says.
    #[arg(long, env = "BERTH_SIDECAR_MODEL")]
    model: Option<String>,
    /// Size of the vocabulary, where neither the model's config.json nor the
    /// engine tells.
    #[arg(long, env = "BERTH_SIDECAR_VOCAB_SIZE")]
    vocab_size: Option<u32>,
    /// Labels, `key=value`; may be repeated.
    #[arg(long = "label", env = "BERTH_SIDECAR_LABELS", value_delimiter = ',', value_parser = label)]
    labels: Vec<(String, String)>,
    /// Name of the accelerator. Default: as the driver prints it.
    #[arg(long, env = "BERTH_SIDECAR_ACCELERATOR_NAME")]
    accelerator_name: Option<String>,
    /// Memory of one device in bytes. Default: as the driver says.
    #[arg(long, env = "BERTH_SIDECAR_ACCELERATOR_MEMORY")]
    accelerator_memory: Option<u64>,
    /// Devices of the replica. Default: as the engine's layout says.
    #[arg(long, env = "BERTH_SIDECAR_ACCELERATOR_COUNT")]
    accelerator_count: Option<u32>,
    /// Whether a seed makes sampling repeatable. Default: as the engine says.
    #[arg(long, env = "BERTH_SIDECAR_SEED")]
    seed: Option<bool>,
    /// What log probabilities are taken from, for a vLLM that does not tell (it
    /// does in development mode): its --logprobs-mode.
    #[arg(long, env = "BERTH_SIDECAR_LOGPROB_MODE", value_enum)]
    logprob_mode: Option<LogprobMode>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Engine {
    Sglang,
    Vllm,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum LogprobMode {
    /// The model's own.
    Raw,
    /// After temperature and penalties.
    Processed,
}

fn label(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .filter(|(key, _)| !key.is_empty())
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .ok_or_else(|| "a label is key=value".to_owned())
}

/// Runs it.
///
/// # Errors
/// What stops it.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let replica_id = args
        .replica_id
        .unwrap_or_else(|| default_id(&host_name(), &args.engine_url));
    let overrides = *args.overrides;
    let config = SidecarConfig {
        access: args.access,
        engine: match args.engine {
            Engine::Sglang => EngineKind::Sglang,
            Engine::Vllm => EngineKind::Vllm,
        },
        rank_urls: args.rank_urls,
        logprob_mode: overrides.logprob_mode.map(|mode| match mode {
            LogprobMode::Raw => call::LogprobMode::Raw,
            LogprobMode::Processed => call::LogprobMode::Processed,
        }),
        advertise_url: args.advertise_url,
        model: overrides.model,
        vocab_size: overrides.vocab_size,
        labels: overrides.labels.into_iter().collect::<BTreeMap<_, _>>(),
        accelerator: AcceleratorConfig {
            name: overrides.accelerator_name,
            memory_bytes: overrides.accelerator_memory,
            count: overrides.accelerator_count,
            ask_driver: true,
        },
        seed: overrides.seed,
        drain_timeout: args.drain_timeout,
        timing: Timing {
            frozen_after: args.frozen_after,
            ..Timing::default()
        },
        ..SidecarConfig::new(args.control_plane, args.engine_url, replica_id)
    };
    args.log.init()?;
    let sidecar = Sidecar::new(config).map_err(usage)?;
    let shutdown = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let asked = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        asked.cancel();
    });
    Box::pin(sidecar.run(shutdown)).await?;
    Ok(())
}

/// Host name and port, with whatever an id cannot have left out.
fn default_id(host: &str, engine_url: &str) -> String {
    let port = engine_url
        .parse::<http::Uri>()
        .ok()
        .and_then(|uri| uri.port_u16())
        .unwrap_or(80);
    let host: String = host
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c))
        .take(100)
        .collect();
    let host = if host.is_empty() { "replica" } else { &host };
    format!("{host}:{port}")
}

fn host_name() -> String {
    ["/proc/sys/kernel/hostname", "/etc/hostname"]
        .iter()
        .find_map(|path| std::fs::read_to_string(path).ok())
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_made_of_host_and_port() {
        assert_eq!(
            default_id("node-7", "http://127.0.0.1:30000"),
            "node-7:30000"
        );
        assert_eq!(default_id("a b/c", "http://h"), "abc:80");
        assert_eq!(default_id("", "nonsense"), "replica:80");
    }

    #[test]
    fn labels_are_pairs() {
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("a").is_err() && label("=b").is_err());
    }
}
