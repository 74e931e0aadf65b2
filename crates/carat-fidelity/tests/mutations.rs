//! Faults that a gate is there to catch, each alone, on the real weights of the
//! repository's models.

mod common;

use std::ops::Range;

use carat_bundle::spec::ModelSpec;
use carat_engine::Engine;
use carat_fidelity::{Cause, Fixture, Status, Transcript, Verdict};
use carat_model::{
    ActPrecision, BLOCK_TOKENS, Backend, Batch, ModelError, Output, Plan, StepOutput,
    cpu::CpuBackend,
};
use carat_oracle::Oracle;
use carat_tensor::DType;
use common::*;

/// The dense model with eight answers of the oracle, and a gate for whatever is made
/// of it.
struct Bench {
    model: Model,
}

impl Bench {
    fn new() -> Bench {
        Bench {
            model: Model::open("wren-dense"),
        }
    }

    fn fixture(&self, oracle: &Oracle<'_>) -> Fixture {
        let mut engine = engine(&self.model.spec, &self.model.tensors);
        let prompts: Vec<_> = prompts(32).into_iter().step_by(4).collect();
        let cases = self.model.cases(oracle, &mut engine, &prompts);
        self.model.fixture(cases)
    }

    fn judge(
        &self,
        (oracle, fixture): (&Oracle<'_>, &Fixture),
        engine: Engine,
        spec: &ModelSpec,
        tensors: &Tensors,
    ) -> Transcript {
        let candidate = Candidate {
            engine,
            spec,
            tensors,
            stops: &self.model.stops,
        };
        gate(&self.model, oracle, fixture, candidate, &[])
    }
}

#[test]
fn faults_of_what_is_stored_are_caught_and_found() {
    let bench = Bench::new();
    let (spec, tensors) = (&bench.model.spec, &bench.model.tensors);
    let oracle = bench.model.oracle();
    let fixture = bench.fixture(&oracle);
    let judge = |spec: &ModelSpec, tensors: &Tensors| {
        let engine = engine(spec, tensors);
        bench.judge((&oracle, &fixture), engine, spec, tensors)
    };
    let clean = judge(spec, tensors);
    assert!(clean.verdict.passed(), "{:?}", clean.reasons);

    let found = |what: &str, t: &Transcript, layer: Option<usize>| {
        assert_eq!(t.verdict, Verdict::Fail, "{what} passes");
        let ladder = t.ladder.as_ref().unwrap();
        assert_eq!(ladder.cause, Cause::Storage, "{what}");
        if layer.is_some() {
            assert_eq!(ladder.layer, layer, "{what}: {:?}", ladder.rungs);
        }
    };

    // The scales of some blocks of one matrix are eight times what they were.
    let mut scaled = tensors.clone();
    scaled.edit("layers.3.ffn.down.weight", |w| {
        w.chunks_mut(32)
            .step_by(16)
            .flatten()
            .for_each(|v| *v *= 8.0);
    });
    found("a corrupted scale", &judge(spec, &scaled), Some(3));

    // Rows of q and k interleaved within heads, as another container has them.
    let mut swapped = tensors.clone();
    for layer in 0..spec.layers.len() {
        for part in ["q", "k"] {
            let name = format!("layers.{layer}.attn.{part}.weight");
            swapped.edit(&name, |w| interleave(w, spec.hidden_size, 64));
        }
    }
    found("swapped q and k rows", &judge(spec, &swapped), None);

    let mut turned = spec.clone();
    turned.ropes[0].theta *= 8.0;
    found("a wrong rope base", &judge(&turned, tensors), None);
}

/// Rows `i` and `i + half` of each head next to each other.
fn interleave(w: &mut [f32], columns: usize, head_dim: usize) {
    let half = head_dim / 2;
    for head in w.chunks_exact_mut(head_dim * columns) {
        let old = head.to_vec();
        for i in 0..half {
            for (from, to) in [(i, 2 * i), (i + half, 2 * i + 1)] {
                head[to * columns..][..columns].copy_from_slice(&old[from * columns..][..columns]);
            }
        }
    }
}

#[test]
fn a_missing_residual_scale_is_caught() {
    // The same function with a residual scale of 1/2: branches are twice as large.
    let mut bench = Bench::new();
    for layer in &mut bench.model.spec.layers {
        layer.residual_scale = 0.5;
    }
    for layer in 0..bench.model.spec.layers.len() {
        for part in ["attn.o", "ffn.down"] {
            let name = format!("layers.{layer}.{part}.weight");
            // Doubling is exact in any float.
            let edit = |w: &mut [f32]| w.iter_mut().for_each(|v| *v *= 2.0);
            bench.model.tensors.edit(&name, edit);
        }
    }
    let (spec, tensors) = (&bench.model.spec, &bench.model.tensors);
    let oracle = bench.model.oracle();
    let fixture = bench.fixture(&oracle);
    let clean = bench.judge((&oracle, &fixture), engine(spec, tensors), spec, tensors);
    assert!(clean.verdict.passed(), "{:?}", clean.reasons);
    let mut lost = spec.clone();
    for layer in &mut lost.layers {
        layer.residual_scale = 1.0;
    }
    let red = bench.judge((&oracle, &fixture), engine(&lost, tensors), &lost, tensors);
    assert_eq!(red.verdict, Verdict::Fail);
    let ladder = red.ladder.unwrap();
    assert_eq!(ladder.cause, Cause::Storage);
}

/// A backend with a fault of its own.
struct Faulty {
    inner: CpuBackend,
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Decoded tokens stand one position too early, in the place of the one before.
    Shifted,
    /// A layer's keys and values of decoded tokens are not written.
    Dropped(usize),
    /// Neighbouring logits change places, whatever the states.
    Numbers,
}

impl Backend for Faulty {
    fn spec(&self) -> &ModelSpec {
        self.inner.spec()
    }
    fn plan(&self) -> &Plan {
        self.inner.plan()
    }
    fn describe(&self) -> String {
        format!("{} with {:?}", self.inner.describe(), self.fault)
    }
    fn placement(&self, rows: usize) -> Vec<String> {
        self.inner.placement(rows)
    }
    fn kv_format(&self) -> carat_model::KvFormat {
        self.inner.kv_format()
    }

