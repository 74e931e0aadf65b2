//! `carat recipe`, and finding the recipe that a command names.

use std::{fs::File, io::Read as _, path::Path, process::ExitCode};

use anyhow::Context as _;
use carat_bundle::{convert::Recipe as Exact, source::TensorSource, spec::ModelSpec};
use carat_quant::{
    Importance, Plan, Recipe, Treatment,
    recipe::{MAX_RECIPE_BYTES, PRESETS},
    report::SizeTheory,
};
use serde_json::{Value, json};

use crate::{
    args::{Recipe as Args, RecipeAction, RecipeOf},
    failure::{Failure, OrInput as _, Outcome},
    model::{Model, base_name},
    output::{self, bytes},
};

/// What `--recipe` names.
pub(crate) enum Chosen {
    /// A recipe that changes no weight.
    Exact(Exact),
    /// A file or a preset.
    File(Box<Recipe>),
}

/// Finds a recipe: a name first, then a file.
pub(crate) fn choose(name: &str) -> Outcome<Chosen> {
    if let Some(exact) = Exact::named(name) {
        return Ok(Chosen::Exact(exact));
    }
    if let Some(preset) = Recipe::preset(name) {
        return Ok(Chosen::File(Box::new(preset)));
    }
    let path = Path::new(name);
    if !path.exists() {
        let known: Vec<&str> = PRESETS.iter().map(|(name, _)| *name).collect();
        return Err(Failure::input(anyhow::anyhow!(
            "--recipe {name}: no such recipe, and no such file"
        ))
        .hint(format!(
            "known: keep (each tensor as it is stored), dense (ternary matrices with five trits \
             to a byte), {}",
            known.join(", ")
        )));
    }
    let mut text = String::new();
    File::open(path)
        .and_then(|file| {
            let mut file = file.take(MAX_RECIPE_BYTES as u64 + 1);
            file.read_to_string(&mut text)
        })
        .with_context(|| format!("cannot read {name}"))
        .or_input()?;
    let recipe = Recipe::parse(&base_name(path), &text)?;
    Ok(Chosen::File(Box::new(recipe)))
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.action {
        RecipeAction::Schema => output::json(&Recipe::json_schema()).or_input()?,
        RecipeAction::Show(of) => show(of)?,
        RecipeAction::Check(of) => check(of)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The recipe that a subcommand names.
fn named(of: &RecipeOf) -> Outcome<Recipe> {
    let Some(name) = &of.recipe else {
        return Err(Failure::input(anyhow::anyhow!("no recipe given"))
            .hint("carat recipe show lists the presets"));
    };
    match choose(name)? {
        Chosen::File(recipe) => Ok(*recipe),
        Chosen::Exact(exact) => Err(Failure::input(anyhow::anyhow!(
            "{}: changes no weight and has no file",
            exact.name()
        ))),
    }
}

fn show(of: &RecipeOf) -> Outcome<()> {
    if of.recipe.is_none() {
        return list(of.json);
    }
    let recipe = named(of)?;
    if let Some(model) = &of.model {
        let model = Model::open(model, &of.source, true)?;
        let plan = recipe.resolve(&model.spec)?;
        return print_plan(&plan, model.tensors(), of.json);
    }
    if of.json {
        return output::json(&json!({
            "schema": "carat.recipe",
            "version": 1,
            "name": recipe.name(),
            "description": recipe.description(),
            "text": recipe.text(),
        }))
        .or_input();
    }
    output::line(recipe.text().trim_end()).or_input()
}

fn list(as_json: bool) -> Outcome<()> {
    let presets = || PRESETS.iter().filter_map(|(name, _)| Recipe::preset(name));
    let words = |recipe: &Recipe| recipe.description().unwrap_or_default().to_owned();
    if as_json {
        let presets: Vec<Value> = presets()
            .map(|p| json!({ "name": p.name(), "description": words(&p) }))
            .collect();
        return output::json(&json!({
            "schema": "carat.recipes",
            "version": 1,
            "presets": presets,
        }))
        .or_input();
    }
    for preset in presets() {
        output::line(&format!("{:<31}{}", preset.name(), words(&preset))).or_input()?;
    }
    Ok(())
}

fn check(of: &RecipeOf) -> Outcome<()> {
    let recipe = named(of)?;
    let plan = match &of.model {
        Some(model) => {
            let model = Model::open(model, &of.source, true)?;
            Some(recipe.resolve(&model.spec)?)
        }
        None => None,
    };
    let unmatched = plan.as_ref().map(|p| p.unmatched.clone());
    if of.json {
        return output::json(&json!({
            "schema": "carat.recipe-check",
            "version": 1,
            "recipe": recipe.name(),
            "unmatched": unmatched,
        }))
        .or_input();
    }
    output::line(&format!("{}: ok", recipe.name())).or_input()?;
    for rule in unmatched.iter().flatten() {
        output::line(&format!("matches nothing: {rule}")).or_input()?;
    }
    Ok(())
}

/// How the source stores the tensors of a plan, a new head included.
fn theory(plan: &Plan, tensors: &dyn TensorSource) -> Outcome<SizeTheory> {
    SizeTheory::of(plan, |decl| {
        let table = plan.untied_head && decl.name == "head.weight";
        tensors.info(if table { "embed.weight" } else { &decl.name })
    })
    .map_err(|name| Failure::input(anyhow::anyhow!("tensor {name:?} has no size")))
}

fn print_plan(plan: &Plan, tensors: &dyn TensorSource, as_json: bool) -> Outcome<()> {
    let theory = theory(plan, tensors)?;
    if as_json {
        let rows: Vec<Value> = plan
            .tensors
            .iter()
            .map(|t| {
                let grid = match t.treatment {
                    Treatment::Quantize(method) => Some(method.grid().to_string()),
                    _ => None,
                };
                json!({
                    "name": t.decl.name,
                    "shape": t.decl.shape,
                    "treatment": t.treatment.to_string(),
                    "grid": grid,
                    "rule": t.rule,
                })
            })
            .collect();
        return output::json(&json!({
            "schema": "carat.recipe-plan",
            "version": 1,
            "recipe": plan.recipe,
            "tensors": rows,
            "untied_head": plan.untied_head,
            "skipped": plan.skipped,
            "unmatched": plan.unmatched,
            "theory": theory,
        }))
        .or_input();
    }
    for t in &plan.tensors {
        output::line(&format!(
            "{:<30} {:<16} {:<40} {}",
            t.decl.name,
            t.decl.shape.to_string(),
            t.treatment.to_string(),
            t.rule
        ))
        .or_input()?;
    }
    summary(plan, &theory)
}

/// What a plan does besides, and the bytes that it asks for.
fn summary(plan: &Plan, theory: &SizeTheory) -> Outcome<()> {
    let mut lines = Vec::new();
    if plan.untied_head {
        lines.push("the head was the embedding table and becomes a tensor of its own".into());
    }
    for (name, reason) in &plan.skipped {
        lines.push(format!("not quantized: {name}: {reason}"));
    }
    for rule in &plan.unmatched {
        lines.push(format!("matches nothing: {rule}"));
    }
    lines.push(format!(
        "in theory  codes {}, scales {}, zero points {}, tables {}, kept {}: {} in all, {:.3} bits \
         for each of {} quantized weights",
        bytes(theory.codes),
        bytes(theory.scales),
        bytes(theory.zero_points),
        bytes(theory.tables),
        bytes(theory.kept),
        bytes(theory.total()),
        theory.bits_per_quantized_weight(),
        theory.quantized_weights,
    ));
    lines
        .iter()
        .try_for_each(|line| output::line(line))
        .or_input()
}

/// Resolves a recipe for a checkpoint and prints what it will do: one line for each
/// treatment, not for each tensor.
pub(crate) fn resolve(
    recipe: &Recipe,
    spec: &ModelSpec,
    tensors: &dyn TensorSource,
    quiet: bool,
) -> Outcome<(Plan, SizeTheory)> {
    let plan = recipe.resolve(spec)?;
    let theory = theory(&plan, tensors)?;
    if quiet {
        return Ok((plan, theory));
    }
    let mut counts: Vec<(String, usize)> = Vec::new();
    for t in &plan.tensors {
        let words = format!("{} ({})", t.treatment, t.rule);
        match counts.iter_mut().find(|(w, _)| *w == words) {
            Some((_, n)) => *n += 1,
            None => counts.push((words, 1)),
        }
    }
    for (words, n) in counts {
        output::line(&format!("{n:>6} tensors  {words}")).or_input()?;
    }
    summary(&plan, &theory)?;
    Ok((plan, theory))
}

/// What an importance matrix says of a model, for a plan that it changes.
pub(crate) fn importance(
    path: Option<&Path>,
    plan: &Plan,
    spec: &ModelSpec,
) -> Outcome<Importance> {
    match path {
        // What was asked for must change something.
        Some(path) if !plan.compares_errors() => Err(Failure::input(anyhow::anyhow!(
            "--imatrix {}: recipe {} compares no errors, so it would change nothing",
            path.display(),
            plan.recipe
        ))
        .hint("palettes do, and range_calculator_cls: mse")),
        Some(path) => Ok(carat_import::imatrix::read(path, spec)?),
        None => Ok(Importance::new()),
    }
}

/// A recipe that changes weights.
pub(crate) fn changing(name: &str) -> Outcome<Recipe> {
    match choose(name)? {
        Chosen::File(recipe) => Ok(*recipe),
        Chosen::Exact(exact) => Err(Failure::input(anyhow::anyhow!(
            "--recipe {}: changes no weight, so there is nothing to simulate",
            exact.name()
        ))),
    }
}
