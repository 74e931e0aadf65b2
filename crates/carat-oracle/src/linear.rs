//! Matrix product.
//!
//! A row's outputs must not depend on how many rows are multiplied together.
//! The GEMM behind this file (matrixmultiply, reached through ndarray's safe
//! interface) has that property by its structure, and the tests check it bit for
//! bit: an output is one accumulator per slice of the inner dimension, filled in
//! ascending order whatever the shape; slices have a fixed length and are added
//! in ascending order; ragged edges run the same kernel into a scratch tile;
//! threads (which this crate leaves off) would split rows and columns only.
//! GEMMs with a separate path for one row do not have it.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use crate::parallel;

/// Outputs in one panel, the unit of parallel work: few enough that there are
/// panels for all threads, enough that packing the left operand once per panel
/// stays cheap.
const PANEL: usize = 128;

/// Work below which starting threads costs more than it saves (a few tenths of a
/// millisecond), in multiplications.
const SERIAL_WORK: usize = 1 << 23;

/// Multiplications that cost as much as packing one weight.
const PACKING: usize = 16;

/// Decoded weights of a projection, transposed: the GEMM packs its right operand
/// anew in every call, and reads columns of it several times faster than rows.
pub(crate) struct Matrix {
    /// Rows of the logical matrix.
    pub(crate) outputs: usize,
    /// Columns of the logical matrix.
    pub(crate) inputs: usize,
    /// Panels of [`PANEL`] outputs (the last may have fewer), each
    /// `[inputs, outputs of the panel]`.
    panels: Vec<f32>,
}

impl Matrix {
    /// A matrix whose rows from `first` on `rows(first, out)` writes to `out`
    /// (`[some rows, inputs]`). The first error in row order is returned.
    pub(crate) fn build<E: Send>(
        threads: usize,
        outputs: usize,
        inputs: usize,
        rows: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Matrix, E> {
        let mut panels = vec![0.0; outputs * inputs];
        let units = panels.chunks_mut(PANEL * inputs).enumerate();
        parallel::try_for_each(threads, units, |(index, panel)| {
            let mut block = vec![0.0; panel.len()];
            rows(index * PANEL, &mut block)?;
            transpose(&block, inputs, panel);
            Ok(())
        })?;
        Ok(Matrix {
            outputs,
            inputs,
            panels,
        })
    }

    /// `x` (`[rows, inputs]`) times the transpose: `[rows, outputs]`.
    pub(crate) fn multiply(&self, threads: usize, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / self.inputs * self.outputs];
        self.multiply_into(threads, x, &mut y, self.outputs, 0);
        y
    }

    /// [`multiply`](Matrix::multiply) that writes to columns `first ..` of `y`
    /// (`[rows, width]`).
    ///
    /// # Panics
    ///
    /// If lengths do not fit together: they are set by this crate, not by input.
    pub(crate) fn multiply_into(
        &self,
        threads: usize,
        x: &[f32],
        y: &mut [f32],
        width: usize,
        first: usize,
    ) {
        let inputs = self.inputs;
        let rows = x.len() / inputs;
        // Transposed once here, x is packed several times faster for every panel.
        let mut columns = vec![0.0; x.len()];
        transpose(x, inputs, &mut columns);
        let x = ArrayView2::from_shape((inputs, rows), &columns).expect("invariant: whole rows");
        let x = x.t();
        let y = ArrayViewMut2::from_shape((rows, width), y).expect("invariant: y has x's rows");
        let (_, y) = y.split_at(Axis(1), first);
        let (mut y, _) = y.split_at(Axis(1), self.outputs);

        let work = (rows + PACKING).saturating_mul(self.panels.len());
        let threads = if work < SERIAL_WORK { 1 } else { threads };
        let panels = self.panels.chunks(PANEL * inputs);
        let units: Vec<_> = panels.zip(y.axis_chunks_iter_mut(Axis(1), PANEL)).collect();
        parallel::for_each(threads, units.into_iter(), |(panel, mut y)| {
            let panel = ArrayView2::from_shape((inputs, panel.len() / inputs), panel)
                .expect("invariant: panels are whole columns");
            general_mat_mul(1.0, &x, &panel, 0.0, &mut y);
        });
    }
}

