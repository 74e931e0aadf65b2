use std::path::PathBuf;

use carat_bundle::BundleError;
use carat_bundle::source::SourceError;
use carat_engine::EngineError;
use carat_oracle::OracleError;

/// Why there is no judgement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FidelityError {
    /// The oracle has no answer.
    #[error(transparent)]
    Oracle(#[from] OracleError),
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A tensor could not be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A bundle or a file of it could not be read or written.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A fixture or transcript is not one, or contradicts itself.
    #[error("{origin}: {problem}")]
    Malformed {
        /// File, or what it is called.
        origin: String,
        /// What is wrong, expected and found.
        problem: String,
    },
    /// What is judged and what judges it are not of the same kind of model.
    #[error("{field}: the reference has {expected}, the candidate {found}")]
    Mismatch {
        /// What differs.
        field: &'static str,
        /// Of the reference.
        expected: String,
        /// Of the candidate.
        found: String,
    },
}

impl FidelityError {
    pub(crate) fn malformed(origin: impl Into<String>, problem: impl Into<String>) -> Self {
        FidelityError::Malformed {
            origin: origin.into(),
            problem: problem.into(),
        }
    }
}
