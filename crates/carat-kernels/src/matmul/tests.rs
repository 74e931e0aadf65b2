//! One suite for every instruction set and format: bits of the scalar twin,
//! and the twin within derived bounds of an fp64 product.

use carat_tensor::DType;
use carat_tensor::packed::{PackedLayout, PackedRef, pack, read_row};
use proptest::prelude::*;

use super::*;

const INTEGERS: [DType; 12] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::I8G16,
    DType::I8G32,
];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const TOKENS: [usize; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 49, 64];

/// A generator of plain pseudo-random numbers.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In -1 to 1.
    pub(super) fn unit(&mut self) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32) - 1.0
    }

    pub(super) fn input(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit() * 4.0).collect()
    }
}

/// How the codes of a test weight are made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fill {
    Random,
    Zeros,
    Ones,
    ZeroScales,
}

/// Bytes of a row-major matrix: code and sub-scale bytes from `fill`, scales
/// and minima finite and of either sign.
fn weight_bytes(
    dtype: DType,
    rows: usize,
    columns: usize,
    fill: Fill,
    noise: &mut Noise,
) -> Vec<u8> {
    let mut bytes = vec![0; rows * dtype.row_bytes(columns).unwrap()];
    // Offsets of halves and of singles in a block.
    let (halves, singles): (&[usize], &[usize]) = match dtype {
        DType::F16 | DType::BF16 => (&[0], &[]),
        DType::F32 => (&[], &[0]),
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => (&[0], &[]),
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => (&[0, 2], &[]),
        DType::Q6_K => (&[208], &[]),
        DType::TQ1_0 => (&[52], &[]),
        DType::TQ2_0 => (&[64], &[]),
        _ => (&[], &[0, 4]),
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for b in &mut *block {
            *b = match fill {
                Fill::Random | Fill::ZeroScales => noise.bits() as u8,
                Fill::Zeros => 0,
                Fill::Ones => 0xff,
            };
        }
        if dtype == DType::TQ2_0 {
            // Code 3 does not exist: make it 2.
            block[..64]
                .iter_mut()
                .for_each(|b| *b &= !(*b >> 1 & *b & 0x55));
        }
        for &at in halves {
            let value = if fill == Fill::ZeroScales {
                0.0
            } else {
                noise.unit()
            };
            let half = match dtype {
                DType::BF16 => half::bf16::from_f32(value).to_le_bytes(),
                _ => half::f16::from_f32(value).to_le_bytes(),
            };
            block[at..at + 2].copy_from_slice(&half);
        }
        for &at in singles {
            let value = if fill == Fill::ZeroScales {
                -0.0
            } else {
                noise.unit()
            };
            block[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
    }
    bytes
}

pub(super) struct Weight {
    pub(super) layout: PackedLayout,
    pub(super) bytes: Vec<u8>,
}

impl Weight {
    fn new(dtype: DType, rows: usize, columns: usize, fill: Fill, noise: &mut Noise) -> Self {
        let source = weight_bytes(dtype, rows, columns, fill, noise);
        Weight::of(dtype.into(), rows, columns, &source)
    }

    pub(super) fn of(form: Form, rows: usize, columns: usize, source: &[u8]) -> Self {
        let layout = PackedLayout::of(form, rows, columns).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        pack(&layout, source, &mut bytes).unwrap();
        Weight { layout, bytes }
    }

    pub(super) fn random(dtype: DType, rows: usize, columns: usize, noise: &mut Noise) -> Self {
        Weight::new(dtype, rows, columns, Fill::Random, noise)
    }

    pub(super) fn view(&self) -> PackedRef<'_> {
        PackedRef::new(self.layout, &self.bytes).unwrap()
    }
}

const CANARY: f32 = 12345.5;

/// The product of one weight, checked for writes beyond its end.
pub(super) fn product(
    isa: Isa,
    pool: &Pool,
    precision: ActPrecision,
    weight: &Weight,
    bias: Option<&[f32]>,
    x: &[f32],
) -> Vec<f32> {
    product_with(Prepared::default(), isa, pool, precision, weight, bias, x)
}

/// The same with an input that is prepared here and may have crossovers.
pub(super) fn product_with(
    mut prepared: Prepared,
    isa: Isa,
    pool: &Pool,
    precision: ActPrecision,
    weight: &Weight,
    bias: Option<&[f32]>,
    x: &[f32],
) -> Vec<f32> {
    let (n, k) = (weight.layout.rows(), weight.layout.columns());
    let m = x.len() / k;
    prepared.prepare(isa, pool, precision, x, m, k).unwrap();
    let mut out = vec![CANARY; m * n + 40];
    let (body, guard) = out.split_at_mut(m * n);
    matmul(
        isa,
        pool,
        &prepared,
        &mut [Product {
            weight: weight.view(),
            bias,
            out: body,
        }],
    )
    .unwrap();
    assert!(guard.iter().all(|&v| v == CANARY), "written past the end");
    out.truncate(m * n);
    out
}

#[track_caller]
pub(super) fn assert_same(a: &[f32], b: &[f32], what: impl std::fmt::Display) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{what}: value {i} is {a:e} ({:08x}), expected {b:e} ({:08x})",
            a.to_bits(),
            b.to_bits()
        );
    }
}

