//! Inputs of products, quantized.

use carat_tensor::{DType, Form};

use crate::{Isa, Pool};

use super::blocks::{BLOCK, Line, Span, TileMap, XBlock, block_stride, quantize_row};
use super::error::require;
use super::{Crossovers, MatmulError, WeightShape, on_units, paths};

/// How activations enter products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActPrecision {
    /// Signed bytes with an fp32 scale per 32 columns, if the weight is ternary per 256
    /// or per token, as its own scales are spread (fp32 if it is of floats).
    #[default]
    Int8,
    /// Rounded to bfloat16 (ties to even).
    Bf16,
    /// As they are.
    F32,
}

/// Columns of a group of the input.
pub(super) const GROUP: usize = 32;

/// Groups whose largest magnitude is below this are zero: their scale would be
/// subnormal and its inverse overflow.
const SMALLEST: f32 = f32::from_bits(8 << 23); // 2^-119

/// A quantized group of the input: one cache line, all that kernels need of it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct XGroup {
    pub(super) codes: [i8; GROUP],
    pub(super) scale: f32,
    /// Sum of the codes in fp32, times the scale.
    pub(super) scaled_sum: f32,
    /// Negated sum of the codes times the offsets that formats have: kernels
    /// start their sums with it and have no multiplication to spare.
    negative_sums: [i32; OFFSETS.len()],
    /// Negated sums of the two halves times [`HALF_OFFSET`].
    negative_half_sums: [i32; 2],
}

const _: () = assert!(size_of::<XGroup>() == 64);

/// Code offsets of formats with groups of 32.
const OFFSETS: [i32; 4] = [1, 8, 16, 128];

/// Code offset of Q6_K; I8G16 has four times as much.
const HALF_OFFSET: i32 = 32;

impl XGroup {
    /// `-offset * Σ codes` of the group.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // vector kernels only
    #[inline(always)]
    pub(super) fn negative_sum(&self, offset: i32) -> i32 {
        match offset {
            0 => 0,
            1 => self.negative_sums[0],
            8 => self.negative_sums[1],
            16 => self.negative_sums[2],
            128 => self.negative_sums[3],
            _ => offset * self.negative_sums[0],
        }
    }

    /// `-offset * Σ codes` of a half; the offset is a multiple of 32.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // vector kernels only
    #[inline(always)]
    pub(super) fn negative_half_sum(&self, half: usize, offset: i32) -> i32 {
        debug_assert!(offset % HALF_OFFSET == 0);
        self.negative_half_sums[half] * (offset / HALF_OFFSET)
    }

    /// `Σ codes` of a half in fp32, times the scale.
    #[inline(always)]
    pub(super) fn scaled_half_sum(&self, half: usize) -> f32 {
        // Exact but for the last product: a small integer, a power of two.
        let sum = self.negative_half_sums[half] as f32 * (-1.0 / HALF_OFFSET as f32);
        sum * self.scale
    }
}

/// An input `[m, k]`, made ready for products.
///
/// Int8 codes are made per token and group of columns (256 for ternary weights,
/// all for those with a scale of rows or of the tensor, else 32; the last group may be
/// shorter), in fp32: with `a` the largest magnitude,
///
/// ```text
/// scale = a / 127        code = round_half_even(x * (127 / a))
/// ```
///
/// A group with `a < 2^-119` has scale 0 and codes 0; that of a whole token has
/// `a = 1e-5` at least. A group with a NaN or an infinity has scale NaN and codes 0, so
/// that every output it enters is NaN.
///
/// Keep it and prepare again: buffers are reused.
#[derive(Default)]
pub struct Prepared {
    precision: ActPrecision,
    crossovers: Crossovers,
    m: usize,
    k: usize,
    has: Forms,
    /// `[m, group_stride(k)]`
    groups: Vec<XGroup>,
    /// By [`Span`], `[m, block_stride(k)]`.
    blocks: [Vec<XBlock>; 2],
    /// Scales of whole tokens, `[m]`.
    token_scales: Vec<f32>,
    /// As `tile_map` says.
    tiles: Vec<Line>,
    tile_scales: Vec<f32>,
    tile_map: TileMap,
    /// `[m, float_stride(k)]`
    floats: Vec<f32>,
}

