//! Several arms: `ab`, `sustain` and `sweep`.

use std::process::ExitCode;

use carat_bench::{
    ArmSpec, Axis, BenchError, Bounds, Cell, CellSpec, Machine, Nanos, Record, RunOptions,
    SustainOptions, append_records,
    system::{SystemClock, SystemSensors},
};
use carat_engine::EngineOptions;

use super::{
    arms::{Prepared, prepare},
    build, pages, run_options, show,
};
use crate::{
    bench_args::{Ab, Arms, Sustain, Sweep},
    failure::{Failure, OrInput as _, Outcome},
    model::threads,
    output,
    progress::Bar,
};

/// Opens every arm.
fn open(args: &Arms, options: &RunOptions) -> Outcome<Vec<Prepared>> {
    let limit = Nanos::from_millis(args.timeout.saturating_mul(1000));
    let specs = parse(args)?;
    specs
        .iter()
        .map(|spec| prepare(spec, args.threads, None, &options.protocol, limit))
        .collect()
}

fn parse(args: &Arms) -> Outcome<Vec<ArmSpec>> {
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

pub(super) fn ab(args: &Ab) -> Outcome {
    let args = &args.arms;
    let options = run_options(&args.protocol, &args.allow, args.vocab)?;
    let machine = Machine::observe();
    let mut prepared = open(args, &options)?;
    let results = measure(&mut prepared, &options)?;
    let record = Record::new(
        machine,
        build(&args.record),
        options.protocol,
        options.allowed,
        results,
    );
    finish(args, &record)?;
    if !args.json {
        show::ab(&record)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Lets arms take turns and holds them against the machine's bounds.
fn measure(
    prepared: &mut [Prepared],
    options: &RunOptions,
) -> Outcome<Vec<carat_bench::ArmResult>> {
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
fn finish(args: &Arms, record: &Record) -> Outcome<()> {
    if let Some(file) = &args.record.record {
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
    let args = &args.arms;
    let options = run_options(&args.protocol, &args.allow, args.vocab)?;
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
    let infos = arms
        .iter()
        .map(|a| carat_bench::ArmResult::new(a.info(), Vec::new()));
    let mut record = Record::new(
        machine,
        build(&args.record),
        options.protocol,
        options.allowed,
        infos.collect(),
    );
    record.ratios.clear();
    record.sustained = runs;
    finish(args, &record)?;
    if !args.json {
        show::sustained(&record.sustained)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `AXIS` or `AXIS=N,…`.
fn parse_axis(text: &str) -> Outcome<(Axis, Vec<usize>)> {
    let (name, values) = text.split_once('=').unwrap_or((text, ""));
    let axis = Axis::ALL.into_iter().find(|a| a.name() == name);
    let axis = axis.ok_or_else(|| {
        let known = Axis::ALL.map(Axis::name).join(", ");
        Failure::input(anyhow::anyhow!("--axis {text}: known are {known}"))
    })?;
    if values.is_empty() {
        return Ok((axis, axis.values().to_vec()));
    }
    let values: Result<Vec<usize>, _> = values.split(',').map(str::parse).collect();
    let values = values.map_err(|_| {
        Failure::input(anyhow::anyhow!(
            "--axis {text}: expected counts, such as {name}=1,2"
        ))
    })?;
    Ok((axis, values))
}

pub(super) fn sweep(args: &Sweep) -> Outcome {
    let arms = &args.arms;
    let base = run_options(&arms.protocol, &arms.allow, arms.vocab)?;
    let axes = match &args.axis[..] {
        [] => Axis::ALL.map(|a| (a, a.values().to_vec())).to_vec(),
        given => given
            .iter()
            .map(|a| parse_axis(a))
            .collect::<Outcome<_>>()?,
    };
    let machine = Machine::observe();
    let build = build(&arms.record);
    let base_cell = CellSpec {
        axis: Axis::Model,
        value: 0,
        protocol: base.protocol.clone(),
        chunk: EngineOptions::DEFAULT_CHUNK,
        threads: threads(arms.threads)?,
    };
    let cells: Vec<CellSpec> = axes
        .iter()
        .flat_map(|(axis, values)| CellSpec::along(*axis, values, &base_cell))
        .collect();
    // Opened once, so that a wrong arm is refused before anything is measured.
    let mut identity = vec![
        machine.fingerprint(),
        build.binary_digest.clone().unwrap_or_default(),
        base.rounds.to_string(),
    ];
    for one in open(arms, &base)? {
        let digest = one.info.model_digest.unwrap_or_default();
        identity.push(format!("{} {digest}", one.info.name));
    }
    let bar = Bar::new();
    bar.start("cells", Some(cells.len() as u64), false);
    let mut failure = None;
    let measured = carat_bench::sweep(&args.out, &cells, &identity, &mut |cell| {
        let result = measure_cell(cell, arms, &base, &machine, &build);
        bar.advance(1);
        result.map_err(|e| {
            let text = "the sweep stopped".to_owned();
            failure = Some(e);
            BenchError::Arms(text)
        })
    });
    bar.finish();
    if let Some(failure) = failure {
        return Err(failure);
    }
    let measured = measured?;
    output::line(&format!(
        "{measured} of {} cells measured now, the others were there: {}",
        cells.len(),
        args.out.display()
    ))
    .or_input()?;
    pages::write(std::slice::from_ref(&args.out), &args.pages)?;
    Ok(ExitCode::SUCCESS)
}

/// One cell: a record with all arms in turns, or the reason there is none.
fn measure_cell(
    cell: &CellSpec,
    args: &Arms,
    base: &RunOptions,
    machine: &Machine,
    build: &carat_bench::Build,
) -> Outcome<Record> {
    let options = RunOptions {
        protocol: cell.protocol.clone(),
        ..base.clone()
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let record = |results| {
        Record::new(
            machine.clone(),
            build.clone(),
            options.protocol.clone(),
            options.allowed.clone(),
            results,
        )
    };
    let with_cell = |mut record: Record, skipped: Option<String>, verify| {
        record.cell = Some(Cell {
            axis: cell.axis,
            value: cell.value,
            key: String::new(),
            skipped,
            verify,
        });
        record
    };
    let skip = |why: String| Ok(with_cell(record(Vec::new()), Some(why), Vec::new()));
    match cell.axis {
        Axis::Batch => return skip("not built: the engine decodes one sequence at a time".into()),
        Axis::Threads if cell.threads > processors => {
            return skip(format!("this machine has {processors} processors"));
        }
        _ => {}
    }
    let limit = Nanos::from_millis(args.timeout.saturating_mul(1000));
    let mut prepared = Vec::new();
    for spec in parse(args)? {
        // The cell's own threads and chunk are what is swept.
        let spec = ArmSpec {
            threads: spec.threads.filter(|_| cell.axis != Axis::Threads),
            ..spec
        };
        let one = prepare(
            &spec,
            Some(cell.threads),
            Some(cell.chunk),
            &options.protocol,
            limit,
        );
        match one {
            Ok(one) => prepared.push(one),
            // A long context that a model does not have is no fault of the sweep.
            Err(e) if cell.axis == Axis::Context || cell.axis == Axis::Prompt => {
                return skip(e.message());
            }
            Err(e) => return Err(e),
        }
    }
    if cell.axis == Axis::VerifyWidth {
        let mut costs = Vec::new();
        for one in &mut prepared {
            let name = one.info.name.clone();
            let Some(engine) = one.engine() else { continue };
            let depth = options.protocol.depth + options.protocol.prompt_tokens;
            let rounds = options.rounds.max(5);
            costs.extend(
                carat_bench::verify_cost(&name, engine, &[cell.value], depth, rounds, 0)?
                    .into_iter()
                    .filter(|c| c.width == cell.value),
            );
        }
        return Ok(with_cell(record(Vec::new()), None, costs));
    }
    let results = measure(&mut prepared, &options)?;
    Ok(with_cell(record(results), None, Vec::new()))
}
