//! `carat convert`.

use std::process::ExitCode;

use carat_bundle::{convert::Recipe, writer::CommandRecord};
use serde_json::json;

use crate::{
    args::Convert,
    failure::{Failure, OrInput as _, Outcome},
    model::{Located, content_digest, convert_checkpoint, locate, open_checkpoint},
    output::{self, bytes},
};

/// Skipped tensors that are listed on the terminal.
const SHOWN_SKIPPED: usize = 8;

pub(crate) fn run(args: &Convert) -> Outcome {
    let Some(recipe) = Recipe::named(&args.recipe) else {
        return Err(
            Failure::input(anyhow::anyhow!("--recipe {}: no such recipe", args.recipe)).hint(
                "known: keep (each tensor as it is stored), \
                 dense (ternary matrices with five trits to a byte)",
            ),
        );
    };
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
    let checkpoint = open_checkpoint(&path, &args.source)?;
    let digest = content_digest(&path)?;
    let command = CommandRecord {
        command: "carat convert".into(),
        args: [
            &args.model,
            &*args.out.to_string_lossy(),
            "--recipe",
            &args.recipe,
        ]
        .into_iter()
        .chain(
            args.source
                .ignore_keys
                .iter()
                .flat_map(|key| ["--ignore-key", key]),
        )
        .map(carat_bundle::declare::portable_argument)
        .collect(),
        notes: vec![],
    };
    let report = convert_checkpoint(
        &checkpoint,
        recipe,
        Some(digest),
        &args.out,
        args.force,
        command,
    )?;
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
        output::line(&format!("recipe   {}", manifest.compression)).or_input()?;
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
        // The manifest names all of them; a vision tower has hundreds.
        for skipped in manifest.skipped.iter().take(SHOWN_SKIPPED) {
            output::line(&format!("skipped  {}: {}", skipped.name, skipped.reason)).or_input()?;
        }
        if let Some(more) = manifest.skipped.len().checked_sub(SHOWN_SKIPPED)
            && more > 0
        {
            output::line(&format!("skipped  {more} more, see manifest.json")).or_input()?;
        }
        output::line(&format!("digest   {}", report.digest)).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}
