//! Ternary weights times inputs with one scale per block of 256 columns, or per token:
//! these have blocks of scale 1, as have weights whose rows have one scale.
//!
//! Few tokens: codes are used straight from the weight, whose vectors hold the
//! codes of four or five steps; a step's codes meet its four input columns in
//! integer dot products that run over the whole block. Many tokens: codes are
//! unpacked once for all tokens of a job, into the scratch, or on tile units
//! straight into operand tiles ([`tiles`]).

/// The loops of [`Trits`] for an instruction set: the generic bodies in
/// functions that are compiled for its target features. `$five` is the list for
/// formats of five trits to a byte.
macro_rules! trit_loops {
    ($features:literal, five $five:literal) => {
        #[inline(always)]
        unsafe fn fused_trits<F: super::Form, const T: usize>(
            panel: super::Panel,
            blocks: usize,
            last: usize,
            x: [*const super::XBlock; T],
            out: &mut [[f32; 16]; T],
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: super::Trits, F: super::Form, const T: usize>(
                panel: super::Panel,
                blocks: usize,
                last: usize,
                x: [*const super::XBlock; T],
                out: &mut [[f32; 16]; T],
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::fused::<V, F, T>(panel, blocks, last, x, out) }
            }
            #[target_feature(enable = $five)]
            unsafe fn go_five<V: super::Trits, F: super::Form, const T: usize>(
                panel: super::Panel,
                blocks: usize,
                last: usize,
                x: [*const super::XBlock; T],
                out: &mut [[f32; 16]; T],
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::fused::<V, F, T>(panel, blocks, last, x, out) }
            }
            // SAFETY: the caller's promise.
            unsafe {
                if F::STEPS == 5 {
                    go_five::<Self, F, T>(panel, blocks, last, x, out)
                } else {
                    go::<Self, F, T>(panel, blocks, last, x, out)
                }
            }
        }

        #[inline(always)]
        unsafe fn unpack_trits<F: super::Form>(
            panel: *const u8,
            extent: (usize, usize),
            range: std::ops::Range<usize>,
            next: *const u8,
            out: super::Unpacked,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: super::Trits, F: super::Form>(
                panel: *const u8,
                extent: (usize, usize),
                range: std::ops::Range<usize>,
                next: *const u8,
                out: super::Unpacked,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::unpack::<V, F>(panel, extent, range, next, out) }
            }
            #[target_feature(enable = $five)]
            unsafe fn go_five<V: super::Trits, F: super::Form>(
                panel: *const u8,
                extent: (usize, usize),
                range: std::ops::Range<usize>,
                next: *const u8,
                out: super::Unpacked,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::unpack::<V, F>(panel, extent, range, next, out) }
            }
            // SAFETY: the caller's promise.
            unsafe {
                if F::STEPS == 5 {
                    go_five::<Self, F>(panel, extent, range, next, out)
                } else {
                    go::<Self, F>(panel, extent, range, next, out)
                }
            }
        }

        #[inline(always)]
        unsafe fn tile_trits<const P: usize, const T: usize>(
            weights: super::Unpacked,
            blocks: usize,
            x: &[*const super::XBlock; super::MAX_TILE],
            sums: *mut f32,
            first: bool,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: super::Trits, const P: usize, const T: usize>(
                weights: super::Unpacked,
                blocks: usize,
                x: &[*const super::XBlock; super::MAX_TILE],
                sums: *mut f32,
                first: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::tile::<V, P, T>(weights, blocks, x, sums, first) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self, P, T>(weights, blocks, x, sums, first) }
        }
    };
}
use trit_loops;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use carat_tensor::packed::{Geometry, PackedLayout, geometry, grids};
use carat_tensor::{DType, Form as Stored};

use super::integers::PREFETCH;
use super::scratch::{BLOCK_COLUMNS, with_scratch};
use super::{MAX_TILE, Panel, Unpacked, Vectors, unroll8};
use crate::matmul::blocks::{BLOCK, Span, XBlock};
use crate::matmul::job::{Job, Kernel, Paths};

#[cfg(target_arch = "x86_64")]
pub(super) use tiles::kernel as tile_kernel;

