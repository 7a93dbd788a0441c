//! What can go wrong with a call, as one small enum of reasons. Each reason has
//! one gRPC code and one retry rule; `api::status` maps them, and the table at
//! the end of `sampling.proto` tells them to users.

use std::{borrow::Cow, time::Duration};

use serde::{Deserialize, Serialize};

use crate::store::StoreError;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(
    missing_docs,
    reason = "documented where users read it: sampling.proto"
)]
pub enum Reason {
    InvalidRequest,
    ModelAmbiguous,
    PromptTooLong,
    TokenOutOfVocabulary,
    ModelNotFound,
    KeyNotFound,
    ReplicaNotFound,
    Reregister,
    IdempotencyKeyReused,
    WeightsNotServed,
    NotSupported,
    StaleIncarnation,
    IncarnationDead,
    LastReplica,
    FleetFull,
    NoReplica,
    ReplicaLost,
    OutcomeUnknown,
    ShuttingDown,
    EngineBusy,
    TooManyWaiters,
    StoreFull,
    StoreFailed,
    PromptCondemned,
    Deadline,
    Cancelled,
    EngineRefused,
    EngineMisbehaved,
    Internal,
    NotImplemented,
    DataLoss,
    // Stored failures know a reason by its place: new ones come last.
    NoCredentials,
    CredentialsRefused,
    RoleMissing,
    TenantNotFound,
    TenantActive,
    TenantBusy,
    HeadersTooLarge,
    RequestTooSlow,
    ReceivingFull,
    ReplicaTaken,
    MessageTooLarge,
}

/// One thing that is wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The field, as a path in the message: `sampling.top_p`.
    pub field: Cow<'static, str>,
    /// What is wrong and what would be right. Never the value of a prompt or key.
    pub description: String,
}

impl Violation {
    /// A violation of `field`.
    pub fn new(field: impl Into<Cow<'static, str>>, description: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            description: description.into(),
        }
    }
}

/// A failed call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Error {
    /// The kind, which decides code and retry.
    pub reason: Reason,
    /// For a person: what happened and what to do. Never a prompt or a key.
    pub message: String,
    /// Every violation, where the request is at fault.
    pub violations: Vec<Violation>,
    /// How long to wait before a retry, where one helps.
    pub retry_after: Option<Duration>,
}

impl Error {
    /// An error of this kind.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            violations: Vec::new(),
            retry_after: reason.default_retry(),
        }
    }

    /// A request that is at fault in these ways.
    pub fn invalid(reason: Reason, violations: Vec<Violation>) -> Self {
        let list: Vec<String> = violations
            .iter()
            .map(|v| format!("{}: {}", v.field, v.description))
            .collect();
        Self {
            violations,
            ..Self::new(reason, format!("invalid request: {}", list.join("; ")))
        }
    }

    /// The same with another time to wait.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// The caller's deadline has passed.
    pub fn deadline() -> Self {
        Self::new(
            Reason::Deadline,
            "the deadline passed before all samples were finished; a retry with the same \
             idempotency key joins the generation or replays it",
        )
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let reason = match &error {
            StoreError::Full(_) => Reason::StoreFull,
            StoreError::NotOwner => Reason::OutcomeUnknown,
            StoreError::Refused(_) => Reason::Internal,
            StoreError::Damaged(_) => Reason::DataLoss,
            StoreError::Failed(_) => Reason::StoreFailed,
        };
        Self::new(reason, error.to_string())
    }
}

impl Reason {
    /// Whether the same request fails the same way whenever it is sent: only
    /// such failures are kept under an idempotency key. What depends on the
    /// fleet never is.
    pub fn is_deterministic(self) -> bool {
        matches!(self, Self::EngineRefused | Self::PromptCondemned)
    }

    /// How long to wait before a retry, for reasons where waiting helps.
    fn default_retry(self) -> Option<Duration> {
        match self {
            Self::NoReplica | Self::ReplicaLost | Self::ShuttingDown => {
                Some(Duration::from_secs(1))
            }
            Self::OutcomeUnknown | Self::StoreFull | Self::StoreFailed => {
                Some(Duration::from_secs(5))
            }
            Self::EngineBusy | Self::TooManyWaiters | Self::TenantBusy | Self::ReceivingFull => {
                Some(Duration::from_millis(500))
            }
            _ => None,
        }
    }
}
