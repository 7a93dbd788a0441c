//! A simulated engine.

pub mod radix;
pub mod scheduler;
pub mod timing;
pub mod tokens;
