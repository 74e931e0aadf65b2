//! `carat chat`.

use std::{io::IsTerminal as _, process::ExitCode};

use carat_text::Message;
use rustyline::error::ReadlineError;

use super::answer::{Speaker, answer_json, footer, generate_options, stream, thinking};
use crate::{
    args::Chat,
    failure::{Failure, OrInput as _, Outcome},
    interrupt,
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
    let capacity = model.context(&options.model, 0);
    let mut engine = model.engine(&options.model, None, capacity.min(4096))?;
    let mut sequence = engine.open(capacity)?;
    let mut system = options.system.clone();
    let opening = |system: &Option<String>| -> Vec<Message> {
        system.iter().map(|s| Message::new("system", s)).collect()
    };
    let mut messages = opening(&system);
    interrupt::listen();
    let mut lines = Lines::new()?;
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
        let (_, ids) = speaker.render(&messages, thinking(options))?;
        if ids.len() >= capacity {
            messages.pop();
            output::note(&format!(
                "the conversation of {} tokens no longer fits in the context of {capacity}: /reset starts over",
                ids.len()
            ));
            continue;
        }
        let request = generate_options(&model, &speaker, options, ids.len(), capacity);
        let json = options.model.json;
        interrupt::clear();
        let answer = stream(
            &mut engine,
            &mut sequence,
            &speaker,
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
        messages.push(Message::new("assistant", &answer.text));
    }
    Ok(ExitCode::SUCCESS)
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
