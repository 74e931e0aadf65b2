//! Whether a checkpoint's weights are dense, quantized, ternary, or the latent
//! master of a ternary model.
//!
//! A model trained for ternary weights keeps full-precision *latent* weights
//! that are ternarized in every forward pass; run as they are, they do not
//! answer like the model. So the label decides what may be claimed:
//!
//! * **ternary** only if every linear is stored as TQ1_0 or TQ2_0, or if in
//!   every 256-block of every linear the values are one of `-d`, `0`, `d`;
//! * **latent** if the configuration says so, or if the linears show the trace
//!   of that training: latent weights drift to the threshold at which they change
//!   their code, half the mean magnitude, and stay there. A smooth distribution
//!   has no bump at that place, whatever its tails.
//!
//! The trace is measured as a second difference: with `x = |w| / mean|w|`, the
//! share of `0.4 <= x < 0.6` over the mean share of the intervals of equal width
//! beside it; median over the linears. Measured on whole checkpoints (median over
//! linears; smallest and largest single linear in brackets):
//!
//! | checkpoint | |
//! |---|---|
//! | trained ternary, scale per 256 block, latent weights | 2.65 (1.07 – 3.70) |
//! | trained ternary, scale per tensor, latent weights | 1.25 (1.10 – 1.69) |
//! | six small trained dense models of five architectures | 1.003 – 1.016 (0.96 – 1.09) |
//! | a 135M model stored in 4 bits, decoded | 1.010 (0.91 – 1.06) |
//! | fourteen tiny random models | 0.998 – 1.030 (0.85 – 1.17) |
//!
//! The bound of 1.12 is four times as far above 1 as any dense model's median
//! and half as far as the weakest latent one's.

use std::path::Path;

use carat_bundle::{
    source::TensorSource,
    spec::{ModelSpec, TensorRole},
    ternary,
};
use carat_tensor::DType;

use crate::{
    ImportError, WeightKind,
    source::{Mapped, float_elements},
};

/// What to tell the user about a latent master.
pub(crate) const LATENT_NOTE: &str = "the weights are the full-precision latent master of a ternary \
     model: run as they are, they do not answer like the ternary model";

/// See the module's table.
const LATENT_BOUND: f64 = 1.12;
/// Linears that are sampled, spread over the model.
const SAMPLED_LINEARS: usize = 48;
/// Rows of a linear that are sampled, spread over it.
const SAMPLED_ROWS: usize = 64;
/// With fewer weights in the three intervals a linear says nothing: at this
/// count the ratio's standard error is 0.05.
const MIN_COUNT: usize = 2_000;

/// Classifies the weights that the spec multiplies with activations.
pub(crate) fn classify(
    path: &Path,
    spec: &ModelSpec,
    tensors: &Mapped,
) -> Result<WeightKind, ImportError> {
    let linears: Vec<(String, DType)> = spec
        .tensors()
        .into_iter()
        .filter(|t| t.role == TensorRole::Linear)
        .filter_map(|t| tensors.info(&t.name).map(|i| (t.name, i.dtype)))
        .collect();
    let (ternary, rest): (Vec<_>, Vec<_>) = linears
        .into_iter()
        .partition(|(_, d)| matches!(d, DType::TQ1_0 | DType::TQ2_0));
    if rest.is_empty() {
        return Ok(WeightKind::Ternary);
    }
    if !rest.iter().all(|(_, d)| d.is_float()) {
        return Ok(WeightKind::Quantized);
    }
    if all_ternary(path, tensors, &rest)? {
        return Ok(WeightKind::Ternary);
    }
    if !ternary.is_empty() {
        return Ok(WeightKind::Quantized);
    }
    let linears = rest;
    let mut ratios = Vec::new();
    for i in spread(linears.len(), SAMPLED_LINEARS) {
        let (name, dtype) = &linears[i];
        if let Some(ratio) = threshold_ratio(&sample(path, tensors, name, *dtype)?) {
            ratios.push(ratio);
        }
    }
    ratios.sort_by(f64::total_cmp);
    match ratios.get(ratios.len() / 2) {
        Some(median) if *median > LATENT_BOUND => Ok(WeightKind::TernaryLatent),
        _ => Ok(WeightKind::Dense),
    }
}

/// Up to `count` indices below `len`, evenly spread.
fn spread(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let n = len.min(count);
    (0..n).map(move |i| i * len / n)
}

fn read<'a>(
    path: &Path,
    tensors: &'a Mapped,
    name: &str,
) -> Result<std::borrow::Cow<'a, [u8]>, ImportError> {
    tensors
        .read(name)
        .map_err(|e| ImportError::tensor(path, name, e.to_string()))
}

/// Some rows of a linear as fp32.
fn sample(
    path: &Path,
    tensors: &Mapped,
    name: &str,
    dtype: DType,
) -> Result<Vec<f32>, ImportError> {
    let bytes = read(path, tensors, name)?;
    let Some(row) = row_bytes(tensors, name, dtype) else {
        return Ok(Vec::new());
    };
    let rows = bytes.len() / row;
    Ok(spread(rows, SAMPLED_ROWS)
        .flat_map(|r| float_elements(dtype, &bytes[r * row..(r + 1) * row]))
        .collect())
}

fn row_bytes(tensors: &Mapped, name: &str, dtype: DType) -> Option<usize> {
    let columns = tensors.info(name)?.shape.columns();
    dtype.row_bytes(columns).filter(|&b| b > 0)
}

/// Share of weights around the ternarization threshold over that beside it.
fn threshold_ratio(weights: &[f32]) -> Option<f64> {
    let sum: f64 = weights.iter().map(|w| f64::from(w.abs())).sum();
    let mean = sum / weights.len().max(1) as f64;
    if !(mean.is_finite() && mean > 0.0) {
        return None;
    }
    let mut counts = [0usize; 3];
    for w in weights {
        // Intervals 0.2..0.4, 0.4..0.6 and 0.6..0.8 of the mean magnitude.
        let x = f64::from(w.abs()) / mean;
        if (0.2..0.8).contains(&x) {
            counts[if x < 0.4 {
                0
            } else if x < 0.6 {
                1
            } else {
                2
            }] += 1;
        }
    }
    if counts.iter().sum::<usize>() < MIN_COUNT {
        return None;
    }
    let beside = (counts[0] + counts[2]) as f64 / 2.0;
    Some(counts[1] as f64 / beside.max(1.0))
}

/// Whether each 256-block of each linear has one magnitude beside zero.
fn all_ternary(
    path: &Path,
    tensors: &Mapped,
    linears: &[(String, DType)],
) -> Result<bool, ImportError> {
    let mut any = false;
    for (name, dtype) in linears {
        let columns = tensors.info(name).map_or(0, |i| i.shape.columns());
        match ternary::classify(*dtype, columns, &read(path, tensors, name)?) {
            ternary::Values::Other => return Ok(false),
            ternary::Values::Ternary => any = true,
            ternary::Values::Zeros => {}
        }
    }
    Ok(any)
}
