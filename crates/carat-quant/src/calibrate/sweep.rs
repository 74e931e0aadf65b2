//! Choosing each code anew, given all others.
//!
//! With `e = w - q` and `H = Xᵀ X`, the squared error `e H eᵀ` of a row over a text is
//! a parabola in `e_j` while the others stay, least at
//!
//! ```text
//! e_j - g_j / H_jj,    g = e H
//! ```
//!
//! so the best code of column `j` is the one nearest to `w_j - e_j + g_j / H_jj`. A sweep
//! does this for all columns in turn; no step makes the error larger. It is coordinate
//! descent on the objective of learned roundings (Nagel et al., 2020, arXiv:2004.10568),
//! as in QuantEase (Behdin et al., 2023, arXiv:2309.01885).

use carat_tensor::GridMatrix;
use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul};
use rayon::prelude::*;

use super::round::{Row, each_band};
use crate::matrix::Method;

/// A damped Gram matrix, both triangles.
pub(crate) struct Metric {
    n: usize,
    /// `[n, n]`
    h: Vec<f32>,
}

impl Metric {
    /// Of a Gram matrix of `n` columns (its lower triangle) whose columns are divided
    /// by `scales`, with `damping` times the mean of its diagonal added to it. `None`
    /// for inputs that are zero or not finite.
    pub(crate) fn new(
        gram: &[f32],
        n: usize,
        scales: Option<&[f32]>,
        damping: f64,
    ) -> Option<Metric> {
        let at = |i: usize, j: usize| {
            let (i, j) = (i.max(j), i.min(j));
            let scale = scales.map_or(1.0, |s| f64::from(s[i]) * f64::from(s[j]));
            f64::from(gram[i * n + j]) / scale
        };
        let mean = (0..n).map(|i| at(i, i)).sum::<f64>() / n.max(1) as f64;
        if !(mean.is_finite() && mean > 0.0) {
            return None;
        }
        let mut h = vec![0.0; n * n];
        h.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
            for (j, out) in row.iter_mut().enumerate() {
                *out = at(i, j) as f32;
            }
            row[i] = (at(i, i) + damping * mean) as f32;
        });
        Some(Metric { n, h })
    }
}

/// Sweeps over the columns of `matrix` at most `sweeps` times, or until no code changes.
pub(crate) fn sweep(
    method: &Method,
    matrix: &mut GridMatrix,
    weights: &[f32],
    metric: &Metric,
    sweeps: usize,
) {
    each_band(method, matrix, weights, |rows, codes, weights| {
        sweep_rows(rows, codes, weights, metric, sweeps);
    });
}

