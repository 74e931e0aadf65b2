//! The CPU backend.

mod crossovers;
mod exec;
mod kv;
mod profile;
mod rope;

use std::sync::Arc;

use carat_bundle::spec::ModelSpec;
use carat_kernels::attention::KvFormat;
use carat_kernels::{ActPrecision, Floats, Isa, Pool, Prepared, kernel_name, ops};
use carat_tensor::packed::PackedLayout;

use crate::{
    Backend, Batch, Extent, ModelError, Op, OpSpan, Output, Plan, StateDecl, StepOutput,
    WeightStore,
};
use kv::KvStore;
use profile::Profile;
use rope::RopeTables;

/// How a [`CpuBackend`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Instruction set.
    pub isa: Isa,
    /// Threads, the caller's included.
    pub threads: usize,
    /// Precision of activations in matrix products.
    pub precision: ActPrecision,
    /// Format of the KV cache.
    pub kv: KvFormat,
}

/// Where a weight of the plan is.
#[derive(Debug)]
enum Weight {
    /// Looked up by name in the store at each use (the bytes may be a file map).
    Matrix(PackedLayout),
    Vector(Vec<f32>),
}

/// Runs plans on the CPU.
pub struct CpuBackend {
    spec: ModelSpec,
    plan: Plan,
    store: Arc<dyn WeightStore>,
    weights: Vec<Weight>,
    options: CpuOptions,
    pool: Pool,
    buffers: Vec<Floats>,
    prepared: Prepared,
    /// Scratch of in-place norms.
    spare: Floats,
    kv: Vec<KvStore>,
    kv_blocks: usize,
    ropes: RopeTables,
    profile: Option<Profile>,
}

impl CpuBackend {
    /// Checks that the store has every weight of the spec in the right shape.
    pub fn new(
        spec: &ModelSpec,
        store: Arc<dyn WeightStore>,
        options: CpuOptions,
    ) -> Result<Self, ModelError> {
        let plan = Plan::lower(spec)?;
        let declared = spec.tensors();
        let mut weights = Vec::with_capacity(plan.weights.len());
        for name in &plan.weights {
            let wrong = |problem: String| ModelError::Weight {
                name: name.clone(),
                problem,
            };
            let decl = declared.iter().find(|d| d.name == *name).ok_or_else(|| {
                wrong("the plan needs it and the spec does not declare it".into())
            })?;
            weights.push(if let [rows, columns] = *decl.shape.dims() {
                let matrix = store
                    .matrix(name)
                    .ok_or_else(|| wrong("is missing".into()))?;
                if (matrix.layout().rows(), matrix.layout().columns()) != (rows, columns) {
                    return Err(wrong(format!(
                        "shape [{}, {}], expected [{rows}, {columns}]",
                        matrix.layout().rows(),
                        matrix.layout().columns()
                    )));
                }
                Weight::Matrix(*matrix.layout())
            } else {
                let vector = store
                    .vector(name)
                    .ok_or_else(|| wrong("is missing".into()))?;
                if vector.len() != decl.shape.columns() {
                    return Err(wrong(format!(
                        "{} values, expected {}",
                        vector.len(),
                        decl.shape
                    )));
                }
                Weight::Vector(vector)
            });
        }
        let kv = plan
            .states
            .iter()
            .map(
                |StateDecl::Kv {
                     kv_heads, head_dim, ..
                 }| KvStore::new(options.kv, *kv_heads, *head_dim),
            )
            .collect();
        Ok(CpuBackend {
            spec: spec.clone(),
            buffers: plan.buffers.iter().map(|_| Floats::default()).collect(),
            plan,
            store,
            weights,
            options,
            pool: Pool::new(options.threads.max(1)),
            prepared: Prepared::default(),
            spare: Floats::default(),
            kv,
            kv_blocks: 0,
            ropes: RopeTables::new(spec),
            profile: None,
        })
    }

    /// How it computes.
    pub fn options(&self) -> CpuOptions {
        self.options
    }
}

impl Backend for CpuBackend {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn describe(&self) -> String {
        format!("cpu {}, {} threads", self.options.isa, self.pool.threads())
    }

