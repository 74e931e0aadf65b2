//! What is done in a trial: everything that changes what a figure means.

use carat_engine::GenerateOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BenchError, Nanos, synthetic_prompt};

/// Most prompt or new tokens of a trial, and most trials: more than anybody
/// would wait for.
const MAX_TOKENS: usize = 1 << 24;
/// Most rounds of a run.
const MAX_ROUNDS: usize = 100_000;

/// Where prompts come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum PromptSource {
    /// [`synthetic_prompt`]s; round `r` uses `seed + r`, the warm-ups what
    /// follows the last round's.
    Synthetic {
        /// Seed of the first round.
        seed: u64,
    },
    /// The same given ids in every round, such as those of a real text.
    Ids {
        /// BLAKE3 of the ids as little-endian 32-bit numbers.
        blake3: String,
    },
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SamplingRule {
    /// The most likely token, past every end-of-sequence token.
    Greedy,
}

/// The protocol of a run. Two figures may be compared if and only if their
/// protocols have the same [`digest`](Protocol::digest). How many rounds there
/// were is not part of it: that changes how sure a figure is, not what it means.
///
/// A trial resets the arm (an empty sequence of `depth + prompt_tokens +
/// new_tokens` tokens), waits, fills `depth` tokens outside the timer, then
/// times the prompt to its first token (TTFT) and the `new_tokens - 1` decode
/// steps after it. Time of whoever takes the tokens is in neither.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// Version of these rules, 1; 0 where the decode of another program began with
    /// an empty cache, as it did in older records.
    pub version: u32,
    /// Where prompts come from.
    pub prompt: PromptSource,
    /// Prompt tokens per trial, timed.
    pub prompt_tokens: usize,
    /// New tokens per trial.
    pub new_tokens: usize,
    /// Tokens in the cache before the prompt, not timed.
    pub depth: usize,
    /// Trials before the first that counts, of each arm.
    pub warmups: usize,
    /// Pause before each trial.
    pub pause_ns: Nanos,
    /// How tokens are chosen.
    pub sampling: SamplingRule,
}

impl Default for Protocol {
    fn default() -> Self {
        Protocol {
            version: 1,
            prompt: PromptSource::Synthetic { seed: 0 },
            prompt_tokens: 512,
            new_tokens: 128,
            depth: 0,
            warmups: 1,
            pause_ns: Nanos::from_millis(50),
            sampling: SamplingRule::Greedy,
        }
    }
}

impl Protocol {
    /// BLAKE3 of the protocol as JSON in the order of its fields (64 hex digits).
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).unwrap_or_default();
        blake3::hash(&json).to_hex().to_string()
    }

    /// Tokens that a sequence must have room for.
    pub fn tokens(&self) -> usize {
        self.depth
            .saturating_add(self.prompt_tokens)
            .saturating_add(self.new_tokens)
    }

    /// Positions that a decode step sees on average.
    pub fn mean_context(&self) -> f64 {
        (self.depth + self.prompt_tokens) as f64 + self.new_tokens as f64 / 2.0
    }

    /// Refuses what cannot be measured.
    ///
    /// # Errors
    /// When a count is 0 or beyond anybody's patience.
    pub fn check(&self, rounds: usize) -> Result<(), BenchError> {
        for (what, value, max) in [
            ("prompt tokens", self.prompt_tokens, MAX_TOKENS),
            ("new tokens", self.new_tokens, MAX_TOKENS),
            ("repetitions", rounds, MAX_ROUNDS),
        ] {
            if value == 0 {
                return Err(BenchError::Empty { what });
            }
            if value > max {
                return Err(BenchError::TooMany { what, value, max });
            }
        }
        for (what, value, max) in [
            ("tokens in the cache", self.depth, MAX_TOKENS),
            ("warm-ups", self.warmups, MAX_ROUNDS),
        ] {
            if value > max {
                return Err(BenchError::TooMany { what, value, max });
            }
        }
        Ok(())
    }

    /// Options of carat's own generation under this protocol.
    pub(crate) fn generate_options(&self) -> GenerateOptions {
        match self.sampling {
            SamplingRule::Greedy => GenerateOptions {
                max_new_tokens: self.new_tokens,
                ignore_eos: true,
                ..GenerateOptions::default()
            },
        }
    }
}

