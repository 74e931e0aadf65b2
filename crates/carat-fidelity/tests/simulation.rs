//! Recipes judged before they are stored, and what parts of a model suffer.

mod common;

use std::collections::BTreeSet;

use carat_bundle::manifest::{ActivationContract, Form};
use carat_fidelity::{
    Baseline, Fixture, Probe, SIMULATION_SCHEMA, SIMULATION_VERSION, SimulatedRecipe, Simulation,
    Simulator, Verdict, input_rounding,
    scan::{self, Mode, Part, SCAN_SCHEMA, SCAN_VERSION, Scan},
};
use carat_model::ActPrecision;
use carat_oracle::{CachePrecision, Imitation, Oracle, OracleOptions, Rounding};
use carat_quant::{Quantizer, Recipe, Simulated, Target, allocate::Family};
use carat_tensor::{DType, Grid};
use common::*;
use serde_json::Value;

fn fixture(model: &Model, oracle: &Oracle<'_>) -> Fixture {
    let mut drafter = engine(&model.spec, &model.tensors);
    let some: Vec<_> = prompts(40).into_iter().step_by(2).collect();
    let cases = model.cases(oracle, &mut drafter, &some);
    model.fixture(cases)
}

#[test]
fn a_simulation_says_what_the_gate_says_of_the_stored_weights() {
    let model = Model::open("wren-dense");
    let oracle = model.oracle();
    let fixture = fixture(&model, &oracle);
    let text = &prompts(1)[11].ids;
    let simulator = Simulator::new((&oracle, &model.tensors), &fixture, text).unwrap();
    let verdicts = [
        ("int8lin", true),
        ("int8_channel", true),
        ("4bit", false),
        ("int4lin_sym", false),
        ("ternary", false),
    ];
    for (name, passes) in verdicts {
        let recipe = Recipe::preset(name).unwrap();
        let plan = recipe.resolve(&model.spec).unwrap();
        let quantizer = |target| Quantizer::new(&recipe, &plan, target, 2).unwrap();
        let (portable, native) = (quantizer(Target::Portable), quantizer(Target::Native));
        let simulated = Simulated::new(&model.tensors, &model.spec, &portable).unwrap();
        let forms = simulated.stored_forms(&model.spec);
        let inputs = |name: &str| {
            input_rounding(
                ActPrecision::Int8,
                forms[name],
                ActivationContract::default(),
            )
        };
        let machine = Imitation {
            cache: CachePrecision::F16,
            inputs: &inputs,
        };
        let options = OracleOptions::new(CAPACITY);
        let exact = Oracle::new(&model.spec, &simulated, options.clone()).unwrap();
        let exact = simulator.judge("fp32", &exact, &simulated).unwrap();
        let there = Oracle::imitating(&model.spec, &simulated, options, machine).unwrap();
        let there = simulator.judge("int8", &there, &simulated).unwrap();

        let stored = Simulated::new(&model.tensors, &model.spec, &native).unwrap();
        let stored = Tensors::of(&stored);
        let candidate = Candidate {
            engine: engine(&model.spec, &stored),
            spec: &model.spec,
            tensors: &stored,
            stops: &model.stops,
        };
        let gated = gate(&model, &oracle, &fixture, candidate, text);
        let simulated = (exact.verdict, there.verdict);
        assert_eq!(
            gated.verdict.passed(),
            passes,
            "{name}: {:?}",
            gated.reasons
        );
        assert_eq!(there.verdict, gated.verdict, "{name}: {simulated:?}");
        assert_eq!(exact.verdict.passed(), passes, "{name}: {simulated:?}");
        assert!(there.red_first.iter().all(|r| r.verdict == Verdict::Fail));

        let simulation = Simulation {
            schema: SIMULATION_SCHEMA.into(),
            version: SIMULATION_VERSION,
            verdict: there.verdict,
            model: "wren".into(),
            source_digest: None,
            recipe: SimulatedRecipe {
                name: name.into(),
                digest: "0".repeat(64),
                bytes: 1,
                bits_per_weight: 8.0,
            },
            fixture: fixture.name.clone(),
            fixture_digest: fixture.digest(),
            provisional: simulator.provisional(),
            runs: vec![exact, there],
        };
        let schema = committed("simulation.schema.json", &Simulation::json_schema());
        let value: Value = serde_json::from_str(&simulation.to_json()).unwrap();
        assert_eq!(errors(&schema, &value), Vec::<String>::new());
    }
}

