//! `carat generate`.

use std::{collections::BTreeSet, ops::ControlFlow, process::ExitCode};

use carat_engine::{GenerateOptions, SamplingOptions, Schedule, StopReason};
use carat_oracle::{Oracle, OracleOptions};
use carat_text::{StopSet, StreamDecoder, Tokenizer};
use serde_json::{Value, json};

use super::{answer::StopWatch, read_ids};
use crate::{
    args::{EngineKind, Generate, SamplingArgs},
    failure::{Failure, OrInput as _, Outcome},
    model::Model,
    output,
};

pub(crate) fn run(args: &Generate) -> Outcome {
    if args.draft != "off" {
        return Err(Failure::input(anyhow::anyhow!(
            "--draft {}: no drafter is built yet",
            args.draft
        ))
        .hint("leave --draft out"));
    }
    let model = Model::for_engine(&args.model)?;
    let vocab = model.spec.vocab_size;
    let prompt = read_ids(&args.ids, vocab)?;
    let force = args
        .force
        .as_ref()
        .map(|f| read_ids(f, vocab))
        .transpose()?;
    let tokenizer = match &model.text.tokenizer_json {
        Some(_) => Some(Tokenizer::from_assets(&model.text).or_input()?),
        None => None,
    };
    let stop_ids = match (&tokenizer, args.ignore_eos) {
        (_, true) => BTreeSet::new(),
        (Some(tokenizer), false) => StopSet::from_assets(tokenizer, &model.text).ids().clone(),
        (None, false) => declared_stops(&model),
    };
    let capacity = model.context(&args.model, 0);
    let value = if args.model.engine == EngineKind::Oracle {
        oracle(args, &model, &prompt, force.as_deref(), &stop_ids, capacity)?
    } else {
        engine(
            args,
            &model,
            &prompt,
            force,
            stop_ids,
            tokenizer.as_ref(),
            capacity,
        )?
    };
    if args.model.json {
        output::json(&value).or_input()?;
    } else {
        output::line(&value["ids"].to_string()).or_input()?;
        if let Some(text) = value["text"].as_str() {
            output::note(&format!("text: {text}"));
        }
        output::note(&format!(
            "stop: {}",
            value["stop_reason"].as_str().unwrap_or_default()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Stop ids of a model without a tokenizer: what its configs say.
fn declared_stops(model: &Model) -> BTreeSet<u32> {
    let config = &model.text.config;
    let eos = config.eos.as_ref().and_then(|t| t.id);
    config
        .generation_eos_ids
        .iter()
        .chain(&config.config_eos_ids)
        .copied()
        .chain(eos)
        .collect()
}

/// Greedy unless told otherwise.
pub(crate) fn sampling(args: &SamplingArgs) -> SamplingOptions {
    let default = SamplingOptions::default();
    let asked = args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some();
    SamplingOptions {
        // Asking for a filter of a draw is asking for a draw.
        temperature: args
            .temperature
            .unwrap_or(if asked { 1.0 } else { default.temperature }),
        top_k: args.top_k.unwrap_or(default.top_k),
        top_p: args.top_p.unwrap_or(default.top_p),
        min_p: args.min_p.unwrap_or(default.min_p),
        repetition_penalty: args
            .repetition_penalty
            .unwrap_or(default.repetition_penalty),
        seed: args.seed.unwrap_or(default.seed),
    }
}

fn engine(
    args: &Generate,
    model: &Model,
    prompt: &[u32],
    force: Option<Vec<u32>>,
    stop_ids: BTreeSet<u32>,
    tokenizer: Option<&Tokenizer>,
    capacity: usize,
) -> Outcome<Value> {
    let tokens = prompt.len().saturating_add(args.max_new_tokens);
    let mut engine = model.engine(&args.model, args.chunk, tokens)?;
    let mut sequence = engine.open(capacity)?;
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        stop_ids,
        ignore_eos: args.ignore_eos,
        sampling: sampling(&args.sampling),
        force,
        rankings: true,
        schedule: args.chunk.map(Schedule::every).transpose()?,
    };
    let mut decoder = match (tokenizer, args.stop.is_empty()) {
        (Some(tokenizer), _) => Some(StreamDecoder::new(tokenizer, true)),
        (None, true) => None,
        (None, false) => {
            return Err(Failure::input(anyhow::anyhow!(
                "--stop: the model has no tokenizer"
            )));
        }
    };
    let mut watch = StopWatch::new(StopSet::default(), &args.stop);
    let mut text = String::new();
    let mut failed = Ok(());
    let generation = engine.generate(&mut sequence, prompt, &options, &mut |emitted| {
        if let Some(decoder) = decoder.as_mut().filter(|_| !emitted.is_stop) {
            match decoder.push(emitted.id) {
                Ok(Some(piece)) => text.push_str(&watch.pass(&piece)),
                Ok(None) => {}
                Err(e) => failed = Err(e),
            }
        }
        if failed.is_err() || watch.stopped() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    failed.or_input()?;
    if let Some(decoder) = decoder.as_mut() {
        let tail = decoder.flush().or_input()?.unwrap_or_default();
        text.push_str(&watch.pass(&tail));
        text.push_str(&watch.rest());
    }
    let margins: Vec<f64> = generation
        .rankings
        .iter()
        .map(|r| r.softmax_margin)
        .collect();
    let logit_margins: Vec<f64> = generation.rankings.iter().map(|r| r.logit_margin).collect();
    let second: Vec<u32> = generation.rankings.iter().map(|r| r.second).collect();
    Ok(json!({
        "schema": "carat.generate",
        "version": 1,
        "ids": generation.ids,
        "argmax": generation.argmax,
        "second": second,
        "softmax_margins": margins,
        "logit_margins": logit_margins,
        "text": tokenizer.map(|_| text),
        "stop_reason": generation.stop_reason,
        "prompt_tokens": generation.prompt_tokens,
        "prompt_tps": generation.prompt_tps(),
        "decode_tps": generation.decode_tps(),
        "ttft_ns": generation.timings.first_token.as_nanos() as u64,
        "backend": engine.backend().describe(),
    }))
}

fn oracle(
    args: &Generate,
    model: &Model,
    prompt: &[u32],
    force: Option<&[u32]>,
    stop_ids: &BTreeSet<u32>,
    capacity: usize,
) -> Outcome<Value> {
    if !sampling(&args.sampling).is_greedy()
        || args.sampling.repetition_penalty.is_some_and(|p| p != 1.0)
    {
        return Err(Failure::input(anyhow::anyhow!(
            "the oracle is greedy: it takes no sampling options"
        )));
    }
    if !args.stop.is_empty() {
        return Err(Failure::input(anyhow::anyhow!(
            "the oracle takes no --stop text"
        )));
    }
    if prompt.len() >= capacity {
        return Err(carat_engine::EngineError::PromptTooLong {
            prompt: prompt.len(),
            context: capacity,
        }
        .into());
    }
    let oracle =
        Oracle::new(&model.spec, model.tensors(), OracleOptions::new(capacity)).or_input()?;
    let (ids, steps) = match force {
        Some(force) => {
            let force = &force[..force.len().min(args.max_new_tokens)];
            let steps = oracle.teacher_force(prompt, force).or_input()?;
            (
                force.to_vec(),
                steps.into_iter().map(|s| s.best).collect::<Vec<_>>(),
            )
        }
        None => {
            let steps = oracle
                .greedy(&[prompt], args.max_new_tokens, stop_ids)
                .or_input()?;
            let steps = steps.into_iter().next().unwrap_or_default();
            (steps.iter().map(|s| s.id).collect(), steps)
        }
    };
    let stopped = force.is_none() && ids.last().is_some_and(|id| stop_ids.contains(id));
    let of = |f: fn(&carat_oracle::Step) -> f32| steps.iter().map(f).collect::<Vec<f32>>();
    Ok(json!({
        "schema": "carat.generate",
        "version": 1,
        "ids": ids,
        "argmax": steps.iter().map(|s| s.id).collect::<Vec<_>>(),
        "second": steps.iter().map(|s| s.second).collect::<Vec<_>>(),
        "softmax_margins": of(|s| s.softmax_margin),
        "logit_margins": of(|s| s.logit_margin),
        "text": null,
        "stop_reason": if stopped { StopReason::Eos } else { StopReason::Length },
        "prompt_tokens": prompt.len(),
        "prompt_tps": null,
        "decode_tps": null,
        "backend": "oracle fp32",
    }))
}
