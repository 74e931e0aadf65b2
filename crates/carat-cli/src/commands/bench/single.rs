//! One model: `carat bench MODEL` and `carat bench verify-cost MODEL`.

use std::{process::ExitCode, time::Instant};

use carat_bench::{
    Arm as _, ArmKind, ArmResult, Bounds, Conditions, LoadTimes, Machine, Nanos, Profile, Record,
    RunOptions, append_records,
    arms::EngineArm,
    system::{Processes, Sensors as _, SystemClock, SystemSensors, evict, storage_bytes_read},
};
use carat_bundle::manifest::WEIGHTS_FILE;
use carat_engine::{Engine, EngineOptions, LogitRows, Schedule};
use serde_json::json;

use super::{arms, build, run_options, show, tolerant};
use crate::{
    bench_args::{Single, VerifyCost},
    commands::write_whole,
    failure::{Failure, OrInput as _, Outcome},
    memory::Request,
    model::{Model, threads},
    output,
    progress::Bar,
};

pub(super) fn run(args: &Single) -> Outcome {
    // Before anything holds the model: mapped pages stay in memory.
    let load_times = args.load.then(|| load_times(args)).transpose()?;
    // Until the engine could take its first token.
    let started = Instant::now();
    let model = Model::for_engine(&args.model)?;
    let protocol = &args.protocol;
    let sizes = carat_bench::Protocol {
        prompt_tokens: protocol.prompt_tokens,
        new_tokens: protocol.new_tokens,
        depth: protocol.depth,
        ..carat_bench::Protocol::default()
    };
    arms::check_context(&model, &args.model, &sizes)?;
    let reader = (args.model.model.as_str(), &args.model.source);
    let mut options = run_options(protocol, &[], None, Some(reader))?;
    options.allowed = tolerant(options.protocol.clone(), 1).allowed;
    let tokens = options.protocol.tokens();
    let chunk = args.chunk.unwrap_or(EngineOptions::DEFAULT_CHUNK);
    Schedule::prefill(chunk)?;
    let mut engine = model.engine(&args.model, &Request::new(tokens, tokens, chunk))?;
    let load = started.elapsed();

    let machine = Machine::observe();
    let threads = threads(args.model.threads)?;
    let measured = measure_one(&model, &mut engine, &options, threads, chunk)?;
    let mut results = [measured];
    if !args.no_bounds {
        carat_bench::bound(&mut results, &mut Bounds::measure)?;
    }
    results[0].load_ns = Some(load.into());
    results[0].load = load_times;
    let profile = (args.profile || args.trace.is_some())
        .then(|| {
            let prompt = options
                .prompts
                .ids(&options.protocol, 0, engine.vocab_size());
            Profile::measure(&mut engine, &options.protocol, &prompt)
        })
        .transpose()?;
    if let (Some(file), Some(profile)) = (&args.trace, &profile) {
        write_whole(file, profile.chrome_trace().to_string().as_bytes())?;
    }
    let record = Record::new(
        machine,
        build(&args.record),
        options.protocol,
        options.allowed,
        results.into(),
    );
    if let Some(file) = &args.record.record {
        append_records(file, std::slice::from_ref(&record))?;
    }
    let fell_back = profile
        .iter()
        .flat_map(|p| &p.rows)
        .find(|row| row.fallback);
    if args.model.json {
        let arm = &record.arms[0];
        output::json(&json!({
            "schema": "carat.bench",
            "version": 1,
            "model": model.name,
            "bundle_digest": arm.info.model_digest,
            "gate": arm.info.fidelity.verdict,
            "record": arm,
            "machine": record.machine,
            "build": record.build,
            "protocol": record.protocol,
            "protocol_digest": record.protocol_digest,
            "profile": profile.as_ref().map(|p| &p.rows),
        }))
        .or_input()?;
    } else {
        show::single(&record)?;
        if let Some(profile) = profile.as_ref().filter(|_| args.profile) {
            show::profile(profile)?;
        }
    }
    match fell_back {
        Some(row) => Err(Failure::gate(anyhow::anyhow!(
            "{} {}: {} on {}: a kernel of a lesser instruction set ran",
            row.op,
            row.on,
            row.kernel,
            row.device
        ))
        .hint("CARAT_ISA lowers the set to one whose kernels serve everything")),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Measures an engine of this process.
pub(crate) fn measure_one(
    model: &Model,
    engine: &mut Engine,
    options: &RunOptions,
    threads: usize,
    chunk: usize,
) -> Outcome<ArmResult> {
    let (name, kind) = (&model.name, ArmKind::Carat);
    let info = arms::describe(name, kind, model, threads, chunk, &options.protocol)?;
    let bar = Bar::new();
    bar.start("measuring", Some(options.rounds as u64), false);
    let results = carat_bench::run(
        &mut [Box::new(EngineArm::new(info, engine))],
        options,
        &SystemClock::start(),
        &mut SystemSensors::new(),
        &mut |round| bar.set(round as u64),
    );
    bar.finish();
    let result = results?.pop();
    result.ok_or_else(|| Failure::internal(anyhow::anyhow!("no arm was measured")))
}

/// Opens the model up to its first token, with its weights out of memory and
/// then again.
fn load_times(args: &Single) -> Outcome<LoadTimes> {
    // A checkpoint is packed into the cache by this, and is let go of again.
    let weights = Model::for_engine(&args.model)?
        .bundle()
        .map(|b| b.path().join(WEIGHTS_FILE));
    let once = || -> Outcome<std::time::Duration> {
        let start = Instant::now();
        let model = Model::for_engine(&args.model)?;
        let mut engine = model.engine(&args.model, &Request::new(1, 1, 1))?;
        let mut sequence = engine.open(1)?;
        engine.step(&mut sequence, &[0], LogitRows::Last)?;
        Ok(start.elapsed())
    };
    let mut cold_ns = None;
    if let Some(weights) = weights {
        let bytes = std::fs::metadata(&weights).or_input()?.len();
        evict(&weights);
        let before = storage_bytes_read();
        let time = once()?;
        let read = storage_bytes_read()
            .zip(before)
            .map(|(a, b)| a.saturating_sub(b));
        // Pages that stayed in memory would make a warm start of it.
        cold_ns = read.filter(|read| *read >= bytes / 2).map(|_| time.into());
    }
    Ok(LoadTimes {
        cold_ns,
        warm_ns: once()?.into(),
    })
}

pub(super) fn verify_cost(args: &VerifyCost) -> Outcome {
    if cfg!(debug_assertions) {
        return Err(carat_bench::BenchError::DebugBuild {
            arm: args.model.model.clone(),
        }
        .into());
    }
    let model = Model::for_engine(&args.model)?;
    let widest = args.widths.iter().copied().max().unwrap_or(1);
    // Steps follow each other without a pause; the rows of a step are a prompt.
    let sizes = carat_bench::Protocol {
        prompt_tokens: widest,
        new_tokens: 1,
        depth: args.depth,
        pause_ns: Nanos(0),
        ..carat_bench::Protocol::default()
    };
    arms::check_context(&model, &args.model, &sizes)?;
    let machine = Machine::observe();
    let mut request = Request::new(sizes.tokens(), sizes.tokens(), EngineOptions::DEFAULT_CHUNK);
    request.all_rows = true;
    let mut engine = model.engine(&args.model, &request)?;
    let (mut sensors, started) = (SystemSensors::new(), Instant::now());
    let before = sensors.read(&Processes::Own);
    let costs = carat_bench::verify_cost(
        &model.name,
        &mut engine,
        &args.widths,
        args.depth,
        args.repetitions,
        0,
    )?;
    let conditions = Conditions {
        elapsed_ns: started.elapsed().into(),
        before,
        after: sensors.read(&Processes::Own),
    };
    let flags = conditions.flags(conditions.before.clock_hz, None);
    for flag in &flags {
        output::note(&format!("note: disturbed: {}", flag.detail));
    }
    if let Some(file) = &args.record.record {
        let threads = threads(args.model.threads)?;
        let chunk = EngineOptions::DEFAULT_CHUNK;
        let kind = ArmKind::Carat;
        let info = arms::describe(&model.name, kind, &model, threads, chunk, &sizes)?;
        let arm = EngineArm::new(info, &mut engine).info();
        let arms = vec![ArmResult::new(arm, Vec::new())];
        let allowed = tolerant(sizes.clone(), 1).allowed;
        let mut record = Record::new(machine, build(&args.record), sizes, allowed, arms);
        let disturbed = |flag: &carat_bench::Flag| format!("disturbed: {}", flag.detail);
        record.notes = flags.iter().map(disturbed).collect();
        record.verify.clone_from(&costs);
        append_records(file, &[record])?;
    }
    if args.model.json {
        output::json(&json!({
            "schema": "carat.bench.verify_cost",
            "version": 1,
            "model": model.name,
            "backend": engine.backend().describe(),
            "costs": costs,
        }))
        .or_input()?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(&format!(
        "{} on {}, {} tokens in the cache",
        model.name,
        engine.backend().describe(),
        args.depth
    ))
    .or_input()?;
    show::verify_costs(&costs)?;
    Ok(ExitCode::SUCCESS)
}
