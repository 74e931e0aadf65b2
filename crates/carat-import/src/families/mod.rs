//! Families: what an architecture's configuration means.
//!
//! A family is a function from a configuration (HF `config.json` or GGUF
//! metadata) to a [`ModelSpec`] and a table of tensor names. Adding one adds a
//! file here and a line to the two registries below, and nothing elsewhere.

mod base;
mod gemma3;
mod llama;
mod minicpm4;
mod mistral;
mod names;
mod qwen2;
mod qwen3;

use carat_bundle::spec::ModelSpec;
use carat_tensor::DType;
pub(crate) use names::{HF_PRE_NORM, HF_SANDWICH, NameTable, Root};

use crate::{ImportError, ggml::Meta, gguf::Value, hf::Config};

/// A model as its checkpoint's configuration describes it.
pub(crate) struct Described {
    pub(crate) spec: ModelSpec,
    /// The file stores the rows of q and k interleaved within heads.
    pub(crate) permuted_qk: bool,
}

/// An architecture of HF checkpoints.
pub(crate) struct HfFamily {
    /// Values of `model_type`.
    pub(crate) types: &'static [&'static str],
    /// The object of `config.json` that describes the language model where the
    /// checkpoint is multimodal; the keys stand at the top where it is not.
    pub(crate) sub_config: Option<&'static str>,
    /// Reads the configuration. The format is that of the embedding as stored.
    pub(crate) describe: fn(&Config<'_>, DType) -> Result<ModelSpec, ImportError>,
    /// Names of its tensors.
    pub(crate) names: &'static NameTable,
}

/// An architecture of GGUF files.
pub(crate) struct GgufFamily {
    /// Value of `general.architecture`.
    pub(crate) architecture: &'static str,
    /// Reads the metadata.
    pub(crate) describe: fn(&Meta<'_>) -> Result<Described, ImportError>,
    /// Keys below the architecture's prefix that its files have besides the common
    /// ones, for a model that may turn out to be another family's.
    pub(crate) extras: fn(&ModelSpec) -> Vec<(&'static str, Value)>,
    /// Names of its tensors.
    pub(crate) names: &'static NameTable,
}

/// Of families whose files have the common keys only.
fn no_extras(_: &ModelSpec) -> Vec<(&'static str, Value)> {
    Vec::new()
}

/// Every HF architecture that can be imported.
pub(crate) const HF: &[&HfFamily] = &[
    &llama::HF,
    &mistral::HF,
    &qwen2::HF,
    &qwen3::HF,
    &minicpm4::HF,
    &gemma3::HF,
];

/// Every GGUF architecture that can be imported.
pub(crate) const GGUF: &[&GgufFamily] = &[
    &llama::GGUF,
    &qwen2::GGUF,
    &qwen3::GGUF,
    &minicpm4::GGUF,
    &gemma3::GGUF,
];

/// Names of tensors in GGUF files of every architecture.
pub(crate) fn gguf_names() -> &'static NameTable {
    &names::GGUF
}

/// The `model_type` values that can be imported, sorted.
pub fn hf_architectures() -> Vec<&'static str> {
    let mut names: Vec<_> = HF.iter().flat_map(|f| f.types.iter().copied()).collect();
    names.sort_unstable();
    names
}

/// The `general.architecture` values that can be imported, sorted.
pub fn gguf_architectures() -> Vec<&'static str> {
    let mut names: Vec<_> = GGUF.iter().map(|f| f.architecture).collect();
    names.sort_unstable();
    names
}
