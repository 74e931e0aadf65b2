//! `carat allocate`.

use std::{collections::BTreeMap, process::ExitCode};

use carat_bundle::{manifest::is_matrix, source::TensorSource, spec::ModelSpec};
use carat_fidelity::scan::{Mode, Part, Scan};
use carat_quant::{
    Recipe,
    allocate::{Family, Priced, allocate},
    report::SizeTheory,
};
use serde_json::json;

use super::{recipe, write_whole};
use crate::{
    failure::{Failure, OrInput as _, Outcome},
    model::{Model, base_name, content_digest},
    output::{self, bytes},
    simulate_args::Allocate,
};

pub(crate) fn run(args: &Allocate) -> Outcome {
    let model = Model::open(&args.model.model, &args.model.source, true)?;
    let scan = Scan::read(&args.scan)?;
    let family = of_this_model(args, &model, &scan)?;
    let (spec, tensors) = (&model.spec, model.tensors());
    let (names, options) = priced(args, &scan, family, spec)?;
    let kept = kept_bytes(family, &scan, spec, tensors)?;
    let budget = args.budget.checked_sub(kept).ok_or_else(|| {
        too_small(&format!(
            "--budget {}: what is not quantized takes {kept} bytes alone",
            args.budget
        ))
    })?;
    let chosen = allocate(&options, budget).map_err(|e| {
        too_small(&format!(
            "--budget {}: at {} bits everywhere the weights take {} bytes",
            args.budget,
            scan.header.bits[0],
            e.least.saturating_add(kept)
        ))
    })?;

    let picks: Vec<Priced> = options.iter().zip(&chosen).map(|(o, &i)| o[i]).collect();
    let widths: Vec<(String, u8)> = names
        .iter()
        .cloned()
        .zip(picks.iter().map(|p| p.bits))
        .collect();
    let predicted: f64 = picks.iter().map(|p| p.cost).sum();
    let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
    for (_, bits) in &widths {
        *counts.entry(*bits).or_default() += 1;
    }
    let description = format!(
        "{} by what a scan of {} found, within {} bytes. Lossy",
        match family {
            Family::Palette => "Palettes",
            Family::Linear => "Integers in blocks of 32",
        },
        scan.header.model,
        args.budget
    );
    let text = family.mixed(&description, &widths);
    // What is written is read by the same rules, and has to be of the size that was asked for.
    let made = Recipe::parse(&base_name(&args.out), &text).map_err(Failure::internal)?;
    let (_, theory) = recipe::resolve(&made, spec, tensors, true)?;
    if theory.total() > args.budget {
        return Err(Failure::internal(anyhow::anyhow!(
            "the recipe takes {} bytes, the budget is {}",
            theory.total(),
            args.budget
        )));
    }
    write_whole(&args.out, text.as_bytes())?;

    // The same sum for one width everywhere, to see what choosing is worth.
    let uniform: Vec<(u8, u64, f64)> = scan
        .header
        .bits
        .iter()
        .enumerate()
        .map(|(i, &bits)| {
            let of_width = options.iter().map(|o| o[i]);
            let bytes: u64 = of_width.clone().map(|p| p.bytes).sum();
            (bits, bytes + kept, of_width.map(|p| p.cost).sum())
        })
        .collect();
    if args.model.json {
        output::json(&json!({
            "schema": "carat.allocation",
            "version": 1,
            "out": args.out,
            "budget": args.budget,
            "theory": theory,
            "bytes": theory.total(),
            "predicted_kl": predicted,
            "matrices": counts.iter().map(|(b, n)| json!({"bits": b, "matrices": n})).collect::<Vec<_>>(),
            "uniform": uniform.iter().map(|(bits, bytes, kl)| json!({
                "bits": bits, "bytes": bytes, "predicted_kl": kl,
            })).collect::<Vec<_>>(),
        }))
        .or_input()?;
    } else {
        for (bits, matrices) in &counts {
            output::line(&format!("{matrices:>6} matrices  {bits} bits")).or_input()?;
        }
        output::line(&format!(
            "{} of {}, {:.3} bits for each quantized weight; divergences add up to {predicted:.3e}",
            bytes(theory.total()),
            bytes(args.budget),
            theory.bits_per_quantized_weight()
        ))
        .or_input()?;
        for (bits, size, kl) in uniform {
            output::line(&format!(
                "{:>6} everywhere: {}, they add up to {kl:.3e}",
                format!("{bits} bits"),
                bytes(size)
            ))
            .or_input()?;
        }
        output::note(&format!(
            "{}: carat simulate {} --recipe {} says what it really does",
            args.out.display(),
            args.model.model,
            args.out.display()
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn too_small(message: &str) -> Failure {
    Failure::input(anyhow::anyhow!("{message}"))
        .hint("raise the budget, or scan at fewer bits (carat scan --bits 2,3,4,6)")
}

/// The family of a scan of this model.
fn of_this_model(args: &Allocate, model: &Model, scan: &Scan) -> Outcome<Family> {
    let path = args.scan.display();
    let Some(checkpoint) = model.checkpoint() else {
        return Err(Failure::input(anyhow::anyhow!(
            "{} is a bundle: a recipe is for the checkpoint",
            args.model.model
        ))
        .hint("give the checkpoint that was scanned"));
    };
    let found = content_digest(&checkpoint.origin.path)?;
    match &scan.header.source_digest {
        Some(expected) if *expected == found => {}
        expected => {
            let expected = expected.as_deref().unwrap_or("nobody says what");
            return Err(Failure::input(anyhow::anyhow!(
                "{path} is a scan of {} ({expected}), this is {} ({found})",
                scan.header.model,
                args.model.model
            ))
            .hint("carat scan makes one of this model"));
        }
    }
    let method = &scan.header.method;
    let family = Family::ALL.into_iter().find(|f| f.name() == method);
    family.ok_or_else(|| {
        Failure::input(anyhow::anyhow!(
            "{path}: no recipe is known for the method {method:?}"
        ))
    })
}

/// Each matrix of the model, and what it costs at each width of the scan.
fn priced(
    args: &Allocate,
    scan: &Scan,
    family: Family,
    spec: &ModelSpec,
) -> Outcome<(Vec<String>, Vec<Vec<Priced>>)> {
    let matrices = spec.tensors().into_iter().filter(|d| is_matrix(d.role));
    let names: Vec<String> = matrices
        .map(|d| d.name.strip_suffix(".weight").unwrap_or(&d.name).to_owned())
        .collect();
    let mut options = vec![Vec::new(); names.len()];
    let mut missing = 0;
    for &bits in &scan.header.bits {
        let sizes = family.sizes(bits, spec)?;
        for (name, options) in names.iter().zip(&mut options) {
            let measured = scan.find(Part::Matrix, name, bits, Mode::Alone);
            match (measured, sizes.get(name)) {
                (Some(line), Some(&bytes)) => options.push(Priced {
                    bits,
                    bytes,
                    cost: line.harm.kl,
                }),
                _ => missing += 1,
            }
        }
    }
    match missing {
        0 if !scan.header.bits.is_empty() => Ok((names, options)),
        _ => Err(Failure::input(anyhow::anyhow!(
            "{}: {missing} matrices are not measured at every width",
            args.scan.display()
        ))
        .hint("the carat scan that began it goes on where it ended")),
    }
}

/// Bytes of what no width changes.
fn kept_bytes(
    family: Family,
    scan: &Scan,
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
) -> Outcome<u64> {
    let text = family.uniform(scan.header.bits[0]);
    let plan = Recipe::parse(family.name(), &text)?.resolve(spec)?;
    let theory = SizeTheory::of(&plan, |decl| tensors.info(&decl.name));
    let theory =
        theory.map_err(|name| Failure::input(anyhow::anyhow!("tensor {name:?} has no size")))?;
    Ok(theory.kept)
}
