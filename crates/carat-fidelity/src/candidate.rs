//! What is judged.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use carat_engine::{Engine, GenerateOptions, Generation, LogitRows, Sequence};
use carat_oracle::{NoTaps, Oracle, Rows};

use crate::FidelityError;

/// Something that answers with logits under given tokens.
pub trait Candidate {
    /// Calls `each(step, logits)` with the logits after `prompt` and after each of
    /// `fed` but the last: one step per fed token, in order.
    ///
    /// # Errors
    /// Where it cannot answer.
    fn forced(
        &mut self,
        prompt: &[u32],
        fed: &[u32],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), FidelityError>;
}

/// An engine, token by token through its own caches. What a case has in common with
/// the one before it stays in the states.
pub struct EngineCandidate<'e> {
    engine: &'e mut Engine,
    capacity: usize,
    sequence: Option<Sequence>,
}

impl<'e> EngineCandidate<'e> {
    /// An engine whose sequences are opened for `capacity` tokens.
    pub fn new(engine: &'e mut Engine, capacity: usize) -> Self {
        EngineCandidate {
            engine,
            capacity,
            sequence: None,
        }
    }

    /// A greedy answer of up to `tokens` tokens that ends at the candidate's own stops.
    pub(crate) fn free(
        &mut self,
        prompt: &[u32],
        tokens: usize,
        stops: &BTreeSet<u32>,
    ) -> Result<Generation, FidelityError> {
        let options = GenerateOptions {
            max_new_tokens: tokens,
            stop_ids: stops.clone(),
            ..GenerateOptions::default()
        };
        // Its own sequence: the prompt goes through in chunks, as in use.
        let mut sequence = self.engine.open(self.capacity)?;
        let go_on = &mut |_| ControlFlow::Continue(());
        let answer = self.engine.generate(&mut sequence, prompt, &options, go_on);
        self.engine.close(sequence);
        Ok(answer?)
    }
}

impl Candidate for EngineCandidate<'_> {
    fn forced(
        &mut self,
        prompt: &[u32],
        fed: &[u32],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), FidelityError> {
        if fed.is_empty() {
            return Ok(());
        }
        let ids = [prompt, &fed[..fed.len() - 1]].concat();
        let mut sequence = match self.sequence.take() {
            Some(sequence) => sequence,
            None => self.engine.open(self.capacity)?,
        };
        let held = sequence.ids().iter().zip(&ids);
        let common = held.take_while(|(a, b)| a == b).count();
        // The prompt's last token is run: its logits are the first step.
        let kept = common.min(prompt.len() - 1);
        sequence.truncate(kept)?;
        for (at, id) in ids.iter().enumerate().skip(kept) {
            let step = (at + 1).checked_sub(prompt.len());
            let rows = step.map_or(LogitRows::None, |_| LogitRows::Last);
            let logits = self.engine.step(&mut sequence, &[*id], rows)?;
            if let Some(step) = step {
                each(step, logits);
            }
        }
        self.sequence = Some(sequence);
        Ok(())
    }
}

impl Drop for EngineCandidate<'_> {
    fn drop(&mut self) {
        if let Some(sequence) = self.sequence.take() {
            self.engine.close(sequence);
        }
    }
}

/// Weights without an engine: the oracle's own arithmetic on them. Judged so,
/// what differs is what is stored, and nothing else.
pub struct OracleCandidate<'o, 'a>(pub &'o Oracle<'a>);

impl Candidate for OracleCandidate<'_, '_> {
    fn forced(
        &mut self,
        prompt: &[u32],
        fed: &[u32],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), FidelityError> {
        let ids = [prompt, &fed[..fed.len().saturating_sub(1)]].concat();
        let rows: Vec<usize> = (prompt.len() - 1..ids.len()).collect();
        let rows = [if fed.is_empty() { vec![] } else { rows }];
        let mut step = 0;
        self.0
            .forward_with(&[&ids], Rows::Each(&rows), &mut NoTaps, &mut |row| {
                each(step, row.logits);
                step += 1;
                Ok(())
            })?;
        Ok(())
    }
}
