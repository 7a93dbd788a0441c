//! What the operator's subcommands share: the connection, the output, and errors
//! in one line that say what to do, with exit codes for scripts:
//!
//! | code | meaning                                                          |
//! |------|------------------------------------------------------------------|
//! | 0    | done                                                             |
//! | 1    | failed in another way                                            |
//! | 2    | wrong usage                                                      |
//! | 3    | no such replica, model or pin                                    |
//! | 4    | the control plane cannot be reached or cannot answer: try again  |
//! | 5    | refused as things are: the message says what has to change first |
//! | 6    | what was waited for did not come in time                         |

pub(super) mod json;
pub(super) mod table;

use std::{error::Error as _, io::Write, process::ExitCode, time::Duration};

use tonic::{Code, Response, Status};
use tonic_types::StatusExt;

use crate::{
    auth::client::{Access, NoWire, Wire, cause},
    error::Reason,
    proto::{Replica, ReplicaHealth, fleet_service_client::FleetServiceClient},
};

/// Where the control plane is.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Connection {
    /// gRPC address of the control plane.
    #[arg(long, env = "BERTH_URL", default_value = "http://127.0.0.1:7700")]
    url: String,
    /// How long one call may take.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = timeout)]
    timeout: Duration,
    #[command(flatten)]
    access: Access,
}

fn timeout(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if !time.is_zero() && time <= Duration::from_secs(24 * 3600) => Ok(time),
        Ok(_) => Err("must be above 0s and at most 24h".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// A failure with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Failure {
    pub(super) exit: u8,
    pub(super) message: String,
}

impl Failure {
    pub(super) const OTHER: u8 = 1;
    pub(super) const USAGE: u8 = 2;
    pub(super) const NOT_FOUND: u8 = 3;
    pub(super) const UNAVAILABLE: u8 = 4;
    pub(super) const REFUSED: u8 = 5;
    pub(super) const LATE: u8 = 6;

    /// The exit code for a call that ended with this code.
    pub(super) fn exit(code: Code) -> u8 {
        match code {
            Code::InvalidArgument => Self::USAGE,
            Code::NotFound => Self::NOT_FOUND,
            Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => {
                Self::UNAVAILABLE
            }
            Code::FailedPrecondition => Self::REFUSED,
            _ => Self::OTHER,
        }
    }

    pub(super) fn new(exit: u8, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }
}

/// Wrong usage of a command that is no operator's: what it was told cannot be. It is
/// told as any other error, with the exit code that clap has for such.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(anyhow::Error);

/// That this is wrong usage.
pub(super) fn usage(error: impl Into<anyhow::Error>) -> anyhow::Error {
    Usage(error.into()).into()
}

/// The control plane's `FleetService`.
pub(super) struct Operator {
    pub(super) client: FleetServiceClient<Wire>,
    /// For its other services.
    pub(super) channel: Wire,
    connection: Connection,
}

impl Connection {
    /// Nothing is connected yet.
    pub(super) fn open(self) -> Result<Operator, Failure> {
        let wire = self.access.wire(&self.url, |endpoint| {
            endpoint
                .connect_timeout(self.timeout)
                // A control plane whose machine is gone is noticed by a watch too.
                .http2_keep_alive_interval(Duration::from_secs(20))
                .keep_alive_timeout(Duration::from_secs(10))
                .keep_alive_while_idle(true)
        });
        let channel = wire.map_err(|faults| {
            let faults = NoWire::told(faults, "--url (BERTH_URL)");
            Failure::new(Failure::USAGE, faults.join("; "))
        })?;
        Ok(Operator {
            client: FleetServiceClient::new(channel.clone()),
            channel,
            connection: self,
        })
    }
}

impl Operator {
    /// One call within the timeout.
    pub(super) async fn call<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(self.connection.timeout, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.failure(&status)),
            Err(_) => Err(Failure::new(
                Failure::UNAVAILABLE,
                format!(
                    "{} does not answer within {} (--timeout)",
                    self.connection.url,
                    humantime::format_duration(self.connection.timeout)
                ),
            )),
        }
    }

    /// A status as a failure: its reason, its message, and what to do.
    pub(super) fn failure(&self, status: &Status) -> Failure {
        let reason = status.get_details_error_info().map(|info| info.reason);
        let Some(reason) = reason else {
            // Not an answer of a control plane's: the connection failed.
            let (exit, what) = match status.code() {
                Code::Unavailable => (Failure::UNAVAILABLE, "cannot be reached"),
                // What the transport gives when a new connection ends at once.
                Code::Unknown if status.source().is_some() => {
                    (Failure::UNAVAILABLE, "cannot be reached")
                }
                Code::Unimplemented => (Failure::OTHER, "is no control plane of this version"),
                _ => (Failure::OTHER, "failed"),
            };
            let message = format!(
                "{} {what}: {}; --url or BERTH_URL says where the control plane is",
                self.connection.url,
                cause(status)
            );
            return Failure::new(exit, message);
        };
        let exit = Failure::exit(status.code());
        let hint = if reason == Reason::LastReplica.name() {
            "; --force drains it"
        } else if reason == Reason::ReplicaNotFound.name() {
            "; `berth replicas` shows them"
        } else if reason == Reason::ModelAmbiguous.name() {
            "; --model names one"
        } else if reason == Reason::NoCredentials.name() {
            "; --token-file or BERTH_TOKEN_FILE names a file that holds a token"
        } else {
            ""
        };
        Failure::new(exit, format!("{reason}: {}{hint}", status.message()))
    }
}

