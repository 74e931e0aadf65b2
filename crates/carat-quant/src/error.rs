//! What can go wrong with recipes.

use crate::matrix::MatrixError;

/// Why a recipe cannot be read, resolved or applied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The file is no YAML, or has keys or values that recipes do not have.
    #[error("recipe {name}: {message}")]
    Yaml {
        /// The recipe.
        name: String,
        /// Line, column and problem, with the lines around it.
        message: String,
    },
    /// The recipe contradicts itself or asks for what cannot be done.
    #[error("recipe {name}: {key}: {problem}")]
    Recipe {
        /// The recipe.
        name: String,
        /// The key at fault.
        key: String,
        /// What is wrong, with expected and found.
        problem: String,
    },
    /// The recipe does not fit the model.
    #[error("recipe {name}: tensor {tensor:?}: {problem}")]
    Tensor {
        /// The recipe.
        name: String,
        /// Canonical name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor's weights cannot be quantized.
    #[error("tensor {tensor:?}: {source}")]
    Matrix {
        /// Canonical name.
        tensor: String,
        /// Why.
        source: MatrixError,
    },
}

impl QuantError {
    pub(crate) fn recipe(
        name: &str,
        key: impl Into<String>,
        problem: impl Into<String>,
    ) -> QuantError {
        QuantError::Recipe {
            name: name.to_owned(),
            key: key.into(),
            problem: problem.into(),
        }
    }
}
