//! AVX-VNNI: two registers hold a vector of codes, dot products add up in 32 bits.

use std::arch::x86_64::*;

use super::avx2::{half_steps, input};
use super::{Form, Trits};
use crate::matmul::simd::{Avx2, AvxVnni};

impl Trits for AvxVnni {
    /// By step (modulo 4) for one token, to have enough sums in flight; else
    /// the first only.
    type BlockSums = [[__m256i; 2]; 4];
    const FUSED_TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn begin_block(negative_sum: i32) -> [[__m256i; 2]; 4] {
        // SAFETY: the instruction set is present.
        unsafe {
            let zero = [_mm256_setzero_si256(); 2];
            [[_mm256_set1_epi32(negative_sum); 2], zero, zero, zero]
        }
    }

    #[inline(always)]
    unsafe fn add_steps<F: Form, const T: usize>(
        sums: &mut [[[__m256i; 2]; 4]; T],
        codes: *const u8,
        x: [*const i8; T],
    ) {
        // SAFETY: the instruction set is present, and the pointers have what
        // `Trits` asks for.
        unsafe {
            let mut half = 0;
            while half < 2 {
                let steps = half_steps::<F>(codes.wrapping_add(32 * half));
                let mut s = 0;
                while s < F::STEPS {
                    for t in 0..T {
                        let sum = &mut sums[t][if T == 1 { s % 4 } else { 0 }][half];
                        *sum = _mm256_dpbusd_avx_epi32(*sum, steps[s], input(x[t], s));
                    }
                    s += 1;
                }
                half += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn finish_block<F: Form, const T: usize>(
        [a, b, c, d]: [[__m256i; 2]; 4],
        _negative_sum: i32,
    ) -> [__m256; 2] {
        // SAFETY: the instruction set is present.
        unsafe {
            let mut sums = a;
            if T == 1 {
                let mut half = 0;
                while half < 2 {
                    let ab = _mm256_add_epi32(a[half], b[half]);
                    sums[half] = _mm256_add_epi32(ab, _mm256_add_epi32(c[half], d[half]));
                    half += 1;
                }
            }
            [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])]
        }
    }

    #[inline(always)]
    unsafe fn steps<F: Form>(codes: *const u8) -> [[__m256i; 2]; 5] {
        // SAFETY: AVX2 is part of this instruction set.
        unsafe { <Avx2 as Trits>::steps::<F>(codes) }
    }

    super::trit_loops!("avx2,avxvnni,fma,f16c", five "avx2,avxvnni,fma,f16c");
}
