//! Importance matrices: how much each column of a matrix matters, as llama.cpp's
//! `imatrix` measures it on a text.
//!
//! A GGUF file with `general.type = "imatrix"` holds, for each matrix `NAME` of a
//! model, `NAME.in_sum2` (the sum of the squared inputs of each column) and
//! `NAME.counts` (how many inputs there were). Their quotient is the mean square
//! of the input, which weighs a column's squared error.

use std::{collections::HashMap, path::Path};

use carat_bundle::{manifest::is_matrix, spec::ModelSpec};
use carat_tensor::{DType, formats};

use crate::{
    ImportError,
    export::gguf_name,
    gguf::{Gguf, Value},
};

/// Importance of the columns of a model's matrices, by canonical name. Matrices
/// that the file does not have, or saw no input of, are left out.
///
/// # Errors
///
/// When the file is no importance matrix, or is one of another model: an entry that
/// is no matrix of it, or has not its number of columns.
pub fn read(path: &Path, spec: &ModelSpec) -> Result<HashMap<String, Vec<f32>>, ImportError> {
    let file = Gguf::open(path)?;
    if !matches!(file.get("general.type"), Some(Value::String(kind)) if kind == "imatrix") {
        return Err(ImportError::key(
            path,
            "general.type",
            "expected \"imatrix\": the file is no importance matrix",
        ));
    }
    let matrices: HashMap<String, _> = spec
        .tensors()
        .into_iter()
        .filter(|decl| is_matrix(decl.role))
        .map(|decl| (gguf_name(&decl.name), decl))
        .collect();
    let floats = |name: &str, expected: usize| {
        let fault = |problem: String| ImportError::tensor(path, name, problem);
        let (tensor, bytes) = file
            .tensor(name)
            .zip(file.tensor_bytes(name))
            .ok_or_else(|| fault("is missing".into()))?;
        let found = tensor.shape.elements().unwrap_or(usize::MAX);
        if tensor.dtype != DType::F32 || found != expected {
            return Err(fault(format!(
                "expected {expected} values of F32, found {} of {}",
                tensor.shape, tensor.dtype
            )));
        }
        let mut values = vec![0.0; expected];
        formats::decode(DType::F32, bytes, &mut values).map_err(|e| fault(e.to_string()))?;
        match values.iter().all(|v| v.is_finite() && *v >= 0.0) {
            true => Ok(values),
            false => Err(fault("a value is negative or not finite".into())),
        }
    };
    let mut out = HashMap::new();
    for tensor in file.tensors() {
        let Some(name) = tensor.name.strip_suffix(".in_sum2") else {
            continue;
        };
        let decl = matrices.get(name).ok_or_else(|| {
            let problem = "is of no matrix of this model";
            ImportError::tensor(path, &tensor.name, problem)
        })?;
        let sums = floats(&tensor.name, decl.shape.columns())?;
        let count = floats(&format!("{name}.counts"), 1)?[0];
        let mean: Vec<f32> = sums.iter().map(|sum| sum / count).collect();
        // Without inputs, or with zeros only, nothing is known of the columns.
        if count > 0.0 && mean.iter().any(|m| *m > 0.0) {
            out.insert(decl.name.clone(), mean);
        }
    }
    Ok(out)
}
