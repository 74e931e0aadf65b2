//! Sixteen fp32 lanes: one AVX-512 register, or two of AVX2.
//!
//! A vector kernel is a [`Kernel`] written once over a [`Simd`] token; its
//! scalar twin is written apart, in plain Rust, and defines the result. Every
//! lane operation here is an IEEE operation (or an exact one on bits), so that
//! a kernel that follows its twin's order gives its twin's bits.

use crate::Isa;

/// Lanes of a vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// A kernel in its two forms.
pub(crate) trait Kernel: Sized {
    type Output;

    /// The definition.
    fn scalar(self) -> Self::Output;

    /// The vector form; `#[inline(always)]`, so that it is compiled for the
    /// instruction set of `simd`.
    fn vector<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs a kernel on an instruction set.
///
/// # Panics
///
/// If this machine lacks it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    assert!(isa.is_available(), "this machine lacks {isa}");
    match isa.base() {
        // SAFETY: the machine has AVX2, FMA and F16C (asserted above).
        Isa::Avx2 => unsafe { x86::Avx2::new() }.call(kernel),
        // SAFETY: the machine has AVX-512 F, BW and VL (asserted above).
        Isa::Avx512Vnni => unsafe { x86::Avx512::new() }.call(kernel),
        _ => kernel.scalar(),
    }
}

/// Runs a kernel; only the scalar form exists on this architecture.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    assert!(isa.is_available(), "this machine lacks {isa}");
    kernel.scalar()
}

/// The instruction set whose elementwise, row and attention kernels serve where
/// `isa` is asked for.
///
/// # Panics
///
/// If this machine lacks it.
pub fn kernel_isa(isa: Isa) -> Isa {
    struct Which;
    impl Kernel for Which {
        type Output = Isa;

        fn scalar(self) -> Isa {
            Isa::Scalar
        }

        #[inline(always)]
        fn vector<S: Simd>(self, _: S) -> Isa {
            S::ISA
        }
    }
    run(isa, Which)
}

/// Proof that the machine has an instruction set, and its lane operations.
///
/// The methods are safe since a token can only be made where the instruction
/// set is known to exist.
pub(crate) trait Simd: Copy + Send + Sync {
    /// Sixteen fp32 lanes.
    type F: Copy;

    /// The instruction set.
    const ISA: Isa;

    /// Whether 24 accumulators fit the register file, or 6.
    const WIDE: bool;

