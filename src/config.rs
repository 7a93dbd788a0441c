//! The control plane's configuration: flags over `BERTH_*` environment over a
//! TOML file over defaults. The options stand once, in [`Options`]; unknown keys
//! in the file and unknown `BERTH_*` variables are errors; everything is checked
//! before a port is bound, and all faults are told at once.

use std::{
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use ipnet::IpNet;
use serde::Deserialize;

use crate::{
    engine::egress::Egress,
    fleet::{FleetConfig, drain::MAX_GRACE, health::HealthConfig, lease::LeaseConfig},
    routing::{KvAdmission, MoveConfig, RouterConfig},
    stack::StackConfig,
    store::sled::{Durability, SledOptions},
};

/// Every option of `berth serve`, as flags, environment and file give it. All
/// are optional: what none of them gives is a default.
#[derive(Clone, Debug, Default, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Address of the gRPC API. [default: 127.0.0.1:7700]
    #[arg(long, env = "BERTH_LISTEN", value_name = "IP:PORT")]
    pub listen: Option<SocketAddr>,

    /// Address of the admin HTTP (health). [default: 127.0.0.1:7701]
    #[arg(long, env = "BERTH_ADMIN_LISTEN", value_name = "IP:PORT")]
    pub admin_listen: Option<SocketAddr>,

    /// Folder of the embedded store. [default: berth-data]
    #[arg(long, env = "BERTH_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// What an acknowledged write survives: fsync (power loss) or relaxed (a crash of the
    /// process; power loss may take the last moments). [default: fsync]
    #[arg(long, env = "BERTH_DURABILITY", value_name = "KIND")]
    pub durability: Option<DurabilityChoice>,

    /// How long results are kept for retries. [default: 24h]
    #[arg(long, env = "BERTH_RETENTION", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub retention: Option<Duration>,

    /// Bytes of one result that are kept; a larger one is delivered only. [default: 16777216]
    #[arg(long, env = "BERTH_MAX_RESULT_BYTES", value_name = "N")]
    pub max_result_bytes: Option<u64>,

    /// Bytes on disk that one tenant may keep. [default: 8589934592]
    #[arg(long, env = "BERTH_TENANT_QUOTA", value_name = "N")]
    pub tenant_quota: Option<u64>,

    /// Free bytes on the store's disk below which new keys are refused. [default: 536870912]
    #[arg(long, env = "BERTH_FREE_SPACE_FLOOR", value_name = "N")]
    pub free_space_floor: Option<u64>,

    /// Start although the store has lost something: the loss is declared, what is left is kept.
    /// [default: false]
    #[arg(long, env = "BERTH_ACCEPT_LOSS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub accept_loss: Option<bool>,

    /// How often replicas beat. Suspect after 3 missed beats, dead after 6. [default: 2s]
    #[arg(long, env = "BERTH_HEARTBEAT_INTERVAL", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub heartbeat_interval: Option<Duration>,

    /// A rank that gives no request anything for so long hangs; what its longest prompt and
    /// its widest frame may take (slowest-prefill, slowest-decode) is added. [default: 15s]
    #[arg(long, env = "BERTH_HANG_AFTER", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub hang_after: Option<Duration>,

    /// Prompt tokens a second that the slowest engine computes: how long a long prompt is waited
    /// for before its rank is said to hang. [default: 2000]
    #[arg(long, env = "BERTH_SLOWEST_PREFILL", value_name = "N")]
    pub slowest_prefill: Option<u32>,

    /// Tokens a second that the slowest engine generates for one request, likewise for streams
    /// with wide frames. [default: 5]
    #[arg(long, env = "BERTH_SLOWEST_DECODE", value_name = "N")]
    pub slowest_decode: Option<u32>,

    /// Failures in a row, of more than one prompt, that eject a rank. [default: 5]
    #[arg(long, env = "BERTH_EJECT_AFTER", value_name = "N")]
    pub eject_after: Option<u32>,

    /// So long after a rank was ejected because it hangs, its requests are sent elsewhere even
    /// when it answers no abort. [default: 5s]
    #[arg(long, env = "BERTH_FENCE_AFTER", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub fence_after: Option<Duration>,

    /// Take replicas that do not know their vocabulary size: token ids are then not checked,
    /// and one beyond it ends an engine. [default: false]
    #[arg(long, env = "BERTH_ALLOW_UNKNOWN_VOCABULARY", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub allow_unknown_vocabulary: Option<bool>,

    /// Networks in which engines may be, as "10.0.0.0/8,fd12::/16". Link-local and metadata
    /// addresses are never called. [default: any; this machine's loopback only while listen is
    /// a loopback address]
    #[arg(long, env = "BERTH_ENGINE_NETWORKS", value_name = "CIDR,...")]
    pub engine_networks: Option<String>,

    /// Ports on which engines may be, as "8000-8099,30000". [default: 1024-65535]
    #[arg(long, env = "BERTH_ENGINE_PORTS", value_name = "PORTS")]
    pub engine_ports: Option<String>,

    /// Replicas known at once. [default: 4096]
    #[arg(long, env = "BERTH_MAX_REPLICAS", value_name = "N")]
    pub max_replicas: Option<usize>,

    /// Trajectories may take turns at a replica that drains for so long, where neither the
    /// operator nor the sidecar says it; then they move at their next turn. [default: 30s]
    #[arg(long, env = "BERTH_DRAIN_GRACE", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub drain_grace: Option<Duration>,

    /// Balance against agreement for new keys, from 1 (least loaded) to inf (plain consistent
    /// hashing). [default: 1]
    #[arg(long, env = "BERTH_LOAD_FACTOR", value_name = "FACTOR")]
    pub load_factor: Option<f64>,

    /// A trajectory idle for so long no longer counts as load. [default: 30m]
    #[arg(long, env = "BERTH_PIN_TTL", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub pin_ttl: Option<Duration>,

    /// Trajectories remembered at most. [default: 1000000]
    #[arg(long, env = "BERTH_MAX_PINS", value_name = "N")]
    pub max_pins: Option<usize>,

    /// New trajectories wait while no rank has room: the contexts that live on a rank may fill
    /// this share of its KV cache, as 1.0. 0: they do not wait. [default: 0]
    #[arg(long, env = "BERTH_KV_ADMISSION", value_name = "SHARE")]
    pub kv_admission: Option<f64>,

    /// A new trajectory that has waited for room so long is taken all the same. [default: 2m]
    #[arg(long, env = "BERTH_KV_ADMISSION_WAIT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub kv_admission_wait: Option<Duration>,

    /// Trajectories that may move in any minute, in the whole fleet, off ranks whose queue costs
    /// more than computing their history anew. 0: none moves. [default: 0]
    #[arg(long, env = "BERTH_MOVES_PER_MINUTE", value_name = "N")]
    pub moves_per_minute: Option<u32>,

    /// A move must gain so much more than it costs. [default: 3s]
    #[arg(long, env = "BERTH_MOVE_MARGIN", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub move_margin: Option<Duration>,

    /// Longer trajectories never move, in tokens. [default: 16384]
    #[arg(long, env = "BERTH_MOVE_MAX_CONTEXT", value_name = "N")]
    pub move_max_context: Option<u32>,

    /// Requests without a key go where the longest beginning of their prompt was seen. [default:
    /// false]
    #[arg(long, env = "BERTH_KEYLESS_PREFIX", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub keyless_prefix: Option<bool>,

    /// Blocks of 256 prompt tokens remembered at most for that. [default: 1000000]
    #[arg(long, env = "BERTH_MAX_PREFIX_BLOCKS", value_name = "N")]
    pub max_prefix_blocks: Option<usize>,

    /// Deadline of a call that brings none. [default: 10m]
    #[arg(long, env = "BERTH_DEFAULT_DEADLINE", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub default_deadline: Option<Duration>,

    /// A generation with an idempotency key goes on for so long after its last caller left.
    /// [default: 30s]
    #[arg(long, env = "BERTH_GRACE", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub grace: Option<Duration>,

    /// Attempts of one sample, lost ones included. [default: 3]
    #[arg(long, env = "BERTH_MAX_ATTEMPTS", value_name = "N")]
    pub max_attempts: Option<u32>,

    /// Bytes of one request or response message. [default: 16777216]
    #[arg(long, env = "BERTH_MAX_MESSAGE_BYTES", value_name = "N")]
    pub max_message_bytes: Option<usize>,

    /// Streams that one connection may have open. [default: 4096]
    #[arg(long, env = "BERTH_MAX_STREAMS", value_name = "N")]
    pub max_streams: Option<u32>,

    /// On SIGTERM, calls in flight may take so long to finish. [default: 30s]
    #[arg(long, env = "BERTH_DRAIN_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub drain_timeout: Option<Duration>,

    /// Log format: human or json. [default: human]
    #[arg(long, env = "BERTH_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,

    /// What to log, as tracing's filters are written. [default: info]
    #[arg(long, env = "BERTH_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// What an acknowledged write survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DurabilityChoice {
    /// Loss of power.
    #[default]
    Fsync,
    /// A crash of the process.
    Relaxed,
}

