//! `carat inspect`.

use std::process::ExitCode;

use carat_bundle::{
    convert::as_stored,
    manifest::{format_summary, is_matrix},
};
use carat_engine::EngineOptions;
use carat_kernels::{Crossovers, WeightShape};
use carat_model::{Op, Plan, WeightStore as _};
use serde_json::{Value, json};

use crate::{
    args::Inspect,
    crossovers::{self, Origin, Table},
    failure::{OrInput as _, Outcome},
    memory::{Needs, Request},
    model::{Model, check_options, threads},
    output::{self, bytes},
};

pub(crate) fn run(args: &Inspect) -> Outcome {
    let options = &args.model;
    check_options(options)?;
    // Looking at a checkpoint converts nothing.
    let model = Model::open(&options.model, &options.source, true)?;
    let spec = &model.spec;
    let plan = Plan::lower(spec).or_input()?;
    let context = model.context(options);
    let needs = Needs::of(
        &plan,
        model.weight_bytes(),
        model.cpu_options(options)?.kv,
        &Request::new(context, context, EngineOptions::DEFAULT_CHUNK),
    );
    let threads = threads(options.threads)?;
    // Measuring takes a moment: only where it is asked for.
    let bandwidth = options.ctx.map(|_| carat_bench::read_bandwidth(threads));
    let per_token = model.bytes_per_token();
    let expected_tps = bandwidth.map(|b| b / (per_token + needs.kv / 2) as f64);
    let formats = format_summary(
        spec.tensors()
            .iter()
            .filter_map(|d| Some((d.role, model.tensors().info(&d.name)?.dtype))),
    );
    let (placement, changes) = if args.plan {
        let table = model.crossovers(options)?;
        let crossovers = table.as_ref().map(Table::crossovers).unwrap_or_default();
        let placement = list_plan(&model, &plan, args, &crossovers)?;
        (Some(placement), Some(table))
    } else {
        (None, None)
    };
    let weights: u64 = spec
        .tensors()
        .iter()
        .filter_map(|d| d.shape.elements().ok())
        .map(|n| n as u64)
        .sum();

    if options.json {
        output::json(&json!({
            "schema": "carat.inspect",
            "version": 1,
            "name": model.name,
            "kind": if model.bundle().is_some() { "bundle" } else { "checkpoint" },
            "digest": model.bundle().map(|b| b.digest()),
            "source": model.bundle().map(|b| &b.manifest().source),
            "architecture": model.checkpoint().map(|c| &c.origin.architecture),
            "weights_kind": weights_kind(&model),
            "parameters": weights,
            "formats": formats,
            "spec": spec,
            "context": context,
            "memory": {
                "weights_bytes": needs.weights,
                "kv_bytes": needs.kv,
                "chunk_bytes": needs.chunk,
                "total_bytes": needs.total(),
                "available_bytes": carat_bench::available_memory_bytes(),
                "fits": needs.fits(),
            },
            "bytes_per_token": per_token,
            "read_bandwidth": bandwidth,
            "expected_decode_tps": expected_tps,
            "plan": placement,
            "crossovers": changes.flatten().map(|table| crossovers_json(&table)),
        }))
        .or_input()?;
        return Ok(ExitCode::SUCCESS);
    }

    let line = |label: &str, text: String| output::line(&format!("{label:<14}{text}"));
    line("model", model.name.clone()).or_input()?;
    match (model.bundle(), model.checkpoint()) {
        (Some(bundle), _) => {
            let m = bundle.manifest();
            line(
                "bundle",
                format!("{} (digest {})", m.compression, &bundle.digest()[..16]),
            )
            .or_input()?;
            line(
                "source",
                format!("{} {:?}", m.source.name, m.source.kind).to_lowercase(),
            )
            .or_input()?;
        }
        (None, Some(c)) => {
            line(
                "checkpoint",
                format!("{} {:?}", c.origin.architecture, c.origin.kind),
            )
            .or_input()?;
            for note in &c.origin.notes {
                line("note", note.clone()).or_input()?;
            }
        }
        (None, None) => {}
    }
    line(
        "weights",
        format!("{} ({weights} parameters, {formats})", weights_kind(&model)),
    )
    .or_input()?;
    line(
        "shape",
        format!(
            "{} layers, hidden {}, vocabulary {}{}",
            spec.layers.len(),
            spec.hidden_size,
            spec.vocab_size,
            if spec.head.tied { ", tied head" } else { "" }
        ),
    )
    .or_input()?;
    line(
        "context",
        format!("{context} of {} tokens", spec.max_context),
    )
    .or_input()?;
    line(
        "memory",
        format!(
            "{} (weights {}, KV cache {}, chunk {}){}",
            bytes(needs.total()),
            bytes(needs.weights),
            bytes(needs.kv),
            bytes(needs.chunk),
            match needs.fits() {
                Some(true) => ": fits",
                Some(false) => ": DOES NOT FIT",
                None => "",
            }
        ),
    )
    .or_input()?;
    line("per token", format!("{} of weights read", bytes(per_token))).or_input()?;
    if let (Some(bandwidth), Some(tps)) = (bandwidth, expected_tps) {
        line(
            "expected",
            format!(
                "at most {tps:.0} tok/s at {:.1} GB/s, the cache half full",
                bandwidth / 1e9
            ),
        )
        .or_input()?;
    }
    for entry in placement.iter().flatten() {
        output::line(entry).or_input()?;
    }
    for entry in changes.iter().flat_map(list_crossovers) {
        output::line(&entry).or_input()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Where products change kernels, a line each.
fn list_crossovers(table: &Option<Table>) -> Vec<String> {
    let Some(table) = table else {
        return vec!["crossovers    measured for bundles; these are the kernels' constants".into()];
    };
    let origin = match table.origin {
        Origin::Kept => "measured before, from the cache",
        Origin::Measured => "measured now",
    };
    let line = |(shape, from): &(WeightShape, Option<usize>)| {
        let from = match from {
            Some(from) => format!("tiled from {from} tokens on"),
            None => "the kernel's constant (no time to measure)".into(),
        };
        format!("  {:<26} {from}", crossovers::name(shape))
    };
    let head = match table.shapes.is_empty() {
        true => "crossovers    none: no product is large enough to matter".into(),
        false => format!("crossovers    {origin}"),
    };
    [head]
        .into_iter()
        .chain(table.shapes.iter().map(line))
        .collect()
}

fn crossovers_json(table: &Table) -> Value {
    let shape = |(shape, from): &(WeightShape, Option<usize>)| {
        json!({
            "format": shape.form.to_string(),
            "rows": shape.rows,
            "columns": shape.columns,
            "tiled_from": from,
        })
    };
    json!({
        "measured": table.origin == Origin::Measured,
        "shapes": table.shapes.iter().map(shape).collect::<Vec<_>>(),
    })
}

fn weights_kind(model: &Model) -> String {
    let kind = match (model.bundle(), model.checkpoint()) {
        (Some(b), _) => format!("{:?}", b.manifest().source.weights),
        (None, Some(c)) => format!("{:?}", c.origin.weights),
        (None, None) => String::new(),
    };
    match kind.as_str() {
        "TernaryLatent" => "latent master of a ternary model (not ternary)".into(),
        _ => kind.to_lowercase(),
    }
}

/// One line per op: what it does, on what, and which kernel runs it where.
fn list_plan(
    model: &Model,
    plan: &Plan,
    args: &Inspect,
    crossovers: &Crossovers,
) -> Outcome<Vec<String>> {
    let cpu = model.cpu_options(&args.model)?;
    Ok(plan
        .ops
        .iter()
        .filter(|op| !matches!(op, Op::Tap { .. }))
        .map(|op| {
            let detail = match op {
                Op::Linear { projections, .. } => projections
                    .iter()
                    .map(|p| {
                        let name = &plan.weights[p.weight.0];
                        let kernel = model.tensors().info(name).map(|info| {
                            let role = spec_role(model, name);
                            let bundled = model.bundle().and_then(|b| b.matrix(name));
                            let stored = match bundled {
                                Some(matrix) => matrix.layout().form(),
                                None => as_stored(role, info.dtype).0.into(),
                            };
                            debug_assert!(is_matrix(role));
                            let shape = WeightShape {
                                form: stored,
                                rows: info.shape.rows().unwrap_or(0),
                                columns: info.shape.columns(),
                            };
                            let [one, many] = [1, EngineOptions::DEFAULT_CHUNK].map(|m| {
                                let (isa, precision) = (cpu.isa, cpu.precision);
                                carat_kernels::kernel_name(isa, shape, precision, m, crossovers)
                            });
                            format!("{stored}, decode {one}, prefill {many}")
                        });
                        format!("{name} [{}]", kernel.unwrap_or_default())
                    })
                    .collect::<Vec<_>>()
                    .join("; "),
                Op::Embed { table, .. } => plan.weights[table.0].clone(),
                Op::RmsNorm { weight, .. } => plan.weights[weight.0].clone(),
                Op::Attention { window, heads, .. } => match window {
                    Some(w) => format!("{heads} heads, window {w}"),
                    None => format!("{heads} heads"),
                },
                _ => String::new(),
            };
            format!("  {:<12} cpu {}  {detail}", op.name(), cpu.isa)
        })
        .collect())
}

fn spec_role(model: &Model, name: &str) -> carat_bundle::spec::TensorRole {
    model
        .spec
        .tensors()
        .into_iter()
        .find(|d| d.name == name)
        .map_or(carat_bundle::spec::TensorRole::Linear, |d| d.role)
}
