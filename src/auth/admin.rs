//! The admin port's layer: the [`Gate`] decides over plain HTTP too.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::Gate;
use crate::error::Reason;

/// Answers who may not ask, and lets the others pass.
pub async fn guard(State(gate): State<Arc<Gate>>, mut request: Request, next: Next) -> Response {
    let admitted = gate.admit_to_admin_port(
        request.uri().path(),
        request.headers(),
        request.extensions(),
    );
    let Err(error) = admitted else {
        request.headers_mut().remove(header::AUTHORIZATION);
        return next.run(request).await;
    };
    let text = format!("{}: {}\n", error.reason.name(), error.message);
    if error.reason == Reason::RoleMissing {
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let mut response = (StatusCode::UNAUTHORIZED, text).into_response();
    response
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}
