//! What the store on disk keeps through the death of its process and of its
//! power. A driver, which is this test binary started again, works on a store
//! and writes down what it was told; then it dies, or its trace is replayed
//! onto a disk that kept only part of it.
//!
//! Long forms: `BERTH_STORE_CYCLES=1000` kills, `BERTH_STORE_IMAGES=200` power
//! losses.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    clippy::cast_possible_truncation,
    reason = "a failed assumption is a failed test"
)]

mod driver;
mod kill;
mod power;
#[path = "../support/store.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with other tests")]
mod support;

/// A count from the environment.
fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().unwrap())
}

/// A small generator: the tests need reproducible choices, not good ones.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
