//! Products with int8 activations.

use std::ops::Range;

use super::forms::{Class, Form};
use super::scratch::{BLOCK_COLUMNS, with_scratch};
use super::{MAX_TILE, Panel, Unpacked, Vectors, unroll8};
use crate::matmul::job::{Job, Kernel, Paths};
use crate::matmul::prepared::{GROUP, XGroup};

/// Most tokens of a pass straight from the weight: up to here unpacking again
/// mostly costs less than a pass through the scratch.
const FUSED_TOKENS: usize = 4;

/// Bytes ahead of the codes in use that are fetched from memory: some 600 ns of
/// streaming, well above the latency of memory. Half of it is worse for Q6_K, four
/// times as much no better for any format.
pub(super) const PREFETCH: usize = 8448;

pub(super) fn kernel<V: Vectors, F: Form<V>>() -> Kernel {
    const { F::CHECK_CLASS };
    Kernel {
        isa: V::ISA,
        paths: Paths::Both {
            least: V::LEAST_TILE,
            default: FUSED_TOKENS + 1,
        },
        panels: V::PANELS,
        run: run::<V, F>,
    }
}

fn run<V: Vectors, F: Form<V>>(job: &Job<'_>) {
    debug_assert_eq!(job.weight.layout().dtype(), F::DTYPE);
    if !job.fused && job.tokens.len() >= V::LEAST_TILE {
        return run_tiled::<V, F>(job);
    }
    job.passes(FUSED_TOKENS, |panels, tokens| match tokens.len() {
        0 => {}
        1 => run_fused::<V, F, 1>(job, panels, tokens),
        2 => run_fused::<V, F, 2>(job, panels, tokens),
        _ => run_fused::<V, F, FUSED_TOKENS>(job, panels, tokens),
    });
}

/// Up to T tokens; missing ones repeat the last.
fn run_fused<V: Vectors, F: Form<V>, const T: usize>(
    job: &Job<'_>,
    panels: Range<usize>,
    tokens: Range<usize>,
) {
    let count = tokens.len();
    assert!(1 <= count && count <= T);
    let blocks = job.weight.layout().blocks();
    let x = std::array::from_fn(|t| job.x.groups(tokens.start + t.min(count - 1)).as_ptr());
    let end = job.weight.bytes().as_ptr_range().end;
    let mut out = [[0.0; 16]; T];
    for panel in panels {
        let at = job.weight.panel(panel).as_ptr();
        // SAFETY: this kernel was chosen for a machine that has V. The panel
        // has `blocks` blocks, and each token `columns / 32` groups, since
        // `matmul` asserted that the columns agree.
        unsafe { V::fused::<F, T>(Panel { at, end }, blocks, x, &mut out) };
        for (t, out) in out[..count].iter().enumerate() {
            job.store(tokens.start + t, panel, out);
        }
    }
}

/// One panel for up to four tokens, straight from the packed bytes.
///
/// # Safety
///
/// V must be present; `panel` must have `blocks` blocks and each of `x` the
/// groups that they cover.
#[inline(always)]
pub(super) unsafe fn fused<V: Vectors, F: Form<V>, const T: usize>(
    panel: Panel,
    blocks: usize,
    x: [*const XGroup; T],
    out: &mut [[f32; 16]; T],
) {
    let g = F::GEOMETRY;
    // One token: the loop itself would cost, so short blocks go four at a time
    // (and long ones are unrolled in `block`). With more tokens arithmetic
    // outweighs the loop, and unrolling would only make code.
    let unrolled = T == 1 && F::UNITS == 1;
    let round = if unrolled { 4 } else { g.blocks_per_chunk };
    let round_bytes = round * F::BLOCK_BYTES;
    // SAFETY: the caller's promise: all blocks are in the panel, all groups in
    // `x`. Prefetched addresses are inside the weight.
    unsafe {
        let mut sums = [V::zero(); T];
        let mut at = panel.at;
        let mut column = 0;
        let mut left = blocks;
        while left > 0 {
            let count = if left < round { left } else { round };
            let rest = panel.end as usize - at as usize;
            let ahead = at.wrapping_add(if rest > PREFETCH + round_bytes {
                PREFETCH
            } else {
                0
            });
            if unrolled && count == 4 {
                unroll8!(i => {
                    if i < 4 {
                        let place = F::block_at(i, 4);
                        let ahead = ahead.wrapping_add(i * F::BLOCK_BYTES);
                        let column = column + i * g.block_columns;
                        block::<V, F, T>(at, place, ahead, column, x, &mut sums);
                    }
                });
            } else {
                for i in 0..count {
                    let place = F::block_at(i, count);
                    let ahead = ahead.wrapping_add(i * F::BLOCK_BYTES);
                    let column = column + i * g.block_columns;
                    block::<V, F, T>(at, place, ahead, column, x, &mut sums);
                }
            }
            at = at.wrapping_add(count * F::BLOCK_BYTES);
            column += count * g.block_columns;
            left -= count;
        }
        for t in 0..T {
            V::store_f32(out[t].as_mut_ptr(), sums[t]);
        }
    }
}

