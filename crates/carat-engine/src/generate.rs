//! The decode loop.

use std::{
    collections::BTreeSet,
    ops::ControlFlow,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError, Ranking, Sampler, SamplingOptions, Schedule, Sequence, margin::argmax,
};

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// At most this many new tokens.
    pub max_new_tokens: usize,
    /// Ids that end the answer.
    pub stop_ids: BTreeSet<u32>,
    /// Go on past stop ids.
    pub ignore_eos: bool,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Feed these instead of what is chosen; generation ends with them.
    pub force: Option<Vec<u32>>,
    /// Record [`Ranking`]s per step.
    pub rankings: bool,
    /// Chunk sizes of the prefill; `None` is the engine's own.
    pub schedule: Option<Schedule>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_new_tokens: 256,
            stop_ids: BTreeSet::new(),
            ignore_eos: false,
            sampling: SamplingOptions::default(),
            force: None,
            rankings: false,
            schedule: None,
        }
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// A stop id, which is the last id of the answer.
    Eos,
    /// The token budget or the context ran out.
    Length,
    /// The consumer said so (a stop string, an interrupt).
    Stop,
}

/// A token as it is made.
#[derive(Clone, Copy, Debug)]
pub struct Emitted {
    /// The id.
    pub id: u32,
    /// Whether it is a stop id (usually not shown).
    pub is_stop: bool,
}

/// Durations of a generation, on the monotonic clock. The consumer's own time
/// is not in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From the call to the first token chosen.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Timings {
    /// Prompt tokens per second: `tokens / TTFT`.
    pub fn prompt_tps(&self, tokens: usize) -> f64 {
        rate(tokens, self.first_token)
    }

    /// Decode tokens per second, without the first token.
    pub fn decode_tps(&self, new_tokens: usize) -> f64 {
        rate(new_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        count as f64 / time.as_secs_f64()
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Generation {
    /// New ids, the stop id included.
    pub ids: Vec<u32>,
    /// What greedy would have taken at each step; differs from `ids` when
    /// sampling or forcing.
    pub argmax: Vec<u32>,
    /// Per step, if asked for.
    pub rankings: Vec<Ranking>,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Prompt tokens in all.
    pub prompt_tokens: usize,
    /// Prompt tokens that were already in the sequence's states.
    pub reused_tokens: usize,
    /// Durations.
    pub timings: Timings,
}

impl Generation {
    /// Prompt tokens per second, reused tokens not counted.
    pub fn prompt_tps(&self) -> f64 {
        self.timings
            .prompt_tps(self.prompt_tokens - self.reused_tokens)
    }

    /// Decode tokens per second, without the first token.
    pub fn decode_tps(&self) -> f64 {
        self.timings.decode_tps(self.ids.len())
    }
}

impl Engine {
    /// Answers a prompt on a sequence. What the sequence already holds is kept
    /// as far as it agrees with the prompt. `on_token` sees every token, the
    /// stop id included, and may end the answer; the last token is not yet in
    /// the states then.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(Emitted) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() >= sequence.capacity() + usize::from(options.max_new_tokens == 1) {
            let context = sequence.capacity();
            return Err(EngineError::PromptTooLong {
                prompt: prompt.len(),
                context,
            });
        }
        let mut sampler = Sampler::new(options.sampling.clone())?;
        // The last prompt token is always run: its logits start the answer.
        let common = sequence
            .ids()
            .iter()
            .zip(prompt)
            .take_while(|(a, b)| a == b)
            .count();
        let reused = common.min(prompt.len() - 1);
        sequence.truncate(reused)?;

        let mut out = Generation {
            ids: Vec::new(),
            argmax: Vec::new(),
            rankings: Vec::new(),
            stop_reason: StopReason::Length,
            prompt_tokens: prompt.len(),
            reused_tokens: reused,
            timings: Timings::default(),
        };
        let budget = match &options.force {
            Some(force) => force.len().min(options.max_new_tokens),
            None => options.max_new_tokens,
        };
        let schedule = options.schedule.clone().unwrap_or_else(|| self.schedule());
        let mut mark = Instant::now();
        let expected = (prompt.len() + budget).min(sequence.capacity());
        self.reserve(sequence, expected)?;
        if budget == 0 {
            self.prefill(sequence, &prompt[reused..], &schedule)?;
            out.timings.first_token = mark.elapsed();
            return Ok(out);
        }
        let mut seen = if options.sampling.repetition_penalty == 1.0 {
            vec![]
        } else {
            prompt.to_vec()
        };
        loop {
            let position = sequence.len();
            let logits = match out.ids.last() {
                None => self.prefill(sequence, &prompt[reused..], &schedule)?,
                Some(&id) => self.step(sequence, &[id], crate::LogitRows::Last)?,
            };
            let chosen = sampler
                .sample(logits, &seen)
                .ok_or(EngineError::NotANumber {
                    position: position.max(prompt.len() - 1),
                })?;
            out.argmax.push(argmax(logits).unwrap_or(chosen));
            if options.rankings {
                out.rankings.extend(Ranking::of(logits));
            }
            let id = match &options.force {
                Some(force) => force[out.ids.len()],
                None => chosen,
            };
            let spent = mark.elapsed();
            if out.ids.is_empty() {
                out.timings.first_token = spent;
            } else {
                out.timings.decode += spent;
            }
            out.ids.push(id);
            if options.sampling.repetition_penalty != 1.0 {
                seen.push(id);
            }
            let is_stop =
                options.stop_ids.contains(&id) && !options.ignore_eos && options.force.is_none();
            let flow = on_token(Emitted { id, is_stop });
            if is_stop {
                out.stop_reason = StopReason::Eos;
                break;
            }
            if flow.is_break() {
                out.stop_reason = StopReason::Stop;
                break;
            }
            if out.ids.len() == budget || prompt.len() + out.ids.len() > sequence.capacity() {
                break;
            }
            mark = Instant::now();
        }
        Ok(out)
    }
}