/// Networks in a row; what is none is a fault.
fn networks(text: &str, faults: &mut Vec<String>) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for part in text.split(',').map(str::trim) {
        match part.parse() {
            Ok(network) => networks.push(network),
            Err(_) => faults.push(format!(
                "engine-networks: {part:?} is no network as \"10.0.0.0/8\""
            )),
        }
    }
    networks
}

/// Ports and ranges of ports in a row; what is none is a fault.
fn ports(text: &str, faults: &mut Vec<String>) -> Vec<RangeInclusive<u16>> {
    let mut ranges = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first @ 1..), Ok(last)) if first <= last => ranges.push(first..=last),
            _ => faults.push(format!(
                "engine-ports: {part:?} is no port or range of ports as \"8000-8099\""
            )),
        }
    }
    ranges
}

fn time(text: &str) -> Result<Duration, humantime::DurationError> {
    humantime::parse_duration(text)
}

fn time_option<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(from)?;
    time(&text).map(Some).map_err(|e| {
        serde::de::Error::custom(format!("{text:?} is no time as \"2s\" or \"5m\": {e}"))
    })
}

impl Options {
    /// These, and `other` for what these leave open.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            listen: self.listen.or(other.listen),
            admin_listen: self.admin_listen.or(other.admin_listen),
            data_dir: self.data_dir.or(other.data_dir),
            durability: self.durability.or(other.durability),
            retention: self.retention.or(other.retention),
            max_result_bytes: self.max_result_bytes.or(other.max_result_bytes),
            tenant_quota: self.tenant_quota.or(other.tenant_quota),
            free_space_floor: self.free_space_floor.or(other.free_space_floor),
            accept_loss: self.accept_loss.or(other.accept_loss),
            heartbeat_interval: self.heartbeat_interval.or(other.heartbeat_interval),
            hang_after: self.hang_after.or(other.hang_after),
            slowest_prefill: self.slowest_prefill.or(other.slowest_prefill),
            slowest_decode: self.slowest_decode.or(other.slowest_decode),
            eject_after: self.eject_after.or(other.eject_after),
            fence_after: self.fence_after.or(other.fence_after),
            allow_unknown_vocabulary: self
                .allow_unknown_vocabulary
                .or(other.allow_unknown_vocabulary),
            engine_networks: self.engine_networks.or(other.engine_networks),
            engine_ports: self.engine_ports.or(other.engine_ports),
            max_replicas: self.max_replicas.or(other.max_replicas),
            drain_grace: self.drain_grace.or(other.drain_grace),
            load_factor: self.load_factor.or(other.load_factor),
            pin_ttl: self.pin_ttl.or(other.pin_ttl),
            max_pins: self.max_pins.or(other.max_pins),
            kv_admission: self.kv_admission.or(other.kv_admission),
            kv_admission_wait: self.kv_admission_wait.or(other.kv_admission_wait),
            moves_per_minute: self.moves_per_minute.or(other.moves_per_minute),
            move_margin: self.move_margin.or(other.move_margin),
            move_max_context: self.move_max_context.or(other.move_max_context),
            keyless_prefix: self.keyless_prefix.or(other.keyless_prefix),
            max_prefix_blocks: self.max_prefix_blocks.or(other.max_prefix_blocks),
            default_deadline: self.default_deadline.or(other.default_deadline),
            grace: self.grace.or(other.grace),
            max_attempts: self.max_attempts.or(other.max_attempts),
            max_message_bytes: self.max_message_bytes.or(other.max_message_bytes),
            max_streams: self.max_streams.or(other.max_streams),
            drain_timeout: self.drain_timeout.or(other.drain_timeout),
            log_format: self.log_format.or(other.log_format),
            log: self.log.or(other.log),
        }
    }

    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, is no TOML, or has a key or value that is none of
    /// an option's.
    pub fn from_file(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration file {}", path.display()))?;
        toml::from_str(&text)
            .with_context(|| format!("in the configuration file {}", path.display()))
    }
}

