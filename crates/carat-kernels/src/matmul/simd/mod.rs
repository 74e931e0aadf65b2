//! Vector kernels: one body for all instruction sets and formats.
//!
//! [`Vectors`] is what an instruction set gives (16 rows at a time, whatever
//! its registers' width), [`Form`](forms::Form) how a format's block is read.
//! [`integers`] and [`floats`] hold the loops, generic over both. Everything is
//! `#[inline(always)]` up to a few `#[target_feature]` functions per
//! instruction set, so that all of it is compiled for that set.

/// The loops of [`Vectors`] for an instruction set: each is the generic body in
/// a function of its own that is compiled for the given target features, once
/// per number of tokens that callers ask for.
macro_rules! loops {
    ($features:literal, panels $panels:literal, tiles $tiles:tt, float_tiles $float_tiles:tt) => {
        #[inline(always)]
        unsafe fn fused<F: super::forms::Form<Self>, const T: usize>(
            panel: super::Panel,
            blocks: usize,
            x: [*const super::XGroup; T],
            out: &mut [[f32; 16]; T],
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, F: super::forms::Form<V>, const T: usize>(
                panel: super::Panel,
                blocks: usize,
                x: [*const super::XGroup; T],
                out: &mut [[f32; 16]; T],
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::integers::fused::<V, F, T>(panel, blocks, x, out) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self, F, T>(panel, blocks, x, out) }
        }

        #[inline(always)]
        unsafe fn unpack<F: super::forms::Form<Self>>(
            panel: *const u8,
            blocks: usize,
            range: std::ops::Range<usize>,
                next: *const u8,
            out: super::Unpacked,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, F: super::forms::Form<V>>(
                panel: *const u8,
                blocks: usize,
                range: std::ops::Range<usize>,
                next: *const u8,
                out: super::Unpacked,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::integers::unpack::<V, F>(panel, blocks, range, next, out) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self, F>(panel, blocks, range, next, out) }
        }

        unsafe fn tile<C: super::forms::Class>(
            weights: super::Unpacked,
            columns: usize,
            tokens: usize,
            x: &[*const super::XGroup; super::MAX_TILE],
            sums: *mut f32,
            first: bool,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, C: super::forms::Class, const T: usize>(
                weights: super::Unpacked,
                columns: usize,
                x: &[*const super::XGroup; super::MAX_TILE],
                sums: *mut f32,
                first: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    super::integers::tile::<V, C, $panels, T>(weights, columns, x, sums, first)
                }
            }
            super::loops!(@ tokens $tiles T => {
                // SAFETY: the caller's promise.
                unsafe { go::<Self, C, T>(weights, columns, x, sums, first) }
            })
        }

        #[inline(always)]
        unsafe fn decode<F: super::forms::Form<Self>>(
            panel: *const u8,
            blocks: usize,
            range: std::ops::Range<usize>,
            out: *mut f32,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, F: super::forms::Form<V>>(
                panel: *const u8,
                blocks: usize,
                range: std::ops::Range<usize>,
                out: *mut f32,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::floats::decode::<V, F>(panel, blocks, range, out) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self, F>(panel, blocks, range, out) }
        }

        #[inline(always)]
        unsafe fn convert<L: super::floats::Load<Self>>(
            from: *const u8,
            columns: usize,
            to: *mut f32,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, L: super::floats::Load<V>>(
                from: *const u8,
                columns: usize,
                to: *mut f32,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::floats::convert::<V, L>(from, columns, to) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self, L>(from, columns, to) }
        }

        unsafe fn float_tile<L: super::floats::Load<Self>>(
            weights: *const u8,
            columns: usize,
            tokens: usize,
            x: &[*const f32; super::MAX_TILE],
            sums: *mut f32,
            first: bool,
                ahead: usize,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, L: super::floats::Load<V>, const T: usize>(
                weights: *const u8,
                columns: usize,
                x: &[*const f32; super::MAX_TILE],
                sums: *mut f32,
                first: bool,
                ahead: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::floats::tile::<V, L, T>(weights, columns, x, sums, first, ahead) }
            }
            super::loops!(@ tokens $float_tiles T => {
                // SAFETY: the caller's promise.
                unsafe { go::<Self, L, T>(weights, columns, x, sums, first, ahead) }
            })
        }

        #[inline(always)]
        unsafe fn expand(
            bits: usize,
            from: *const u8,
            units: usize,
            table: *const u8,
            to: *mut u8,
            stride: usize,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors>(
                bits: usize,
                from: *const u8,
                units: usize,
                table: *const u8,
                to: *mut u8,
                stride: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::grids::expand::<V>(bits, from, units, table, to, stride) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self>(bits, from, units, table, to, stride) }
        }

        #[inline(always)]
        unsafe fn fields(
            fields: &super::grids::Fields,
            column: usize,
            groups: usize,
            group_columns: usize,
            out: super::Unpacked,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors>(
                fields: &super::grids::Fields,
                column: usize,
                groups: usize,
                group_columns: usize,
                out: super::Unpacked,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::grids::fields::<V>(fields, column, groups, group_columns, out) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self>(fields, column, groups, group_columns, out) }
        }

        unsafe fn small_tile<C: super::forms::Class>(
            weights: super::Unpacked,
            columns: usize,
            tokens: usize,
            x: &[*const super::XGroup; super::MAX_TILE],
            sums: *mut f32,
            first: bool,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, C: super::forms::Class, const T: usize>(
                weights: super::Unpacked,
                columns: usize,
                x: &[*const super::XGroup; super::MAX_TILE],
                sums: *mut f32,
                first: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    super::integers::tile::<V, C, $panels, T>(weights, columns, x, sums, first)
                }
            }
            super::loops!(@ tokens [1 2] T => {
                // SAFETY: the caller's promise.
                unsafe { go::<Self, C, T>(weights, columns, x, sums, first) }
            })
        }

        #[inline(always)]
        unsafe fn values(
            values: super::grids::Values,
            tables: &super::grids::Tables,
            fields: &super::grids::Fields,
            columns: std::ops::Range<usize>,
            codes: *const u8,
            out: *mut f32,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors>(
                values: super::grids::Values,
                tables: &super::grids::Tables,
                fields: &super::grids::Fields,
                columns: std::ops::Range<usize>,
                codes: *const u8,
                out: *mut f32,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    super::grids::values::<V>(values, tables, fields, columns, codes, out)
                }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self>(values, tables, fields, columns, codes, out) }
        }

        unsafe fn quad_tile(
            weights: *const f32,
            steps: usize,
            tokens: usize,
            x: &[*const f32; super::MAX_TILE],
            sums: *mut f32,
            first: bool,
        ) {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors, const T: usize>(
                weights: *const f32,
                steps: usize,
                x: &[*const f32; super::MAX_TILE],
                sums: *mut f32,
                first: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe { super::grids::quad_tile::<V, T>(weights, steps, x, sums, first) }
            }
            super::loops!(@ tokens $float_tiles T => {
                // SAFETY: the caller's promise.
                unsafe { go::<Self, T>(weights, steps, x, sums, first) }
            })
        }

        #[inline(always)]
        unsafe fn float_finish(sums: *const f32) -> [f32; 16] {
            #[target_feature(enable = $features)]
            unsafe fn go<V: Vectors>(sums: *const f32) -> [f32; 16] {
                // SAFETY: the caller's promise.
                unsafe { super::floats::finish::<V>(sums) }
            }
            // SAFETY: the caller's promise.
            unsafe { go::<Self>(sums) }
        }
    };
    // `$body` with `$t` as each of the constants, chosen by `$count`.
    (@ $count:ident [$($n:literal)*] $t:ident => $body:expr) => {
        match $count {
            $($n => {
                const $t: usize = $n;
                $body
            })*
            _ => unreachable!("invariant: no tile of {} tokens", $count),
        }
    };
}
use loops;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
#[allow(clippy::needless_range_loop)] // loops over arrays of registers, in step
mod floats;
mod forms;
#[allow(clippy::needless_range_loop)] // loops over arrays of registers, in step
mod grids;
#[allow(clippy::needless_range_loop)] // loops over arrays of registers, in step
mod integers;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scratch;
#[allow(clippy::needless_range_loop)] // loops over arrays of registers, in step
mod trits;

