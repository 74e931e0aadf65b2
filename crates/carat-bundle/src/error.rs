//! What can go wrong with a bundle.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{source::SourceError, spec::SpecError};

/// Why a bundle could not be read, written or converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The folder holds no bundle.
    #[error("{path}: is not a bundle: {problem}")]
    NotABundle {
        /// The folder.
        path: PathBuf,
        /// What is missing or different.
        problem: String,
    },
    /// A file of the bundle is not what its format says.
    #[error("{path}: {field}: {problem}")]
    Malformed {
        /// `manifest.json`, `recipe.toml` or `verify.toml`.
        path: PathBuf,
        /// The key at fault, such as `tensors.3.offset`.
        field: String,
        /// What is wrong, with expected and found.
        problem: String,
    },
    /// A tensor is missing, cannot be stored or has wrong content.
    #[error("{origin}: tensor {name:?}: {problem}")]
    Tensor {
        /// The bundle or source.
        origin: String,
        /// Canonical name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The target exists and may not be replaced.
    #[error("{path}: {problem}")]
    Exists {
        /// The target folder.
        path: PathBuf,
        /// Why it stays.
        problem: String,
    },
    /// The file system has too little room.
    #[error("{path}: needs {needed} bytes, the file system has {available} free")]
    NoSpace {
        /// The target folder.
        path: PathBuf,
        /// Bytes that the bundle takes.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// The recipe's result was never verified.
    #[error("{path}: the recipe's status is \"unverified\"")]
    Unverified {
        /// The bundle.
        path: PathBuf,
    },
    /// The spec is not a model.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl BundleError {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> BundleError {
        let path = path.as_ref().to_path_buf();
        move |source| BundleError::Io { path, source }
    }

    pub(crate) fn malformed(
        path: impl AsRef<Path>,
        field: impl Into<String>,
        problem: impl Into<String>,
    ) -> BundleError {
        BundleError::Malformed {
            path: path.as_ref().to_path_buf(),
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn tensor(
        origin: impl Into<String>,
        name: impl Into<String>,
        problem: impl Into<String>,
    ) -> BundleError {
        BundleError::Tensor {
            origin: origin.into(),
            name: name.into(),
            problem: problem.into(),
        }
    }
}