/// A configuration in which everything is decided and in range.
#[derive(Clone, Debug)]
pub struct Config {
    /// gRPC.
    pub listen: SocketAddr,
    /// Admin HTTP.
    pub admin_listen: SocketAddr,
    /// The store's folder; `None` keeps everything in memory (demo and tests).
    pub data_dir: Option<PathBuf>,
    /// The store.
    pub store: SledOptions,
    /// Replicas.
    pub fleet: FleetConfig,
    /// Take replicas that do not know their vocabulary size.
    pub allow_unknown_vocabulary: bool,
    /// Which addresses engines may have. Berth's own are added once they are bound.
    pub egress: Egress,
    /// Routing.
    pub router: RouterConfig,
    /// The stack.
    pub stack: StackConfig,
    /// Bytes of one message.
    pub max_message_bytes: usize,
    /// Streams of one connection.
    pub max_streams: u32,
    /// Calls in flight at a shutdown.
    pub drain_timeout: Duration,
    /// Log lines.
    pub log_format: LogFormat,
    /// What to log.
    pub log: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 7700)),
            admin_listen: SocketAddr::from(([127, 0, 0, 1], 7701)),
            data_dir: Some(PathBuf::from("berth-data")),
            store: SledOptions::default(),
            fleet: FleetConfig::default(),
            allow_unknown_vocabulary: false,
            egress: Egress {
                ports: vec![1024..=u16::MAX],
                ..Egress::default()
            },
            router: RouterConfig::default(),
            stack: StackConfig::default(),
            max_message_bytes: 16 << 20,
            max_streams: 4096,
            drain_timeout: Duration::from_secs(30),
            log_format: LogFormat::default(),
            log: "info".to_owned(),
        }
    }
}