/// The forms of an input that weights can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Codes per group of 32.
    Groups,
    /// Codes per block of 256, or their tiles.
    Blocks,
    /// Codes per token.
    Rows,
    /// Floats.
    Floats,
}

/// Which forms are there.
#[derive(Clone, Copy, Debug, Default)]
struct Forms {
    groups: bool,
    /// By [`Span`].
    blocks: [bool; 2],
    tiles: bool,
    floats: bool,
}

/// Groups from one token to the next: odd, so that the same group of several
/// tokens does not fall in one set of the cache.
fn group_stride(k: usize) -> usize {
    k.div_ceil(GROUP) | 1
}

/// Floats from one token to the next: an odd number of cache lines.
fn float_stride(k: usize) -> usize {
    (k.div_ceil(16) | 1) * 16
}

/// Elements that are worth a task.
const TASK_ELEMENTS: usize = 16 << 10;

impl Prepared {
    /// An input whose products change between the paths where this table says.
    pub fn with_crossovers(crossovers: Crossovers) -> Prepared {
        Prepared {
            crossovers,
            ..Prepared::default()
        }
    }

    /// Where products with this input change between the paths.
    pub fn crossovers(&self) -> &Crossovers {
        &self.crossovers
    }

    /// Prepares `x`, `[m, k]` row-major, for weights of any format.
    ///
    /// # Errors
    ///
    /// If `x` has not `m * k` values or this machine lacks the instruction set.
    pub fn prepare(
        &mut self,
        isa: Isa,
        pool: &Pool,
        precision: ActPrecision,
        x: &[f32],
        m: usize,
        k: usize,
    ) -> Result<(), MatmulError> {
        // One of each need.
        let weights = [DType::Q8_0, DType::TQ1_0, DType::TQ2_0, DType::F32].map(Form::from);
        let mut has = self.forms(isa, precision, weights, m, k);
        has.blocks[Span::Row as usize] = precision == ActPrecision::Int8;
        self.fill(isa, pool, precision, has, x, m, k)
    }

    /// As [`prepare`](Prepared::prepare), but only what weights of these
    /// formats need: without float weights, int8 needs no copy of `x`.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Prepared::prepare); the input fits no product then.
    #[allow(clippy::too_many_arguments)] // as `prepare`
    pub fn prepare_for(
        &mut self,
        isa: Isa,
        pool: &Pool,
        precision: ActPrecision,
        weights: impl IntoIterator<Item: Into<Form>>,
        x: &[f32],
        m: usize,
        k: usize,
    ) -> Result<(), MatmulError> {
        let forms = weights.into_iter().map(Into::into);
        let has = self.forms(isa, precision, forms, m, k);
        self.fill(isa, pool, precision, has, x, m, k)
    }

    /// The forms that `m` tokens need for weights of these formats.
    fn forms(
        &self,
        isa: Isa,
        precision: ActPrecision,
        weights: impl IntoIterator<Item = Form>,
        m: usize,
        k: usize,
    ) -> Forms {
        let mut has = Forms::default();
        for form in weights {
            match need(precision, form) {
                Need::Floats => has.floats = true,
                Need::Groups => has.groups = true,
                Need::Blocks if on_units(isa, Need::Blocks) => {
                    let paths = paths(isa, form, Need::Blocks);
                    let [fused, tiled] = self.crossovers.wanted(form, k, paths, m);
                    has.blocks[Span::Block as usize] |= fused;
                    has.tiles |= tiled;
                }
                Need::Blocks => has.blocks[Span::Block as usize] = true,
                Need::Rows => has.blocks[Span::Row as usize] = true,
            }
        }
        has
    }

