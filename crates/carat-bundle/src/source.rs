//! Where weights come from.

use std::borrow::Cow;

use carat_tensor::{DType, Shape};

/// Format and shape of one stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// How elements are stored.
    pub dtype: DType,
    /// Row-major shape, slowest dimension first.
    pub shape: Shape,
}

/// Why a tensor could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// There is no tensor of that name.
    #[error("{origin}: no tensor {name:?}")]
    Missing {
        /// File or bundle.
        origin: String,
        /// Canonical name.
        name: String,
    },
    /// The bytes are not what their format says.
    #[error("{origin}: tensor {name:?}: {problem}")]
    Malformed {
        /// File or bundle.
        origin: String,
        /// Canonical name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The file could not be read.
    #[error("{origin}: {source}")]
    Io {
        /// File or bundle.
        origin: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A set of named tensors in *logical* form: canonical names (those of
/// [`ModelSpec::tensors`](crate::spec::ModelSpec::tensors)), row-major whole
/// blocks, permutations of the file's origin already undone.
pub trait TensorSource: Send + Sync {
    /// What to call this source in messages: a file or folder.
    fn origin(&self) -> &str;

    /// Names of all tensors, sorted.
    fn names(&self) -> Vec<String>;

    /// Format and shape of a tensor, `None` if there is none of that name.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// The tensor's bytes: row-major, `shape.bytes(dtype)` long.
    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError>;
}

/// A source with some tensors of another one.
pub struct Picked<'p> {
    /// Where tensors come from.
    pub source: &'p dyn TensorSource,
    /// Where those come from that `picks` names.
    pub other: &'p dyn TensorSource,
    /// Whether a tensor comes from `other`.
    pub picks: &'p (dyn Fn(&str) -> bool + Sync),
}

impl Picked<'_> {
    fn of(&self, name: &str) -> &dyn TensorSource {
        match (self.picks)(name) {
            true => self.other,
            false => self.source,
        }
    }
}

impl TensorSource for Picked<'_> {
    fn origin(&self) -> &str {
        self.source.origin()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.of(name).info(name)
    }

    fn read(&self, name: &str) -> Result<Cow<'_, [u8]>, SourceError> {
        self.of(name).read(name)
    }
}