impl Config {
    /// Fills in the defaults and checks.
    ///
    /// # Errors
    /// Every fault, one a line.
    pub fn resolve(options: Options) -> anyhow::Result<Self> {
        let default = Self::default();
        let mut faults = Vec::new();
        let listen = options.listen.unwrap_or(default.listen);
        let egress = Egress {
            networks: options
                .engine_networks
                .map_or_else(Vec::new, |text| networks(&text, &mut faults)),
            ports: options
                .engine_ports
                .map_or(default.egress.ports, |text| ports(&text, &mut faults)),
            loopback: listen.ip().is_loopback(),
            own: Vec::new(),
        };
        let config = Self {
            listen,
            admin_listen: options.admin_listen.unwrap_or(default.admin_listen),
            data_dir: options.data_dir.or(default.data_dir),
            store: SledOptions {
                durability: match options.durability.unwrap_or_default() {
                    DurabilityChoice::Fsync => Durability::Fsync,
                    DurabilityChoice::Relaxed => Durability::Relaxed,
                },
                retention: options.retention.unwrap_or(default.store.retention),
                max_result_bytes: options
                    .max_result_bytes
                    .unwrap_or(default.store.max_result_bytes),
                tenant_quota: options.tenant_quota.unwrap_or(default.store.tenant_quota),
                free_space_floor: options
                    .free_space_floor
                    .unwrap_or(default.store.free_space_floor),
                accept_loss: options.accept_loss.unwrap_or(default.store.accept_loss),
                ..default.store
            },
            fleet: FleetConfig {
                lease: LeaseConfig {
                    interval: options
                        .heartbeat_interval
                        .unwrap_or(default.fleet.lease.interval),
                    ..default.fleet.lease
                },
                health: HealthConfig {
                    hang_after: options
                        .hang_after
                        .unwrap_or(default.fleet.health.hang_after),
                    slowest_prefill: options
                        .slowest_prefill
                        .unwrap_or(default.fleet.health.slowest_prefill),
                    slowest_decode: options
                        .slowest_decode
                        .unwrap_or(default.fleet.health.slowest_decode),
                    eject_after: options
                        .eject_after
                        .unwrap_or(default.fleet.health.eject_after),
                    fence_after: options
                        .fence_after
                        .unwrap_or(default.fleet.health.fence_after),
                    ..default.fleet.health
                },
                max_replicas: options.max_replicas.unwrap_or(default.fleet.max_replicas),
                drain_grace: options.drain_grace.unwrap_or(default.fleet.drain_grace),
                ..default.fleet
            },
            allow_unknown_vocabulary: options
                .allow_unknown_vocabulary
                .unwrap_or(default.allow_unknown_vocabulary),
            egress,
            router: RouterConfig {
                load_factor: options.load_factor.unwrap_or(default.router.load_factor),
                pin_ttl: options.pin_ttl.unwrap_or(default.router.pin_ttl),
                max_pins: options.max_pins.unwrap_or(default.router.max_pins),
                kv_admission: options
                    .kv_admission
                    .filter(|share| *share != 0.0)
                    .map(|share| KvAdmission {
                        share,
                        wait: options
                            .kv_admission_wait
                            .unwrap_or(KvAdmission::default().wait),
                    }),
                moves: options
                    .moves_per_minute
                    .filter(|most| *most > 0)
                    .map(|per_minute| {
                        let default = MoveConfig::default();
                        MoveConfig {
                            per_minute,
                            margin: options.move_margin.unwrap_or(default.margin),
                            max_context: options.move_max_context.unwrap_or(default.max_context),
                            ..default
                        }
                    }),
                keyless_prefix: options
                    .keyless_prefix
                    .unwrap_or(default.router.keyless_prefix),
                max_prefix_blocks: options
                    .max_prefix_blocks
                    .unwrap_or(default.router.max_prefix_blocks),
                ..default.router
            },
            stack: StackConfig {
                default_deadline: options
                    .default_deadline
                    .unwrap_or(default.stack.default_deadline),
                grace: options.grace.unwrap_or(default.stack.grace),
                max_attempts: options.max_attempts.unwrap_or(default.stack.max_attempts),
                ..default.stack
            },
            max_message_bytes: options
                .max_message_bytes
                .unwrap_or(default.max_message_bytes),
            max_streams: options.max_streams.unwrap_or(default.max_streams),
            drain_timeout: options.drain_timeout.unwrap_or(default.drain_timeout),
            log_format: options.log_format.unwrap_or(default.log_format),
            log: options.log.unwrap_or(default.log),
        };
        faults.extend(config.faults());
        if !faults.is_empty() {
            bail!(
                "the configuration is not usable:\n  {}",
                faults.join("\n  ")
            );
        }
        Ok(config)
    }

