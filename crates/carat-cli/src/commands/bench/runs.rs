//! Several arms: `ab` and `sustain`.

use std::process::ExitCode;

use carat_bench::{
    ArmKindSpec, ArmResult, ArmSpec, Bounds, Machine, Nanos, Record, RunOptions, SustainOptions,
    append_records,
    system::{SystemClock, SystemSensors},
};

use super::{
    arms::{Prepared, Sizes, prepare},
    build, run_options, show,
};
use crate::{
    args::SourceOptions,
    bench_args::{Ab, Arms, RecordArgs, Sustain},
    failure::{Failure, OrInput as _, Outcome},
    output,
    progress::Bar,
};

/// Opens every arm.
pub(super) fn open(args: &Arms, options: &RunOptions) -> Outcome<Vec<Prepared>> {
    let limit = Nanos::from_millis(args.timeout.saturating_mul(1000));
    let specs = parse(args)?;
    let sizes = Sizes {
        threads: args.threads,
        ..Sizes::default()
    };
    specs
        .iter()
        .map(|spec| prepare(spec, sizes, &options.protocol, limit))
        .collect()
}

pub(super) fn parse(args: &Arms) -> Outcome<Vec<ArmSpec>> {
    let mut specs = Vec::new();
    for text in &args.arms {
        let mut spec = ArmSpec::parse(text)?;
        // The same model twice is A against A: what two equal arms differ by.
        let label = spec.label();
        let same = |s: &&ArmSpec| s.label() == label;
        if spec.name.is_none() && specs.iter().filter(same).count() > 0 {
            spec.name = Some(format!("{label} #{}", specs.len() + 1));
        }
        specs.push(spec);
    }
    Ok(specs)
}

/// The protocol of the arms; a text is in ids of the first model that carat runs.
pub(super) fn options(args: &Arms) -> Outcome<RunOptions> {
    let specs = parse(args)?;
    let model = specs.iter().find_map(|spec| match &spec.kind {
        ArmKindSpec::Carat { model, .. } | ArmKindSpec::CaratProcess { model, .. } => Some(model),
        _ => None,
    });
    let source = SourceOptions::default();
    let reader = model.map(|model| (model.as_str(), &source));
    run_options(&args.protocol, &args.allow, args.vocab, reader)
}

pub(super) fn ab(args: &Ab) -> Outcome {
    let (args, store) = (&args.arms, &args.record);
    let options = options(args)?;
    let machine = Machine::observe();
    let mut prepared = open(args, &options)?;
    let results = measure(&mut prepared, &options)?;
    let record = Record::new(
        machine,
        build(store),
        options.protocol,
        options.allowed,
        results,
    );
    finish(args, store, &record)?;
    if !args.json {
        show::ab(&record)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets arms take turns and holds them against the machine's bounds.
pub(super) fn measure(prepared: &mut [Prepared], options: &RunOptions) -> Outcome<Vec<ArmResult>> {
    let mut arms = Vec::new();
    for one in prepared {
        arms.push(one.arm()?);
    }
    let bar = Bar::new();
    bar.start("measuring", Some(options.rounds as u64), false);
    let results = carat_bench::run(
        &mut arms,
        options,
        &SystemClock::start(),
        &mut SystemSensors::new(),
        &mut |round| bar.set(round as u64),
    );
    bar.finish();
    let mut results = results?;
    // What programs tell of themselves they tell with their first trial.
    for (result, arm) in results.iter_mut().zip(&arms) {
        result.info = arm.info();
    }
    carat_bench::bound(&mut results, &mut Bounds::measure)?;
    Ok(results)
}

/// Stores and prints a record.
fn finish(args: &Arms, store: &RecordArgs, record: &Record) -> Outcome<()> {
    if let Some(file) = &store.record {
        append_records(file, std::slice::from_ref(record))?;
    }
    if args.json {
        output::json(&serde_json::to_value(record).or_input()?).or_input()?;
    }
    Ok(())
}

fn minutes(name: &str, value: f64) -> Outcome<Nanos> {
    if value.is_finite() && (0.0..=10_000.0).contains(&value) {
        return Ok(Nanos::from_secs_f64(60.0 * value));
    }
    Err(Failure::input(anyhow::anyhow!(
        "--{name} {value}: expected minutes from 0 to 10000"
    )))
}

pub(super) fn sustain(args: &Sustain) -> Outcome {
    let long = SustainOptions {
        duration: minutes("minutes", args.minutes)?,
        idle: minutes("idle", args.idle)?,
        cap: minutes("cap", args.cap)?,
    };
    let (args, store) = (&args.arms, &args.record);
    let options = options(args)?;
    let machine = Machine::observe();
    let mut prepared = open(args, &options)?;
    let mut arms = Vec::new();
    for one in &mut prepared {
        arms.push(one.arm()?);
    }
    let bar = Bar::new();
    bar.start("seconds", Some(long.duration.0 / 1_000_000_000), false);
    let runs = carat_bench::sustain(
        &mut arms,
        &options,
        &long,
        &SystemClock::start(),
        &mut SystemSensors::new(),
        &mut |_, elapsed| bar.set(elapsed.0 / 1_000_000_000),
    );
    bar.finish();
    let runs = runs?;
    let infos = arms.iter().map(|a| ArmResult::new(a.info(), Vec::new()));
    let mut record = Record::new(
        machine,
        build(store),
        options.protocol,
        options.allowed,
        infos.collect(),
    );
    record.ratios.clear();
    record.sustained = runs;
    finish(args, store, &record)?;
    if !args.json {
        show::sustained(&record.sustained)?;
    }
    Ok(ExitCode::SUCCESS)
}
