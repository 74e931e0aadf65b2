//! `carat score`.

use std::process::ExitCode;

use carat_engine::{EngineOptions, Score};
use serde_json::json;

use super::read_ids;
use crate::{
    args::{self, EngineKind},
    failure::{OrInput as _, Outcome},
    memory::Request,
    model::{Model, require_context},
    output,
    progress::{Bar, Spinner},
};

pub(crate) fn run(args: &args::Score) -> Outcome {
    let model = Model::for_engine(&args.model)?;
    let context_ids = read_ids(&args.context_ids, model.spec.vocab_size)?;
    let continuation = read_ids(&args.continuation_ids, model.spec.vocab_size)?;
    let capacity = model.context(&args.model);
    let tokens = context_ids.len() + continuation.len();
    require_context(tokens, capacity)?;
    let score = if args.model.engine == EngineKind::Oracle {
        let _busy = Spinner::start("the oracle is at work");
        let oracle = model.oracle(&args.model, capacity, tokens, 0)?;
        let steps = oracle.teacher_force(&context_ids, &continuation)?;
        let token_logprobs: Vec<f64> = steps.iter().map(|s| f64::from(s.logprob)).collect();
        let logprob: f64 = token_logprobs.iter().sum();
        Score {
            perplexity: (-logprob / token_logprobs.len() as f64).exp(),
            logprob,
            token_logprobs,
            is_greedy: steps.iter().all(|s| s.best.id == s.id),
        }
    } else {
        let request = Request {
            all_rows: true,
            ..Request::new(tokens, capacity, EngineOptions::DEFAULT_CHUNK)
        };
        let mut engine = model.engine(&args.model, &request)?;
        let bar = Bar::new();
        bar.start("scoring", Some(tokens as u64), false);
        engine.score_with(&context_ids, &continuation, capacity, &mut |done| {
            bar.set(done as u64);
        })?
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
