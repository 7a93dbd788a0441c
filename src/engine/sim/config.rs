//! What a simulated engine is told at its start.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use super::{
    scheduler::RankConfig,
    timing::Timing,
    tokens::{DEFAULT_EOS, Eos},
};

/// Which accelerator's times and KV capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// An H100 with 80 GB: 375,000 tokens of KV.
    #[default]
    H100,
    /// An H200: 747,000 tokens of KV.
    H200,
    /// Steps take no time; 375,000 tokens of KV.
    Instant,
}

/// Which engine's HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    /// SGLang's.
    #[default]
    Sglang,
    /// vLLM's.
    Vllm,
}

/// A simulated engine. The defaults are Qwen3-8B on one H100.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// What it speaks.
    pub dialect: Dialect,
    /// vLLM's routes of development mode: facts, pause, weights, aborts by id.
    pub dev_mode: bool,
    /// vLLM's first `/server_info` takes so long: it looks through the machine
    /// first. Later ones take no time.
    pub info_delay: Duration,
    /// The model's name.
    pub model: String,
    /// Ids are below this; one that is not ends the engine.
    pub vocab_size: u32,
    /// Prompt and output together.
    pub context_length: u32,
    /// Data-parallel ranks; at least 1.
    pub ranks: u32,
    /// Tokens of a cache page.
    pub page_size: usize,
    /// KV tokens of a rank; unset: the profile's.
    pub kv_tokens: Option<usize>,
    /// Times.
    pub profile: Profile,
    /// A step's duration, where it is not the profile's.
    pub step: Option<Duration>,
    /// Seconds of wall time for a second of the engine's; 0: as fast as
    /// possible. Scales the steps and the front's own waits (the look for a
    /// closed plain request every 4 s, the second that a health check takes).
    pub time_scale: f64,
    /// Steps without launch overhead.
    pub cuda_graphs: bool,
    /// Streams carry what is new instead of everything so far.
    pub incremental_streaming_output: bool,
    /// Tokens between frames of a stream.
    pub stream_interval: u32,
    /// Requests of a rank that run at once.
    pub max_running_requests: usize,
    /// Requests of a rank that wait at most; unset: any number.
    pub max_queued_requests: Option<usize>,
    /// Prompt tokens computed in one step.
    pub chunked_prefill_size: usize,
    /// Look at priorities.
    pub priority_scheduling: bool,
    /// The first weight version.
    pub weight_version: String,
    /// LoRA adapters that it starts with, name and path; unset: it takes none.
    pub adapters: Option<Vec<(String, String)>>,
    /// Wall time between a request's arrival and its id being known. An abort
    /// that comes in between is answered 200 and does nothing.
    pub parse_delay: Duration,
    /// How long vLLM's front outlives its engine, in wall time. A real one has been
    /// seen to take some 15 s.
    pub linger: Duration,
    /// When the model ends by itself.
    pub eos: Eos,
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0: any.
    pub port: u16,
    /// Requests that the history keeps.
    pub history: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            dialect: Dialect::default(),
            dev_mode: true,
            model: "Qwen/Qwen3-8B".into(),
            vocab_size: 151_936,
            context_length: 16_384,
            ranks: 1,
            page_size: 1,
            kv_tokens: None,
            profile: Profile::H100,
            step: None,
            time_scale: 1.0,
            cuda_graphs: true,
            incremental_streaming_output: false,
            stream_interval: 1,
            max_running_requests: 256,
            max_queued_requests: None,
            chunked_prefill_size: 8192,
            priority_scheduling: false,
            weight_version: "default".into(),
            adapters: None,
            parse_delay: Duration::ZERO,
            linger: Duration::from_millis(200),
            info_delay: Duration::ZERO,
            eos: Eos {
                id: DEFAULT_EOS,
                one_in: 2048,
            },
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            history: 65_536,
        }
    }
}

impl SimConfig {
    /// The same with steps that take no time and waits that are a hundredth:
    /// for tests.
    pub fn instant() -> Self {
        Self {
            profile: Profile::Instant,
            time_scale: 0.01,
            ..Self::default()
        }
    }

    /// KV tokens of a rank.
    pub fn kv_capacity(&self) -> usize {
        self.kv_tokens.unwrap_or(match self.profile {
            Profile::H100 | Profile::Instant => 375_000,
            Profile::H200 => 747_000,
        })
    }

    /// The longest prompt that is taken, as `/server_info` says it.
    pub fn max_req_input_len(&self) -> usize {
        (self.context_length as usize)
            .min(self.kv_capacity())
            .saturating_sub(6)
    }

    /// The times of a step.
    pub fn timing(&self) -> Timing {
        let timing = match (self.step, self.profile) {
            (Some(step), _) => Timing::constant(step),
            (None, Profile::H100) => Timing::h100(),
            (None, Profile::H200) => Timing::h200(),
            (None, Profile::Instant) => Timing::instant(),
        };
        if self.cuda_graphs {
            timing
        } else {
            timing.without_cuda_graphs()
        }
    }

    /// One rank of it.
    pub fn rank(&self) -> RankConfig {
        RankConfig {
            vocab: self.vocab_size,
            eos: self.eos,
            page: self.page_size,
            kv_tokens: self.kv_capacity(),
            max_running: self.max_running_requests.max(1),
            max_queued: self.max_queued_requests,
            chunk: self.chunked_prefill_size,
            priorities: self.priority_scheduling,
            timing: self.timing(),
        }
    }

    /// What is wrong with it, in a sentence.
    ///
    /// # Errors
    /// All faults, by the options of `berth sim-engine`.
    pub fn check(&self) -> Result<(), String> {
        let faults = [
            (self.ranks == 0 || self.ranks > 1024, "--ranks: 1 to 1024"),
            (self.vocab_size < 2, "--vocab-size: at least 2"),
            (self.context_length < 16, "--context-length: at least 16"),
            (
                self.page_size == 0 || self.page_size > 4096,
                "--page-size: 1 to 4096",
            ),
            (self.kv_capacity() < 64, "--kv-tokens: at least 64"),
            (
                self.chunked_prefill_size < self.page_size,
                "--chunked-prefill-size: at least a page",
            ),
            (self.stream_interval == 0, "--stream-interval: at least 1"),
            (self.history == 0, "history: at least 1"),
            (
                !(0.0..=1000.0).contains(&self.time_scale),
                "--time-scale: 0 to 1000",
            ),
        ];
        let faults: Vec<&str> = faults
            .iter()
            .filter(|(wrong, _)| *wrong)
            .map(|(_, what)| *what)
            .collect();
        if faults.is_empty() {
            Ok(())
        } else {
            Err(faults.join("; "))
        }
    }

    /// `engine` of the engine's own time as wall time.
    pub fn scaled(&self, engine: Duration) -> Duration {
        Duration::try_from_secs_f64(engine.as_secs_f64() * self.time_scale).unwrap_or(Duration::MAX)
    }
}
