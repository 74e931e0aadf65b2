//! What a plan's bytes must be, from shapes alone.

use carat_bundle::{manifest::is_matrix, source::TensorInfo, spec::TensorDecl};
use carat_tensor::DType;
use serde::Serialize;

use crate::{Plan, Treatment};

/// Bytes of a model's weights by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SizeTheory {
    /// Weights that are quantized.
    pub quantized_weights: u64,
    /// Their codes.
    pub codes: u64,
    /// Their scales.
    pub scales: u64,
    /// Their zero points.
    pub zero_points: u64,
    /// Their look-up tables.
    pub tables: u64,
    /// Weights that are not quantized.
    pub kept_weights: u64,
    /// Their bytes: matrices as in the source or in fp16, vectors in fp32.
    pub kept: u64,
}

impl SizeTheory {
    /// Of a plan, where `info` says how the source stores a tensor.
    ///
    /// # Errors
    ///
    /// The name of a tensor that the source does not have, or whose size overflows.
    pub fn of(
        plan: &Plan,
        info: impl Fn(&TensorDecl) -> Option<TensorInfo>,
    ) -> Result<SizeTheory, String> {
        let mut sum = SizeTheory::default();
        for t in &plan.tensors {
            let shape = &t.decl.shape;
            let size = || {
                let weights = shape.elements().ok()? as u64;
                if let (Treatment::Quantize(method), [rows, columns]) = (t.treatment, shape.dims())
                {
                    let parts = method.grid().parts(*rows, *columns).ok()?;
                    return Some((weights, Some(parts), 0));
                }
                let dtype = match t.treatment {
                    _ if !is_matrix(t.decl.role) => DType::F32,
                    Treatment::Float16 => DType::F16,
                    _ => info(&t.decl)?.dtype,
                };
                Some((weights, None, shape.bytes(dtype).ok()? as u64))
            };
            let (weights, parts, kept) = size().ok_or_else(|| t.decl.name.clone())?;
            match parts {
                Some(parts) => {
                    sum.quantized_weights += weights;
                    sum.codes += parts.codes as u64;
                    sum.scales += parts.scales as u64;
                    sum.zero_points += parts.zero_points as u64;
                    sum.tables += parts.tables as u64;
                }
                None => {
                    sum.kept_weights += weights;
                    sum.kept += kept;
                }
            }
        }
        Ok(sum)
    }

    /// Bytes of the quantized weights.
    pub fn quantized(&self) -> u64 {
        self.codes + self.scales + self.zero_points + self.tables
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.quantized() + self.kept
    }

    /// Bits for each quantized weight; 0 if there is none.
    pub fn bits_per_quantized_weight(&self) -> f64 {
        match self.quantized_weights {
            0 => 0.0,
            weights => 8.0 * self.quantized() as f64 / weights as f64,
        }
    }
}
