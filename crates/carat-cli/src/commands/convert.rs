//! `carat convert`.

use std::process::ExitCode;

use carat_bundle::writer::CommandRecord;
use serde_json::json;

use crate::{
    args::Convert,
    failure::{Failure, OrInput as _, Outcome},
    model::{Located, convert_checkpoint, locate, open_checkpoint},
    output::{self, bytes},
};

pub(crate) fn run(args: &Convert) -> Outcome {
    if args.recipe != "keep" {
        return Err(
            Failure::input(anyhow::anyhow!("--recipe {}: no such recipe", args.recipe))
                .hint("known: keep (each tensor as it is stored)"),
        );
    }
    if args.target != "native" {
        return Err(
            Failure::input(anyhow::anyhow!("--target {}: no such target", args.target))
                .hint("known: native"),
        );
    }
    let path = match locate(&args.model)? {
        Located::Checkpoint(path) => path,
        Located::Bundle(path) => {
            return Err(
                Failure::input(anyhow::anyhow!("{} is a bundle already", path.display()))
                    .hint("convert the checkpoint it was made from"),
            );
        }
    };
    let checkpoint = open_checkpoint(&path)?;
    let digest = carat_import::content_digest(&path)?;
    let command = CommandRecord {
        command: "carat convert".into(),
        args: vec![
            carat_bundle::declare::portable_argument(&args.model),
            carat_bundle::declare::portable_argument(&args.out.to_string_lossy()),
            "--recipe".into(),
            args.recipe.clone(),
        ],
        notes: vec![],
    };
    let report = convert_checkpoint(&checkpoint, Some(digest), &args.out, args.force, command)?;
    let manifest = &report.manifest;
    let size = &manifest.size_report;
    if args.json {
        output::json(&json!({
            "schema": "carat.convert",
            "version": 1,
            "bundle": args.out,
            "digest": report.digest,
            "recipe": manifest.recipe.name,
            "compression": manifest.compression,
            "source": manifest.source,
            "size_report": size,
            "skipped": manifest.skipped,
        }))
        .or_input()?;
    } else {
        output::line(&format!("{} -> {}", path.display(), args.out.display())).or_input()?;
        output::line(&format!(
            "recipe   {} ({})",
            manifest.recipe.name, manifest.compression
        ))
        .or_input()?;
        output::line(&format!(
            "weights  {} in {}, {:.3} bits per weight",
            size.weights,
            bytes(size.stored_bytes),
            size.bits_per_weight
        ))
        .or_input()?;
        if manifest.source.permuted_qk {
            output::line("q and k rows were permuted in the source; the bundle has them in order")
                .or_input()?;
        }
        for note in &manifest.source.notes {
            output::line(&format!("note     {note}")).or_input()?;
        }
        for skipped in &manifest.skipped {
            output::line(&format!("skipped  {}: {}", skipped.name, skipped.reason)).or_input()?;
        }
        output::line(&format!("digest   {}", report.digest)).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}