fn columns(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 3, 32, 66, 255, 576, 1029],
        16 => &[16, 32, 48, 96, 528, 576, 1040],
        32 => &[32, 64, 96, 160, 576, 1056],
        _ => &[256, 512, 768, 1280],
    }
}

/// Every shape, against the scalar twin.
fn equals_the_twin(isa: Isa, dtype: DType, precision: ActPrecision) {
    let pool = Pool::new(1);
    let mut noise = Noise(dtype as u64);
    for (i, &k) in columns(dtype).iter().enumerate() {
        // Rows vary with the columns: all of 1, 15, 17, 40 with short and long ones.
        for n in [[1, 17, 40], [15, 33, 16]][i % 2] {
            let weight = Weight::new(dtype, n, k, Fill::Random, &mut noise);
            let x = noise.input(TOKENS[TOKENS.len() - 1] * k);
            let bias = noise.input(n);
            let bias = (n % 2 == 1).then_some(&bias[..]);
            let all = product(Isa::Scalar, &pool, precision, &weight, bias, &x);
            for m in TOKENS {
                let out = product(isa, &pool, precision, &weight, bias, &x[..m * k]);
                assert_same(
                    &out,
                    &all[..m * n],
                    format_args!("{isa} {dtype} {precision:?} m {m} n {n} k {k}"),
                );
            }
        }
    }
}

/// Extreme codes and inputs, against the scalar twin.
fn extremes_equal_the_twin(isa: Isa, dtype: DType) {
    let pool = Pool::new(1);
    let mut noise = Noise(dtype as u64 + 100);
    let k = columns(dtype).last().copied().unwrap();
    let mut inputs = vec![1.0; 2 * k];
    inputs[k..].fill(-1.0); // codes of 127 and of -127
    inputs.extend((0..k).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }));
    inputs.extend(vec![0.0; k]);
    inputs.extend(noise.input(k));
    inputs[4 * k..][..20].fill(0.0); // half a group of zeros and more
    for value in [f32::NAN, f32::INFINITY, 1e38, 1e-38, 1e-42] {
        let first = inputs.len();
        inputs.extend(noise.input(k));
        inputs[first + k / 2] = value;
        inputs.extend(vec![value; k]);
    }
    for fill in [Fill::Zeros, Fill::Ones, Fill::ZeroScales, Fill::Random] {
        let weight = Weight::new(dtype, 33, k, fill, &mut noise);
        for precision in [ActPrecision::Int8, ActPrecision::F32, ActPrecision::Bf16] {
            let expected = product(Isa::Scalar, &pool, precision, &weight, None, &inputs);
            let what = format!("{isa} {dtype} {precision:?} {fill:?}");
            let out = product(isa, &pool, precision, &weight, None, &inputs);
            assert_same(&out, &expected, format_args!("{what}, all tokens"));
            for (x, expected) in inputs.chunks_exact(k).zip(expected.chunks_exact(33)) {
                let out = product(isa, &pool, precision, &weight, None, x);
                assert_same(&out, expected, format_args!("{what}, one token"));
            }
        }
    }
}

