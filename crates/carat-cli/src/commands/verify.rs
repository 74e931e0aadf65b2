//! `carat verify`.

use std::process::ExitCode;

use carat_bundle::{
    Bundle,
    declare::SourceDeclarations,
    manifest::{
        ActivationContract, RECIPE_TEXT_FILE, SkippedTensor, SourceRecord, format_summary,
        is_matrix,
    },
    spec::ModelSpec,
    text::TextAssets,
    verify::{Against, Check, Status, VerifyOptions, verify},
};
use carat_import::Checkpoint;
use carat_quant::Truncated;
use serde_json::json;

use crate::{
    args::Verify,
    failure::{Failure, OrInput as _, Outcome},
    model::{
        ADAPTER_NOTE, CALIBRATION_NOTE, Located, activation, content_digest, locate,
        open_checkpoint, source_record, stop_findings,
    },
    output,
    progress::Spinner,
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
            let checkpoint = open_checkpoint(&path, &args.source)?;
            let formats = format_summary(
                checkpoint
                    .spec
                    .tensors()
                    .iter()
                    .filter_map(|d| Some((d.role, checkpoint.tensors.info(&d.name)?.dtype))),
            );
            let declared = SourceDeclarations::of(&checkpoint.spec, &checkpoint.text, formats);
            // A bundle that cannot be read fails anyway.
            let bundle = Bundle::open(&args.bundle).ok();
            let expected = Expected::of(&checkpoint, bundle.as_ref());
            Some((checkpoint, declared, expected, content_digest(&path)?))
        }
    };
    let busy = Spinner::start("verifying");
    let mut report = verify(
        &args.bundle,
        &VerifyOptions {
            against: against
                .as_ref()
                .map(|(checkpoint, declared, expected, digest)| Against {
                    declared,
                    digest: Some(digest),
                    spec: &expected.spec,
                    text: &checkpoint.text,
                    record: &expected.record,
                    skipped: &expected.skipped,
                    activation: expected.activation,
                }),
            threads: 0,
        },
    );
    drop(busy);
    // A bundle that cannot be read has its FAIL already.
    if let Ok(bundle) = Bundle::open(&args.bundle)
        && let Ok(text) = bundle.text()
    {
        report.checks.extend(stop_checks(&bundle, &text));
    }
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

/// What a bundle of a checkpoint has to say, given what the conversion was asked
/// to change: that the head is a matrix of its own, that layers are left out,
/// that an adapter is merged.
struct Expected {
    spec: ModelSpec,
    record: SourceRecord,
    skipped: Vec<SkippedTensor>,
    activation: ActivationContract,
}

impl Expected {
    fn of(checkpoint: &Checkpoint, bundle: Option<&Bundle>) -> Expected {
        let mut expected = Expected {
            spec: checkpoint.spec.clone(),
            record: source_record(checkpoint, None),
            skipped: checkpoint.origin.skipped.clone(),
            activation: activation(true),
        };
        let Some(bundle) = bundle else {
            return expected;
        };
        let manifest = bundle.manifest();
        let mut matrices = manifest.tensors.iter().filter(|t| is_matrix(t.role));
        expected.activation = activation(matrices.any(|t| t.form().is_integer()));
        // Only recipes in a file of their own can give a tied head a matrix.
        if !manifest.spec.head.tied && bundle.path().join(RECIPE_TEXT_FILE).is_file() {
            expected.spec.head.tied = false;
        }
        if !manifest.shippable {
            let cut = Truncated::new(&expected.spec, manifest.spec.layers.len());
            expected.spec = cut.spec;
            expected.skipped.extend(cut.skipped);
        }
        let of_convert =
            |note: &&String| note.starts_with(ADAPTER_NOTE) || note.starts_with(CALIBRATION_NOTE);
        let notes = manifest.source.notes.iter().filter(of_convert).cloned();
        expected.record.notes.extend(notes);
        expected
    }
}

/// Whether answers can end, tried on the bundle's own template. What was so in the
/// source stands in its notes; what was not is a difference.
fn stop_checks(bundle: &Bundle, text: &TextAssets) -> Vec<Check> {
    let check = |status, detail| Check {
        name: "stops".into(),
        status,
        detail,
    };
    if text.tokenizer_json.is_none() || text.config.chat_template.is_none() {
        let detail = "there is no tokenizer with a chat template to try them on";
        return vec![check(Status::Skipped, detail.into())];
    }
    let findings = stop_findings(text);
    if findings.is_empty() {
        return vec![check(Status::Ok, "a rendered answer ends with one".into())];
    }
    let notes = &bundle.manifest().source.notes;
    findings
        .into_iter()
        .map(|finding| match notes.contains(&finding) {
            true => check(Status::Info, format!("as in the source: {finding}")),
            false => check(Status::Diff, finding),
        })
        .collect()
}
