//! The scalar twin: the definition of every product.

use carat_tensor::DType;
use carat_tensor::packed::{Group, PANEL_ROWS, expand_group, grids};
use half::{bf16, f16};

use super::blocks::{BLOCK, Span};
use super::job::{Job, Kernel, MAX_JOB_TOKENS, Paths};
use super::prepared::{GROUP, Need};
use crate::Isa;

pub(super) fn kernel(need: Need) -> Kernel {
    Kernel {
        isa: Isa::Scalar,
        paths: Paths::Fused,
        panels: 1,
        run: match need {
            Need::Floats => floats,
            Need::Blocks => trits,
            Need::Rows => rows_of_trits,
            Need::Groups => integers,
        },
    }
}

type Lanes = [f32; PANEL_ROWS];

fn integers(job: &Job<'_>) {
    let layout = job.weight.layout();
    let g = layout.geometry();
    let mut group = Group::default();
    let mut sums = [[0f32; PANEL_ROWS]; MAX_JOB_TOKENS];
    for panel in job.panels.clone() {
        sums.fill([0.0; PANEL_ROWS]);
        for i in 0..layout.columns().div_ceil(g.group_columns) {
            expand_group(job.weight, panel, i, &mut group);
            for (token, sums) in job.tokens.clone().zip(&mut sums) {
                let column = i * g.group_columns;
                let x = &job.x.groups(token)[column / GROUP];
                let codes = &x.codes[column % GROUP..][..g.group_columns];
                let scaled_sum = if g.group_columns == GROUP {
                    x.scaled_sum
                } else {
                    x.scaled_half_sum(column % GROUP / 16)
                };
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let mut isum = 0i32;
                    for (w, x) in group.codes.iter().zip(codes.chunks_exact(4)) {
                        for (&w, &x) in w[4 * lane..][..4].iter().zip(x) {
                            isum += (i32::from(w) - g.code_offset) * i32::from(x);
                        }
                    }
                    *sum = (isum as f32).mul_add(group.scales[lane] * x.scale, *sum);
                    if g.has_min {
                        *sum = group.mins[lane].mul_add(scaled_sum, *sum);
                    }
                }
            }
        }
        for (token, sums) in job.tokens.clone().zip(&sums) {
            job.store(token, panel, sums);
        }
    }
}

/// Ternary weights: blocks of 256 with one scale on both sides.
fn trits(job: &Job<'_>) {
    const GROUPS: usize = BLOCK / GROUP;
    let layout = job.weight.layout();
    let offset = layout.geometry().code_offset;
    let mut groups: [Group; GROUPS] = Default::default();
    let mut sums = [[0f32; PANEL_ROWS]; MAX_JOB_TOKENS];
    for panel in job.panels.clone() {
        sums.fill([0.0; PANEL_ROWS]);
        for b in 0..layout.columns() / BLOCK {
            for (i, group) in groups.iter_mut().enumerate() {
                expand_group(job.weight, panel, b * GROUPS + i, group);
            }
            for (token, sums) in job.tokens.clone().zip(&mut sums) {
                let x = &job.x.blocks(Span::Block, token)[b];
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let weights = groups.iter().flat_map(|group| &group.codes);
                    let mut isum = 0i32;
                    for (w, x) in weights.zip(x.codes.chunks_exact(4)) {
                        for (&w, &x) in w[4 * lane..][..4].iter().zip(x) {
                            isum += (i32::from(w) - offset) * i32::from(x);
                        }
                    }
                    *sum = (isum as f32).mul_add(groups[0].scales[lane] * x.scale, *sum);
                }
            }
        }
        for (token, sums) in job.tokens.clone().zip(&sums) {
            job.store(token, panel, sums);
        }
    }
}