use carat_tensor::{DType, Form};

use super::job::Kernel;
use super::prepared::{Need, XGroup};
use crate::Isa;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
#[cfg(target_arch = "x86_64")]
pub(super) use avxvnni::AvxVnni;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::NeonDot;
use trits::Trits;

/// Most tokens of a tile.
const MAX_TILE: usize = 6;

/// A panel and the part of a weight that follows it.
#[derive(Clone, Copy)]
struct Panel {
    at: *const u8,
    /// End of the weight: no prefetch beyond it.
    end: *const u8,
}

/// Unpacked panels in the scratch: codes `[step][P][64]`, scales and minima
/// `[group][P][16]`.
#[derive(Clone, Copy)]
struct Unpacked {
    codes: *mut u8,
    scales: *mut f32,
    mins: *mut f32,
}

/// What an instruction set gives: values of 16 rows.
///
/// # Safety
///
/// All functions need the instruction set to be present; those with pointers
/// need as many readable (writable) elements there as they say. No alignment.
trait Vectors: Copy + 'static {
    /// 64 codes of a step, or 16 dwords.
    type Codes: Copy;
    /// Four codes of the input, for all rows.
    type Input: Copy;
    /// Integer sums on the way.
    type Sums: Copy;
    /// 16 floats.
    type Lanes: Copy;

    /// The instruction set.
    const ISA: Isa;
    /// Panels that a tile of many tokens takes together.
    const PANELS: usize;
    /// Tokens of such a tile.
    const TILE_TOKENS: usize;

    /// Fewest tokens of a tile: what an even cut of more than TILE_TOKENS can give.
    const LEAST_TILE: usize = Self::TILE_TOKENS.div_ceil(2);
    /// Tokens of a tile of floats.
    const FLOAT_TOKENS: usize;
    /// The rows of [`halves`](Vectors::halves), four columns of each.
    const QUAD_ROWS: [usize; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    /// 64 bytes.
    unsafe fn load(at: *const u8) -> Self::Codes;
    /// 64 bytes.
    unsafe fn store(at: *mut u8, codes: Self::Codes);
    /// And with a byte.
    unsafe fn and(codes: Self::Codes, mask: u8) -> Self::Codes;
    /// `low | (high & mask)`.
    unsafe fn or_masked(low: Self::Codes, high: Self::Codes, mask: u8) -> Self::Codes;
    /// Exclusive or with a byte.
    unsafe fn xor(codes: Self::Codes, mask: u8) -> Self::Codes;
    /// The byte that each code has in its table, zero where the code is above 15.
    /// There are four tables of 16 bytes, for four rows each.
    unsafe fn lookup(tables: *const u8, codes: Self::Codes) -> Self::Codes;
    /// The floats of fp16 whose low and high bytes these are.
    unsafe fn halves(low: Self::Codes, high: Self::Codes) -> [Self::Lanes; 4];
    /// Shifts 16-bit lanes.
    unsafe fn shift_right(codes: Self::Codes, count: i32) -> Self::Codes;
    /// Shifts 16-bit lanes.
    unsafe fn shift_left(codes: Self::Codes, count: i32) -> Self::Codes;
    /// Byte `index` of each dword as a float.
    unsafe fn byte_lanes(codes: Self::Codes, index: i32) -> Self::Lanes;

    /// Sums before the first step. `start` is what the offset of the codes takes
    /// away; it is added here or in `finish`.
    unsafe fn begin(start: i32) -> Self::Sums;
    /// Four input codes, to all rows.
    unsafe fn input(at: *const i8) -> Self::Input;
    /// Adds step `s`, `last` of its group. Codes have `bits` bits.
    unsafe fn step(
        sums: Self::Sums,
        s: usize,
        last: bool,
        bits: u32,
        codes: Self::Codes,
        input: Self::Input,
    ) -> Self::Sums;
    /// The sums in floats (exact: below 2^24).
    unsafe fn finish(sums: Self::Sums, start: i32, bits: u32) -> Self::Lanes;

    unsafe fn zero() -> Self::Lanes;
    unsafe fn splat(value: f32) -> Self::Lanes;
    /// Four floats, again and again.
    unsafe fn splat4(at: *const f32) -> Self::Lanes;
    /// 16 fp32.
    unsafe fn load_f32(at: *const f32) -> Self::Lanes;
    /// 16 fp32.
    unsafe fn store_f32(at: *mut f32, lanes: Self::Lanes);
    /// 16 fp16.
    unsafe fn load_f16(at: *const u8) -> Self::Lanes;
    /// 16 bfloat16.
    unsafe fn load_bf16(at: *const u8) -> Self::Lanes;
    /// 16 signed bytes.
    unsafe fn load_i8(at: *const u8) -> Self::Lanes;
    unsafe fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    unsafe fn sub(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    unsafe fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes;
    /// Fetches a line from memory into the L2 cache: more can be under way there
    /// than in the L1 cache, whose fetching from L2 is left to the hardware.
    unsafe fn prefetch(at: *const u8);

    // The loops, compiled for this instruction set.

    /// [`integers::fused`].
    unsafe fn fused<F: forms::Form<Self>, const T: usize>(
        panel: Panel,
        blocks: usize,
        x: [*const XGroup; T],
        out: &mut [[f32; 16]; T],
    );
    /// [`integers::unpack`].
    unsafe fn unpack<F: forms::Form<Self>>(
        panel: *const u8,
        blocks: usize,
        range: std::ops::Range<usize>,
        next: *const u8,
        out: Unpacked,
    );
    /// [`integers::tile`] of a number of tokens.
    unsafe fn tile<C: forms::Class>(
        weights: Unpacked,
        columns: usize,
        tokens: usize,
        x: &[*const XGroup; MAX_TILE],
        sums: *mut f32,
        first: bool,
    );
    /// [`floats::decode`].
    unsafe fn decode<F: forms::Form<Self>>(
        panel: *const u8,
        blocks: usize,
        range: std::ops::Range<usize>,
        out: *mut f32,
    );
    /// [`floats::convert`].
    unsafe fn convert<L: floats::Load<Self>>(from: *const u8, columns: usize, to: *mut f32);
    /// [`floats::tile`] of a number of tokens.
    unsafe fn float_tile<L: floats::Load<Self>>(
        weights: *const u8,
        columns: usize,
        tokens: usize,
        x: &[*const f32; MAX_TILE],
        sums: *mut f32,
        first: bool,
        ahead: usize,
    );
    /// [`grids::expand`].
    unsafe fn expand(
        bits: usize,
        from: *const u8,
        units: usize,
        table: *const u8,
        to: *mut u8,
        stride: usize,
    );
    /// [`grids::fields`].
    unsafe fn fields(
        fields: &grids::Fields,
        column: usize,
        groups: usize,
        group_columns: usize,
        out: Unpacked,
    );
    /// [`integers::tile`] of one token or two.
    unsafe fn small_tile<C: forms::Class>(
        weights: Unpacked,
        columns: usize,
        tokens: usize,
        x: &[*const XGroup; MAX_TILE],
        sums: *mut f32,
        first: bool,
    );
    /// [`grids::values`].
    unsafe fn values(
        values: grids::Values,
        tables: &grids::Tables,
        fields: &grids::Fields,
        columns: std::ops::Range<usize>,
        codes: *const u8,
        out: *mut f32,
    );
    /// [`grids::quad_tile`] of a number of tokens.
    unsafe fn quad_tile(
        weights: *const f32,
        steps: usize,
        tokens: usize,
        x: &[*const f32; MAX_TILE],
        sums: *mut f32,
        first: bool,
    );
    /// [`floats::finish`].
    unsafe fn float_finish(sums: *const f32) -> [f32; 16];
}

/// Repeats a block with `$i` as the constants 0 to 7, without a loop.
macro_rules! unroll8 {
    ($i:ident => $body:block) => {
        unroll8!(@ $i $body 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident $body:block $($n:literal)*) => {
        $({
            #[allow(non_upper_case_globals)]
            const $i: usize = $n;
            $body
        })*
    };
}
use unroll8;

/// The kernel of an instruction set for a format.
fn kernel<V: Trits>(form: Form, float: bool) -> Kernel {
    use forms::*;
    let dtype = match form {
        carat_tensor::Form::Block(dtype) => dtype,
        carat_tensor::Form::Grid(grid) => return grids::kernel::<V>(grid, float),
    };
    macro_rules! of {
        ($form:ty) => {
            if float {
                floats::kernel_of_codes::<V, $form>()
            } else {
                integers::kernel::<V, $form>()
            }
        };
    }
    match dtype {
        DType::F32 => floats::kernel::<V, floats::F32>(),
        DType::F16 => floats::kernel::<V, floats::F16>(),
        DType::BF16 => floats::kernel::<V, floats::BF16>(),
        DType::Q4_0 => of!(Q4_0),
        DType::Q4_1 => of!(Q4_1),
        DType::Q5_0 => of!(Q5_0),
        DType::Q5_1 => of!(Q5_1),
        DType::Q8_0 => of!(Q8_0),
        DType::Q4_K => of!(Q4_K),
        DType::Q5_K => of!(Q5_K),
        DType::Q6_K => of!(Q6_K),
        // With integers these have kernels of their own.
        DType::TQ1_0 => floats::kernel_of_codes::<V, TQ1_0>(),
        DType::TQ2_0 => floats::kernel_of_codes::<V, TQ2_0>(),
        DType::I8G16 => of!(I8G16),
        DType::I8G32 => of!(I8G32),
        _ => unreachable!("invariant: a packed {dtype} does not exist"),
    }
}

/// The kernel of a machine with tiles for a format and a form of the input;
/// `tiles` says that blocks are there as tiles.
#[cfg(target_arch = "x86_64")]
pub(super) fn amx_kernel(form: Form, need: Need, tiles: bool) -> Kernel {
    match need {
        Need::Blocks if tiles => trits::tile_kernel(form),
        _ => avx512_kernel(form, need),
    }
}

/// The AVX-512 VNNI kernel for a format and a form of the input.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx512_kernel(form: Form, need: Need) -> Kernel {
    match need {
        Need::Blocks | Need::Rows => trits::avx512_kernel(form),
        _ => kernel::<Avx512>(form, need == Need::Floats),
    }
}

/// The AVX-VNNI kernel for a format. Floats have nothing to gain from it.
#[cfg(target_arch = "x86_64")]
pub(super) fn avxvnni_kernel(form: Form, need: Need) -> Kernel {
    match need {
        Need::Blocks | Need::Rows => trits::avxvnni_kernel(form),
        Need::Groups => kernel::<AvxVnni>(form, false),
        Need::Floats => avx2_kernel(form, need),
    }
}

/// The AVX2 kernel for a format and a form of the input.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx2_kernel(form: Form, need: Need) -> Kernel {
    match need {
        Need::Blocks | Need::Rows => trits::avx2_kernel(form),
        _ => kernel::<Avx2>(form, need == Need::Floats),
    }
}

/// The NEON kernel for a format and a form of the input.
#[cfg(target_arch = "aarch64")]
pub(super) fn neon_kernel(form: Form, need: Need) -> Kernel {
    match need {
        Need::Blocks | Need::Rows => trits::neon_kernel(form),
        _ => kernel::<NeonDot>(form, need == Need::Floats),
    }
}
