//! The control plane as a sidecar sees it: three calls, each bounded in time,
//! and what their errors ask of the sidecar. A connection on which a call got no
//! answer in time is not used again: after a partition it may be dead without a
//! word, for as long as a keep-alive takes to find out.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    auth::client::{Access, NoWire, Wire, cause},
    error::Reason,
    proto::{
        DeregisterReplicaRequest, Directive, HeartbeatRequest, RegisterReplicaRequest,
        replica_service_client::ReplicaServiceClient,
    },
};

/// Why a call did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The control plane does not know this replica.
    #[error("the control plane does not know this replica: {0}")]
    Unknown(String),
    /// A newer start of this replica is registered.
    #[error("a newer start of this replica is registered: {0}")]
    Stale(String),
    /// What was said is at fault, or not allowed: the same again will fail too.
    #[error("refused by the control plane: {0}")]
    Refused(String),
    /// It has declared this start dead, which is final: only another boot id
    /// helps.
    #[error("the control plane has declared this start dead: {0}")]
    Dead(String),
    /// As many replicas are registered as it allows.
    #[error("the control plane has no place for another replica: {0}")]
    Full(String),
    /// It could not be reached or could not answer.
    #[error("the control plane does not answer: {0}")]
    Failed(String),
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        let said = format!("{:?}: {}", status.code(), cause(&status));
        match status.code() {
            Code::ResourceExhausted if is(&status, Reason::FleetFull) => Self::Full(said),
            Code::NotFound => Self::Unknown(said),
            Code::FailedPrecondition if is(&status, Reason::IncarnationDead) => Self::Dead(said),
            Code::FailedPrecondition => Self::Stale(said),
            Code::InvalidArgument
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::AlreadyExists
            | Code::OutOfRange => Self::Refused(said),
            _ => Self::Failed(said),
        }
    }
}

fn is(status: &Status, reason: Reason) -> bool {
    status
        .get_details_error_info()
        .is_some_and(|info| info.reason == reason.name())
}

/// A registration as the control plane took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Of this start.
    pub incarnation: u64,
    /// How often to beat.
    pub interval: Duration,
}

/// What a heartbeat is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// What to do.
    pub directive: Directive,
    /// Samples that the control plane has sent to this engine, or is about to.
    pub in_flight: u64,
}

/// Beats are at least this far apart, whatever is asked for.
const MIN_INTERVAL: Duration = Duration::from_millis(10);
/// And at most this far.
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// Where none is told.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(2);

/// A beat is waited for at least so long, however close to each other they are.
const MIN_PATIENCE: Duration = Duration::from_secs(1);

/// The control plane.
#[derive(Clone, Debug)]
pub struct Control {
    url: String,
    access: Access,
    client: ReplicaServiceClient<Wire>,
    limit: Duration,
}

impl Control {
    /// Nothing is connected yet, and a lost connection is made anew by itself.
    pub(super) fn new(url: &str, access: Access, limit: Duration) -> Result<Self, Vec<String>> {
        let wire = wire(url, &access, limit)?;
        Ok(Self {
            client: ReplicaServiceClient::new(wire),
            url: url.to_owned(),
            access,
            limit,
        })
    }

    pub(super) async fn register(
        &mut self,
        request: RegisterReplicaRequest,
    ) -> Result<Grant, CallError> {
        let answer = within(self.limit, self.client.register_replica(request)).await;
        let answer = self.connected(answer)?;
        let answer = answer.map_err(|error| match error {
            // A boot id of an earlier sidecar beside this same engine, which has
            // renewed it since: renew it again.
            CallError::Stale(said) => CallError::Dead(said),
            CallError::Unknown(said) => CallError::Refused(said),
            other => other,
        })?;
        let interval = answer
            .heartbeat_interval
            .and_then(|interval| Duration::try_from(interval).ok())
            .filter(|interval| !interval.is_zero())
            .unwrap_or(DEFAULT_INTERVAL);
        Ok(Grant {
            incarnation: answer.incarnation,
            interval: interval.clamp(MIN_INTERVAL, MAX_INTERVAL),
        })
    }

    pub(super) async fn heartbeat(
        &mut self,
        request: HeartbeatRequest,
        interval: Duration,
    ) -> Result<Heard, CallError> {
        // The next beat is as good as this one.
        let limit = self.limit.min(interval.max(MIN_PATIENCE));
        let answer = within(limit, self.client.heartbeat(request)).await;
        let answer = self.connected(answer)??;
        Ok(Heard {
            directive: answer.directive(),
            in_flight: answer.in_flight,
        })
    }

    pub(super) async fn deregister(
        &mut self,
        request: DeregisterReplicaRequest,
        limit: Duration,
    ) -> Result<(), CallError> {
        let answer = within(limit, self.client.deregister_replica(request)).await;
        self.connected(answer)??;
        Ok(())
    }

    /// The answer; or, where there was none in time, another connection for the
    /// next call.
    fn connected<T>(&mut self, answer: Result<T, Late>) -> Result<T, CallError> {
        answer.map_err(|late| {
            // Files that cannot be read now leave the connection that there is.
            if let Ok(wire) = wire(&self.url, &self.access, self.limit) {
                self.client = ReplicaServiceClient::new(wire);
            }
            CallError::Failed(format!("nothing within {:?}", late.0))
        })
    }
}

fn wire(url: &str, access: &Access, limit: Duration) -> Result<Wire, Vec<String>> {
    let wire = access.wire(url, |endpoint| {
        endpoint
            .connect_timeout(limit)
            // A control plane whose machine is gone is noticed between calls.
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(10))
            .tcp_nodelay(true)
    });
    wire.map_err(|faults| NoWire::told(faults, "--control-plane (BERTH_SIDECAR_CONTROL_PLANE)"))
}

/// Nothing came within this.
struct Late(Duration);

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<Result<T, CallError>, Late> {
    let answer = tokio::time::timeout(limit, call).await;
    let answer = answer.map_err(|_| Late(limit))?;
    Ok(answer
        .map(tonic::Response::into_inner)
        .map_err(CallError::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_full_fleet_is_no_silence() {
        let full = Status::from(Error::new(Reason::FleetFull, "leave first"));
        let told = CallError::from(full).to_string();
        assert!(
            told.contains("no place") && told.contains("leave first"),
            "{told}"
        );
        let busy = CallError::from(Status::resource_exhausted("slow down"));
        assert!(matches!(busy, CallError::Failed(_)), "{busy}");
    }
}