/// A token's row among 64 and among 300 (more than a job takes) is its row
/// alone, on any number of threads.
fn does_not_depend_on_company(isa: Isa, dtype: DType) {
    let mut noise = Noise(dtype as u64 + 200);
    let k = 2 * columns(dtype).last().copied().unwrap();
    let n = 200;
    let weight = Weight::new(dtype, n, k, Fill::Random, &mut noise);
    let x = noise.input(300 * k);
    for precision in [ActPrecision::Int8, ActPrecision::F32] {
        let one = Pool::new(1);
        let alone: Vec<f32> = x
            .chunks_exact(k)
            .take(8)
            .flat_map(|x| product(isa, &one, precision, &weight, None, x))
            .collect();
        let mut counts = vec![4, 64];
        if isa != Isa::Scalar {
            counts.push(300);
        }
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for &m in &counts {
                let out = product(isa, &pool, precision, &weight, None, &x[..m * k]);
                let common = out.len().min(alone.len());
                assert_same(
                    &out[..common],
                    &alone[..common],
                    format_args!("{isa} {dtype} {precision:?} m {m} threads {threads}"),
                );
            }
            let out = product(isa, &pool, precision, &weight, None, &x[..k]);
            assert_same(
                &out,
                &alone[..n],
                format_args!("{isa} {dtype} threads {threads}"),
            );
        }
    }
}

macro_rules! suite {
    ($($name:ident: $isa:expr;)*) => {$(
        mod $name {
            use super::*;

            fn ready() -> bool {
                let ready = $isa.is_available();
                if !ready {
                    // Past the capture of passing tests.
                    use std::io::Write as _;
                    let _ = writeln!(std::io::stderr(), "SKIPPED: this machine has no {}", $isa);
                }
                ready
            }

            #[test]
            fn integer_products_equal_the_twin() {
                if ready() {
                    INTEGERS.iter().for_each(|&d| equals_the_twin($isa, d, ActPrecision::Int8));
                }
            }

            #[test]
            fn float_products_equal_the_twin() {
                if ready() {
                    FLOATS.iter().for_each(|&d| equals_the_twin($isa, d, ActPrecision::Int8));
                    INTEGERS.iter().for_each(|&d| equals_the_twin($isa, d, ActPrecision::F32));
                    for dtype in [DType::BF16, DType::Q4_K] {
                        equals_the_twin($isa, dtype, ActPrecision::Bf16);
                    }
                }
            }

            #[test]
            fn extreme_values_equal_the_twin() {
                if ready() {
                    for dtype in INTEGERS.into_iter().chain(FLOATS) {
                        extremes_equal_the_twin($isa, dtype);
                    }
                }
            }

            #[test]
            fn a_token_does_not_depend_on_its_company() {
                if ready() {
                    for dtype in INTEGERS.into_iter().chain(FLOATS) {
                        does_not_depend_on_company($isa, dtype);
                    }
                }
            }
        }
    )*};
}

suite! {
    scalar: Isa::Scalar;
    neondot: Isa::NeonDot;
    avx2: Isa::Avx2;
    avxvnni: Isa::AvxVnni;
    avx512vnni: Isa::Avx512Vnni;
    amx: Isa::Amx;
}

/// `Σ w x` and `Σ |w x|` in fp64 of one row and token.
fn exact(w: &[f32], x: &[f32]) -> (f64, f64) {
    w.iter().zip(x).fold((0.0, 0.0), |(sum, norm), (&w, &x)| {
        let product = f64::from(w) * f64::from(x);
        (sum + product, norm + product.abs())
    })
}

