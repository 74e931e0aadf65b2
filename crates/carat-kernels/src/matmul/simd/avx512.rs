//! AVX-512 with VNNI: a register holds the codes of a step, or 16 sums.

use std::arch::x86_64::*;

use super::Vectors;

/// AVX-512 F, BW, VL and VNNI.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct Avx512;

/// Each function is one or two instructions; all have the same reason.
macro_rules! ops {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
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

impl Vectors for Avx512 {
    type Codes = __m512i;
    type Input = __m512i;
    type Sums = __m512i;
    type Lanes = __m512;

    const ISA: crate::Isa = crate::Isa::Avx512Vnni;
    // 12 integer and 12 float accumulators, 2 codes and an input: 27 of 32.
    const PANELS: usize = 2;
    const TILE_TOKENS: usize = 6;
    // 24 accumulators, a weight and an input.
    const FLOAT_TOKENS: usize = 6;
    // `unpack` takes the first two of each four rows, then the last two.
    const QUAD_ROWS: [usize; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

    ops! {
        fn load(at: *const u8) -> __m512i { _mm512_loadu_si512(at.cast()) }
        fn store(at: *mut u8, codes: __m512i) { _mm512_storeu_si512(at.cast(), codes) }
        fn and(codes: __m512i, mask: u8) -> __m512i {
            _mm512_and_si512(codes, _mm512_set1_epi8(mask as i8))
        }
        fn or_masked(low: __m512i, high: __m512i, mask: u8) -> __m512i {
            // a | (b & c)
            _mm512_ternarylogic_epi32::<0xf8>(low, high, _mm512_set1_epi8(mask as i8))
        }
        fn xor(codes: __m512i, mask: u8) -> __m512i {
            _mm512_xor_si512(codes, _mm512_set1_epi8(mask as i8))
        }
        fn lookup(tables: *const u8, codes: __m512i) -> __m512i {
            // Codes above 15 get the top bit, which gives zero.
            let index = _mm512_adds_epu8(codes, _mm512_set1_epi8(0x70));
            _mm512_shuffle_epi8(Self::load(tables), index)
        }
        fn halves(low: __m512i, high: __m512i) -> [__m512; 4] {
            let a = _mm512_unpacklo_epi8(low, high);
            let b = _mm512_unpackhi_epi8(low, high);
            [
                _mm512_cvtph_ps(_mm512_castsi512_si256(a)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(a)),
                _mm512_cvtph_ps(_mm512_castsi512_si256(b)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(b)),
            ]
        }
        fn shift_right(codes: __m512i, count: i32) -> __m512i {
            _mm512_srl_epi16(codes, _mm_cvtsi32_si128(count))
        }
        fn shift_left(codes: __m512i, count: i32) -> __m512i {
            _mm512_sll_epi16(codes, _mm_cvtsi32_si128(count))
        }
        fn byte_lanes(codes: __m512i, index: i32) -> __m512 {
            let dwords = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(8 * index));
            _mm512_cvtepi32_ps(_mm512_and_si512(dwords, _mm512_set1_epi32(255)))
        }
        fn begin(start: i32) -> __m512i { _mm512_set1_epi32(start) }
        fn input(at: *const i8) -> __m512i {
            _mm512_set1_epi32(at.cast::<i32>().read_unaligned())
        }
        fn step(
            sums: __m512i,
            _s: usize,
            _last: bool,
            _bits: u32,
            codes: __m512i,
            input: __m512i
        ) -> __m512i {
            _mm512_dpbusd_epi32(sums, codes, input)
        }
        fn finish(sums: __m512i, _start: i32, _bits: u32) -> __m512 { _mm512_cvtepi32_ps(sums) }
        fn zero() -> __m512 { _mm512_setzero_ps() }
        fn splat(value: f32) -> __m512 { _mm512_set1_ps(value) }
        fn splat4(at: *const f32) -> __m512 { _mm512_broadcast_f32x4(_mm_loadu_ps(at)) }
        fn load_f32(at: *const f32) -> __m512 { _mm512_loadu_ps(at) }
        fn store_f32(at: *mut f32, lanes: __m512) { _mm512_storeu_ps(at, lanes) }
        fn load_f16(at: *const u8) -> __m512 {
            _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))
        }
        fn load_bf16(at: *const u8) -> __m512 {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
        fn load_i8(at: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
        }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    super::loops!("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c", panels 2, tiles [3 4 5 6], float_tiles [1 2 3 4 5 6]);
}