#[test]
fn inputs_are_rounded_in_the_groups_of_their_weights() {
    let contract = ActivationContract::default();
    let at = |precision, form| input_rounding(precision, form, contract);
    let grid = |name| Form::Grid(Grid::from_name(name).unwrap());
    let int8 = |form| at(ActPrecision::Int8, form);
    let (thirty_two, ternary) = (Rounding::Int8 { group: 32 }, Rounding::Int8 { group: 256 });
    assert_eq!(int8(Form::Block(DType::Q4_K)), thirty_two);
    assert_eq!(int8(grid("int4.channel.f32.zp")), thirty_two);
    assert_eq!(int8(grid("fp4.block16.e4m3")), thirty_two);
    assert_eq!(int8(grid("trit.block64.f16")), thirty_two);
    assert_eq!(int8(Form::Block(DType::TQ2_0)), ternary);
    assert_eq!(int8(grid("trit.block256.f16")), ternary);
    // Under one scale of the row or the tensor, the whole row of the input has one.
    let row = Rounding::Int8 { group: usize::MAX };
    assert_eq!(int8(grid("trit.channel.f32")), row);
    assert_eq!(int8(grid("trit.tensor.f16")), row);
    // Floats, and grids of float values, are multiplied as they are, unless they are asked
    // to be rounded.
    assert_eq!(int8(grid("lut4.rows8.f16")), Rounding::F32);
    assert_eq!(int8(grid("fp8e4m3.channel.f16")), Rounding::F32);
    assert_eq!(int8(Form::Block(DType::BF16)), Rounding::F32);
    assert_eq!(
        at(ActPrecision::Bf16, Form::Block(DType::BF16)),
        Rounding::Bf16
    );
    assert_eq!(
        at(ActPrecision::F32, Form::Block(DType::TQ2_0)),
        Rounding::F32
    );
}

#[test]
fn a_scan_ranks_a_damaged_layer_first_and_goes_on_where_it_ended() {
    let model = Model::open("wren-dense");
    let oracle = model.oracle();
    let probe = Probe::text(&prompts(1)[11].ids);
    let baseline = Baseline::new(&oracle, probe).unwrap();
    let family = Family::Linear;
    let recipe = Recipe::parse("uniform", &family.uniform(4)).unwrap();
    let plan = recipe.resolve(&model.spec).unwrap();
    let quantizer = Quantizer::new(&recipe, &plan, Target::Portable, 2).unwrap();
    let simulated = Simulated::new(&model.tensors, &model.spec, &quantizer).unwrap();
    // A layer that is damaged on purpose is found.
    let mut damaged = Tensors::of(&simulated);
    damaged.edit("layers.5.ffn.down.weight", |w| {
        w.iter_mut().for_each(|v| *v *= -1.0)
    });
    let units: Vec<_> = scan::units(&model.spec)
        .into_iter()
        .filter(|u| u.part == Part::Layer || u.name.ends_with("ffn.down") || u.name == "head")
        .collect();
    let header = scan::Header {
        schema: SCAN_SCHEMA.into(),
        version: SCAN_VERSION,
        model: "wren".into(),
        source_digest: None,
        method: "linear".into(),
        bits: vec![4],
        probe_digest: baseline.probe().digest(),
        positions: baseline.probe().positions(),
        clear: baseline.clear(),
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scan.jsonl");
    let mut first = Scan::resume(&path, header.clone()).unwrap();
    let mut left = 3;
    let mut three = |_: &scan::Line| {
        left -= 1;
        left > 0
    };
    let sources = (&model.tensors as _, &damaged as _);
    assert!(
        !first
            .run(&baseline, sources, (4, &units), &mut three)
            .unwrap()
    );
    drop(first);
    // A killed run leaves part of a line.
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 9]).unwrap();
    let mut again = Scan::resume(&path, header.clone()).unwrap();
    assert_eq!(again.lines.len(), 2);
    assert!(
        again
            .run(&baseline, sources, (4, &units), &mut |_| true)
            .unwrap()
    );
    let read = Scan::read(&path).unwrap();
    let schema = committed("scan.schema.json", &Scan::json_schema());
    for line in std::fs::read_to_string(&path).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(errors(&schema, &line), Vec::<String>::new());
    }
    assert_eq!(read.lines, again.lines);
    let keys: BTreeSet<_> = read
        .lines
        .iter()
        .map(|l| (l.part, &l.unit, l.mode))
        .collect();
    assert_eq!(keys.len(), read.lines.len());

    let worst = |part, mode| {
        let lines = read
            .lines
            .iter()
            .filter(|l| l.part == part && l.mode == mode);
        let by = |a: &&scan::Line, b: &&scan::Line| a.harm.kl.total_cmp(&b.harm.kl);
        let (most, least) = (lines.clone().max_by(by), lines.min_by(by));
        (most.unwrap().unit.clone(), least.unwrap().unit.clone())
    };
    assert_eq!(worst(Part::Layer, Mode::Alone).0, "layers.5");
    assert_eq!(worst(Part::Matrix, Mode::Alone).0, "layers.5.ffn.down");
    // Sparing it helps most.
    assert_eq!(worst(Part::Layer, Mode::AllBut).1, "layers.5");
    let svg = read.heat_map();
    assert!(svg.starts_with("<svg") && svg.contains("layers.5.ffn.down alone: KL"));

    let other = scan::Header {
        positions: 7,
        ..header
    };
    let error = Scan::resume(&path, other).unwrap_err().to_string();
    assert!(error.contains("positions is 20, expected 7"), "{error}");
}
