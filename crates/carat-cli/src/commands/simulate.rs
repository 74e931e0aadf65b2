//! `carat simulate`.

use carat_bundle::{
    manifest::{ActivationContract, Form},
    source::{Picked, TensorSource},
};
use carat_fidelity::{
    Fixture, SIMULATION_SCHEMA, SIMULATION_VERSION, SimulatedRecipe, Simulation, Simulator,
    Verdict, eval::text_digest, input_rounding,
};
use carat_model::{ActPrecision, KvFormat};
use carat_oracle::{CachePrecision, Imitation, Oracle};
use carat_quant::{Plan, Quantizer, Recipe, Simulated, Target, Untied};
use carat_tensor::DType;

use super::{
    gate::{exit, findings},
    ground::Ground,
    recipe, write_whole,
};
use crate::{
    failure::{Failure, OrInput as _, Outcome},
    model::{activation, kv_format, precision, threads},
    output,
    progress::Spinner,
    simulate_args::{Simulate, TableKind},
};

/// The tensor that is the embedding table.
const EMBEDDING: &str = "embed.weight";

/// The embedding table in fp16, and nothing else.
const TABLE_F16: &str = "\
carat: {uncompressed: float16}
quantization_config: {global_config: null}
";

/// The embedding table in int8 with one scale, and nothing else.
const TABLE_INT8: &str = "\
quantization_config:
  global_config: null
  module_name_configs:
    embed_tokens:
      op_state_spec:
        weight:
          dtype: int8
          qscheme: symmetric_with_clipping
          granularity: {type: per_tensor}
      op_input_spec: null
      op_output_spec: null
";

/// What a target rounds besides the weights.
struct Machine {
    precision: ActPrecision,
    cache: CachePrecision,
    table: TableKind,
}

impl Machine {
    /// As asked, else as a bundle of these weights would be run.
    fn of(args: &Simulate, integers: bool) -> Machine {
        let precision = precision(&args.model, activation(integers));
        let cache = match kv_format(&args.model, precision) {
            KvFormat::F32 => CachePrecision::F32,
            KvFormat::F16 => CachePrecision::F16,
        };
        Machine {
            precision,
            cache,
            table: args.embedding,
        }
    }

    /// Whether nothing is rounded but the weights.
    fn is_exact(&self) -> bool {
        let plain = (ActPrecision::F32, CachePrecision::F32, TableKind::Recipe);
        (self.precision, self.cache, self.table) == plain
    }

    /// It in words.
    fn describe(&self) -> String {
        let activations = format!("{:?}", self.precision).to_lowercase();
        let cache = format!("{:?}", self.cache).to_lowercase();
        let table = match self.table {
            TableKind::Recipe => "",
            TableKind::F16 => ", embedding table in f16",
            TableKind::Int8 => ", embedding table in int8 with one scale",
        };
        format!("activations {activations}, cache {cache}{table}")
    }
}

/// The recipe of an embedding table that is kept another way than the recipe says.
fn table_recipe(kind: TableKind) -> Outcome<Option<Recipe>> {
    let text = match kind {
        TableKind::Recipe => return Ok(None),
        TableKind::F16 => TABLE_F16,
        TableKind::Int8 => TABLE_INT8,
    };
    let recipe = Recipe::parse("embedding table", text);
    Ok(Some(recipe.map_err(Failure::internal)?))
}

