//! `carat fixture`.

use std::{io::BufRead as _, path::Path, process::ExitCode};

use carat_engine::EngineOptions;
use carat_fidelity::{CaseKind, Fixture, MARGIN_FLOOR};
use carat_text::Message;
use serde::Deserialize;
use serde_json::json;

use super::{
    answer::Speaker,
    standard::{self, Maker, Prompt, Tried},
    write_whole,
};
use crate::{
    args::{FixtureAction, FixtureMake, ModelOptions},
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, content_digest},
    output,
    progress::Spinner,
};

/// Largest file of prompts.
const MAX_PROMPTS_BYTES: u64 = 64 << 20;
/// Longest line of a file of prompts.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Tokens that the oracle works on at a time, about.
pub(crate) const TOKENS_AT_ONCE: usize = 1 << 13;

pub(crate) fn run(args: &crate::args::Fixture) -> Outcome {
    let (args, sweep) = match &args.action {
        FixtureAction::Make(args) => (args, false),
        FixtureAction::Sweep(args) => (args, true),
    };
    let candidate = Model::for_engine(&args.model)?;
    let (source, origin) = reference(&args.model, None, &candidate)?;
    let speaker = Speaker::new(&source)?;
    let capacity = source.context(&args.model);
    let request = Request::new(
        capacity.min(TOKENS_AT_ONCE),
        capacity,
        EngineOptions::DEFAULT_CHUNK,
    );
    let mut engine = candidate.engine(&args.model, &request)?;
    let _busy = Spinner::start("the oracle answers");
    let oracle = source.oracle(&args.model, capacity, TOKENS_AT_ONCE, 0)?;
    let mut maker = Maker {
        source: &source,
        oracle: &oracle,
        engine: &mut engine,
        speaker: &speaker,
        digest: origin.digest,
        revision: origin.revision,
    };
    let mut tried = Vec::new();
    let fixture = match (&args.prompts, sweep) {
        (None, false) => maker.standard(&args.name)?,
        (None, true) => {
            tried = maker.answers(standard::candidates(&speaker, capacity)?)?;
            let table = report(&tried);
            let best = standard::choose(std::mem::take(&mut tried));
            say(&table, args)?;
            maker.fixture(&args.name, best)?
        }
        (Some(path), _) => {
            let prompts = read_prompts(path, &speaker, args.max_new_tokens, sweep)?;
            tried.extend(maker.answers(prompts)?);
            say(&report(&tried), args)?;
            let mut cases: Vec<_> = tried.into_iter().map(|t| t.case).collect();
            if sweep {
                let best = |a: &carat_fidelity::Case, b: &carat_fidelity::Case| {
                    a.min_margin().total_cmp(&b.min_margin())
                };
                cases = cases.into_iter().max_by(best).into_iter().collect();
            }
            maker.fixture(&args.name, cases)?
        }
    };
    if args.strict {
        standard::require_clear(&fixture.cases)?;
    }
    // What is written is read by the same rules.
    let fixture = Fixture::parse(fixture.to_json().as_bytes(), &args.name)?;
    write_whole(&args.out, fixture.to_json().as_bytes())?;
    summary(&fixture, args)?;
    Ok(ExitCode::SUCCESS)
}

/// Where a reference comes from.
pub(crate) struct Origin {
    /// BLAKE3 of its files.
    pub(crate) digest: Option<String>,
    pub(crate) revision: Option<String>,
    /// The reference has the candidate's own weights, decoded.
    pub(crate) own: bool,
}

/// The model that the oracle walks: `against`, else the checkpoint that the candidate
/// was given as, else the candidate's own weights.
pub(crate) fn reference(
    options: &ModelOptions,
    against: Option<&str>,
    candidate: &Model,
) -> Outcome<(Model, Origin)> {
    let name = against.unwrap_or(&options.model);
    let source = Model::open(name, &options.source, true)?;
    let recorded = source.bundle().map(|b| b.manifest().source.clone());
    let origin = match (source.checkpoint(), recorded) {
        (Some(checkpoint), _) => {
            // A conversion into the cache has read the same files already.
            let known = candidate.bundle().filter(|_| against.is_none());
            let digest = match known.and_then(|b| b.manifest().source.digest.clone()) {
                Some(digest) => digest,
                None => content_digest(&checkpoint.origin.path)?,
            };
            Origin {
                digest: Some(digest),
                revision: checkpoint.origin.revision.clone(),
                own: false,
            }
        }
        (None, recorded) => Origin {
            digest: recorded.as_ref().and_then(|r| r.digest.clone()),
            revision: recorded.and_then(|r| r.revision),
            own: against.is_none(),
        },
    };
    Ok((source, origin))
}

/// Refuses a fixture of other weights than those of the source, which was given as
/// `name`.
pub(crate) fn same_source(fixture: &Fixture, origin: &Origin, name: &str) -> Outcome<()> {
    match (&fixture.reference.digest, &origin.digest) {
        (Some(expected), Some(found)) if expected != found => Err(Failure::input(anyhow::anyhow!(
            "the fixture was made from {} ({expected}), the reference here is {name} ({found})",
            fixture.reference.model,
        ))
        .hint("carat fixture make SOURCE --out F makes one of this source")),
        _ => Ok(()),
    }
}

