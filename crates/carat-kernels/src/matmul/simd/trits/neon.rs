//! AArch64 with dot products: four registers hold a vector of codes.

use std::arch::aarch64::*;

use super::{Form, Trits, digit_table};
use crate::matmul::simd::neon::{NeonDot, dot, four};

static DIGITS: [u8; 96] = digit_table();

/// The four low digits of five trits as two-bit codes, and the fifth.
#[inline(always)]
unsafe fn digits(bytes: uint8x16_t) -> (uint8x16_t, uint8x16_t) {
    // SAFETY: the caller has Advanced SIMD; the table has 96 bytes.
    unsafe {
        let n81 = vdupq_n_u8(81);
        // Subtracting too much wraps to a large byte.
        let rest = vminq_u8(bytes, vsubq_u8(bytes, n81));
        let rest = vminq_u8(rest, vsubq_u8(rest, n81));
        let low = vld1q_u8_x4(DIGITS.as_ptr());
        let high = vld1q_u8_x2(DIGITS.as_ptr().wrapping_add(64));
        // Indices beyond a table leave what was there.
        let codes = vqtbl4q_u8(low, rest);
        let codes = vqtbx2q_u8(codes, high, vsubq_u8(rest, vdupq_n_u8(64)));
        // 0, 81 and 162 are 0, 1 and 2 in their two low bits.
        (codes, vandq_u8(vsubq_u8(bytes, rest), vdupq_n_u8(3)))
    }
}

impl Trits for NeonDot {
    type BlockSums = [int32x4_t; 4];
    const FUSED_TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn begin_block(negative_sum: i32) -> [int32x4_t; 4] {
        // SAFETY: the instruction set is present.
        unsafe { [vdupq_n_s32(negative_sum); 4] }
    }

    #[inline(always)]
    unsafe fn add_steps<F: Form, const T: usize>(
        sums: &mut [[int32x4_t; 4]; T],
        codes: *const u8,
        x: [*const i8; T],
    ) {
        // SAFETY: the instruction set is present, and the pointers have what
        // `Trits` asks for.
        unsafe {
            let steps = Self::steps::<F>(codes);
            let mut s = 0;
            while s < F::STEPS {
                for t in 0..T {
                    let x = x[t].cast::<i32>().wrapping_add(s).read_unaligned();
                    let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
                    sums[t] = four!(I => dot(sums[t][I], vreinterpretq_s8_u8(steps[s][I]), x));
                }
                s += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn finish_block<F: Form, const T: usize>(
        sums: [int32x4_t; 4],
        _negative_sum: i32,
    ) -> [float32x4_t; 4] {
        // SAFETY: the instruction set is present.
        unsafe { four!(I => vcvtq_f32_s32(sums[I])) }
    }

    #[inline(always)]
    unsafe fn steps<F: Form>(codes: *const u8) -> [[uint8x16_t; 4]; 5] {
        // SAFETY: as in `add_steps`.
        unsafe {
            let mut bytes = four!(I => vld1q_u8(codes.wrapping_add(16 * I)));
            let mut fifth = bytes;
            if F::STEPS == 5 {
                let both = four!(I => digits(bytes[I]));
                bytes = four!(I => both[I].0);
                fifth = four!(I => both[I].1);
            }
            let mask = vdupq_n_u8(3);
            [
                four!(I => vandq_u8(bytes[I], mask)),
                four!(I => vandq_u8(vshrq_n_u8::<2>(bytes[I]), mask)),
                four!(I => vandq_u8(vshrq_n_u8::<4>(bytes[I]), mask)),
                four!(I => vshrq_n_u8::<6>(bytes[I])),
                fifth,
            ]
        }
    }

    super::trit_loops!("neon", five "neon");
}