pub(crate) fn run(args: &Simulate) -> Outcome {
    let recipe = recipe::changing(&args.recipe)?;
    if recipe.calibration().is_some() {
        return Err(Failure::input(anyhow::anyhow!(
            "recipe {} is calibrated, and a simulation reads no calibration text",
            recipe.name()
        ))
        .hint("convert it and judge the bundle: carat convert, carat gate"));
    }
    let threads = threads(args.model.threads)?;
    let ground = Ground::open(&args.model, args.fixture.as_deref())?;
    let source = &ground.source;
    let quiet = args.model.json;
    let (plan, theory) = recipe::resolve(&recipe, &source.spec, source.tensors(), quiet)?;
    let importance = recipe::importance(args.imatrix.as_deref(), &plan, &source.spec)?;
    let quantizer = |recipe: &Recipe, plan: &Plan| {
        Quantizer::new(recipe, plan, Target::Portable, threads).or_input()
    };
    let made = quantizer(&recipe, &plan)?.with_importance(importance);

    // The model with the head that the recipe gives it.
    let copied = Untied(source.tensors());
    let mut spec = source.spec.clone();
    let mut tensors = source.tensors();
    if plan.untied_head {
        spec.head.tied = false;
        tensors = &copied;
    }
    let simulated = Simulated::new(tensors, &spec, &made).or_input()?;
    let forms = simulated.stored_forms(&spec);
    let machine = Machine::of(args, forms.values().any(|form| form.is_integer()));

    // The same on the target, whose table may be of its own kind and leaves the head
    // as the recipe has it.
    let table = match table_recipe(machine.table)? {
        None => None,
        Some(recipe) => Some(quantizer(&recipe, &recipe.resolve(&source.spec)?)?),
    };
    let table = match &table {
        None => None,
        Some(made) => Some(Simulated::new(source.tensors(), &source.spec, made).or_input()?),
    };
    let (head, picked);
    let mut there = (spec.clone(), &simulated as &dyn TensorSource);
    if let Some(table) = &table {
        head = Untied(&simulated);
        picked = Picked {
            source: match spec.head.tied {
                true => &head,
                false => &simulated,
            },
            other: table,
            picks: &|name| name == EMBEDDING,
        };
        there.0.head.tied = false;
        there.1 = &picked;
    }
    let inputs = |name: &str| {
        let form = forms.get(name).or_else(|| forms.get(EMBEDDING));
        let form = form.copied().unwrap_or(Form::Block(DType::F32));
        input_rounding(machine.precision, form, ActivationContract::default())
    };

    let busy = Spinner::start("the oracle answers");
    let text = ground.text(args.text.as_deref())?;
    let reference = ground.reference(text.len())?;
    let fixture = ground.fixture(&reference)?;
    ground.require(&spec)?;
    let simulator = Simulator::new((&reference, source.tensors()), &fixture, &text)?;
    let options = ground.oracle_options()?;
    let mut runs = Vec::new();
    {
        let candidate = Oracle::new(&spec, &simulated, options.clone())?;
        runs.push(simulator.judge("fp32", &candidate, &simulated)?);
    }
    if !machine.is_exact() {
        let imitation = Imitation {
            cache: machine.cache,
            inputs: &inputs,
        };
        let candidate = Oracle::imitating(&there.0, there.1, options, imitation)?;
        runs.push(simulator.judge(&machine.describe(), &candidate, there.1)?);
    }
    drop(busy);

    let simulation = Simulation {
        schema: SIMULATION_SCHEMA.into(),
        version: SIMULATION_VERSION,
        verdict: runs.last().map_or(Verdict::Error, |run| run.verdict),
        model: source.name.clone(),
        source_digest: ground.origin.digest.clone(),
        recipe: SimulatedRecipe {
            name: recipe.name().into(),
            digest: text_digest(recipe.text()),
            bytes: theory.total(),
            bits_per_weight: theory.bits_per_quantized_weight(),
        },
        fixture: fixture.name.clone(),
        fixture_digest: fixture.digest(),
        provisional: simulator.provisional(),
        runs,
    };
    if let Some(path) = &args.out {
        write_whole(path, simulation.to_json().as_bytes())?;
    }
    if args.model.json {
        let value = serde_json::to_value(&simulation).map_err(Failure::internal)?;
        output::json(&value).or_input()?;
    } else {
        show(&simulation, &fixture)?;
    }
    let reasons = simulation.runs.last().map_or(&[][..], |run| &run.reasons);
    exit(simulation.verdict, reasons)
}

fn show(simulation: &Simulation, fixture: &Fixture) -> Outcome<()> {
    let line = |text: String| output::line(&text).or_input();
    for run in &simulation.runs {
        line(format!("-- {}", run.arithmetic))?;
        let cases = (&fixture.cases[..], &run.cases[..]);
        findings(&run.red_first, cases, &run.checks, run.text.as_ref())?;
    }
    for reason in &simulation.provisional {
        line(format!("provisional: {reason}"))?;
    }
    for run in &simulation.runs {
        let flips: usize = run.cases.iter().map(|c| c.teacher_forced.flips.len()).sum();
        line(format!(
            "{} under {} {} ({flips} clear flips), {}",
            simulation.model, simulation.recipe.name, run.verdict, run.arithmetic
        ))?;
    }
    Ok(())
}
