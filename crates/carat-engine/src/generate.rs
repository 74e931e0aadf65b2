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
    /// At most this many new tokens. Prompt and answer together never exceed
    /// the sequence's capacity.
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
    /// From the call to the first token chosen; zero if none was.
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
    /// the states then. The answer ends where prompt and answer fill the
    /// sequence's capacity.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        options: &GenerateOptions,
        on_token: &mut dyn FnMut(Emitted) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        self.generate_with(
            sequence,
            prompt,
            options,
            &mut |_| ControlFlow::Continue(()),
            on_token,
        )
    }

    /// As [`generate`](Engine::generate). `on_prefill` is told after each chunk
    /// how many prompt tokens are in, reused ones included, and may break off
    /// before the answer begins.
    pub fn generate_with(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        options: &GenerateOptions,
        on_prefill: &mut dyn FnMut(usize) -> ControlFlow<()>,
        on_token: &mut dyn FnMut(Emitted) -> ControlFlow<()>,
    ) -> Result<Generation, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let budget = match &options.force {
            Some(force) => force.len().min(options.max_new_tokens),
            None => options.max_new_tokens,
        };
        // Every token asked for needs a place, but for none asked none.
        let context = sequence.capacity();
        if prompt.len() > context || (prompt.len() == context && budget > 0) {
            return Err(EngineError::PromptTooLong {
                prompt: prompt.len(),
                context,
            });
        }
        let budget = budget.min(context - prompt.len());
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
        let schedule = options.schedule.clone().unwrap_or_else(|| self.schedule());
        let mut mark = Instant::now();
        self.reserve(sequence, prompt.len() + budget)?;
        let mut prefilled = |done| on_prefill(reused + done);
        if budget == 0 {
            let prefill =
                self.prefill_with(sequence, &prompt[reused..], &schedule, &mut prefilled)?;
            match prefill {
                Some(_) => out.timings.first_token = mark.elapsed(),
                None => out.stop_reason = StopReason::Stop,
            }
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
                None => {
                    let rest = &prompt[reused..];
                    match self.prefill_with(sequence, rest, &schedule, &mut prefilled)? {
                        Some(logits) => logits,
                        None => {
                            out.stop_reason = StopReason::Stop;
                            break;
                        }
                    }
                }
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
            if out.ids.len() == budget {
                break;
            }
            mark = Instant::now();
        }
        Ok(out)
    }
}
