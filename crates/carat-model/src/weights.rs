//! Where a backend finds its weights.

use std::collections::BTreeMap;

use carat_bundle::{
    Bundle,
    convert::as_stored,
    layout::check_rows,
    manifest::Layout,
    source::{SourceError, TensorSource},
    spec::{ModelSpec, TensorDecl, TensorRole},
};
use carat_tensor::{
    DType, formats,
    packed::{self, PackedLayout, PackedRef},
};

use crate::ModelError;

/// Weights by canonical name, ready for kernels.
pub trait WeightStore: Send + Sync {
    /// A packed matrix, `None` if there is none of that name.
    fn matrix(&self, name: &str) -> Option<PackedRef<'_>>;

    /// A vector (norm or bias) in fp32, `None` if there is none of that name.
    fn vector(&self, name: &str) -> Option<Vec<f32>>;
}

/// Weights packed in memory, for running a checkpoint without a bundle.
#[derive(Debug, Default)]
pub struct MemoryWeights {
    matrices: BTreeMap<String, (PackedLayout, Vec<u8>)>,
    vectors: BTreeMap<String, Vec<f32>>,
}

impl MemoryWeights {
    /// Packs every tensor that `spec` needs, each as stored; formats without a
    /// packed layout become int8 groups, exactly.
    pub fn from_source(spec: &ModelSpec, source: &dyn TensorSource) -> Result<Self, ModelError> {
        Self::from_source_with(spec, source, &mut |_| {})
    }

    /// As [`from_source`](MemoryWeights::from_source), and tells after each
    /// tensor how many bytes of the source are done.
    pub fn from_source_with(
        spec: &ModelSpec,
        source: &dyn TensorSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, ModelError> {
        let mut out = MemoryWeights::default();
        let mut done = 0;
        for decl in spec.tensors() {
            let info = source
                .info(&decl.name)
                .ok_or_else(|| SourceError::Missing {
                    origin: source.origin().to_owned(),
                    name: decl.name.clone(),
                })?;
            let wrong = |problem: String| ModelError::Weight {
                name: decl.name.clone(),
                problem,
            };
            if info.shape != decl.shape {
                return Err(wrong(format!(
                    "shape {}, expected {}",
                    info.shape, decl.shape
                )));
            }
            let bytes = source.read(&decl.name)?;
            check_rows(info.dtype, &bytes, 0, decl.shape.columns()).map_err(wrong)?;
            match decl.role {
                TensorRole::Norm | TensorRole::Bias => {
                    let mut values = vec![0.0; decl.shape.columns()];
                    formats::decode(info.dtype, &bytes, &mut values)
                        .map_err(|e| wrong(e.to_string()))?;
                    out.vectors.insert(decl.name, values);
                }
                _ => {
                    let packed = pack(&decl, info.dtype, &bytes).map_err(wrong)?;
                    out.matrices.insert(decl.name, packed);
                }
            }
            done += bytes.len() as u64;
            progress(done);
        }
        Ok(out)
    }
}

/// Packs a matrix in the format that the default recipe stores it in.
fn pack(decl: &TensorDecl, dtype: DType, bytes: &[u8]) -> Result<(PackedLayout, Vec<u8>), String> {
    let (to, _) = as_stored(decl.role, dtype);
    let converted;
    let bytes = if to == dtype {
        bytes
    } else {
        converted = match to {
            DType::TQ2_0 => formats::tq1_0_to_tq2_0(bytes),
            _ => formats::to_int8_groups(dtype, bytes).map(|(_, codes)| codes),
        }
        .map_err(|e| e.to_string())?;
        &converted[..]
    };
    let rows = decl.shape.rows().map_err(|e| e.to_string())?;
    let layout = PackedLayout::new(to, rows, decl.shape.columns()).map_err(|e| e.to_string())?;
    let mut out = vec![0; layout.bytes()];
    packed::pack(&layout, bytes, &mut out).map_err(|e| e.to_string())?;
    Ok((layout, out))
}

impl WeightStore for MemoryWeights {
    fn matrix(&self, name: &str) -> Option<PackedRef<'_>> {
        self.matrices
            .get(name)
            .and_then(|(layout, bytes)| PackedRef::new(*layout, bytes).ok())
    }

    fn vector(&self, name: &str) -> Option<Vec<f32>> {
        self.vectors.get(name).cloned()
    }
}

/// A bundle's weights, straight from the file map.
impl WeightStore for Bundle {
    fn matrix(&self, name: &str) -> Option<PackedRef<'_>> {
        self.tensor(name).ok()?.packed()
    }

    fn vector(&self, name: &str) -> Option<Vec<f32>> {
        let tensor = self.tensor(name).ok()?;
        if tensor.entry.layout != Layout::RowMajor {
            return None;
        }
        let mut values = vec![0.0; tensor.entry.shape.elements().ok()?];
        formats::decode(tensor.entry.dtype, tensor.bytes, &mut values).ok()?;
        Some(values)
    }
}
