//! The control plane's configuration: flags over `BERTH_*` environment over a
//! TOML file over defaults. The options stand once, in [`Options`]; unknown keys
//! in the file and unknown `BERTH_*` variables are errors; everything is checked
//! before a port is bound, and all faults are told at once.

use std::{net::SocketAddr, ops::RangeInclusive, path::PathBuf, sync::Arc, time::Duration};

use anyhow::anyhow;
use ipnet::IpNet;

use crate::{
    auth::{AuthConfig, TlsConfig},
    engine::egress::Egress,
    fleet::{FleetConfig, health::HealthConfig, lease::LeaseConfig},
    listen::limits::{AdminLimits, Connections, Limits},
    routing::{KvAdmission, MoveConfig, RouterConfig},
    stack::{StackConfig, admission::AdmissionConfig},
    store::sled::{Durability, SledOptions},
    telemetry::otlp::{OtlpConfig, SpanCounts},
};

mod faults;
pub mod file;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod options;
mod shown;
#[cfg(test)]
mod tests;

pub use file::Found;
pub use options::{DurabilityChoice, LogFormat, Options};

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
    /// Limits of the gRPC listener.
    pub limits: Limits,
    /// Limits of the admin listener.
    pub admin_limits: AdminLimits,
    /// Calls in flight at a shutdown.
    pub drain_timeout: Duration,
    /// Who may do what.
    pub auth: AuthConfig,
    /// Log lines.
    pub log_format: LogFormat,
    /// What to log.
    pub log: String,
    /// Where traces go; `None`: nowhere.
    pub otlp: Option<OtlpConfig>,
    /// Measure. No option: for a benchmark of what it costs.
    pub measured: bool,
    /// What became of the process's spans. Shared with who sends them.
    pub spans: Arc<SpanCounts>,
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
            limits: Limits::default(),
            admin_limits: AdminLimits::default(),
            drain_timeout: Duration::from_secs(30),
            auth: AuthConfig::default(),
            log_format: LogFormat::default(),
            log: "info".to_owned(),
            otlp: None,
            measured: true,
            spans: Arc::default(),
        }
    }
}

impl Config {
    /// Fills in the defaults and checks.
    ///
    /// # Errors
    /// Every fault, one a line.
    pub fn resolve(options: Options) -> anyhow::Result<Self> {
        let resolved = Self::resolve_with(options, Found::default(), |_| Ok(()));
        resolved.map(|(config, ())| config)
    }