/// How ternary codes are stored.
pub(super) trait Form: 'static {
    /// The format; of rows under one scale, that with the same codes.
    const DTYPE: DType;
    /// Steps of four columns in a vector of codes.
    const STEPS: usize;
    /// What the scale of the input spans, as that of the weight.
    const SPAN: Span = Span::Block;

    /// Sizes.
    const GEOMETRY: Geometry = match geometry(Self::DTYPE) {
        Some(geometry) => geometry,
        None => panic!("not a packed format"),
    };
    /// Bytes of a block's codes.
    const CODES_BYTES: usize = Self::GEOMETRY.codes_bytes();
    /// Bytes of a block's scales.
    const FIELDS_BYTES: usize = match Self::SPAN {
        Span::Block => Self::GEOMETRY.fields_bytes(),
        Span::Row => 0,
    };
    /// Vectors of codes in a block.
    const VECTORS: usize = Self::CODES_BYTES / 64;
    /// What loops here take for granted.
    const CHECK: () = {
        assert!(Self::GEOMETRY.blocks_per_chunk == 2 && Self::GEOMETRY.block_columns == BLOCK);
        assert!(Self::VECTORS <= 16 && Self::VECTORS * Self::STEPS >= BLOCK / 4);
        assert!(Self::GEOMETRY.code_offset == 1 && !Self::GEOMETRY.has_min);
    };

    /// Offsets of the codes and of the scales of a block of a panel.
    fn block_at(block: usize, blocks: usize) -> (usize, usize) {
        match Self::SPAN {
            Span::Block => Self::GEOMETRY.block_at(block, blocks),
            Span::Row => (block * Self::CODES_BYTES, 0),
        }
    }

    /// Vectors of the last block of a row, which may be short where rows have one scale.
    fn last_vectors(columns: usize) -> usize {
        match (Self::SPAN, columns % BLOCK) {
            (Span::Block, _) | (_, 0) => Self::VECTORS,
            (_, rest) => 2 * rest.div_ceil(grids::UNIT),
        }
    }
}

/// The scales of a block's rows: in the panel, or 1 where rows have one scale.
///
/// # Safety
///
/// V must be present, and the scales there.
#[inline(always)]
unsafe fn block_scales<V: Trits, F: Form>(fields: *const u8) -> V::Lanes {
    // SAFETY: the caller's promise.
    unsafe {
        match F::SPAN {
            Span::Block => V::load_f16(fields),
            Span::Row => V::splat(1.0),
        }
    }
}

/// Stores a token's results of a panel.
#[inline(always)]
fn store<F: Form>(job: &Job<'_>, token: usize, panel: usize, out: &[f32; 16], scales: &[f32; 16]) {
    match F::SPAN {
        Span::Block => job.store(token, panel, out),
        Span::Row => job.store_scaled(token, panel, out, scales),
    }
}

/// What [`store`] wants of a panel.
#[inline(always)]
fn row_scales<F: Form>(job: &Job<'_>, panel: usize) -> [f32; 16] {
    match F::SPAN {
        Span::Block => [1.0; 16],
        Span::Row => grids::row_scales(job.weight, panel),
    }
}

/// Blocks of a row, and vectors of the last.
fn extent<F: Form>(layout: &PackedLayout) -> (usize, usize) {
    const { F::CHECK };
    let columns = layout.columns();
    (columns.div_ceil(BLOCK), F::last_vectors(columns))
}

/// Four trits to a byte.
pub(super) struct TwoBits;

impl Form for TwoBits {
    const DTYPE: DType = DType::TQ2_0;
    const STEPS: usize = 4;
}

/// Five trits to a byte. The last vector has only four steps: its fifth digits
/// are zero, and meet whatever follows the input's codes in its block.
pub(super) struct FiveTrits;

impl Form for FiveTrits {
    const DTYPE: DType = DType::TQ1_0;
    const STEPS: usize = 5;
}

/// Four trits to a byte, without scales: a row has one.
pub(super) struct RowsOfTrits;

impl Form for RowsOfTrits {
    const DTYPE: DType = DType::TQ2_0;
    const STEPS: usize = 4;
    const SPAN: Span = Span::Row;
}

/// Digits to the base 3 of 0 to 80, two bits each, lowest first; zeros follow.
const fn digit_table<const N: usize>() -> [u8; N] {
    let mut table = [0; N];
    let mut n = 0;
    while n < 81 {
        table[n] = ((n % 3) | ((n / 3 % 3) << 2) | ((n / 9 % 3) << 4) | ((n / 27) << 6)) as u8;
        n += 1;
    }
    table
}

