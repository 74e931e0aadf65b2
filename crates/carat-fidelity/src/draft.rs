//! The reference's greedy answers, drafted by something fast.
//!
//! A guess of the whole continuation is fed to the oracle in one pass; what
//! agrees is kept, the first disagreement is replaced by the oracle's own choice,
//! and the next guess goes on from there. The guesses change the time it takes
//! and nothing else, since an oracle's row does not depend on the rows beside it.

use std::collections::BTreeSet;

use carat_oracle::{NoTaps, Oracle, OracleError, Rows};

use crate::FidelityError;
use crate::fixture::Step;
use crate::row;

/// Tokens of prompts and answers that go through the oracle together, which
/// bounds the memory of their keys and values.
const TOKENS_TOGETHER: usize = 1 << 13;

/// A prompt that wants an answer.
#[derive(Clone, Debug)]
pub struct Question {
    /// The prompt's ids.
    pub ids: Vec<u32>,
    /// Tokens of the answer at most.
    pub max_new_tokens: usize,
}

/// Guesses how a sequence goes on: `draft(question, ids, tokens)` gives up to
/// `tokens` tokens that may follow `ids`, the prompt and the answer so far of the
/// question of that index.
pub type Drafter<'d> = dyn FnMut(usize, &[u32], usize) -> Result<Vec<u32>, FidelityError> + 'd;

/// The oracle's greedy answers: each ends with a stop id (which it includes), at
/// its length, or where the oracle's capacity is full.
///
/// # Errors
/// Those of the oracle and of the drafter.
pub fn answer(
    oracle: &Oracle<'_>,
    questions: &[Question],
    stops: &BTreeSet<u32>,
    drafter: &mut Drafter<'_>,
) -> Result<Vec<Vec<Step>>, FidelityError> {
    let mut answers: Vec<Vec<Step>> = Vec::with_capacity(questions.len());
    while answers.len() < questions.len() {
        let first = answers.len();
        let (mut end, mut tokens) = (first, 0usize);
        while let Some(q) = questions.get(end) {
            tokens = tokens.saturating_add(q.ids.len().saturating_add(q.max_new_tokens));
            if tokens > TOKENS_TOGETHER && end > first {
                break;
            }
            end += 1;
        }
        answers.extend(together(
            oracle,
            first,
            &questions[first..end],
            stops,
            drafter,
        )?);
    }
    Ok(answers)
}

fn together(
    oracle: &Oracle<'_>,
    first: usize,
    questions: &[Question],
    stops: &BTreeSet<u32>,
    drafter: &mut Drafter<'_>,
) -> Result<Vec<Vec<Step>>, FidelityError> {
    let mut session = oracle.session();
    let sequences: Vec<_> = questions.iter().map(|_| session.open()).collect();
    let room = |q: &Question| {
        let free = oracle.capacity().saturating_sub(q.ids.len());
        q.max_new_tokens.min(free)
    };
    let mut answers: Vec<Vec<Step>> = vec![Vec::new(); questions.len()];
    let mut open: Vec<usize> = (0..questions.len())
        .filter(|&i| room(&questions[i]) > 0)
        .collect();
    while !open.is_empty() {
        let mut guesses = Vec::with_capacity(open.len());
        let mut fed = Vec::with_capacity(open.len());
        let mut rows = Vec::with_capacity(open.len());
        for &i in &open {
            let question = &questions[i];
            let mut ids = question.ids.clone();
            ids.extend(answers[i].iter().map(|s| s.id));
            let wanted = room(question) - answers[i].len();
            let mut guess = drafter(first + i, &ids, wanted)?;
            guess.truncate(wanted);
            // The last guess is compared, not fed.
            ids.extend(&guess[..guess.len().saturating_sub(1)]);
            let held = session.tokens(sequences[i]).unwrap_or(0);
            let ids = ids.split_off(held);
            let judged = guess.len().max(1);
            rows.push((ids.len() - judged..ids.len()).collect::<Vec<_>>());
            fed.push(ids);
            guesses.push(guess);
        }
        let steps: Vec<_> = open
            .iter()
            .zip(&fed)
            .map(|(&i, ids)| (sequences[i], ids.as_slice()))
            .collect();
        let mut found: Vec<Vec<Step>> = vec![Vec::new(); open.len()];
        session.extend_with(&steps, Rows::Each(&rows), &mut NoTaps, &mut |row| {
            let step = row::step_of(row.logits).ok_or_else(|| no_best(row.logits))?;
            found[row.sequence].push(step);
            Ok(())
        })?;
        let mut still = Vec::with_capacity(open.len());
        for ((&i, guess), found) in open.iter().zip(&guesses).zip(found) {
            let mut ended = false;
            for (at, step) in found.into_iter().enumerate() {
                let id = step.id;
                answers[i].push(step);
                ended = stops.contains(&id) || answers[i].len() == room(&questions[i]);
                if ended || guess.get(at) != Some(&id) {
                    break;
                }
            }
            if ended {
                session.close(sequences[i]);
            } else {
                // The last token of the answer is not fed yet.
                let kept = questions[i].ids.len() + answers[i].len() - 1;
                session.truncate(sequences[i], kept)?;
                still.push(i);
            }
        }
        open = still;
    }
    Ok(answers)
}

/// What the reference says at every position of given tokens: of each sequence a step
/// after each id but the last, all in one pass.
///
/// # Errors
/// Those of the oracle.
pub fn follow(
    oracle: &Oracle<'_>,
    sequences: &[Vec<u32>],
) -> Result<Vec<Vec<Step>>, FidelityError> {
    let fed: Vec<&[u32]> = sequences
        .iter()
        .map(|ids| &ids[..ids.len().saturating_sub(1)])
        .collect();
    let mut out: Vec<Vec<Step>> = vec![Vec::new(); sequences.len()];
    oracle.forward_with(&fed, Rows::All, &mut NoTaps, &mut |row| {
        let mut step = row::step_of(row.logits).ok_or_else(|| no_best(row.logits))?;
        let next = sequences[row.sequence][row.row + 1];
        step.fed = (next != step.id).then_some(next);
        out[row.sequence].push(step);
        Ok(())
    })?;
    Ok(out)
}

/// Why a row has no likeliest token.
pub(crate) fn no_best(logits: &[f32]) -> OracleError {
    match logits.iter().enumerate().find(|(_, v)| !v.is_finite()) {
        Some((index, &value)) => OracleError::NotFinite { index, value },
        None => OracleError::TooFewLogits {
            found: logits.len(),
        },
    }
}
