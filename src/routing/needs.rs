//! What a request needs of a rank. A rank that lacks any of it is not eligible;
//! nothing that was asked for is dropped silently.

use std::{fmt, sync::Arc};

use crate::{
    call::WeightsConstraint,
    fleet::{facts::EngineKind, snapshot::RankView},
};

/// What a request needs of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent needs")]
pub struct Needs {
    /// The model's name.
    pub model: Arc<str>,
    /// Prompt and output together, in tokens. Without max_tokens: the prompt and
    /// one token. 0: unknown (a text prompt).
    pub context: u32,
    /// A LoRA adapter.
    pub adapter: Option<Arc<str>>,
    /// Weights.
    pub weights: Option<WeightsConstraint>,
    /// The request uses text: prompt or stop strings.
    pub tokenizer: bool,
    /// Tokens before a stop counts.
    pub min_tokens: bool,
    /// A temperature that vLLM would not take as it is: it raises what is between
    /// 0 and 0.01 and refuses what is above 2.
    pub odd_temperature: bool,
    /// Log probabilities of the output.
    pub output_logprobs: bool,
    /// Log probabilities of the prompt.
    pub prompt_logprobs: bool,
    /// Alternatives per position.
    pub top_logprobs: u32,
    /// Repeatable sampling.
    pub seed: bool,
    /// Experts of each token.
    pub routed_experts: bool,
    /// Constrained output.
    pub structured_output: bool,
    /// Priorities in the engine's queue.
    pub priority: bool,
    /// The end of sequence does not end a generation, and token ids of the
    /// request's own do.
    pub stop_ids_past_eos: bool,
}

/// What a rank lacks for a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lack {
    /// Its context is shorter.
    Context {
        /// What it has.
        has: u32,
    },
    /// It does not serve the adapter.
    Adapter,
    /// It cannot do this.
    Capability(&'static str),
    /// It has not told yet whether it can do this.
    Untold(&'static str),
    /// It serves other weights.
    Weights {
        /// These.
        serves: Arc<str>,
    },
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Context { has } => write!(f, "its context is {has} tokens"),
            Self::Adapter => f.write_str("it does not serve the adapter"),
            Self::Capability(what) => write!(f, "it cannot do {what}"),
            Self::Untold(what) => write!(f, "it has not told yet whether it can do {what}"),
            Self::Weights { serves } => write!(f, "it serves weights {serves:?}"),
        }
    }
}

impl Needs {
    /// What `rank` lacks, permanent lacks first. `None`: it can serve this.
    pub fn lack(&self, rank: &RankView) -> Option<Lack> {
        self.permanent_lack(rank).or_else(|| {
            (!self.admits_weights(rank)).then(|| Lack::Weights {
                serves: Arc::clone(&rank.weight_version),
            })
        })
    }

    /// Whether the rank serves weights that may generate this.
    pub fn admits_weights(&self, rank: &RankView) -> bool {
        let wanted = self.weights.as_ref();
        wanted.is_none_or(|w| w.admits(&rank.weight_version))
    }

    /// All that `rank` lacks, permanent lacks first.
    pub fn lacks(&self, rank: &RankView) -> Vec<Lack> {
        let mut lacks: Vec<Lack> = self.permanent_lacks(rank).collect();
        if !self.admits_weights(rank) {
            lacks.push(Lack::Weights {
                serves: Arc::clone(&rank.weight_version),
            });
        }
        lacks
    }

    /// As [`lack`](Self::lack), without what a weight sync changes.
    pub fn permanent_lack(&self, rank: &RankView) -> Option<Lack> {
        self.permanent_lacks(rank).next()
    }

    /// As [`lacks`](Self::lacks), likewise.
    pub fn permanent_lacks(&self, rank: &RankView) -> impl Iterator<Item = Lack> {
        let facts = &rank.replica.facts;
        let context = (self.context > facts.context_length).then_some(Lack::Context {
            has: facts.context_length,
        });
        let served = |adapter: &Arc<str>| facts.adapter(adapter).is_some();
        let adapter = self.adapter.as_ref().filter(|adapter| !served(adapter));
        let has = &facts.capabilities;
        let vllm = facts.engine == EngineKind::Vllm;
        let capabilities = [
            (self.tokenizer, has.tokenizer, "text (no tokenizer)"),
            (
                self.min_tokens,
                // SGLang takes the end of sequence from the tokenizer, vLLM from the
                // model.
                vllm || has.tokenizer,
                "min_tokens (no tokenizer)",
            ),
            (
                self.odd_temperature,
                !vllm,
                "a temperature between 0 and 0.01 or above 2",
            ),
            (self.output_logprobs, has.output_logprobs, "output logprobs"),
            (self.prompt_logprobs, has.prompt_logprobs, "prompt logprobs"),
            (
                self.top_logprobs > 0,
                has.max_top_logprobs >= self.top_logprobs,
                "that many top logprobs",
            ),
            (self.seed, has.seed, "repeatable sampling by seed"),
            (self.routed_experts, has.routed_experts, "routed experts"),
            (
                self.structured_output,
                has.structured_output,
                "structured output",
            ),
            (self.priority, has.priority, "priorities"),
            (
                self.stop_ids_past_eos,
                // SGLang's ignore_eos turns every token id's end off with it.
                vllm,
                "stop_token_ids together with ignore_eos",
            ),
        ]
        .into_iter()
        .filter(|(needed, has, _)| *needed && !has)
        .map(|(_, _, what)| match has.more_follow {
            true => Lack::Untold(what),
            false => Lack::Capability(what),
        });
        let adapter = adapter.map(|_| Lack::Adapter);
        context.into_iter().chain(adapter).chain(capabilities)
    }
}
