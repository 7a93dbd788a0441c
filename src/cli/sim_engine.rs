//! `berth sim-engine`: a simulated engine as a process of its own.

use std::{io::Write, net::IpAddr, time::Duration};

use anyhow::{Context, bail};
use tokio::signal::unix::{SignalKind, signal};

use super::operator::usage;
use crate::engine::sim::{Dialect, End, Profile, SimConfig, SimEngine, tokens::Eos};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose HTTP it speaks.
    #[arg(long, value_enum, default_value_t = Dialect::Sglang)]
    dialect: Dialect,
    /// Without vLLM's routes of development mode.
    #[arg(long)]
    no_dev_mode: bool,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// The model's name.
    #[arg(long, default_value = "Qwen/Qwen3-8B")]
    model: String,
    /// Token ids are below this; one that is not ends the engine.
    #[arg(long, default_value_t = 151_936)]
    vocab_size: u32,
    /// Prompt and output together, in tokens.
    #[arg(long, default_value_t = 16_384)]
    context_length: u32,
    /// Data-parallel ranks.
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// Tokens of a page of the prefix cache, which vLLM calls a block [default: 1,
    /// vLLM's 16].
    #[arg(long)]
    page_size: Option<usize>,
    /// KV capacity of a rank in tokens [default: the profile's].
    #[arg(long)]
    kv_tokens: Option<usize>,
    /// Whose times and KV capacity.
    #[arg(long, value_enum, default_value_t = Profile::H100)]
    profile: Profile,
    /// Seconds of wall time for a second of the engine's; 0 is as fast as
    /// possible.
    #[arg(long, default_value_t = 1.0)]
    time_scale: f64,
    /// Launch every kernel from the host: steps take at least 12.6 ms.
    #[arg(long)]
    no_cuda_graphs: bool,
    /// Stream what is new instead of everything so far.
    #[arg(long)]
    incremental_streaming_output: bool,
    /// Tokens between frames of a stream.
    #[arg(long, default_value_t = 1)]
    stream_interval: u32,
    /// Requests of a rank that run at once.
    #[arg(long, default_value_t = 256)]
    max_running_requests: usize,
    /// Requests of a rank that wait; more are refused [default: any number].
    #[arg(long)]
    max_queued_requests: Option<usize>,
    /// Prompt tokens computed in one step.
    #[arg(long, default_value_t = 8192)]
    chunked_prefill_size: usize,
    /// Serve greater priorities first.
    #[arg(long)]
    enable_priority_scheduling: bool,
    /// The weight version at the start.
    #[arg(long, default_value = "default")]
    weight_version: String,
    /// Take LoRA adapters.
    #[arg(long)]
    enable_lora: bool,
    /// Adapters at the start, `name=path`; may be repeated.
    #[arg(long = "lora-paths", visible_alias = "lora-modules", value_delimiter = ',', value_parser = adapter, requires = "enable_lora")]
    lora_paths: Vec<(String, String)>,
    /// Wall time between a request's arrival and its id being known to aborts.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    parse_delay: Duration,
    /// The id that ends a generation.
    #[arg(long, default_value_t = crate::engine::sim::tokens::DEFAULT_EOS)]
    eos_token_id: u32,
    /// The model ends by itself once in this many tokens; 0 is never.
    #[arg(long, default_value_t = 2048)]
    eos_one_in: u32,
}

impl Args {
    fn config(&self) -> SimConfig {
        SimConfig {
            model: self.model.clone(),
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            ranks: self.ranks,
            page_size: self.page_size.unwrap_or(match self.dialect {
                Dialect::Sglang => 1,
                Dialect::Vllm => 16,
            }),
            dialect: self.dialect,
            dev_mode: !self.no_dev_mode,
            kv_tokens: self.kv_tokens,
            profile: self.profile,
            time_scale: self.time_scale,
            cuda_graphs: !self.no_cuda_graphs,
            incremental_streaming_output: self.incremental_streaming_output,
            stream_interval: self.stream_interval,
            max_running_requests: self.max_running_requests,
            max_queued_requests: self.max_queued_requests,
            chunked_prefill_size: self.chunked_prefill_size,
            priority_scheduling: self.enable_priority_scheduling,
            weight_version: self.weight_version.clone(),
            adapters: self.enable_lora.then(|| self.lora_paths.clone()),
            parse_delay: self.parse_delay,
            eos: Eos {
                id: self.eos_token_id,
                one_in: self.eos_one_in,
            },
            host: self.host,
            port: self.port,
            ..SimConfig::default()
        }
    }
}

fn adapter(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(name, path)| (name.to_owned(), path.to_owned()))
        .ok_or_else(|| "an adapter is name=path".to_owned())
}

/// Serves until it is told to end (SIGTERM: what runs is finished and new work
/// is still served; SIGINT: at once) or dies of a request.
///
/// # Errors
/// It cannot listen, or it died.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let config = args.config();
    config
        .check()
        .map_err(|fault| usage(anyhow::Error::msg(fault)))?;
    let handle = SimEngine::start(config)
        .await
        .with_context(|| format!("cannot start on {}:{}", args.host, args.port))?;
    // One line, so that a script can read where it listens.
    writeln!(std::io::stdout(), "{}", handle.url())?;
    let end = loop {
        tokio::select! {
            end = handle.ended() => break end,
            _ = term.recv() => handle.terminate(),
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.context("cannot listen for SIGINT")?;
                handle.stop().await;
            }
        }
    };
    match end {
        End::Stopped | End::Drained => Ok(()),
        End::OutOfVocabulary => bail!("died: a token id outside the vocabulary was computed"),
        End::Died => bail!("died as it was told to"),
    }
}