/// `rows` (`[n, columns]`) to `out` (`[columns, n]`), some rows at a time so that
/// whole cache lines are written.
fn transpose(rows: &[f32], columns: usize, out: &mut [f32]) {
    const BAND: usize = 16;
    let n = rows.len() / columns;
    for (band, rows) in rows.chunks(BAND * columns).enumerate() {
        let first = band * BAND;
        let band: Vec<&[f32]> = rows.chunks_exact(columns).collect();
        for (column, out) in out.chunks_exact_mut(n).enumerate() {
            for (o, row) in out[first..].iter_mut().zip(&band) {
                *o = row[column];
            }
        }
    }
}

/// A projection: `y = W x + b`.
pub(crate) struct Linear {
    pub(crate) weight: Matrix,
    pub(crate) bias: Option<Vec<f32>>,
}

impl Linear {
    /// `x` (`[rows, inputs]`) to `[rows, outputs]`.
    pub(crate) fn apply(&self, threads: usize, x: &[f32]) -> Vec<f32> {
        let mut y = self.weight.multiply(threads, x);
        if let Some(bias) = &self.bias {
            for row in y.chunks_exact_mut(bias.len()) {
                for (v, b) in row.iter_mut().zip(bias) {
                    *v += b;
                }
            }
        }
        y
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use proptest::prelude::*;

    /// Kinds of fp32 content that different code paths might treat differently.
    #[derive(Clone, Copy, Debug)]
    enum Pattern {
        /// Uniform in -1..1.
        Uniform,
        /// Random sign, exponents over 2^-40..2^40.
        Wide,
        /// Subnormal numbers among ordinary ones.
        Subnormal,
        /// Large terms that cancel, so that every rounding shows.
        Cancelling,
        /// Mostly zeros, of either sign.
        Sparse,
    }

    const PATTERNS: [Pattern; 5] = [
        Pattern::Uniform,
        Pattern::Wide,
        Pattern::Subnormal,
        Pattern::Cancelling,
        Pattern::Sparse,
    ];

    fn fill(pattern: Pattern, n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
        let mut bits = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..n)
            .map(|i| {
                let r = bits();
                let unit = (r >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
                match pattern {
                    Pattern::Uniform => unit,
                    Pattern::Wide => unit * 2f32.powi((r % 81) as i32 - 40),
                    Pattern::Subnormal if r % 3 == 0 => unit * f32::MIN_POSITIVE,
                    Pattern::Subnormal => unit,
                    Pattern::Cancelling => unit + if i % 2 == 0 { 1e6 } else { -1e6 },
                    Pattern::Sparse if r % 8 == 0 => unit,
                    Pattern::Sparse => 0.0f32.copysign(unit),
                }
            })
            .collect()
    }

    /// A matrix of these rows.
    fn matrix(w: &[f32], k: usize) -> Matrix {
        Matrix::build(2, w.len() / k, k, |first, out| {
            out.copy_from_slice(&w[first * k..][..out.len()]);
            Ok::<_, Infallible>(())
        })
        .unwrap()
    }

    fn product(threads: usize, x: &[f32], k: usize, w: &[f32]) -> Vec<f32> {
        matrix(w, k).multiply(threads, x)
    }

    fn assert_same_bits(a: &[f32], b: &[f32], what: impl Fn() -> String) {
        assert_eq!(a.len(), b.len(), "{}", what());
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert_eq!(
                a.to_bits(),
                b.to_bits(),
                "{}: element {i}: {a} and {b}",
                what()
            );
        }
    }

