//! Which rank has seen which beginning of a prompt, for requests without a key.
//!
//! A prompt is cut into whole blocks of [`BLOCK`] tokens, and each is named by a
//! hash of itself and all before it; a table says which rank answered last a prompt
//! that has this block. Two prompts that differ anywhere before a block do not meet
//! in it. Bounded: the least recently used of some blocks leaves for a new one.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;
use xxhash_rust::xxh3::Xxh3;

use super::bounded::{Bounded, Used};
use crate::{fleet::snapshot::RankSlot, ids::Tenant};

/// Tokens of a block.
pub const BLOCK: u32 = 256;

/// Blocks of one prompt that are looked at: 1,048,576 tokens.
pub(crate) const MOST_BLOCKS: usize = 4096;

const SHARDS: u64 = 16;

/// The names of a prompt's whole blocks, first to last. Tenant, model and adapter
/// are part of them: their caches are told apart, too.
pub fn blocks<'a>(
    tenant: &Tenant,
    model: &str,
    adapter: Option<&str>,
    tokens: impl IntoIterator<Item = &'a u32>,
) -> Vec<u64> {
    let mut hasher = Xxh3::new();
    for part in [tenant.as_str(), model, adapter.unwrap_or_default()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.update(&[u8::from(adapter.is_some())]);
    let mut names = Vec::new();
    let mut block = Vec::with_capacity(4 * BLOCK as usize);
    for token in tokens {
        block.extend_from_slice(&token.to_le_bytes());
        if block.len() == 4 * BLOCK as usize {
            // All before it is in the hasher already.
            hasher.update(&block);
            names.push(hasher.digest());
            block.clear();
            if names.len() == MOST_BLOCKS {
                break;
            }
        }
    }
    names
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    slot: RankSlot,
    used: Instant,
}

impl Used for Seen {
    fn used(&self) -> Instant {
        self.used
    }
}

/// The table.
#[derive(Debug)]
pub(super) struct Prefixes(Box<[Mutex<Bounded<u64, Seen>>]>);

impl Prefixes {
    /// For at most about so many blocks.
    pub(super) fn new(most: usize) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
        let most = most.div_ceil(SHARDS as usize);
        Self(
            (0..SHARDS)
                .map(|_| Mutex::new(Bounded::new(most)))
                .collect(),
        )
    }

    fn shard(&self, block: u64) -> &Mutex<Bounded<u64, Seen>> {
        let index = usize::try_from(block % SHARDS).unwrap_or(0);
        &self.0[index]
    }

    /// The longest beginning of these blocks that a rank has seen which `takes` it,
    /// as that rank and the number of blocks.
    pub(super) fn longest(
        &self,
        blocks: &[u64],
        takes: impl Fn(RankSlot) -> bool,
    ) -> Option<(RankSlot, u32)> {
        blocks.iter().enumerate().rev().find_map(|(index, block)| {
            let shard = self.shard(*block);
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let slot = shard.get(block)?.slot;
            drop(shard);
            let length = u32::try_from(index).unwrap_or(u32::MAX - 1) + 1;
            takes(slot).then_some((slot, length))
        })
    }

    /// A rank has these in its cache now.
    pub(super) fn seen(&self, blocks: &[u64], slot: RankSlot, now: Instant) {
        for &block in blocks {
            let shard = self.shard(block);
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.insert(block, Seen { slot, used: now });
        }
    }

    /// Blocks that are remembered.
    pub(super) fn len(&self) -> usize {
        let shards = self.0.iter();
        shards
            .map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).len())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(tokens: &[u32]) -> Vec<u64> {
        blocks(&Tenant::default(), "m", None, tokens)
    }

    proptest! {
        /// Blocks are the same exactly as far as the prompts are.
        #[test]
        fn prompts_meet_as_far_as_they_are_the_same(
            length in 0usize..2000,
            other in 0usize..2000,
            differs in prop::option::of(0usize..2000),
        ) {
            let tokens = |length: usize| -> Vec<u32> { (0..).take(length).collect() };
            let (one, mut two) = (tokens(length), tokens(other));
            let mut same = length.min(other);
            if let Some(token) = differs.and_then(|at| two.get_mut(at)) {
                *token = u32::MAX;
                same = same.min(differs.unwrap());
            }
            let (one, two) = (names(&one), names(&two));
            prop_assert_eq!(one.len(), length / BLOCK as usize);
            let met = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(met, same / BLOCK as usize);
        }

        #[test]
        fn the_table_is_bounded(
            most in 1usize..200,
            prompts in prop::collection::vec(0u32..50, 1..60),
        ) {
            let table = Prefixes::new(most);
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time().start_paused(true).build().unwrap();
            let now = runtime.block_on(async { Instant::now() });
            for seed in prompts {
                let prompt = vec![seed; 2000];
                table.seen(&names(&prompt), RankSlot(seed), now);
                prop_assert!(table.len() <= most.div_ceil(16) * 16);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_beginning_of_a_rank_that_takes_it() {
        let table = Prefixes::new(1000);
        let now = Instant::now();
        let prompt: Vec<u32> = (0..2048).collect();
        let all = names(&prompt);
        table.seen(&all[..6], RankSlot(1), now);
        table.seen(&all[..3], RankSlot(2), now);
        assert_eq!(table.longest(&all, |_| true), Some((RankSlot(1), 6)));
        let not_one = |slot| slot != RankSlot(1);
        assert_eq!(table.longest(&all, not_one), Some((RankSlot(2), 3)));
        assert_eq!(table.longest(&all, |_| false), None);
        assert_eq!(table.longest(&[], |_| true), None);
        let adapter = blocks(&Tenant::default(), "m", Some(""), &prompt);
        assert_eq!(table.longest(&adapter, |_| true), None);
    }
}