    #[allow(clippy::too_many_arguments)] // private form of the two above
    fn fill(
        &mut self,
        isa: Isa,
        pool: &Pool,
        precision: ActPrecision,
        has: Forms,
        x: &[f32],
        m: usize,
        k: usize,
    ) -> Result<(), MatmulError> {
        self.has = Forms::default();
        if !isa.is_available() {
            return Err(MatmulError::Isa(isa));
        }
        require("an input", m, k, x.len())?;
        self.precision = precision;
        (self.m, self.k) = (m, k);
        self.has = has;
        self.tile_map = TileMap::new(m, k);
        let (groups, blocks, floats) = (group_stride(k), block_stride(k), float_stride(k));
        fn grow<T: Clone>(buffer: &mut Vec<T>, used: bool, len: usize, fill: T) -> *mut T {
            if used && buffer.len() < len {
                buffer.resize(len, fill);
            }
            buffer.as_mut_ptr()
        }
        let [has_blocks, has_rows] = has.blocks;
        let [of_blocks, of_rows] = &mut self.blocks;
        let target = Target {
            groups: grow(&mut self.groups, has.groups, m * groups, XGroup::default()),
            blocks: grow(of_blocks, has_blocks, m * blocks, XBlock::default()),
            rows: grow(of_rows, has_rows, m * blocks, XBlock::default()),
            token_scales: grow(&mut self.token_scales, has_rows, m, 0.0),
            lines: grow(
                &mut self.tiles,
                has.tiles,
                self.tile_map.lines(),
                Line([0; 64]),
            ),
            scales: grow(
                &mut self.tile_scales,
                has.tiles,
                self.tile_map.scales(),
                0.0,
            ),
            floats: grow(&mut self.floats, has.floats, m * floats, 0.0),
        };
        if m == 0 || k == 0 {
            return Ok(());
        }
        let tasks = (m * k / TASK_ELEMENTS).clamp(1, pool.threads() * 8).min(m);
        let (target, map) = (&target, self.tile_map);
        pool.run(tasks, &|task| {
            let tokens = m * task / tasks..m * (task + 1) / tasks;
            for (token, x) in tokens.clone().zip(x[tokens.start * k..].chunks_exact(k)) {
                if has.groups {
                    // SAFETY: the buffer has `m` rows of `groups` elements or more
                    // (`grow`), tasks have disjoint tokens, and `self` is borrowed
                    // for the region.
                    let out = unsafe { row(target.groups, token, groups) };
                    quantize(isa, x, &mut out[..k.div_ceil(GROUP)]);
                }
                if has_blocks {
                    // SAFETY: as above, with rows of `blocks` elements.
                    let out = unsafe { row(target.blocks, token, blocks) };
                    quantize(isa, x, &mut out[..k.div_ceil(BLOCK)]);
                }
                if has_rows {
                    // SAFETY: as above, and one scale for each token.
                    unsafe {
                        let out = row(target.rows, token, blocks);
                        let scale = quantize_row(isa, x, out);
                        target.token_scales.add(token).write(scale);
                    }
                }
                if has.tiles {
                    // SAFETY: the buffers are as long as the map says (`grow`),
                    // and tasks have disjoint tokens.
                    unsafe { map.quantize(isa, x, token, target.lines, target.scales) };
                }
                if has.floats {
                    // SAFETY: as above, with rows of `floats` elements.
                    let out = unsafe { row(target.floats, token, floats) };
                    if precision == ActPrecision::Bf16 {
                        for (out, x) in out.iter_mut().zip(x) {
                            *out = half::bf16::from_f32(*x).to_f32();
                        }
                    } else {
                        out[..k].copy_from_slice(x);
                    }
                }
            }
        });
        Ok(())
    }

    /// Tokens, `m`.
    pub fn tokens(&self) -> usize {
        self.m
    }