fn sweep_rows(rows: &[Row<'_>], codes: &mut [u8], weights: &[f32], metric: &Metric, sweeps: usize) {
    let n = metric.n;
    let mut errors = vec![0.0f32; codes.len()];
    for (i, (error, (code, weight))) in errors.iter_mut().zip(codes.iter().zip(weights)).enumerate()
    {
        *error = weight - rows[i / n].value(i % n, *code);
    }
    let mut slopes = vec![0.0f32; codes.len()];
    {
        let shape = (rows.len(), n);
        let errors = ArrayView2::from_shape(shape, &errors).expect("invariant: whole rows");
        let h = ArrayView2::from_shape((n, n), &metric.h).expect("invariant: a square");
        let mut out = ArrayViewMut2::from_shape(shape, &mut slopes).expect("invariant: whole rows");
        general_mat_mul(1.0, &errors, &h, 0.0, &mut out);
    }
    for (r, row) in rows.iter().enumerate() {
        let span = r * n..(r + 1) * n;
        let (codes, weights) = (&mut codes[span.clone()], &weights[span.clone()]);
        let (errors, slopes) = (&mut errors[span.clone()], &mut slopes[span]);
        for _ in 0..sweeps {
            let mut changed = false;
            for j in 0..n {
                let h = &metric.h[j * n..][..n];
                let (code, value) = row.nearest(j, weights[j] - errors[j] + slopes[j] / h[j]);
                let step = weights[j] - value - errors[j];
                // Equal neighbours, or one rounding's worth, are no reason to move.
                if code == codes[j] || step * (2.0 * slopes[j] + step * h[j]) >= 0.0 {
                    continue;
                }
                codes[j] = code;
                errors[j] += step;
                for (slope, h) in slopes.iter_mut().zip(h) {
                    *slope += step * h;
                }
                changed = true;
            }
            if !changed {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use carat_tensor::grid::Code;

    use super::{super::round::tests::*, *};
    use crate::calibrate::{factor::factor, round::round};

    /// `e H eᵀ` of a row, in f64.
    fn energy(errors: &[f64], metric: &Metric) -> f64 {
        let row = |i: usize| &metric.h[i * COLUMNS..][..COLUMNS];
        let slope = |i: usize| -> f64 {
            row(i)
                .iter()
                .zip(errors)
                .map(|(h, e)| f64::from(*h) * e)
                .sum()
        };
        errors.iter().enumerate().map(|(i, e)| e * slope(i)).sum()
    }

    fn errors(matrix: &GridMatrix, weights: &[f32], row: usize) -> Vec<f64> {
        let mut values = vec![0.0; COLUMNS];
        matrix.decode_row(row, &mut values);
        let weights = &weights[row * COLUMNS..][..COLUMNS];
        let pairs = weights.iter().zip(&values);
        pairs.map(|(w, q)| f64::from(*w) - f64::from(*q)).collect()
    }

    #[test]
    fn no_single_code_does_better_and_no_row_does_worse_than_before() {
        let (weights, _, gram) = mixtures();
        let scales: Vec<f32> = (0..COLUMNS).map(|i| 1.0 + (i % 3) as f32 / 4.0).collect();
        let metric = Metric::new(&gram, COLUMNS, Some(&scales), 0.01).unwrap();
        for method in methods() {
            let mut before = quantized(&method, &weights);
            let factor = factor(&gram, COLUMNS, Some(&scales), 0.01, true).unwrap();
            round(&method, &mut before, &weights, &factor);
            let made = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| {
                    let mut matrix = before.clone();
                    sweep(&method, &mut matrix, &weights, &metric, usize::MAX);
                    matrix
                })
            };
            let (after, three) = (made(1), made(3));
            assert!(after == three && after != before, "{}", after.grid);
            let codes: Vec<u8> = match after.grid.code {
                Code::Int(bits) => {
                    let half = 1i16 << (bits - 1);
                    (-half..half).map(|code| code as i8 as u8).collect()
                }
                Code::Trit => vec![255, 0, 1],
                code => (0..=u8::MAX >> (8 - code.bits())).collect(),
            };
            for row in (0..after.rows).step_by(9) {
                let e = errors(&after, &weights, row);
                let least = energy(&e, &metric);
                let was = energy(&errors(&before, &weights, row), &metric);
                // Slopes are kept in fp32 over every step: what they are off by is a
                // part of the size of their terms, not of what cancels out in them.
                let scale: f64 = (0..COLUMNS)
                    .map(|i| e[i] * e[i] * f64::from(metric.h[i * (COLUMNS + 1)]))
                    .sum();
                let slack = COLUMNS as f64 * f64::from(f32::EPSILON) * scale;
                assert!(least <= was + slack, "{}: {least}, was {was}", after.grid);
                for column in (0..COLUMNS).step_by(7) {
                    for &code in &codes {
                        let mut other = after.clone();
                        other.codes[row * COLUMNS + column] = code;
                        let errors = errors(&other, &weights, row);
                        // Some codes of floats are no number.
                        if !errors[column].is_finite() {
                            continue;
                        }
                        let found = energy(&errors, &metric);
                        assert!(
                            found >= least - slack,
                            "{}: code {code} of {row}, {column}: {found}, not {least}",
                            after.grid
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn inputs_that_say_nothing_have_no_metric() {
        assert!(Metric::new(&[0.0; 16], 4, None, 0.01).is_none());
        assert!(Metric::new(&[f32::NAN; 16], 4, None, 0.01).is_none());
    }
}
