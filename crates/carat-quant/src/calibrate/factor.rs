//! The triangular factor by which an error in one column is made good in others.
//!
//! A row `w` of weights that becomes `q` changes its output by `e X` with
//! `e = w - q`, so the squared error over a text is `e H eᵀ` with `H = Xᵀ X`. With
//! `H = R Rᵀ`, `R` upper triangular, it is `‖e R‖²`, a sum over columns `j` of
//!
//! ```text
//! (e R)_j = e_j R_jj + Σ_{i<j} e_i R_ij
//! ```
//!
//! whose terms are made small one after the other: `q_j` is the value of the grid
//! nearest to `w_j + Σ_{i<j} e_i R_ij / R_jj`. That is what GPTQ does (Frantar et al.,
//! 2022, arXiv:2210.17323), without its inverse of `H`: both are Babai's nearest plane
//! (Chen et al., 2025, arXiv:2507.18553).

use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul, s};
use rayon::prelude::*;

/// Columns that are factored together.
const PANEL: usize = 128;

/// Dampings that are tried before a matrix is given up.
const TRIES: usize = 4;

/// The factor, in an order of columns.
pub(crate) struct Factor {
    /// Which column comes first, second, …
    pub(crate) order: Vec<usize>,
    /// `[n, n]`: `R_ij / R_jj` in row `j`, column `i < j`; zero elsewhere.
    pub(crate) feedback: Vec<f32>,
}

/// Factors a Gram matrix of `n` columns (its lower triangle) whose columns are
/// divided by `scales`, with `damping` times the mean of its diagonal added to it.
/// `by_weight` puts the columns with the largest inputs first.
///
/// `None` if it is not positive definite, whatever the damping: for inputs that are
/// zero or not finite.
pub(crate) fn factor(
    gram: &[f32],
    n: usize,
    scales: Option<&[f32]>,
    damping: f64,
    by_weight: bool,
) -> Option<Factor> {
    let at = |i: usize, j: usize| {
        let (i, j) = (i.max(j), i.min(j));
        let scale = scales.map_or(1.0, |s| f64::from(s[i]) * f64::from(s[j]));
        f64::from(gram[i * n + j]) / scale
    };
    let mean = (0..n).map(|i| at(i, i)).sum::<f64>() / n.max(1) as f64;
    if !(mean.is_finite() && mean > 0.0) {
        return None;
    }
    let mut order: Vec<usize> = (0..n).collect();
    if by_weight {
        // Stable: equal columns keep their order.
        order.sort_by(|&a, &b| at(b, b).total_cmp(&at(a, a)));
    }
    let mut damping = damping * mean;
    for _ in 0..TRIES {
        // Lower triangular factors are of the matrix turned around.
        let mut a = vec![0.0; n * n];
        a.par_chunks_mut(n).enumerate().for_each(|(i, row)| {
            for (j, out) in row[..=i].iter_mut().enumerate() {
                *out = at(order[n - 1 - i], order[n - 1 - j]);
            }
            row[i] += damping;
        });
        if cholesky(&mut a, n) {
            let mut feedback = vec![0.0f32; n * n];
            feedback.par_chunks_mut(n).enumerate().for_each(|(j, row)| {
                let (column, pivot) = (n - 1 - j, a[(n - 1 - j) * (n + 1)]);
                for (i, out) in row[..j].iter_mut().enumerate() {
                    *out = (a[(n - 1 - i) * n + column] / pivot) as f32;
                }
            });
            return Some(Factor { order, feedback });
        }
        damping *= 10.0;
    }
    None
}

