//! Random numbers that are the same in every build and on every machine.

/// A stream of numbers drawn from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From 0 to 1, 1 left out.
    pub fn unit(&mut self) -> f64 {
        // 32 bits: every value is exact.
        f64::from(u32::try_from(self.next() >> 32).unwrap_or(0)) / (f64::from(u32::MAX) + 1.0)
    }

    /// From `least` to `most`, both included.
    pub fn between(&mut self, least: u32, most: u32) -> u32 {
        let span = u64::from(most.saturating_sub(least)) + 1;
        least + u32::try_from(((self.next() >> 32) * span) >> 32).unwrap_or(0)
    }

    /// From `least` to `most` with a long tail (Pareto): half of the numbers are
    /// below twice the least.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from least to most"
    )]
    pub fn skewed(&mut self, least: u32, most: u32) -> u32 {
        let drawn = f64::from(least) / (1.0 - self.unit());
        (drawn.min(f64::from(most)) as u32).max(least)
    }
}
