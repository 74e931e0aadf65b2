//! `carat chat`.

use std::{io::IsTerminal as _, process::ExitCode};

use carat_engine::{Engine, EngineOptions, Sequence};
use carat_text::Message;
use rustyline::error::ReadlineError;

use super::answer::{
    Speaker, answer_json, footer, generate_options, stream, thinking, warn_of_short_answers,
};
use crate::{
    args::{AnswerOptions, Chat},
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
    memory::Request,
    model::Model,
    output,
};

const HELP: &str = "/reset forgets the conversation, /system TEXT starts over with a system prompt, \
/exit ends; Ctrl-C stops an answer";

pub(crate) fn run(args: &Chat) -> Outcome {
    let options = &args.answer;
    let model = Model::for_engine(&options.model)?;
    let speaker = Speaker::new(&model)?;
    speaker.require_template()?;
    let capacity = model.context(&options.model);
    warn_of_short_answers(&speaker, options);
    // Each turn is held against the memory that is free then.
    let chunk = EngineOptions::DEFAULT_CHUNK;
    let mut engine = model.engine(&options.model, &Request::new(chunk, capacity, chunk))?;
    let mut sequence = engine.open(capacity)?;
    let mut system = options.system.clone();
    let opening = |system: &Option<String>| -> Vec<Message> {
        system.iter().map(|s| Message::new("system", s)).collect()
    };
    let mut messages = opening(&system);
    interrupt::listen();
    let mut lines = Lines::new()?;
    let mut ended = ExitCode::SUCCESS;
    if lines.interactive() {
        output::note(&format!("{} · {}", model.name, engine.backend().describe()));
        output::note(HELP);
    }
    while let Some(line) = lines.next()? {
        let text = line.trim();
        match text
            .split_once(' ')
            .map_or((text, ""), |(a, b)| (a, b.trim()))
        {
            ("", _) => continue,
            ("/exit" | "/quit", _) => break,
            ("/help", _) => {
                output::note(HELP);
                continue;
            }
            ("/reset", _) => {
                messages = opening(&system);
                output::note("the conversation starts over");
                continue;
            }
            ("/system", prompt) => {
                system = (!prompt.is_empty()).then(|| prompt.to_owned());
                messages = opening(&system);
                output::note("the conversation starts over");
                continue;
            }
            (command, _)
                if command.starts_with('/') && command[1..].chars().all(char::is_alphabetic) =>
            {
                output::note(&format!("{command}: no such command; {HELP}"));
                continue;
            }
            _ => {}
        }
        messages.push(Message::new("user", text));
        interrupt::clear();
        match turn(
            &model,
            &speaker,
            options,
            &mut engine,
            &mut sequence,
            &messages,
        ) {
            Ok(Some(answer)) => messages.push(Message::new("assistant", &answer)),
            Ok(None) => drop(messages.pop()),
            // Nobody is there to read on.
            Err(failure) if failure.io_kind().is_some() => return Err(failure),
            Err(failure) => {
                messages.pop();
                let code = failure.report();
                if !lines.interactive() {
                    // Who pipes a conversation in sees only how it ends.
                    ended = code;
                }
            }
        }
    }
    Ok(ended)
}

/// Answers the conversation: the answer's text, or `None` if it no longer fits.
fn turn(
    model: &Model,
    speaker: &Speaker,
    options: &AnswerOptions,
    engine: &mut Engine,
    sequence: &mut Sequence,
    messages: &[Message],
) -> Outcome<Option<String>> {
    let capacity = sequence.capacity();
    let (_, ids) = speaker.render(messages, thinking(options))?;
    if ids.len() >= capacity {
        output::note(&format!(
            "the conversation of {} tokens no longer fits in the context of {capacity}: /reset starts over",
            ids.len()
        ));
        return Ok(None);
    }
    let request = generate_options(model, speaker, options, ids.len(), capacity);
    let tokens = ids.len().saturating_add(request.max_new_tokens);
    let asked = Request::new(tokens, capacity, EngineOptions::DEFAULT_CHUNK);
    model.require(engine, sequence, &asked)?;
    let json = options.model.json;
    let answer = stream(
        engine,
        sequence,
        speaker,
        &ids,
        &request,
        &options.stop,
        json,
    )?;
    if json {
        output::json(&answer_json(&answer)).or_input()?;
    } else {
        output::line("").or_input()?;
        output::note(&footer(&answer, speaker.thinks && !options.no_think));
    }
    Ok(Some(answer.text))
}

/// Where a person's turns come from: an editor with history, or a pipe.
enum Lines {
    Editor(Box<rustyline::DefaultEditor>),
    Pipe(std::io::Lines<std::io::StdinLock<'static>>),
}

impl Lines {
    fn new() -> Outcome<Lines> {
        use std::io::BufRead as _;
        if std::io::stdin().is_terminal() && output::is_interactive() {
            return rustyline::DefaultEditor::new()
                .map(|editor| Lines::Editor(Box::new(editor)))
                .map_err(Failure::internal);
        }
        Ok(Lines::Pipe(std::io::stdin().lock().lines()))
    }

    fn interactive(&self) -> bool {
        matches!(self, Lines::Editor(_))
    }

    /// The next turn; `None` at the end of input or a second Ctrl-C.
    fn next(&mut self) -> Outcome<Option<String>> {
        match self {
            Lines::Pipe(lines) => lines.next().transpose().or_input(),
            Lines::Editor(editor) => match editor.readline("> ") {
                Ok(line) => {
                    if !line.trim().is_empty() {
                        // History is a convenience: a failure to keep it is none.
                        let _ = editor.add_history_entry(&line);
                    }
                    Ok(Some(line))
                }
                Err(ReadlineError::Interrupted | ReadlineError::Eof) => Ok(None),
                Err(e) => Err(Failure::input(e)),
            },
        }
    }
}
