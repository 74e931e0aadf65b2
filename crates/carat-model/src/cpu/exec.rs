//! One pass over the plan.

use std::time::Instant;

use carat_bundle::spec::Activation;
use carat_kernels::{
    Product,
    attention::{AttentionArgs, AttentionRow, attention},
    gather_rows, matmul,
    ops::{self, Rope, add_scaled, gated_in_place, rms_norm, rope_rotate, scale_in_place, softcap},
};
use carat_tensor::packed::PackedRef;

use super::{CpuBackend, Weight};
use crate::{Batch, BufferId, Op, Output, StepOutput, WeightId, WeightStore};

impl CpuBackend {
    fn vector(&self, id: WeightId) -> &[f32] {
        match &self.weights[id.0] {
            Weight::Vector(v) => v,
            Weight::Matrix(_) => &[],
        }
    }

    fn columns(&self, id: BufferId) -> usize {
        self.plan.buffers[id.0].columns
    }

    /// Runs every op. The batch is validated and the buffers are sized.
    pub(super) fn execute(&mut self, batch: &Batch<'_>, wanted: &[Output], out: &mut StepOutput) {
        let m = batch.len();
        let rows: Vec<AttentionRow<'_>> = batch
            .sequences
            .iter()
            .enumerate()
            .flat_map(|(b, sequence)| {
                batch.rows_of(b).map(|row| AttentionRow {
                    position: batch.positions[row],
                    blocks: sequence.blocks,
                })
            })
            .collect();
        let (isa, precision) = (self.options.isa, self.options.precision);
        // The plan is not changed by running it; ops borrow buffers one at a time.
        let ops = std::mem::take(&mut self.plan.ops);
        for (index, op) in ops.iter().enumerate() {
            let start = self.profile.is_some().then(Instant::now);
            match op {
                Op::Embed { table, scale, out } => {
                    let mut x = std::mem::take(&mut self.buffers[out.0]);
                    let name = &self.plan.weights[table.0];
                    gather_rows(
                        packed(self.store.as_ref(), name),
                        batch.token_ids,
                        *scale,
                        &mut x,
                    )
                    .expect(FITS);
                    self.buffers[out.0] = x;
                }
                Op::RmsNorm {
                    input,
                    weight,
                    norm,
                    groups,
                    out,
                } => {
                    let source = std::mem::take(&mut self.buffers[input.0]);
                    let width = self.columns(*input) / groups;
                    // In-place norms write to a spare buffer and swap.
                    let mut y = if input == out {
                        let mut spare = std::mem::take(&mut self.spare);
                        spare.resize(source.len());
                        spare
                    } else {
                        std::mem::take(&mut self.buffers[out.0])
                    };
                    let gain = self.vector(*weight);
                    debug_assert_eq!(gain.len(), width);
                    rms_norm(
                        isa,
                        &self.pool,
                        &source,
                        gain,
                        norm.weight_offset,
                        norm.eps,
                        &mut y,
                    );
                    if input == out {
                        self.spare = source;
                    } else {
                        self.buffers[input.0] = source;
                    }
                    self.buffers[out.0] = y;
                }
                Op::Linear { input, projections } => {
                    let x = std::mem::take(&mut self.buffers[input.0]);
                    let k = self.columns(*input);
                    let rows = x.len() / k;
                    if rows > 0 {
                        let formats =
                            projections
                                .iter()
                                .filter_map(|p| match &self.weights[p.weight.0] {
                                    Weight::Matrix(layout) => Some(layout.form()),
                                    Weight::Vector(_) => None,
                                });
                        self.prepared
                            .prepare_for(isa, &self.pool, precision, formats, &x, rows, k)
                            .expect(FITS);
                        let mut outs: Vec<_> = projections
                            .iter()
                            .map(|p| std::mem::take(&mut self.buffers[p.out.0]))
                            .collect();
                        let mut products = Vec::with_capacity(projections.len());
                        for (p, out) in projections.iter().zip(&mut outs) {
                            let name = &self.plan.weights[p.weight.0];
                            let weight = packed(self.store.as_ref(), name);
                            products.push(Product {
                                weight,
                                bias: p.bias.map(|b| self.vector(b)),
                                out,
                            });
                        }
                        matmul(isa, &self.pool, &self.prepared, &mut products).expect(FITS);
                        drop(products);
                        for (p, out) in projections.iter().zip(outs) {
                            self.buffers[p.out.0] = out;
                        }
                    }
                    self.buffers[input.0] = x;
                }
                Op::Rope {
                    buffer,
                    rope,
                    heads,
                    head_dim,
                } => {
                    let tables = &self.ropes.rows[*rope];
                    let rotary_dim = self.spec.ropes[*rope].rotary_dim;
                    let shape = Rope {
                        heads: *heads,
                        head_dim: *head_dim,
                        rotary_dim,
                        row_stride: heads * head_dim,
                    };
                    let x = &mut self.buffers[buffer.0];
                    rope_rotate(isa, &self.pool, shape, x, &tables.cos, &tables.sin);
                }
                Op::KvWrite { key, value, state } => {
                    let width = self.columns(*key);
                    let (keys, values) = (&self.buffers[key.0], &self.buffers[value.0]);
                    let store = &mut self.kv[state.0];
                    for ((slot, key), value) in batch
                        .slot_mapping
                        .iter()
                        .zip(keys.chunks_exact(width))
                        .zip(values.chunks_exact(width))
                    {
                        store.write(isa, *slot, key, value);
                    }
                }
                Op::Attention {
                    query,
                    state,
                    heads,
                    scale,
                    window,
                    softcap,
                    out,
                } => {
                    let mut mixed = std::mem::take(&mut self.buffers[out.0]);
                    let store = &self.kv[state.0];
                    attention(
                        isa,
                        &self.pool,
                        &AttentionArgs {
                            q: &self.buffers[query.0],
                            kv: store.view(),
                            layout: store.layout,
                            heads: *heads,
                            scale: *scale,
                            window: *window,
                            softcap: *softcap,
                            rows: &rows,
                        },
                        &mut mixed,
                    );
                    self.buffers[out.0] = mixed;
                }
                Op::Gated {
                    gate,
                    up,
                    activation,
                    out,
                } => {
                    debug_assert_eq!(gate, out, "the plan gates in place");
                    let mut g = std::mem::take(&mut self.buffers[gate.0]);
                    let up = &self.buffers[up.0];
                    gated_in_place(isa, &self.pool, kernel_activation(*activation), &mut g, up);
                    self.buffers[out.0] = g;
                }
                Op::AddScaled {
                    accumulator,
                    input,
                    scale,
                } => {
                    let mut x = std::mem::take(&mut self.buffers[accumulator.0]);
                    add_scaled(isa, &self.pool, &mut x, &self.buffers[input.0], *scale);
                    self.buffers[accumulator.0] = x;
                }
                Op::SelectRows { input, out } => {
                    let columns = self.columns(*input);
                    let mut selected = std::mem::take(&mut self.buffers[out.0]);
                    let all = &self.buffers[input.0];
                    for (row, to) in batch
                        .logit_rows
                        .iter()
                        .zip(selected.chunks_exact_mut(columns))
                    {
                        let at = *row as usize * columns;
                        to.copy_from_slice(&all[at..at + columns]);
                    }
                    self.buffers[out.0] = selected;
                }
                Op::ScaleCap {
                    buffer,
                    scale,
                    softcap: cap,
                } => {
                    let x = &mut self.buffers[buffer.0];
                    scale_in_place(isa, &self.pool, x, *scale);
                    if let Some(c) = cap {
                        softcap(isa, &self.pool, x, *c);
                    }
                }
                Op::Tap { output, buffer } => {
                    if wanted.contains(output) {
                        let value = out.values.entry(*output).or_default();
                        value.clear();
                        value.extend_from_slice(&self.buffers[buffer.0]);
                    }
                }
            }
            if let (Some(profile), Some(start)) = (&mut self.profile, start) {
                profile.note(index, m, start);
            }
        }
        debug_assert_eq!(rows.len(), m);
        self.plan.ops = ops;
    }
}

/// Why products cannot fail here.
const FITS: &str = "invariant: the plan's shapes and the batch's ids were checked";

fn packed<'a>(store: &'a dyn WeightStore, name: &str) -> PackedRef<'a> {
    store
        .matrix(name)
        .expect("invariant: `CpuBackend::new` checked every weight of the plan")
}

fn kernel_activation(activation: Activation) -> ops::Activation {
    match activation {
        Activation::Silu => ops::Activation::Silu,
        Activation::GeluTanh => ops::Activation::GeluTanh,
    }
}