/// Trits whose rows have one scale, as tokens have.
fn rows_of_trits(job: &Job<'_>) {
    let layout = job.weight.layout();
    let (columns, g) = (layout.columns(), layout.geometry());
    let mut group = Group::default();
    let mut isums = [[0i32; PANEL_ROWS]; MAX_JOB_TOKENS];
    let mut sums = [[0f32; PANEL_ROWS]; MAX_JOB_TOKENS];
    for panel in job.panels.clone() {
        sums.fill([0.0; PANEL_ROWS]);
        for b in 0..columns.div_ceil(BLOCK) {
            isums.fill([0; PANEL_ROWS]);
            let end = columns.min((b + 1) * BLOCK).div_ceil(g.group_columns);
            for i in b * BLOCK / g.group_columns..end {
                expand_group(job.weight, panel, i, &mut group);
                for (token, isums) in job.tokens.clone().zip(&mut isums) {
                    let x = &job.x.blocks(Span::Row, token)[b];
                    let codes = &x.codes[i * g.group_columns % BLOCK..][..g.group_columns];
                    for (lane, isum) in isums.iter_mut().enumerate() {
                        for (w, x) in group.codes.iter().zip(codes.chunks_exact(4)) {
                            for (&w, &x) in w[4 * lane..][..4].iter().zip(x) {
                                *isum += (i32::from(w) - g.code_offset) * i32::from(x);
                            }
                        }
                    }
                }
            }
            for (sum, isum) in sums.as_flattened_mut().iter_mut().zip(isums.as_flattened()) {
                *sum += *isum as f32;
            }
        }
        let scales = grids::row_scales(job.weight, panel);
        for (token, sums) in job.tokens.clone().zip(&sums) {
            job.store_scaled(token, panel, sums, &scales);
        }
    }
}

fn floats(job: &Job<'_>) {
    let columns = job.weight.layout().columns();
    let mut weights = Columns::new();
    let mut sums = [[[0f32; PANEL_ROWS]; 4]; MAX_JOB_TOKENS];
    for panel in job.panels.clone() {
        sums.fill([[0.0; PANEL_ROWS]; 4]);
        for first in (0..columns).step_by(GROUP) {
            let count = GROUP.min(columns - first);
            weights.read(job, panel, first, count);
            for (token, sums) in job.tokens.clone().zip(&mut sums) {
                let x = &job.x.floats(token)[first..first + count];
                for (k, (w, &x)) in weights.values.iter().zip(x).enumerate() {
                    for (sum, w) in sums[k % 4].iter_mut().zip(w) {
                        *sum = w.mul_add(x, *sum);
                    }
                }
            }
        }
        for (token, [a, b, c, d]) in job.tokens.clone().zip(&sums) {
            let sum: Lanes = std::array::from_fn(|i| (a[i] + b[i]) + (c[i] + d[i]));
            job.store(token, panel, &sum);
        }
    }
}

/// Up to 32 columns of a panel in fp32.
struct Columns {
    values: [Lanes; GROUP],
    group: Group,
}

impl Columns {
    fn new() -> Self {
        Columns {
            values: [[0.0; PANEL_ROWS]; GROUP],
            group: Group::default(),
        }
    }

    fn read(&mut self, job: &Job<'_>, panel: usize, first: usize, count: usize) {
        let layout = job.weight.layout();
        let g = layout.geometry();
        let dtype = layout.dtype();
        if layout.grid().is_some() {
            let mut row = [0.0; GROUP];
            for lane in 0..PANEL_ROWS {
                let row = &mut row[..count];
                grids::read_span(job.weight, panel, lane, first..first + count, row);
                for (values, &w) in self.values.iter_mut().zip(&*row) {
                    values[lane] = w;
                }
            }
            return;
        }
        if dtype.is_float() {
            let width = dtype.block_bytes();
            let bytes = &job.weight.panel(panel)[first * PANEL_ROWS * width..];
            let values = self.values.as_flattened_mut();
            for (value, b) in values[..count * PANEL_ROWS]
                .iter_mut()
                .zip(bytes.chunks_exact(width))
            {
                *value = match dtype {
                    DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
                    DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
                    _ => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                };
            }
            return;
        }
        for (i, values) in self.values[..count]
            .chunks_exact_mut(g.group_columns)
            .enumerate()
        {
            expand_group(
                job.weight,
                panel,
                first / g.group_columns + i,
                &mut self.group,
            );
            let (scales, mins) = (&self.group.scales, &self.group.mins);
            for (k, values) in values.iter_mut().enumerate() {
                for (lane, value) in values.iter_mut().enumerate() {
                    let code = self.group.codes[k / 4][4 * lane + k % 4];
                    *value = scales[lane] * (i32::from(code) - g.code_offset) as f32;
                    if g.has_min {
                        *value += mins[lane];
                    }
                }
            }
        }
    }
}
