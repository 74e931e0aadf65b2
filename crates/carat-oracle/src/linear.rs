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

use std::borrow::Cow;

use carat_tensor::{DType, formats, formats::FormatError};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};

use crate::parallel;
use crate::rounding::Rounding;

/// Outputs in one panel, the unit of parallel work: few enough that there are
/// panels for all threads, enough that packing the left operand once per panel
/// stays cheap.
pub(crate) const PANEL: usize = 256;

/// Work below which starting threads costs more than it saves (a few tenths of a
/// millisecond), in multiplications.
const SERIAL_WORK: usize = 1 << 23;

/// Multiplications that cost as much as packing one weight.
const PACKING: usize = 16;

/// A projection's weights in panels of [`PANEL`] outputs (the last may have fewer),
/// each transposed to `[inputs, outputs of the panel]`: the GEMM packs its right
/// operand anew in every call, and reads columns of it several times faster than rows.
pub(crate) struct Matrix<'w> {
    /// Rows of the logical matrix.
    pub(crate) outputs: usize,
    /// Columns of the logical matrix.
    pub(crate) inputs: usize,
    panels: Panels<'w>,
}

enum Panels<'w> {
    /// All in fp32.
    Decoded(Vec<f32>),
    /// As stored, rows of whole blocks; a panel is decoded when it is its turn.
    Stored(DType, Cow<'w, [u8]>),
}

/// A panel in the making, reused from one to the next.
#[derive(Default)]
struct Scratch {
    rows: Vec<f32>,
    panel: Vec<f32>,
}

impl<'w> Matrix<'w> {
    /// A matrix of rows of `inputs` weights in a block format.
    ///
    /// # Errors
    ///
    /// If the bytes are not rows of whole blocks, or have codes that do not exist.
    pub(crate) fn new(
        dtype: DType,
        bytes: Cow<'w, [u8]>,
        inputs: usize,
    ) -> Result<Matrix<'w>, FormatError> {
        formats::check(dtype, &bytes)?;
        let row_bytes = dtype.row_bytes(inputs).unwrap_or(bytes.len()).max(1);
        Ok(Matrix {
            outputs: bytes.len() / row_bytes,
            inputs,
            panels: Panels::Stored(dtype, bytes),
        })
    }

    /// The same with all panels decoded once and for all.
    pub(crate) fn decoded(self, threads: usize) -> Matrix<'static> {
        let mut panels = vec![0.0; self.outputs * self.inputs];
        let units = panels.chunks_mut(PANEL * self.inputs).enumerate();
        parallel::for_each_with(threads, units, Scratch::default, |scratch, (index, out)| {
            out.copy_from_slice(self.panel(index, scratch));
        });
        Matrix {
            outputs: self.outputs,
            inputs: self.inputs,
            panels: Panels::Decoded(panels),
        }
    }

    /// Panel `index`, `[inputs, outputs of the panel]`.
    fn panel<'p>(&'p self, index: usize, scratch: &'p mut Scratch) -> &'p [f32] {
        let first = index * PANEL;
        let rows = PANEL.min(self.outputs - first);
        let len = rows * self.inputs;
        match &self.panels {
            Panels::Decoded(panels) => &panels[first * self.inputs..][..len],
            Panels::Stored(dtype, bytes) => {
                let row_bytes = bytes.len() / self.outputs;
                let bytes = &bytes[first * row_bytes..][..rows * row_bytes];
                scratch.panel.resize(len, 0.0);
                scratch.rows.resize(BAND.min(rows) * self.inputs, 0.0);
                // A band at a time, so that what was decoded is still in the cache.
                for (band, bytes) in bytes.chunks(BAND * row_bytes).enumerate() {
                    let decoded = &mut scratch.rows[..bytes.len() / row_bytes * self.inputs];
                    formats::decode(*dtype, bytes, decoded)
                        .expect("invariant: lengths and codes were checked at first");
                    transpose_band(decoded, self.inputs, rows, band * BAND, &mut scratch.panel);
                }
                &scratch.panel
            }
        }
    }

    /// `x` (`[rows, inputs]`) times the transpose: `[rows, outputs]`.
    ///
    /// # Panics
    ///
    /// If lengths do not fit together: they are set by this crate, not by input.
    pub(crate) fn multiply(&self, threads: usize, x: &[f32]) -> Vec<f32> {
        let inputs = self.inputs;
        let rows = x.len() / inputs;
        let mut y = vec![0.0; rows * self.outputs];
        // Transposed once here, x is packed several times faster for every panel.
        let mut columns = vec![0.0; x.len()];
        transpose(x, inputs, &mut columns);
        let x = ArrayView2::from_shape((inputs, rows), &columns).expect("invariant: whole rows");
        let x = x.t();
        let shape = (rows, self.outputs);
        let mut view = ArrayViewMut2::from_shape(shape, &mut y).expect("invariant: y has x's rows");

        let work = (rows + PACKING).saturating_mul(inputs * self.outputs);
        let threads = if work < SERIAL_WORK { 1 } else { threads };
        let units: Vec<_> = view
            .axis_chunks_iter_mut(Axis(1), PANEL)
            .enumerate()
            .collect();
        let units = units.into_iter();
        parallel::for_each_with(
            threads,
            units,
            Scratch::default,
            |scratch, (index, mut y)| {
                let panel = self.panel(index, scratch);
                let panel = ArrayView2::from_shape((inputs, panel.len() / inputs), panel)
                    .expect("invariant: panels are whole columns");
                general_mat_mul(1.0, &x, &panel, 0.0, &mut y);
            },
        );
        y
    }
}

