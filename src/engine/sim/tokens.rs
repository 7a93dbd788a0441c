//! What the simulated model says: every token and every log probability is a
//! pure function of the tokens before it and of the sampling seed.
//!
//! Going on from a prompt with a part of the output appended gives exactly the
//! rest of that output, and scoring an output as a prompt gives the log
//! probabilities that it was generated with. No model does better, so a test
//! can tell a lost, doubled or misplaced token from any other.

/// When the model ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eos {
    /// The id that ends a generation.
    pub id: u32,
    /// It comes once in this many tokens, on average. 0: never.
    pub one_in: u32,
}

/// A hash of all tokens so far, extended token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rolling(u64);

impl Default for Rolling {
    fn default() -> Self {
        Self(0x5eed_0f5a_117e_d0e5)
    }
}

impl Rolling {
    /// Of these tokens in order.
    pub fn of(tokens: &[u32]) -> Self {
        let mut rolling = Self::default();
        for &token in tokens {
            rolling.push(token);
        }
        rolling
    }

    /// Appends one token.
    pub fn push(&mut self, token: u32) {
        let salted = (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mix(self.0 ^ salted);
    }

    /// The hash.
    pub fn value(self) -> u64 {
        self.0
    }

    /// The token that follows, below `vocab`. The end of sequence comes only
    /// where `eos` is given: without it, its id is never emitted at all.
    pub fn next(self, seed: u64, vocab: u32, eos: Option<Eos>, eos_id: u32) -> u32 {
        let drawn = mix(self.0 ^ mix(seed ^ 0x00c0_ffee_0000_0001));
        if let Some(eos) = eos
            && eos.one_in > 0
            && eos.id < vocab
            && (drawn >> 32).is_multiple_of(u64::from(eos.one_in))
        {
            return eos.id;
        }
        let token = scale(drawn, vocab);
        if token == eos_id && vocab > 1 {
            (token + 1) % vocab
        } else {
            token
        }
    }

    /// The log probability of `token` here: from -3 to 0, the same whether it
    /// is generated or scored.
    pub fn logprob(self, token: u32) -> f32 {
        let drawn = mix(self.0 ^ mix(u64::from(token) ^ 0x1095_0b00));
        -3.0 * unit(drawn)
    }

    /// The `count` most likely tokens here with their log probabilities, best
    /// first; `first` leads where it is given.
    pub fn top(self, count: usize, vocab: u32, first: Option<u32>) -> Vec<(f32, u32)> {
        let mut list = Vec::with_capacity(count.min(vocab as usize));
        let mut value = match first {
            Some(token) => self.logprob(token),
            None => -0.05,
        };
        let mut token = first.unwrap_or_else(|| scale(mix(self.0 ^ 0x70b), vocab));
        while list.len() < count.min(vocab as usize) {
            list.push((value, token));
            // A step of 1 visits every id before it repeats one.
            token = (token + 1) % vocab;
            value -= 0.01 + unit(mix(self.0 ^ u64::from(token)));
        }
        list
    }
}

/// The first `n` tokens after `prompt` when no end of sequence is emitted
/// (`ignore_eos`) and its id is [`DEFAULT_EOS`].
pub fn expected(prompt: &[u32], seed: u64, n: usize, vocab: u32) -> Vec<u32> {
    continued(prompt, seed, n, vocab, None, DEFAULT_EOS)
}

/// The tokens after `prompt`: at most `n`, the last one being the end of
/// sequence where `eos` says that it comes.
pub fn expected_with_eos(prompt: &[u32], seed: u64, n: usize, vocab: u32, eos: Eos) -> Vec<u32> {
    continued(prompt, seed, n, vocab, Some(eos), eos.id)
}

fn continued(
    prompt: &[u32],
    seed: u64,
    n: usize,
    vocab: u32,
    eos: Option<Eos>,
    eos_id: u32,
) -> Vec<u32> {
    let mut rolling = Rolling::of(prompt);
    let mut out = Vec::with_capacity(n);
    while out.len() < n {
        let token = rolling.next(seed, vocab, eos, eos_id);
        out.push(token);
        rolling.push(token);
        if eos.is_some_and(|eos| eos.id == token) {
            break;
        }
    }
    out
}

/// The end of sequence of Qwen3's chat models.
pub const DEFAULT_EOS: u32 = 151_645;

/// A bijection of 64-bit words in which every bit depends on every other
/// (the finalizer of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The low half of `x`, as a number below `below` (0 where that is 0).
fn scale(x: u64, below: u32) -> u32 {
    let low = x & u64::from(u32::MAX);
    u32::try_from((low * u64::from(below)) >> 32).unwrap_or(0)
}

/// `x` as a number from 0 to 1.
fn unit(x: u64) -> f32 {
    // 24 bits: every value is exact in an f32.
    f32::from(u16::try_from(x >> 48).unwrap_or(0)) / f32::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_continuation_from_any_cut_is_the_rest(
            prompt in proptest::collection::vec(0_u32..5000, 1..50),
            seed: u64,
            n in 1_usize..60,
            cut in 0_usize..60,
        ) {
            let cut = cut.min(n);
            let whole = expected(&prompt, seed, n, 5000);
            let mut longer = prompt.clone();
            longer.extend_from_slice(&whole[..cut]);
            prop_assert_eq!(&expected(&longer, seed, n - cut, 5000)[..], &whole[cut..]);
            prop_assert!(whole.iter().all(|&t| t < 5000));
        }

        #[test]
        fn an_output_scored_as_a_prompt_has_the_same_logprobs(
            prompt in proptest::collection::vec(0_u32..5000, 1..20),
            token in 0_u32..5000,
        ) {
            let here = Rolling::of(&prompt);
            let (top, id) = here.top(3, 5000, Some(token))[0];
            prop_assert_eq!(id, token);
            prop_assert_eq!(top, here.logprob(token));
        }
    }

    #[test]
    fn order_length_and_seed_all_matter() {
        let base = expected(&[1, 2, 3], 0, 8, 151_936);
        assert_ne!(base, expected(&[2, 1, 3], 0, 8, 151_936));
        assert_ne!(base, expected(&[1, 2, 3, 3], 0, 8, 151_936));
        assert_ne!(base, expected(&[1, 2, 3], 1, 8, 151_936));
    }

    #[test]
    fn the_end_of_sequence_comes_about_as_often_as_said_and_never_unasked() {
        let eos = Eos { id: 7, one_in: 50 };
        let ended = (0..400_u64)
            .filter(|&seed| {
                let out = expected_with_eos(&[1, 2, 3], seed, 50, 1000, eos);
                assert!(out[..out.len() - 1].iter().all(|&t| t != 7));
                out.last() == Some(&7)
            })
            .count();
        // 1 - (1 - 1/50)^50 = 63.6 %.
        assert!((216..=293).contains(&ended), "{ended}");
        let plain = continued(&[1], 0, 5000, 10, None, 7);
        assert!(!plain.contains(&7));
    }

    #[test]
    fn the_mapping_is_pinned() {
        assert_eq!(
            expected(&[1, 2, 3], 0, 4, 151_936),
            [6473, 79_535, 10_060, 123_278]
        );
    }
}