/// What an instruction set gives for ternary codes.
///
/// # Safety
///
/// As [`Vectors`]. A vector of codes has 64 bytes; an input pointer has four
/// codes for each step of the vector.
pub(super) trait Trits: Vectors {
    /// Integer sums of a block.
    type BlockSums: Copy;
    /// Most tokens of a pass straight from the weight.
    const FUSED_TOKENS: usize;

    /// Sums before the first vector.
    unsafe fn begin_block(negative_sum: i32) -> Self::BlockSums;
    /// Adds the products of a vector of codes with T inputs.
    unsafe fn add_steps<F: Form, const T: usize>(
        sums: &mut [Self::BlockSums; T],
        codes: *const u8,
        x: [*const i8; T],
    );
    /// The sums in floats (exact: below 2^15), after `add_steps` with T inputs.
    unsafe fn finish_block<F: Form, const T: usize>(
        sums: Self::BlockSums,
        negative_sum: i32,
    ) -> Self::Lanes;
    /// The codes 0 to 2 of each step of a vector; of four steps, the fifth is
    /// not used.
    unsafe fn steps<F: Form>(codes: *const u8) -> [Self::Codes; 5];

    // The loops, compiled for this instruction set.

    /// [`fused`].
    unsafe fn fused_trits<F: Form, const T: usize>(
        panel: Panel,
        blocks: usize,
        last: usize,
        x: [*const XBlock; T],
        out: &mut [[f32; 16]; T],
    );
    /// [`unpack`].
    unsafe fn unpack_trits<F: Form>(
        panel: *const u8,
        extent: (usize, usize),
        range: Range<usize>,
        next: *const u8,
        out: Unpacked,
    );
    /// [`tile`].
    unsafe fn tile_trits<const P: usize, const T: usize>(
        weights: Unpacked,
        blocks: usize,
        x: &[*const XBlock; MAX_TILE],
        sums: *mut f32,
        first: bool,
    );
}

/// Repeats a block with `$i` as the constants 0 to 15, without a loop.
macro_rules! unroll16 {
    ($i:ident => $body:block) => {
        unroll16!(@ $i $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident $body:block $($n:literal)*) => {
        $({
            #[allow(non_upper_case_globals)]
            const $i: usize = $n;
            $body
        })*
    };
}

/// The AVX-512 VNNI kernel for a ternary format.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx512_kernel(form: Stored) -> Kernel {
    // A table of 81 entries needs VBMI, which the first VNNI machines lacked.
    if form == DType::TQ1_0.into() && !std::arch::is_x86_feature_detected!("avx512vbmi") {
        return avx2_kernel(form);
    }
    kernel::<super::Avx512>(form)
}

/// The AVX-VNNI kernel for a ternary format.
#[cfg(target_arch = "x86_64")]
pub(super) fn avxvnni_kernel(form: Stored) -> Kernel {
    kernel::<super::AvxVnni>(form)
}

/// The AVX2 kernel for a ternary format.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx2_kernel(form: Stored) -> Kernel {
    kernel::<super::Avx2>(form)
}

/// The NEON kernel for a ternary format.
#[cfg(target_arch = "aarch64")]
pub(super) fn neon_kernel(form: Stored) -> Kernel {
    kernel::<super::NeonDot>(form)
}

fn kernel<V: Trits>(form: Stored) -> Kernel {
    fn of<V: Trits, F: Form>() -> Kernel {
        const { F::CHECK };
        Kernel {
            isa: V::ISA,
            paths: Paths::Both {
                least: V::LEAST_TILE,
                default: V::FUSED_TOKENS + 1,
            },
            panels: V::PANELS,
            run: run::<V, F>,
        }
    }
    match form {
        Stored::Block(DType::TQ2_0) => of::<V, TwoBits>(),
        Stored::Block(DType::TQ1_0) => of::<V, FiveTrits>(),
        Stored::Grid(_) => of::<V, RowsOfTrits>(),
        _ => unreachable!("invariant: {form} is not ternary"),
    }
}

