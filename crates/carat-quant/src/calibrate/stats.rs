//! What is kept of the inputs of a matrix: never the inputs themselves, so that memory
//! does not grow with the text.

use std::collections::BTreeMap;

use carat_oracle::{Tap, TapPoint, Taps};
use ndarray::{ArrayView2, ArrayViewMut2, linalg::general_mat_mul, s};
use rayon::prelude::*;

/// Rows of inputs that are kept, evenly spaced over the text, for comparing scales.
pub(crate) const SAMPLE: usize = 256;

/// Rows of a Gram matrix that are summed together.
const BAND: usize = 256;

/// Statistics of inputs of `width` columns, taken row by row in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    pub(crate) width: usize,
    pub(crate) count: usize,
    /// Sum of squares of each column.
    pub(crate) squares: Vec<f64>,
    /// Sum of magnitudes of each column.
    pub(crate) sums: Vec<f64>,
    /// Largest magnitude of each column.
    pub(crate) largest: Vec<f32>,
    /// Some rows, `[at most SAMPLE, width]`.
    pub(crate) sample: Vec<f32>,
    /// `Xᵀ X`, `[width, width]`; only the lower triangle is filled.
    pub(crate) gram: Option<Vec<f32>>,
}

impl Stats {
    fn new(width: usize, gram: bool) -> Stats {
        Stats {
            width,
            squares: vec![0.0; width],
            sums: vec![0.0; width],
            largest: vec![0.0; width],
            gram: gram.then(|| vec![0.0; width * width]),
            ..Stats::default()
        }
    }

    /// Adds `[rows, width]`; every `stride`th row of all is kept.
    fn add(&mut self, data: &[f32], stride: usize) {
        for (i, row) in data.chunks_exact(self.width).enumerate() {
            for (column, &x) in row.iter().enumerate() {
                self.squares[column] += f64::from(x) * f64::from(x);
                self.sums[column] += f64::from(x.abs());
                self.largest[column] = self.largest[column].max(x.abs());
            }
            if (self.count + i).is_multiple_of(stride) {
                self.sample.extend_from_slice(row);
            }
        }
        self.count += data.len() / self.width;
        let width = self.width;
        let Some(gram) = &mut self.gram else {
            return;
        };
        let x = ArrayView2::from_shape((data.len() / width, width), data)
            .expect("invariant: whole rows");
        // The bands do not depend on threads, and neither does a product.
        gram.par_chunks_mut(BAND * width)
            .enumerate()
            .for_each(|(band, out)| {
                let rows = out.len() / width;
                let (from, end) = (band * BAND, band * BAND + rows);
                let mut out =
                    ArrayViewMut2::from_shape((rows, width), out).expect("invariant: whole rows");
                let mut out = out.slice_mut(s![.., ..end]);
                let left = x.slice(s![.., from..end]);
                general_mat_mul(1.0, &left.t(), &x.slice(s![.., ..end]), 1.0, &mut out);
            });
    }

    /// Mean square of each column, which weighs its errors; `None` if nothing is known,
    /// for want of inputs or because all are zero.
    pub(crate) fn importance(&self) -> Option<Vec<f32>> {
        let count = self.count.max(1) as f64;
        let mean: Vec<f32> = self.squares.iter().map(|s| (s / count) as f32).collect();
        let known = mean.iter().all(|m| m.is_finite()) && mean.iter().any(|m| *m > 0.0);
        known.then_some(mean)
    }
}

/// Collects statistics of the points of a layer.
pub(crate) struct Collector {
    /// Wanted points, and whether their Gram matrix is.
    wanted: BTreeMap<TapPoint, bool>,
    stride: usize,
    pub(crate) taken: BTreeMap<TapPoint, Stats>,
}

impl Collector {
    /// For a text of so many tokens.
    pub(crate) fn new(wanted: BTreeMap<TapPoint, bool>, tokens: usize) -> Collector {
        Collector {
            wanted,
            stride: tokens.div_ceil(SAMPLE).max(1),
            taken: BTreeMap::new(),
        }
    }
}

impl Taps for Collector {
    fn wants(&self, point: TapPoint) -> bool {
        self.wanted.contains_key(&point)
    }

    fn take(&mut self, tap: Tap<'_>) {
        let gram = self.wanted.get(&tap.point).copied().unwrap_or(false);
        self.taken
            .entry(tap.point)
            .or_insert_with(|| Stats::new(tap.width, gram))
            .add(tap.data, self.stride);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_do_not_depend_on_how_rows_come() {
        let width = 300;
        let rows: Vec<f32> = (0..width * 40)
            .map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 256.0)
            .collect();
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| {
                let mut stats = Stats::new(width, true);
                stats.add(&rows[..width * 8], 4);
                stats.add(&rows[width * 8..], 4);
                stats
            })
        };
        let (one, three) = (with(1), with(3));
        assert_eq!(one.gram, three.gram);
        assert_eq!((one.count, one.sample.len()), (40, 10 * width));
        let gram = one.gram.as_ref().unwrap();
        for (i, j) in [(0, 0), (299, 3), (257, 256), (255, 0)] {
            let terms = (0..40).map(|r| rows[r * width + i] * rows[r * width + j]);
            // The terms are multiples of 2^-16 below 4, and their sum below 2^8: exact.
            assert_eq!(gram[i * width + j], terms.sum::<f32>());
        }
        let squares: f32 = (0..40).map(|r| rows[r * width].powi(2)).sum();
        assert_eq!(one.importance().unwrap()[0], squares / 40.0);
        assert_eq!(Stats::new(4, false).importance(), None);
    }
}
