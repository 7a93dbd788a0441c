//! `berth token`: a new token, and the line by which the control plane knows it.

use std::{
    fs::OpenOptions,
    io::{Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};

use super::operator::usage;
use crate::auth::{file::Directory, token::Token};

/// Options.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whom the token is for. Several tokens may be one principal's.
    #[arg(long)]
    principal: String,
    /// What it may do; several, separated by commas.
    #[arg(long, value_name = "sample|replica|admin")]
    role: String,
    /// Whose its samples are. Needed for the role sample.
    #[arg(long)]
    tenant: Option<String>,
    /// The token counts for so long, as 90d [default: until its line is removed].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    valid_for: Option<Duration>,
    /// Write the token to this new file, which only its owner may read.
    #[arg(long, value_name = "FILE", required_unless_present = "from_stdin")]
    out: Option<PathBuf>,
    /// Make no token: read one from standard input.
    #[arg(long, conflicts_with = "out")]
    from_stdin: bool,
}

/// Runs it. Standard output gets the line, which is no secret.
///
/// # Errors
/// When the names are none, or the file is there already.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let token = if args.from_stdin {
        let mut text = String::new();
        std::io::stdin().take(4096).read_to_string(&mut text)?;
        Token::parse(&text)
            .context("standard input is no token")
            .map_err(usage)?
    } else {
        Token::mint().context("the system gives no randomness")?
    };
    let line = line(args, &token).map_err(usage)?;
    if let Some(out) = &args.out {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(out)
            .with_context(|| format!("--out: cannot make {}", out.display()))
            .map_err(usage)?;
        writeln!(file, "{}", token.expose())?;
        file.sync_all()?;
    }
    super::print(&format!("{line}\n"))?;
    Ok(())
}

fn line(args: &Args, token: &Token) -> anyhow::Result<String> {
    let mut line = format!("principal={} role={}", args.principal, args.role);
    if let Some(tenant) = &args.tenant {
        line.push_str(&format!(" tenant={tenant}"));
    }
    line.push_str(&format!(" sha256={}", token.hash()));
    if let Some(time) = args.valid_for {
        let until = SystemTime::now()
            .checked_add(time)
            .filter(|_| time < Duration::from_secs(100 * 366 * 24 * 3600))
            .context("--valid-for is too long")?;
        line.push_str(&format!(
            " not-after={}",
            humantime::format_rfc3339_seconds(until)
        ));
    }
    // As the control plane would read it.
    if let Err(faults) = Directory::parse(&line) {
        let faults: Vec<&str> = faults
            .iter()
            .map(|fault| fault.trim_start_matches("line 1: "))
            .collect();
        bail!("{}", faults.join("; "));
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(role: &str, tenant: Option<&str>) -> Args {
        Args {
            principal: "trainer".to_owned(),
            role: role.to_owned(),
            tenant: tenant.map(str::to_owned),
            valid_for: Some(Duration::from_secs(3600)),
            out: None,
            from_stdin: true,
        }
    }

    #[test]
    fn the_line_is_what_the_control_plane_reads() {
        let token = Token::mint().unwrap();
        let line = line(&args("sample,admin", Some("a")), &token).unwrap();
        assert!(!line.contains(token.expose()));
        let directory = Directory::parse(&line).unwrap();
        let credential = directory.by_token(&token.hash()).unwrap();
        assert_eq!(&*credential.principal.name, "trainer");
        assert!(credential.not_after.unwrap() > SystemTime::now());
    }

    #[test]
    fn names_that_are_none_make_no_line() {
        let token = Token::mint().unwrap();
        let fault = |args: &Args| line(args, &token).unwrap_err().to_string();
        assert!(fault(&args("sample", None)).contains("tenant"));
        assert!(fault(&args("root", Some("a"))).contains("role"));
        assert!(fault(&args("sample", Some("a b"))).contains("name=value"));
        assert!(fault(&args("sample", Some("a\nprincipal=x"))).len() > 1);
    }
}