fn run<V: Trits, F: Form>(job: &Job<'_>) {
    const { assert!(V::FUSED_TOKENS == 4 || V::FUSED_TOKENS == 8) };
    if !job.fused && job.tokens.len() >= V::LEAST_TILE {
        return run_tiled::<V, F>(job);
    }
    job.passes(V::FUSED_TOKENS, |panels, tokens| match tokens.len() {
        0 => {}
        1 => run_fused::<V, F, 1>(job, panels, tokens),
        2 => run_fused::<V, F, 2>(job, panels, tokens),
        3 => run_fused::<V, F, 3>(job, panels, tokens),
        4 => run_fused::<V, F, 4>(job, panels, tokens),
        5..=6 if V::FUSED_TOKENS == 8 => run_fused::<V, F, 6>(job, panels, tokens),
        _ if V::FUSED_TOKENS == 8 => run_fused::<V, F, 8>(job, panels, tokens),
        _ => unreachable!("invariant: a pass has at most FUSED_TOKENS tokens"),
    });
}

/// Up to T tokens; missing ones repeat the last.
fn run_fused<V: Trits, F: Form, const T: usize>(
    job: &Job<'_>,
    panels: Range<usize>,
    tokens: Range<usize>,
) {
    let count = tokens.len();
    assert!(1 <= count && count <= T);
    let (blocks, last) = extent::<F>(job.weight.layout());
    let x = std::array::from_fn(|t| {
        let token = tokens.start + t.min(count - 1);
        job.x.blocks(F::SPAN, token).as_ptr()
    });
    let end = job.weight.bytes().as_ptr_range().end;
    let mut out = [[0.0; 16]; T];
    for panel in panels {
        let at = job.weight.panel(panel).as_ptr();
        // SAFETY: this kernel was chosen for a machine that has V. The panel
        // has `blocks` blocks, and so has each token, since `matmul` asserted
        // that the columns agree.
        unsafe { V::fused_trits::<F, T>(Panel { at, end }, blocks, last, x, &mut out) };
        let scales = row_scales::<F>(job, panel);
        for (t, out) in out[..count].iter().enumerate() {
            store::<F>(job, tokens.start + t, panel, out, &scales);
        }
    }
}

/// One panel for a few tokens, straight from the packed bytes.
///
/// # Safety
///
/// V must be present; `panel` and each of `x` must have `blocks` blocks, the last one of
/// the panel only `last` vectors.
#[inline(always)]
unsafe fn fused<V: Trits, F: Form, const T: usize>(
    panel: Panel,
    blocks: usize,
    last: usize,
    x: [*const XBlock; T],
    out: &mut [[f32; 16]; T],
) {
    // SAFETY: the caller's promise: all blocks are in the panel and in `x`.
    // Prefetched addresses are inside the weight.
    unsafe {
        let mut acc = [V::zero(); T];
        let mut at = panel.at;
        let mut x = x;
        let mut left = blocks;
        while left > 0 {
            let count = if left < 2 { left } else { 2 };
            let fields = at.wrapping_add(count * F::CODES_BYTES);
            let rest = panel.end as usize - at as usize;
            let inside = rest > PREFETCH + 2 * (F::CODES_BYTES + F::FIELDS_BYTES);
            let ahead = if inside { PREFETCH } else { 0 };
            V::prefetch(fields.wrapping_add(ahead));
            for i in 0..count {
                let codes = at.wrapping_add(i * F::CODES_BYTES);
                let mut sums = [V::begin_block(0); T];
                for t in 0..T {
                    sums[t] = V::begin_block((*x[t]).negative_sum);
                }
                let is_short = F::SPAN == Span::Row && left - i == 1 && last < F::VECTORS;
                if is_short {
                    for v in 0..last {
                        vector::<V, F, T>(codes, ahead, v, x, &mut sums);
                    }
                } else {
                    unroll16!(v => {
                        if v < F::VECTORS {
                            vector::<V, F, T>(codes, ahead, v, x, &mut sums);
                        }
                    });
                }
                let d = block_scales::<V, F>(fields.wrapping_add(i * F::FIELDS_BYTES));
                for t in 0..T {
                    let isum = V::finish_block::<F, T>(sums[t], (*x[t]).negative_sum);
                    let scale = V::mul(d, V::splat((*x[t]).scale));
                    acc[t] = V::fma(isum, scale, acc[t]);
                    x[t] = x[t].wrapping_add(1);
                }
            }
            at = fields.wrapping_add(count * F::FIELDS_BYTES);
            left -= count;
        }
        for t in 0..T {
            V::store_f32(out[t].as_mut_ptr(), acc[t]);
        }
    }
}