/// How a subcommand ended, told to the user and to the shell.
pub(super) fn report(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    let broken_pipe = error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
    if broken_pipe {
        // Who reads has seen enough.
        return ExitCode::SUCCESS;
    }
    // Where standard error is closed there is nobody to tell.
    let mut out = std::io::stderr().lock();
    match error.downcast_ref::<Failure>() {
        Some(failure) => {
            let _ = writeln!(out, "berth: {}", table::plain(&failure.message));
            ExitCode::from(failure.exit)
        }
        None => {
            let (error, exit) = match error.downcast::<Usage>() {
                Ok(Usage(error)) => (error, ExitCode::from(Failure::USAGE)),
                Err(error) => (error, ExitCode::FAILURE),
            };
            // Not its debug form: that has a backtrace where the environment wants
            // one, which tells a user nothing.
            let _ = writeln!(out, "Error: {error}");
            for cause in error.chain().skip(1) {
                let _ = writeln!(out, "  because: {cause}");
            }
            exit
        }
    }
}

/// One JSON document, or one line of many.
pub(super) fn print_json(value: &serde_json::Value, one_line: bool) -> std::io::Result<()> {
    let text = if one_line {
        value.to_string()
    } else {
        format!("{value:#}")
    };
    super::print(&format!("{text}\n"))
}

/// The replica that every answer about one has.
pub(super) fn some(replica: Option<Replica>) -> Result<Replica, Failure> {
    replica.ok_or_else(|| Failure::new(Failure::OTHER, "the answer tells of no replica"))
}

/// As people write it.
pub(super) fn health(replica: &Replica) -> &'static str {
    match replica.health() {
        ReplicaHealth::Unspecified => "unknown",
        ReplicaHealth::Healthy => "healthy",
        ReplicaHealth::Suspect => "suspect",
        ReplicaHealth::Dead => "dead",
        ReplicaHealth::Draining => "draining",
        ReplicaHealth::Unverified => "unverified",
        ReplicaHealth::Unhealthy => "unhealthy",
    }
}

/// Samples in flight at a replica.
pub(super) fn in_flight(replica: &Replica) -> u64 {
    replica.ranks.iter().map(|rank| rank.in_flight).sum()
}

/// A length of time of a message, in seconds.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(super) fn seconds(duration: Option<&prost_types::Duration>) -> f64 {
    duration.map_or(0.0, |d| d.seconds as f64 + f64::from(d.nanos) / 1e9)
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn operator(url: &str) -> Result<Operator, Failure> {
        let connection = Connection {
            url: url.to_owned(),
            timeout: Duration::from_secs(1),
            access: Access::default(),
        };
        connection.open()
    }

    #[tokio::test]
    async fn addresses_are_checked() {
        assert!(operator("http://127.0.0.1:7700").is_ok());
        for wrong in ["127.0.0.1:7700", "nonsense x", "", "http://u:secret@h"] {
            let failure = operator(wrong).err().unwrap();
            assert_eq!(failure.exit, 2, "{failure}");
            assert!(failure.message.contains("--url (BERTH_URL)"), "{failure}");
            assert!(failure.message.contains("http://"), "{failure}");
            assert!(!failure.message.contains("secret"), "{failure}");
        }
        let failure = operator("https://h").err().unwrap();
        assert_eq!(failure.exit, 2, "{failure}");
        assert!(failure.message.contains("--tls-ca"), "{failure}");
        assert!(!failure.message.contains("--url"), "{failure}");
    }

    #[tokio::test]
    async fn a_failure_has_the_reason_and_an_exit_code() {
        let operator = operator("http://127.0.0.1:7700").unwrap();
        let failure = |code, reason: &str| {
            let details = ErrorDetails::with_error_info(
                reason,
                "berth.dev",
                std::collections::HashMap::new(),
            );
            let status = Status::with_error_details(code, "what happened", details);
            operator.failure(&status)
        };
        let last = failure(Code::FailedPrecondition, "LAST_REPLICA");
        assert_eq!(last.exit, 5);
        assert_eq!(
            last.message,
            "LAST_REPLICA: what happened; --force drains it"
        );
        assert_eq!(failure(Code::NotFound, "REPLICA_NOT_FOUND").exit, 3);
        assert_eq!(failure(Code::Unavailable, "SHUTTING_DOWN").exit, 4);
        assert_eq!(failure(Code::InvalidArgument, "INVALID_REQUEST").exit, 2);
        let ambiguous = failure(Code::InvalidArgument, "MODEL_AMBIGUOUS");
        assert!(ambiguous.message.contains("--model"), "{ambiguous}");
        let gone = operator.failure(&Status::unavailable("tcp connect error"));
        assert_eq!(gone.exit, 4);
        assert!(gone.message.contains("--url") && gone.message.contains("tcp"));
    }
}
