//! Tensors of a checkpoint under canonical names.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use carat_bundle::{
    manifest::SkippedTensor,
    source::{SourceError, TensorInfo, TensorSource},
    spec::{MixerSpec, ModelSpec, TensorRole},
};
use carat_tensor::{DType, Shape};

use crate::ImportError;

/// The bytes of one file, mapped or in memory, shared by its tensors.
#[derive(Clone)]
pub(crate) struct Bytes(pub(crate) Arc<dyn AsRef<[u8]> + Send + Sync>);

impl Bytes {
    pub(crate) fn as_slice(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// One tensor as a checkpoint stores it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) bytes: Bytes,
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// The format, or the name of one that is not supported.
    pub(crate) dtype: Result<DType, String>,
    pub(crate) shape: Shape,
}

impl Stored {
    /// The bytes; the range was checked when the file was parsed.
    pub(crate) fn data(&self) -> &[u8] {
        self.bytes
            .as_slice()
            .get(self.start..self.start + self.len)
            .unwrap_or(&[])
    }

    /// All elements as fp32, for tensors stored as plain floats.
    pub(crate) fn floats(&self) -> Option<Vec<f32>> {
        let dtype = self.dtype.as_ref().ok().filter(|d| d.is_float())?;
        Some(float_elements(*dtype, self.data()))
    }
}

/// Decodes little-endian floats of a float format.
pub(crate) fn float_elements(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => {
            let pairs = bytes.as_chunks::<2>().0;
            pairs
                .iter()
                .map(|b| half::f16::from_le_bytes(*b).to_f32())
                .collect()
        }
        DType::BF16 => {
            let pairs = bytes.as_chunks::<2>().0;
            pairs
                .iter()
                .map(|b| half::bf16::from_le_bytes(*b).to_f32())
                .collect()
        }
        _ => {
            let quads = bytes.as_chunks::<4>().0;
            quads.iter().map(|b| f32::from_le_bytes(*b)).collect()
        }
    }
}

/// All tensors of a checkpoint by the checkpoint's own names.
#[derive(Clone, Default)]
pub(crate) struct RawTensors(pub(crate) BTreeMap<String, Stored>);

/// What a family's name table and config say about a checkpoint's tensors.
pub(crate) struct Layout<'a> {
    /// Canonical name to the checkpoint's.
    pub(crate) name: &'a dyn Fn(&str) -> String,
    /// Rows of q and k are stored pairwise interleaved within each head.
    pub(crate) permuted_qk: bool,
    /// Tensors that were read as configuration.
    pub(crate) consumed: &'a BTreeSet<String>,
    /// Why a tensor carries nothing the model needs; `None` if it may.
    pub(crate) tolerated: &'a dyn Fn(&str) -> Option<&'static str>,
}

struct Entry {
    stored: Stored,
    dtype: DType,
    shape: Shape,
    /// Head width, if rows are interleaved within heads.
    permuted: Option<usize>,
}

/// The checkpoint's tensors in logical form.
pub(crate) struct Mapped {
    origin: String,
    entries: BTreeMap<String, Entry>,
}