    /// As [`resolve`](Self::resolve), with what was found wrong before, and with what
    /// the configuration names, once `read`.
    ///
    /// # Errors
    /// Every fault, one a line.
    pub fn resolve_with<T>(
        options: Options,
        mut found: Found,
        read: impl FnOnce(&Self) -> Result<T, Vec<String>>,
    ) -> anyhow::Result<(Self, T)> {
        let default = Self::default();
        let mut faults = Vec::new();
        let listen = options.listen.unwrap_or(default.listen);
        // Of both listeners.
        let first_request = options
            .first_request_timeout
            .unwrap_or(default.limits.first_request);
        let header_bytes = options
            .max_header_bytes
            .unwrap_or(default.limits.header_bytes);
        let tls = tls(&options, &mut faults);
        let any_network = options.engine_networks.is_none();
        let egress = Egress {
            networks: options
                .engine_networks
                .map_or_else(Vec::new, |text| networks(&text, &mut faults)),
            ports: options
                .engine_ports
                .map_or(default.egress.ports, |text| ports(&text, &mut faults)),
            // Networks that are named are all that there are.
            loopback: listen.ip().is_loopback() && any_network,
            ..Egress::default()
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
                max_replicas_per_principal: options
                    .max_replicas_per_principal
                    .unwrap_or(default.fleet.max_replicas_per_principal),
                max_ranks: options.max_ranks.unwrap_or(default.fleet.max_ranks),
                max_ranks_per_principal: options
                    .max_ranks_per_principal
                    .unwrap_or(default.fleet.max_ranks_per_principal),
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
                admission: AdmissionConfig {
                    max_samples: options
                        .max_in_flight
                        .unwrap_or(default.stack.admission.max_samples),
                    tenant_samples: options
                        .tenant_max_in_flight
                        .unwrap_or(default.stack.admission.tenant_samples),
                    tenant_bytes: options
                        .tenant_max_bytes
                        .unwrap_or(default.stack.admission.tenant_bytes),
                    tenant_queue: options
                        .tenant_queue
                        .unwrap_or(default.stack.admission.tenant_queue),
                },
                ..default.stack
            },
            max_message_bytes: options
                .max_message_bytes
                .unwrap_or(default.max_message_bytes),
            limits: Limits {
                connections: Connections {
                    all: options
                        .max_connections
                        .unwrap_or(default.limits.connections.all),
                    of_address: options
                        .max_connections_per_address
                        .unwrap_or(default.limits.connections.of_address),
                },
                max_streams: options.max_streams.unwrap_or(default.limits.max_streams),
                first_request,
                idle: options.idle_timeout.unwrap_or(default.limits.idle),
                body: options.body_timeout.unwrap_or(default.limits.body),
                header_bytes,
                unfinished_bytes: options
                    .max_unfinished_bytes
                    .unwrap_or(default.limits.unfinished_bytes),
                control_frames: options
                    .max_control_frames
                    .unwrap_or(default.limits.control_frames),
            },
            admin_limits: AdminLimits {
                connections: Connections {
                    all: options
                        .admin_max_connections
                        .unwrap_or(default.admin_limits.connections.all),
                    of_address: options
                        .admin_max_connections_per_address
                        .unwrap_or(default.admin_limits.connections.of_address),
                },
                first_request,
                header_bytes,
            },
            drain_timeout: options.drain_timeout.unwrap_or(default.drain_timeout),
            auth: AuthConfig {
                credentials: options.credentials,
                reflection: options.reflection.unwrap_or_default(),
                audit_log: options.audit_log,
                tls,
            },
            log_format: options.log_format.unwrap_or(default.log_format),
            log: options.log.unwrap_or(default.log),
            otlp: options.otlp_endpoint.map(|endpoint| OtlpConfig {
                endpoint,
                sample_ratio: options.otlp_sample_ratio.unwrap_or(1.0),
            }),
            ..default
        };
        faults.extend(config.faults());
        let read = read(&config).map_err(|found| faults.extend(found));
        faults.retain(|fault| !found.hides(fault));
        found.faults.append(&mut faults);
        match read {
            Ok(read) if found.faults.is_empty() => Ok((config, read)),
            _ => Err(unusable(&found.faults)),
        }
    }
}

/// All that is wrong with a configuration, one a line.
pub fn unusable(faults: &[String]) -> anyhow::Error {
    anyhow!(
        "the configuration is not usable:\n  {}",
        faults.join("\n  ")
    )
}

/// TLS, where its files are named.
fn tls(options: &Options, faults: &mut Vec<String>) -> Option<TlsConfig> {
    let (cert, key) = match (options.tls_cert.clone(), options.tls_key.clone()) {
        (Some(cert), Some(key)) => (cert, key),
        (None, None) => {
            for (option, given) in [
                ("tls-client-ca", options.tls_client_ca.is_some()),
                (
                    "tls-require-client-cert",
                    options.tls_require_client_cert == Some(true),
                ),
            ] {
                if given {
                    faults.push(format!("{option}: needs tls-cert and tls-key"));
                }
            }
            return None;
        }
        _ => {
            faults.push("tls-cert and tls-key: each needs the other".to_owned());
            return None;
        }
    };
    let tls = TlsConfig {
        cert,
        key,
        client_ca: options.tls_client_ca.clone(),
        require_client_cert: options.tls_require_client_cert.unwrap_or(false),
        handshake_timeout: options
            .tls_handshake_timeout
            .unwrap_or(Duration::from_secs(10)),
        connection_age: options
            .tls_connection_age
            .unwrap_or(Duration::from_secs(600)),
    };
    if tls.require_client_cert && tls.client_ca.is_none() {
        faults.push("tls-require-client-cert: needs tls-client-ca".to_owned());
    }
    Some(tls)
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
