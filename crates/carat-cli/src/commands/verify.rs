//! `carat verify`.

use std::process::ExitCode;

use carat_bundle::{
    declare::SourceDeclarations,
    manifest::format_summary,
    verify::{Status, VerifyOptions, verify},
};
use serde_json::json;

use crate::{
    args::Verify,
    failure::{Failure, OrInput as _, Outcome},
    model::{Located, locate, open_checkpoint},
    output,
};

pub(crate) fn run(args: &Verify) -> Outcome {
    if !args.bundle.is_dir() {
        return Err(
            Failure::input(anyhow::anyhow!("{}: no such bundle", args.bundle.display()))
                .hint("carat convert MODEL OUT makes one"),
        );
    }
    let against = match &args.against {
        None => None,
        Some(model) => {
            let Located::Checkpoint(path) = locate(model)? else {
                return Err(Failure::input(anyhow::anyhow!(
                    "--against {model}: is a bundle, not a checkpoint"
                )));
            };
            let checkpoint = open_checkpoint(&path)?;
            let formats = format_summary(
                checkpoint
                    .spec
                    .tensors()
                    .iter()
                    .filter_map(|d| Some((d.role, checkpoint.tensors.info(&d.name)?.dtype))),
            );
            Some(SourceDeclarations::of(
                &checkpoint.spec,
                &checkpoint.text,
                formats,
            ))
        }
    };
    let report = verify(
        &args.bundle,
        &VerifyOptions {
            against: against.as_ref(),
            threads: 0,
        },
    );
    if args.json {
        output::json(&json!({
            "schema": "carat.verify-report",
            "version": 1,
            "passed": report.passed(),
            "report": report,
        }))
        .or_input()?;
    } else {
        output::line(&report.to_string()).or_input()?;
    }
    if report.passed() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure::gate(anyhow::anyhow!(
        "{}: {} checks failed, {} undeclared differences",
        args.bundle.display(),
        report.count(Status::Fail),
        report.count(Status::Diff)
    )))
}
