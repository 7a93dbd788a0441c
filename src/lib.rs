//! Berth: a gRPC control plane that keeps every turn of a trajectory on the
//! data-parallel rank that holds its KV cache, and generates every idempotency
//! key once.

pub mod admin;
pub mod api;
pub mod audit;
pub mod auth;
pub mod call;
pub mod cli;
pub mod config;
pub mod engine;
pub mod error;
pub mod failpoint;
pub mod fleet;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod harness;
pub mod ids;
pub mod keeper;
pub mod listen;
mod listing;
pub mod proto;
pub mod routing;
pub mod server;
pub mod sidecar;
pub mod simulate;
pub mod stack;
pub mod store;
pub mod telemetry;