    fn faults(&self) -> Vec<String> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let mut faults = Vec::new();
        let mut check = |ok: bool, fault: String| {
            if !ok {
                faults.push(fault);
            }
        };
        for (option, address) in [("listen", self.listen), ("admin-listen", self.admin_listen)] {
            check(
                address.ip().is_loopback(),
                format!(
                    "{option}: {address} is not a loopback address, and this server has no \
                     authentication: whoever reaches it could read prompts and register replicas"
                ),
            );
        }
        check(
            self.listen != self.admin_listen || self.listen.port() == 0,
            format!("listen and admin-listen are both {}", self.listen),
        );
        let mut within = |option: &str, value: Duration, least: Duration, most: Duration| {
            check(
                (least..=most).contains(&value),
                format!(
                    "{option}: must be from {} to {}",
                    humantime::format_duration(least),
                    humantime::format_duration(most)
                ),
            );
        };
        let ms = Duration::from_millis;
        within(
            "heartbeat-interval",
            self.fleet.lease.interval,
            ms(50),
            ms(60_000),
        );
        within("hang-after", self.fleet.health.hang_after, ms(100), DAY);
        within("fence-after", self.fleet.health.fence_after, ms(0), DAY);
        if let Some(kv) = self.router.kv_admission {
            within("kv-admission-wait", kv.wait, Duration::ZERO, DAY);
        }
        if let Some(moves) = self.router.moves {
            within("move-margin", moves.margin, Duration::ZERO, DAY);
        }
        within("pin-ttl", self.router.pin_ttl, ms(1000), 30 * DAY);
        within(
            "default-deadline",
            self.stack.default_deadline,
            ms(1),
            30 * DAY,
        );
        within("retention", self.store.retention, ms(1000), 365 * DAY);
        within("grace", self.stack.grace, Duration::ZERO, DAY);
        within(
            "drain-grace",
            self.fleet.drain_grace,
            Duration::ZERO,
            MAX_GRACE,
        );
        within("drain-timeout", self.drain_timeout, Duration::ZERO, DAY);
        check(
            self.router.load_factor >= 1.0,
            "load-factor: must be a number from 1 to inf".to_owned(),
        );
        check(
            (1..=100_000_000).contains(&self.router.max_pins),
            "max-pins: must be from 1 to 100000000".to_owned(),
        );
        check(
            (1..=100_000_000).contains(&self.router.max_prefix_blocks),
            "max-prefix-blocks: must be from 1 to 100000000".to_owned(),
        );
        check(
            self.router
                .kv_admission
                .is_none_or(|kv| kv.share >= 0.01 && kv.share <= 100.0),
            "kv-admission: must be 0 or a number from 0.01 to 100".to_owned(),
        );
        check(
            self.router
                .moves
                .is_none_or(|moves| moves.per_minute <= 100_000),
            "moves-per-minute: must be from 0 to 100000".to_owned(),
        );
        check(
            (1..=65_536).contains(&self.fleet.max_replicas),
            "max-replicas: must be from 1 to 65536".to_owned(),
        );
        let health = &self.fleet.health;
        for (option, value) in [
            ("slowest-prefill", health.slowest_prefill),
            ("slowest-decode", health.slowest_decode),
            ("eject-after", health.eject_after),
        ] {
            check(
                (1..=1_000_000_000).contains(&value),
                format!("{option}: must be from 1 to 1000000000"),
            );
        }
        check(
            (1..=100).contains(&self.stack.max_attempts),
            "max-attempts: must be from 1 to 100".to_owned(),
        );
        check(
            (1 << 16..=1 << 30).contains(&self.max_message_bytes),
            "max-message-bytes: must be from 65536 to 1073741824".to_owned(),
        );
        check(
            self.max_streams >= 1,
            "max-streams: must be at least 1".to_owned(),
        );
        check(
            self.log
                .parse::<tracing_subscriber::filter::Targets>()
                .is_ok()
                || tracing_subscriber::EnvFilter::try_new(&self.log).is_ok(),
            format!(
                "log: {:?} is no filter as \"info\" or \"berth=debug\"",
                self.log
            ),
        );
        faults
    }
}

