use proptest::prelude::*;

use super::math;
use super::*;
use crate::{Isa, Pool};

/// Lengths around the sixteen lanes and the tasks' chunks.
const LENGTHS: [usize; 14] = [
    0, 1, 2, 15, 16, 17, 31, 33, 64, 100, 4095, 4097, 16_385, 40_000,
];

/// What is written after an output must stay.
const CANARY: f32 = 1234.5;

fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            // About normal, over a few octaves.
            let u = (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            u * ((x & 7) as f32)
        })
        .collect()
}

/// Values at which elementwise functions change course.
fn special() -> Vec<f32> {
    let mut values = vec![
        0.0,
        f32::MIN_POSITIVE,
        1e-45,
        f32::INFINITY,
        f32::NAN,
        f32::MAX,
        0.625,
        87.336_54,
        87.336_55,
        88.0,
        88.722_83,
        88.722_84,
        103.0,
        1e10,
        1e20,
    ];
    values.extend(values.clone().into_iter().map(|v| -v));
    values
}

/// Equal bits, or both NaN (a NaN's payload is not defined).
#[track_caller]
fn assert_same(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let same = g.to_bits() == e.to_bits() || (g.is_nan() && e.is_nan());
        assert!(
            same,
            "{what}: element {i} of {}: {g:e}, not {e:e}",
            got.len()
        );
    }
}

/// Runs `op` on a vector instruction set and on its scalar twin, with canaries
/// around the output, and compares.
#[track_caller]
fn same_in_place(isa: Isa, x: &[f32], what: &str, op: impl Fn(Isa, &Pool, &mut [f32])) {
    let mut expected = x.to_vec();
    op(Isa::Scalar, &Pool::new(1), &mut expected);
    for threads in [1, 3] {
        // Off by one element, so that no vector is aligned.
        let mut got = vec![CANARY; x.len() + 2];
        got[1..=x.len()].copy_from_slice(x);
        op(isa, &Pool::new(threads), &mut got[1..=x.len()]);
        assert_same(&got[1..=x.len()], &expected, what);
        assert_eq!(
            (got[0], got[x.len() + 1]),
            (CANARY, CANARY),
            "{what}: canary"
        );
    }
}

/// Distance of `got` from the exact value, in units of the last place of an
/// fp32 number of that size.
fn ulps(got: f32, exact: f64) -> f64 {
    let exponent = exact.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (f64::from(got) - exact).abs() / (exponent - 23.0).exp2()
}

/// Every `step`th positive and negative fp32 number up to a magnitude.
fn sweep(most: f32, step: usize) -> impl Iterator<Item = f32> {
    (0..=most.to_bits())
        .step_by(step)
        .map(f32::from_bits)
        .flat_map(|x| [x, -x])
}

#[test]
fn exp_is_within_one_ulp() {
    let mut worst = 0.0f64;
    for x in sweep(90.0, 997) {
        let exact = f64::from(x).exp();
        let got = math::exp(x);
        if exact < 2f64.powi(-126) {
            assert_eq!(got, 0.0, "exp({x}) is below the normal numbers");
        } else if exact > f64::from(f32::MAX) {
            assert_eq!(got, f32::INFINITY, "exp({x})");
        } else {
            worst = worst.max(ulps(got, exact));
        }
    }
    // Half an ulp of the last fma, an ulp of 1 + q r scaled by |r| <= 0.35, and
    // the reduction's 0.25 ulp: 0.85 to one binade below. A result that is
    // never worse than half an ulp would mean that the sweep saw nothing.
    assert!((0.5..1.0).contains(&worst), "{worst} ulp");
}

