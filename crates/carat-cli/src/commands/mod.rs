//! One file per command.

mod allocate;
mod answer;
mod bench;
mod cache;
mod calibration;
mod chat;
mod convert;
mod demo;
mod eval;
mod export;
mod fixture;
mod gate;
mod generate;
mod ground;
mod inspect;
mod logits;
mod pull;
mod recipe;
mod report;
mod run;
mod scan;
mod score;
mod simulate;
mod standard;
mod synth;
mod text;
mod verify;

use std::{path::Path, process::ExitCode};

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::{
    args::{Args, Command},
    failure::{Failure, OrInput as _, Outcome},
};

/// Runs a command.
pub(crate) fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Demo => demo::run(),
        Command::Inspect(args) => inspect::run(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Recipe(args) => recipe::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Tokenize(args) => text::tokenize(&args),
        Command::Render(args) => text::render(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Fixture(args) => fixture::run(&args),
        Command::Gate(args) => gate::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Scan(args) => scan::run(&args),
        Command::Allocate(args) => allocate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Completions(args) => {
            let mut command = Args::command();
            clap_complete::generate(args.shell, &mut command, "carat", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Files of ids are small; anything larger is not a file of ids.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Reads a JSON file.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Outcome<T> {
    let name = path.display().to_string();
    let length = std::fs::metadata(path)
        .with_context(|| format!("cannot read {name}"))
        .or_input()?
        .len();
    if length > MAX_JSON_BYTES {
        return Err(Failure::input(anyhow::anyhow!(
            "{name}: {length} bytes, expected at most {MAX_JSON_BYTES}"
        )));
    }
    let bytes = std::fs::read(path)
        .with_context(|| format!("cannot read {name}"))
        .or_input()?;
    serde_json::from_slice(&bytes)
        .with_context(|| name)
        .or_input()
}

/// Reads a list of token ids and checks them against the vocabulary.
fn read_ids(path: &Path, vocab: usize) -> Outcome<Vec<u32>> {
    let ids: Vec<u32> = read_json(path)
        .map_err(|e| e.hint("expected a JSON list of token ids, such as [1, 2, 3]"))?;
    match ids.iter().position(|id| *id as usize >= vocab) {
        Some(at) => Err(Failure::input(anyhow::anyhow!(
            "{}: id {} at index {at} is outside the vocabulary of {vocab}",
            path.display(),
            ids[at]
        ))),
        None if ids.is_empty() => Err(Failure::input(anyhow::anyhow!(
            "{}: the list of ids is empty, expected at least one",
            path.display()
        ))),
        None => Ok(ids),
    }
}

/// Writes a file so that a failure leaves nothing behind: to a neighbour, then
/// renamed. A link is followed, and what is no regular file (a device, a pipe) is
/// written to, not replaced.
fn write_whole(path: &Path, bytes: &[u8]) -> Outcome<()> {
    use std::io::Write as _;
    let followed = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let path = &followed;
    if std::fs::metadata(path).is_ok_and(|target| !target.is_file()) {
        return std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| file.write_all(bytes))
            .with_context(|| format!("cannot write {}", path.display()))
            .or_input();
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".partial-{}", std::process::id()));
    let staged = path.with_file_name(name);
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&staged)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&staged, path)
    };
    write()
        .inspect_err(|_| {
            let _ = std::fs::remove_file(&staged);
        })
        .with_context(|| format!("cannot write {}", path.display()))
        .or_input()
}