/// The float path against fp64. Each of the four chains has k / 4 fused
/// steps, each rounding once by at most eps / 2 of a partial sum (at most
/// `Σ |w x|`); the two final additions round once each.
#[test]
fn float_products_are_near_the_exact_ones() {
    let pool = Pool::new(1);
    let mut noise = Noise(1);
    let mut worst = 0f64;
    for dtype in INTEGERS.into_iter().chain(FLOATS) {
        let (n, k, m) = (16, 1280, 3);
        let weight = Weight::new(dtype, n, k, Fill::Random, &mut noise);
        let x = noise.input(m * k);
        let out = product(Isa::Scalar, &pool, ActPrecision::F32, &weight, None, &x);
        let mut w = vec![0.0; k];
        for row in 0..n {
            read_row(weight.view(), row, &mut w);
            for token in 0..m {
                let (sum, norm) = exact(&w, &x[token * k..][..k]);
                let error = (f64::from(out[token * n + row]) - sum).abs();
                let half_eps = f64::from(f32::EPSILON) / 2.0;
                let bound = (k as f64 / 4.0 + 2.0) * half_eps * norm;
                assert!(error <= bound, "{dtype}: {error:e} > {bound:e}");
                worst = worst.max(error);
            }
        }
    }
    // fp32 cannot be exact on these data: a zero would mean nothing was compared.
    assert!(worst > 0.0);
}

/// The int8 path against fp64 of the decoded weights and the true input.
///
/// Rounding the input moves each value by at most half a scale, plus three
/// relative roundings (scale, inverse, their use) of at most eps / 2 each, of a
/// value of at most 127 scales: `sx (1/2 + 127 · 2 eps)` is above their sum.
/// Decoding rounds `scale * code + min` twice, the kernel does not: `2 eps` of
/// `|w|`, or for formats with a minimum of `|scale · code| + |min|`. Then there
/// are at most two fused steps and one product of scales per group of 16 or 32,
/// each rounding by eps / 2 of at most the sum of magnitudes.
#[test]
fn integer_products_are_near_the_exact_ones() {
    let pool = Pool::new(1);
    let mut noise = Noise(2);
    let eps = f64::from(f32::EPSILON);
    for dtype in INTEGERS {
        let (n, k, m) = (16, 1280, 3);
        let weight = Weight::new(dtype, n, k, Fill::Random, &mut noise);
        let g = *weight.layout.geometry();
        let x = noise.input(m * k);
        let out = product(Isa::Scalar, &pool, ActPrecision::Int8, &weight, None, &x);
        let mut w = vec![0.0; k];
        let mut group = carat_tensor::packed::Group::default();
        let (mut errors, mut bounds) = (0f64, 0f64);
        for row in 0..n {
            read_row(weight.view(), row, &mut w);
            // |scale * code| + |min| per group: what partial sums are made of.
            let magnitudes: Vec<f64> = (0..k)
                .map(|c| {
                    carat_tensor::packed::expand_group(
                        weight.view(),
                        0,
                        c / g.group_columns,
                        &mut group,
                    );
                    let code = group.codes[c % g.group_columns / 4][4 * row + c % 4];
                    let code = f64::from(i32::from(code) - g.code_offset);
                    (f64::from(group.scales[row]) * code).abs() + f64::from(group.mins[row]).abs()
                })
                .collect();
            for token in 0..m {
                let x = &x[token * k..][..k];
                let (sum, _) = exact(&w, x);
                let (mut rounding, mut norm) = (0.0, 0.0);
                // Columns that share a scale of the input, and a fused step.
                let ternary = matches!(dtype, DType::TQ1_0 | DType::TQ2_0);
                let (run, step) = if ternary {
                    (256, 256)
                } else {
                    (32, g.group_columns)
                };
                for (c, x) in x.chunks(run).enumerate() {
                    let sx = x.iter().fold(0f32, |a, x| a.max(x.abs())) / 127.0;
                    for i in 0..x.len() {
                        let w = f64::from(w[c * run + i]).abs();
                        rounding += w * f64::from(sx) * (0.5 + 254.0 * eps);
                        norm += magnitudes[c * run + i] * 127.5 * f64::from(sx);
                    }
                }
                let steps = (k / step) as f64 * if g.has_min { 2.0 } else { 1.0 };
                let bound = rounding + norm * eps * (2.0 + (steps + 2.0) / 2.0);
                let error = (f64::from(out[token * n + row]) - sum).abs();
                assert!(error <= bound, "{dtype}: {error:e} > {bound:e}");
                errors += error;
                bounds += rounding;
            }
        }
        // Roundings are independent and uniform, so errors are far below the
        // worst case, of the order 1 / sqrt(k), but not zero.
        assert!(
            errors > bounds / k as f64,
            "{dtype}: {errors:e} of {bounds:e}"
        );
    }
}

