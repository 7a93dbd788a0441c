//! Files that an operator writes, and headers that anybody does. See
//! `crate::fuzzing`.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue};

use super::{Config, Options, file};
use crate::{
    auth::{
        file::{Directory, MAX_FAULTS, is_name},
        token::Token,
    },
    fuzzing::Feed,
    stack::deadline,
    telemetry::trace,
};

/// A file of options, one of credentials, or the value of a header.
pub fn config(data: &[u8]) {
    let mut feed = Feed(data);
    let choice = feed.byte() % 3;
    if choice == 2 {
        return headers(feed.0);
    }
    let Ok(text) = std::str::from_utf8(feed.0) else {
        return;
    };
    if choice == 0 {
        let Ok((options, found)) = file::parse(text) else {
            return;
        };
        // Key by key is as all at once.
        let whole = toml::from_str::<Options>(text);
        assert_eq!(
            whole.is_ok(),
            found.faults.is_empty(),
            "{whole:?} {found:?}"
        );
        let wrong = !found.faults.is_empty();
        if let Ok((config, ())) = Config::resolve_with(options, found, |_| Ok(())) {
            assert!(!wrong);
            usable(&config);
        }
        return;
    }
    match Directory::parse(text) {
        Ok(directory) => assert!(!directory.is_empty()),
        Err(faults) => {
            assert!(!faults.is_empty() && faults.len() <= MAX_FAULTS + 1);
            let told = faults.join("\n");
            assert!(told.len() < 16_384);
            for word in text.split(|c: char| !c.is_ascii_alphanumeric()) {
                let digit = word.bytes().any(|b| b.is_ascii_digit());
                assert!(word.len() < 16 || !digit || !told.contains(word));
            }
        }
    }
}

/// A configuration that is taken can be run.
fn usable(config: &Config) {
    let open = [config.listen, config.admin_listen];
    let open = open.iter().any(|address| !address.ip().is_loopback());
    assert!(!open || config.auth.credentials.is_some());
    for ports in &config.egress.ports {
        assert!(*ports.start() > 0 && ports.start() <= ports.end());
    }
    // No time is so long that a clock cannot hold its end.
    let day = Duration::from_secs(24 * 3600);
    for time in [
        config.store.retention,
        config.fleet.lease.interval * 16,
        config.fleet.health.hang_after,
        config.fleet.health.fence_after,
        config.fleet.drain_grace,
        config.router.pin_ttl,
        config.stack.default_deadline,
        config.stack.grace,
        config.drain_timeout,
    ] {
        assert!(time <= day * 36_525, "{time:?}");
        assert!(SystemTime::now().checked_add(time).is_some());
    }
    assert!(config.stack.max_attempts > 0 && config.fleet.max_replicas > 0);
    assert!(config.stack.admission.max_samples > 0 && config.limits.max_streams > 0);
    assert!(config.router.load_factor.is_finite());
    if let Some(otlp) = &config.otlp {
        assert!((0.0..=1.0).contains(&otlp.sample_ratio));
        assert!(!otlp.endpoint.contains('@'));
    }
}

fn headers(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        if let Ok(token) = Token::parse(text) {
            assert_eq!(token.expose(), text.trim());
        }
        // A name is a word of the file of credentials.
        assert!(!is_name(text) || !text.contains(char::is_whitespace));
    }
    let Ok(value) = HeaderValue::from_bytes(bytes) else {
        return;
    };
    if let Some(timeout) = deadline::parse(&value) {
        assert!(timeout.as_secs() <= 99_999_999 * 3600);
    }
    let mut headers = HeaderMap::new();
    headers.insert(trace::TRACEPARENT, value);
    let _ = trace::parent_of(&headers);
}
