//! How long a step of one rank takes.
//!
//! One step generates one token for every running request and computes the
//! chunks of prompts that were admitted to it:
//!
//! ```text
//! step      = max(decode + prefill, floor)
//! decode    = base + context tokens x 147,456 B / KV bandwidth
//! prefill   = sum over chunks [c, l) of T(l) - T(c)
//! T(l)      = (16.4e9 l + 294,912 l^2) / 294.5e12 s
//! ```
//!
//! - `base` is the time in which the weights pass through the GPU once. With
//!   8.265 ms and a KV bandwidth of 2.7e12 B/s, an H100 running one request
//!   whose context goes from 4,096 to 8,191 tokens averages 8.60 ms a token,
//!   which is what the published measurement of the workload gives.
//! - 147,456 B is the KV of one token of Qwen3-8B: 36 layers x 8 heads x 128
//!   x (K and V) x 2 B. A decode reads the KV of its whole context, a chunk
//!   that of the tokens before it.
//! - `T`: 16.4e9 is twice the parameters, 294,912 = 36 layers x 32 heads x 128
//!   x 2 the work of causal attention; 294.5e12/s is the rate at which the same
//!   measurement prefills (16.6k tokens/s at 4k).
//! - An H200 has the same compute and 4.8/3.35 of an H100's memory bandwidth:
//!   `base` and KV bandwidth are scaled by that. This is derived, not measured.
//! - Without CUDA graphs the host launches every kernel itself and a step is
//!   never shorter than that: 36 layers x 14 kernels x 25 us = 12.6 ms. The 14
//!   and the 25 are assumptions.
//!
//! Left out: a large batch's decode becomes bound by compute, and a real engine
//! runs prefill and decode in alternating steps, which costs about the same.

use std::time::Duration;

/// Bytes of KV of one token of Qwen3-8B.
const KV_BYTES: f64 = 147_456.0;
/// Memory bandwidth of an H200 over that of an H100.
const H200_OVER_H100: f64 = 4.8 / 3.35;
/// Seconds of one pass of the weights on an H100.
const BASE_H100: f64 = 8.265e-3;
/// Bytes of KV that an H100 reads in a second.
const KV_BANDWIDTH_H100: f64 = 2.7e12;
/// Host time of a step without CUDA graphs: layers x kernels x launch.
const LAUNCHES: f64 = 36.0 * 14.0 * 25e-6;
/// Operations a second that a prefill reaches.
const PREFILL_RATE: f64 = 294.5e12;

/// Constants of one accelerator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    base: f64,
    per_context_token: f64,
    prefill_rate: f64,
    floor: f64,
}

/// What one step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Tokens whose KV is read: the contexts of all decoding requests, and for
    /// every chunk the tokens before it.
    pub context_tokens: u64,
    /// Operations of the chunks, see [`Work::add_chunk`].
    flops: f64,
}

impl Work {
    /// Adds the computation of prompt tokens `[from, to)`.
    pub fn add_chunk(&mut self, from: usize, to: usize) {
        let flops = |tokens: usize| {
            let l = tokens as f64;
            16.4e9 * l + 294_912.0 * l * l
        };
        self.flops += flops(to) - flops(from);
        self.context_tokens += from as u64;
    }

    /// Adds the decode of one token with this many before it.
    pub fn add_decode(&mut self, context: usize) {
        self.context_tokens += context as u64;
    }
}

impl Timing {
    /// An H100 with 80 GB.
    pub const fn h100() -> Self {
        Self {
            base: BASE_H100,
            per_context_token: KV_BYTES / KV_BANDWIDTH_H100,
            prefill_rate: PREFILL_RATE,
            floor: 0.0,
        }
    }

    /// An H200.
    pub const fn h200() -> Self {
        Self {
            base: BASE_H100 / H200_OVER_H100,
            per_context_token: KV_BYTES / (KV_BANDWIDTH_H100 * H200_OVER_H100),
            prefill_rate: PREFILL_RATE,
            floor: 0.0,
        }
    }

