//! What the engine's tests share: opening models of the repository.
#![allow(dead_code)] // each test file uses its part

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use carat_engine::{Engine, EngineOptions};
use carat_import::Checkpoint;
use carat_kernels::Isa;
use carat_model::{
    ActPrecision, KvFormat, MemoryWeights,
    cpu::{CpuBackend, CpuOptions},
};

/// The best instruction set, or the one that `CARAT_ISA` asks for.
pub(crate) fn isa() -> Isa {
    Isa::from_env().unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn golden(case: &str) -> PathBuf {
    repository().join("tests/golden").join(case)
}

pub(crate) fn models() -> PathBuf {
    repository().join("models")
}

pub(crate) fn open(path: &Path) -> Checkpoint {
    carat_import::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) fn weights(checkpoint: &Checkpoint) -> Arc<MemoryWeights> {
    Arc::new(MemoryWeights::from_source(&checkpoint.spec, checkpoint.tensors.as_ref()).unwrap())
}

pub(crate) fn engine(
    checkpoint: &Checkpoint,
    weights: &Arc<MemoryWeights>,
    isa: Isa,
    threads: usize,
    precision: ActPrecision,
) -> Engine {
    let kv = KvFormat::F16;
    engine_with_cache(checkpoint, weights, isa, threads, precision, kv)
}

pub(crate) fn engine_with_cache(
    checkpoint: &Checkpoint,
    weights: &Arc<MemoryWeights>,
    isa: Isa,
    threads: usize,
    precision: ActPrecision,
    kv: KvFormat,
) -> Engine {
    let options = CpuOptions {
        isa,
        threads,
        precision,
        kv,
    };
    let backend = CpuBackend::new(&checkpoint.spec, weights.clone(), options).unwrap();
    let options = EngineOptions {
        extrapolate: true,
        ..EngineOptions::default()
    };
    Engine::new(Box::new(backend), options)
}

/// Logits of another implementation, whole and at the golden rows.
pub(crate) struct Rounded {
    pub(crate) all: Vec<f32>,
    pub(crate) golden: Golden,
}

/// Tensors of a golden file.
pub(crate) struct Golden {
    pub(crate) ids: Vec<u32>,
    pub(crate) rows: Vec<usize>,
    /// `[rows, vocab]`.
    pub(crate) logits: Vec<f32>,
    pub(crate) vocab: usize,
}

impl Golden {
    pub(crate) fn read(path: &Path) -> Golden {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let ints = |name: &str| -> Vec<i64> {
            let view = file.tensor(name).unwrap();
            match view.dtype() {
                safetensors::Dtype::I64 => view
                    .data()
                    .chunks_exact(8)
                    .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
                    .collect(),
                safetensors::Dtype::I32 => view
                    .data()
                    .chunks_exact(4)
                    .map(|b| i64::from(i32::from_le_bytes(b.try_into().unwrap())))
                    .collect(),
                other => panic!("{name}: {other:?}"),
            }
        };
        let logits = file.tensor("logits").unwrap();
        Golden {
            ids: ints("input_ids").into_iter().map(|x| x as u32).collect(),
            rows: ints("rows").into_iter().map(|x| x as usize).collect(),
            vocab: *logits.shape().last().unwrap(),
            logits: logits
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
        }
    }

    /// The same rows of other logits `[tokens, vocab]`, as a reference of its own.
    pub(crate) fn like(&self, logits: &[f32]) -> Rounded {
        let kept = self
            .rows
            .iter()
            .flat_map(|row| &logits[row * self.vocab..(row + 1) * self.vocab]);
        Rounded {
            all: logits.to_vec(),
            golden: Golden {
                ids: self.ids.clone(),
                rows: self.rows.clone(),
                logits: kept.copied().collect(),
                vocab: self.vocab,
            },
        }
    }

    /// max|Δ| / std(reference) of engine logits `[tokens, vocab]` at the kept rows.
    pub(crate) fn distance(&self, logits: &[f32]) -> f64 {
        let n = self.logits.len() as f64;
        let mean = self.logits.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
        let std = (self
            .logits
            .iter()
            .map(|x| (f64::from(*x) - mean).powi(2))
            .sum::<f64>()
            / n)
            .sqrt();
        let mut worst: f64 = 0.0;
        for (row, expected) in self.rows.iter().zip(self.logits.chunks_exact(self.vocab)) {
            let found = &logits[row * self.vocab..(row + 1) * self.vocab];
            for (a, b) in expected.iter().zip(found) {
                assert!(b.is_finite(), "row {row} has {b}");
                worst = worst.max((f64::from(*a) - f64::from(*b)).abs());
            }
        }
        worst / std
    }
}