    /// Columns, `k`.
    pub fn columns(&self) -> usize {
        self.k
    }

    /// How the input was prepared.
    pub fn precision(&self) -> ActPrecision {
        self.precision
    }

    /// The form that a product with a weight of this format takes.
    pub(super) fn need(&self, form: Form) -> Need {
        need(self.precision, form)
    }

    /// Whether it is there.
    pub(super) fn has(&self, need: Need) -> bool {
        match need {
            Need::Groups => self.has.groups,
            Need::Blocks => self.has.blocks[Span::Block as usize] || self.has.tiles,
            Need::Rows => self.has.blocks[Span::Row as usize],
            Need::Floats => self.has.floats,
        }
    }

    /// Whether a product with a weight of this shape goes through tiles. Where
    /// tiles and blocks are forms of their own and only one is there, it takes that.
    pub(super) fn takes_tiles(&self, isa: Isa, shape: WeightShape) -> bool {
        let need = self.need(shape.form);
        let blocks = self.has.blocks[Span::Block as usize];
        if on_units(isa, need) && self.has.tiles != blocks {
            return self.has.tiles;
        }
        self.crossovers
            .tiled(shape, paths(isa, shape.form, need), self.m)
    }

    /// The groups of a token.
    pub(super) fn groups(&self, token: usize) -> &[XGroup] {
        debug_assert!(self.has.groups && token < self.m);
        &self.groups[token * group_stride(self.k)..][..self.k.div_ceil(GROUP)]
    }

    /// The blocks of a token.
    pub(super) fn blocks(&self, span: Span, token: usize) -> &[XBlock] {
        debug_assert!(self.has.blocks[span as usize] && token < self.m);
        &self.blocks[span as usize][token * block_stride(self.k)..][..self.k.div_ceil(BLOCK)]
    }

    /// The scale of a token as a whole.
    #[inline(always)]
    pub(super) fn token_scale(&self, token: usize) -> f32 {
        debug_assert!(self.has(Need::Rows) && token < self.m);
        self.token_scales[token]
    }

    /// Tiles of codes, their scales, and where each is.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // tiles only
    pub(super) fn tiles(&self) -> (&[Line], &[f32], TileMap) {
        debug_assert!(self.has.tiles);
        (&self.tiles, &self.tile_scales, self.tile_map)
    }

    /// The values of a token.
    pub(super) fn floats(&self, token: usize) -> &[f32] {
        debug_assert!(self.has.floats && token < self.m);
        &self.floats[token * float_stride(self.k)..][..self.k]
    }
}

/// The form of the input that a weight asks for.
pub(super) fn need(precision: ActPrecision, form: Form) -> Need {
    match form {
        _ if precision != ActPrecision::Int8 => Need::Floats,
        form if !form.is_integer() => Need::Floats,
        Form::Block(DType::TQ1_0 | DType::TQ2_0) => Need::Blocks,
        form if form.is_row_of_trits() => Need::Rows,
        _ => Need::Groups,
    }
}

/// Buffers that the tasks of a region fill.
struct Target {
    groups: *mut XGroup,
    blocks: *mut XBlock,
    rows: *mut XBlock,
    token_scales: *mut f32,
    lines: *mut Line,
    scales: *mut f32,
    floats: *mut f32,
}

// SAFETY: tasks write disjoint places (see `Prepared::prepare_for`).
unsafe impl Sync for Target {}

/// A token's row of a buffer.
///
/// # Safety
///
/// The buffer must have that row, and nobody else may use it for `'a`.
unsafe fn row<'a, T>(buffer: *mut T, token: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(buffer.add(token * len), len) }
}

/// A run of `N` columns under one scale.
pub(super) trait Run<const N: usize> {
    fn quantize(x: &[f32; N], out: &mut Self);
}