/// Matches the checkpoint's tensors with those that the spec needs: exactly
/// those, in exactly these shapes. What is left out goes to `skipped`.
pub(crate) fn assemble(
    path: &Path,
    spec: &ModelSpec,
    mut raw: RawTensors,
    layout: &Layout<'_>,
    skipped: &mut Vec<SkippedTensor>,
) -> Result<Mapped, ImportError> {
    let head_dims = permuted_head_dims(spec);
    let mut entries = BTreeMap::new();
    for decl in spec.tensors() {
        let name = (layout.name)(&decl.name);
        let Some(stored) = raw.0.remove(&name) else {
            return Err(ImportError::MissingTensor {
                path: path.to_owned(),
                tensor: name,
                shape: decl.shape,
            });
        };
        if stored.shape != decl.shape {
            return Err(ImportError::TensorShape {
                path: path.to_owned(),
                tensor: name,
                expected: decl.shape,
                found: stored.shape,
            });
        }
        let dtype = match &stored.dtype {
            Ok(d) => *d,
            Err(found) => {
                return Err(ImportError::tensor(
                    path,
                    name,
                    format!("expected F32, F16 or BF16 elements, found {found}"),
                ));
            }
        };
        let float_only = matches!(decl.role, TensorRole::Norm | TensorRole::Bias);
        if float_only && !dtype.is_float() {
            return Err(ImportError::tensor(
                path,
                name,
                format!("expected F32, F16 or BF16 elements, found {dtype}"),
            ));
        }
        let permuted = layout
            .permuted_qk
            .then(|| head_dims.get(decl.name.as_str()).copied())
            .flatten();
        entries.insert(
            decl.name,
            Entry {
                stored,
                dtype,
                shape: decl.shape,
                permuted,
            },
        );
    }
    let mut unexpected = Vec::new();
    for name in raw.0.into_keys() {
        let reason = match layout.consumed.contains(&name) {
            true => Some("read as configuration, which the spec holds"),
            false => (layout.tolerated)(&name),
        };
        match reason {
            Some(reason) => skipped.push(SkippedTensor {
                name,
                reason: reason.into(),
            }),
            None => unexpected.push(name),
        }
    }
    if !unexpected.is_empty() {
        return Err(ImportError::UnexpectedTensors {
            path: path.to_owned(),
            tensors: unexpected,
        });
    }
    Ok(Mapped {
        origin: path.display().to_string(),
        entries,
    })
}

/// Head width of every tensor whose rows a permuting converter reorders.
fn permuted_head_dims(spec: &ModelSpec) -> BTreeMap<String, usize> {
    let mut out = BTreeMap::new();
    for (i, layer) in spec.layers.iter().enumerate() {
        let MixerSpec::Attention(a) = &layer.mixer;
        for n in ["q.weight", "q.bias", "k.weight", "k.bias"] {
            out.insert(format!("layers.{i}.attn.{n}"), a.head_dim);
        }
    }
    out
}

/// Undoes the row order in which a converter makes rotary pairs adjacent: within
/// each head, stored row `2i + half` is logical row `half * head_dim / 2 + i`.
/// Whole rows move, so any format survives bit for bit.
pub(crate) fn unpermute_rows(bytes: &[u8], row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks(row_bytes * head_dim) {
        for half in 0..2 {
            for i in 0..head_dim / 2 {
                let row = (2 * i + half) * row_bytes;
                out.extend_from_slice(&head[row..row + row_bytes]);
            }
        }
    }
    out
}

/// Puts logical rows of q or k (whole heads of `head_dim` rows, `row_bytes` each)
/// into the order in which GGUF converters of interleaved-rotary architectures
/// store them: rows `i` and `head_dim / 2 + i` of a head become neighbours.
pub fn permute_rows(bytes: &[u8], row_bytes: usize, head_dim: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for head in bytes.chunks(row_bytes * head_dim) {
        for i in 0..head_dim / 2 {
            for half in 0..2 {
                let row = (half * head_dim / 2 + i) * row_bytes;
                out.extend_from_slice(&head[row..row + row_bytes]);
            }
        }
    }
    out
}

impl TensorSource for Mapped {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.entries.get(name).map(|e| TensorInfo {
            dtype: e.dtype,
            shape: e.shape.clone(),
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let entry = self.entries.get(name).ok_or_else(|| SourceError::Missing {
            origin: self.origin.clone(),
            name: name.to_owned(),
        })?;
        let malformed = |problem: String| SourceError::Malformed {
            origin: self.origin.clone(),
            name: name.to_owned(),
            problem,
        };
        let expected = entry
            .shape
            .bytes(entry.dtype)
            .map_err(|e| malformed(e.to_string()))?;
        let data = entry.stored.data();
        if data.len() != expected {
            return Err(malformed(format!(
                "expected {expected} bytes, found {}",
                data.len()
            )));
        }
        match entry.permuted {
            None => Ok(Cow::Borrowed(data)),
            Some(head_dim) => {
                let rows = entry.shape.dims()[0];
                if rows == 0 || !rows.is_multiple_of(head_dim) {
                    return Err(malformed(format!("{rows} rows are not whole heads")));
                }
                Ok(Cow::Owned(unpermute_rows(data, expected / rows, head_dim)))
            }
        }
    }
}

/// A path's file name for messages and notes.
pub(crate) fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(
        || path.display().to_string(),
        |n| n.to_string_lossy().into(),
    )
}