#[test]
fn products_of_a_region_share_the_input() {
    let mut noise = Noise(3);
    let k = 256;
    // More than a region takes, of all formats and several sizes.
    let weights: Vec<Weight> = INTEGERS
        .into_iter()
        .chain(FLOATS)
        .chain(INTEGERS)
        .enumerate()
        .map(|(i, d)| Weight::new(d, 1 + 37 * i % 300, k, Fill::Random, &mut noise))
        .collect();
    for isa in Isa::available() {
        for (m, threads) in [(1, 2), (3, 3), (9, 2), (140, 2)] {
            if isa == Isa::Scalar && m > 100 {
                continue;
            }
            let pool = Pool::new(threads);
            let x = noise.input(m * k);
            let mut prepared = Prepared::default();
            prepared
                .prepare(isa, &pool, ActPrecision::Int8, &x, m, k)
                .unwrap();
            let mut outs: Vec<Vec<f32>> = weights
                .iter()
                .map(|w| vec![CANARY; m * w.layout.rows()])
                .collect();
            let mut products: Vec<Product<'_>> = weights
                .iter()
                .zip(&mut outs)
                .map(|(w, out)| Product {
                    weight: w.view(),
                    bias: None,
                    out,
                })
                .collect();
            matmul(isa, &pool, &prepared, &mut products).unwrap();
            for (w, out) in weights.iter().zip(&outs) {
                let expected = product(isa, &Pool::new(1), ActPrecision::Int8, w, None, &x);
                assert_same(
                    out,
                    &expected,
                    format_args!("{isa} {} m {m}", w.layout.form()),
                );
            }
        }
    }
}

#[test]
fn buffers_are_reused_for_smaller_inputs() {
    let pool = Pool::new(1);
    let mut noise = Noise(4);
    let weight = Weight::new(DType::Q8_0, 20, 64, Fill::Random, &mut noise);
    let mut prepared = Prepared::default();
    prepared
        .prepare(
            Isa::Scalar,
            &pool,
            ActPrecision::Int8,
            &noise.input(9 * 512),
            9,
            512,
        )
        .unwrap();
    let x = noise.input(2 * 64);
    prepared
        .prepare_for(
            Isa::Scalar,
            &pool,
            ActPrecision::Int8,
            [DType::Q8_0],
            &x,
            2,
            64,
        )
        .unwrap();
    assert!(!prepared.has(Need::Floats) && prepared.has(Need::Groups));
    let mut out = vec![0.0; 2 * 20];
    matmul(
        Isa::Scalar,
        &pool,
        &prepared,
        &mut [Product {
            weight: weight.view(),
            bias: None,
            out: &mut out,
        }],
    )
    .unwrap();
    let fresh = product(Isa::Scalar, &pool, ActPrecision::Int8, &weight, None, &x);
    assert_same(&out, &fresh, "reused");
}

#[test]
fn gathered_rows_are_scaled_decoded_rows() {
    let mut noise = Noise(6);
    for dtype in INTEGERS.into_iter().chain(FLOATS) {
        let weight = Weight::new(dtype, 40, 512, Fill::Random, &mut noise);
        let ids = [39, 0, 17, 17];
        let mut out = vec![0.0; 4 * 512];
        gather_rows(weight.view(), &ids, 1.5, &mut out).unwrap();
        let mut row = vec![0.0; 512];
        for (&id, out) in ids.iter().zip(out.chunks_exact(512)) {
            read_row(weight.view(), id as usize, &mut row);
            row.iter_mut().for_each(|v| *v *= 1.5);
            assert_same(out, &row, dtype);
        }
    }
}

