//! AVX-VNNI: AVX2 with dot products that add up in 32 bits.

use std::arch::x86_64::*;

use super::{Avx2, Vectors};

/// AVX2, FMA, F16C and AVX-VNNI.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct AvxVnni;

/// Functions that are AVX2's.
macro_rules! of_avx2 {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg: $type),*) $(-> $out)? {
                // SAFETY: AVX2 is part of this instruction set; the rest is the
                // caller's promise.
                unsafe { <Avx2 as Vectors>::$name($($arg),*) }
            }
        )*
    };
}

impl Vectors for AvxVnni {
    type Codes = [__m256i; 2];
    type Input = __m256i;
    type Sums = [__m256i; 2];
    type Lanes = [__m256; 2];

    const ISA: crate::Isa = crate::Isa::AvxVnni;
    // 6 integer and 6 float accumulators, 2 codes and an input: 15 of 16.
    const PANELS: usize = 1;
    const TILE_TOKENS: usize = 3;
    const FLOAT_TOKENS: usize = 1;

    of_avx2! {
        fn load(at: *const u8) -> [__m256i; 2];
        fn store(at: *mut u8, codes: [__m256i; 2]);
        fn and(codes: [__m256i; 2], mask: u8) -> [__m256i; 2];
        fn or_masked(low: [__m256i; 2], high: [__m256i; 2], mask: u8) -> [__m256i; 2];
        fn xor(codes: [__m256i; 2], mask: u8) -> [__m256i; 2];
        fn lookup(tables: *const u8, codes: [__m256i; 2]) -> [__m256i; 2];
        fn halves(low: [__m256i; 2], high: [__m256i; 2]) -> [[__m256; 2]; 4];
        fn shift_right(codes: [__m256i; 2], count: i32) -> [__m256i; 2];
        fn shift_left(codes: [__m256i; 2], count: i32) -> [__m256i; 2];
        fn byte_lanes(codes: [__m256i; 2], index: i32) -> [__m256; 2];
        fn input(at: *const i8) -> __m256i;
        fn zero() -> [__m256; 2];
        fn splat(value: f32) -> [__m256; 2];
        fn splat4(at: *const f32) -> [__m256; 2];
        fn load_f32(at: *const f32) -> [__m256; 2];
        fn store_f32(at: *mut f32, lanes: [__m256; 2]);
        fn load_f16(at: *const u8) -> [__m256; 2];
        fn load_bf16(at: *const u8) -> [__m256; 2];
        fn load_i8(at: *const u8) -> [__m256; 2];
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2];
        fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2];
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2];
        fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2];
        fn prefetch(at: *const u8);
    }

    #[inline(always)]
    unsafe fn begin(start: i32) -> [__m256i; 2] {
        // SAFETY: the instruction set is present.
        unsafe { [_mm256_set1_epi32(start); 2] }
    }

    #[inline(always)]
    unsafe fn step(
        [a, b]: [__m256i; 2],
        _s: usize,
        _last: bool,
        _bits: u32,
        codes: [__m256i; 2],
        input: __m256i,
    ) -> [__m256i; 2] {
        // SAFETY: the instruction set is present.
        unsafe {
            [
                _mm256_dpbusd_avx_epi32(a, codes[0], input),
                _mm256_dpbusd_avx_epi32(b, codes[1], input),
            ]
        }
    }

    #[inline(always)]
    unsafe fn finish([a, b]: [__m256i; 2], _start: i32, _bits: u32) -> [__m256; 2] {
        // SAFETY: the instruction set is present.
        unsafe { [_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)] }
    }

    super::loops!("avx2,avxvnni,fma,f16c", panels 1, tiles [2 3], float_tiles [1]);
}
