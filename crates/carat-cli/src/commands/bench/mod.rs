//! `carat bench`.

mod arms;
mod pages;
mod runs;
mod show;
mod single;
mod sweep;

pub(super) use single::measure_one;

use std::collections::BTreeSet;

use carat_bench::{Allowance, Build, Nanos, PromptSource, Prompts, Protocol, RunOptions};

use crate::{
    args::SourceOptions,
    bench_args::{Allow, Bench, BenchAction, ProtocolArgs, RecordArgs},
    commands::{read_json, text},
    failure::{Failure, Outcome},
};

pub(crate) fn run(args: &Bench) -> Outcome {
    match (&args.action, &args.single) {
        (Some(BenchAction::Ab(args)), _) => runs::ab(args),
        (Some(BenchAction::Sustain(args)), _) => runs::sustain(args),
        (Some(BenchAction::VerifyCost(args)), _) => single::verify_cost(args),
        (Some(BenchAction::Compare(args)), _) => pages::compare(args),
        (Some(BenchAction::Sweep(args)), _) => sweep::run(args),
        (Some(BenchAction::Report(args)), _) => pages::report(args),
        (None, Some(args)) => single::run(args),
        (None, None) => Err(
            Failure::input(anyhow::anyhow!("there is no model to measure"))
                .hint("carat bench MODEL, or carat bench ab A B"),
        ),
    }
}

/// How one arm is measured, which is held against nothing: what disturbs it is
/// said, not refused.
pub(super) fn tolerant(protocol: Protocol, rounds: usize) -> RunOptions {
    RunOptions {
        protocol,
        rounds,
        allowed: [Allowance::Busy, Allowance::Clock, Allowance::Ungated].into(),
        ..RunOptions::default()
    }
}

/// The protocol and its prompts; texts are in ids of `reader`, a model.
fn run_options(
    args: &ProtocolArgs,
    allow: &[Allow],
    vocab: Option<usize>,
    reader: Option<(&str, &SourceOptions)>,
) -> Outcome<RunOptions> {
    let given = match (&args.ids, &args.text) {
        (Some(file), _) => Some((file, read_json(file)?)),
        (None, Some(file)) => {
            let Some((model, source)) = reader else {
                return Err(
                    Failure::input(anyhow::anyhow!("--text: no arm has a tokenizer here"))
                        .hint("--ids FILE.json prompts with ids that carat tokenize made"),
                );
            };
            Some((file, text::ids_of(model, source, file)?))
        }
        (None, None) => None,
    };
    let (prompts, prompt) = match given {
        None => (
            Prompts::synthetic(),
            PromptSource::Synthetic { seed: args.seed },
        ),
        Some((file, ids)) if ids.is_empty() => {
            let name = file.display();
            return Err(Failure::input(anyhow::anyhow!("{name}: no ids")));
        }
        Some((_, ids)) => Prompts::given(ids),
    };
    let options = RunOptions {
        protocol: Protocol {
            prompt,
            prompt_tokens: args.prompt_tokens,
            new_tokens: args.new_tokens,
            depth: args.depth,
            warmups: args.warmups,
            pause_ns: Nanos::from_millis(args.pause_ms),
            ..Protocol::default()
        },
        prompts,
        rounds: args.repetitions,
        allowed: allowances(allow),
        vocab_size: vocab,
    };
    options.protocol.check(options.rounds)?;
    Ok(options)
}

fn allowances(allow: &[Allow]) -> BTreeSet<Allowance> {
    let named = |allow: &Allow| match allow {
        Allow::Busy => Allowance::Busy,
        Allow::Clock => Allowance::Clock,
        Allow::Ungated => Allowance::Ungated,
        Allow::Machine => Allowance::Machine,
    };
    allow.iter().map(named).collect()
}

fn build(args: &RecordArgs) -> Build {
    Build::current(args.commit.clone())
}
