//! Either path gives the bits of the twin, and calls that do not fit are refused.

use std::time::Instant;

use carat_tensor::DType;
use carat_tensor::packed::supports;

use super::crossover::MEASURED_BYTES;
use super::tests::{Noise, Weight, assert_same, product, product_with};
use super::*;

/// Few tokens, and around the edges of tiles, chunks and jobs.
const TOKENS: [usize; 26] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128,
    130,
];

/// Both paths, forced, with as many tokens as a path can be asked for.
#[test]
fn either_path_gives_the_bits_of_the_twin() {
    let mut noise = Noise(7);
    let one = Pool::new(1);
    let two = Pool::new(2);
    for dtype in DType::ALL.into_iter().filter(|&d| supports(d)) {
        // More columns than are unpacked at once, an odd number of panels, a
        // partial one.
        let (n, k) = (40, 768);
        let weight = Weight::random(dtype, n, k, &mut noise);
        let x = noise.input(TOKENS[TOKENS.len() - 1] * k);
        let int8 = ActPrecision::Int8;
        let expected = product(Isa::Scalar, &one, int8, &weight, None, &x);
        for isa in Isa::available() {
            let chosen = default_crossover(isa, dtype.into(), int8);
            assert_eq!(chosen.is_none(), isa == Isa::Scalar, "{isa} {dtype}");
            for tiled_from in [1, usize::MAX] {
                for m in TOKENS {
                    let pool = if m % 3 == 0 { &two } else { &one };
                    let prepared = Prepared::with_crossovers(Crossovers::forced(tiled_from));
                    let x = &x[..m * k];
                    let out = product_with(prepared, isa, pool, int8, &weight, None, x);
                    let what = format_args!("{isa} {dtype} tiled from {tiled_from}, m {m}");
                    assert_same(&out, &expected[..m * n], what);
                }
            }
        }
    }
}

/// Products of a region take different paths with one input.
#[test]
fn shapes_have_crossovers_of_their_own() {
    let mut noise = Noise(8);
    let pool = Pool::new(2);
    let k = 512;
    let weights: Vec<Weight> = [DType::TQ2_0, DType::Q4_0]
        .into_iter()
        .flat_map(|dtype| [17, 40].map(|n| (dtype, n)))
        .map(|(dtype, n)| Weight::random(dtype, n, k, &mut noise))
        .collect();
    let mut crossovers = Crossovers::default();
    for weight in &weights {
        let from = if weight.layout.rows() == 17 { 3 } else { 12 };
        crossovers.set(WeightShape::from(&weight.layout), 99);
        crossovers.set(WeightShape::from(&weight.layout), from);
    }
    for isa in Isa::available().filter(|&isa| isa != Isa::Scalar) {
        for (rows, m, path) in [(17, 2, "fused"), (17, 3, "tiled"), (40, 11, "fused")] {
            let shape = WeightShape {
                form: DType::TQ2_0.into(),
                rows,
                columns: k,
            };
            let name = kernel_name(isa, shape, ActPrecision::Int8, m, &crossovers);
            assert!(name.ends_with(path), "{name}");
        }
        for m in [1, 2, 3, 11, 12] {
            let x = noise.input(m * k);
            let mut prepared = Prepared::with_crossovers(crossovers.clone());
            prepared
                .prepare(isa, &pool, ActPrecision::Int8, &x, m, k)
                .unwrap();
            let mut outs: Vec<Vec<f32>> = weights
                .iter()
                .map(|w| vec![0.0; m * w.layout.rows()])
                .collect();
            let mut products: Vec<Product<'_>> = weights
                .iter()
                .zip(&mut outs)
                .map(|(weight, out)| Product {
                    weight: weight.view(),
                    bias: None,
                    out,
                })
                .collect();
            matmul(isa, &pool, &prepared, &mut products).unwrap();
            for (weight, out) in weights.iter().zip(&outs) {
                let expected = product(Isa::Scalar, &pool, ActPrecision::Int8, weight, None, &x);
                assert_same(out, &expected, format_args!("{isa} m {m}"));
            }
        }
    }
}

#[test]
fn nothing_is_measured_where_nothing_can_be_chosen() {
    let mut noise = Noise(9);
    let pool = Pool::new(1);
    let later = Instant::now() + std::time::Duration::from_secs(3600);
    let measured = |isa, weight: &Weight, deadline| {
        measure(isa, &pool, ActPrecision::Int8, &[weight.view()], deadline)
    };
    let small = Weight::random(DType::TQ2_0, 32, 256, &mut noise);
    let large = Weight::random(DType::TQ2_0, 512, 4096, &mut noise);
    assert!(large.layout.bytes() >= MEASURED_BYTES);
    for isa in Isa::available() {
        assert_eq!(measured(isa, &small, later), None);
        assert_eq!(measured(isa, &large, Instant::now()), None);
    }
    assert_eq!(measured(Isa::Scalar, &large, later), None);
}

/// What a call wants, and why it is refused.
struct Call<'a> {
    bias: Option<&'a [f32]>,
    out: usize,
    m: usize,
    k: usize,
    forms: &'a [DType],
}

