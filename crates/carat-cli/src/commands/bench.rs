//! `carat bench`.

use std::process::ExitCode;

use carat_bench::{BenchError, BenchOptions, Spread};
use carat_engine::EngineOptions;
use serde_json::json;

use crate::{
    args::Bench,
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, threads},
    output::{self, bytes},
    progress::Bar,
};

pub(crate) fn run(args: &Bench) -> Outcome {
    // Until the engine could take its first token.
    let started = std::time::Instant::now();
    let model = Model::for_engine(&args.model)?;
    let tokens = args.prompt_tokens.saturating_add(args.new_tokens);
    let context = model.context(&args.model, 0);
    if tokens > context {
        return Err(Failure::input(anyhow::anyhow!(
            "{} prompt and {} new tokens do not fit in a context of {context}",
            args.prompt_tokens,
            args.new_tokens
        ))
        .hint("ask for fewer with -p and -n"));
    }
    let chunk = args.chunk.unwrap_or(EngineOptions::DEFAULT_CHUNK);
    let mut engine = model.engine(&args.model, &Request::new(tokens, tokens, chunk))?;
    let load = started.elapsed();
    let options = BenchOptions {
        prompt_tokens: args.prompt_tokens,
        new_tokens: args.new_tokens,
        repetitions: args.repetitions,
        ..BenchOptions::default()
    };
    let bar = Bar::new();
    let trials = (args.repetitions as u64).saturating_add(1);
    bar.start("measuring", Some(trials), false);
    let record = carat_bench::run(
        &mut engine,
        model.bytes_per_token(),
        threads(args.model.threads)?,
        &options,
        &mut |done| bar.set(done as u64),
    );
    bar.finish();
    let mut record = record.map_err(|e| match e {
        BenchError::DebugBuild => Failure::refused(e).hint("cargo build --release"),
        BenchError::Implausible { .. } => Failure::refused(e),
        BenchError::Engine(e) => e.into(),
        e => Failure::input(e).hint("sizes of at least 1 with -p, -n and -r"),
    })?;
    record.load_ns = Some(load.as_nanos() as u64);
    let digest = model.bundle().map(|b| b.digest().to_owned());
    if args.model.json {
        output::json(&json!({
            "schema": "carat.bench",
            "version": 1,
            "model": model.name,
            "bundle_digest": digest,
            "gate": model.bundle().and_then(super::report::gated),
            "record": record,
        }))
        .or_input()?;
        return Ok(ExitCode::SUCCESS);
    }
    let rate = |s: Option<Spread>| {
        s.map_or_else(String::new, |s| {
            format!("{:>9.1} tok/s  ({:.1} to {:.1})", s.median, s.min, s.max)
        })
    };
    output::line(&format!("{} on {}", model.name, record.backend)).or_input()?;
    output::line(&format!(
        "prompt {:>6} tokens {}",
        record.prompt_tokens,
        rate(record.prompt_tps)
    ))
    .or_input()?;
    output::line(&format!(
        "decode {:>6} tokens {}",
        record.new_tokens,
        rate(record.decode_tps)
    ))
    .or_input()?;
    output::line(&format!(
        "weights {} per token: {:.1} GB/s of {:.1} GB/s that this machine reads ({:.0} %)",
        bytes(record.bytes_per_token),
        record.effective_bandwidth / 1e9,
        record.read_bandwidth / 1e9,
        100.0 * record.effective_bandwidth / record.read_bandwidth
    ))
    .or_input()?;
    output::line(&format!("load {:.1} ms", load.as_secs_f64() * 1e3)).or_input()?;
    if let Some(peak) = record.peak_memory_bytes {
        output::line(&format!("peak memory {}", bytes(peak))).or_input()?;
    }
    if let Some(load) = record
        .machine
        .load_average
        .filter(|l| *l > 0.5 * record.machine.logical_cpus as f64)
    {
        output::note(&format!(
            "the machine was busy (load {load:.1}): these figures are low"
        ));
    }
    Ok(ExitCode::SUCCESS)
}
