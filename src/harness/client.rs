//! Calls to the control plane: every try under the same idempotency key, within
//! one deadline, so that a retry joins or replays and never generates twice.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Request, Status, metadata::AsciiMetadataValue};
use tonic_types::StatusExt;

use crate::{
    auth::client::{Access, NoWire, Wire, cause, unsent},
    listing,
    proto::{
        FinishTrajectoryRequest, Replica, SampleRequest, SampleResponse,
        fleet_service_client::FleetServiceClient, sampling_service_client::SamplingServiceClient,
    },
};

/// One HTTP/2 connection is one lock on either side: more than a few in flight
/// wait for each other and not for the server.
const MAX_CONNECTIONS: u32 = 8;
/// A response holds one sample of at most 1,048,576 tokens of 4 bytes.
const MAX_RESPONSE_BYTES: usize = 16 << 20;
/// For a lost connection, where no RetryInfo can come.
const RETRY_UNTOLD: Duration = Duration::from_millis(500);
/// A server that says "retry at once" is not hammered.
const RETRY_LEAST: Duration = Duration::from_millis(10);
/// To make a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For calls about the fleet.
const FLEET_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection that is made when it is needed.
///
/// # Errors
/// All that is wrong with the URL and the files, by their options.
pub(super) fn wire(url: &str, access: &Access) -> Result<Wire, Vec<String>> {
    let wire = access.wire(url, |endpoint| endpoint.connect_timeout(CONNECT_TIMEOUT));
    wire.map_err(|faults| NoWire::told(faults, "--control-plane (BERTH_CONTROL_PLANE)"))
}

/// Connections to one control plane.
#[derive(Clone, Debug)]
pub(super) struct Client {
    channels: Vec<Wire>,
}

/// A response and what it took.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) response: SampleResponse,
    /// From the first try's start to the response, waits between tries included.
    pub(super) latency: Duration,
    /// 1 where the first try succeeded.
    pub(super) tries: u32,
}

impl Client {
    /// Connects lazily: a control plane that is not up yet is waited for by the
    /// caller.
    pub(super) fn new(url: &str, access: &Access, concurrency: u32) -> anyhow::Result<Self> {
        let channels = (0..concurrency.clamp(1, MAX_CONNECTIONS))
            .map(|_| wire(url, access).map_err(|faults| anyhow!(faults.join("; "))))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { channels })
    }

    /// Which of its connections trajectory `n` uses.
    fn channel(&self, n: u32) -> anyhow::Result<Wire> {
        let index = n as usize % self.channels.len().max(1);
        self.channels.get(index).cloned().context("no connection")
    }

    /// The replicas as the control plane sees them.
    pub(super) async fn list_replicas(
        &self,
        model: Option<String>,
    ) -> anyhow::Result<Vec<Replica>> {
        let fleet = FleetServiceClient::new(self.channel(0)?);
        match tokio::time::timeout(FLEET_TIMEOUT, listing::replicas(fleet, model)).await {
            Ok(Ok(replicas)) => Ok(replicas),
            Ok(Err(status)) => bail!("ListReplicas: {}", describe(&status)),
            Err(_) => bail!("ListReplicas: no answer within {FLEET_TIMEOUT:?}"),
        }
    }

    /// Frees a trajectory's pin. Whether it worked matters to nothing that was
    /// measured.
    pub(super) async fn finish_trajectory(
        &self,
        request: FinishTrajectoryRequest,
    ) -> anyhow::Result<()> {
        let mut sampling = SamplingServiceClient::new(self.channel(0)?);
        sampling.finish_trajectory(request).await?;
        Ok(())
    }

    /// Samples, with retries within `timeout`.
    pub(super) async fn sample(
        &self,
        channel: u32,
        message: SampleRequest,
        request_id: &str,
        timeout: Duration,
    ) -> anyhow::Result<Answer> {
        let id: AsciiMetadataValue = request_id
            .parse()
            .context("the request id is no header value")?;
        let mut client = SamplingServiceClient::new(self.channel(channel)?)
            .max_decoding_message_size(MAX_RESPONSE_BYTES);
        let started = Instant::now();
        let deadline = started + timeout;
        let mut tries = 0;
        loop {
            tries += 1;
            let mut request = Request::new(message.clone());
            request.metadata_mut().insert("x-request-id", id.clone());
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
            // The channel's own timeout ends with the headers: a body that
            // never comes is cut off here.
            let status = match timeout_at(deadline, client.sample(request)).await {
                Ok(Ok(response)) => {
                    return Ok(Answer {
                        response: response.into_inner(),
                        latency: started.elapsed(),
                        tries,
                    });
                }
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("the server did not answer"),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = retry_after(&status);
            match wait {
                Some(wait) if wait < left => sleep(wait).await,
                _ => {
                    let late = left.is_zero() || wait.is_some();
                    bail!(gave_up(&status, tries, started.elapsed(), late));
                }
            }
        }
    }
}