/// One block of a panel; `ahead` is where to prefetch as many bytes.
#[inline(always)]
unsafe fn block<V: Vectors, F: Form<V>, const T: usize>(
    at: *const u8,
    (codes, fields): (usize, usize),
    ahead: *const u8,
    column: usize,
    x: [*const XGroup; T],
    sums: &mut [V::Lanes; T],
) {
    // SAFETY: `fused` passes blocks of its panel and columns of its input.
    unsafe {
        let codes = at.wrapping_add(codes);
        let fields = F::fields(at.wrapping_add(fields));
        let lines = const { F::BLOCK_BYTES.div_ceil(64) };
        let mut x = x;
        for t in 0..T {
            x[t] = x[t].wrapping_add(column / GROUP);
        }
        let half = column % GROUP / 16;
        if T == 1 {
            unroll8!(u => {
                if u < F::UNITS {
                    prefetch::<V>(ahead, lines * u / F::UNITS, lines * (u + 1) / F::UNITS);
                    unit::<V, F, T>(codes, &fields, u, half, x, sums);
                }
            });
        } else {
            for u in 0..F::UNITS {
                prefetch::<V>(ahead, lines * u / F::UNITS, lines * (u + 1) / F::UNITS);
                unit::<V, F, T>(codes, &fields, u, half, x, sums);
            }
        }
    }
}

/// Prefetches lines `from..to`.
#[inline(always)]
unsafe fn prefetch<V: Vectors>(at: *const u8, from: usize, to: usize) {
    let mut line = from;
    while line < to {
        // SAFETY: V is present; prefetching is harmless anywhere.
        unsafe { V::prefetch(at.wrapping_add(line * 64)) };
        line += 1;
    }
}

/// One unit of a block. `half` is the half of the input's group in which a
/// unit of 16 columns lies.
#[inline(always)]
unsafe fn unit<V: Vectors, F: Form<V>, const T: usize>(
    codes: *const u8,
    fields: &F::Fields,
    u: usize,
    half: usize,
    x: [*const XGroup; T],
    sums: &mut [V::Lanes; T],
) {
    let parts = F::UNIT_STEPS / F::GROUP_STEPS;
    let mut part = 0;
    while part < parts {
        let half = half + part;
        // SAFETY: as in `block`.
        unsafe {
            let mut xs = x;
            for t in 0..T {
                xs[t] = x[t].wrapping_add(u);
            }
            let x = xs;
            let mut isums = [V::begin(0); T];
            for t in 0..T {
                isums[t] = V::begin(start::<F::Class>(x[t], half));
            }
            unroll8!(s => {
                if s < F::GROUP_STEPS {
                    let w = F::step(codes, u, part * F::GROUP_STEPS + s);
                    for t in 0..T {
                        let at = x[t].cast::<i8>().wrapping_add(half * 16 + 4 * s);
                        let last = s + 1 == F::GROUP_STEPS;
                        isums[t] = V::step(isums[t], s, last, F::BITS, w, V::input(at));
                    }
                }
            });
            let group = u * parts + part;
            let scale = F::scale(fields, group);
            let min = F::min(fields, group);
            for t in 0..T {
                sums[t] = accumulate::<V, F::Class>(isums[t], scale, min, x[t], half, sums[t]);
            }
        }
        part += 1;
    }
}

/// What the offset of the codes takes away from a group's integer sum. `half`
/// is the half of `x` that a group of 16 lies on.
#[inline(always)]
unsafe fn start<C: Class>(x: *const XGroup, half: usize) -> i32 {
    // SAFETY: `x` is a group.
    unsafe {
        if C::STEPS == 8 {
            (*x).negative_sum(C::OFFSET)
        } else {
            (*x).negative_half_sum(half, C::OFFSET)
        }
    }
}

/// The two multiply-adds that end a group.
#[inline(always)]
unsafe fn accumulate<V: Vectors, C: Class>(
    isum: V::Sums,
    scale: V::Lanes,
    min: V::Lanes,
    x: *const XGroup,
    half: usize,
    sum: V::Lanes,
) -> V::Lanes {
    // SAFETY: `x` is a group.
    unsafe {
        let isum = V::finish(isum, start::<C>(x, half), C::BITS);
        let scale = V::mul(scale, V::splat((*x).scale));
        let sum = V::fma(isum, scale, sum);
        if !C::MIN {
            return sum;
        }
        let scaled_sum = if C::STEPS == 8 {
            (*x).scaled_sum
        } else {
            (*x).scaled_half_sum(half)
        };
        V::fma(min, V::splat(scaled_sum), sum)
    }
}