/// Replaces the lower triangle of `a` (`[n, n]`) by its Cholesky factor, in f64; false
/// if it is not positive definite. The order of every sum is fixed.
fn cholesky(a: &mut [f64], n: usize) -> bool {
    for k in (0..n).step_by(PANEL) {
        let end = (k + PANEL).min(n);
        let width = end - k;
        for j in k..end {
            let (above, row) = a.split_at_mut(j * n);
            for i in k..j {
                let other = &above[i * n..][..n];
                let sum: f64 = (k..i).map(|c| row[c] * other[c]).sum();
                row[i] = (row[i] - sum) / other[i];
            }
            let pivot = row[j] - row[k..j].iter().map(|v| v * v).sum::<f64>();
            if !(pivot.is_finite() && pivot > 0.0) {
                return false;
            }
            row[j] = pivot.sqrt();
        }
        let (done, below) = a.split_at_mut(end * n);
        below.par_chunks_mut(n).for_each(|row| {
            for j in k..end {
                let other = &done[j * n..][..n];
                let sum: f64 = (k..j).map(|c| row[c] * other[c]).sum();
                row[j] = (row[j] - sum) / other[j];
            }
        });
        let panel: Vec<f64> = below
            .chunks(n)
            .flat_map(|row| row[k..end].iter().copied())
            .collect();
        let panel =
            ArrayView2::from_shape((n - end, width), &panel).expect("invariant: whole rows");
        below
            .par_chunks_mut(PANEL * n)
            .enumerate()
            .for_each(|(band, rows)| {
                let first = band * PANEL;
                let count = rows.len() / n;
                let mut out =
                    ArrayViewMut2::from_shape((count, n), rows).expect("invariant: whole rows");
                let mut out = out.slice_mut(s![.., end..end + first + count]);
                let left = panel.slice(s![first..first + count, ..]);
                let right = panel.slice(s![..first + count, ..]);
                general_mat_mul(-1.0, &left, &right.t(), 1.0, &mut out);
            });
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `Xᵀ X` of pseudo-random inputs, whole.
    fn gram(n: usize, rows: usize) -> Vec<f32> {
        let x: Vec<f32> = (0..n * rows)
            .map(|i| ((i * i * 31 + i * 7919) % 2017) as f32 / 1008.0 - 1.0)
            .collect();
        let mut out = vec![0.0; n * n];
        for row in x.chunks(n) {
            for i in 0..n {
                for j in 0..n {
                    out[i * n + j] += row[i] * row[j];
                }
            }
        }
        out
    }

    #[test]
    fn the_factor_is_that_of_the_damped_matrix() {
        // More than two panels, and no whole number of them.
        let n = 300;
        let gram = gram(n, 500);
        let scales: Vec<f32> = (0..n).map(|i| 1.0 + (i % 5) as f32).collect();
        for by_weight in [false, true] {
            let found = factor(&gram, n, Some(&scales), 0.01, by_weight).unwrap();
            let h = |i: usize, j: usize| {
                let (a, b) = (found.order[i], found.order[j]);
                f64::from(gram[a * n + b]) / f64::from(scales[a] * scales[b])
            };
            let mean = (0..n).map(|i| h(i, i)).sum::<f64>() / n as f64;
            if by_weight {
                assert!((1..n).all(|i| h(i, i) <= h(i - 1, i - 1)));
            }
            // R = U D with U_ij = feedback[j][i], U_jj = 1: H = U D² Uᵀ, D² found from
            // the last column on.
            let u = |i: usize, j: usize| match i == j {
                true => 1.0,
                false => f64::from(found.feedback[j * n + i]),
            };
            let mut d2 = vec![0.0; n];
            for j in (0..n).rev() {
                let rest: f64 = (j + 1..n).map(|k| u(j, k) * u(j, k) * d2[k]).sum();
                d2[j] = h(j, j) + 0.01 * mean - rest;
                assert!(d2[j] > 0.0, "{j}");
            }
            for i in (0..n).step_by(13) {
                for j in (i + 1..n).step_by(7) {
                    let sum: f64 = (j..n).map(|k| u(i, k) * u(j, k) * d2[k]).sum();
                    // Feedback is rounded to fp32: each of at most n terms is off by
                    // 2^-23 of its size, which the diagonals bound.
                    let bound = n as f64 * f64::from(f32::EPSILON) * (h(i, i) + mean);
                    assert!((sum - h(i, j)).abs() <= bound, "{i} {j}: {sum} {}", h(i, j));
                }
            }
        }
    }

    #[test]
    fn inputs_that_say_nothing_have_no_factor() {
        assert!(factor(&[0.0; 16], 4, None, 0.01, true).is_none());
        assert!(factor(&[f32::NAN; 16], 4, None, 0.01, true).is_none());
        // One direction only: damping makes it definite.
        assert!(factor(&[1.0; 16], 4, None, 0.01, false).is_some());
    }
}