/// Variables that begin with `BERTH_` and are none of `known`: misspelt, most
/// likely. Those that Kubernetes puts into every pod beside a Service of the name
/// `berth` are nobody's mistake.
pub fn unknown_variables(variables: impl Iterator<Item = String>, known: &[String]) -> Vec<String> {
    let mut unknown: Vec<String> = variables
        .filter(|name| name.starts_with("BERTH_") && !known.contains(name))
        .filter(|name| !name.starts_with("BERTH_SERVICE_") && !name.starts_with("BERTH_PORT"))
        .collect();
    unknown.sort();
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_source_wins() {
        let flags = Options {
            max_pins: Some(1),
            ..Options::default()
        };
        let file: Options =
            toml::from_str("max-pins = 2\nmax-streams = 3\nheartbeat-interval = \"5s\"").unwrap();
        let config = Config::resolve(flags.or(file)).unwrap();
        assert_eq!(config.router.max_pins, 1);
        assert_eq!(config.max_streams, 3);
        assert_eq!(config.fleet.lease.interval, Duration::from_secs(5));
        assert_eq!(config.listen, Config::default().listen);
    }

    #[test]
    fn an_unknown_key_is_an_error() {
        let error = toml::from_str::<Options>("max-pin = 2").unwrap_err();
        assert!(error.to_string().contains("max-pin"), "{error}");
    }

    #[test]
    fn all_faults_are_told_at_once() {
        let options: Options = toml::from_str(
            "listen = \"0.0.0.0:7700\"\nload-factor = 0.5\nmax-attempts = 0\ngrace = \"2days\"\n\
             drain-grace = \"25h\"\nkv-admission = -1.0\nmoves-per-minute = 200000\n\
             max-prefix-blocks = 0",
        )
        .unwrap();
        let error = Config::resolve(options).unwrap_err().to_string();
        for option in [
            "listen",
            "load-factor",
            "max-attempts",
            "grace",
            "drain-grace",
            "kv-admission",
            "moves-per-minute",
            "max-prefix-blocks",
        ] {
            assert!(error.contains(option), "{option} in {error}");
        }
    }

    #[test]
    fn infinity_is_a_load_factor_and_nan_is_not() {
        let with = |load_factor| {
            Config::resolve(Options {
                load_factor: Some(load_factor),
                ..Options::default()
            })
        };
        assert!(with(f64::INFINITY).is_ok());
        assert!(with(f64::NAN).is_err());
    }

    #[test]
    fn misspelt_variables_are_found() {
        let names = [
            "BERTH_LISTEN",
            "BERTH_LISTN",
            "PATH",
            "BERTH_SERVICE_HOST",
            "BERTH_PORT_7700_TCP",
        ]
        .map(str::to_owned);
        assert_eq!(
            unknown_variables(names.into_iter(), &["BERTH_LISTEN".to_owned()]),
            ["BERTH_LISTN"]
        );
    }
}
