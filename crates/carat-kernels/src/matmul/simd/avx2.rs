//! AVX2: two registers hold the codes of a step, or 16 sums.

use std::arch::x86_64::*;

use super::Vectors;

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct Avx2;

/// Integer sums of 8 rows: products of pairs in 16 bits until they might
/// overflow, then in 32.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct Sums {
    wide: [__m256i; 2],
    narrow: [__m256i; 2],
}

/// Steps whose pair sums fit in 16 bits together: a pair is at most
/// 2 · (2^bits - 1) · 127. (8-bit codes are made signed: 2 · 128 · 127.)
const fn narrow_steps(bits: u32) -> usize {
    match bits {
        0..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Each function is a few instructions; all have the same reason.
macro_rules! ops {
    ($(fn $name:ident($($arg:tt: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
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

impl Vectors for Avx2 {
    type Codes = [__m256i; 2];
    type Input = __m256i;
    type Sums = Sums;
    type Lanes = [__m256; 2];

    const ISA: crate::Isa = crate::Isa::Avx2;
    // 6 integer and 6 float accumulators, 2 codes and an input: 15 of 16.
    const PANELS: usize = 1;
    const TILE_TOKENS: usize = 3;
    // 8 accumulators, 2 weights and an input.
    const FLOAT_TOKENS: usize = 1;

    ops! {
        fn load(at: *const u8) -> [__m256i; 2] {
            [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.wrapping_add(32).cast())]
        }
        fn store(at: *mut u8, [a, b]: [__m256i; 2]) {
            _mm256_storeu_si256(at.cast(), a);
            _mm256_storeu_si256(at.wrapping_add(32).cast(), b);
        }
        fn and([a, b]: [__m256i; 2], mask: u8) -> [__m256i; 2] {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]
        }
        fn or_masked(low: [__m256i; 2], high: [__m256i; 2], mask: u8) -> [__m256i; 2] {
            let [a, b] = Self::and(high, mask);
            [_mm256_or_si256(low[0], a), _mm256_or_si256(low[1], b)]
        }
        fn xor([a, b]: [__m256i; 2], mask: u8) -> [__m256i; 2] {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_xor_si256(a, mask), _mm256_xor_si256(b, mask)]
        }
        fn lookup(tables: *const u8, [a, b]: [__m256i; 2]) -> [__m256i; 2] {
            // Codes above 15 get the top bit, which gives zero.
            let bias = _mm256_set1_epi8(0x70);
            let [low, high] = Self::load(tables);
            [
                _mm256_shuffle_epi8(low, _mm256_adds_epu8(a, bias)),
                _mm256_shuffle_epi8(high, _mm256_adds_epu8(b, bias)),
            ]
        }
        fn halves(low: [__m256i; 2], high: [__m256i; 2]) -> [[__m256; 2]; 4] {
            // Of four rows each: the first two, the last two.
            let a = _mm256_unpacklo_epi8(low[0], high[0]);
            let b = _mm256_unpackhi_epi8(low[0], high[0]);
            let c = _mm256_unpacklo_epi8(low[1], high[1]);
            let d = _mm256_unpackhi_epi8(low[1], high[1]);
            let (first, second) = (
                |v| _mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                |v| _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(v)),
            );
            [
                [first(a), first(b)],
                [second(a), second(b)],
                [first(c), first(d)],
                [second(c), second(d)],
            ]
        }
        fn shift_right([a, b]: [__m256i; 2], count: i32) -> [__m256i; 2] {
            let count = _mm_cvtsi32_si128(count);
            [_mm256_srl_epi16(a, count), _mm256_srl_epi16(b, count)]
        }
        fn shift_left([a, b]: [__m256i; 2], count: i32) -> [__m256i; 2] {
            let count = _mm_cvtsi32_si128(count);
            [_mm256_sll_epi16(a, count), _mm256_sll_epi16(b, count)]
        }
        fn byte_lanes([a, b]: [__m256i; 2], index: i32) -> [__m256; 2] {
            let (count, mask) = (_mm_cvtsi32_si128(8 * index), _mm256_set1_epi32(255));
            [
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(a, count), mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(b, count), mask)),
            ]
        }
        fn begin(_start: i32) -> Sums {
            let zero = _mm256_setzero_si256();
            Sums { wide: [zero; 2], narrow: [zero; 2] }
        }
        fn input(at: *const i8) -> __m256i {
            _mm256_set1_epi32(at.cast::<i32>().read_unaligned())
        }
        fn step(
            sums: Sums,
            s: usize,
            last: bool,
            bits: u32,
            codes: [__m256i; 2],
            input: __m256i
        ) -> Sums {
            let mut sums = sums;
            let mut half = 0;
            while half < 2 {
                let pairs = if bits == 8 {
                    // |w| · sign(w) x, so that the first factor is unsigned.
                    let w = _mm256_xor_si256(codes[half], _mm256_set1_epi8(-128));
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(input, w))
                } else {
                    _mm256_maddubs_epi16(codes[half], input)
                };
                let narrow = if s.is_multiple_of(narrow_steps(bits)) {
                    pairs
                } else {
                    _mm256_add_epi16(sums.narrow[half], pairs)
                };
                if last || (s + 1).is_multiple_of(narrow_steps(bits)) {
                    let wide = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
                    sums.wide[half] = _mm256_add_epi32(sums.wide[half], wide);
                }
                sums.narrow[half] = narrow;
                half += 1;
            }
            sums
        }
        fn finish(sums: Sums, start: i32, bits: u32) -> [__m256; 2] {
            let [a, b] = sums.wide;
            if bits == 8 {
                // Signed by `step`: no offset is left.
                return [_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)];
            }
            // Added here, since there are no registers for it before.
            let start = _mm256_set1_epi32(start);
            [
                _mm256_cvtepi32_ps(_mm256_add_epi32(a, start)),
                _mm256_cvtepi32_ps(_mm256_add_epi32(b, start)),
            ]
        }
        fn zero() -> [__m256; 2] { [_mm256_setzero_ps(); 2] }
        fn splat(value: f32) -> [__m256; 2] { [_mm256_set1_ps(value); 2] }
        fn splat4(at: *const f32) -> [__m256; 2] {
            [_mm256_broadcast_ps(&_mm_loadu_ps(at)); 2]
        }
        fn load_f32(at: *const f32) -> [__m256; 2] {
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.wrapping_add(8))]
        }
        fn store_f32(at: *mut f32, [a, b]: [__m256; 2]) {
            _mm256_storeu_ps(at, a);
            _mm256_storeu_ps(at.wrapping_add(8), b);
        }
        fn load_f16(at: *const u8) -> [__m256; 2] {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(at.wrapping_add(16).cast())),
            ]
        }
        fn load_bf16(at: *const u8) -> [__m256; 2] {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.wrapping_add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            ]
        }
        fn load_i8(at: *const u8) -> [__m256; 2] {
            let bytes = _mm_loadu_si128(at.cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
        }
        fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
        }
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
        }
        fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    super::loops!("avx2,fma,f16c", panels 1, tiles [2 3], float_tiles [1]);
}
