//! A configuration as an operator would write it: in the TOML of its file.

use std::{fmt::Display, path::Path, time::Duration};

use clap::ValueEnum;

use super::{Config, DurabilityChoice};
use crate::store::sled::Durability;

impl Config {
    /// Every option with its value, as the configuration file has it. What has none,
    /// or none that counts, is named at the end.
    pub fn shown(&self) -> String {
        let mut text = String::new();
        let mut unset = Vec::new();
        for (option, value) in self.values() {
            match value {
                Some(value) => text.push_str(&format!("{option} = {value}\n")),
                None => unset.push(option),
            }
        }
        if !unset.is_empty() {
            text.push_str(&format!(
                "# not set, or of no effect: {}\n",
                unset.join(", ")
            ));
        }
        text
    }

    /// In the order of `berth serve --help`.
    fn values(&self) -> Vec<(&'static str, Option<String>)> {
        let (fleet, health) = (&self.fleet, &self.fleet.health);
        let (router, stack, limits) = (&self.router, &self.stack, &self.limits);
        let (kv, moves) = (router.kv_admission, router.moves);
        let admission = &stack.admission;
        let (auth, tls, otlp) = (&self.auth, self.auth.tls.as_ref(), self.otlp.as_ref());
        let durability = match self.store.durability {
            Durability::Fsync => DurabilityChoice::Fsync,
            Durability::Relaxed => DurabilityChoice::Relaxed,
        };
        let ports = self.egress.ports.iter().map(|ports| {
            if ports.start() == ports.end() {
                ports.start().to_string()
            } else {
                format!("{}-{}", ports.start(), ports.end())
            }
        });
        let networks = row(self.egress.networks.iter().map(ToString::to_string));
        vec![
            ("listen", Some(text(self.listen))),
            ("admin-listen", Some(text(self.admin_listen))),
            ("data-dir", self.data_dir.as_deref().map(path)),
            ("durability", Some(name(durability))),
            ("retention", Some(time(self.store.retention))),
            ("max-result-bytes", Some(plain(self.store.max_result_bytes))),
            ("tenant-quota", Some(plain(self.store.tenant_quota))),
            ("free-space-floor", Some(plain(self.store.free_space_floor))),
            ("accept-loss", Some(plain(self.store.accept_loss))),
            ("heartbeat-interval", Some(time(fleet.lease.interval))),
            ("hang-after", Some(time(health.hang_after))),
            ("slowest-prefill", Some(plain(health.slowest_prefill))),
            ("slowest-decode", Some(plain(health.slowest_decode))),
            ("eject-after", Some(plain(health.eject_after))),
            ("fence-after", Some(time(health.fence_after))),
            (
                "allow-unknown-vocabulary",
                Some(plain(self.allow_unknown_vocabulary)),
            ),
            ("engine-networks", networks),
            ("engine-ports", row(ports)),
            ("max-replicas", Some(plain(fleet.max_replicas))),
            (
                "max-replicas-per-principal",
                Some(plain(fleet.max_replicas_per_principal)),
            ),
            ("max-ranks", Some(plain(fleet.max_ranks))),
            (
                "max-ranks-per-principal",
                Some(plain(fleet.max_ranks_per_principal)),
            ),
            ("drain-grace", Some(time(fleet.drain_grace))),
            ("load-factor", Some(number(router.load_factor))),
            ("pin-ttl", Some(time(router.pin_ttl))),
            ("max-pins", Some(plain(router.max_pins))),
            ("kv-admission", Some(number(kv.map_or(0.0, |kv| kv.share)))),
            ("kv-admission-wait", kv.map(|kv| time(kv.wait))),
            (
                "moves-per-minute",
                Some(plain(moves.map_or(0, |moves| moves.per_minute))),
            ),
            ("move-margin", moves.map(|moves| time(moves.margin))),
            (
                "move-max-context",
                moves.map(|moves| plain(moves.max_context)),
            ),
            ("keyless-prefix", Some(plain(router.keyless_prefix))),
            ("max-prefix-blocks", Some(plain(router.max_prefix_blocks))),
            ("default-deadline", Some(time(stack.default_deadline))),
            ("grace", Some(time(stack.grace))),
            ("max-attempts", Some(plain(stack.max_attempts))),
            ("max-in-flight", Some(plain(admission.max_samples))),
            (
                "tenant-max-in-flight",
                Some(plain(admission.tenant_samples)),
            ),
            ("tenant-max-bytes", Some(plain(admission.tenant_bytes))),
            ("tenant-queue", Some(plain(admission.tenant_queue))),
            ("max-message-bytes", Some(plain(self.max_message_bytes))),
            ("max-streams", Some(plain(limits.max_streams))),
            ("max-connections", Some(plain(limits.connections.all))),
            (
                "max-connections-per-address",
                Some(plain(limits.connections.of_address)),
            ),
            ("first-request-timeout", Some(time(limits.first_request))),
            ("idle-timeout", Some(time(limits.idle))),
            ("body-timeout", Some(time(limits.body))),
            ("max-header-bytes", Some(plain(limits.header_bytes))),
            ("max-unfinished-bytes", Some(plain(limits.unfinished_bytes))),
            ("max-control-frames", Some(plain(limits.control_frames))),
            (
                "admin-max-connections",
                Some(plain(self.admin_limits.connections.all)),
            ),
            (
                "admin-max-connections-per-address",
                Some(plain(self.admin_limits.connections.of_address)),
            ),
            ("drain-timeout", Some(time(self.drain_timeout))),
            ("credentials", auth.credentials.as_deref().map(path)),
            ("reflection", Some(name(auth.reflection))),
            ("audit-log", auth.audit_log.as_deref().map(path)),
            ("tls-cert", tls.map(|tls| path(&tls.cert))),
            ("tls-key", tls.map(|tls| path(&tls.key))),
            (
                "tls-client-ca",
                tls.and_then(|tls| tls.client_ca.as_deref().map(path)),
            ),
            (
                "tls-require-client-cert",
                tls.map(|tls| plain(tls.require_client_cert)),
            ),
            (
                "tls-handshake-timeout",
                tls.map(|tls| time(tls.handshake_timeout)),
            ),
            (
                "tls-connection-age",
                tls.map(|tls| time(tls.connection_age)),
            ),
            ("log-format", Some(name(self.log_format))),
            ("log", Some(text(&self.log))),
            ("otlp-endpoint", otlp.map(|otlp| text(&otlp.endpoint))),
            (
                "otlp-sample-ratio",
                otlp.map(|otlp| number(otlp.sample_ratio)),
            ),
        ]
    }
}

fn plain(value: impl Display) -> String {
    value.to_string()
}

/// With a point, where it has none: TOML tells whole numbers from others.
fn number(value: f64) -> String {
    format!("{value:?}")
}

fn text(value: impl Display) -> String {
    toml::Value::String(value.to_string()).to_string()
}

fn path(path: &Path) -> String {
    text(path.display())
}

fn time(time: Duration) -> String {
    text(humantime::format_duration(time))
}

fn name(choice: impl ValueEnum) -> String {
    let value = choice.to_possible_value();
    text(value.map_or_else(String::new, |value| value.get_name().to_owned()))
}

/// In a row, where there are any.
fn row(parts: impl Iterator<Item = String>) -> Option<String> {
    let parts: Vec<String> = parts.collect();
    (!parts.is_empty()).then(|| text(parts.join(",")))
}
