//! The engine against reference logits of tiny checkpoints, and against itself:
//! chunks, threads and instruction sets must not change a bit.

mod common;

use carat_engine::Schedule;
use carat_kernels::Isa;
use carat_model::{ActPrecision, KvFormat};
use carat_oracle::{CachePrecision, Oracle, OracleOptions, Rows};
use common::{Golden, engine, engine_with_cache, golden, isa, open, weights};

/// Every golden case: checkpoint, reference logits.
const CASES: [(&str, &str); 9] = [
    ("llama-gqa-headdim", "llama-gqa-headdim/golden.safetensors"),
    (
        "llama-rope-llama3-tied",
        "llama-rope-llama3-tied/golden.safetensors",
    ),
    ("mistral-sliding", "mistral-sliding/golden.safetensors"),
    ("qwen2-bias-tied", "qwen2-bias-tied/golden.safetensors"),
    ("qwen3-qknorm", "qwen3-qknorm/golden.safetensors"),
    ("gemma3-sliding", "gemma3-sliding/golden.safetensors"),
    ("minicpm4", "minicpm4/golden.safetensors"),
    ("minicpm4-long", "minicpm4-long/golden.safetensors"),
    (
        "minicpm4/minicpm4-tq2_0.gguf",
        "minicpm4/golden-gguf.safetensors",
    ),
];

/// With fp32 activations the engine and the oracle differ in nothing but the
/// order of additions, once the oracle rounds keys and values to fp16 as the
/// engine does. The bound is the oracle's own against other implementations.
const SAME_PRECISION: f64 = 2e-3;

/// ... and in the keys and values that lie so near a rounding boundary of fp16
/// that the order of additions decides on which side: they differ by a whole
/// fp16 step. Inputs are apart by up to about 64 fp32 roundings (a norm, a
/// projection of 64 to 256 terms, a rotation), so a fraction of 64 · 2^-24 /
/// 2^-12 = 1/64 of them flips, and noise of that density has √(1/64) = 1/8 of the
/// effect of rounding everything.
const BOUNDARY_FLIPS: f64 = 1.0 / 8.0;

/// Largest deviation of `samples` independent normal variables, in standard
/// deviations: `sqrt(2 ln n)` is the expected maximum; 1.5 covers its spread.
fn extreme(samples: usize) -> f64 {
    (2.0 * (samples as f64).ln()).sqrt() + 1.5
}

/// What decides how activations are rounded.
#[derive(Clone, Copy, PartialEq)]
enum Weights {
    Floats,
    Ternary,
}

/// Relative root mean square error of rounded activations, at least and at most.
///
/// An int8 code is off by at most half a step of absmax/127 and uniformly so:
/// absmax/(127·√12), and the absmax of a group is one root mean square at least;
/// that of 256 normal values is about 2.8 and above 4 in one group of 60. A bf16 value is off
/// by at most half a step of 2^-7 and uniformly so, relative to a mantissa between
/// 1 and 2.
///
/// `None` where activations are not rounded: floating-point weights take fp32
/// activations where int8 is asked for.
fn act_noise(precision: ActPrecision, weights: Weights) -> Option<(f64, f64)> {
    match precision {
        ActPrecision::Int8 if weights == Weights::Ternary => {
            let code = 1.0 / (127.0 * 12f64.sqrt());
            Some((code, 4.0 * code))
        }
        ActPrecision::Bf16 => {
            let step = 2f64.powi(-8) / 3f64.sqrt();
            Some((step / 2.0, step))
        }
        _ => None,
    }
}

/// Bound on max|Δ|/std that rounded activations may cause in a network that turns
/// fp16 keys and values into `cache_cost`.
///
/// Every rounded input perturbs its branch by the fraction `act` (see
/// [`act_noise`]); branches add up in the residual stream, so sources add in
/// squares: four inputs (qkv, o, gate/up, down) per layer, and the head.
///
/// How much a network amplifies perturbations is measured on the oracle alone:
/// fp16 rounding has a relative root mean square of 2^-11/√3 · ln 2 (mantissas
/// are log-uniform) at two sources per layer, and `cache_cost` is what becomes
/// of it.
fn act_bound(act: f64, layers: usize, samples: usize, cache_cost: f64) -> f64 {
    let layers = layers as f64;
    let fp16 = 2f64.powi(-11) / 3f64.sqrt() * std::f64::consts::LN_2;
    let amplification = cache_cost / (extreme(samples) * (2.0 * layers).sqrt() * fp16);
    amplification.max(1.0) * extreme(samples) * (4.0 * layers + 1.0).sqrt() * act
}