    /// Runs the vector form of `kernel`, compiled for this instruction set.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn store(self, to: &mut [f32; LANES], x: Self::F);
    /// Sixteen halves, widened (exact).
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    /// Rounded to nearest even.
    fn store_f16(self, to: &mut [u16; LANES], x: Self::F);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` when either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: `b` when either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn neg(self, a: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    fn copy_sign(self, magnitude: Self::F, sign: Self::F) -> Self::F;
    /// `if a < b { x } else { y }`.
    fn if_less(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// `if a is NaN { x } else { y }`.
    fn if_nan(self, a: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// Lane `l` of `x` where bit `l` of `mask` is set, else of `y`.
    fn blend(self, mask: u16, x: Self::F, y: Self::F) -> Self::F;
    /// Bit `l` tells whether the lanes `l` are equal.
    fn equal(self, a: Self::F, b: Self::F) -> u16;
    /// Adds the low 9 bits of `n`'s bit pattern to the exponent of `a`:
    /// `from_bits(bits(a) + (bits(n) << 23))`.
    fn add_to_exponent(self, a: Self::F, n: Self::F) -> Self::F;
    /// The sum of all lanes, in the order of [`sum_lanes`].
    fn sum(self, a: Self::F) -> f32;
    /// The maximum of all lanes, none of which is NaN.
    fn maximum(self, a: Self::F) -> f32;
}

/// The fixed tree of a sum over lanes: `l + (l + 8)`, then 4, 2, 1 apart.
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The scalar form of [`Simd::max`].
#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Isa, Kernel, LANES, Simd};

    /// AVX2, FMA and F16C; two registers hold the sixteen lanes.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    /// AVX-512 F, BW and VL.
    #[derive(Clone, Copy)]
    pub(super) struct Avx512(());

    impl Avx2 {
        /// # Safety
        ///
        /// The machine has AVX2, FMA and F16C.
        pub(super) unsafe fn new() -> Avx2 {
            Avx2(())
        }
    }

    impl Avx512 {
        /// # Safety
        ///
        /// The machine has AVX-512 F, BW and VL.
        pub(super) unsafe fn new() -> Avx512 {
            Avx512(())
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn call_avx2<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
        kernel.vector(simd)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
    fn call_avx512<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
        kernel.vector(simd)
    }

    impl Simd for Avx512 {
        type F = __m512;
        const ISA: Isa = Isa::Avx512Vnni;
        const WIDE: bool = true;

        #[inline(always)]
        fn call<K: Kernel>(self, kernel: K) -> K::Output {
            // SAFETY: the token proves the features.
            unsafe { call_avx512(self, kernel) }
        }
        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_set1_ps(x) }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> __m512 {
            // SAFETY: the token proves the feature; 64 bytes are borrowed.
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; LANES], x: __m512) {
            // SAFETY: the token proves the feature; 64 bytes are borrowed.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> __m512 {
            // SAFETY: the token proves the feature; 32 bytes are borrowed.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
        }
        #[inline(always)]
        fn store_f16(self, to: &mut [u16; LANES], x: __m512) {
            // SAFETY: the token proves the feature; 32 bytes are borrowed.
            unsafe {
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
                _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
            }
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        fn neg(self, a: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe {
                let sign = _mm512_set1_epi32(i32::MIN);
                _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
            }
        }
        #[inline(always)]
        fn abs(self, a: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_abs_ps(a) }
        }
        #[inline(always)]
        fn copy_sign(self, magnitude: __m512, sign: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe {
                let bit = _mm512_set1_epi32(i32::MIN);
                let m = _mm512_andnot_si512(bit, _mm512_castps_si512(magnitude));
                let s = _mm512_and_si512(bit, _mm512_castps_si512(sign));
                _mm512_castsi512_ps(_mm512_or_si512(m, s))
            }
        }
        #[inline(always)]
        fn if_less(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
        }
        #[inline(always)]
        fn if_nan(self, a: __m512, x: __m512, y: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a), y, x) }
        }
        #[inline(always)]
        fn blend(self, mask: u16, x: __m512, y: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_mask_blend_ps(mask, y, x) }
        }
        #[inline(always)]
        fn equal(self, a: __m512, b: __m512) -> u16 {
            // SAFETY: the token proves the feature.
            unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
        }
        #[inline(always)]
        fn add_to_exponent(self, a: __m512, n: __m512) -> __m512 {
            // SAFETY: the token proves the feature.
            unsafe {
                let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), shifted))
            }
        }
        #[inline(always)]
        fn sum(self, a: __m512) -> f32 {
            // SAFETY: the token proves the features (the 256-bit half is AVX2's).
            unsafe {
                let high = _mm512_castps_pd(a);
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(high));
                sum8(_mm256_add_ps(_mm512_castps512_ps256(a), high))
            }
        }
        #[inline(always)]
        fn maximum(self, a: __m512) -> f32 {
            // SAFETY: the token proves the features (the 256-bit half is AVX2's).
            unsafe {
                let high = _mm512_castps_pd(a);
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(high));
                max8(_mm256_max_ps(_mm512_castps512_ps256(a), high))
            }
        }
    }

    /// The tree of a sum from 8 lanes on.
    ///
    /// # Safety
    ///
    /// The machine has AVX.
    #[inline(always)]
    unsafe fn sum8(a: __m256) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }

    /// The tree of a maximum from 8 lanes on.
    ///
    /// # Safety
    ///
    /// The machine has AVX.
    #[inline(always)]
    unsafe fn max8(a: __m256) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }

    /// Lanes 0 to 7 and 8 to 15.
    type Pair = [__m256; 2];

    impl Simd for Avx2 {
        type F = Pair;
        const ISA: Isa = Isa::Avx2;
        const WIDE: bool = false;

        #[inline(always)]
        fn call<K: Kernel>(self, kernel: K) -> K::Output {
            // SAFETY: the token proves the features.
            unsafe { call_avx2(self, kernel) }
        }
        #[inline(always)]
        fn splat(self, x: f32) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_set1_ps(x); 2] }
        }
        #[inline(always)]
        fn load(self, x: &[f32; LANES]) -> Pair {
            let p = x.as_ptr();
            // SAFETY: the token proves the feature; 64 bytes are borrowed.
            unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; LANES], x: Pair) {
            let p = to.as_mut_ptr();
            // SAFETY: the token proves the feature; 64 bytes are borrowed.
            unsafe {
                _mm256_storeu_ps(p, x[0]);
                _mm256_storeu_ps(p.add(8), x[1]);
            }
        }
        #[inline(always)]
        fn load_f16(self, x: &[u16; LANES]) -> Pair {
            let p = x.as_ptr();
            // SAFETY: the token proves the features; 32 bytes are borrowed.
            unsafe {
                [
                    _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                    _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
                ]
            }
        }
        #[inline(always)]
        fn store_f16(self, to: &mut [u16; LANES], x: Pair) {
            let p = to.as_mut_ptr();
            // SAFETY: the token proves the features; 32 bytes are borrowed.
            unsafe {
                let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]);
                let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]);
                _mm_storeu_si128(p.cast(), low);
                _mm_storeu_si128(p.add(8).cast(), high);
            }
        }
        #[inline(always)]
        fn add(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn sub(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn mul(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn div(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                [
                    _mm256_fmadd_ps(a[0], b[0], c[0]),
                    _mm256_fmadd_ps(a[1], b[1], c[1]),
                ]
            }
        }
        #[inline(always)]
        fn max(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn min(self, a: Pair, b: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
        }
        #[inline(always)]
        fn neg(self, a: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                let sign = _mm256_set1_ps(-0.0);
                [_mm256_xor_ps(a[0], sign), _mm256_xor_ps(a[1], sign)]
            }
        }
        #[inline(always)]
        fn abs(self, a: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                let sign = _mm256_set1_ps(-0.0);
                [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
            }
        }
        #[inline(always)]
        fn copy_sign(self, magnitude: Pair, sign: Pair) -> Pair {
            let mut lanes = self.abs(magnitude);
            for (lane, sign) in lanes.iter_mut().zip(sign) {
                // SAFETY: the token proves the feature.
                unsafe {
                    let bit = _mm256_and_ps(_mm256_set1_ps(-0.0), sign);
                    *lane = _mm256_or_ps(*lane, bit);
                }
            }
            lanes
        }
        #[inline(always)]
        fn if_less(self, a: Pair, b: Pair, x: Pair, y: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                let low = _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]);
                let high = _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]);
                [
                    _mm256_blendv_ps(y[0], x[0], low),
                    _mm256_blendv_ps(y[1], x[1], high),
                ]
            }
        }
        #[inline(always)]
        fn if_nan(self, a: Pair, x: Pair, y: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                let low = _mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[0]);
                let high = _mm256_cmp_ps::<_CMP_UNORD_Q>(a[1], a[1]);
                [
                    _mm256_blendv_ps(y[0], x[0], low),
                    _mm256_blendv_ps(y[1], x[1], high),
                ]
            }
        }
        #[inline(always)]
        fn blend(self, mask: u16, x: Pair, y: Pair) -> Pair {
            // SAFETY: the token proves the feature.
            unsafe {
                let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
                let low = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask)), bits);
                let high = _mm256_and_si256(_mm256_set1_epi32(i32::from(mask >> 8)), bits);
                let low = _mm256_castsi256_ps(_mm256_cmpeq_epi32(low, bits));
                let high = _mm256_castsi256_ps(_mm256_cmpeq_epi32(high, bits));
                [
                    _mm256_blendv_ps(y[0], x[0], low),
                    _mm256_blendv_ps(y[1], x[1], high),
                ]
            }
        }
        #[inline(always)]
        fn equal(self, a: Pair, b: Pair) -> u16 {
            // SAFETY: the token proves the feature.
            unsafe {
                let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a[0], b[0]));
                let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(a[1], b[1]));
                (low | high << 8) as u16
            }
        }
        #[inline(always)]
        fn add_to_exponent(self, a: Pair, n: Pair) -> Pair {
            let mut sum = a;
            for (sum, n) in sum.iter_mut().zip(n) {
                // SAFETY: the token proves the feature.
                unsafe {
                    let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
                    let bits = _mm256_add_epi32(_mm256_castps_si256(*sum), shifted);
                    *sum = _mm256_castsi256_ps(bits);
                }
            }
            sum
        }
        #[inline(always)]
        fn sum(self, a: Pair) -> f32 {
            // SAFETY: the token proves the feature.
            unsafe { sum8(_mm256_add_ps(a[0], a[1])) }
        }
        #[inline(always)]
        fn maximum(self, a: Pair) -> f32 {
            // SAFETY: the token proves the feature.
            unsafe { max8(_mm256_max_ps(a[0], a[1])) }
        }
    }
}
