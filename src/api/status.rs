//! Errors become statuses here, and nowhere else. The table at the end of
//! `sampling.proto` says the same to users, and a test holds the two together.

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::error::{Error, Reason};

/// The domain of every ErrorInfo.
pub const DOMAIN: &str = "berth.dev";

impl Reason {
    /// Its gRPC code.
    pub fn code(self) -> Code {
        match self {
            Self::InvalidRequest
            | Self::ModelAmbiguous
            | Self::PromptTooLong
            | Self::TokenOutOfVocabulary
            | Self::EngineRefused => Code::InvalidArgument,
            Self::ModelNotFound
            | Self::KeyNotFound
            | Self::ReplicaNotFound
            | Self::TenantNotFound
            | Self::Reregister => Code::NotFound,
            Self::NoCredentials | Self::CredentialsRefused => Code::Unauthenticated,
            Self::RoleMissing | Self::ReplicaTaken => Code::PermissionDenied,
            Self::IdempotencyKeyReused => Code::AlreadyExists,
            Self::WeightsNotServed
            | Self::NotSupported
            | Self::StaleIncarnation
            | Self::IncarnationDead
            | Self::LastReplica
            | Self::TenantActive
            | Self::PromptCondemned => Code::FailedPrecondition,
            Self::NoReplica
            | Self::ReplicaLost
            | Self::OutcomeUnknown
            | Self::StoreFailed
            | Self::ShuttingDown => Code::Unavailable,
            Self::EngineBusy
            | Self::HeadersTooLarge
            | Self::ReceivingFull
            | Self::TooManyWaiters
            | Self::TenantBusy
            | Self::StoreFull
            | Self::FleetFull => Code::ResourceExhausted,
            Self::Deadline | Self::RequestTooSlow => Code::DeadlineExceeded,
            Self::Cancelled => Code::Cancelled,
            Self::EngineMisbehaved | Self::Internal => Code::Internal,
            Self::NotImplemented => Code::Unimplemented,
            Self::DataLoss => Code::DataLoss,
            Self::MessageTooLarge => Code::OutOfRange,
        }
    }

    /// Its name in ErrorInfo.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "INVALID_REQUEST",
            Self::ModelAmbiguous => "MODEL_AMBIGUOUS",
            Self::PromptTooLong => "PROMPT_TOO_LONG",
            Self::TokenOutOfVocabulary => "TOKEN_OUT_OF_VOCABULARY",
            Self::ModelNotFound => "MODEL_NOT_FOUND",
            Self::KeyNotFound => "KEY_NOT_FOUND",
            Self::ReplicaNotFound => "REPLICA_NOT_FOUND",
            Self::Reregister => "REREGISTER",
            Self::IdempotencyKeyReused => "IDEMPOTENCY_KEY_REUSED",
            Self::WeightsNotServed => "WEIGHTS_NOT_SERVED",
            Self::NotSupported => "NOT_SUPPORTED",
            Self::StaleIncarnation => "STALE_INCARNATION",
            Self::IncarnationDead => "INCARNATION_DEAD",
            Self::LastReplica => "LAST_REPLICA",
            Self::FleetFull => "FLEET_FULL",
            Self::NoCredentials => "NO_CREDENTIALS",
            Self::CredentialsRefused => "CREDENTIALS_REFUSED",
            Self::RoleMissing => "ROLE_MISSING",
            Self::TenantNotFound => "TENANT_NOT_FOUND",
            Self::TenantActive => "TENANT_ACTIVE",
            Self::TenantBusy => "TENANT_BUSY",
            Self::HeadersTooLarge => "HEADERS_TOO_LARGE",
            Self::RequestTooSlow => "REQUEST_TOO_SLOW",
            Self::ReceivingFull => "RECEIVING_FULL",
            Self::ReplicaTaken => "REPLICA_TAKEN",
            Self::NoReplica => "NO_REPLICA",
            Self::ReplicaLost => "REPLICA_LOST",
            Self::OutcomeUnknown => "OUTCOME_UNKNOWN",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::EngineBusy => "ENGINE_BUSY",
            Self::TooManyWaiters => "TOO_MANY_WAITERS",
            Self::StoreFull => "STORE_FULL",
            Self::StoreFailed => "STORE_FAILED",
            Self::PromptCondemned => "PROMPT_CONDEMNED",
            Self::Deadline => "DEADLINE",
            Self::Cancelled => "CANCELLED",
            Self::EngineRefused => "ENGINE_REFUSED",
            Self::EngineMisbehaved => "ENGINE_MISBEHAVED",
            Self::Internal => "INTERNAL",
            Self::NotImplemented => "NOT_IMPLEMENTED",
            Self::DataLoss => "DATA_LOSS",
            Self::MessageTooLarge => "MESSAGE_TOO_LARGE",
        }
    }

    /// All of them.
    pub const ALL: [Self; 42] = [
        Self::InvalidRequest,
        Self::ModelAmbiguous,
        Self::PromptTooLong,
        Self::TokenOutOfVocabulary,
        Self::ModelNotFound,
        Self::KeyNotFound,
        Self::ReplicaNotFound,
        Self::Reregister,
        Self::IdempotencyKeyReused,
        Self::WeightsNotServed,
        Self::NotSupported,
        Self::StaleIncarnation,
        Self::IncarnationDead,
        Self::LastReplica,
        Self::FleetFull,
        Self::NoCredentials,
        Self::CredentialsRefused,
        Self::RoleMissing,
        Self::TenantNotFound,
        Self::TenantActive,
        Self::TenantBusy,
        Self::HeadersTooLarge,
        Self::RequestTooSlow,
        Self::ReceivingFull,
        Self::ReplicaTaken,
        Self::NoReplica,
        Self::ReplicaLost,
        Self::OutcomeUnknown,
        Self::ShuttingDown,
        Self::EngineBusy,
        Self::TooManyWaiters,
        Self::StoreFull,
        Self::StoreFailed,
        Self::PromptCondemned,
        Self::Deadline,
        Self::Cancelled,
        Self::EngineRefused,
        Self::EngineMisbehaved,
        Self::Internal,
        Self::NotImplemented,
        Self::DataLoss,
        Self::MessageTooLarge,
    ];
}

