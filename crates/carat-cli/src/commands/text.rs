//! `carat tokenize` and `carat render`.

use std::{io::Read as _, path::Path, process::ExitCode};

use anyhow::Context as _;
use carat_text::{AddSpecial, ChatTemplate, Message, RenderInput, TextError, Tokenizer};
use serde_json::{Value, json};

use super::read_json;
use crate::{
    args::{Render, SourceOptions, Switch, Tokenize},
    failure::{Failure, OrInput as _, Outcome},
    model::{Located, locate, open_checkpoint},
    output,
};

/// Text assets without opening (or converting) weights more than needed.
fn assets(model: &str, source: &SourceOptions) -> Outcome<carat_bundle::text::TextAssets> {
    match locate(model)? {
        Located::Bundle(path) => carat_bundle::Bundle::open(&path)
            .and_then(|b| b.text())
            .or_input(),
        Located::Checkpoint(path) => Ok(open_checkpoint(&path, source)?.text),
    }
}

pub(crate) fn tokenize(args: &Tokenize) -> Outcome {
    let tokenizer = Tokenizer::from_assets(&assets(&args.model, &args.source)?)?;
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read_text(path)?,
        (None, None) => {
            return Err(Failure::internal(anyhow::anyhow!(
                "neither --text nor --file"
            )));
        }
    };
    let special = if args.no_special {
        AddSpecial::No
    } else {
        AddSpecial::Yes
    };
    let ids = tokenizer.encode(&text, special).or_input()?;
    if args.json {
        let tokens: Vec<_> = ids.iter().map(|id| tokenizer.id_to_token(*id)).collect();
        output::json(&json!({
            "schema": "carat.tokenize",
            "version": 1,
            "ids": ids,
            "tokens": tokens,
            "decoded": tokenizer.decode(&ids, false).or_input()?,
        }))
        .or_input()?;
    } else {
        output::line(&format!("{ids:?}")).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The ids of a text in a model's own tokenizer.
pub(super) fn ids_of(model: &str, source: &SourceOptions, path: &Path) -> Outcome<Vec<u32>> {
    let tokenizer = Tokenizer::from_assets(&assets(model, source)?)?;
    tokenizer
        .encode(&read_text(path)?, AddSpecial::Yes)
        .or_input()
}

fn read_text(path: &Path) -> Outcome<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .lock()
            .read_to_string(&mut text)
            .context("standard input")
            .or_input()?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {}", path.display()))
        .or_input()
}

const MESSAGES: &str = "expected a JSON list such as [{\"role\": \"user\", \"content\": \"Hi\"}]";

pub(crate) fn render(args: &Render) -> Outcome {
    let assets = assets(&args.model, &args.source)?;
    let template = ChatTemplate::require(&assets, Some(&args.model)).map_err(|e| {
        Failure::input(e)
            .hint("a base model has no chat template: continue text with carat run --raw")
    })?;
    let messages: Vec<Message> = read_json(&args.messages).map_err(|e| e.hint(MESSAGES))?;
    let tools: Option<Value> = args.tools.as_deref().map(read_json).transpose()?;
    let text = template
        .render(&RenderInput {
            messages: &messages,
            tools: tools.as_ref(),
            add_generation_prompt: !args.no_generation_prompt,
            enable_thinking: args.think.map(|t| t == Switch::On),
            ..RenderInput::default()
        })
        .map_err(|e| match e {
            TextError::BadMessage { .. } => {
                Failure::input(anyhow::anyhow!("{}: {e}", args.messages.display())).hint(MESSAGES)
            }
            e => Failure::input(e),
        })?;
    if args.json {
        let tokenizer = Tokenizer::from_assets(&assets)?;
        let ids = tokenizer.encode(&text, AddSpecial::No).or_input()?;
        output::json(&json!({ "schema": "carat.render", "version": 1, "text": text, "ids": ids }))
            .or_input()?;
    } else {
        output::piece(&text).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}
