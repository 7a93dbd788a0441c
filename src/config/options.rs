//! The options of `berth serve`, each once: as flags, `BERTH_*` environment and
//! TOML file give them.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use serde::Deserialize;

use crate::auth::Reflection;

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
    /// addresses are never called, this machine's loopback only where it is named. [default:
    /// any; this machine's loopback while listen is a loopback address]
    #[arg(long, env = "BERTH_ENGINE_NETWORKS", value_name = "CIDR,...")]
    pub engine_networks: Option<String>,

    /// Ports on which engines may be, as "8000-8099,30000". [default: 1024-65535]
    #[arg(long, env = "BERTH_ENGINE_PORTS", value_name = "PORTS")]
    pub engine_ports: Option<String>,

    /// Replicas known at once; a newcomer takes the place of one that is dead. [default: 4096]
    #[arg(long, env = "BERTH_MAX_REPLICAS", value_name = "N")]
    pub max_replicas: Option<usize>,

    /// Of those, the ones that one principal registered; its newcomers beyond take the places
    /// of its own dead, or are refused. Without credentials it bounds nobody. [default: 1024]
    #[arg(long, env = "BERTH_MAX_REPLICAS_PER_PRINCIPAL", value_name = "N")]
    pub max_replicas_per_principal: Option<usize>,

    /// Ranks of all replicas that are known; a newcomer takes the places of the dead.
    /// [default: 8192]
    #[arg(long, env = "BERTH_MAX_RANKS", value_name = "N")]
    pub max_ranks: Option<usize>,

    /// Of those, the ones of replicas that one principal registered. Without credentials it
    /// bounds nobody. [default: 2048]
    #[arg(long, env = "BERTH_MAX_RANKS_PER_PRINCIPAL", value_name = "N")]
    pub max_ranks_per_principal: Option<usize>,

    /// Trajectories may take turns at a replica that drains for so long, where neither the
    /// operator nor the sidecar says it; then they move at their next turn. [default: 30s]
    #[arg(long, env = "BERTH_DRAIN_GRACE", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub drain_grace: Option<Duration>,

    /// Balance against agreement for new keys, from 1 (least loaded) to inf (plain consistent
    /// hashing). [default: 1]
    #[arg(long, env = "BERTH_LOAD_FACTOR", value_name = "FACTOR")]
    pub load_factor: Option<f64>,

    /// A trajectory idle for so long no longer counts as load. [default: 5m]
    #[arg(long, env = "BERTH_PIN_TTL", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub pin_ttl: Option<Duration>,

    /// Trajectories remembered at most. [default: 1000000]
    #[arg(long, env = "BERTH_MAX_PINS", value_name = "N")]
    pub max_pins: Option<usize>,

    /// Trajectories wait while no rank has room for them: the contexts that live on a rank may
    /// fill this share of its KV cache, as 1.0. 0: they do not wait. [default: 0]
    #[arg(long, env = "BERTH_KV_ADMISSION", value_name = "SHARE")]
    pub kv_admission: Option<f64>,

    /// A trajectory that has waited for room so long is taken all the same. [default: 5m]
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

    /// Samples in flight at most, of all tenants together; more wait for their turn.
    /// [default: 65536]
    #[arg(long, env = "BERTH_MAX_IN_FLIGHT", value_name = "N")]
    pub max_in_flight: Option<u64>,

    /// Of one tenant. [default: 16384]
    #[arg(long, env = "BERTH_TENANT_MAX_IN_FLIGHT", value_name = "N")]
    pub tenant_max_in_flight: Option<u64>,

    /// Bytes of prompts that one tenant has in flight at most; as many more may wait.
    /// [default: 2147483648]
    #[arg(long, env = "BERTH_TENANT_MAX_BYTES", value_name = "N")]
    pub tenant_max_bytes: Option<u64>,

    /// Calls of one tenant that wait at most, for their turn or for weights before it; more are
    /// refused. [default: 4096]
    #[arg(long, env = "BERTH_TENANT_QUEUE", value_name = "N")]
    pub tenant_queue: Option<usize>,

    /// Bytes of one request or response message. [default: 16777216]
    #[arg(long, env = "BERTH_MAX_MESSAGE_BYTES", value_name = "N")]
    pub max_message_bytes: Option<usize>,

    /// Streams that one connection may have open. [default: 4096]
    #[arg(long, env = "BERTH_MAX_STREAMS", value_name = "N")]
    pub max_streams: Option<u32>,

    /// Connections to the gRPC port at once; more are refused. [default: 10000]
    #[arg(long, env = "BERTH_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,

    /// Of one IPv4 address, or of one IPv6 network of 64 bits: lower it where callers do not
    /// share an address. [default: 5000]
    #[arg(long, env = "BERTH_MAX_CONNECTIONS_PER_ADDRESS", value_name = "N")]
    pub max_connections_per_address: Option<usize>,

    /// From a connection to the end of its first request's headers, on both ports. [default: 30s]
    #[arg(long, env = "BERTH_FIRST_REQUEST_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub first_request_timeout: Option<Duration>,

    /// A connection without an open call is ended after so long, without failing a call: clients
    /// make a new one when they need it. [default: 15m]
    #[arg(long, env = "BERTH_IDLE_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub idle_timeout: Option<Duration>,

    /// From a request's headers to the end of its message. [default: 1m]
    #[arg(long, env = "BERTH_BODY_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub body_timeout: Option<Duration>,

    /// Bytes of one request's headers, 32 for each included, on both ports. [default: 16384]
    #[arg(long, env = "BERTH_MAX_HEADER_BYTES", value_name = "N")]
    pub max_header_bytes: Option<u32>,

    /// Bytes of requests that have begun and are not whole, of all connections; more are refused.
    /// [default: 2147483648]
    #[arg(long, env = "BERTH_MAX_UNFINISHED_BYTES", value_name = "N")]
    pub max_unfinished_bytes: Option<u64>,

    /// HTTP/2 frames a second of one connection that carry no request, as pings and resets, and
    /// that answer nothing of ours. A connection with more is read from more slowly, and ended
    /// after 30 s of it. [default: 500]
    #[arg(long, env = "BERTH_MAX_CONTROL_FRAMES", value_name = "N")]
    pub max_control_frames: Option<u32>,

    /// Connections to the admin port at once. [default: 512]
    #[arg(long, env = "BERTH_ADMIN_MAX_CONNECTIONS", value_name = "N")]
    pub admin_max_connections: Option<usize>,

    /// Likewise, of one address. [default: 128]
    #[arg(
        long,
        env = "BERTH_ADMIN_MAX_CONNECTIONS_PER_ADDRESS",
        value_name = "N"
    )]
    pub admin_max_connections_per_address: Option<usize>,

    /// On SIGTERM, calls in flight may take so long to finish. [default: 30s]
    #[arg(long, env = "BERTH_DRAIN_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub drain_timeout: Option<Duration>,

    /// File of credentials: who may call, one a line as `berth token` prints it. Read again when
    /// it changes. Without one, everybody who reaches the server may do everything, so it then
    /// listens on loopback addresses only.
    #[arg(long, env = "BERTH_CREDENTIALS", value_name = "FILE")]
    pub credentials: Option<PathBuf>,

    /// Who may use gRPC reflection: on (every caller with credentials), admin or off.
    /// [default: on]
    #[arg(long, env = "BERTH_REFLECTION", value_name = "WHO")]
    pub reflection: Option<Reflection>,

    /// File to which the audit log is appended, opened again on SIGHUP. [default: the log, as
    /// target audit]
    #[arg(long, env = "BERTH_AUDIT_LOG", value_name = "FILE")]
    pub audit_log: Option<PathBuf>,

    /// The server's certificate with its chain, PEM: the gRPC port then speaks TLS. This and the
    /// files below are read again when they change.
    #[arg(long, env = "BERTH_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Its key, PEM.
    #[arg(long, env = "BERTH_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Authorities of clients' certificates, PEM. A client is known by its certificate's one URI
    /// name, where it sends no token.
    #[arg(long, env = "BERTH_TLS_CLIENT_CA", value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,

    /// Do not talk to clients without a certificate, health checks included. [default: false]
    #[arg(long, env = "BERTH_TLS_REQUIRE_CLIENT_CERT", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub tls_require_client_cert: Option<bool>,

    /// From a connection to the end of its TLS handshake at most. [default: 10s]
    #[arg(long, env = "BERTH_TLS_HANDSHAKE_TIMEOUT", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub tls_handshake_timeout: Option<Duration>,

    /// A connection with a client's certificate is ended after so long, without failing a call:
    /// certificates must be renewed so long before their end. [default: 10m]
    #[arg(long, env = "BERTH_TLS_CONNECTION_AGE", value_name = "TIME", value_parser = time)]
    #[serde(default, deserialize_with = "time_option")]
    pub tls_connection_age: Option<Duration>,

    /// Log format: human or json. [default: human]
    #[arg(long, env = "BERTH_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,

    /// What to log, as tracing's filters are written. [default: info]
    #[arg(long, env = "BERTH_LOG", value_name = "FILTER")]
    pub log: Option<String>,

    /// Collector of traces, its OTLP/gRPC URL as "http://127.0.0.1:4317". [default: none]
    #[arg(long, env = "BERTH_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Part of the requests that are traced, 0 to 1, where their client does not decide it by a
    /// traceparent. [default: 1]
    #[arg(long, env = "BERTH_OTLP_SAMPLE_RATIO", value_name = "RATIO")]
    pub otlp_sample_ratio: Option<f64>,
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
            max_replicas_per_principal: self
                .max_replicas_per_principal
                .or(other.max_replicas_per_principal),
            max_ranks: self.max_ranks.or(other.max_ranks),
            max_ranks_per_principal: self
                .max_ranks_per_principal
                .or(other.max_ranks_per_principal),
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
            max_in_flight: self.max_in_flight.or(other.max_in_flight),
            tenant_max_in_flight: self.tenant_max_in_flight.or(other.tenant_max_in_flight),
            tenant_max_bytes: self.tenant_max_bytes.or(other.tenant_max_bytes),
            tenant_queue: self.tenant_queue.or(other.tenant_queue),
            max_message_bytes: self.max_message_bytes.or(other.max_message_bytes),
            max_streams: self.max_streams.or(other.max_streams),
            max_connections: self.max_connections.or(other.max_connections),
            max_connections_per_address: self
                .max_connections_per_address
                .or(other.max_connections_per_address),
            first_request_timeout: self.first_request_timeout.or(other.first_request_timeout),
            idle_timeout: self.idle_timeout.or(other.idle_timeout),
            body_timeout: self.body_timeout.or(other.body_timeout),
            max_header_bytes: self.max_header_bytes.or(other.max_header_bytes),
            max_unfinished_bytes: self.max_unfinished_bytes.or(other.max_unfinished_bytes),
            max_control_frames: self.max_control_frames.or(other.max_control_frames),
            admin_max_connections: self.admin_max_connections.or(other.admin_max_connections),
            admin_max_connections_per_address: self
                .admin_max_connections_per_address
                .or(other.admin_max_connections_per_address),
            drain_timeout: self.drain_timeout.or(other.drain_timeout),
            credentials: self.credentials.or(other.credentials),
            reflection: self.reflection.or(other.reflection),
            audit_log: self.audit_log.or(other.audit_log),
            tls_cert: self.tls_cert.or(other.tls_cert),
            tls_key: self.tls_key.or(other.tls_key),
            tls_client_ca: self.tls_client_ca.or(other.tls_client_ca),
            tls_require_client_cert: self
                .tls_require_client_cert
                .or(other.tls_require_client_cert),
            tls_handshake_timeout: self.tls_handshake_timeout.or(other.tls_handshake_timeout),
            tls_connection_age: self.tls_connection_age.or(other.tls_connection_age),
            log_format: self.log_format.or(other.log_format),
            log: self.log.or(other.log),
            otlp_endpoint: self.otlp_endpoint.or(other.otlp_endpoint),
            otlp_sample_ratio: self.otlp_sample_ratio.or(other.otlp_sample_ratio),
        }
    }
}
