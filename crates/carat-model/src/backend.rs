//! What an engine asks of a device.

use std::{collections::BTreeMap, time::Duration};

use carat_bundle::spec::ModelSpec;

use crate::{Batch, KvFormat, ModelError, Plan};

/// Something a step can hand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Output {
    /// `[R, vocab]` logits of the logit rows.
    Logits,
    /// `[R, hidden]` what the head sees.
    FinalHidden,
    /// `[M, hidden]` the residual stream after a layer.
    Residual(usize),
}

/// Results of a step, by name, row-major; buffers are reused between steps.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One entry per requested output.
    pub values: BTreeMap<Output, Vec<f32>>,
}

impl StepOutput {
    /// The logits, empty if not requested.
    pub fn logits(&self) -> &[f32] {
        self.values.get(&Output::Logits).map_or(&[], |v| v)
    }
}

/// A device that runs a model's plan. States live on the device.
pub trait Backend: Send {
    /// The model.
    fn spec(&self) -> &ModelSpec;

    /// What runs, in order.
    fn plan(&self) -> &Plan;

    /// Device and instruction set, such as `cpu avx512vnni, 2 threads`.
    fn describe(&self) -> String;

    /// The kernel that runs each op of the plan for a step of `rows` rows.
    fn placement(&self, rows: usize) -> Vec<String>;

    /// KV blocks there are.
    fn kv_blocks(&self) -> usize;

    /// Format of the KV cache.
    fn kv_format(&self) -> KvFormat;

    /// Makes room for at least `blocks` KV blocks; held blocks keep their content.
    fn grow_kv(&mut self, blocks: usize) -> Result<(), ModelError>;

    /// Runs the plan once. `wanted` names what to hand out.
    fn step(
        &mut self,
        batch: &Batch<'_>,
        wanted: &[Output],
        out: &mut StepOutput,
    ) -> Result<(), ModelError>;

    /// Logits of given rows of what the head sees ([`Output::FinalHidden`],
    /// `[rows, hidden]`): the plan from the head on, on values of the caller's
    /// choice. `logits` becomes `[rows, vocab]`.
    fn head(&mut self, hidden: &[f32], logits: &mut Vec<f32>) -> Result<(), ModelError>;

    /// Keys and values of one KV state at `positions` of a sequence, in logical
    /// fp32: two matrices `[positions, kv_heads * head_dim]`.
    fn export_kv(
        &self,
        state: usize,
        blocks: &[u32],
        positions: std::ops::Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), ModelError>;

    /// The inverse of [`export_kv`](Backend::export_kv).
    fn import_kv(
        &mut self,
        state: usize,
        blocks: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ModelError>;

    /// Bytes of device memory held by states and scratch.
    fn resident_bytes(&self) -> usize;

    /// Starts (or stops) noting the time of every op. A backend that cannot has
    /// no spans to give.
    fn set_profiling(&mut self, _on: bool) {}

    /// What was noted since the last call, in order.
    fn take_spans(&mut self) -> Vec<OpSpan> {
        Vec::new()
    }
}

/// One op of one step, as it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSpan {
    /// Index into [`Plan::ops`].
    pub op: usize,
    /// Rows of the step.
    pub rows: usize,
    /// From the start of profiling to its beginning.
    pub start: Duration,
    /// From its beginning to its end.
    pub time: Duration,
}
