//! How likely a given continuation is.

use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError, LogitRows,
    margin::{argmax, log_sum_exp},
};

/// Likelihood of a continuation after a context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Natural log-probability of each continuation token.
    pub token_logprobs: Vec<f64>,
    /// Their sum.
    pub logprob: f64,
    /// `exp(-logprob / tokens)`.
    pub perplexity: f64,
    /// Whether greedy decoding would have given exactly this.
    pub is_greedy: bool,
}

impl Engine {
    /// Scores `continuation` after `context`, both not empty.
    pub fn score(
        &mut self,
        context: &[u32],
        continuation: &[u32],
        capacity: usize,
    ) -> Result<Score, EngineError> {
        self.score_with(context, continuation, capacity, &mut |_| {})
    }

    /// As [`score`](Engine::score); `each` is told after each chunk how many
    /// tokens of context and continuation are done.
    pub fn score_with(
        &mut self,
        context: &[u32],
        continuation: &[u32],
        capacity: usize,
        each: &mut dyn FnMut(usize),
    ) -> Result<Score, EngineError> {
        if context.is_empty() || continuation.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if context.len() + continuation.len() > capacity {
            return Err(EngineError::PromptTooLong {
                prompt: context.len() + continuation.len(),
                context: capacity,
            });
        }
        let mut sequence = self.open(capacity)?;
        let result = self.score_on(&mut sequence, context, continuation, each);
        self.close(sequence);
        result
    }

    fn score_on(
        &mut self,
        sequence: &mut crate::Sequence,
        context: &[u32],
        continuation: &[u32],
        each: &mut dyn FnMut(usize),
    ) -> Result<Score, EngineError> {
        let vocab = self.vocab_size();
        let mut token_logprobs = Vec::with_capacity(continuation.len());
        let mut is_greedy = true;
        let mut judge = |logits: &[f32], id: u32| {
            let Some(value) = logits.get(id as usize) else {
                return Err(carat_model::ModelError::TokenOutOfRange {
                    id,
                    row: context.len() + token_logprobs.len(),
                    vocab,
                });
            };
            token_logprobs.push(f64::from(*value) - log_sum_exp(logits));
            is_greedy &= argmax(logits) == Some(id);
            Ok(())
        };
        let schedule = self.schedule();
        let logits = self.prefill_with(sequence, context, &schedule, &mut |done| {
            each(done);
            ControlFlow::Continue(())
        })?;
        judge(logits.unwrap_or_default(), continuation[0])?;
        let fed = &continuation[..continuation.len() - 1];
        for chunk in schedule.chunks(fed.len()) {
            let targets = &continuation[chunk.start + 1..chunk.end + 1];
            let done = context.len() + chunk.end;
            let logits = self.step(sequence, &fed[chunk], LogitRows::All)?;
            for (row, id) in logits.chunks_exact(vocab).zip(targets) {
                judge(row, *id)?;
            }
            each(done);
        }
        let logprob: f64 = token_logprobs.iter().sum();
        let perplexity = (-logprob / token_logprobs.len() as f64).exp();
        Ok(Score {
            token_logprobs,
            logprob,
            perplexity,
            is_greedy,
        })
    }
}