fn run_tiled<V: Vectors, F: Form<V>>(job: &Job<'_>) {
    let layout = job.weight.layout();
    let (blocks, columns) = (layout.blocks(), layout.columns());
    let block_columns = F::GEOMETRY.block_columns;
    tiled::<V>(
        job,
        block_columns,
        |index, run, out| {
            let panel = job.weight.panel(index).as_ptr();
            let range = run.start / block_columns..run.end / block_columns;
            // What this panel's place will hold next.
            let next = if run.end < columns {
                panel.wrapping_add(F::block_at(range.end, blocks).0)
            } else if index + V::PANELS < job.panels.end {
                panel.wrapping_add(V::PANELS * layout.panel_bytes())
            } else {
                panel
            };
            // SAFETY: V is present (as in `run_fused`); the panel has `blocks`
            // blocks, and the scratch room for as many columns as `tiled` passes.
            unsafe { V::unpack::<F>(panel, blocks, range, next, out) };
        },
        |weights, columns, tokens, x, sums, first| {
            // SAFETY: V is present; what `tiled` passes is what tiles take.
            unsafe { V::tile::<F::Class>(weights, columns, tokens, x, sums, first) };
        },
    );
}

/// Many tokens: unpacks V::PANELS panels, up to BLOCK_COLUMNS columns at a time, and
/// passes all tokens of the job over them.
///
/// `unpack` takes a panel, columns of it and its place in the scratch: `[step][PANELS][64]`
/// codes and `[group][PANELS][16]` fields for BLOCK_COLUMNS columns, PANELS being at most
/// 2. `tile` takes these, columns (whole multiples of `group`, filled up with zeros of
/// the input), a tile of tokens and as many inputs and sums.
pub(super) fn tiled<V: Vectors>(
    job: &Job<'_>,
    group: usize,
    unpack: impl Fn(usize, Range<usize>, Unpacked),
    tile: impl Fn(Unpacked, usize, usize, &[*const XGroup; MAX_TILE], *mut f32, bool),
) {
    let columns = job.weight.layout().columns();
    let tokens = job.tokens.len();
    let tiles = tokens.div_ceil(V::TILE_TOKENS);
    let width = V::PANELS * 16;
    with_scratch(|scratch| {
        let weights = Unpacked {
            codes: scratch.codes.as_mut_ptr(),
            scales: scratch.scales.as_mut_ptr(),
            mins: scratch.mins.as_mut_ptr(),
        };
        assert!(tokens * width <= scratch.sums.len());
        for first_panel in job.panels.clone().step_by(V::PANELS) {
            let panels = V::PANELS.min(job.panels.end - first_panel);
            for column in (0..columns).step_by(BLOCK_COLUMNS) {
                let end = columns.min(column + BLOCK_COLUMNS);
                for p in 0..panels {
                    let place = Unpacked {
                        codes: weights.codes.wrapping_add(p * 64),
                        scales: weights.scales.wrapping_add(p * 16),
                        mins: weights.mins.wrapping_add(p * 16),
                    };
                    unpack(first_panel + p, column..end, place);
                }
                // Where the last panel has no partner, its place holds what was
                // there before: results for it are computed and dropped.
                for i in 0..tiles {
                    let from = tokens * i / tiles;
                    let count = tokens * (i + 1) / tiles - from;
                    // Room for the tile's tokens: asserted.
                    let sums = scratch.sums[from * width..].as_mut_ptr();
                    let mut x = [std::ptr::null(); MAX_TILE];
                    for (t, x) in x[..count].iter_mut().enumerate() {
                        let groups = job.x.groups(job.tokens.start + from + t);
                        *x = groups[column / GROUP..].as_ptr();
                    }
                    let run = (end - column).next_multiple_of(group);
                    tile(weights, run, count, &x, sums, column == 0);
                }
            }
            let sums = scratch.sums.as_chunks::<16>().0;
            for (token, sums) in job.tokens.clone().zip(sums.chunks_exact(V::PANELS)) {
                for (p, sums) in sums[..panels].iter().enumerate() {
                    job.store(token, first_panel + p, sums);
                }
            }
        }
    });
}

