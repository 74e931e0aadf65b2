//! What can go wrong while a checkpoint is opened.

use std::{
    io,
    path::{Path, PathBuf},
};

use carat_bundle::spec::SpecError;
use carat_tensor::Shape;

use crate::{gguf::GgufError, vocab::VocabError};

/// Why a checkpoint cannot be imported. Every message names the file and the
/// key or tensor at fault; [`hint`](ImportError::hint) says what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The system could not read a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file or folder is not a checkpoint, or not a whole one.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A GGUF file is malformed.
    #[error("{}: {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: GgufError,
    },
    /// A safetensors file is malformed.
    #[error("{}: safetensors header: {source}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// A JSON file is malformed.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A configuration or metadata key has a value that cannot be used.
    #[error("{}: {key}: {problem}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key, with the names of the objects around it.
        key: String,
        /// Expected and found.
        problem: String,
    },
    /// Keys that nobody reads: ignoring them could change the model's answers.
    #[error("{}: unknown {} {}", path.display(), if keys.len() == 1 { "key" } else { "keys" }, listed(keys))]
    UnknownKeys {
        /// The file.
        path: PathBuf,
        /// The keys, sorted.
        keys: Vec<String>,
    },
    /// No family is registered for the declared architecture.
    #[error("{}: unknown architecture {found:?}, expected one of {}", path.display(), known.join(", "))]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// The declared name.
        found: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// A tensor that the model needs is not there.
    #[error("{}: tensor {tensor:?} is missing (expected shape {shape})", path.display())]
    MissingTensor {
        /// The file or folder.
        path: PathBuf,
        /// Its name in the checkpoint.
        tensor: String,
        /// The shape it should have.
        shape: Shape,
    },
    /// Tensors that the model has no use for: the configuration and the weights
    /// do not belong together, or the family is not the declared one.
    #[error("{}: unexpected {} {}", path.display(), if tensors.len() == 1 { "tensor" } else { "tensors" }, listed(tensors))]
    UnexpectedTensors {
        /// The file or folder.
        path: PathBuf,
        /// Their names in the checkpoint, sorted.
        tensors: Vec<String>,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("{}: tensor {tensor:?}: expected shape {expected}, found {found}", path.display())]
    TensorShape {
        /// The file or folder.
        path: PathBuf,
        /// Its name in the checkpoint.
        tensor: String,
        /// What the configuration implies.
        expected: Shape,
        /// What is stored.
        found: Shape,
    },
    /// A tensor cannot be used as it is stored.
    #[error("{}: tensor {tensor:?}: {problem}", path.display())]
    Tensor {
        /// The file or folder.
        path: PathBuf,
        /// Its name in the checkpoint.
        tensor: String,
        /// Expected and found.
        problem: String,
    },
    /// The configuration describes no model.
    #[error("{}: {source}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// The field at fault.
        source: SpecError,
    },
    /// A GGUF vocabulary cannot be converted.
    #[error("{}: {source}", path.display())]
    Vocab {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: VocabError,
    },
}

impl ImportError {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ImportError::UnknownKeys { .. } => Some(
                "a key that does not change the model's arithmetic can be declared ignorable with \
                 --ignore-key KEY; otherwise the model needs support that is not there",
            ),
            ImportError::UnexpectedTensors { .. } | ImportError::TensorShape { .. } => Some(
                "the configuration and the weights contradict each other: check that both come from \
                 the same checkpoint and that the download is whole",
            ),
            ImportError::MissingTensor { .. } => Some(
                "check that every shard was downloaded and that the configuration is the weights' own",
            ),
            ImportError::Gguf { .. } | ImportError::Safetensors { .. } => Some(
                "the file may be cut short or damaged: compare its size and checksum with the publisher's",
            ),
            _ => None,
        }
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        ImportError::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn checkpoint(path: &Path, problem: impl Into<String>) -> Self {
        ImportError::Checkpoint {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    pub(crate) fn key(path: &Path, key: impl Into<String>, problem: impl Into<String>) -> Self {
        ImportError::Key {
            path: path.to_owned(),
            key: key.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn tensor(
        path: &Path,
        tensor: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        ImportError::Tensor {
            path: path.to_owned(),
            tensor: tensor.into(),
            problem: problem.into(),
        }
    }
}

/// The first few names: a wrong checkpoint can have thousands.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let quoted: Vec<String> = names.iter().take(SHOWN).map(|n| format!("{n:?}")).collect();
    let more = names.len().saturating_sub(SHOWN);
    if more == 0 {
        quoted.join(", ")
    } else {
        format!("{} and {more} more", quoted.join(", "))
    }
}
