//! `carat generate`.

use std::{collections::BTreeSet, ops::ControlFlow, process::ExitCode};

use carat_engine::{EngineOptions, GenerateOptions, SamplingOptions, Schedule, StopReason};
use carat_oracle::Step;
use carat_text::{StopSet, StreamDecoder, Tokenizer};
use serde_json::{Value, json};

use super::{
    answer::{TextStream, go_on},
    read_ids,
};
use crate::{
    args::{EngineKind, Generate, SamplingArgs},
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, no_steps},
    output,
    progress::{Bar, Spinner},
};

pub(crate) fn run(args: &Generate) -> Outcome {
    if args.draft != "off" {
        return Err(Failure::input(anyhow::anyhow!(
            "--draft {}: no drafter is built yet",
            args.draft
        ))
        .hint("leave --draft out"));
    }
    no_steps(&args.model, &[("--chunk", args.chunk.is_some())])?;
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
    if tokenizer.is_none() && !args.stop.is_empty() {
        return Err(Failure::input(anyhow::anyhow!(
            "--stop: the model has no tokenizer"
        )));
    }
    // Tokens that are given are no decision to end.
    let declared = !args.ignore_eos && force.is_none();
    let stops = match &tokenizer {
        _ if !declared => StopSet::default(),
        Some(tokenizer) => StopSet::from_assets(tokenizer, &model.text),
        None => declared_stops(&model),
    };
    let text = tokenizer
        .as_ref()
        .map(|t| TextStream::new(StreamDecoder::new(t, true), stops.clone(), &args.stop));
    let job = Job {
        args,
        model: &model,
        prompt: &prompt,
        force,
        stops: stops.ids().clone(),
        text,
        capacity: model.context(&args.model),
    };
    let value = if args.model.engine == EngineKind::Oracle {
        job.oracle()?
    } else {
        job.engine()?
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

/// Stops of a model without a tokenizer: what its configs say.
pub(crate) fn declared_stops(model: &Model) -> StopSet {
    let config = &model.text.config;
    let mut stops = StopSet::default();
    if let Some(id) = config.eos.as_ref().and_then(|t| t.id) {
        stops.add_id(id, carat_text::StopReason::Tokenizer);
    }
    for id in &config.generation_eos_ids {
        stops.add_id(*id, carat_text::StopReason::GenerationConfig);
    }
    for id in &config.config_eos_ids {
        stops.add_id(*id, carat_text::StopReason::Config);
    }
    stops
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

/// One continuation to make.
struct Job<'a> {
    args: &'a Generate,
    model: &'a Model,
    prompt: &'a [u32],
    force: Option<Vec<u32>>,
    stops: BTreeSet<u32>,
    /// `None` without a tokenizer.
    text: Option<TextStream<'a>>,
    capacity: usize,
}

impl Job<'_> {
    /// Tokens of prompt and answer, at most.
    fn tokens(&self) -> usize {
        let new = self.force.as_ref().map_or(usize::MAX, Vec::len);
        let new = new.min(self.args.max_new_tokens);
        self.prompt.len().saturating_add(new).min(self.capacity)
    }

    fn engine(mut self) -> Outcome<Value> {
        let args = self.args;
        let chunk = args.chunk.unwrap_or(EngineOptions::DEFAULT_CHUNK);
        let schedule = args.chunk.map(Schedule::prefill).transpose()?;
        let request = Request::new(self.tokens(), self.capacity, chunk);
        let mut engine = self.model.engine(&args.model, &request)?;
        let mut sequence = engine.open(self.capacity)?;
        let options = GenerateOptions {
            max_new_tokens: args.max_new_tokens,
            stop_ids: self.stops,
            ignore_eos: args.ignore_eos,
            sampling: sampling(&args.sampling),
            force: self.force,
            rankings: true,
            schedule,
        };
        let bar = Bar::new();
        bar.start("reading the prompt", Some(self.prompt.len() as u64), false);
        let mut read = |done: usize| {
            bar.set(done as u64);
            ControlFlow::Continue(())
        };
        let text = &mut self.text;
        let mut failed = Ok(());
        let generation = engine.generate_with(
            &mut sequence,
            self.prompt,
            &options,
            &mut read,
            &mut |emitted| {
                let mut stopped = false;
                if let Some(text) = text.as_mut().filter(|_| !emitted.is_stop) {
                    failed = text.push(emitted.id).map(drop);
                    stopped = text.stopped();
                }
                go_on(failed.is_ok() && !stopped)
            },
        )?;
        bar.finish();
        failed?;
        let (text, stopped) = finish(self.text)?;
        let rankings = &generation.rankings;
        Ok(json!({
            "schema": "carat.generate",
            "version": 1,
            "ids": generation.ids,
            "argmax": generation.argmax,
            "second": rankings.iter().map(|r| r.second).collect::<Vec<_>>(),
            "softmax_margins": rankings.iter().map(|r| r.softmax_margin).collect::<Vec<_>>(),
            "logit_margins": rankings.iter().map(|r| r.logit_margin).collect::<Vec<_>>(),
            "text": text,
            "stop_reason": match generation.stop_reason {
                StopReason::Length if stopped => StopReason::Stop,
                reason => reason,
            },
            "prompt_tokens": generation.prompt_tokens,
            "prompt_tps": generation.prompt_tps(),
            "decode_tps": generation.decode_tps(),
            "ttft_ns": generation.timings.first_token.as_nanos() as u64,
            "backend": engine.backend().describe(),
        }))
    }

    fn oracle(mut self) -> Outcome<Value> {
        let args = self.args;
        let asked = sampling(&args.sampling);
        if !asked.is_greedy() || asked.repetition_penalty != 1.0 {
            return Err(Failure::input(anyhow::anyhow!(
                "the oracle is greedy: it takes no sampling options"
            )));
        }
        if self.prompt.len() >= self.capacity {
            return Err(carat_engine::EngineError::PromptTooLong {
                prompt: self.prompt.len(),
                context: self.capacity,
            }
            .into());
        }
        let tokens = self.tokens();
        let _busy = Spinner::start("the oracle is at work");
        let oracle = self.model.oracle(&args.model, self.capacity, tokens, 0)?;
        let (mut ids, mut steps): (Vec<u32>, Vec<Step>) = match &self.force {
            Some(force) => {
                let force = &force[..tokens - self.prompt.len()];
                let steps = oracle.teacher_force(self.prompt, force)?;
                (force.to_vec(), steps.into_iter().map(|s| s.best).collect())
            }
            None => {
                let steps = oracle.greedy(&[self.prompt], args.max_new_tokens, &self.stops)?;
                let steps = steps.into_iter().next().unwrap_or_default();
                (steps.iter().map(|s| s.id).collect(), steps)
            }
        };
        let ended = |id: &u32| self.force.is_none() && self.stops.contains(id);
        // It knows ids only: a stop text ends its answer afterwards.
        if let Some(text) = &mut self.text {
            for (step, id) in ids.iter().enumerate().filter(|(_, id)| !ended(id)) {
                text.push(*id)?;
                if text.stopped() {
                    steps.truncate(step + 1);
                    break;
                }
            }
            ids.truncate(steps.len());
        }
        let eos = ids.last().is_some_and(ended);
        let (text, stopped) = finish(self.text)?;
        Ok(json!({
            "schema": "carat.generate",
            "version": 1,
            "ids": ids,
            "argmax": steps.iter().map(|s| s.id).collect::<Vec<_>>(),
            "second": steps.iter().map(|s| s.second).collect::<Vec<_>>(),
            "softmax_margins": steps.iter().map(|s| s.softmax_margin).collect::<Vec<_>>(),
            "logit_margins": steps.iter().map(|s| s.logit_margin).collect::<Vec<_>>(),
            "text": text,
            "stop_reason": match (eos, stopped) {
                (true, _) => StopReason::Eos,
                (false, true) => StopReason::Stop,
                (false, false) => StopReason::Length,
            },
            "prompt_tokens": self.prompt.len(),
            "prompt_tps": null,
            "decode_tps": null,
            "backend": "oracle fp32",
        }))
    }
}

/// The text of an answer, where there is a tokenizer, and whether a stop text ended it.
fn finish(text: Option<TextStream<'_>>) -> Outcome<(Option<String>, bool)> {
    let Some(mut text) = text else {
        return Ok((None, false));
    };
    text.finish()?;
    let stopped = text.stopped();
    Ok((Some(text.into_text()), stopped))
}
