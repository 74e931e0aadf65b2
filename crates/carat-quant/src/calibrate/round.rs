//! Choosing codes with the errors of other columns in mind.
//!
//! Scales, zero points and tables stay as the method chose them: what changes is which
//! code stands for a weight, so it works on every grid and costs no byte.

use carat_tensor::{
    GridMatrix,
    grid::{Code, Spread},
};
use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul, s};
use rayon::prelude::*;

use super::factor::Factor;
use crate::{
    linear::{Linear, Params},
    matrix::Method,
};

/// Rows that are rounded together: as many as share a product.
const ROWS: usize = 64;

/// Columns between two products.
const BLOCK: usize = 64;

/// Values of one row of a quantized matrix.
pub(super) struct Row<'m> {
    linear: Option<Linear>,
    scales: &'m [f32],
    zero_points: &'m [i8],
    /// Ascending.
    table: &'m [f32],
    /// Columns that share a scale.
    run: usize,
    tensor_scale: f32,
}

impl<'m> Row<'m> {
    fn new(method: &Method, matrix: &'m Parameters, row: usize) -> Row<'m> {
        let groups = match matrix.spread {
            _ if matrix.scales.is_empty() => 0..0,
            Spread::Tensor if matrix.bits.is_none() => 0..1,
            Spread::Block(n) => {
                let each = matrix.columns / usize::from(n);
                row * each..(row + 1) * each
            }
            _ => row..row + 1,
        };
        let table = match (matrix.bits, matrix.spread) {
            (Some(bits), Spread::Rows(n)) => (row / usize::from(n)) << bits,
            _ => 0,
        };
        let entries = matrix.bits.map_or(0, |bits| 1 << bits);
        Row {
            linear: match method {
                Method::Linear { linear, .. } => Some(*linear),
                Method::Palette { .. } => None,
            },
            zero_points: matrix.zero_points.get(groups.clone()).unwrap_or(&[]),
            scales: &matrix.scales[groups],
            table: &matrix.tables[table..][..entries],
            run: match matrix.spread {
                Spread::Block(n) => usize::from(n),
                _ => matrix.columns,
            },
            tensor_scale: matrix.tensor_scale,
        }
    }

    /// The code nearest to a weight, and its value.
    pub(super) fn nearest(&self, column: usize, target: f32) -> (u8, f32) {
        let group = column / self.run;
        let scale = self.scales.get(group).copied().unwrap_or(1.0);
        let Some(linear) = &self.linear else {
            let wanted = target / scale;
            // The first of equal entries, and the lower one half-way between two.
            let above = self.table.partition_point(|&v| v < wanted);
            let best = match above {
                0 => 0,
                n if n == self.table.len()
                    || wanted - self.table[n - 1] <= self.table[n] - wanted =>
                {
                    self.table.partition_point(|&v| v < self.table[n - 1])
                }
                n => n,
            };
            return (best as u8, self.table[best] * scale);
        };
        let params = Params {
            scale,
            zero_point: self.zero_points.get(group).copied().unwrap_or(0),
        };
        let mut code = [0];
        linear.codes(&[target], params, self.tensor_scale, &mut code);
        (code[0], linear.value(code[0], params, self.tensor_scale))
    }

    /// What a code stands for.
    pub(super) fn value(&self, column: usize, code: u8) -> f32 {
        let group = column / self.run;
        let scale = self.scales.get(group).copied().unwrap_or(1.0);
        let Some(linear) = &self.linear else {
            return self.table[usize::from(code)] * scale;
        };
        let params = Params {
            scale,
            zero_point: self.zero_points.get(group).copied().unwrap_or(0),
        };
        linear.value(code, params, self.tensor_scale)
    }
}

/// What of a matrix stays while its codes change.
struct Parameters {
    columns: usize,
    spread: Spread,
    /// Of an index, for tables.
    bits: Option<u8>,
    scales: Vec<f32>,
    zero_points: Vec<i8>,
    tables: Vec<f32>,
    tensor_scale: f32,
}

/// Chooses the codes of `matrix` anew, by the method that made it, for the weights
/// (`[rows, columns]`) that it stands for.
pub(crate) fn round(method: &Method, matrix: &mut GridMatrix, weights: &[f32], factor: &Factor) {
    each_band(method, matrix, weights, |rows, codes, weights| {
        round_rows(rows, codes, weights, factor);
    });
}

/// Hands out the rows of a matrix, [`ROWS`] at a time: what their codes stand for,
/// the codes, and the weights.
pub(super) fn each_band(
    method: &Method,
    matrix: &mut GridMatrix,
    weights: &[f32],
    work: impl Fn(&[Row<'_>], &mut [u8], &[f32]) + Sync,
) {
    let n = matrix.columns;
    let parameters = Parameters {
        columns: n,
        spread: matrix.grid.spread,
        bits: match matrix.grid.code {
            Code::Lut(bits) => Some(bits),
            _ => None,
        },
        scales: std::mem::take(&mut matrix.scales),
        zero_points: std::mem::take(&mut matrix.zero_points),
        tables: std::mem::take(&mut matrix.tables),
        tensor_scale: matrix.tensor_scale,
    };
    matrix
        .codes
        .par_chunks_mut(ROWS * n)
        .zip(weights.par_chunks(ROWS * n))
        .enumerate()
        .for_each(|(i, (codes, weights))| {
            let rows: Vec<Row<'_>> = (0..codes.len() / n)
                .map(|row| Row::new(method, &parameters, i * ROWS + row))
                .collect();
            work(&rows, codes, weights);
        });
    matrix.scales = parameters.scales;
    matrix.zero_points = parameters.zero_points;
    matrix.tables = parameters.tables;
}

fn round_rows(rows: &[Row<'_>], codes: &mut [u8], weights: &[f32], factor: &Factor) {
    let n = factor.order.len();
    let feedback = ArrayView2::from_shape((n, n), &factor.feedback).expect("invariant: a square");
    // In the factor's order of columns.
    let mut errors = vec![0.0f32; rows.len() * n];
    let mut moved = vec![0.0f32; rows.len() * BLOCK];
    for from in (0..n).step_by(BLOCK) {
        let end = (from + BLOCK).min(n);
        let width = end - from;
        let moved = &mut moved[..rows.len() * width];
        {
            let errors =
                ArrayView2::from_shape((rows.len(), n), &errors).expect("invariant: whole rows");
            let mut out = ArrayViewMut2::from_shape((rows.len(), width), &mut *moved)
                .expect("invariant: whole rows");
            general_mat_mul(
                1.0,
                &errors.slice(s![.., ..from]),
                &feedback.slice(s![from..end, ..from]).t(),
                0.0,
                &mut out,
            );
        }
        // Feedback within the block, by the column that it comes from.
        let within = feedback.slice(s![from..end, from..end]).t().to_owned();
        let within = within.as_standard_layout();
        for (r, row) in rows.iter().enumerate() {
            let moved = &mut moved[r * width..][..width];
            for j in 0..width {
                let column = factor.order[from + j];
                let weight = weights[r * n + column];
                let (code, value) = row.nearest(column, weight + moved[j]);
                codes[r * n + column] = code;
                let error = weight - value;
                errors[r * n + from + j] = error;
                let feedback = within.row(j);
                let feedback = feedback.as_slice().unwrap_or(&[]);
                for (moved, f) in moved.iter_mut().zip(feedback).skip(j + 1) {
                    *moved += error * f;
                }
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use carat_tensor::{DType, grid::Scale};

    use super::*;
    use crate::{
        calibrate::factor::factor,
        linear::{RangeSearch, Scheme},
        matrix::{Source, quantize},
    };

    const ROWS: usize = 70;
    pub(crate) const COLUMNS: usize = 160;

    fn random(n: usize, mut seed: u64) -> Vec<f32> {
        let mut next = move || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    pub(crate) fn methods() -> Vec<Method> {
        let linear = |code, scheme, scale, spread| Method::Linear {
            linear: Linear {
                code,
                scheme,
                scale,
                search: RangeSearch::MinMax,
            },
            spread,
        };
        let palette = |spread, scaled| Method::Palette {
            bits: 3,
            spread,
            scaled,
            decimals: None,
        };
        let block = Spread::Block(32);
        vec![
            linear(Code::Int(4), Scheme::Symmetric, Scale::F16, block),
            linear(
                Code::Int(4),
                Scheme::Asymmetric,
                Scale::F16,
                Spread::Channel,
            ),
            linear(Code::Int(4), Scheme::Q4_0, Scale::F16, block),
            linear(Code::Trit, Scheme::AbsMean, Scale::F16, Spread::Tensor),
            linear(Code::Fp4, Scheme::Symmetric, Scale::E4M3, Spread::Block(16)),
            linear(Code::Fp4, Scheme::Symmetric, Scale::E8M0, block),
            linear(
                Code::Fp8E4M3,
                Scheme::Symmetric,
                Scale::F16,
                Spread::Channel,
            ),
            palette(Spread::Rows(35), false),
            palette(Spread::Tensor, true),
        ]
    }

    pub(crate) fn quantized(method: &Method, weights: &[f32]) -> GridMatrix {
        let data: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let source = Source {
            dtype: DType::F32,
            rows: ROWS,
            columns: COLUMNS,
            data: &data,
        };
        quantize(method, source, None).unwrap()
    }

    /// Weights, 400 inputs that are mostly mixtures of twenty, and the lower triangle
    /// of their Gram matrix.
    pub(crate) fn mixtures() -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let weights = random(ROWS * COLUMNS, 2);
        let (of, noise) = (random(20 * COLUMNS, 3), random(400 * COLUMNS, 4));
        let mix = random(400 * 20, 5);
        let x: Vec<f32> = (0..400 * COLUMNS)
            .map(|i| {
                let (row, column) = (i / COLUMNS, i % COLUMNS);
                let sum: f32 = (0..20)
                    .map(|k| mix[row * 20 + k] * of[k * COLUMNS + column])
                    .sum();
                sum + 0.1 * noise[i]
            })
            .collect();
        let mut gram = vec![0.0; COLUMNS * COLUMNS];
        for x in x.chunks(COLUMNS) {
            for i in 0..COLUMNS {
                for j in 0..=i {
                    gram[i * COLUMNS + j] += x[i] * x[j];
                }
            }
        }
        (weights, x, gram)
    }

    /// Squared error of the outputs on inputs `x`.
    fn error(matrix: &GridMatrix, weights: &[f32], x: &[f32]) -> f64 {
        let mut row = vec![0.0; COLUMNS];
        let mut sum = 0.0;
        for (i, weights) in weights.chunks(COLUMNS).enumerate() {
            matrix.decode_row(i, &mut row);
            for x in x.chunks(COLUMNS) {
                let terms = row.iter().zip(weights).zip(x);
                let e: f64 = terms.map(|((q, w), x)| f64::from((q - w) * x)).sum();
                sum += e * e;
            }
        }
        sum
    }

    #[test]
    fn inputs_that_are_unrelated_leave_the_nearest_codes() {
        let weights = random(ROWS * COLUMNS, 1);
        let mut gram = vec![0.0; COLUMNS * COLUMNS];
        (0..COLUMNS).for_each(|i| gram[i * (COLUMNS + 1)] = 1.0 + i as f32);
        for method in methods() {
            let mut matrix = quantized(&method, &weights);
            let nearest = matrix.clone();
            let factor = factor(&gram, COLUMNS, None, 0.01, true).unwrap();
            round(&method, &mut matrix, &weights, &factor);
            assert!(matrix.scales == nearest.scales && matrix.tables == nearest.tables);
            let exact = match method {
                // Its encoder takes the code by the scale before that is rounded.
                Method::Linear { linear, .. } => linear.scheme != Scheme::Q4_0,
                // Clusters are of weights that are rounded to fp16.
                Method::Palette { .. } => false,
            };
            assert!(!exact || matrix == nearest, "{}", nearest.grid);
            let (mut a, mut b) = (vec![0.0; COLUMNS], vec![0.0; COLUMNS]);
            for (row, weights) in weights.chunks(COLUMNS).enumerate() {
                matrix.decode_row(row, &mut a);
                nearest.decode_row(row, &mut b);
                for ((a, b), w) in a.iter().zip(&b).zip(weights) {
                    // Half-way between two the difference is one rounding.
                    assert!(
                        (a - w).abs() <= (b - w).abs() + f32::EPSILON,
                        "{}",
                        nearest.grid
                    );
                }
            }
        }
    }

    #[test]
    fn related_inputs_make_good_each_others_errors() {
        let (weights, x, gram) = mixtures();
        for method in methods() {
            for by_weight in [false, true] {
                let nearest = quantized(&method, &weights);
                let made = |threads: usize| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                    pool.build().unwrap().install(|| {
                        let factor = factor(&gram, COLUMNS, None, 0.01, by_weight).unwrap();
                        let mut matrix = nearest.clone();
                        round(&method, &mut matrix, &weights, &factor);
                        matrix
                    })
                };
                let (matrix, three) = (made(1), made(3));
                assert!(matrix == three, "{}", matrix.grid);
                let (found, plain) = (error(&matrix, &weights, &x), error(&nearest, &weights, &x));
                // Twenty directions of 160 hold nearly all of the error, and there is
                // room to keep out of them: half of it would be a poor result.
                assert!(found < plain / 2.0, "{}: {found} of {plain}", matrix.grid);
            }
        }
    }
}
