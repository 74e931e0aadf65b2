//! AArch64 with dot products: four registers hold the codes of a step, or 16
//! sums.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Vectors;

/// Advanced SIMD with the dot product extension.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct NeonDot;

/// Adds to each lane the products of its four bytes: `sdot`, whose intrinsic is
/// not stable.
#[inline(always)]
pub(super) unsafe fn dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller has the extension; registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Four fp16 in fp32: `fcvtl`, whose intrinsic needs a type that is not stable.
#[inline(always)]
unsafe fn widen(halves: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: part of Advanced SIMD; registers only.
    unsafe {
        asm!(
            "fcvtl {out:v}.4s, {halves:v}.4h",
            out = lateout(vreg) out,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// Each of four registers.
macro_rules! four {
    ($i:ident => $body:expr) => {
        [
            {
                const $i: usize = 0;
                $body
            },
            {
                const $i: usize = 1;
                $body
            },
            {
                const $i: usize = 2;
                $body
            },
            {
                const $i: usize = 3;
                $body
            },
        ]
    };
}
pub(super) use four;

/// Each function is a few instructions; all have the same reason.
macro_rules! ops {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg: $type),*) $(-> $out)? {
                // SAFETY: the instruction set is present and the pointers have
                // the elements that `Vectors` asks for.
                unsafe { $body }
            }
        )*
    };
}

impl Vectors for NeonDot {
    type Codes = [uint8x16_t; 4];
    type Input = int8x16_t;
    type Sums = [int32x4_t; 4];
    type Lanes = [float32x4_t; 4];

    const ISA: crate::Isa = crate::Isa::NeonDot;
    // 12 integer and 12 float accumulators, 4 codes and an input: 29 of 32.
    const PANELS: usize = 1;
    const TILE_TOKENS: usize = 3;
    // 16 accumulators, 4 weights and an input.
    const FLOAT_TOKENS: usize = 1;

    ops! {
        fn load(at: *const u8) -> [uint8x16_t; 4] {
            four!(I => vld1q_u8(at.wrapping_add(16 * I)))
        }
        fn store(at: *mut u8, codes: [uint8x16_t; 4]) {
            four!(I => vst1q_u8(at.wrapping_add(16 * I), codes[I]));
        }
        fn and(codes: [uint8x16_t; 4], mask: u8) -> [uint8x16_t; 4] {
            let mask = vdupq_n_u8(mask);
            four!(I => vandq_u8(codes[I], mask))
        }
        fn or_masked(low: [uint8x16_t; 4], high: [uint8x16_t; 4], mask: u8) -> [uint8x16_t; 4] {
            let mask = vdupq_n_u8(mask);
            four!(I => vorrq_u8(low[I], vandq_u8(high[I], mask)))
        }
        fn xor(codes: [uint8x16_t; 4], mask: u8) -> [uint8x16_t; 4] {
            let mask = vdupq_n_u8(mask);
            four!(I => veorq_u8(codes[I], mask))
        }
        fn lookup(tables: *const u8, codes: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
            let tables = Self::load(tables);
            four!(I => vqtbl1q_u8(tables[I], codes[I]))
        }
        fn halves(low: [uint8x16_t; 4], high: [uint8x16_t; 4]) -> [[float32x4_t; 4]; 4] {
            four!(I => {
                let a = vreinterpretq_u16_u8(vzip1q_u8(low[I], high[I]));
                let b = vreinterpretq_u16_u8(vzip2q_u8(low[I], high[I]));
                [
                    widen(vget_low_u16(a)),
                    widen(vget_high_u16(a)),
                    widen(vget_low_u16(b)),
                    widen(vget_high_u16(b)),
                ]
            })
        }
        fn shift_right(codes: [uint8x16_t; 4], count: i32) -> [uint8x16_t; 4] {
            let count = vdupq_n_s16(-count as i16);
            four!(I => vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(codes[I]), count)))
        }
        fn shift_left(codes: [uint8x16_t; 4], count: i32) -> [uint8x16_t; 4] {
            let count = vdupq_n_s16(count as i16);
            four!(I => vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(codes[I]), count)))
        }
        fn byte_lanes(codes: [uint8x16_t; 4], index: i32) -> [float32x4_t; 4] {
            let (count, mask) = (vdupq_n_s32(-8 * index), vdupq_n_u32(255));
            four!(I => {
                let dwords = vshlq_u32(vreinterpretq_u32_u8(codes[I]), count);
                vcvtq_f32_u32(vandq_u32(dwords, mask))
            })
        }
        fn begin(_start: i32) -> [int32x4_t; 4] { [vdupq_n_s32(0); 4] }
        fn input(at: *const i8) -> int8x16_t {
            vreinterpretq_s8_s32(vdupq_n_s32(at.cast::<i32>().read_unaligned()))
        }
        fn step(
            sums: [int32x4_t; 4],
            _s: usize,
            _last: bool,
            bits: u32,
            codes: [uint8x16_t; 4],
            input: int8x16_t
        ) -> [int32x4_t; 4] {
            // Products are of signed bytes: 8-bit codes lose their offset of 128.
            let flip = vdupq_n_u8(if bits == 8 { 128 } else { 0 });
            four!(I => dot(sums[I], vreinterpretq_s8_u8(veorq_u8(codes[I], flip)), input))
        }
        fn finish(sums: [int32x4_t; 4], start: i32, bits: u32) -> [float32x4_t; 4] {
            let start = vdupq_n_s32(if bits == 8 { 0 } else { start });
            four!(I => vcvtq_f32_s32(vaddq_s32(sums[I], start)))
        }
        fn zero() -> [float32x4_t; 4] { [vdupq_n_f32(0.0); 4] }
        fn splat(value: f32) -> [float32x4_t; 4] { [vdupq_n_f32(value); 4] }
        fn splat4(at: *const f32) -> [float32x4_t; 4] { [vld1q_f32(at); 4] }
        fn load_f32(at: *const f32) -> [float32x4_t; 4] {
            four!(I => vld1q_f32(at.wrapping_add(4 * I)))
        }
        fn store_f32(at: *mut f32, lanes: [float32x4_t; 4]) {
            four!(I => vst1q_f32(at.wrapping_add(4 * I), lanes[I]));
        }
        fn load_f16(at: *const u8) -> [float32x4_t; 4] {
            four!(I => widen(vreinterpret_u16_u8(vld1_u8(at.wrapping_add(8 * I)))))
        }
        fn load_bf16(at: *const u8) -> [float32x4_t; 4] {
            four!(I => {
                let halves = vreinterpret_u16_u8(vld1_u8(at.wrapping_add(8 * I)));
                vreinterpretq_f32_u32(vshll_n_u16::<16>(halves))
            })
        }
        fn load_i8(at: *const u8) -> [float32x4_t; 4] {
            let bytes = vld1q_s8(at.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
        fn add(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
            four!(I => vaddq_f32(a[I], b[I]))
        }
        fn sub(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
            four!(I => vsubq_f32(a[I], b[I]))
        }
        fn mul(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
            four!(I => vmulq_f32(a[I], b[I]))
        }
        fn fma(a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
            four!(I => vfmaq_f32(c[I], a[I], b[I]))
        }
        fn prefetch(at: *const u8) {
            asm!("prfm pldl1keep, [{}]", in(reg) at, options(readonly, nostack, preserves_flags));
        }
    }

    super::loops!("neon", panels 1, tiles [2 3], float_tiles [1]);
}
