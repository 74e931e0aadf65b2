//! `carat bench sweep`.

use std::process::ExitCode;

use carat_bench::{
    ArmKind, ArmResult, Axis, BenchError, Build, Cell, CellSpec, Machine, Nanos, Record,
    RunOptions, check_arms,
};
use carat_engine::EngineOptions;
use serde_json::json;

use super::{
    arms::{Prepared, Sizes, prepare},
    pages, runs,
};
use crate::{
    bench_args::{Arms, Sweep},
    failure::{Failure, OrInput as _, Outcome},
    model::threads,
    output,
    progress::Bar,
};

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

pub(super) fn run(args: &Sweep) -> Outcome {
    let arms = &args.arms;
    let base = runs::options(arms)?;
    let axes = match &args.axis[..] {
        [] => Axis::ALL.map(|a| (a, a.values().to_vec())).to_vec(),
        given => given
            .iter()
            .map(|a| parse_axis(a))
            .collect::<Outcome<_>>()?,
    };
    let machine = Machine::observe();
    let build = Build::current(args.commit.clone());
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
    // Opened once, so that a wrong arm is refused before anything is measured, and
    // is no failure of every cell.
    let infos: Vec<_> = runs::open(arms, &base)?
        .into_iter()
        .map(|one| one.info)
        .collect();
    check_arms(&infos, &base.allowed)?;
    let mut identity = vec![
        machine.fingerprint(),
        build.binary_digest.clone().unwrap_or_default(),
        base.rounds.to_string(),
    ];
    for info in infos {
        let digest = info.model_digest.unwrap_or_default();
        identity.push(format!("{} {digest}", info.name));
    }
    let bar = Bar::new();
    bar.start("cells", Some(cells.len() as u64), false);
    let mut failure = None;
    let swept = carat_bench::sweep(&args.out, &cells, &identity, &mut |cell| {
        let result = measure_cell(cell, arms, &base);
        bar.advance(1);
        let mut filed = Cell::of(cell);
        let (results, verify) = match result {
            Ok(Measured::Arms(results)) => (results, Vec::new()),
            Ok(Measured::Steps(arms, verify)) => (arms, verify),
            Ok(Measured::Nothing(why)) => {
                filed.skipped = Some(why);
                (Vec::new(), Vec::new())
            }
            Err(e) => {
                let place = format!("{}={}", cell.axis.name(), cell.value);
                output::note(&format!("note: {place} failed: {}", e.message()));
                filed.failed = Some(e.message());
                failure.get_or_insert_with(|| e.within(place));
                (Vec::new(), Vec::new())
            }
        };
        let (machine, build) = (machine.clone(), build.clone());
        let (protocol, allowed) = (cell.protocol.clone(), base.allowed.clone());
        let mut record = Record::new(machine, build, protocol, allowed, results);
        record.verify = verify;
        record.cell = Some(filed);
        Ok(record)
    });
    bar.finish();
    let swept = swept?;
    if arms.json {
        output::json(&json!({
            "schema": "carat.bench.sweep",
            "version": 1,
            "measured": swept.measured,
            "skipped": swept.skipped,
            "failed": swept.failed,
            "known": swept.known,
        }))
        .or_input()?;
    } else {
        output::line(&format!(
            "{} cells measured, {} skipped, {} failed, {} were there: {}",
            swept.measured,
            swept.skipped,
            swept.failed,
            swept.known,
            args.out.display()
        ))
        .or_input()?;
    }
    pages::write(std::slice::from_ref(&args.out), &args.pages)?;
    match failure {
        Some(failure) => Err(failure.or_hint("the same command measures what failed again")),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// What became of a cell.
enum Measured {
    /// All arms in turns.
    Arms(Vec<ArmResult>),
    /// Steps of several rows, and the arms that they are of.
    Steps(Vec<ArmResult>, Vec<carat_bench::VerifyCost>),
    /// There is nothing to measure, for a reason that is no fault.
    Nothing(String),
}

fn measure_cell(cell: &CellSpec, args: &Arms, base: &RunOptions) -> Outcome<Measured> {
    let options = RunOptions {
        protocol: cell.protocol.clone(),
        ..base.clone()
    };
    let nothing = |why: String| Ok(Measured::Nothing(why));
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match cell.axis {
        Axis::Batch if cell.value != 1 => {
            return nothing("not built: the engine decodes one sequence at a time".into());
        }
        Axis::Threads if cell.threads > processors => {
            return nothing(format!("this machine has {processors} processors"));
        }
        _ => {}
    }
    let limit = Nanos::from_millis(args.timeout.saturating_mul(1000));
    let sizes = Sizes {
        threads: Some(cell.threads),
        chunk: Some(cell.chunk),
        swept: Some(cell.axis),
    };
    let mut prepared = Vec::new();
    for spec in runs::parse(args)? {
        match prepare(&spec, sizes, &options.protocol, limit) {
            Ok(one) => prepared.push(one),
            // A context that a model does not have is no fault of the sweep.
            Err(e) if matches!(e.bench(), Some(BenchError::Context { .. })) => {
                return nothing(e.message());
            }
            Err(e) => return Err(e),
        }
    }
    if cell.axis == Axis::VerifyWidth {
        return verify_width(cell, &mut prepared, &options);
    }
    let mut results = runs::measure(&mut prepared, &options)?;
    for result in &mut results {
        // This process has measured other cells before.
        if result.info.kind == ArmKind::Carat {
            result.forget_memory();
        }
    }
    Ok(Measured::Arms(results))
}

fn verify_width(
    cell: &CellSpec,
    prepared: &mut [Prepared],
    options: &RunOptions,
) -> Outcome<Measured> {
    let mut costs = Vec::new();
    let mut arms = Vec::new();
    let depth = options.protocol.depth + options.protocol.prompt_tokens;
    let rounds = options.rounds.max(carat_bench::FEWEST_FOR_INTERVAL);
    for one in prepared {
        let info = one.info.clone();
        let Some(engine) = one.engine() else { continue };
        let widths = [cell.value];
        let found = carat_bench::verify_cost(&info.name, engine, &widths, depth, rounds, 0)?;
        costs.extend(found.into_iter().filter(|c| c.width == cell.value));
        arms.push(ArmResult::new(info, Vec::new()));
    }
    match costs.is_empty() {
        true => Ok(Measured::Nothing(
            "not built: steps of other programs cannot be timed".into(),
        )),
        false => Ok(Measured::Steps(arms, costs)),
    }
}
