//! What it costs to check a draft: one step of several rows over a step of one.

use std::time::Instant;

use carat_engine::{Engine, LogitRows};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{BenchError, Nanos, Spread, paired_ratio, spread, synthetic_prompt};

/// Widest step: beyond it a draft is a prompt.
const MAX_WIDTH: usize = 1024;

/// Time of steps of one width.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifyCost {
    /// The arm's name.
    pub arm: String,
    /// Rows of the step, all with logits: the draft and the token before it.
    pub width: usize,
    /// Tokens in the cache before the step.
    pub depth: usize,
    /// Every round's step, in order.
    pub steps_ns: Vec<Nanos>,
    /// Seconds of a step.
    pub step_s: Option<Spread>,
    /// Over the step of one row in the same round.
    pub over_one: Option<Spread>,
}

/// Times steps of the given widths in turns, `rounds` times after a warm-up.
/// Speculation with drafts of `k` tokens pays if more than `over_one` of width
/// `k + 1` tokens are kept per step.
///
/// # Errors
/// When a width is 0 or beyond anybody's draft, or the engine fails.
pub fn verify_cost(
    arm: &str,
    engine: &mut Engine,
    widths: &[usize],
    depth: usize,
    rounds: usize,
    seed: u64,
) -> Result<Vec<VerifyCost>, BenchError> {
    let mut all = vec![1];
    for &width in widths {
        if width == 0 {
            return Err(BenchError::Empty { what: "width" });
        }
        if width > MAX_WIDTH {
            return Err(BenchError::TooMany {
                what: "width",
                value: width,
                max: MAX_WIDTH,
            });
        }
        if !all.contains(&width) {
            all.push(width);
        }
    }
    if depth == 0 || rounds == 0 {
        let what = if depth == 0 { "depth" } else { "repetitions" };
        return Err(BenchError::Empty { what });
    }
    let widest = all.iter().copied().max().unwrap_or(1);
    let ids = synthetic_prompt(seed, depth + widest, engine.vocab_size());
    let mut sequence = engine.open(depth + widest)?;
    let mut times: Vec<Vec<Nanos>> = vec![Vec::new(); all.len()];
    let mut measure = || -> Result<(), BenchError> {
        let schedule = engine.schedule();
        engine.prefill(&mut sequence, &ids[..depth], &schedule)?;
        for round in 0..=rounds {
            for (width, times) in all.iter().zip(&mut times) {
                let start = Instant::now();
                engine.step(&mut sequence, &ids[depth..depth + width], LogitRows::All)?;
                let time = start.elapsed();
                sequence.truncate(depth)?;
                if round > 0 {
                    times.push(time.into());
                }
            }
        }
        Ok(())
    };
    let result = measure();
    engine.close(sequence);
    result?;
    let seconds = |times: &[Nanos]| -> Vec<f64> { times.iter().map(|t| t.as_secs_f64()).collect() };
    let one = seconds(&times[0]);
    Ok(all
        .into_iter()
        .zip(times)
        .map(|(width, steps_ns)| VerifyCost {
            arm: arm.to_owned(),
            width,
            depth,
            step_s: spread(&seconds(&steps_ns)),
            over_one: paired_ratio(&seconds(&steps_ns), &one),
            steps_ns,
        })
        .collect())
}