    fn kv_blocks(&self) -> usize {
        self.inner.kv_blocks()
    }
    fn grow_kv(&mut self, blocks: usize) -> Result<(), ModelError> {
        self.inner.grow_kv(blocks)
    }
    fn step(
        &mut self,
        batch: &Batch<'_>,
        wanted: &[Output],
        out: &mut StepOutput,
    ) -> Result<(), ModelError> {
        match self.fault {
            Fault::Shifted if batch.len() == 1 && batch.positions[0] > 0 => {
                let at = batch.positions[0] as usize - 1;
                let block = batch.sequences[0].blocks[at / BLOCK_TOKENS] as usize;
                let shifted = Batch {
                    positions: &[at as u32],
                    slot_mapping: &[(block * BLOCK_TOKENS + at % BLOCK_TOKENS) as u32],
                    ..*batch
                };
                self.inner.step(&shifted, wanted, out)
            }
            Fault::Shifted => self.inner.step(batch, wanted, out),
            Fault::Dropped(layer) => {
                self.inner.step(batch, wanted, out)?;
                if batch.len() == 1 {
                    let at = batch.positions[0] as usize;
                    let none = vec![0.0; 2 * 64];
                    let blocks = batch.sequences[0].blocks;
                    self.inner.import_kv(layer, blocks, at, &none, &none)?;
                }
                Ok(())
            }
            Fault::Numbers => {
                self.inner.step(batch, wanted, out)?;
                if let Some(logits) = out.values.get_mut(&Output::Logits) {
                    logits.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
                }
                Ok(())
            }
        }
    }
    fn head(&mut self, hidden: &[f32], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.inner.head(hidden, logits)
    }
    fn export_kv(
        &self,
        state: usize,
        blocks: &[u32],
        positions: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        self.inner.export_kv(state, blocks, positions)
    }
    fn import_kv(
        &mut self,
        state: usize,
        blocks: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ModelError> {
        self.inner.import_kv(state, blocks, first, keys, values)
    }
    fn resident_bytes(&self) -> usize {
        self.inner.resident_bytes()
    }
}

#[test]
fn faults_of_the_engine_are_caught_and_told_apart() {
    let bench = Bench::new();
    let (spec, tensors) = (&bench.model.spec, &bench.model.tensors);
    let oracle = bench.model.oracle();
    let fixture = bench.fixture(&oracle);
    let judge = |fault| {
        let inner = backend(spec, tensors, ActPrecision::Int8);
        let engine = engine_on(Faulty { inner, fault });
        bench.judge((&oracle, &fixture), engine, spec, tensors)
    };
    for (fault, cause) in [
        (Fault::Dropped(0), Cause::State),
        (Fault::Numbers, Cause::Kernel),
    ] {
        let red = judge(fault);
        assert_eq!(red.verdict, Verdict::Fail, "{fault:?} passes");
        assert_eq!(red.ladder.unwrap().cause, cause, "{fault:?}");
    }
    let red = judge(Fault::Shifted);
    assert_eq!(red.verdict, Verdict::Fail, "an off-by-one position passes");
    let chunks = red
        .checks
        .iter()
        .find(|c| c.name == "chunked_equals_single");
    assert_eq!(chunks.unwrap().status, Status::Fail);
}

/// The published table of verdicts, as far as the models of the repository go.
#[test]
fn verdicts_of_the_published_table() {
    use carat_bundle::spec::TensorRole::{Embedding, Head, Linear};
    let model = Model::open("wren-dense");
    let oracle = model.oracle();
    let mut drafter = engine(&model.spec, &model.tensors);
    let cases = model.cases(&oracle, &mut drafter, &prompts(64));
    let fixture = model.fixture(cases);
    let judge = |tensors: &Tensors| {
        let candidate = Candidate {
            engine: engine(&model.spec, tensors),
            spec: &model.spec,
            tensors,
            stops: &model.stops,
        };
        gate(&model, &oracle, &fixture, candidate, &[])
    };
    let flips =
        |t: &Transcript| -> usize { t.cases.iter().map(|c| c.teacher_forced.flips.len()).sum() };
    let through = |dtype, before: &dyn Fn(&mut [f32])| {
        let all = [Embedding, Head, Linear];
        let matrices = match dtype {
            DType::TQ2_0 => &all[2..],
            _ => &all[..],
        };
        judge(
            &model
                .tensors
                .quantized(&model.spec, matrices, dtype, before),
        )
    };
    let int8 = through(DType::Q8_0, &|_| {});
    assert!(int8.verdict.passed(), "{:?}", int8.reasons);
    assert_eq!(flips(&int8), 0);
    let int4 = through(DType::Q4_0, &|_| {});
    assert_eq!(int4.verdict, Verdict::Fail);
    assert!((1..40).contains(&flips(&int4)), "{} flips", flips(&int4));
    // Palettes of 16 values for 32 rows, whose products are of floats, whatever the activations.
    let recipe = carat_quant::Recipe::preset("4bit_weight_palettized_group32").unwrap();
    let plan = recipe.resolve(&model.spec).unwrap();
    let target = carat_quant::Target::Portable;
    let quantizer = carat_quant::Quantizer::new(&recipe, &plan, target, 2).unwrap();
    let palettes = carat_quant::Simulated::new(&model.tensors, &model.spec, &quantizer).unwrap();
    let kmeans = judge(&Tensors::of(&palettes));
    assert_eq!(kmeans.verdict, Verdict::Fail);
    assert!(
        (1..40).contains(&flips(&kmeans)),
        "{} flips",
        flips(&kmeans)
    );
    // Absmean per 256, rounded to -1, 0, 1.
    let ternary = through(DType::TQ2_0, &|w| {
        for block in w.chunks_mut(256) {
            let mean = block.iter().map(|v| v.abs()).sum::<f32>() / block.len() as f32;
            let round = |v: f32| (v / mean).round().clamp(-1.0, 1.0) * mean;
            block.iter_mut().for_each(|v| *v = round(*v));
        }
    });
    assert_eq!(ternary.verdict, Verdict::Fail);
    let clear: usize = ternary.cases.iter().map(|c| c.teacher_forced.clear).sum();
    assert!(
        flips(&ternary) > clear / 2,
        "{} of {clear} flips: fails everywhere",
        flips(&ternary)
    );
}