    fn placement(&self, rows: usize) -> Vec<String> {
        let isa = self.options.isa;
        let device = format!("cpu {isa}");
        self.plan
            .ops
            .iter()
            .map(|op| match op {
                Op::Linear { projections, .. } => {
                    let kernels: Vec<_> = projections
                        .iter()
                        .map(|p| match &self.weights[p.weight.0] {
                            Weight::Matrix(layout) => kernel_name(
                                isa,
                                layout.into(),
                                self.options.precision,
                                rows,
                                self.crossovers(),
                            ),
                            Weight::Vector(_) => "none".into(),
                        })
                        .collect();
                    format!("{device}: {}", kernels.join(", "))
                }
                // Rows are copied or decoded one by one, the same everywhere.
                Op::Embed { .. } | Op::SelectRows { .. } | Op::Tap { .. } => device.clone(),
                Op::Attention { .. } | Op::KvWrite { .. } => {
                    let stored = match self.options.kv {
                        KvFormat::F16 => "f16",
                        KvFormat::F32 => "f32",
                    };
                    format!("{device}: {} f32 x {stored}", ops::kernel_isa(isa))
                }
                _ => format!("{device}: {} f32", ops::kernel_isa(isa)),
            })
            .collect()
    }

    fn kv_format(&self) -> KvFormat {
        self.options.kv
    }

    fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    fn grow_kv(&mut self, blocks: usize) -> Result<(), ModelError> {
        for store in &mut self.kv {
            store.grow(blocks)?;
        }
        self.kv_blocks = self.kv_blocks.max(blocks);
        Ok(())
    }

    fn step(
        &mut self,
        batch: &Batch<'_>,
        wanted: &[Output],
        out: &mut StepOutput,
    ) -> Result<(), ModelError> {
        batch.validate(self.spec.vocab_size, self.kv_blocks)?;
        let (m, r) = (batch.len(), batch.logit_rows.len());
        for (buffer, decl) in self.buffers.iter_mut().zip(&self.plan.buffers) {
            let rows = match decl.rows {
                Extent::Tokens => m,
                Extent::LogitRows => r,
            };
            buffer.resize(rows * decl.columns);
        }
        self.ropes.prepare(&self.spec, batch);
        out.values.retain(|name, _| wanted.contains(name));
        self.execute(batch, wanted, out);
        Ok(())
    }

    fn head(&mut self, hidden: &[f32], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        let width = self.spec.hidden_size;
        if hidden.is_empty() || !hidden.len().is_multiple_of(width) {
            let values = hidden.len();
            let problem = format!("{values} hidden values, expected rows of {width}");
            return Err(ModelError::Batch(problem));
        }
        let seen = |op: &Op| match op {
            Op::Tap {
                output: Output::FinalHidden,
                buffer,
            } => Some(*buffer),
            _ => None,
        };
        let ops = &self.plan.ops;
        let found = ops
            .iter()
            .enumerate()
            .find_map(|(i, op)| Some((i, seen(op)?)));
        let (at, input) = found.expect("invariant: every plan taps what the head sees");
        let tail = ops[at + 1..].to_vec();
        for (buffer, decl) in self.buffers.iter_mut().zip(&self.plan.buffers) {
            if decl.rows == Extent::LogitRows {
                buffer.resize(hidden.len() / width * decl.columns);
            }
        }
        self.buffers[input.0].copy_from_slice(hidden);
        let nothing = Batch {
            token_ids: &[],
            positions: &[],
            slot_mapping: &[],
            sequences: &[],
            logit_rows: &[],
        };
        let mut out = StepOutput::default();
        let whole = std::mem::replace(&mut self.plan.ops, tail);
        self.execute(&nothing, &[Output::Logits], &mut out);
        self.plan.ops = whole;
        *logits = out.values.remove(&Output::Logits).unwrap_or_default();
        Ok(())
    }

    fn export_kv(
        &self,
        state: usize,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError> {
        self.kv_state(state)?.export(blocks, positions)
    }

    fn import_kv(
        &mut self,
        state: usize,
        blocks: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ModelError> {
        self.kv_state(state)?;
        self.kv[state].import(blocks, first, keys, values, self.options.isa)
    }

    fn resident_bytes(&self) -> usize {
        self.kv.iter().map(KvStore::bytes).sum::<usize>()
            + self.buffers.iter().map(Floats::bytes).sum::<usize>()
    }

    fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(Profile::begin);
    }

    fn take_spans(&mut self) -> Vec<OpSpan> {
        let spans = self.profile.as_mut().map(|p| std::mem::take(&mut p.spans));
        spans.unwrap_or_default()
    }
}

impl CpuBackend {
    fn kv_state(&self, state: usize) -> Result<&KvStore, ModelError> {
        self.kv
            .get(state)
            .ok_or_else(|| ModelError::Batch(format!("no KV state {state} of {}", self.kv.len())))
    }
}
