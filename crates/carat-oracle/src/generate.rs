//! Greedy continuation and judging of given continuations.

use std::collections::BTreeSet;

use crate::OracleError;
use crate::forward::{Caches, Input, Rows};
use crate::margins::{self, Step};
use crate::oracle::Oracle;
use crate::taps::NoTaps;

/// Keys and values that greedy generation holds at a time, in bytes: as many
/// prompts run together as fit.
const KV_BYTES: usize = 1 << 30;

/// How a given token fared against the oracle's own choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForcedStep {
    /// The given token.
    pub id: u32,
    /// `ln softmax(logits)[id]`.
    pub logprob: f32,
    /// The oracle's choice at this place, given the same tokens before it.
    pub best: Step,
}

impl Oracle<'_> {
    /// Continues every prompt with its likeliest token, over and over. A
    /// continuation ends with an id of `stop` (which it includes), after
    /// `max_new_tokens`, or when prompt and continuation fill the capacity; a
    /// prompt that fills it alone has none. One list of steps per prompt, in order.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::forward`], and of [`Step::of`] where logits have no
    /// likeliest token.
    pub fn greedy(
        &self,
        prompts: &[&[u32]],
        max_new_tokens: usize,
        stop: &BTreeSet<u32>,
    ) -> Result<Vec<Vec<Step>>, OracleError> {
        let inputs: Vec<_> = prompts
            .iter()
            .map(|ids| Input { position: 0, ids })
            .collect();
        self.check(&inputs, Rows::Last)?;
        if max_new_tokens == 0 {
            return Ok(vec![Vec::new(); prompts.len()]);
        }
        let token_bytes = self.kv_widths().iter().sum::<usize>() * 2 * size_of::<f32>();
        let budget = KV_BYTES / token_bytes.max(1);
        let mut out = Vec::with_capacity(prompts.len());
        while out.len() < prompts.len() {
            let (mut end, mut tokens) = (out.len(), 0usize);
            while let Some(prompt) = prompts.get(end) {
                let most = prompt
                    .len()
                    .saturating_add(max_new_tokens)
                    .min(self.capacity);
                tokens = tokens.saturating_add(most);
                if tokens > budget && end > out.len() {
                    break;
                }
                end += 1;
            }
            out.extend(self.greedy_together(&prompts[out.len()..end], max_new_tokens, stop)?);
        }
        Ok(out)
    }

    fn greedy_together(
        &self,
        prompts: &[&[u32]],
        max_new_tokens: usize,
        stop: &BTreeSet<u32>,
    ) -> Result<Vec<Vec<Step>>, OracleError> {
        let mut session = self.session();
        let sequences: Vec<_> = prompts.iter().map(|_| session.open()).collect();
        let mut out: Vec<Vec<Step>> = vec![Vec::new(); prompts.len()];
        let mut running: Vec<usize> = (0..prompts.len())
            .filter(|&i| prompts[i].len() < self.capacity)
            .collect();
        while !running.is_empty() {
            let last: Vec<[u32; 1]> = running
                .iter()
                .map(|&i| [out[i].last().map_or(0, |step| step.id)])
                .collect();
            let steps: Vec<_> = running
                .iter()
                .zip(&last)
                .map(|(&i, last)| {
                    let ids = if out[i].is_empty() {
                        prompts[i]
                    } else {
                        last.as_slice()
                    };
                    (sequences[i], ids)
                })
                .collect();
            let mut next = Vec::with_capacity(running.len());
            session.extend_with(&steps, Rows::Last, &mut NoTaps, &mut |row| {
                next.push(Step::of(row.logits)?);
                Ok(())
            })?;
            for (&i, step) in running.iter().zip(next) {
                out[i].push(step);
            }
            running.retain(|&i| {
                let ended = out[i].last().is_some_and(|step| stop.contains(&step.id))
                    || out[i].len() >= max_new_tokens
                    || prompts[i].len() + out[i].len() >= self.capacity;
                if ended {
                    session.close(sequences[i]);
                }
                !ended
            });
        }
        Ok(out)
    }

    /// What the oracle thinks of each token of `continuation` after `prompt` and
    /// the tokens before it: one step per token, all in one pass.
    ///
    /// # Errors
    ///
    /// Those of [`Oracle::forward`] (positions of out-of-range ids count from the
    /// prompt's first) and of [`Step::of`].
    pub fn teacher_force(
        &self,
        prompt: &[u32],
        continuation: &[u32],
    ) -> Result<Vec<ForcedStep>, OracleError> {
        let mut all = self.teacher_force_all(&[(prompt, continuation)])?;
        Ok(all.pop().unwrap_or_default())
    }

    /// [`teacher_force`](Oracle::teacher_force) of many (prompt, continuation)
    /// pairs in one pass over the weights.
    ///
    /// # Errors
    ///
    /// Those of [`teacher_force`](Oracle::teacher_force).
    pub fn teacher_force_all(
        &self,
        pairs: &[(&[u32], &[u32])],
    ) -> Result<Vec<Vec<ForcedStep>>, OracleError> {
        let whole: Vec<Vec<u32>> = pairs.iter().map(|(p, c)| [*p, *c].concat()).collect();
        for (sequence, (prompt, _)) in pairs.iter().enumerate() {
            if prompt.is_empty() {
                return Err(OracleError::Empty { sequence });
            }
        }
        // The last token is judged, not fed: only its id is checked.
        let fed: Vec<_> = whole
            .iter()
            .zip(pairs)
            .map(|(ids, (_, c))| Input {
                position: 0,
                ids: &ids[..ids.len() - c.len().min(1)],
            })
            .collect();
        self.check(&fed, Rows::Last)?;
        let vocab_size = self.spec.vocab_size;
        for (sequence, ids) in whole.iter().enumerate() {
            if let Some((position, &id)) = ids
                .iter()
                .enumerate()
                .next_back()
                .filter(|(_, id)| **id as usize >= vocab_size)
            {
                return Err(OracleError::TokenRange {
                    sequence,
                    position,
                    id,
                    vocab_size,
                });
            }
        }
        let rows: Vec<Vec<usize>> = pairs
            .iter()
            .map(|(p, c)| (p.len() - 1..p.len() - 1 + c.len()).collect())
            .collect();
        let mut out: Vec<Vec<ForcedStep>> = vec![Vec::new(); pairs.len()];
        self.pass(&fed, Caches::Passing, &rows, &mut NoTaps, &mut |row| {
            let id = whole[row.sequence][row.row + 1];
            let (best, logprob) = (Step::of(row.logits)?, margins::logprob(row.logits, id)?);
            out[row.sequence].push(ForcedStep { id, logprob, best });
            Ok(())
        })?;
        Ok(out)
    }
}
