//! AVX2: two registers hold a vector of codes.

use std::arch::x86_64::*;

use super::{Form, Trits};
use crate::matmul::simd::Avx2;

/// Digits to the base 3 of 0 to 8, two bits each.
const TWO_DIGITS: [u8; 16] = {
    let mut table = [0; 16];
    let mut n = 0;
    while n < 9 {
        table[n] = ((n % 3) | ((n / 3) << 2)) as u8;
        n += 1;
    }
    table
};

/// The codes 0 to 2 of each step of half a vector.
#[inline(always)]
pub(super) unsafe fn half_steps<F: Form>(codes: *const u8) -> [__m256i; 5] {
    // SAFETY: the caller has AVX2, and 32 bytes at `codes`.
    unsafe {
        let mask = _mm256_set1_epi8(3);
        let mut bytes = _mm256_loadu_si256(codes.cast());
        let mut fifth = bytes;
        if F::STEPS == 5 {
            (bytes, fifth) = digits(bytes);
            // 0, 81 and 162 are 0, 1 and 2 in their two low bits.
            fifth = _mm256_and_si256(fifth, mask);
        }
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16::<2>(bytes), mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
            _mm256_and_si256(_mm256_srli_epi16::<6>(bytes), mask),
            fifth,
        ]
    }
}

/// The four low digits of five trits as two-bit codes, and 81 times the fifth.
#[inline(always)]
unsafe fn digits(bytes: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller has AVX2.
    unsafe {
        let n81 = _mm256_set1_epi8(81);
        // Subtracting too much wraps to a large byte.
        let rest = _mm256_min_epu8(bytes, _mm256_sub_epi8(bytes, n81));
        let rest = _mm256_min_epu8(rest, _mm256_sub_epi8(rest, n81));
        // rest / 9 = rest * 57 >> 9 for 0 to 80; even and odd bytes apart.
        let even = _mm256_and_si256(rest, _mm256_set1_epi16(255));
        let odd = _mm256_srli_epi16::<8>(rest);
        let n57 = _mm256_set1_epi16(57);
        let even = _mm256_srli_epi16::<9>(_mm256_mullo_epi16(even, n57));
        let odd = _mm256_srli_epi16::<9>(_mm256_mullo_epi16(odd, n57));
        let ninths = _mm256_or_si256(even, _mm256_slli_epi16::<8>(odd));
        // 9 q = 8 q + q, below 256: no carries between bytes.
        let nines = _mm256_add_epi8(_mm256_slli_epi16::<3>(ninths), ninths);
        let low = _mm256_sub_epi8(rest, nines);
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(TWO_DIGITS.as_ptr().cast()));
        let high = _mm256_slli_epi16::<4>(_mm256_shuffle_epi8(table, ninths));
        let codes = _mm256_or_si256(_mm256_shuffle_epi8(table, low), high);
        (codes, _mm256_sub_epi8(bytes, rest))
    }
}

/// Four input codes, in every lane.
#[inline(always)]
pub(super) unsafe fn input(x: *const i8, step: usize) -> __m256i {
    // SAFETY: the caller has AVX2, and the step's codes at `x`.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().wrapping_add(step).read_unaligned()) }
}

impl Trits for Avx2 {
    /// Sums of pairs in 16 bits: 64 steps of at most 2 · 2 · 127 are below 2^15.
    type BlockSums = [__m256i; 2];
    const FUSED_TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn begin_block(_negative_sum: i32) -> [__m256i; 2] {
        // SAFETY: the instruction set is present.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    unsafe fn add_steps<F: Form, const T: usize>(
        sums: &mut [[__m256i; 2]; T],
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
                        let pairs = _mm256_maddubs_epi16(steps[s], input(x[t], s));
                        sums[t][half] = _mm256_add_epi16(sums[t][half], pairs);
                    }
                    s += 1;
                }
                half += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn finish_block<F: Form, const T: usize>(
        sums: [__m256i; 2],
        negative_sum: i32,
    ) -> [__m256; 2] {
        // SAFETY: the instruction set is present.
        unsafe {
            let start = _mm256_set1_epi32(negative_sum);
            let ones = _mm256_set1_epi16(1);
            let [a, b] = sums;
            let (a, b) = (_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
            [
                _mm256_cvtepi32_ps(_mm256_add_epi32(a, start)),
                _mm256_cvtepi32_ps(_mm256_add_epi32(b, start)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn steps<F: Form>(codes: *const u8) -> [[__m256i; 2]; 5] {
        // SAFETY: as in `add_steps`.
        unsafe {
            let [a, b, c, d, e] = half_steps::<F>(codes);
            let [f, g, h, i, j] = half_steps::<F>(codes.wrapping_add(32));
            [[a, f], [b, g], [c, h], [d, i], [e, j]]
        }
    }

    super::trit_loops!("avx2,fma,f16c", five "avx2,fma,f16c");
}
