//! AVX-512 with VNNI: a register holds a vector of codes.

use std::arch::x86_64::*;

use super::{Form, Trits, digit_table};
use crate::matmul::simd::{Avx2, Avx512};

/// Most tokens that get sums of their own for each place of a code in its
/// byte, which spares the shift: 16 of the 32 registers.
const SUMS_BY_PLACE: usize = 4;

/// 1/81 modulo 2^32: division of a multiple of 81.
const INVERSE_81: i32 = {
    let (mut inverse, mut i) = (1u32, 0);
    // Each round doubles the correct low bits.
    while i < 6 {
        inverse = inverse.wrapping_mul(2u32.wrapping_sub(81u32.wrapping_mul(inverse)));
        i += 1;
    }
    assert!(inverse.wrapping_mul(81) == 1);
    inverse as i32
};

/// The table of [`digit_table`] for two registers.
#[repr(align(64))]
struct Digits([u8; 128]);

static DIGITS: Digits = Digits(digit_table());

/// The four low digits of a vector of five trits as two-bit codes, and 81 times
/// the fifth.
#[inline(always)]
pub(super) unsafe fn digits(bytes: __m512i) -> (__m512i, __m512i) {
    // SAFETY: the caller has AVX-512 BW and VBMI.
    unsafe {
        let n81 = _mm512_set1_epi8(81);
        // Subtracting too much wraps to a large byte.
        let rest = _mm512_min_epu8(bytes, _mm512_sub_epi8(bytes, n81));
        let rest = _mm512_min_epu8(rest, _mm512_sub_epi8(rest, n81));
        let low = _mm512_load_si512(DIGITS.0.as_ptr().cast());
        let high = _mm512_load_si512(DIGITS.0.as_ptr().wrapping_add(64).cast());
        let codes = _mm512_permutex2var_epi8(low, rest, high);
        (codes, _mm512_sub_epi8(bytes, rest))
    }
}

/// Two halves as one register.
#[inline(always)]
unsafe fn join([low, high]: [__m256i; 2]) -> __m512i {
    // SAFETY: the caller has AVX-512 F.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

impl Trits for Avx512 {
    /// By place of a code in its byte (times 4 to the place), then 81 times the
    /// fifth trits'.
    type BlockSums = [__m512i; 5];
    const FUSED_TOKENS: usize = 8;

    #[inline(always)]
    unsafe fn begin_block(negative_sum: i32) -> [__m512i; 5] {
        // SAFETY: the instruction set is present.
        unsafe {
            let zero = _mm512_setzero_si512();
            [_mm512_set1_epi32(negative_sum), zero, zero, zero, zero]
        }
    }

    #[inline(always)]
    unsafe fn add_steps<F: Form, const T: usize>(
        sums: &mut [[__m512i; 5]; T],
        codes: *const u8,
        x: [*const i8; T],
    ) {
        // SAFETY: the instruction set is present, and the pointers have what
        // `Trits` asks for.
        unsafe {
            let input = |t: usize, step: usize| {
                _mm512_set1_epi32(x[t].cast::<i32>().wrapping_add(step).read_unaligned())
            };
            let mut bytes = _mm512_loadu_si512(codes.cast());
            if F::STEPS == 5 {
                let (codes, fifth) = digits(bytes);
                bytes = codes;
                for t in 0..T {
                    sums[t][4] = _mm512_dpbusd_epi32(sums[t][4], fifth, input(t, 4));
                }
            }
            let mut step = 0;
            while step < 4 {
                let mask = if T <= SUMS_BY_PLACE {
                    3u8 << (2 * step)
                } else {
                    3
                };
                let codes = _mm512_and_si512(bytes, _mm512_set1_epi8(mask as i8));
                for t in 0..T {
                    let place = if T <= SUMS_BY_PLACE { step } else { 0 };
                    sums[t][place] = _mm512_dpbusd_epi32(sums[t][place], codes, input(t, step));
                }
                if T > SUMS_BY_PLACE {
                    bytes = _mm512_srli_epi16::<2>(bytes);
                }
                step += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn finish_block<F: Form, const T: usize>(
        [a, b, c, d, fifth]: [__m512i; 5],
        _negative_sum: i32,
    ) -> __m512 {
        // SAFETY: the instruction set is present.
        unsafe {
            let mut sum = a;
            if T <= SUMS_BY_PLACE {
                // Multiples of 4, 16 and 64: the shifts are exact.
                let bc = _mm512_add_epi32(_mm512_srai_epi32::<2>(b), _mm512_srai_epi32::<4>(c));
                sum = _mm512_add_epi32(_mm512_add_epi32(sum, _mm512_srai_epi32::<6>(d)), bc);
            }
            if F::STEPS == 5 {
                let fifth = _mm512_mullo_epi32(fifth, _mm512_set1_epi32(INVERSE_81));
                sum = _mm512_add_epi32(sum, fifth);
            }
            _mm512_cvtepi32_ps(sum)
        }
    }

    #[inline(always)]
    unsafe fn steps<F: Form>(codes: *const u8) -> [__m512i; 5] {
        // SAFETY: as in `add_steps`; AVX2 is part of this instruction set.
        unsafe {
            if F::STEPS == 5 {
                // Without VBMI's table: also for machines that lack it.
                let [a, b, c, d, e] = <Avx2 as Trits>::steps::<F>(codes);
                return [join(a), join(b), join(c), join(d), join(e)];
            }
            let mask = _mm512_set1_epi8(3);
            let bytes = _mm512_loadu_si512(codes.cast());
            [
                _mm512_and_si512(bytes, mask),
                _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), mask),
                _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask),
                _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), mask),
                bytes,
            ]
        }
    }

    super::trit_loops!(
        "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c",
        five "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c"
    );
}
