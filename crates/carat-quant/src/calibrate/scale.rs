//! Which scales the inputs of matrices get.

use ndarray::{ArrayView2, linalg::general_mat_mul};

use super::{
    fold::{Pair, share},
    stats::Stats,
};
use crate::{
    matrix::{Method, Source, quantize},
    recipe::schema::{Calibration, InputScales},
};
use carat_tensor::DType;

/// Exponents that AWQ's search tries, in 20ths of the mean magnitude.
const EXPONENTS: std::ops::RangeInclusive<u16> = 0..=20;

/// Rows of a matrix by which exponents are compared: this many runs of as many
/// neighbours as share a palette in the presets.
const RUNS: usize = 16;
const RUN: usize = 32;

/// A matrix of a pair.
pub(crate) struct Weights {
    pub(crate) method: Method,
    pub(crate) columns: usize,
    /// `[rows, columns]`
    pub(crate) weights: Vec<f32>,
}

/// The scales of a pair's inputs, `None` if all are 1.
pub(crate) fn choose(
    settings: &Calibration,
    pair: &Pair,
    stats: &Stats,
    matrices: &[Weights],
) -> Result<Option<Vec<f32>>, String> {
    match settings.scales {
        InputScales::None => Ok(None),
        InputScales::Awq => awq(pair, stats, matrices),
        InputScales::Smoothquant => Ok(smoothquant(settings.strength, pair, stats, matrices)),
    }
}

/// Scales whose product is about 1, so that they stay in range.
fn normalized(mut scales: Vec<f32>) -> Option<Vec<f32>> {
    let logs: f64 = scales.iter().map(|s| f64::from(s.ln())).sum();
    let mean = (logs / scales.len().max(1) as f64).exp() as f32;
    for s in &mut scales {
        *s = (*s / mean).clamp(1e-3, 1e3);
    }
    scales
        .iter()
        .all(|s| s.is_finite() && *s > 0.0)
        .then_some(scales)
}

/// `s = max|x|^a / max|w|^(1 - a)` for each column.
fn smoothquant(
    strength: f32,
    pair: &Pair,
    stats: &Stats,
    matrices: &[Weights],
) -> Option<Vec<f32>> {
    let mut inputs = stats.largest.clone();
    share(pair, &mut inputs);
    let mut weights = vec![0.0f32; inputs.len()];
    for matrix in matrices {
        for row in matrix.weights.chunks(matrix.columns) {
            for (largest, w) in weights.iter_mut().zip(row) {
                *largest = largest.max(w.abs());
            }
        }
    }
    share(pair, &mut weights);
    // Columns without inputs or weights have nothing to balance.
    let scales = inputs
        .iter()
        .zip(&weights)
        .map(|(&x, &w)| match x > 0.0 && w > 0.0 {
            true => x.powf(strength) / w.powf(1.0 - strength),
            false => 1.0,
        });
    normalized(scales.collect())
}

/// `s = mean|x|^a` with the `a` whose quantized matrices are nearest in their outputs
/// to the original ones, on sampled inputs and rows.
fn awq(pair: &Pair, stats: &Stats, matrices: &[Weights]) -> Result<Option<Vec<f32>>, String> {
    let count = stats.count.max(1) as f64;
    let mut mean: Vec<f32> = stats.sums.iter().map(|s| (s / count) as f32).collect();
    share(pair, &mut mean);
    let floor = mean.iter().copied().fold(0.0, f32::max) * 1e-4;
    if !(floor.is_finite() && floor > 0.0) {
        return Ok(None);
    }
    let rows: Vec<(Method, usize, Vec<f32>)> = matrices.iter().map(sampled).collect();
    let mut best: Option<(f64, Option<Vec<f32>>)> = None;
    for exponent in EXPONENTS {
        let power = f32::from(exponent) / 20.0;
        let scales = match exponent {
            0 => None,
            _ => normalized(mean.iter().map(|m| m.max(floor).powf(power)).collect()),
        };
        let mut error = 0.0;
        for (method, columns, rows) in &rows {
            error += output_error(method, *columns, rows, scales.as_deref(), stats)?;
        }
        // Ties go to the smaller exponent.
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, scales));
        }
    }
    Ok(best.and_then(|(_, scales)| scales))
}

/// Evenly spaced runs of rows of a matrix.
fn sampled(matrix: &Weights) -> (Method, usize, Vec<f32>) {
    let run = RUN * matrix.columns;
    let runs: Vec<&[f32]> = matrix.weights.chunks(run).collect();
    let step = runs.len().div_ceil(RUNS).max(1);
    let rows = runs.into_iter().step_by(step).flatten().copied().collect();
    (matrix.method, matrix.columns, rows)
}

/// Squared error of the outputs of quantized rows on the sampled inputs.
fn output_error(
    method: &Method,
    columns: usize,
    rows: &[f32],
    scales: Option<&[f32]>,
    stats: &Stats,
) -> Result<f64, String> {
    let count = rows.len() / columns;
    let mut scaled = rows.to_vec();
    let mut importance = stats.importance();
    if let Some(scales) = scales {
        for row in scaled.chunks_mut(columns) {
            row.iter_mut().zip(scales).for_each(|(w, s)| *w *= s);
        }
        for (m, s) in importance.iter_mut().flatten().zip(scales) {
            *m /= s * s;
        }
    }
    let bytes: Vec<u8> = scaled.iter().flat_map(|w| w.to_le_bytes()).collect();
    let source = Source {
        dtype: DType::F32,
        rows: count,
        columns,
        data: &bytes,
    };
    let matrix = quantize(method, source, importance.as_deref()).map_err(|e| e.to_string())?;
    let mut errors = vec![0.0f32; rows.len()];
    for (row, (out, weights)) in errors
        .chunks_mut(columns)
        .zip(rows.chunks(columns))
        .enumerate()
    {
        matrix.decode_row(row, out);
        for (column, (e, w)) in out.iter_mut().zip(weights).enumerate() {
            *e = *e / scales.map_or(1.0, |s| s[column]) - w;
        }
    }
    let inputs = ArrayView2::from_shape((stats.sample.len() / columns, columns), &stats.sample)
        .map_err(|e| e.to_string())?;
    let errors = ArrayView2::from_shape((count, columns), &errors).map_err(|e| e.to_string())?;
    let mut outputs = ndarray::Array2::<f32>::zeros((inputs.nrows(), count));
    general_mat_mul(1.0, &inputs, &errors.t(), 0.0, &mut outputs);
    Ok(outputs.iter().map(|v| f64::from(*v) * f64::from(*v)).sum())
}