    /// Takes no time at all.
    pub const fn instant() -> Self {
        Self {
            base: 0.0,
            per_context_token: 0.0,
            prefill_rate: f64::INFINITY,
            floor: 0.0,
        }
    }

    /// Every step takes `base`, whatever is in it.
    pub const fn constant(base: Duration) -> Self {
        Self {
            base: base.as_secs_f64(),
            ..Self::instant()
        }
    }

    /// The same without CUDA graphs.
    #[must_use]
    pub const fn without_cuda_graphs(self) -> Self {
        Self {
            floor: LAUNCHES,
            ..self
        }
    }

    /// The duration of a step with this much work.
    pub fn step(&self, work: &Work) -> Duration {
        let decode = self.base + work.context_tokens as f64 * self.per_context_token;
        let seconds = (decode + work.flops / self.prefill_rate).max(self.floor);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One request alone: `prompt` tokens of which `cached` are there, and 512
    /// generated.
    fn alone(timing: Timing, prompt: usize, cached: usize) -> f64 {
        let mut total = Duration::ZERO;
        for produced in 0..512 {
            let mut work = Work::default();
            if produced == 0 {
                work.add_chunk(cached, prompt);
            } else {
                work.add_decode(prompt + produced);
            }
            total += timing.step(&work);
        }
        total.as_secs_f64()
    }

    fn within(value: f64, target: f64, share: f64) {
        assert!(
            (value / target - 1.0).abs() <= share,
            "{value} is not within {share} of {target}"
        );
    }

    #[test]
    fn the_origins_workload_takes_the_time_that_it_took() {
        let cold = alone(Timing::h100(), 4096, 0);
        within(cold, 4.648, 0.015);
        let warm: f64 = (1..8)
            .map(|turn| 4096 + 512 * turn)
            .map(|prompt| alone(Timing::h100(), prompt, prompt - 1))
            .sum::<f64>()
            / 7.0;
        within(warm, 4.403, 0.01);
        within(4.0 * cold + 28.0 * warm, 141.9, 0.005);
    }

    #[test]
    fn a_token_costs_8_60_ms_over_the_origins_contexts() {
        let total: Duration = (4096..8192)
            .map(|context| {
                let mut work = Work::default();
                work.add_decode(context);
                Timing::h100().step(&work)
            })
            .sum();
        within(total.as_secs_f64() / 4096.0, 8.60e-3, 0.001);
    }

    #[test]
    fn prefill_times_are_the_anchors() {
        for (tokens, seconds) in [(4096, 0.245), (16_384, 1.18), (32_768, 2.9), (65_536, 7.9)] {
            let mut work = Work::default();
            work.add_chunk(0, tokens);
            let base = Timing::h100().step(&Work::default());
            within(
                (Timing::h100().step(&work) - base).as_secs_f64(),
                seconds,
                0.02,
            );
        }
    }

    #[test]
    fn chunks_add_up_to_the_whole() {
        let (mut parts, mut whole) = (Work::default(), Work::default());
        whole.add_chunk(0, 20_000);
        for (from, to) in [(0, 8192), (8192, 16_384), (16_384, 20_000)] {
            parts.add_chunk(from, to);
        }
        within(parts.flops, whole.flops, 1e-9);
    }

    #[test]
    fn an_h200_decodes_faster_by_its_bandwidth_and_no_graphs_are_a_floor() {
        let mut work = Work::default();
        work.add_decode(6144);
        let (h100, h200) = (Timing::h100().step(&work), Timing::h200().step(&work));
        within(h100.as_secs_f64() / h200.as_secs_f64(), 4.8 / 3.35, 1e-6);
        let eager = Timing::h100().without_cuda_graphs();
        within(eager.step(&work).as_secs_f64(), 12.6e-3, 1e-6);
        work.add_chunk(0, 8192);
        assert_eq!(eager.step(&work), Timing::h100().step(&work));
    }
}
