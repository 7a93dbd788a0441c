//! What a connection, a request or an address may take: each limit met by real
//! sockets, told to its client and counted, while others are served.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    missing_docs,
    reason = "a failed assumption is a failed test"
)]

mod admin;
mod connections;
mod plane;
mod requests;
mod whole;

#[path = "../support/process.rs"]
mod process;
#[path = "../support/served.rs"]
mod served;
#[path = "../support/wait.rs"]
mod wait;
#[path = "../support/wire.rs"]
mod wire;