/// A line of a file of prompts.
#[derive(Deserialize)]
struct Line {
    prompt_ids: Option<Vec<u32>>,
    messages: Option<Vec<Message>>,
    prompt: Option<String>,
    question: Option<String>,
}

fn read_prompts(
    path: &Path,
    speaker: &Speaker,
    tokens: usize,
    sweep: bool,
) -> Outcome<Vec<Prompt>> {
    let name = path.display();
    let wrong = |n: usize, problem: String| {
        Failure::input(anyhow::anyhow!("{name}, line {}: {problem}", n + 1))
            .hint("a line is a JSON object with prompt_ids, messages, prompt or question")
    };
    let file = std::fs::File::open(path)
        .map_err(|e| Failure::input(anyhow::anyhow!("cannot read {name}: {e}")))?;
    // What is beyond is cut, so that its last line is no JSON.
    let file = std::io::Read::take(file, MAX_PROMPTS_BYTES);
    let mut out = Vec::new();
    for (n, line) in std::io::BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|e| wrong(n, e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        if line.len() > MAX_LINE_BYTES {
            return Err(wrong(n, format!("is longer than {MAX_LINE_BYTES} bytes")));
        }
        let line: Line = serde_json::from_str(&line).map_err(|e| wrong(n, e.to_string()))?;
        let (chat, list) = (
            (&*format!("line {}", n + 1), CaseKind::Chat),
            (&*format!("line {}", n + 1), CaseKind::List),
        );
        let given = |ids, kind, text| Prompt {
            name: format!("line {}", n + 1),
            kind,
            ids,
            text,
            tokens,
        };
        let is_chat = line.messages.is_some() || line.question.is_some();
        let text = line.question.or(line.prompt);
        match (line.prompt_ids, line.messages, text) {
            (Some(ids), _, _) => {
                let kind = if is_chat {
                    CaseKind::Chat
                } else {
                    CaseKind::List
                };
                out.push(given(ids, kind, None));
            }
            (None, Some(messages), _) => {
                let (text, ids) = speaker.render(&messages, Some(false))?;
                out.push(given(ids, CaseKind::Chat, Some(text)));
            }
            (None, None, Some(text)) if sweep => {
                out.extend(Prompt::styles(speaker, list, &text, tokens)?);
            }
            (None, None, Some(text)) => {
                let prompt = match is_chat {
                    true => Prompt::chat(speaker, chat, &text, tokens)?,
                    false => None,
                };
                let raw = || Prompt::styles(speaker, list, &text, tokens);
                out.extend(match prompt {
                    Some(prompt) => Some(prompt),
                    None => raw()?.into_iter().next(),
                });
            }
            (None, None, None) => return Err(wrong(n, "has no prompt".into())),
        }
    }
    if out.is_empty() {
        return Err(Failure::input(anyhow::anyhow!("{name}: has no prompts")));
    }
    Ok(out)
}

/// What was tried, the surest first.
fn report(tried: &[Tried]) -> Vec<String> {
    let mut order: Vec<&Tried> = tried.iter().collect();
    order.sort_by(|a, b| b.case.min_margin().total_cmp(&a.case.min_margin()));
    let line = |t: &&Tried| {
        let case = &t.case;
        let below = case.steps.iter().filter(|s| !s.is_clear(MARGIN_FLOOR));
        format!(
            "{:<18} {:>4} tokens, {:>3} steps, smallest margin {:.4}, {:>2} below the floor{}",
            t.prompt.name,
            t.prompt.ids.len(),
            case.steps.len(),
            case.min_margin(),
            below.count(),
            if case.must_stop { ", stops" } else { "" }
        )
    };
    order.iter().map(line).collect()
}

fn say(table: &[String], args: &FixtureMake) -> Outcome<()> {
    for line in table {
        match args.model.json {
            true => output::note(line),
            false => output::line(line).or_input()?,
        }
    }
    Ok(())
}

fn summary(fixture: &Fixture, args: &FixtureMake) -> Outcome<()> {
    let steps: usize = fixture.cases.iter().map(|c| c.steps.len()).sum();
    let edges: usize = fixture.cases.iter().map(|c| c.knife_edges.len()).sum();
    if args.model.json {
        return output::json(&json!({
            "schema": "carat.fixture-report",
            "version": 1,
            "out": args.out,
            "digest": fixture.digest(),
            "cases": fixture.cases.iter().map(|c| json!({
                "name": c.name,
                "kind": c.kind,
                "steps": c.steps.len(),
                "min_margin": c.min_margin(),
                "knife_edges": c.knife_edges.len(),
                "must_stop": c.must_stop,
            })).collect::<Vec<_>>(),
        }))
        .or_input();
    }
    output::note(&format!(
        "{}: {} cases, {steps} steps, {edges} of them declared knife-edges",
        args.out.display(),
        fixture.cases.len(),
    ));
    Ok(())
}
