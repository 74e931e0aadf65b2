//! Rows that fill up the last panel of an output head are no tokens.

mod common;

use std::{borrow::Cow, ops::ControlFlow, sync::Arc};

use carat_bundle::{
    source::{SourceError, TensorInfo, TensorSource},
    spec::ModelSpec,
};
use carat_engine::{Engine, EngineOptions, GenerateOptions, SamplingOptions, Schedule};
use carat_model::{
    ActPrecision, KvFormat, MemoryWeights,
    cpu::{CpuBackend, CpuOptions},
};
use carat_tensor::{DType, formats};
use common::{golden, isa, open};

/// Every final hidden state is all ones: embeddings and norms are ones, branches zero.
/// So row `r` of the head gives the logit `-1 - r`, but the last row -0.5: all true
/// logits are negative, and the best of them is beside the padding.
struct Ones<'a> {
    spec: &'a ModelSpec,
    head: DType,
}

impl TensorSource for Ones<'_> {
    fn origin(&self) -> &str {
        "ones"
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.spec.tensors().into_iter().map(|d| d.name).collect();
        names.sort();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let decl = self.spec.tensors().into_iter().find(|d| d.name == name)?;
        let dtype = if name == "head.weight" {
            self.head
        } else {
            DType::F32
        };
        let shape = decl.shape;
        Some(TensorInfo { dtype, shape })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let TensorInfo { dtype, shape } = self.info(name).unwrap();
        let (rows, columns) = (shape.rows().unwrap(), shape.columns());
        let values: Vec<f32> = (0..rows * columns)
            .map(|i| match name {
                "head.weight" if i / columns + 1 == rows => -0.5 / columns as f32,
                "head.weight" => -(1.0 + (i / columns) as f32) / columns as f32,
                _ if name == "embed.weight" || shape.dims().len() == 1 => 1.0,
                _ => 0.0,
            })
            .collect();
        let mut bytes = vec![0; shape.bytes(dtype).unwrap()];
        formats::encode(dtype, &values, &mut bytes).unwrap();
        Ok(Cow::Owned(bytes))
    }
}

#[test]
fn no_padded_id_is_ever_chosen() {
    let mut spec = open(&golden("minicpm4/minicpm4-tq2_0.gguf")).spec;
    assert!(spec.hidden_size.is_multiple_of(256) && !spec.head.tied);
    spec.layers.truncate(1);
    (spec.embedding.scale, spec.head.scale, spec.head.softcap) = (1.0, 1.0, None);
    for vocab in [64, 65, 104, 127] {
        spec.vocab_size = vocab;
        for head in [DType::F32, DType::Q8_0, DType::Q6_K] {
            let weights = MemoryWeights::from_source(&spec, &Ones { spec: &spec, head }).unwrap();
            let weights = Arc::new(weights);
            for precision in [ActPrecision::Int8, ActPrecision::F32] {
                never_beyond(&spec, weights.clone(), precision, head);
            }
        }
    }
}

fn never_beyond(
    spec: &ModelSpec,
    weights: Arc<MemoryWeights>,
    precision: ActPrecision,
    head: DType,
) {
    let vocab = spec.vocab_size;
    let what = format!("{vocab} ids, head {head}, {precision:?}");
    let options = CpuOptions {
        isa: isa(),
        threads: 1,
        precision,
        kv: KvFormat::F16,
    };
    let backend = CpuBackend::new(spec, weights, options).unwrap();
    let mut engine = Engine::new(Box::new(backend), EngineOptions::default());
    let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9];

    // A tile of rows and single ones: exactly the true ids, all negative.
    let schedule = Schedule::parse("7,1").unwrap();
    let logits = engine.logits(&prompt, 64, &schedule).unwrap();
    assert_eq!(logits.len(), prompt.len() * vocab, "{what}");
    assert!(logits.iter().all(|l| *l < 0.0), "{what}");

    let mut answer = |sampling| {
        let options = GenerateOptions {
            max_new_tokens: 20,
            sampling,
            ..GenerateOptions::default()
        };
        let mut sequence = engine.open(64).unwrap();
        let mut go_on = |_| ControlFlow::Continue(());
        let out = engine.generate(&mut sequence, &prompt, &options, &mut go_on);
        engine.close(sequence);
        out.unwrap().ids
    };
    let last = vocab as u32 - 1;
    assert_eq!(answer(SamplingOptions::default()), [last; 20], "{what}");
    // So hot that all ids are about equally likely.
    let hot = |seed| SamplingOptions {
        temperature: 1e4,
        seed,
        ..SamplingOptions::default()
    };
    for seed in 0..8 {
        let ids = answer(hot(seed));
        assert!(ids.iter().all(|id| *id <= last), "{what}: {ids:?}");
    }
}