/// One vector of a block for a few tokens.
#[inline(always)]
unsafe fn vector<V: Trits, F: Form, const T: usize>(
    codes: *const u8,
    ahead: usize,
    v: usize,
    x: [*const XBlock; T],
    sums: &mut [V::BlockSums; T],
) {
    // SAFETY: `fused` passes vectors of its panel and blocks of its input.
    unsafe {
        let codes = codes.wrapping_add(v * 64);
        V::prefetch(codes.wrapping_add(ahead));
        let mut xs = [std::ptr::null(); T];
        for t in 0..T {
            xs[t] = x[t].cast::<i8>().wrapping_add(v * F::STEPS * 4);
        }
        V::add_steps::<F, T>(sums, codes, xs);
    }
}

fn run_tiled<V: Trits, F: Form>(job: &Job<'_>) {
    const { assert!(BLOCK_COLUMNS.is_multiple_of(BLOCK)) };
    let (blocks, last) = extent::<F>(job.weight.layout());
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
            for block in (0..blocks).step_by(BLOCK_COLUMNS / BLOCK) {
                let range = block..blocks.min(block + BLOCK_COLUMNS / BLOCK);
                let count = range.len();
                for p in 0..panels {
                    let panel = job.weight.panel(first_panel + p).as_ptr();
                    let (codes, _) = F::block_at(block, blocks);
                    // What this place of the scratch will hold next.
                    let next = codes + count * (F::CODES_BYTES + F::FIELDS_BYTES);
                    let next = panel.wrapping_add(next);
                    // SAFETY: this kernel was chosen for a machine that has V,
                    // the panel has these blocks, and the scratch has room for
                    // two blocks of PANELS panels.
                    unsafe {
                        let out = Unpacked {
                            codes: weights.codes.wrapping_add(p * 64),
                            scales: weights.scales.wrapping_add(p * 16),
                            mins: weights.mins,
                        };
                        V::unpack_trits::<F>(panel, (blocks, last), range.clone(), next, out);
                    }
                }
                // Where the last panel has no partner, its place holds what was
                // there before: results for it are computed and dropped.
                for tile in 0..tiles {
                    let from = tokens * tile / tiles;
                    let tile_tokens = tokens * (tile + 1) / tiles - from;
                    let sums = scratch.sums[from * width..].as_mut_ptr();
                    let mut x = [std::ptr::null(); MAX_TILE];
                    for (t, x) in x[..tile_tokens].iter_mut().enumerate() {
                        let token = job.tokens.start + from + t;
                        *x = job.x.blocks(F::SPAN, token)[block..].as_ptr();
                    }
                    // SAFETY: as above; `sums` has room for the tile's tokens
                    // (asserted), each of `x` the blocks from `block` on.
                    unsafe { some_tile::<V>(weights, count, tile_tokens, &x, sums, block == 0) };
                }
            }
            let mut scales = [[0.0; 16]; 2];
            for (p, scales) in scales[..panels].iter_mut().enumerate() {
                *scales = row_scales::<F>(job, first_panel + p);
            }
            let sums = scratch.sums.as_chunks::<16>().0;
            for (token, sums) in job.tokens.clone().zip(sums.chunks_exact(V::PANELS)) {
                for (p, sums) in sums[..panels].iter().enumerate() {
                    store::<F>(job, token, first_panel + p, sums, &scales[p]);
                }
            }
        }
    });
}

/// [`tile`] of a number of tokens that a job's cut into tiles can give.
///
/// # Safety
///
/// As [`tile`].
unsafe fn some_tile<V: Trits>(
    weights: Unpacked,
    blocks: usize,
    tokens: usize,
    x: &[*const XBlock; MAX_TILE],
    sums: *mut f32,
    first: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (V::PANELS, tokens) {
            (1, 2) => V::tile_trits::<1, 2>(weights, blocks, x, sums, first),
            (1, 3) => V::tile_trits::<1, 3>(weights, blocks, x, sums, first),
            (2, 3) => V::tile_trits::<2, 3>(weights, blocks, x, sums, first),
            (2, 4) => V::tile_trits::<2, 4>(weights, blocks, x, sums, first),
            (2, 5) => V::tile_trits::<2, 5>(weights, blocks, x, sums, first),
            (2, 6) => V::tile_trits::<2, 6>(weights, blocks, x, sums, first),
            (panels, _) => unreachable!("invariant: no tile of {tokens} tokens, {panels} panels"),
        }
    }
}