/// The prompts of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts {
    given: Option<Vec<u32>>,
}

impl Prompts {
    /// Synthetic ones.
    pub fn synthetic() -> Prompts {
        Prompts { given: None }
    }

    /// Given ids, with the source that a protocol names them by.
    pub fn given(ids: Vec<u32>) -> (Prompts, PromptSource) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let blake3 = blake3::hash(&bytes).to_hex().to_string();
        (Prompts { given: Some(ids) }, PromptSource::Ids { blake3 })
    }

    /// The ids of a trial: `depth` that fill the cache, then the prompt. Given
    /// ids repeat where they are too few.
    pub fn ids(&self, protocol: &Protocol, trial: u64, vocab_size: usize) -> TrialPrompt {
        let count = protocol.depth.saturating_add(protocol.prompt_tokens);
        let mut ids = match (&self.given, &protocol.prompt) {
            (Some(given), _) => given.iter().copied().cycle().take(count).collect(),
            (None, PromptSource::Synthetic { seed }) => {
                synthetic_prompt(seed.wrapping_add(trial), count, vocab_size)
            }
            (None, PromptSource::Ids { .. }) => Vec::new(),
        };
        let prompt = ids.split_off(protocol.depth.min(ids.len()));
        let seed = match protocol.prompt {
            PromptSource::Synthetic { seed } => seed.wrapping_add(trial),
            PromptSource::Ids { .. } => trial,
        };
        TrialPrompt {
            seed,
            fill: ids,
            prompt,
        }
    }
}

/// Token ids of one trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialPrompt {
    /// Seed of a synthetic prompt, for programs that make it themselves; the
    /// number of the trial otherwise.
    pub seed: u64,
    /// What is in the cache before the prompt.
    pub fill: Vec<u32>,
    /// The prompt.
    pub prompt: Vec<u32>,
}

impl TrialPrompt {
    /// Both, for programs that take one prompt.
    pub fn all(&self) -> Vec<u32> {
        [&self.fill[..], &self.prompt[..]].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_changes_a_figure_changes_the_digest() {
        let base = Protocol::default();
        assert_eq!(base.digest(), Protocol::default().digest());
        let change = |f: fn(&mut Protocol)| {
            let mut other = base.clone();
            f(&mut other);
            other.digest()
        };
        let mut digests = vec![
            base.digest(),
            change(|p| p.version = 2),
            change(|p| p.prompt = PromptSource::Synthetic { seed: 1 }),
            change(|p| p.prompt = Prompts::given(vec![1]).1),
            change(|p| p.prompt = Prompts::given(vec![2]).1),
            change(|p| p.prompt_tokens = 600),
            change(|p| p.new_tokens = 600),
            change(|p| p.depth = 600),
            change(|p| p.warmups = 0),
            change(|p| p.pause_ns = Nanos(0)),
        ];
        let count = digests.len();
        digests.sort();
        digests.dedup();
        assert_eq!(digests.len(), count);
    }

    #[test]
    fn prompts_follow_the_seed_and_the_depth() {
        let protocol = Protocol {
            prompt: PromptSource::Synthetic { seed: 7 },
            prompt_tokens: 5,
            depth: 3,
            ..Protocol::default()
        };
        let trial = Prompts::synthetic().ids(&protocol, 2, 1000);
        assert_eq!((trial.fill.len(), trial.prompt.len()), (3, 5));
        assert_eq!(trial.all(), synthetic_prompt(9, 8, 1000));
        let (given, _) = Prompts::given(vec![4, 5]);
        let trial = given.ids(&protocol, 2, 1000);
        assert_eq!(trial.all(), [4, 5, 4, 5, 4, 5, 4, 5]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let refused = |protocol: Protocol, rounds| protocol.check(rounds).unwrap_err().to_string();
        let base = Protocol::default;
        assert!(base().check(5).is_ok());
        assert!(refused(base(), 0).contains("repetitions is 0"));
        let none = Protocol {
            prompt_tokens: 0,
            ..base()
        };
        assert!(refused(none, 1).contains("prompt tokens is 0"));
        let many = Protocol {
            depth: usize::MAX,
            ..base()
        };
        assert!(refused(many, 1).contains("tokens in the cache"));
    }
}
