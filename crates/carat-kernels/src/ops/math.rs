//! The elementary functions, as scalars (the definition) and on lanes.

use super::simd::Simd;

/// 1.5 * 2^23: adding it rounds to an integer, which then sits in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts, so that `x - n ln 2` keeps its low bits.
const LN2_HIGH: f32 = std::f32::consts::LN_2;
const LN2_LOW: f32 = -1.904_654_3e-9;
/// Below it (ln 2^-126, rounded up) a result would be subnormal and becomes 0.
const EXP_MIN: f32 = -87.336_54;
/// Above it (ln 2^128, rounded down) a result is infinite.
const EXP_MAX: f32 = 88.722_83;

/// `q` of `exp(r) = 1 + r + r^2 q(r)`, fitted for the least relative error
/// (3.1e-9, a twentieth of half an ulp) on |r| <= ln 2 / 2; highest power first.
const EXP_Q: [f32; 5] = [
    0.001_381_453_9,
    0.008_368_745,
    0.041_668_39,
    0.166_665_21,
    0.499_999_94,
];

/// `q` of `tanh(y) = y + y^3 q(y^2)`, fitted for the least relative error
/// (4.4e-9) on |y| <= 0.625; highest power first.
const TANH_Q: [f32; 5] = [
    -0.005_701_185,
    0.020_635_819,
    -0.053_738_758,
    0.133_314_31,
    -0.333_332_8,
];
/// Where tanh goes over to its exponential form.
const TANH_SPLIT: f32 = 0.625;

/// 2 sqrt(2 / pi), and the same times 0.044715.
const GELU_LINEAR: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.071_354_814;

/// `e^x` within 1 ulp; 0 below -87.34 (no subnormal results), infinite above
/// 88.72, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let t = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let mut q = EXP_Q[0];
    for c in &EXP_Q[1..] {
        q = q.mul_add(r, *c);
    }
    let p = q.mul_add(r, 1.0).mul_add(r, 1.0);
    let scaled = f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23));
    if x.is_nan() {
        x
    } else if x < EXP_MIN {
        0.0
    } else if EXP_MAX < x {
        f32::INFINITY
    } else {
        scaled
    }
}

/// `tanh(y)`: a polynomial for |y| < 0.625, else `1 - 2 / (e^2|y| + 1)`.
#[inline(always)]
pub(crate) fn tanh(y: f32) -> f32 {
    let a = y.abs();
    let magnitude = if a < TANH_SPLIT {
        let z = a * a;
        let mut q = TANH_Q[0];
        for c in &TANH_Q[1..] {
            q = q.mul_add(z, *c);
        }
        (a * z).mul_add(q, a)
    } else {
        1.0 - 2.0 / (exp(2.0 * a) + 1.0)
    };
    magnitude.copysign(y)
}

/// `x sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as `x sigmoid(2u)`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    let u = x * (x * x).mul_add(GELU_CUBIC, GELU_LINEAR);
    x / (1.0 + exp(-u))
}

/// `cap tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

#[inline(always)]
pub(crate) fn exp_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let round = s.splat(ROUND);
    let t = s.fma(x, s.splat(std::f32::consts::LOG2_E), round);
    let n = s.sub(t, round);
    let r = s.fma(n, s.splat(-LN2_HIGH), x);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut q = s.splat(EXP_Q[0]);
    for c in &EXP_Q[1..] {
        q = s.fma(q, r, s.splat(*c));
    }
    let one = s.splat(1.0);
    let p = s.fma(s.fma(q, r, one), r, one);
    let y = s.add_to_exponent(p, t);
    let y = s.if_less(s.splat(EXP_MAX), x, s.splat(f32::INFINITY), y);
    let y = s.if_less(x, s.splat(EXP_MIN), s.splat(0.0), y);
    s.if_nan(x, x, y)
}

#[inline(always)]
fn tanh_lanes<S: Simd>(s: S, y: S::F) -> S::F {
    let a = s.abs(y);
    let z = s.mul(a, a);
    let mut q = s.splat(TANH_Q[0]);
    for c in &TANH_Q[1..] {
        q = s.fma(q, z, s.splat(*c));
    }
    let small = s.fma(s.mul(a, z), q, a);
    let (one, two) = (s.splat(1.0), s.splat(2.0));
    let e = exp_lanes(s, s.mul(two, a));
    let large = s.sub(one, s.div(two, s.add(e, one)));
    s.copy_sign(s.if_less(a, s.splat(TANH_SPLIT), small, large), y)
}

#[inline(always)]
pub(crate) fn silu_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp_lanes(s, s.neg(x))))
}

#[inline(always)]
pub(crate) fn gelu_tanh_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let inner = s.fma(s.mul(x, x), s.splat(GELU_CUBIC), s.splat(GELU_LINEAR));
    let u = s.mul(x, inner);
    s.div(x, s.add(s.splat(1.0), exp_lanes(s, s.neg(u))))
}

#[inline(always)]
pub(crate) fn softcap_lanes<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    let cap = s.splat(cap);
    s.mul(cap, tanh_lanes(s, s.div(x, cap)))
}
