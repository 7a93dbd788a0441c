//! A simulated engine that speaks SGLang's or vLLM's HTTP and behaves as the
//! recordings of the real ones show, the unkind parts included. The fronts differ;
//! ranks, caches and times are the same.
//!
//! - [`scheduler`]: one rank, pure: queue, batch, radix cache, time.
//! - [`text`]: what its sequences are made of.
//! - [`timing`]: what a step costs, and where the numbers come from.
//! - [`tokens`]: what is generated, as a function that tests can call.
//! - [`SimEngine`]: the server, in process on the caller's runtime.
//!
//! It differs from the real one where a real one differs from itself (which
//! tokens come, exact times) and in this: `sampling_seed` is honoured, and
//! `/server_info` and `/model_info` carry the keys that clients ask for, not
//! all 600.

mod adapters;
mod config;
mod control;
mod driver;
mod engine;
mod faults;
mod flight;
mod generate;
mod history;
mod info;
pub mod radix;
mod reply;
mod request;
mod running;
pub mod scheduler;
mod server;
pub mod text;
pub mod timing;
pub mod tokens;
mod vllm;

pub use config::{Dialect, Profile, SimConfig};
pub use engine::{End, PauseMode};
pub use faults::{Cut, CutWhen, DropStream, Faults, Hang, Times};
pub use history::{Counters, How, Record};
pub use server::{SimEngine, SimHandle};