    #[test]
    fn products_are_within_the_rounding_bound_of_f64() {
        let mut inexact = 0;
        for (m, k, n) in [
            (1, 1, 1),
            (3, 7, 5),
            (2, 256, 9),
            (5, 1000, 33),
            (17, 2561, 130),
        ] {
            for pattern in PATTERNS {
                let (x, w) = (fill(pattern, m * k, 1), fill(pattern, n * k, 2));
                let y = product(2, &x, k, &w);
                for (i, &y) in y.iter().enumerate() {
                    let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
                    let terms = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w));
                    let (exact, sizes) =
                        terms.fold((0.0, 0.0), |(sum, abs), t| (sum + t, abs + t.abs()));
                    // k products and k additions in any order: at most k roundings (of
                    // u = eps / 2) touch a term, so |error| <= k u / (1 - k u) * Σ|x w|;
                    // below the normal range each rounding is absolute instead.
                    let u = f64::from(f32::EPSILON) / 2.0;
                    let k = k as f64;
                    let tiny = k * f64::from(f32::from_bits(1));
                    let bound = k * u / (1.0 - k * u) * sizes + tiny;
                    let error = (f64::from(y) - exact).abs();
                    assert!(
                        error <= bound,
                        "{pattern:?} {m}x{k}x{n}: {error} over {bound}"
                    );
                    inexact += usize::from(error > 0.0);
                }
            }
        }
        // fp32 that never rounds would be something else than fp32.
        assert!(inexact > 1000, "{inexact}");
    }

    #[test]
    fn a_row_does_not_depend_on_the_rows_beside_it() {
        // Around the sizes at which a blocked GEMM changes course: register tiles of 4 to
        // 32, row blocks of 64, inner slices of 256 or 512, column blocks of 1024.
        const ROWS: usize = 140;
        let shapes = [
            (1, 1),
            (1, 40),
            (2, 17),
            (5, 8),
            (16, 64),
            (63, 65),
            (64, 7),
            (128, 128),
            (255, 129),
            (256, 1),
            (257, 31),
            (511, 16),
            (512, 33),
            (513, 200),
            (768, 257),
            (1025, 12),
            (40, 1030),
            (2100, 24),
        ];
        for (k, n) in shapes {
            for pattern in PATTERNS {
                let (x, w) = (fill(pattern, ROWS * k, 3), fill(pattern, n * k, 4));
                let w = matrix(&w, k);
                let whole = w.multiply(1, &x);
                for m in [
                    1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128,
                ] {
                    for first in [0, 3, ROWS - m].into_iter().filter(|f| f + m <= ROWS) {
                        let y = w.multiply(1, &x[first * k..(first + m) * k]);
                        assert_same_bits(&y, &whole[first * n..(first + m) * n], || {
                            format!("{pattern:?}, k {k}, n {n}: {m} rows from {first}")
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn columns_may_be_computed_in_parts_and_by_any_number_of_threads() {
        for (m, k, n) in [(1, 300, 1000), (3, 2600, 700), (70, 513, 390)] {
            for pattern in PATTERNS {
                let (x, w) = (fill(pattern, m * k, 5), fill(pattern, n * k, 6));
                let whole = product(1, &x, k, &w);
                for threads in [2, 3, 7] {
                    assert_same_bits(&product(threads, &x, k, &w), &whole, || {
                        format!("{pattern:?} {m}x{k}x{n}: {threads} threads")
                    });
                }
                for part in [1, 37, 128, 300] {
                    let mut y = vec![f32::NAN; m * n];
                    for (i, w) in w.chunks(part * k).enumerate() {
                        matrix(w, k).multiply_into(2, &x, &mut y, n, i * part);
                    }
                    assert_same_bits(&y, &whole, || format!("{pattern:?}: parts of {part}"));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn rows_are_independent_in_any_shape(
            (m, k, n) in (1usize..80, 1usize..900, 1usize..80),
            pattern in prop::sample::select(PATTERNS.to_vec()),
            (cut, seed) in (0usize..80, any::<u64>()),
        ) {
            let cut = cut % m;
            let (x, w) = (fill(pattern, m * k, seed), fill(pattern, n * k, seed ^ 1));
            let whole = product(1, &x, k, &w);
            let mut parts = product(2, &x[..cut * k], k, &w);
            parts.extend(product(3, &x[cut * k..], k, &w));
            assert_same_bits(&parts, &whole, || format!("{pattern:?} {m}x{k}x{n} at {cut}"));
        }
    }
}
