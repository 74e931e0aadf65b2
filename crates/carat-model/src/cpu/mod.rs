//! The CPU backend.

mod exec;
mod kv;
mod profile;
mod rope;

use std::sync::Arc;

use carat_bundle::spec::ModelSpec;
use carat_kernels::{ActPrecision, Isa, Pool, Prepared, kernel_name};
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
    buffers: Vec<Vec<f32>>,
    prepared: Prepared,
    /// Scratch of in-place norms.
    spare: Vec<f32>,
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
                 }| KvStore::new(*kv_heads, *head_dim),
            )
            .collect();
        Ok(CpuBackend {
            spec: spec.clone(),
            buffers: vec![Vec::new(); plan.buffers.len()],
            plan,
            store,
            weights,
            options,
            pool: Pool::new(options.threads.max(1)),
            prepared: Prepared::default(),
            spare: Vec::new(),
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
        let device = format!("cpu {}", self.options.isa);
        self.plan
            .ops
            .iter()
            .map(|op| match op {
                Op::Linear { projections, .. } => {
                    let kernels: Vec<_> = projections
                        .iter()
                        .map(|p| match &self.weights[p.weight.0] {
                            Weight::Matrix(layout) => kernel_name(
                                self.options.isa,
                                layout.dtype(),
                                self.options.precision,
                                rows,
                            )
                            .to_string(),
                            Weight::Vector(_) => "none".into(),
                        })
                        .collect();
                    format!("{device}: {}", kernels.join(", "))
                }
                _ => device.clone(),
            })
            .collect()
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
            buffer.resize(rows * decl.columns, 0.0);
        }
        self.ropes.prepare(&self.spec, batch);
        out.values.retain(|name, _| wanted.contains(name));
        self.execute(batch, wanted, out);
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
            + self
                .buffers
                .iter()
                .map(|b| b.capacity() * size_of::<f32>())
                .sum::<usize>()
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