/// Rows that are transposed together, so that whole cache lines are written.
const BAND: usize = 16;

/// `rows` (`[n, columns]`) to `out` (`[columns, n]`).
fn transpose(rows: &[f32], columns: usize, out: &mut [f32]) {
    let n = rows.len() / columns;
    for (band, rows) in rows.chunks(BAND * columns).enumerate() {
        transpose_band(rows, columns, n, band * BAND, out);
    }
}

/// Up to [`BAND`] rows (`[some, columns]`), which are the rows from `first` on of a
/// matrix of `n`, to their places in `out` (`[columns, n]`).
fn transpose_band(rows: &[f32], columns: usize, n: usize, first: usize, out: &mut [f32]) {
    let band: Vec<&[f32]> = rows.chunks_exact(columns).collect();
    for (column, out) in out.chunks_exact_mut(n).enumerate() {
        for (o, row) in out[first..].iter_mut().zip(&band) {
            *o = row[column];
        }
    }
}

/// A projection: `y = W x + b`.
pub(crate) struct Linear<'w> {
    pub(crate) weight: Matrix<'w>,
    pub(crate) bias: Option<Vec<f32>>,
    /// What happens to `x` first.
    pub(crate) input: Rounding,
}

impl Linear<'_> {
    /// `x` (`[rows, inputs]`) to `[rows, outputs]`.
    pub(crate) fn apply(&self, threads: usize, x: &[f32]) -> Vec<f32> {
        let x = self.input.apply(x, self.weight.inputs);
        let mut y = self.weight.multiply(threads, &x);
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

    /// A matrix of these rows, as stored.
    fn matrix(w: &[f32], k: usize) -> Matrix<'static> {
        let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
        Matrix::new(DType::F32, bytes.into(), k).unwrap()
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
    fn columns_may_be_computed_by_any_number_of_threads_decoded_or_as_stored() {
        for (m, k, n) in [(1, 300, 1000), (3, 2600, 700), (70, 513, 390)] {
            for pattern in PATTERNS {
                let (x, w) = (fill(pattern, m * k, 5), fill(pattern, n * k, 6));
                let whole = product(1, &x, k, &w);
                for threads in [2, 3, 7] {
                    assert_same_bits(&product(threads, &x, k, &w), &whole, || {
                        format!("{pattern:?} {m}x{k}x{n}: {threads} threads")
                    });
                }
                let decoded = matrix(&w, k).decoded(2).multiply(2, &x);
                assert_same_bits(&decoded, &whole, || format!("{pattern:?}: decoded"));
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