/// What serves a weight of a format by the kernels' constants.
pub(super) fn named<F: Into<Form>>(isa: Isa, form: F, precision: ActPrecision, m: usize) -> String {
    let shape = WeightShape {
        form: form.into(),
        rows: 64,
        columns: 256,
    };
    kernel_name(isa, shape, precision, m, &Crossovers::default())
}

#[test]
fn kernels_are_named() {
    let name = named::<DType>;
    assert_eq!(
        name(Isa::Scalar, DType::Q4_K, ActPrecision::Int8, 512),
        "scalar Q4_K x int8/32 fused"
    );
    assert_eq!(
        name(Isa::Scalar, DType::F16, ActPrecision::Int8, 1),
        "scalar F16 x f32 fused"
    );
    assert_eq!(
        name(Isa::Scalar, DType::TQ2_0, ActPrecision::Int8, 1),
        "scalar TQ2_0 x int8/256 fused"
    );
    #[cfg(target_arch = "x86_64")]
    assert_eq!(
        name(Isa::Avx512Vnni, DType::Q8_0, ActPrecision::Int8, 64),
        "avx512vnni Q8_0 x int8/32 tiled"
    );
}

/// A name tells the set that serves, not the one that was asked for.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_kernel_is_named_by_the_set_that_serves() {
    let set = |isa, dtype, precision, m| {
        let name = named::<DType>(isa, dtype, precision, m);
        let (set, _) = name.split_once(' ').unwrap();
        Isa::ALL.into_iter().find(|i| i.name() == set).unwrap()
    };
    for (isa, dtype, precision, m, serves) in [
        (
            Isa::AvxVnni,
            DType::Q4_0,
            ActPrecision::Int8,
            1,
            Isa::AvxVnni,
        ),
        (Isa::AvxVnni, DType::Q4_0, ActPrecision::F32, 1, Isa::Avx2),
        (Isa::AvxVnni, DType::F16, ActPrecision::Int8, 64, Isa::Avx2),
        (Isa::Amx, DType::TQ2_0, ActPrecision::Int8, 64, Isa::Amx),
        (
            Isa::Amx,
            DType::TQ2_0,
            ActPrecision::Int8,
            1,
            Isa::Avx512Vnni,
        ),
        (
            Isa::Amx,
            DType::Q8_0,
            ActPrecision::Int8,
            64,
            Isa::Avx512Vnni,
        ),
    ] {
        assert_eq!(set(isa, dtype, precision, m), serves, "{isa} {dtype} {m}");
        assert!(!isa.falls_back_to(serves));
    }
    // Five trits in a byte need a table that the first VNNI machines lacked.
    let trits = set(Isa::Avx512Vnni, DType::TQ1_0, ActPrecision::Int8, 1);
    assert_eq!(
        Isa::Avx512Vnni.falls_back_to(trits),
        !std::arch::is_x86_feature_detected!("avx512vbmi")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_shape_equals_the_twin(
        dtype in prop::sample::select(INTEGERS.into_iter().chain(FLOATS).collect::<Vec<_>>()),
        precision in prop::sample::select(vec![
            ActPrecision::Int8,
            ActPrecision::Bf16,
            ActPrecision::F32,
        ]),
        m in 1usize..20,
        n in 1usize..70,
        blocks in 1usize..40,
        threads in 1usize..3,
        seed: u64,
    ) {
        let mut noise = Noise(seed);
        let k = dtype.block_len() * if dtype.block_len() == 256 { 1 + blocks % 5 } else { blocks };
        let weight = Weight::new(dtype, n, k, Fill::Random, &mut noise);
        let x = noise.input(m * k);
        let bias = noise.input(n);
        let pool = Pool::new(threads);
        let expected = product(Isa::Scalar, &pool, precision, &weight, Some(&bias), &x);
        for isa in Isa::available() {
            let out = product(isa, &pool, precision, &weight, Some(&bias), &x);
            assert_same(&out, &expected, format_args!("{isa} {dtype} {precision:?} m {m} n {n} k {k}"));
        }
    }
}