#[test]
fn calls_that_do_not_fit_are_refused_and_write_nothing() {
    let mut noise = Noise(10);
    let pool = Pool::new(2);
    let (n, k) = (24, 256);
    let values = |what, rows, columns, found| MatmulError::Values {
        what,
        rows,
        columns,
        found,
    };
    for dtype in DType::ALL.into_iter().filter(|&d| supports(d)) {
        let weight = Weight::random(dtype, n, k, &mut noise);
        let fits = Call {
            bias: None,
            out: 3 * n,
            m: 3,
            k,
            forms: &[dtype],
        };
        // A format of the other kind of input.
        let other = match dtype {
            DType::Q4_0 => [DType::F16],
            _ => [DType::Q4_0],
        };
        let shares_input = !dtype.is_float() && !matches!(dtype, DType::TQ1_0 | DType::TQ2_0);
        let columns = |found_k| MatmulError::Columns {
            expected: found_k,
            found: k,
        };
        #[rustfmt::skip]
        let calls = [
            (Call { ..fits }, None),
            (Call { m: 0, out: 0, ..fits }, None),
            (Call { m: 0, out: 1, ..fits }, Some(values("an output", 0, n, 1))),
            (Call { out: 3 * n - 1, ..fits }, Some(values("an output", 3, n, 3 * n - 1))),
            (Call { out: 3 * n + 1, ..fits }, Some(values("an output", 3, n, 3 * n + 1))),
            (Call { out: 0, ..fits }, Some(values("an output", 3, n, 0))),
            (Call { m: 4, ..fits }, Some(values("an output", 4, n, 3 * n))),
            (Call { bias: Some(&[0.0; 23]), ..fits }, Some(values("a bias", 1, n, 23))),
            (Call { bias: Some(&[]), ..fits }, Some(values("a bias", 1, n, 0))),
            (Call { k: k - 1, ..fits }, Some(columns(k - 1))),
            (Call { k: 2 * k, ..fits }, Some(columns(2 * k))),
            (Call { k: 0, ..fits }, Some(columns(0))),
            (Call { k: 32, m: 0, out: 0, ..fits }, Some(columns(32))),
            (Call { forms: &[], ..fits }, Some(MatmulError::NotPrepared(dtype.into()))),
            (Call { forms: &other, ..fits },
             (!shares_input || dtype == DType::Q4_0).then_some(MatmulError::NotPrepared(dtype.into()))),
        ];
        for isa in Isa::available() {
            for (call, refused) in &calls {
                let x = vec![1.0; call.m * call.k];
                let mut prepared = Prepared::default();
                let int8 = ActPrecision::Int8;
                let forms = call.forms.iter().copied();
                prepared
                    .prepare_for(isa, &pool, int8, forms, &x, call.m, call.k)
                    .unwrap();
                // The first product fits whenever the second's input does.
                let mut out = [vec![-1.0; call.m * n], vec![-1.0; call.out]];
                let [first, second] = &mut out;
                let mut products =
                    [(None, first), (call.bias, second)].map(|(bias, out)| Product {
                        weight: weight.view(),
                        bias,
                        out,
                    });
                let result = matmul(isa, &pool, &prepared, &mut products);
                assert_eq!(result.as_ref().err(), refused.as_ref(), "{isa} {dtype}");
                let untouched = out.iter().flatten().all(|&v| v == -1.0);
                assert!(
                    untouched == (refused.is_some() || call.m == 0),
                    "{isa} {dtype}"
                );
            }
        }
    }
}

#[test]
fn inputs_and_rows_that_do_not_fit_are_refused() {
    let pool = Pool::new(1);
    let weight = Weight::random(DType::Q8_0, 20, 64, &mut Noise(11));
    let int8 = ActPrecision::Int8;
    let mut prepared = Prepared::default();
    for isa in Isa::available() {
        for (values, m, k) in [
            (63, 1, 64),
            (65, 1, 64),
            (0, 1, 64),
            (64, 0, 64),
            (64, 64, 0),
            (64, usize::MAX, 2),
        ] {
            prepared
                .prepare(isa, &pool, int8, &[1.0; 64], 1, 64)
                .unwrap();
            let x = vec![1.0; values];
            let error = prepared.prepare(isa, &pool, int8, &x, m, k).unwrap_err();
            let expected = MatmulError::Values {
                what: "an input",
                rows: m,
                columns: k,
                found: values,
            };
            assert_eq!(error, expected);
            // What was prepared before is no longer used.
            let product = Product {
                weight: weight.view(),
                bias: None,
                out: &mut [0.0; 20],
            };
            let error = matmul(isa, &pool, &prepared, &mut [product]).unwrap_err();
            assert_eq!(error, MatmulError::NotPrepared(DType::Q8_0.into()));
        }
    }
    if let Some(missing) = Isa::ALL.into_iter().find(|isa| !isa.is_available()) {
        let refused = Err(MatmulError::Isa(missing));
        assert_eq!(prepared.prepare(missing, &pool, int8, &[], 0, 0), refused);
        assert_eq!(matmul(missing, &pool, &prepared, &mut []), refused);
    }
    let mut out = [-1.0; 128];
    let mut gather = |ids: &[u32], len: usize| {
        let result = gather_rows(weight.view(), ids, 1.0, &mut out[..len]);
        assert!(result.is_ok() || out.iter().all(|&v| v == -1.0));
        result
    };
    let row = MatmulError::Row { id: 20, rows: 20 };
    assert_eq!(gather(&[3, 20], 128), Err(row));
    for len in [63, 65, 128] {
        let expected = MatmulError::Values {
            what: "an output",
            rows: 1,
            columns: 64,
            found: len,
        };
        assert_eq!(gather(&[3], len), Err(expected));
    }
    assert_eq!(gather(&[], 0), Ok(()));
    assert_eq!(gather(&[19, 0], 128), Ok(()));
}
