//! `carat run`.

use std::{io::BufRead as _, io::Read as _, process::ExitCode};

use carat_engine::{Engine, EngineOptions};
use carat_text::{AddSpecial, Message};

use super::answer::{
    Speaker, answer_json, footer, generate_options, stream, thinking, warn_of_short_answers,
};
use crate::{
    args::Run,
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    memory::Request,
    model::Model,
    output,
};

pub(crate) fn run(args: &Run) -> Outcome {
    let answer = &args.answer;
    if args.raw && answer.system.is_some() {
        return Err(Failure::input(anyhow::anyhow!(
            "--raw has no place for a --system prompt"
        )));
    }
    let model = Model::for_engine(&answer.model)?;
    let speaker = Speaker::new(&model)?;
    if !args.raw {
        // Said before anything is read or loaded.
        speaker.require_template()?;
    }
    warn_of_short_answers(&speaker, answer);
    interrupt::listen();
    let mut engine = None;
    if args.lines {
        for line in std::io::stdin().lock().lines() {
            let line = line.or_input()?;
            if !line.trim().is_empty() {
                one(args, &model, &speaker, &mut engine, &line)?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => {
            let mut text = String::new();
            std::io::stdin()
                .lock()
                .read_to_string(&mut text)
                .or_input()?;
            text.trim_end_matches(['\r', '\n']).to_owned()
        }
    };
    if prompt.is_empty() {
        return Err(Failure::input(anyhow::anyhow!("the prompt is empty"))
            .hint("carat run MODEL \"your question\", or pipe it in"));
    }
    one(args, &model, &speaker, &mut engine, &prompt)?;
    Ok(ExitCode::SUCCESS)
}

fn one(
    args: &Run,
    model: &Model,
    speaker: &Speaker,
    engine: &mut Option<Engine>,
    prompt: &str,
) -> Outcome<()> {
    let options = &args.answer;
    let ids = if args.raw {
        speaker.encode(prompt, AddSpecial::Yes)?
    } else {
        let mut messages = vec![];
        if let Some(system) = &options.system {
            messages.push(Message::new("system", system));
        }
        messages.push(Message::new("user", prompt));
        speaker.render(&messages, thinking(options))?.1
    };
    let capacity = model.context(&options.model);
    if ids.len() >= capacity {
        return Err(carat_engine::EngineError::PromptTooLong {
            prompt: ids.len(),
            context: capacity,
        }
        .into());
    }
    let request = generate_options(model, speaker, options, ids.len(), capacity);
    let tokens = ids.len().saturating_add(request.max_new_tokens);
    let asked = Request::new(tokens, capacity, EngineOptions::DEFAULT_CHUNK);
    let engine = match engine {
        Some(engine) => engine,
        None => engine.insert(model.engine(&options.model, &asked)?),
    };
    let mut sequence = engine.open(capacity)?;
    model.require(engine, &sequence, &asked)?;
    let quiet = options.model.json;
    let answer = stream(
        engine,
        &mut sequence,
        speaker,
        &ids,
        &request,
        &options.stop,
        quiet,
    )?;
    engine.close(sequence);
    if options.model.json {
        output::json(&answer_json(&answer)).or_input()?;
    } else {
        output::line("").or_input()?;
        output::note(&footer(&answer, speaker.thinks && !options.no_think));
    }
    Ok(())
}