/// Why a request was given up. `late`: more time could have helped.
fn gave_up(status: &Status, tries: u32, after: Duration, late: bool) -> String {
    let noun = if tries == 1 { "try" } else { "tries" };
    let mut text = format!(
        "{} (given up after {tries} {noun} in {:.1} s",
        describe(status),
        after.as_secs_f64()
    );
    if late {
        text.push_str("; --request-timeout bounds a request with its retries");
    }
    text.push(')');
    text
}

/// How long to wait before the next try; `None` where none would help.
fn retry_after(status: &Status) -> Option<Duration> {
    let told = status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay);
    if unsent(status) {
        return Some(RETRY_LEAST);
    }
    match (status.code(), told) {
        (Code::Unavailable | Code::ResourceExhausted, Some(wait)) => Some(wait.max(RETRY_LEAST)),
        // The connection broke or was refused: only the control plane itself
        // can say more, and it did not.
        (Code::Unavailable, None) => Some(RETRY_UNTOLD),
        // Without RetryInfo this is a message over a size limit.
        _ => None,
    }
}

/// A status for a person: code, reason, message and all violations.
pub(super) fn describe(status: &Status) -> String {
    let mut text = format!("{:?}", status.code());
    if let Some(info) = status.get_details_error_info() {
        text.push_str(" / ");
        text.push_str(&info.reason);
    }
    text.push_str(": ");
    text.push_str(&cause(status));
    let violations = status
        .get_details_bad_request()
        .map(|bad| bad.field_violations)
        .unwrap_or_default();
    for violation in violations {
        let line = format!("{}: {}", violation.field, violation.description);
        // The message may list them already.
        if !text.contains(&line) {
            text.push_str("\n  ");
            text.push_str(&line);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn what_is_retried_and_when() {
        let told = |code, wait| {
            Status::with_error_details(
                code,
                "m",
                ErrorDetails::with_retry_info(Some(Duration::from_millis(wait))),
            )
        };
        let ms = |n| Some(Duration::from_millis(n));
        assert_eq!(retry_after(&told(Code::Unavailable, 70)), ms(70));
        assert_eq!(retry_after(&told(Code::ResourceExhausted, 70)), ms(70));
        assert_eq!(retry_after(&told(Code::Unavailable, 0)), ms(10));
        assert_eq!(retry_after(&Status::unavailable("gone")), ms(500));
        assert_eq!(retry_after(&Status::resource_exhausted("too large")), None);
        assert_eq!(retry_after(&told(Code::Internal, 70)), None);
    }

    #[test]
    fn a_status_says_reason_and_every_violation_once() {
        let mut details = ErrorDetails::with_error_info(
            "INVALID_REQUEST",
            "berth.dev",
            std::collections::HashMap::new(),
        );
        details.add_bad_request_violation("a", "is wrong");
        details.add_bad_request_violation("b", "too");
        let status =
            Status::with_error_details(Code::InvalidArgument, "invalid: a: is wrong", details);
        assert_eq!(
            describe(&status),
            "InvalidArgument / INVALID_REQUEST: invalid: a: is wrong\n  b: too"
        );
    }
}