/// Calls `$plain`, which is inlined, compiled for the instruction set.
macro_rules! for_isa {
    ($isa:expr, fn $name:ident[$($generics:tt)*]($($arg:ident: $type:ty),*) $(-> $out:ty)? $plain:block) => {{
        #[inline(always)]
        fn $name<$($generics)*>($($arg: $type),*) $(-> $out)? $plain
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        fn avx512<$($generics)*>($($arg: $type),*) $(-> $out)? { $name($($arg),*) }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2<$($generics)*>($($arg: $type),*) $(-> $out)? { $name($($arg),*) }
        match $isa.base() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                assert!($isa.is_available());
                // SAFETY: this machine has the ISA (asserted).
                unsafe { avx512($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                assert!($isa.is_available());
                // SAFETY: as above.
                unsafe { avx2($($arg),*) }
            }
            _ => $name($($arg),*),
        }
    }};
}

/// Quantizes one token; columns beyond the last are zero.
pub(super) fn quantize<const N: usize, R: Run<N>>(isa: Isa, x: &[f32], out: &mut [R]) {
    for_isa!(isa, fn plain[const N: usize, R: Run<N>](x: &[f32], out: &mut [R]) {
        let (whole, rest) = x.as_chunks::<N>();
        for (x, out) in whole.iter().zip(&mut *out) {
            R::quantize(x, out);
        }
        if !rest.is_empty() {
            let mut x = [0.0; N];
            x[..rest.len()].copy_from_slice(rest);
            R::quantize(&x, &mut out[whole.len()]);
        }
    });
}

/// Codes of a block, zeros beyond the last column, under a scale that is given by its
/// inverse (not a number makes all codes zero), and the sum of the codes.
pub(super) fn quantize_under(isa: Isa, x: &[f32], inverse: f32, codes: &mut [i8; BLOCK]) -> i32 {
    for_isa!(isa, fn plain[](x: &[f32], inverse: f32, codes: &mut [i8; BLOCK]) -> i32 {
        let mut rest = [0.0; BLOCK];
        let x = match <&[f32; BLOCK]>::try_from(x) {
            Ok(x) => x,
            Err(_) => {
                rest[..x.len()].copy_from_slice(x);
                &rest
            }
        };
        let [a, b] = codes_under(x, inverse, codes);
        a + b
    })
}

/// The largest magnitude; not finite if a value is not.
pub(super) fn largest(isa: Isa, x: &[f32]) -> f32 {
    for_isa!(isa, fn plain[](x: &[f32]) -> f32 { largest_of(x) })
}

#[inline(always)]
fn largest_of(x: &[f32]) -> f32 {
    // Magnitudes of floats order like their bits; NaN is above infinity.
    let largest = |max: u32, x: &f32| max.max(x.to_bits() & 0x7fff_ffff);
    f32::from_bits(x.iter().fold(0, largest))
}

impl Run<GROUP> for XGroup {
    #[inline(always)]
    fn quantize(x: &[f32; GROUP], out: &mut XGroup) {
        let Quantized { scale, sums } = quantize_codes(x, &mut out.codes);
        let sum = sums[0] + sums[1];
        out.scale = scale;
        // NaN where the scale is: 0 times NaN.
        out.scaled_sum = sum as f32 * scale;
        out.negative_sums = OFFSETS.map(|offset| -sum * offset);
        out.negative_half_sums = sums.map(|sum| -sum * HALF_OFFSET);
    }
}

/// Scale of a quantized run and the sums of the codes of its halves.
pub(super) struct Quantized {
    pub(super) scale: f32,
    pub(super) sums: [i32; 2],
}

/// Quantizes a run of columns under one scale, as [`Prepared`] says.
#[inline(always)]
pub(super) fn quantize_codes<const N: usize>(x: &[f32; N], codes: &mut [i8; N]) -> Quantized {
    let largest = largest_of(x);
    if !largest.is_finite() || largest < SMALLEST {
        *codes = [0; N];
        return Quantized {
            scale: if largest < SMALLEST { 0.0 } else { f32::NAN },
            sums: [0; 2],
        };
    }
    Quantized {
        scale: largest / 127.0,
        sums: codes_under(x, 127.0 / largest, codes),
    }
}

