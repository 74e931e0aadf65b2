//! Records read again: `compare` and `report`.

use std::{path::PathBuf, process::ExitCode};

use carat_bench::{Change, Comparison, Record, read_records};
use serde_json::json;

use super::allowances;
use crate::{
    bench_args::{Compare, Pages, Report},
    commands::write_whole,
    failure::{Failure, OrInput as _, Outcome},
    output,
};

pub(super) fn compare(args: &Compare) -> Outcome {
    let (old, new) = (read_records(&args.old)?, read_records(&args.new)?);
    let allowed = allowances(&args.allow);
    let mut compared = Vec::new();
    for (old, new) in pairs(&old, &new, args)? {
        compared.extend(carat_bench::compare(old, new, &allowed)?);
    }
    let regressed = compared.iter().filter(|c| c.change == Change::Regression);
    let regressed: Vec<String> = regressed
        .map(|c| format!("{} {}", c.arm, c.figure))
        .collect();
    if args.json {
        output::json(&json!({
            "schema": "carat.bench.compare",
            "version": 1,
            "comparisons": compared,
        }))
        .or_input()?;
    } else {
        for comparison in &compared {
            output::line(&line(comparison)).or_input()?;
        }
    }
    if regressed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::gate(anyhow::anyhow!(
        "slower than before: {}",
        regressed.join(", ")
    )))
}

/// Each new record with the old one of the same work: same protocol, models and
/// threads. Single records are paired as they are, so that what differs is said.
fn pairs<'a>(
    old: &'a [Record],
    new: &'a [Record],
    args: &Compare,
) -> Outcome<Vec<(&'a Record, &'a Record)>> {
    if let ([old], [new]) = (old, new) {
        return Ok(vec![(old, new)]);
    }
    let work = |r: &Record| {
        let arms = r.arms.iter();
        let arms = arms.map(|a| (a.info.name.clone(), a.info.model.clone(), a.info.threads));
        (r.protocol_digest.clone(), arms.collect::<Vec<_>>())
    };
    let measured = |r: &&Record| !r.arms.is_empty();
    new.iter()
        .filter(measured)
        .map(|new| {
            let same = old
                .iter()
                .filter(measured)
                .rfind(|old| work(old) == work(new));
            let old = same.ok_or_else(|| {
                let names = work(new).1;
                let names: Vec<String> = names.into_iter().map(|n| n.0).collect();
                Failure::refused(anyhow::anyhow!(
                    "{}: no record of the same work as that of {} in {}",
                    args.old.display(),
                    names.join(", "),
                    args.new.display()
                ))
            })?;
            Ok((old, new))
        })
        .collect()
}

fn line(c: &Comparison) -> String {
    let change = match c.change {
        Change::Regression => "REGRESSION",
        Change::Improvement => "improvement",
        Change::Unchanged => "unchanged",
        Change::TooFew => "too few trials to say",
    };
    let ratio = c.ratio.map_or(String::new(), |(ratio, i)| {
        format!("  {ratio:.3} ({:.3} to {:.3})", i.low, i.high)
    });
    format!(
        "{} {}: {:.1} -> {:.1} tok/s{ratio}  {change}",
        c.arm, c.figure, c.old, c.new
    )
}

pub(super) fn report(args: &Report) -> Outcome {
    if args.pages.html.is_none() && args.pages.markdown.is_none() {
        let mut records = Vec::new();
        for file in &args.records {
            records.extend(read_records(file)?);
        }
        output::piece(&carat_bench::report::markdown(&records)).or_input()?;
        return Ok(ExitCode::SUCCESS);
    }
    write(&args.records, &args.pages)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the pages that are asked for.
pub(super) fn write(files: &[PathBuf], pages: &Pages) -> Outcome<()> {
    let mut records = Vec::new();
    for file in files {
        records.extend(read_records(file)?);
    }
    if let Some(file) = &pages.html {
        let page = carat_bench::report::html(&records)?;
        write_whole(file, page.as_bytes())?;
    }
    if let Some(file) = &pages.markdown {
        write_whole(file, carat_bench::report::markdown(&records).as_bytes())?;
    }
    Ok(())
}
