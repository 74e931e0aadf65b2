//! A source as a recipe would leave it, without a bundle.

use std::{borrow::Cow, collections::HashMap, sync::OnceLock};

use carat_bundle::{
    convert::{Quantize, as_stored},
    manifest::{Form, is_matrix},
    source::{SourceError, TensorInfo, TensorSource},
    spec::{ModelSpec, TensorDecl},
};
use carat_tensor::{DType, GridMatrix};
use rayon::prelude::*;

/// A source whose tensors are what a recipe makes of them: quantized when they are
/// first read, and kept in the recipe's own form; decoded to fp32 whenever they are
/// read. The values are those that a bundle of this recipe holds, bit for bit, since
/// both come from the same [`Quantize`].
pub struct Simulated<'a> {
    source: &'a dyn TensorSource,
    quantize: &'a dyn Quantize,
    tensors: HashMap<String, Tensor>,
}

struct Tensor {
    decl: TensorDecl,
    form: Form,
    bytes: OnceLock<Result<Vec<u8>, String>>,
}

impl<'a> Simulated<'a> {
    /// `source` (its head [`Untied`](crate::Untied) where the recipe unties it) as
    /// `quantize` leaves it, for a model of `spec`.
    ///
    /// # Errors
    /// Where the recipe has no form for a tensor.
    pub fn new(
        source: &'a dyn TensorSource,
        spec: &ModelSpec,
        quantize: &'a dyn Quantize,
    ) -> Result<Simulated<'a>, SourceError> {
        let mut tensors = HashMap::new();
        for decl in spec.tensors() {
            let malformed = |problem| malformed(source, &decl.name, problem);
            // What is missing is named by whoever reads it.
            let Some(info) = source.info(&decl.name) else {
                continue;
            };
            let form = quantize.form(&decl, info.dtype).map_err(malformed)?;
            if let Some((form, _)) = form {
                let tensor = Tensor {
                    form,
                    bytes: OnceLock::new(),
                    decl: decl.clone(),
                };
                tensors.insert(decl.name, tensor);
            }
        }
        Ok(Simulated {
            source,
            quantize,
            tensors,
        })
    }

    /// The form that a changed tensor would be stored in.
    pub fn form(&self, name: &str) -> Option<Form> {
        self.tensors.get(name).map(|t| t.form)
    }

    /// The forms in which a bundle stores the matrices of `spec`, changed or kept.
    pub fn stored_forms(&self, spec: &ModelSpec) -> HashMap<String, Form> {
        let form = |decl: &TensorDecl| {
            let kept = || Some(as_stored(decl.role, self.info(&decl.name)?.dtype).0);
            let changed = self.form(&decl.name);
            changed.or_else(|| kept().map(Form::Block))
        };
        let matrices = spec.tensors().into_iter().filter(|d| is_matrix(d.role));
        matrices
            .filter_map(|decl| Some((decl.name.clone(), form(&decl)?)))
            .collect()
    }

    /// Bytes of a changed tensor in its form.
    fn stored<'t>(&self, tensor: &'t Tensor) -> Result<&'t [u8], SourceError> {
        let make = || {
            let name = &tensor.decl.name;
            let info = self.source.info(name).ok_or("is gone")?;
            let data = self.source.read(name).map_err(|e| e.to_string())?;
            self.quantize.apply(&tensor.decl, info.dtype, &data)
        };
        match tensor.bytes.get_or_init(make) {
            Ok(bytes) => Ok(bytes),
            Err(problem) => Err(malformed(self.source, &tensor.decl.name, problem.clone())),
        }
    }
}

fn malformed(source: &dyn TensorSource, name: &str, problem: String) -> SourceError {
    SourceError::Malformed {
        origin: source.origin().to_owned(),
        name: name.to_owned(),
        problem,
    }
}

impl TensorSource for Simulated<'_> {
    fn origin(&self) -> &str {
        self.source.origin()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let info = self.source.info(name)?;
        Some(match self.form(name) {
            None => info,
            Some(Form::Block(dtype)) => TensorInfo { dtype, ..info },
            Some(Form::Grid(_)) => TensorInfo {
                dtype: DType::F32,
                ..info
            },
        })
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.source.read(name);
        };
        let bytes = self.stored(tensor)?;
        let (grid, shape) = match (tensor.form, tensor.decl.shape.dims()) {
            (Form::Grid(grid), &[rows, columns]) => (grid, (rows, columns)),
            _ => return Ok(Cow::Borrowed(bytes)),
        };
        let (rows, columns) = shape;
        let matrix = GridMatrix::from_bytes(grid, rows, columns, bytes)
            .map_err(|e| malformed(self.source, name, e.to_string()))?;
        let mut out = vec![0u8; rows * columns * 4];
        let each = |(row, out): (usize, &mut [u8])| {
            let mut values = vec![0.0; columns];
            matrix.decode_row(row, &mut values);
            for (out, v) in out.chunks_exact_mut(4).zip(values) {
                out.copy_from_slice(&v.to_le_bytes());
            }
        };
        out.par_chunks_mut(columns * 4).enumerate().for_each(each);
        Ok(Cow::Owned(out))
    }
}