/// Codes under the inverse of a scale, and the sums of their halves. Not a number
/// makes all of them zero.
#[inline(always)]
fn codes_under<const N: usize>(x: &[f32; N], inverse: f32, codes: &mut [i8; N]) -> [i32; 2] {
    if inverse.is_nan() {
        *codes = [0; N];
        return [0; 2];
    }
    // Adding 1.5 * 2^23 leaves the integer nearest to `v` (ties to even, the
    // rounding mode of the addition) in the low bits. |v| <= 127.00002.
    const SHIFT: f32 = 12_582_912.0;
    let mut sums = [0i32; 2];
    let halves = x.chunks_exact(N / 2).zip(codes.chunks_exact_mut(N / 2));
    for ((x, codes), sum) in halves.zip(&mut sums) {
        for (x, q) in x.iter().zip(codes) {
            let code = (x * inverse + SHIFT).to_bits() as i32 - SHIFT.to_bits() as i32;
            *q = code as i8;
            *sum += code;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized(isa: Isa, x: &[f32]) -> Vec<XGroup> {
        let mut out = vec![XGroup::default(); x.len().div_ceil(GROUP)];
        quantize(isa, x, &mut out);
        out
    }

    #[test]
    fn codes_are_nearest_and_sums_add_up() {
        let x: Vec<f32> = (0..80)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03)
            .collect();
        for isa in Isa::available() {
            let groups = quantized(isa, &x);
            for (x, g) in x.chunks(GROUP).zip(&groups) {
                let a = x.iter().fold(0f32, |a, x| a.max(x.abs()));
                assert_eq!(g.scale, a / 127.0);
                for (&x, &q) in x.iter().zip(&g.codes) {
                    assert_eq!(f32::from(q), (x * (127.0 / a)).round_ties_even());
                }
                assert!(g.codes[x.len()..].iter().all(|&q| q == 0));
                let sum: i32 = g.codes.iter().map(|&q| i32::from(q)).sum();
                let low: i32 = g.codes[..16].iter().map(|&q| i32::from(q)).sum();
                for offset in [0, 1, 8, 16, 128, 7] {
                    assert_eq!(g.negative_sum(offset), -sum * offset);
                }
                assert_eq!(g.scaled_sum, sum as f32 * g.scale);
                for (half, sum) in [low, sum - low].into_iter().enumerate() {
                    assert_eq!(g.negative_half_sum(half, 32), -sum * 32);
                    assert_eq!(g.negative_half_sum(half, 128), -sum * 128);
                    assert_eq!(g.scaled_half_sum(half), sum as f32 * g.scale);
                }
            }
        }
    }

    #[test]
    fn ties_go_to_even_and_extremes_to_127() {
        let mut x = [0.0; 32];
        x[..6].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, -2.5, 126.5]);
        for isa in Isa::available() {
            let g = &quantized(isa, &x)[0];
            assert_eq!(g.codes[..6], [127, -127, 0, 2, -2, 126]);
        }
    }

    #[test]
    fn special_groups() {
        for isa in Isa::available() {
            for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
                let mut group = [1.0; 32];
                group[7] = x;
                let g = &quantized(isa, &group)[0];
                assert!(g.scale.is_nan() && g.scaled_sum.is_nan());
                assert_eq!(g.codes, [0; 32]);
            }
            for x in [0.0, -0.0, 1e-40, SMALLEST.next_down()] {
                assert_eq!(quantized(isa, &[x; 32])[0], XGroup::default());
            }
            for x in [SMALLEST, f32::MAX] {
                let g = &quantized(isa, &[x; 32])[0];
                assert!(g.scale.is_normal());
                assert_eq!(g.codes, [127; 32]);
            }
        }
    }
}
