//! `carat convert`.

use std::process::ExitCode;

use carat_bundle::{text::TextAssets, writer::CommandRecord};
use carat_import::adapter::Adapter;
use carat_quant::{
    Kept, Plan, Quantizer, Recipe, Target,
    recipe::schema::{Calibration, CodeChoice, InputScales},
};
use serde_json::json;

use crate::{
    args::Convert,
    commands::{
        calibration,
        recipe::{self, Chosen},
    },
    failure::{Failure, OrInput as _, Outcome},
    model::{
        Calibrate, Conversion, Located, content_digest, convert_checkpoint, locate,
        open_checkpoint, threads,
    },
    output::{self, bytes},
};

/// Skipped tensors that are listed on the terminal.
const SHOWN_SKIPPED: usize = 8;

pub(crate) fn run(args: &Convert) -> Outcome {
    let chosen = recipe::choose(&args.recipe)?;
    let target = match args.target.as_str() {
        "native" => Target::Native,
        "portable" => Target::Portable,
        other => {
            return Err(
                Failure::input(anyhow::anyhow!("--target {other}: no such target"))
                    .hint("known: native, portable"),
            );
        }
    };
    if args.num_layers == Some(0) {
        return Err(Failure::input(anyhow::anyhow!(
            "--num-layers 0: a model has at least one layer"
        )));
    }
    let threads = threads(args.threads)?;
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
    let adapter_name = args.adapter.as_ref().map(|a| a.to_string_lossy());
    let imatrix_name = args.imatrix.as_ref().map(|a| a.to_string_lossy());
    let text_name = args.calibration.as_ref().map(|a| a.to_string_lossy());
    let layers = args.num_layers.map(|n| n.to_string());
    let command = CommandRecord {
        command: "carat convert".into(),
        args: [
            &args.model,
            &*args.out.to_string_lossy(),
            "--recipe",
            &args.recipe,
            "--target",
            &args.target,
        ]
        .into_iter()
        .chain(imatrix_name.iter().flat_map(|n| ["--imatrix", n]))
        .chain(text_name.iter().flat_map(|n| ["--calibration", n]))
        .chain(adapter_name.iter().flat_map(|n| ["--adapter", n]))
        .chain(layers.iter().flat_map(|n| ["--num-layers", n]))
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
    let adapter = match &args.adapter {
        Some(folder) => Some(Adapter::open(folder, &checkpoint.spec)?),
        None => None,
    };
    let mut how = Conversion {
        adapter: adapter.as_ref(),
        layers: args.num_layers,
        overwrite: args.force,
        threads: args.threads,
        ..Conversion::default()
    };
    let quantizer;
    let mut theory = None;
    let mut kept = Kept::default();
    match &chosen {
        Chosen::Exact(exact) if args.imatrix.is_some() => {
            return Err(Failure::input(anyhow::anyhow!(
                "--imatrix: recipe {} changes no weight",
                exact.name()
            )));
        }
        Chosen::Exact(exact) if args.calibration.is_some() => {
            return Err(Failure::input(anyhow::anyhow!(
                "--calibration: recipe {} changes no weight",
                exact.name()
            )));
        }
        Chosen::Exact(exact) => how.recipe = *exact,
        Chosen::File(recipe) => {
            let mut spec = checkpoint.spec.clone();
            spec.layers.truncate(args.num_layers.unwrap_or(usize::MAX));
            let (plan, size) =
                recipe::resolve(recipe, &spec, checkpoint.tensors.as_ref(), args.json)?;
            theory = Some(size);
            how.untie_head = plan.untied_head;
            let imatrix = args.imatrix.as_deref();
            let importance = recipe::importance(imatrix, &plan, &checkpoint.spec)?;
            let made = Quantizer::new(recipe, &plan, target, threads)
                .or_input()?
                .with_importance(importance);
            kept = made.kept();
            match recipe.calibration() {
                Some(settings) => {
                    how.calibrate = Some(calibrate(
                        args,
                        recipe,
                        &plan,
                        settings,
                        &checkpoint.text,
                        made,
                    )?);
                }
                None if args.calibration.is_some() => {
                    return Err(Failure::input(anyhow::anyhow!(
                        "--calibration: recipe {} is not calibrated",
                        recipe.name()
                    ))
                    .hint("a section carat.calibration in the recipe says how"));
                }
                None => {
                    quantizer = made;
                    how.quantize = Some(&quantizer);
                }
            }
        }
    }
    let report = convert_checkpoint(&checkpoint, how, Some(digest), &args.out, command).map_err(
        |failure| match &chosen {
            Chosen::File(_) if target == Target::Native => failure.or_hint(
                "--target portable stores what a recipe says, for the oracle and for export",
            ),
            _ => failure,
        },
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
            "theory": theory,
            "shippable": manifest.shippable,
            "skipped": manifest.skipped,
            "kept_grids": kept.names(),
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
        if !manifest.shippable {
            output::line("truncated: not a whole model, not to be published").or_input()?;
        }
        if manifest.source.permuted_qk {
            output::line("q and k rows were permuted in the source; the bundle has them in order")
                .or_input()?;
        }
        let count = kept.names().len();
        if count > 0 {
            let what = "of the recipe's grid already, to the last bit: kept";
            output::line(&format!("grids    {count} matrices are {what}")).or_input()?;
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

/// The quantizer of a recipe that is calibrated, with its text.
fn calibrate(
    args: &Convert,
    recipe: &Recipe,
    plan: &Plan,
    settings: &Calibration,
    assets: &TextAssets,
    quantizer: Quantizer,
) -> Outcome<Calibrate> {
    if args.imatrix.is_some() {
        return Err(Failure::input(anyhow::anyhow!(
            "--imatrix: recipe {} measures importance itself",
            recipe.name()
        ))
        .hint("leave --imatrix out"));
    }
    // What was asked for must change something.
    let importance_alone =
        settings.rounding == CodeChoice::Nearest && settings.scales == InputScales::None;
    if importance_alone && !plan.compares_errors() {
        return Err(Failure::input(anyhow::anyhow!(
            "recipe {}: carat.calibration would change nothing: nothing compares errors",
            recipe.name()
        ))
        .hint("rounding: gptq and scales: awq do something; palettes and range_calculator_cls: mse compare errors"));
    }
    let given = args.calibration.as_deref();
    let text = calibration::read(recipe, settings, &args.recipe, given, assets)?;
    Ok(Calibrate {
        quantizer,
        settings: settings.clone(),
        sequences: text.sequences,
        note: text.note,
    })
}
