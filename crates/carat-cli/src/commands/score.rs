//! `carat score`.

use std::process::ExitCode;

use carat_engine::Score;
use carat_oracle::{Oracle, OracleOptions};
use serde_json::json;

use super::read_ids;
use crate::{
    args::{self, EngineKind},
    failure::{OrInput as _, Outcome},
    model::Model,
    output,
};

pub(crate) fn run(args: &args::Score) -> Outcome {
    let model = Model::for_engine(&args.model)?;
    let context_ids = read_ids(&args.context_ids, model.spec.vocab_size)?;
    let continuation = read_ids(&args.continuation_ids, model.spec.vocab_size)?;
    let capacity = model.context(&args.model, context_ids.len() + continuation.len());
    let tokens = context_ids.len() + continuation.len();
    if tokens > capacity {
        return Err(carat_engine::EngineError::PromptTooLong {
            prompt: tokens,
            context: capacity,
        }
        .into());
    }
    let score = if args.model.engine == EngineKind::Oracle {
        let oracle =
            Oracle::new(&model.spec, model.tensors(), OracleOptions::new(capacity)).or_input()?;
        let steps = oracle
            .teacher_force(&context_ids, &continuation)
            .or_input()?;
        let token_logprobs: Vec<f64> = steps.iter().map(|s| f64::from(s.logprob)).collect();
        let logprob: f64 = token_logprobs.iter().sum();
        Score {
            perplexity: (-logprob / token_logprobs.len() as f64).exp(),
            logprob,
            token_logprobs,
            is_greedy: steps.iter().all(|s| s.best.id == s.id),
        }
    } else {
        let mut engine = model.engine(&args.model, None, tokens)?;
        engine.score(&context_ids, &continuation, capacity)?
    };
    if args.model.json {
        output::json(&json!({
            "schema": "carat.score",
            "version": 1,
            "logprob": score.logprob,
            "perplexity": score.perplexity,
            "is_greedy": score.is_greedy,
            "token_logprobs": score.token_logprobs,
        }))
        .or_input()?;
    } else {
        output::line(&format!(
            "log-probability {:.4}, perplexity {:.4} over {} tokens{}",
            score.logprob,
            score.perplexity,
            score.token_logprobs.len(),
            if score.is_greedy {
                ", the greedy answer"
            } else {
                ""
            }
        ))
        .or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}