#[test]
fn logits_are_the_references_within_the_declared_precision() {
    for (case, file) in CASES {
        let path = golden(case);
        let reference = Golden::read(&golden(file));
        let checkpoint = open(&path);
        let packed = weights(&checkpoint);
        // Some inputs are longer than the declared context.
        let capacity = checkpoint.spec.max_context.max(reference.ids.len());
        let source = checkpoint.tensors.as_ref();
        let oracle = Oracle::new(&checkpoint.spec, source, OracleOptions::new(capacity))
            .unwrap()
            .with_cache(CachePrecision::F16);
        let rounded = oracle.forward(&[&reference.ids], Rows::All).unwrap();
        let rounded = reference.like(&rounded[0].data);
        // What fp16 keys and values alone cost against the fp32 reference.
        let cache_cost = reference.distance(&rounded.all);
        let kind = if case.ends_with("gguf") {
            Weights::Ternary
        } else {
            Weights::Floats
        };
        let mut exact: Option<Vec<f32>> = None;
        for precision in [ActPrecision::F32, ActPrecision::Int8, ActPrecision::Bf16] {
            let mut engine = engine(&checkpoint, &packed, isa(), 2, precision);
            let schedule = Schedule::every(64).unwrap();
            let logits = engine.logits(&reference.ids, capacity, &schedule).unwrap();
            let noise = act_noise(precision, kind);
            let layers = checkpoint.spec.layers.len();
            let bound = match noise {
                Some((_, act)) => act_bound(act, layers, reference.logits.len(), cache_cost),
                None => SAME_PRECISION + BOUNDARY_FLIPS * cache_cost,
            };
            let distance = rounded.golden.distance(&logits);
            assert!(
                distance <= bound,
                "{case} {precision:?}: {distance:.2e} > {bound:.2e}"
            );
            let foreign = reference.distance(&logits);
            assert!(
                foreign <= bound + cache_cost,
                "{case} {precision:?}: {foreign:.2e} from the foreign reference"
            );
            // Too good is wrong too: the head's input alone, rounded, moves its
            // logits by the least noise of their root mean square, which is at
            // least their deviation; everything before it adds in squares.
            let exact = exact.get_or_insert_with(|| logits.clone());
            match noise {
                Some((least, _)) => {
                    let moved = reference.like(exact).golden.distance(&logits);
                    assert!(
                        moved >= least,
                        "{case} {precision:?}: {moved:.2e} < {least:.2e} from fp32 activations"
                    );
                }
                None => assert!(same_bits(exact, &logits), "{case} {precision:?}"),
            }
        }
    }
}

/// What `--act f32` stands for: fp32 throughout, so nothing is apart from the
/// reference but the order of additions.
#[test]
fn floats_throughout_are_within_the_references_own_tolerance() {
    for (case, file) in CASES {
        let reference = Golden::read(&golden(file));
        let checkpoint = open(&golden(case));
        let packed = weights(&checkpoint);
        let capacity = checkpoint.spec.max_context.max(reference.ids.len());
        let (act, kv) = (ActPrecision::F32, KvFormat::F32);
        let mut engine = engine_with_cache(&checkpoint, &packed, isa(), 2, act, kv);
        let schedule = Schedule::every(64).unwrap();
        let logits = engine.logits(&reference.ids, capacity, &schedule).unwrap();
        let distance = reference.distance(&logits);
        assert!(distance <= SAME_PRECISION, "{case}: {distance:.2e}");
        let one_by_one = Schedule::every(1).unwrap();
        let stepped = engine
            .logits(&reference.ids, capacity, &one_by_one)
            .unwrap();
        assert!(same_bits(&logits, &stepped), "{case}");
    }
}

#[test]
fn chunks_do_not_change_a_bit() {
    for (case, _) in CASES {
        let checkpoint = open(&golden(case));
        let packed = weights(&checkpoint);
        let ids: Vec<u32> = (0..200u32)
            .map(|i| (i * 37 + 11) % checkpoint.spec.vocab_size as u32)
            .collect();
        for precision in [ActPrecision::Int8, ActPrecision::F32, ActPrecision::Bf16] {
            let run = |schedule: &str| {
                let mut engine = engine(&checkpoint, &packed, isa(), 2, precision);
                engine
                    .logits(&ids, 512, &Schedule::parse(schedule).unwrap())
                    .unwrap()
            };
            let one_by_one = run("1");
            for schedule in ["200", "64,1,16", "7", "2,3,4,5,6,8,9,12"] {
                assert!(
                    same_bits(&run(schedule), &one_by_one),
                    "{case} {precision:?}: schedule {schedule} differs from token by token"
                );
            }
        }
    }
}

#[test]
fn threads_and_instruction_sets_do_not_change_a_bit() {
    for (case, _) in CASES {
        let checkpoint = open(&golden(case));
        let packed = weights(&checkpoint);
        let ids: Vec<u32> = (0..70u32)
            .map(|i| (i * 53 + 5) % checkpoint.spec.vocab_size as u32)
            .collect();
        let run = |isa, threads| {
            let mut engine = engine(&checkpoint, &packed, isa, threads, ActPrecision::Int8);
            engine
                .logits(&ids, 256, &Schedule::parse("33,1").unwrap())
                .unwrap()
        };
        let reference = run(Isa::Scalar, 1);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                assert!(
                    same_bits(&run(isa, threads), &reference),
                    "{case}: {isa} with {threads} threads"
                );
            }
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn states_export_and_import_in_logical_form() {
    let checkpoint = open(&golden("qwen3-qknorm"));
    let packed = weights(&checkpoint);
    let ids: Vec<u32> = (0..90).collect();
    let mut first = engine(&checkpoint, &packed, isa(), 1, ActPrecision::F32);
    let mut sequence = first.open(256).unwrap();
    let schedule = Schedule::every(90).unwrap();
    first.prefill(&mut sequence, &ids, &schedule).unwrap();
    let next = first
        .step(&mut sequence, &[5], carat_engine::LogitRows::Last)
        .unwrap()
        .to_vec();

    // Another engine gets only the states of the first 90 positions.
    let mut second = engine(&checkpoint, &packed, isa(), 1, ActPrecision::F32);
    let mut other = second.open(256).unwrap();
    second.prefill(&mut other, &vec![7; 90], &schedule).unwrap();
    for state in 0..checkpoint.spec.layers.len() {
        let (keys, values) = first.export_kv(&sequence, state, 0..90).unwrap();
        second
            .import_kv(&mut other, state, 0, &keys, &values)
            .unwrap();
    }
    let seeded = second
        .step(&mut other, &[5], carat_engine::LogitRows::Last)
        .unwrap()
        .to_vec();
    assert!(same_bits(&next, &seeded));
}