#[test]
fn exp_at_its_ends() {
    assert_eq!(math::exp(0.0), 1.0);
    assert_eq!(math::exp(-0.0), 1.0);
    assert_eq!(math::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(math::exp(f32::INFINITY), f32::INFINITY);
    assert!(math::exp(f32::NAN).is_nan());
    assert!(math::exp(-87.336_54) >= f32::MIN_POSITIVE);
    assert_eq!(math::exp(-87.336_56), 0.0);
    assert!(math::exp(88.722_83).is_finite());
    assert_eq!(math::exp(88.722_84), f32::INFINITY);
}

#[test]
fn tanh_is_within_two_ulps() {
    let mut worst = 0.0f64;
    for x in sweep(100.0, 997) {
        let exact = f64::from(x).tanh();
        let got = math::tanh(x);
        // Subnormal arguments are exact; `ulps` measures normal numbers.
        worst = worst.max(ulps(got, exact));
        assert!(got.abs() <= 1.0 && got.is_sign_negative() == x.is_sign_negative());
    }
    // Large branch: 2/(e+1) <= 0.45 carries exp's ulp, a sum's and a
    // division's half (2 ulps of 0.45, which are 1 of tanh >= 0.55), then half
    // an ulp of the difference.
    assert!((0.5..2.0).contains(&worst), "{worst} ulp");
    assert!(math::tanh(f32::NAN).is_nan());
    assert_eq!(math::tanh(f32::INFINITY), 1.0);
}

/// Relative error of `x / (1 + e^-t)` in units of 2^-24: 1 ulp (2 units) of the
/// exponential, half an ulp each of the sum and the quotient, and the error of
/// `t` itself times |t| (`units_of_t` of it).
fn sigmoid_bound(t: f64, units_of_t: f64) -> f64 {
    (2.0 + 1.0 + 1.0 + units_of_t * t.abs()) * 2f64.powi(-24)
}

/// What is lost below the normal numbers: where the exponential overflows,
/// `x / (1 + e^-t)` becomes 0 instead of at most `|x| 2^-128`; and a subnormal
/// result is rounded to a multiple of 2^-149.
fn underflow(x: f64) -> f64 {
    1.01 * x.abs() * 2f64.powi(-128) + 2f64.powi(-149)
}

#[test]
fn silu_is_close_to_f64() {
    for x in sweep(100.0, 9973) {
        let t = f64::from(x);
        let exact = t / (1.0 + (-t).exp());
        let error = (f64::from(math::silu(x)) - exact).abs();
        // The argument is exact.
        let bound = sigmoid_bound(t, 0.0) * exact.abs() + underflow(t);
        assert!(error <= bound, "silu({x}): {error:e} > {bound:e}");
    }
}

#[test]
fn gelu_is_close_to_f64() {
    for x in sweep(80.0, 9973) {
        let t = f64::from(x);
        let u = (2.0 / std::f64::consts::PI).sqrt() * (t + 0.044715 * t * t * t);
        let exact = 0.5 * t * (1.0 + u.tanh());
        // tanh(u) near -1 cancels in f64 too; the sigmoid form does not.
        let exact_sigmoid = t / (1.0 + (-2.0 * u).exp());
        assert!((exact - exact_sigmoid).abs() <= 1e-14 * t.abs());
        let error = (f64::from(math::gelu_tanh(x)) - exact_sigmoid).abs();
        // 2u = x (c1 + c2 x^2): x^2, the fma and the product round (1 unit
        // each), and both constants are rounded (1 unit).
        let bound = sigmoid_bound(2.0 * u, 4.0) * exact_sigmoid.abs() + underflow(t);
        assert!(error <= bound, "gelu({x}): {error:e} > {bound:e}");
    }
}

#[test]
fn every_half_widens_exactly_and_rounds_back() {
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for isa in Isa::available() {
        let mut floats = vec![0.0; halves.len()];
        f32_from_f16(isa, &halves, &mut floats);
        let mut back = vec![0; halves.len()];
        f16_from_f32(isa, &floats, &mut back);
        for (&bits, (&float, &back)) in halves.iter().zip(floats.iter().zip(&back)) {
            let (exponent, fraction) = (bits >> 10 & 31, bits & 1023);
            let sign = if bits >> 15 == 0 { 1.0 } else { -1.0f32 };
            if exponent == 31 && fraction != 0 {
                assert!(float.is_nan());
                assert!(half::f16::from_bits(back).is_nan());
                continue;
            }
            let magnitude = match exponent {
                31 => f32::INFINITY,
                0 => f32::from(fraction) * 2f32.powi(-24),
                e => (1024.0 + f32::from(fraction)) * 2f32.powi(i32::from(e) - 25),
            };
            assert_eq!(float.to_bits(), (sign * magnitude).to_bits(), "{bits:#06x}");
            assert_eq!(back, bits, "{isa}");
        }
    }
}

#[test]
fn argmax_takes_the_first_of_equals_and_no_nan() {
    let inf = f32::INFINITY;
    let nan = f32::NAN;
    for isa in Isa::available() {
        let at = |x: &[f32]| argmax(isa, x);
        assert_eq!(at(&[]), None);
        assert_eq!(at(&[nan; 40]), None);
        assert_eq!(at(&[-inf; 40]), Some(0));
        assert_eq!(at(&[nan, -inf, nan]), Some(1));
        assert_eq!(at(&[-0.0, 0.0]), Some(0));
        assert_eq!(at(&[1.0, inf, nan, inf]), Some(1));
        // The same maximum in several lanes and vectors.
        for first in [0, 1, 15, 16, 17, 63, 64, 70, 129] {
            let mut x = vec![-1.0; 131];
            x[first] = 3.0;
            x[130] = 3.0;
            assert_eq!(at(&x), Some(first), "{isa}");
            x[first] = nan;
            assert_eq!(at(&x), Some(130), "{isa}");
        }
    }
}

/// `x / sqrt(mean x^2 + eps) * w` in f64.
fn rms_norm_f64(x: &[f32], w: &[f32], offset: f32, eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter()
        .zip(w)
        .map(|(&x, &w)| f64::from(x) * inverse * (f64::from(w) + f64::from(offset)))
        .collect()
}

#[test]
fn rms_norm_is_close_to_f64() {
    for k in [1, 16, 100, 4096] {
        for offset in [0.0, 1.0] {
            let (x, w) = (random(3 * k, 1), random(k, 2));
            let mut out = vec![0.0; 3 * k];
            rms_norm(Isa::Scalar, &Pool::new(1), &x, &w, offset, 1e-5, &mut out);
            for (x, out) in x.chunks(k).zip(out.chunks(k)) {
                for (got, exact) in out.iter().zip(rms_norm_f64(x, &w, offset, 1e-5)) {
                    // k/16 fmas and 4 sums in the mean (halved by the root), then
                    // division, addition, root, division and two products;
                    // w + offset rounds relative to itself.
                    let steps = (k / 16 + 5) as f64 / 2.0 + 7.0;
                    let bound = steps * 2f64.powi(-24) * exact.abs() + 1e-37;
                    assert!((f64::from(*got) - exact).abs() <= bound);
                }
            }
        }
    }
}

#[test]
fn rope_keeps_the_tail_and_the_gaps() {
    for isa in Isa::available() {
        let rope = Rope {
            heads: 2,
            head_dim: 10,
            rotary_dim: 6,
            row_stride: 23,
        };
        // A quarter turn: (a, b) becomes (-b, a).
        let mut x: Vec<f32> = (0..23 + 20).map(|i| i as f32).collect();
        let before = x.clone();
        let (cos, sin) = ([0.0; 6], [1.0; 6]);
        rope_rotate(isa, &Pool::new(1), rope, &mut x, &cos, &sin);
        for row in [0, 23] {
            for head in [0, 10] {
                for i in 0..10 {
                    let at = row + head + i;
                    let expected = match i {
                        0..3 => -before[at + 3],
                        3..6 => before[at - 3],
                        _ => before[at],
                    };
                    assert_eq!(x[at], expected);
                }
            }
        }
        assert_eq!(x[20..23], before[20..23]);
    }
}

/// One suite for each instruction set: bits of the scalar twin.
macro_rules! suite {
    ($name:ident, $isa:expr) => {
        mod $name {
            use super::*;

            const ISA: Isa = $isa;

            /// Says that nothing was tested on a machine that lacks the set.
            fn skip() -> bool {
                let lacks = ISA > Isa::best();
                if lacks {
                    // Past the capture of passing tests.
                    use std::io::Write as _;
                    let _ = writeln!(std::io::stderr(), "SKIPPED: this machine lacks {ISA}");
                }
                lacks
            }

            #[test]
            fn elementwise() {
                if skip() {
                    return;
                }
                for len in LENGTHS {
                    let (x, y) = (random(len, 7), random(len, 8));
                    check_elementwise(ISA, &x, &y);
                }
                let x = special();
                let y = random(x.len(), 9);
                check_elementwise(ISA, &x, &y);
                check_elementwise(ISA, &y, &x);
            }

            #[test]
            fn functions_on_a_sweep() {
                if skip() {
                    return;
                }
                let x: Vec<f32> = sweep(f32::MAX, 20_011).collect();
                let y = vec![1.0; x.len()];
                check_elementwise(ISA, &x, &y);
            }

            #[test]
            fn rms_norm_rows() {
                if skip() {
                    return;
                }
                for k in [1, 3, 16, 20, 64, 80, 576, 2049] {
                    for m in [0, 1, 2, 9, 40] {
                        let (x, w) = (random(m * k, 3), random(k, 4));
                        let zeros = vec![0.0; m * k];
                        same_in_place(ISA, &zeros, "rms_norm", |isa, pool, out| {
                            rms_norm(isa, pool, &x, &w, 1.0, 1e-6, out);
                        });
                    }
                }
            }

            #[test]
            fn rope_rows() {
                if skip() {
                    return;
                }
                for (head_dim, rotary_dim) in [(16, 16), (20, 20), (80, 80), (128, 32), (7, 2)] {
                    for (rows, heads) in [(1, 1), (3, 4), (40, 9)] {
                        for gap in [0, 5] {
                            check_rope(ISA, rows, heads, head_dim, rotary_dim, gap);
                        }
                    }
                }
            }

            proptest! {
                #![proptest_config(ProptestConfig::with_cases(64))]
                #[test]
                fn any_bits(bits in prop::collection::vec(any::<u32>(), 0..80)) {
                    if !skip() {
                        let x: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
                        let y: Vec<f32> = x.iter().rev().copied().collect();
                        check_elementwise(ISA, &x, &y);
                        prop_assert_eq!(argmax(ISA, &x), argmax(Isa::Scalar, &x));
                    }
                }
            }
        }
    };
}

suite!(scalar, Isa::Scalar);
suite!(avx2, Isa::Avx2);
suite!(avx512, Isa::Avx512Vnni);

fn check_elementwise(isa: Isa, x: &[f32], y: &[f32]) {
    same_in_place(isa, x, "add", |isa, pool, x| add(isa, pool, x, y));
    same_in_place(isa, x, "add_scaled", |isa, pool, x| {
        add_scaled(isa, pool, x, y, 0.3);
    });
    same_in_place(isa, x, "scale_in_place", |isa, pool, x| {
        scale_in_place(isa, pool, x, 0.3);
    });
    same_in_place(isa, x, "softcap", |isa, pool, x| {
        softcap(isa, pool, x, 30.0)
    });
    for activation in [Activation::Silu, Activation::GeluTanh] {
        same_in_place(isa, x, "gated_in_place", |isa, pool, x| {
            gated_in_place(isa, pool, activation, x, y);
        });
        let mut in_place = x.to_vec();
        gated_in_place(isa, &Pool::new(1), activation, &mut in_place, y);
        let mut out = vec![0.0; x.len()];
        gated(isa, &Pool::new(2), activation, x, y, &mut out);
        assert_same(&out, &in_place, "gated");
    }
    let (mut got, mut expected) = (vec![0; x.len()], vec![0; x.len()]);
    f16_from_f32(isa, x, &mut got);
    f16_from_f32(Isa::Scalar, x, &mut expected);
    for (x, (got, expected)) in x.iter().zip(got.iter().zip(&expected)) {
        assert!(
            got == expected || x.is_nan(),
            "{x}: {got:#x}, not {expected:#x}"
        );
    }
}

fn check_rope(isa: Isa, rows: usize, heads: usize, hd: usize, rotary_dim: usize, gap: usize) {
    let rope = Rope {
        heads,
        head_dim: hd,
        rotary_dim,
        row_stride: heads * hd + gap,
    };
    let x = random(rows * rope.row_stride - gap, 5);
    let angles = random(rows * rotary_dim / 2, 6);
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    same_in_place(isa, &x, "rope", |isa, pool, x| {
        rope_rotate(isa, pool, rope, x, &cos, &sin);
    });
    // A rotation keeps each pair's length: two products and a sum round, and so
    // do cos and sin, each by at most 2^-24 of the pair's length.
    let mut y = x.clone();
    rope_rotate(isa, &Pool::new(1), rope, &mut y, &cos, &sin);
    let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
    assert!((norm(&x) - norm(&y)).abs() <= 8.0 * 2f64.powi(-24) * norm(&x));
}