/// Unpacks a range of blocks of a panel into every PANELS-th vector of `out`,
/// and prefetches as many bytes at `next`. What a short block has not, the scratch has
/// from before: it meets zeros of the input.
///
/// # Safety
///
/// V must be present; the panel must have as many blocks as `extent` says and vectors
/// in the last, the range among them, and `out` room for it.
#[inline(always)]
unsafe fn unpack<V: Trits, F: Form>(
    panel: *const u8,
    (blocks, last): (usize, usize),
    range: Range<usize>,
    next: *const u8,
    out: Unpacked,
) {
    let Unpacked {
        mut codes,
        mut scales,
        ..
    } = out;
    let mut next = next;
    for b in range {
        let (planes, fields) = F::block_at(b, blocks);
        let vectors = if b + 1 == blocks { last } else { F::VECTORS };
        // SAFETY: the caller's promise.
        unsafe {
            let planes = panel.wrapping_add(planes);
            for v in 0..vectors {
                V::prefetch(next);
                next = next.wrapping_add(64);
                let steps = V::steps::<F>(planes.wrapping_add(v * 64));
                for (s, step) in steps.into_iter().enumerate().take(F::STEPS) {
                    if v * F::STEPS + s < BLOCK / 4 {
                        V::store(codes, step);
                        codes = codes.wrapping_add(V::PANELS * 64);
                    }
                }
            }
            V::store_f32(scales, block_scales::<V, F>(panel.wrapping_add(fields)));
            scales = scales.wrapping_add(V::PANELS * 16);
        }
    }
}

/// `P` unpacked panels (`P` is `V::PANELS`) for T tokens: adds `blocks` blocks
/// to `sums`, `[token][P][16]`, or starts them if `first`.
///
/// # Safety
///
/// V must be present; there must be that many blocks in `weights` and in the
/// first T of `x`, and `T` tokens in `sums`.
#[inline(always)]
unsafe fn tile<V: Trits, const P: usize, const T: usize>(
    weights: Unpacked,
    blocks: usize,
    x: &[*const XBlock; MAX_TILE],
    sums: *mut f32,
    first: bool,
) {
    const { assert!(T <= MAX_TILE) };
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
        let Unpacked { codes, scales, .. } = weights;
        let (mut codes, mut scales) = (codes, scales);
        for _ in 0..blocks {
            let mut isums = [[V::begin(0); P]; T];
            for t in 0..T {
                isums[t] = [V::begin((*xs[t]).negative_sum); P];
            }
            for eighth in 0..8 {
                unroll8!(s => {
                    let mut w = [V::load(codes); P];
                    for p in 1..P {
                        w[p] = V::load(codes.wrapping_add(p * 64));
                    }
                    codes = codes.wrapping_add(P * 64);
                    for t in 0..T {
                        let at = xs[t].cast::<i8>().wrapping_add(eighth * 32 + 4 * s);
                        let input = V::input(at);
                        for p in 0..P {
                            isums[t][p] = V::step(isums[t][p], s, s == 7, 2, w[p], input);
                        }
                    }
                });
            }
            for p in 0..P {
                let d = V::load_f32(scales.wrapping_add(p * 16));
                for t in 0..T {
                    let isum = V::finish(isums[t][p], (*xs[t]).negative_sum, 2);
                    let scale = V::mul(d, V::splat((*xs[t]).scale));
                    acc[t][p] = V::fma(isum, scale, acc[t][p]);
                }
            }
            scales = scales.wrapping_add(P * 16);
            for t in 0..T {
                xs[t] = xs[t].wrapping_add(1);
            }
        }
        for t in 0..T {
            for p in 0..P {
                V::store_f32(sums.wrapping_add((t * P + p) * 16), acc[t][p]);
            }
        }
    }
}
