//! Products with float activations.

use std::ops::Range;

use super::forms::Form;
use super::scratch::{BLOCK_FLOATS, with_scratch};
use super::{MAX_TILE, Vectors, unroll8};
use crate::matmul::job::{Job, Kernel, Paths};

/// Bytes ahead that are prefetched of weights straight from memory, see
/// `integers::PREFETCH`.
pub(super) const AHEAD: usize = 8192;

/// A float type of weights.
///
/// # Safety
///
/// As [`Vectors`].
pub(super) trait Load<V: Vectors>: 'static {
    /// Bytes of a value.
    const WIDTH: usize;
    /// Values of 16 rows.
    unsafe fn load(at: *const u8) -> V::Lanes;
}

macro_rules! load {
    ($name:ident, $width:literal, $load:ident) => {
        /// The type of this name.
        pub(super) struct $name;

        impl<V: Vectors> Load<V> for $name {
            const WIDTH: usize = $width;
            #[inline(always)]
            unsafe fn load(at: *const u8) -> V::Lanes {
                // SAFETY: as the trait says.
                unsafe { V::$load(at.cast()) }
            }
        }
    };
}

load!(F32, 4, load_f32);
load!(F16, 2, load_f16);
load!(BF16, 2, load_bf16);

/// The kernel for weights of plain floats.
pub(super) fn kernel<V: Vectors, L: Load<V>>() -> Kernel {
    Kernel {
        isa: V::ISA,
        paths: Paths::Both {
            least: 1,
            default: V::FLOAT_TOKENS + 1,
        },
        panels: 1,
        run: run::<V, L>,
    }
}

/// The kernel for quantized weights, decoded to fp32 in the scratch.
pub(super) fn kernel_of_codes<V: Vectors, F: Form<V>>() -> Kernel {
    Kernel {
        isa: V::ISA,
        paths: Paths::Tiled,
        panels: 1,
        run: run_of_codes::<V, F>,
    }
}

fn run<V: Vectors, L: Load<V>>(job: &Job<'_>) {
    let columns = job.weight.layout().columns();
    // With few tokens values are converted on the way, else once for all of
    // them. fp32 needs no conversion, only short runs of columns that stay in
    // the L1 cache.
    let fused = job.fused;
    let run_columns = if fused { columns } else { BLOCK_FLOATS };
    with_scratch(|scratch| {
        for panel in job.panels.clone() {
            let bytes = job.weight.panel(panel).as_ptr();
            for column in (0..columns).step_by(run_columns) {
                let count = run_columns.min(columns - column);
                // SAFETY: V is present: this kernel was chosen for a machine
                // that has it. The panel has `columns` columns of 16 values;
                // the scratch has room for BLOCK_FLOATS.
                unsafe {
                    let at = bytes.wrapping_add(column * 16 * L::WIDTH);
                    if fused || L::WIDTH == 4 {
                        tiles::<V, L>(job, at, column, count, AHEAD, &mut scratch.sums);
                    } else {
                        let floats = scratch.floats.as_mut_ptr();
                        V::convert::<L>(at, count, floats);
                        tiles::<V, F32>(job, floats.cast(), column, count, 0, &mut scratch.sums);
                    }
                }
            }
            finish_panel::<V>(job, panel, &scratch.sums);
        }
    });
}

fn run_of_codes<V: Vectors, F: Form<V>>(job: &Job<'_>) {
    let layout = job.weight.layout();
    let (blocks, columns) = (layout.blocks(), layout.columns());
    let block_columns = F::GEOMETRY.block_columns;
    with_scratch(|scratch| {
        for panel in job.panels.clone() {
            let bytes = job.weight.panel(panel).as_ptr();
            for column in (0..columns).step_by(BLOCK_FLOATS) {
                let end = columns.min(column + BLOCK_FLOATS);
                let range = column / block_columns..end / block_columns;
                let floats = scratch.floats.as_mut_ptr();
                // SAFETY: as in `run`; the range is of the panel's blocks.
                unsafe {
                    V::decode::<F>(bytes, blocks, range, floats);
                    let at = floats.cast_const().cast();
                    tiles::<V, F32>(job, at, column, end - column, 0, &mut scratch.sums);
                }
            }
            finish_panel::<V>(job, panel, &scratch.sums);
        }
    });
}

/// Adds `count` columns of a panel, from `column` of the input on, to the sums
/// of all tokens.
///
/// # Safety
///
/// V must be present and `weights` have `count` columns of 16 values.
unsafe fn tiles<V: Vectors, L: Load<V>>(
    job: &Job<'_>,
    weights: *const u8,
    column: usize,
    count: usize,
    ahead: usize,
    sums: &mut [f32],
) {
    let tokens = job.tokens.len();
    let tiles = tokens.div_ceil(V::FLOAT_TOKENS);
    assert!(tokens * 64 <= sums.len());
    for tile in 0..tiles {
        let from = tokens * tile / tiles;
        let tile_tokens = tokens * (tile + 1) / tiles - from;
        let sums = sums[from * 64..].as_mut_ptr();
        let mut x = [std::ptr::null(); MAX_TILE];
        for (t, x) in x[..tile_tokens].iter_mut().enumerate() {
            let values = job.x.floats(job.tokens.start + from + t);
            *x = values[column..][..count].as_ptr();
        }
        // SAFETY: the caller's promise; `sums` has room for the tile's tokens
        // (asserted), each of `x` `count` values.
        unsafe { V::float_tile::<L>(weights, count, tile_tokens, &x, sums, column == 0, ahead) };
    }
}