/// More violations than these are not listed: they go in headers, twice, and clients
/// take no longer ones than 8 to 16 KiB in all.
const MAX_VIOLATIONS: usize = 32;
/// Of all of them, in bytes.
const MAX_VIOLATION_BYTES: usize = 2048;
/// Of the message, in bytes.
const MAX_MESSAGE: usize = 1024;

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let mut details = ErrorDetails::new();
        details.set_error_info(
            error.reason.name(),
            DOMAIN,
            std::collections::HashMap::new(),
        );
        let mut bytes = 0;
        for violation in error.violations.iter().take(MAX_VIOLATIONS) {
            bytes += violation.field.len() + violation.description.len();
            if bytes > MAX_VIOLATION_BYTES {
                break;
            }
            details.add_bad_request_violation(violation.field.as_ref(), &violation.description);
        }
        if let Some(wait) = error.retry_after {
            details.set_retry_info(Some(wait));
        }
        let mut message = error.message;
        if message.len() > MAX_MESSAGE {
            let whole = (0..=MAX_MESSAGE)
                .rev()
                .find(|at| message.is_char_boundary(*at));
            message.truncate(whole.unwrap_or(0));
            message.push_str(" ...");
        }
        Self::with_error_details(error.reason.code(), message, details)
    }
}

/// A fault of our own of which nothing may be told.
pub fn internal() -> Status {
    Error::new(
        Reason::Internal,
        "a fault of the server; its log says more under this request's id",
    )
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of the table in the proto: reason, code, retry.
    fn table() -> Vec<(String, String, String)> {
        include_str!("../../proto/berth/v1/sampling.proto")
            .lines()
            .filter_map(|line| line.strip_prefix("// | "))
            .filter(|row| !row.starts_with("reason"))
            .map(|row| {
                let mut cells = row.trim_end_matches('|').split('|').map(str::trim);
                let mut cell = || cells.next().unwrap().to_owned();
                (cell(), cell(), cell())
            })
            .collect()
    }

    fn upper_snake(code: Code) -> String {
        let mut name = String::new();
        for c in format!("{code:?}").chars() {
            if c.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.extend(c.to_uppercase());
        }
        name
    }

    #[test]
    fn the_proto_tells_every_reason_as_it_is() {
        let mut told: Vec<_> = table().into_iter().map(|(r, c, _)| (r, c)).collect();
        let mut real: Vec<_> = Reason::ALL
            .into_iter()
            .map(|r| (r.name().to_owned(), upper_snake(r.code())))
            .collect();
        told.sort();
        real.sort();
        assert_eq!(told, real);
    }

    #[test]
    fn a_reason_that_says_retry_info_has_it() {
        for (name, _, retry) in table() {
            let reason = Reason::ALL.into_iter().find(|r| r.name() == name).unwrap();
            assert_eq!(
                Error::new(reason, "").retry_after.is_some(),
                retry.contains("RetryInfo"),
                "{name}"
            );
        }
    }

    #[test]
    fn what_is_told_fits_the_headers_that_it_goes_in() {
        let long = |n: usize| {
            let field = format!("ranks[{n}].endpoint");
            crate::error::Violation::new(field, "\u{e4}".repeat(300))
        };
        let error = Error::invalid(Reason::InvalidRequest, (0..2000).map(long).collect());
        let status = Status::from(error);
        // As they are written: a letter that is not ASCII in the message is three times
        // as long, details are in base64.
        let message: usize = status
            .message()
            .bytes()
            .map(|b| if b.is_ascii() { 1 } else { 3 })
            .sum();
        assert!(message + status.details().len() * 4 / 3 < 8 << 10);
        assert!(status.message().ends_with(" ..."), "{}", status.message());
        let details = status.get_error_details();
        assert!(details.bad_request().unwrap().field_violations.len() > 1);
    }

    #[test]
    fn details_arrive() {
        let error = Error::invalid(
            Reason::InvalidRequest,
            vec![
                crate::error::Violation::new("a", "is bad"),
                crate::error::Violation::new("b", "is worse"),
            ],
        );
        let status = Status::from(error);
        assert_eq!(status.code(), Code::InvalidArgument);
        let details = status.get_error_details();
        assert_eq!(details.error_info().unwrap().reason, "INVALID_REQUEST");
        assert_eq!(details.error_info().unwrap().domain, DOMAIN);
        assert_eq!(details.bad_request().unwrap().field_violations.len(), 2);
    }
}
