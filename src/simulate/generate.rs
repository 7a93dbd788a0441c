//! Workloads made by rule, for experiments without a recorded trace.

use std::time::Duration;

use super::{
    random::Random,
    trace::{Origin, Piece, Session, Trace, Turn},
};

/// Which workload. All are pure functions of the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Workload {
    /// Trajectories of 8 turns: 4,096-token first prompts, 512 generated, the
    /// next prompt being the whole history. 4 of them, unless told otherwise.
    Ablation,
    /// Groups of 8 trajectories that share their first prompt, as in GRPO; each
    /// then goes its own way for a few turns. 32 groups.
    Grpo,
    /// Sessions of which few are very long: turns, prompts and outputs have
    /// long tails, clients think between turns. 200 sessions.
    Skewed,
    /// Prompts that share nothing, one turn each, keyed: the control in which
    /// no routing can help. 2,000 of them.
    OneShot,
}

impl Workload {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ablation => "ablation",
            Self::Grpo => "grpo",
            Self::Skewed => "skewed",
            Self::OneShot => "one_shot",
        }
    }

    /// Makes it with this many sessions (groups, for GRPO), at least one.
    pub fn generate(self, count: Option<usize>, seed: u64) -> Trace {
        let default = match self {
            Self::Ablation => 4,
            Self::Grpo => 32,
            Self::Skewed => 200,
            Self::OneShot => 2000,
        };
        let count = count.unwrap_or(default).max(1);
        let mut random = Random::new(seed ^ 0x5e55_1015);
        let sessions = match self {
            Self::Ablation => (0..count).map(|_| ablation()).collect(),
            Self::Grpo => {
                let mut siblings = Vec::new();
                for group in 0..count as u64 {
                    let prompt = random.between(1024, 8192);
                    siblings.extend((0..8).map(|_| grpo(group, prompt, &mut random)));
                }
                siblings
            }
            Self::Skewed => (0..count).map(|_| skewed(&mut random)).collect(),
            Self::OneShot => (0..count).map(|_| one_shot(&mut random)).collect(),
        };
        Trace {
            name: self.name().to_owned(),
            sessions,
        }
    }
}

fn keyed(turns: Vec<Turn>) -> Session {
    Session {
        keyed: true,
        starts: None,
        turns,
    }
}

fn own(tokens: u32) -> Vec<Piece> {
    vec![Piece {
        origin: Origin::Own,
        tokens,
    }]
}

fn ablation() -> Session {
    let turns = (0..8).map(|turn| {
        let reuse = if turn == 0 { 0 } else { 4096 + 512 * turn };
        Turn {
            reuse,
            fresh: own(if turn == 0 { 4096 } else { 0 }),
            output: 512,
            think: Duration::ZERO,
        }
    });
    keyed(turns.collect())
}

fn grpo(group: u64, prompt: u32, random: &mut Random) -> Session {
    let mut turns = Vec::new();
    let mut history = 0;
    for turn in 0..random.between(2, 6) {
        let fresh = if turn == 0 {
            vec![Piece {
                origin: Origin::Shared(group),
                tokens: prompt,
            }]
        } else {
            own(random.between(64, 1024))
        };
        let turn = Turn {
            reuse: history,
            fresh,
            output: random.skewed(128, 4096),
            think: Duration::from_millis(u64::from(random.between(0, 2000))),
        };
        history = turn.prompt() + turn.output;
        turns.push(turn);
    }
    keyed(turns)
}

fn skewed(random: &mut Random) -> Session {
    let mut turns = Vec::new();
    let mut history = 0;
    for turn in 0..random.skewed(4, 120) {
        let turn = Turn {
            reuse: history,
            fresh: own(if turn == 0 {
                random.skewed(1500, 16_384)
            } else {
                random.skewed(40, 4096)
            }),
            output: random.skewed(100, 4096),
            think: match turn {
                0 => Duration::ZERO,
                _ => Duration::from_millis(u64::from(random.skewed(1000, 60_000))),
            },
        };
        // A context window ends: the rest of the session starts afresh.
        history = turn.prompt() + turn.output;
        if history > 60_000 {
            history = 0;
        }
        turns.push(turn);
    }
    keyed(turns)
}

fn one_shot(random: &mut Random) -> Session {
    keyed(vec![Turn {
        reuse: 0,
        fresh: own(random.between(1024, 8192)),
        output: random.between(128, 1024),
        think: Duration::ZERO,
    }])
}
