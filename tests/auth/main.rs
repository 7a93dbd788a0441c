//! Who may do what, as callers see it: a real server, real sidecars, tokens and
//! certificates made here.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod addresses;
mod commands;
mod owners;
mod tenants;
mod tls;
mod tokens;
mod world;

#[path = "../support/wait.rs"]
mod wait;
