//! Checkpoints to [`ModelSpec`] and [`TensorSource`].
//!
//! [`open`] takes a folder with `config.json` and safetensors, or a `.gguf` file,
//! and answers with a model as data: what it computes ([`Checkpoint::spec`]), its
//! weights under canonical names in logical order ([`Checkpoint::tensors`]), what
//! text needs ([`Checkpoint::text`]) and where all that came from
//! ([`Checkpoint::origin`]). Nothing after this crate knows a file format or the
//! name of a family.
//!
//! Imports are strict. Every configuration key is read, or known to be
//! irrelevant, or an error: a key that is silently dropped is how a model comes
//! to answer slightly wrong. The tensors must be exactly those that the spec
//! needs, in exactly its shapes. All bytes are hostile: counts and lengths are
//! checked before memory is taken, and errors name the file and the key or
//! tensor at fault.
//!
//! What it is not: it does not dequantize, convert or run anything.
//!
//! ```no_run
//! let checkpoint = carat_import::open("models/wren-dense".as_ref())?;
//! for name in checkpoint.tensors.names() {
//!     let bytes = checkpoint.tensors.read(&name)?;
//!     assert!(!bytes.is_empty());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod adapter;
mod digest;
mod error;
pub mod export;
mod families;
#[doc(hidden)]
pub mod fuzzing;
mod ggml;
pub mod gguf;
mod hf;
mod hub_layout;
pub mod imatrix;
pub mod safetensors_dir;
mod source;
pub mod synth;
pub mod vocab;
mod weights;

use std::path::{Path, PathBuf};

use carat_bundle::{
    manifest::SkippedTensor, source::TensorSource, spec::ModelSpec, text::TextAssets,
};
pub use digest::{checkpoint_files, content_digest};
pub use error::ImportError;
pub use families::{gguf_architectures, hf_architectures};
use serde::{Deserialize, Serialize};
pub use source::permute_rows;

/// An opened checkpoint.
pub struct Checkpoint {
    /// What the model computes.
    pub spec: ModelSpec,
    /// Its weights: exactly the tensors of [`ModelSpec::tensors`].
    pub tensors: Box<dyn TensorSource>,
    /// Tokenizer, template and stop declarations.
    pub text: TextAssets,
    /// Provenance.
    pub origin: Origin,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// Where a checkpoint came from and what it says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The path that was opened.
    pub path: PathBuf,
    /// The container.
    pub kind: SourceKind,
    /// `general.architecture` or `model_type`, as declared.
    pub architecture: String,
    /// The model's name: as it declares, else that of the repository it was
    /// downloaded from, where the folder tells.
    pub name: Option<String>,
    /// Name of the repository it was downloaded from, without the organisation,
    /// where the folder tells.
    pub repository: Option<String>,
    /// Every file that was read, see [`checkpoint_files`].
    pub files: Vec<PathBuf>,
    /// What the weights are.
    pub weights: WeightKind,
    /// The file stores the rows of q and k interleaved within heads; the tensors
    /// given out are in logical order.
    pub permuted_qk: bool,
    /// The element type that the checkpoint claims (the tensors may differ).
    pub declared_dtype: Option<String>,
    /// What a user should know about the import.
    pub notes: Vec<String>,
    /// Tensors of the checkpoint that are not among [`Checkpoint::tensors`], by
    /// their own names.
    pub skipped: Vec<SkippedTensor>,
    /// The commit of a hub download, where the folder tells.
    pub revision: Option<String>,
}

/// The container of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// One `.gguf` file or several parts.
    Gguf,
    /// A folder with `config.json` and safetensors.
    Safetensors,
}

/// What the weights of the linears are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightKind {
    /// Floating point.
    Dense,
    /// A block format.
    Quantized,
    /// Values `-d`, `0`, `d` in every block of 256.
    Ternary,
    /// Full-precision weights from which a ternary model is derived: not the model.
    TernaryLatent,
}

/// Choices of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Unknown configuration keys that the user declares to be without effect,
    /// by full name (`rope_scaling.beta`, `llama.expert_count`). Each one ignored
    /// is noted in [`Origin::notes`].
    pub ignore_keys: Vec<String>,
}

/// Opens the checkpoint at `path`: a folder, or a `.gguf` file (the first one,
/// if the model is split).
pub fn open(path: &Path) -> Result<Checkpoint, ImportError> {
    open_with(path, &OpenOptions::default())
}

/// [`open`] with choices.
pub fn open_with(path: &Path, options: &OpenOptions) -> Result<Checkpoint, ImportError> {
    let meta = std::fs::metadata(path).map_err(|e| ImportError::io(path, e))?;
    if meta.is_dir() {
        hf::open(path, options)
    } else if path.extension().is_some_and(|e| e == "safetensors") {
        Err(ImportError::checkpoint(
            path,
            "expected the folder with config.json, found a single safetensors file",
        ))
    } else {
        ggml::open(path, options)
    }
}