/// Unpacks a range of blocks of a panel into every PANELS-th vector of `out`,
/// and prefetches as many bytes at `next`.
///
/// # Safety
///
/// V must be present; the panel must have `blocks` blocks, the range among
/// them, and `out` room for it.
#[inline(always)]
pub(super) unsafe fn unpack<V: Vectors, F: Form<V>>(
    panel: *const u8,
    blocks: usize,
    range: Range<usize>,
    next: *const u8,
    out: Unpacked,
) {
    let mut next = next;
    let groups = F::GEOMETRY.block_columns / F::GEOMETRY.group_columns;
    let Unpacked {
        mut codes,
        mut scales,
        mut mins,
    } = out;
    for b in range {
        let (planes, fields) = F::block_at(b, blocks);
        // SAFETY: the caller's promise.
        unsafe {
            let planes = panel.wrapping_add(planes);
            let fields = F::fields(panel.wrapping_add(fields));
            prefetch::<V>(next, 0, const { F::BLOCK_BYTES.div_ceil(64) });
            next = next.wrapping_add(F::BLOCK_BYTES);
            for u in 0..F::UNITS {
                unroll8!(s => {
                    if s < F::UNIT_STEPS {
                        V::store(codes, F::step(planes, u, s));
                        codes = codes.wrapping_add(V::PANELS * 64);
                    }
                });
            }
            for group in 0..groups {
                V::store_f32(scales, F::scale(&fields, group));
                scales = scales.wrapping_add(V::PANELS * 16);
                if F::GEOMETRY.has_min {
                    V::store_f32(mins, F::min(&fields, group));
                    mins = mins.wrapping_add(V::PANELS * 16);
                }
            }
        }
    }
}

/// `P` unpacked panels (`P` is `V::PANELS`) for T tokens: adds `columns`
/// columns to `sums`, `[token][P][16]`, or starts them if `first`.
///
/// # Safety
///
/// V must be present; there must be that many columns in `weights` and in the
/// first T of `x`, and `T` tokens in `sums`.
#[inline(always)]
pub(super) unsafe fn tile<V: Vectors, C: Class, const P: usize, const T: usize>(
    weights: Unpacked,
    columns: usize,
    x: &[*const XGroup; MAX_TILE],
    sums: *mut f32,
    first: bool,
) {
    const { assert!(P == V::PANELS && T <= V::TILE_TOKENS) };
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[V::zero(); P]; T];
        let mut xs = [std::ptr::null(); T];
        for t in 0..T {
            xs[t] = x[t];
            for p in 0..P {
                if !first {
                    acc[t][p] = V::load_f32(sums.wrapping_add((t * P + p) * 16));
                }
            }
        }
        let mut w = weights;
        for _ in 0..columns / GROUP {
            tile_group::<V, C, P, T>(&mut w, &xs, 0, &mut acc);
            if C::STEPS == 4 {
                tile_group::<V, C, P, T>(&mut w, &xs, 1, &mut acc);
            }
            for t in 0..T {
                xs[t] = xs[t].wrapping_add(1);
            }
        }
        if C::STEPS == 4 && !columns.is_multiple_of(GROUP) {
            tile_group::<V, C, P, T>(&mut w, &xs, 0, &mut acc);
        }
        for t in 0..T {
            for p in 0..P {
                V::store_f32(sums.wrapping_add((t * P + p) * 16), acc[t][p]);
            }
        }
    }
}

/// One group of a tile; moves `w` past it.
#[inline(always)]
unsafe fn tile_group<V: Vectors, C: Class, const P: usize, const T: usize>(
    w: &mut Unpacked,
    x: &[*const XGroup; T],
    half: usize,
    acc: &mut [[V::Lanes; P]; T],
) {
    // SAFETY: as in `tile`.
    unsafe {
        let mut isums = [[V::begin(0); P]; T];
        for t in 0..T {
            isums[t] = [V::begin(start::<C>(x[t], half)); P];
        }
        unroll8!(s => {
            if s < C::STEPS {
                let mut codes = [V::load(w.codes.wrapping_add(s * P * 64)); P];
                for p in 1..P {
                    codes[p] = V::load(w.codes.wrapping_add((s * P + p) * 64));
                }
                for t in 0..T {
                    let input = V::input(x[t].cast::<i8>().wrapping_add(half * 16 + 4 * s));
                    for p in 0..P {
                        let last = s + 1 == C::STEPS;
                        isums[t][p] = V::step(isums[t][p], s, last, C::BITS, codes[p], input);
                    }
                }
            }
        });
        for p in 0..P {
            let scale = V::load_f32(w.scales.wrapping_add(p * 16));
            let min = if C::MIN {
                V::load_f32(w.mins.wrapping_add(p * 16))
            } else {
                V::zero()
            };
            for t in 0..T {
                let isum = isums[t][p];
                acc[t][p] = accumulate::<V, C>(isum, scale, min, x[t], half, acc[t][p]);
            }
        }
        w.codes = w.codes.wrapping_add(C::STEPS * P * 64);
        w.scales = w.scales.wrapping_add(P * 16);
        w.mins = w.mins.wrapping_add(P * 16);
    }
}
