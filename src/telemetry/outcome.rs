//! How a call ended, from its gRPC status: a code and a reason, both of a few
//! words that are known beforehand.

use http::HeaderMap;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{api::status::DOMAIN, error::Reason};

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// The gRPC code.
    pub code: Code,
    /// The reason in its ErrorInfo; `none` where there is none.
    pub reason: &'static str,
}

/// What stands for no reason.
pub const NO_REASON: &str = "none";

impl Outcome {
    /// It went well.
    pub const OK: Self = Self::without_reason(Code::Ok);

    /// With nothing more to say.
    pub const fn without_reason(code: Code) -> Self {
        Self {
            code,
            reason: NO_REASON,
        }
    }

    /// Of a call that failed for this reason.
    pub fn of_reason(reason: Reason) -> Self {
        Self {
            code: reason.code(),
            reason: reason.name(),
        }
    }

    /// Of headers or trailers, where they hold a status.
    pub fn of_headers(headers: &HeaderMap) -> Option<Self> {
        let status = headers.get(Status::GRPC_STATUS)?;
        if status.as_bytes() == b"0" {
            return Some(Self::OK);
        }
        Status::from_header_map(headers).map(|status| Self::of_status(&status))
    }

    fn of_status(status: &Status) -> Self {
        let details = status.get_error_details();
        let ours = details.error_info().filter(|info| info.domain == DOMAIN);
        // By the list of all reasons: a label is never a text that came along.
        let known = ours.and_then(|info| {
            let mut all = Reason::ALL.into_iter();
            all.find(|reason| reason.name() == info.reason)
        });
        Self {
            code: status.code(),
            reason: known.map_or(NO_REASON, Reason::name),
        }
    }

    /// The code as gRPC writes it.
    pub fn code_name(self) -> &'static str {
        match self.code {
            Code::Ok => "OK",
            Code::Cancelled => "CANCELLED",
            Code::Unknown => "UNKNOWN",
            Code::InvalidArgument => "INVALID_ARGUMENT",
            Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Code::NotFound => "NOT_FOUND",
            Code::AlreadyExists => "ALREADY_EXISTS",
            Code::PermissionDenied => "PERMISSION_DENIED",
            Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Code::FailedPrecondition => "FAILED_PRECONDITION",
            Code::Aborted => "ABORTED",
            Code::OutOfRange => "OUT_OF_RANGE",
            Code::Unimplemented => "UNIMPLEMENTED",
            Code::Internal => "INTERNAL",
            Code::Unavailable => "UNAVAILABLE",
            Code::DataLoss => "DATA_LOSS",
            Code::Unauthenticated => "UNAUTHENTICATED",
        }
    }

    /// The fault is the server's, or what it depends on, as the semantic
    /// conventions of RPC see it.
    pub fn is_server_fault(self) -> bool {
        matches!(
            self.code,
            Code::Unknown
                | Code::DeadlineExceeded
                | Code::Unimplemented
                | Code::Internal
                | Code::Unavailable
                | Code::DataLoss
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_status_is_read_back_from_its_headers() {
        let response: http::Response<()> =
            Status::from(Error::new(Reason::EngineBusy, "full")).into_http();
        let outcome = Outcome::of_headers(response.headers()).unwrap();
        assert_eq!(outcome, Outcome::of_reason(Reason::EngineBusy));
        assert_eq!(outcome.code_name(), "RESOURCE_EXHAUSTED");

        let response: http::Response<()> = Status::new(Code::Unimplemented, "x").into_http();
        let outcome = Outcome::of_headers(response.headers()).unwrap();
        assert_eq!(
            (outcome.code, outcome.reason),
            (Code::Unimplemented, "none")
        );
        assert_eq!(Outcome::of_headers(&HeaderMap::new()), None);
    }

    #[test]
    fn a_reason_of_somebody_else_is_no_label() {
        let mut details = tonic_types::ErrorDetails::new();
        details.set_error_info("canary", DOMAIN, std::collections::HashMap::new());
        let status = Status::with_error_details(Code::Internal, "x", details);
        assert_eq!(Outcome::of_status(&status).reason, NO_REASON);
    }
}