fn finish_panel<V: Vectors>(job: &Job<'_>, panel: usize, sums: &[f32]) {
    let sums = sums.as_chunks::<64>().0;
    for (token, sums) in job.tokens.clone().zip(sums) {
        // SAFETY: V is present (as in `run`); a token has 64 sums.
        let out = unsafe { V::float_finish(sums.as_ptr()) };
        job.store(token, panel, &out);
    }
}

/// Decodes a range of blocks of a panel to `[column][16]`.
///
/// # Safety
///
/// V must be present, the panel have `blocks` blocks, the range be among them
/// and `out` have room for it.
#[inline(always)]
pub(super) unsafe fn decode<V: Vectors, F: Form<V>>(
    panel: *const u8,
    blocks: usize,
    range: Range<usize>,
    out: *mut f32,
) {
    let mut out = out;
    for b in range {
        let (planes, fields) = F::block_at(b, blocks);
        // SAFETY: the caller's promise.
        unsafe {
            for line in 0..const { F::BLOCK_BYTES.div_ceil(64) } {
                V::prefetch(panel.wrapping_add(b * F::BLOCK_BYTES + AHEAD + line * 64));
            }
            let planes = panel.wrapping_add(planes);
            let fields = F::fields(panel.wrapping_add(fields));
            let offset = V::splat(F::GEOMETRY.code_offset as f32);
            for u in 0..F::UNITS {
                unroll8!(s => {
                    if s < F::UNIT_STEPS {
                        let codes = F::step(planes, u, s);
                        let group = (u * F::UNIT_STEPS + s) / F::GROUP_STEPS;
                        let scale = F::scale(&fields, group);
                        for t in 0..4 {
                            // Exact: codes and offset are small integers.
                            let code = V::sub(V::byte_lanes(codes, t), offset);
                            let mut value = V::mul(scale, code);
                            if F::GEOMETRY.has_min {
                                value = V::add(value, F::min(&fields, group));
                            }
                            V::store_f32(out, value);
                            out = out.wrapping_add(16);
                        }
                    }
                });
            }
        }
    }
}

/// Converts columns of floats to fp32.
///
/// # Safety
///
/// V must be present and both sides have `columns` columns of 16 values.
#[inline(always)]
pub(super) unsafe fn convert<V: Vectors, L: Load<V>>(
    from: *const u8,
    columns: usize,
    to: *mut f32,
) {
    for k in 0..columns {
        // SAFETY: the caller's promise; prefetching is harmless anywhere.
        unsafe {
            let from = from.wrapping_add(k * 16 * L::WIDTH);
            V::prefetch(from.wrapping_add(AHEAD));
            V::store_f32(to.wrapping_add(k * 16), L::load(from));
        }
    }
}

/// One panel for T tokens: adds columns to `sums`, `[token][k % 4][16]`, or
/// starts them if `first`. Runs but the last have whole fours of columns. What
/// lies `ahead` bytes further is prefetched.
///
/// # Safety
///
/// V must be present; there must be that many columns in `weights` and in the
/// first T of `x`, and `T` tokens in `sums`.
#[inline(always)]
pub(super) unsafe fn tile<V: Vectors, L: Load<V>, const T: usize>(
    weights: *const u8,
    columns: usize,
    x: &[*const f32; MAX_TILE],
    sums: *mut f32,
    first: bool,
    ahead: usize,
) {
    // SAFETY: the caller's promise; prefetching is harmless anywhere.
    unsafe {
        let mut acc = [[V::zero(); 4]; T];
        if !first {
            for t in 0..T {
                for j in 0..4 {
                    acc[t][j] = V::load_f32(sums.wrapping_add((t * 4 + j) * 16));
                }
            }
        }
        let mut k = 0;
        while k + 4 <= columns {
            // With more tokens arithmetic hides the memory.
            if T <= 2 {
                for line in 0..L::WIDTH {
                    V::prefetch(weights.wrapping_add(k * 16 * L::WIDTH + ahead + line * 64));
                }
            }
            for j in 0..4 {
                let w = L::load(weights.wrapping_add((k + j) * 16 * L::WIDTH));
                for t in 0..T {
                    acc[t][j] = V::fma(w, V::splat(*x[t].wrapping_add(k + j)), acc[t][j]);
                }
            }
            k += 4;
        }
        for j in 0..3 {
            if k + j < columns {
                let w = L::load(weights.wrapping_add((k + j) * 16 * L::WIDTH));
                for t in 0..T {
                    acc[t][j] = V::fma(w, V::splat(*x[t].wrapping_add(k + j)), acc[t][j]);
                }
            }
        }
        for t in 0..T {
            for j in 0..4 {
                V::store_f32(sums.wrapping_add((t * 4 + j) * 16), acc[t][j]);
            }
        }
    }
}

/// `(a[0] + a[1]) + (a[2] + a[3])` of a token's sums, `[4][16]`.
///
/// # Safety
///
/// V must be present and `sums` have 64 values.
#[inline(always)]
pub(super) unsafe fn finish<V: Vectors>(sums: *const f32) -> [f32; 16] {
    let mut out = [0.0; 16];
    // SAFETY: the caller's promise.
    unsafe {
        let a = V::add(V::load_f32(sums), V::load_f32(sums.wrapping_add(16)));
        let b = V::add(
            V::load_f32(sums.wrapping_add(32)),
            V::load_f32(sums.wrapping_add(48)),
        );
        V::store_f32(out.as_mut_ptr(), V::add(a, b));
    }
    out
}
