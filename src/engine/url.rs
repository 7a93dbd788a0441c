//! URLs of engines: where Berth and its sidecars call.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

/// An absolute http URL of host and port, without anything else, as it is kept.
///
/// # Errors
/// What it must be. What it is stays unsaid: there may be a password in it.
pub fn base_url(text: &str) -> Result<Arc<str>, &'static str> {
    const FORM: &str =
        "must be an absolute URL as \"http://host:port\", without user, path, query or fragment";
    if text.len() > 512 {
        return Err("may have 512 bytes at most");
    }
    let uri: http::Uri = text.parse().map_err(|_| FORM)?;
    let authority = uri.authority().ok_or(FORM)?;
    const HOST: &str = "its host must be a name, or an address written as 10.0.0.1 or [fd00::1]";
    if uri.scheme_str() != Some("http")
        || !matches!(uri.path(), "" | "/")
        || uri.query().is_some()
        || authority.as_str().contains('@')
        || authority.host().is_empty()
        || !is_port(authority.as_str().strip_prefix(authority.host()))
        || authority.as_str().contains('%')
    {
        return Err(FORM);
    }
    if !is_host(authority.host()) {
        return Err(HOST);
    }
    let url = format!("http://{authority}");
    // The parser drops some parts without a word, as what follows a `#`.
    if !text
        .strip_suffix('/')
        .unwrap_or(text)
        .eq_ignore_ascii_case(&url)
    {
        return Err(FORM);
    }
    Ok(url.into())
}

/// Whether what follows a host is nothing, or a port that there is: `:+80` is one to some
/// readers only.
pub(crate) fn is_port(behind: Option<&str>) -> bool {
    let Some(digits) = behind.and_then(|behind| behind.strip_prefix(':')) else {
        return behind == Some("");
    };
    digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Whether everybody who reads this host means the same by it. `127.1`, `0x7f000001` and
/// `127.0.0.1.` are numbers to some and names to others.
fn is_host(host: &str) -> bool {
    if let Some(inner) = host.strip_prefix('[') {
        let inner = inner.strip_suffix(']');
        return inner.is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
    }
    if host.parse::<Ipv4Addr>().is_ok() {
        return true;
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let last = name.rsplit('.').next().unwrap_or(name);
    let number = last.bytes().all(|b| b.is_ascii_digit())
        || last
            .strip_prefix("0x")
            .or_else(|| last.strip_prefix("0X"))
            .is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    name.len() <= 253 && name.split('.').all(label) && !number
}
