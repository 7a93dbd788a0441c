//! What is sent: random prompts that nothing else shares, the names of
//! requests, and how much of a prompt a cache could hold.
//!
//! A pure function of run, seed, arm, trajectory and turn: the same run id and
//! seed give the same prompts in every build and on every machine.

use bytes::Bytes;

use super::arms::Arm;

/// Ids to keep apart what is derived from one seed. Not to be changed: results
/// of one run id would no longer be comparable.
const CONTEXT: &str = "berth.dev 2026 affinity bench workload";

/// One trajectory's source of tokens, seeds and names.
#[derive(Clone, Debug)]
pub struct Trajectory {
    run_id: String,
    seed: u64,
    arm: Arm,
    number: u32,
}

impl Trajectory {
    /// Trajectory `number` (the first is 1) of an arm.
    pub fn new(run_id: impl Into<String>, seed: u64, arm: Arm, number: u32) -> Self {
        Self {
            run_id: run_id.into(),
            seed,
            arm,
            number,
        }
    }

    /// Which arm it belongs to.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Its number within the arm, the first is 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Names one turn's request (the first turn is 1), as idempotency key and
    /// as request id. At most 100 bytes for a run id of 64.
    pub fn request_id(&self, turn: u32) -> String {
        format!("{}/{}/{}/{turn}", self.run_id, self.arm.name(), self.number)
    }

    /// Names the trajectory, as affinity key.
    pub fn affinity_key(&self) -> String {
        format!("{}/{}/{}", self.run_id, self.arm.name(), self.number)
    }

    /// `count` token ids below `vocab_size` that are new in this turn: the
    /// initial prompt in turn 1, what the environment adds in later ones.
    pub fn fresh_tokens(&self, turn: u32, count: u32, vocab_size: u32) -> Vec<u32> {
        let mut stream = self.stream(turn, "tokens");
        (0..count)
            .map(|_| {
                let mut word = [0; 4];
                stream.fill(&mut word);
                // A product below vocab_size * 2^32: its upper half is below
                // vocab_size. The bias is at most vocab_size / 2^32.
                let wide = u64::from(u32::from_le_bytes(word)) * u64::from(vocab_size);
                u32::try_from(wide >> 32).unwrap_or_default()
            })
            .collect()
    }

    /// The sampling seed of a turn, below 2^62 as the API wants it.
    pub fn sampling_seed(&self, turn: u32) -> u64 {
        let mut word = [0; 8];
        self.stream(turn, "sampling seed").fill(&mut word);
        u64::from_le_bytes(word) >> 2
    }

    fn stream(&self, turn: u32, what: &str) -> blake3::OutputReader {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        // The only parts of free length come last and behind their length.
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(&self.number.to_le_bytes());
        hasher.update(&turn.to_le_bytes());
        for part in [self.arm.name(), what, &self.run_id] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize_xof()
    }
}

/// Prompt tokens whose KV a rank that served the turn before can hold: none at
/// the first turn, else the prompt and the output of the turn before, less the
/// last token, which was sampled but never computed. Never the whole prompt,
/// since an engine computes at least one token to sample from.
///
/// Where the prompt is the turn before and nothing else, that is `prompt - 1`.
pub fn reusable_tokens(previous: Option<(u32, u32)>, prompt: u32) -> u32 {
    match previous {
        None => 0,
        Some((prompt_before, output_before)) => prompt_before
            .saturating_add(output_before)
            .saturating_sub(1)
            .min(prompt.saturating_sub(1)),
    }
}

/// Token ids as little-endian words.
pub fn pack(tokens: &[u32]) -> Bytes {
    tokens.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// The ids in little-endian words; `None` where the length is no multiple of 4.
pub fn unpack(packed: &[u8]) -> Option<Vec<u32>> {
    let (words, rest) = packed.as_chunks::<4>();
    rest.is_empty()
        .then(|| words.iter().map(|w| u32::from_le_bytes(*w)).collect())
}

/// A name that no other run has.
pub fn random_run_id() -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    id.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_depend_on_run_seed_arm_trajectory_and_turn_alone() {
        let tokens = |run: &str, seed, arm, number, turn| {
            Trajectory::new(run, seed, arm, number).fresh_tokens(turn, 64, 151_936)
        };
        let base = tokens("a", 1, Arm::Affinity, 1, 1);
        assert_eq!(base, tokens("a", 1, Arm::Affinity, 1, 1));
        assert!(base.iter().all(|&id| id < 151_936));
        for other in [
            tokens("b", 1, Arm::Affinity, 1, 1),
            tokens("a", 2, Arm::Affinity, 1, 1),
            tokens("a", 1, Arm::NoAffinity, 1, 1),
            tokens("a", 1, Arm::Affinity, 2, 1),
            tokens("a", 1, Arm::Affinity, 1, 2),
        ] {
            assert_ne!(base[..2], other[..2], "no shared prefix");
        }
        // A longer draw continues a shorter one.
        let t = Trajectory::new("a", 1, Arm::Affinity, 1);
        assert_eq!(t.fresh_tokens(1, 64, 99), t.fresh_tokens(1, 65, 99)[..64]);
    }

    #[test]
    fn the_prompts_of_a_run_id_are_the_same_in_every_build() {
        let t = Trajectory::new("golden", 7, Arm::NoAffinity, 3);
        assert_eq!(t.fresh_tokens(1, 4, 151_936), GOLDEN);
        assert!(t.sampling_seed(1) < 1 << 62);
        assert_ne!(t.sampling_seed(1), t.sampling_seed(2));
    }

    const GOLDEN: [u32; 4] = [128_694, 64_849, 71_293, 127_972];

    #[test]
    fn ids_cover_a_small_vocabulary_evenly() {
        let ids = Trajectory::new("r", 0, Arm::Affinity, 1).fresh_tokens(1, 40_000, 4);
        for id in 0..4 {
            let n = ids.iter().filter(|&&x| x == id).count();
            assert!((9_500..10_500).contains(&n), "{id}: {n}");
        }
    }

    #[test]
    fn names_fit_the_api() {
        let t = Trajectory::new("r".repeat(64), 0, Arm::NoAffinity, u32::MAX);
        assert!(t.request_id(u32::MAX).len() <= 100);
        assert_eq!(
            Trajectory::new("r1", 0, Arm::Affinity, 2).request_id(3),
            "r1/affinity/2/3"
        );
        assert_ne!(random_run_id(), random_run_id());
    }

    #[test]
    fn reusable_prefixes() {
        assert_eq!(reusable_tokens(None, 4096), 0);
        // Nothing appended but the output: prompt - 1.
        assert_eq!(reusable_tokens(Some((4096, 512)), 4608), 4607);
        // New tokens are never reusable.
        assert_eq!(reusable_tokens(Some((4096, 512)), 5000), 4607);
        // Never the whole prompt.
        assert_eq!(reusable_tokens(Some((10, 10)), 5), 4);
        assert_eq!(reusable_tokens(Some((1, 0)), 1), 0);
        assert_eq!(reusable_tokens(Some((u32::MAX, 9)), u32::MAX), u32::MAX - 1);
    }

    #[test]
    fn packing() {
        assert_eq!(pack(&[1, 256]).as_ref(), [1, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(unpack(&pack(&[7, u32::MAX])), Some(vec![7, u32::MAX]));
        assert_eq!(unpack(&[1, 2, 3]), None);
    }
}
