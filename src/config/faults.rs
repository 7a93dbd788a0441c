//! What is wrong with a configuration: every fault at once.

use std::time::Duration;

use super::Config;
use crate::fleet::drain::MAX_GRACE;

impl Config {
    pub(super) fn faults(&self) -> Vec<String> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let mut faults = Vec::new();
        let mut check = |ok: bool, fault: String| {
            if !ok {
                faults.push(fault);
            }
        };
        for (option, address, harm) in [
            (
                "listen",
                self.listen,
                "have prompts sent to a replica of its own",
            ),
            ("admin-listen", self.admin_listen, "read the metrics"),
        ] {
            check(
                address.ip().is_loopback() || self.auth.credentials.is_some(),
                format!(
                    "{option}: {address} is not a loopback address, and without a file of \
                     credentials whoever reaches it could {harm}: make one with `berth token` \
                     and name it in credentials"
                ),
            );
        }
        check(
            self.listen != self.admin_listen || self.listen.port() == 0,
            format!("listen and admin-listen are both {}", self.listen),
        );
        if let Some(otlp) = &self.otlp {
            let url = otlp.endpoint.parse::<http::Uri>();
            let is_one = url.is_ok_and(|url| {
                url.scheme_str() == Some("http") && url.port().is_some() && url.query().is_none()
                    // What would be dropped without a word.
                    && url.path().len() <= 1 && !otlp.endpoint.contains('#')
                    // Nor a password, which would be printed.
                    && url.authority().is_some_and(|a| !a.as_str().contains('@'))
            });
            check(
                is_one,
                "otlp-endpoint: must be a collector's OTLP/gRPC URL as \"http://127.0.0.1:4317\"; \
                 for TLS, run a collector beside"
                    .to_owned(),
            );
            check(
                (0.0..=1.0).contains(&otlp.sample_ratio),
                format!(
                    "otlp-sample-ratio: is {}, must be from 0 to 1",
                    otlp.sample_ratio
                ),
            );
        }
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
        if let Some(tls) = &self.auth.tls {
            within("tls-handshake-timeout", tls.handshake_timeout, ms(100), DAY);
            within("tls-connection-age", tls.connection_age, ms(1000), DAY);
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
        within(
            "first-request-timeout",
            self.limits.first_request,
            ms(100),
            DAY,
        );
        within("idle-timeout", self.limits.idle, ms(100), 30 * DAY);
        within("body-timeout", self.limits.body, ms(100), DAY);
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
        for (option, value) in [
            ("max-replicas", self.fleet.max_replicas),
            (
                "max-replicas-per-principal",
                self.fleet.max_replicas_per_principal,
            ),
            ("max-ranks", self.fleet.max_ranks),
            (
                "max-ranks-per-principal",
                self.fleet.max_ranks_per_principal,
            ),
        ] {
            check(
                (1..=65_536).contains(&value),
                format!("{option}: must be from 1 to 65536"),
            );
        }
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
        let admission = &self.stack.admission;
        for (option, value) in [
            ("max-in-flight", admission.max_samples),
            ("tenant-max-in-flight", admission.tenant_samples),
            ("tenant-max-bytes", admission.tenant_bytes),
        ] {
            check(value >= 1, format!("{option}: must be at least 1"));
        }
        check(
            admission.tenant_queue <= 1_000_000,
            "tenant-queue: must be from 0 to 1000000".to_owned(),
        );
        check(
            (1 << 16..=1 << 30).contains(&self.max_message_bytes),
            "max-message-bytes: must be from 65536 to 1073741824".to_owned(),
        );
        let (limits, admin) = (&self.limits, &self.admin_limits);
        for (option, value) in [
            ("max-connections", limits.connections.all),
            ("max-connections-per-address", limits.connections.of_address),
            ("admin-max-connections", admin.connections.all),
            (
                "admin-max-connections-per-address",
                admin.connections.of_address,
            ),
        ] {
            check(
                (1..=1_000_000).contains(&value),
                format!("{option}: must be from 1 to 1000000"),
            );
        }
        check(
            limits.max_streams >= 1,
            "max-streams: must be at least 1".to_owned(),
        );
        check(
            (1 << 10..=1 << 20).contains(&limits.header_bytes),
            "max-header-bytes: must be from 1024 to 1048576".to_owned(),
        );
        check(
            limits.unfinished_bytes >= self.max_message_bytes as u64,
            "max-unfinished-bytes: must be at least max-message-bytes".to_owned(),
        );
        check(
            (10..=1_000_000).contains(&limits.control_frames),
            "max-control-frames: must be from 10 to 1000000".to_owned(),
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
