//! `manifest.json`: everything a bundle says about itself.
//!
//! A manifest is read from disk and therefore not trusted. [`Manifest::parse`]
//! bounds its size, checks schema and version before anything else, refuses
//! unknown fields, and [`Manifest::check`] then proves that every tensor lies
//! where it may lie and is exactly one that the [`ModelSpec`] needs.

use std::{collections::BTreeMap, path::Path};

use carat_tensor::{DType, Grid, Shape};

pub use carat_tensor::Form;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    declare::SourceDeclarations,
    spec::{ModelSpec, TensorRole},
    text::TextConfig,
};

/// [`Manifest::schema`] of every bundle.
pub const SCHEMA: &str = "carat.bundle";
/// [`Manifest::version`] that this crate writes and reads.
pub const VERSION: u32 = 1;
/// Every tensor's offset in `weights.bin` is a multiple of this (bytes).
pub const TENSOR_ALIGN: u64 = 256;
/// Every segment's offset in `weights.bin`, and the file's size, is a multiple
/// of this (bytes): the page of Apple's kernels, the largest in common use.
pub const SEGMENT_ALIGN: u64 = 16 * 1024;
/// Longest `manifest.json` that is read. The largest permitted model (4,096
/// layers) needs about 20 MB.
pub const MAX_MANIFEST_BYTES: u64 = 64 << 20;
/// Longest tokenizer or template that is read; published ones stay below 40 MB.
pub const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Path of the manifest in a bundle.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Path of the weights in a bundle.
pub const WEIGHTS_FILE: &str = "weights.bin";
/// Path of the tokenizer in a bundle.
pub const TOKENIZER_FILE: &str = "tokenizer/tokenizer.json";
/// Path of the chat template in a bundle.
pub const TEMPLATE_FILE: &str = "tokenizer/chat_template.jinja";
/// Path of the record of how the bundle was made.
pub const RECIPE_FILE: &str = "recipe.toml";
/// Path of the recipe that was applied, if it was a file or a preset.
pub const RECIPE_TEXT_FILE: &str = "recipe.yaml";
/// Path of the declared deviations from the source.
pub const VERIFY_FILE: &str = "verify.toml";
/// Folder of gate transcripts.
pub const GATES_DIR: &str = "gates";

/// The content of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `carat.bundle`.
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = VERSION))]
    pub version: u32,
    /// The program that wrote the bundle.
    pub producer: Producer,
    /// Name of the model, for people.
    pub name: String,
    /// Whether this is a whole model; false for truncated builds.
    pub shippable: bool,
    /// The model.
    pub spec: ModelSpec,
    /// Special tokens, stop ids and sampling defaults. `chat_template` is null
    /// here: the template lives in `tokenizer/chat_template.jinja`.
    pub text: TextConfig,
    /// Where the weights came from.
    pub source: SourceRecord,
    /// How the matrices are stored, in words; never empty.
    pub compression: String,
    /// Arithmetic on activations that the weights were made for.
    pub activation: ActivationContract,
    /// The weights file.
    pub weights: WeightsFile,
    /// Every tensor, in the order of the spec and of the file.
    pub tensors: Vec<TensorEntry>,
    /// Tokenizer and template, by path.
    pub files: Vec<FileEntry>,
    /// The recipe as it was applied, tensor by tensor.
    pub recipe: ResolvedRecipe,
    /// Where the bytes went.
    pub size_report: SizeReport,
    /// Tensors of the source that the bundle leaves out, with the reason.
    pub skipped: Vec<SkippedTensor>,
}

/// A program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Producer {
    /// Its name.
    pub tool: String,
    /// Its version.
    pub version: String,
}

impl Producer {
    /// This build of carat.
    pub fn current() -> Producer {
        Producer {
            tool: "carat".into(),
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }
}

/// Where a bundle's weights came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceRecord {
    /// Container of the source.
    pub kind: SourceKind,
    /// Base name of the source's file or folder, without its location.
    pub name: String,
    /// Architecture as the source declares it.
    pub architecture: String,
    /// BLAKE3 of the source's files (64 hex digits), if it was computed.
    pub digest: Option<String>,
    /// Published revision, if known.
    pub revision: Option<String>,
    /// What kind of weights the source holds.
    pub weights: WeightsKind,
    /// Rows of the query and key projections were permuted in the source, and
    /// the permutation was undone.
    pub permuted_qk: bool,
    /// Remarks of the importer.
    pub notes: Vec<String>,
    /// What the source itself declares about stop tokens, template, context and
    /// formats; filled by the converter if the caller leaves it out.
    pub declared: Option<SourceDeclarations>,
}

/// Container of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SourceKind {
    /// A GGUF file, or several parts of one.
    Gguf,
    /// A folder with a config and safetensors.
    Safetensors,
    /// Another bundle.
    Bundle,
    /// Made by a program rather than read from a checkpoint.
    Synthetic,
}

/// What kind of weights a source holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WeightsKind {
    /// Floating point.
    Dense,
    /// Quantized blocks.
    Quantized,
    /// Genuine three-valued weights.
    Ternary,
    /// The full-precision master of a ternary model: not ternary.
    TernaryLatent,
}

/// Arithmetic on the activations that matrices are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// Signed 8-bit codes with one scale per group.
    Int8,
    /// bfloat16.
    Bf16,
    /// fp32.
    F32,
}

/// The activation arithmetic that a bundle is meant for. An engine may offer
/// others, never silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ActivationContract {
    /// Used unless the user asks for another.
    pub default: ActivationKind,
    /// Activations that share one scale under `int8` (elements).
    pub group: u32,
    /// The same before ternary weights, whose own scales span as many columns; before
    /// those whose rows or tensor have one scale, the whole token shares one.
    #[serde(default = "ternary_group")]
    pub ternary_group: u32,
}

const fn ternary_group() -> u32 {
    256
}

impl Default for ActivationContract {
    fn default() -> Self {
        ActivationContract {
            default: ActivationKind::Int8,
            group: 32,
            ternary_group: ternary_group(),
        }
    }
}

/// `weights.bin` as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightsFile {
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 of the whole file, 64 hex digits.
    pub blake3: String,
    /// Parts in file order: the embedding, each layer, the output.
    pub segments: Vec<Segment>,
}

/// A contiguous part of `weights.bin` that starts on its own page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// `embed`, `layers.N` or `output`.
    pub name: String,
    /// First byte in the file, a multiple of 16 KiB.
    pub offset: u64,
    /// Length in bytes, up to the end of its last tensor.
    pub bytes: u64,
}

/// How a tensor's bytes are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Layout {
    /// Panels of 16 interleaved rows, the last one filled up with zero rows
    /// (`carat_tensor::packed`): what kernels read.
    Packed16,
    /// One row after the other.
    RowMajor,
    /// Codes, scales, zero points and tables as separate sections
    /// (`carat_tensor::grid`).
    Sections,
}

/// One stored tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Canonical name.
    pub name: String,
    /// What it is for.
    pub role: TensorRole,
    /// Format of its elements; of a grid, F32: what reading gives.
    #[schemars(schema_with = "dtype_schema")]
    pub dtype: DType,
    /// The grid that it is stored as, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "grid_schema")]
    pub grid: Option<Grid>,
    /// Logical shape, slowest dimension first: a matrix is `[rows, columns]`.
    #[schemars(with = "Vec<usize>")]
    pub shape: Shape,
    /// Arrangement of its bytes.
    pub layout: Layout,
    /// Name of the segment that holds it.
    pub segment: String,
    /// First byte in `weights.bin`, a multiple of 256.
    pub offset: u64,
    /// Stored bytes, rows of padding included.
    pub bytes: u64,
    /// BLAKE3 of the stored bytes, 64 hex digits.
    pub blake3: String,
}

/// One small file of the bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Path in the bundle, with `/`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// BLAKE3 of its content, 64 hex digits.
    pub blake3: String,
}

/// The recipe as applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedRecipe {
    /// Name of the recipe, such as `keep`.
    pub name: String,
    /// What it did to each tensor, in the order of [`Manifest::tensors`].
    pub tensors: Vec<ResolvedTensor>,
}

/// What a recipe did to one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedTensor {
    /// Canonical name.
    pub name: String,
    /// Format in the source.
    #[schemars(schema_with = "dtype_schema")]
    pub source: DType,
    /// Format in the bundle; of a grid, F32: what reading gives.
    #[schemars(schema_with = "dtype_schema")]
    pub stored: DType,
    /// The grid that it is stored as, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "grid_schema")]
    pub grid: Option<Grid>,
    /// Why.
    pub reason: String,
}

/// Where the bytes of `weights.bin` went. All parts add up to the file's size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeReport {
    /// By format, in the order of [`DType::ALL`].
    pub formats: Vec<FormatSize>,
    /// By grid, sorted; these tensors are in no entry of `formats`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub grids: Vec<GridSize>,
    /// Number of weights.
    pub weights: u64,
    /// Bytes of all tensors without padding rows.
    pub logical_bytes: u64,
    /// Bytes of all tensors as stored.
    pub stored_bytes: u64,
    /// Bytes between tensors, for alignment.
    pub alignment_bytes: u64,
    /// `8 * stored_bytes / weights`.
    pub bits_per_weight: f64,
}

/// The share of one format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FormatSize {
    /// The format.
    #[schemars(schema_with = "dtype_schema")]
    pub dtype: DType,
    /// Tensors in it.
    pub tensors: u64,
    /// Weights in it.
    pub weights: u64,
    /// Bytes without padding rows.
    pub logical_bytes: u64,
    /// Bytes as stored.
    pub stored_bytes: u64,
}

/// The share of one grid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GridSize {
    /// The grid.
    #[schemars(schema_with = "grid_schema")]
    pub grid: Grid,
    /// Tensors in it.
    pub tensors: u64,
    /// Weights in it.
    pub weights: u64,
    /// Bytes of codes.
    pub codes: u64,
    /// Bytes of scales.
    pub scales: u64,
    /// Bytes of zero points.
    pub zero_points: u64,
    /// Bytes of look-up tables.
    pub tables: u64,
}

/// A tensor that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SkippedTensor {
    /// Name in the source.
    pub name: String,
    /// Why the model does not need it.
    pub reason: String,
}

fn dtype_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
    schemars::json_schema!({ "type": "string", "enum": names })
}

fn grid_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": ["string", "null"],
        "pattern": "^(int[248]|trit|fp4|fp8e4m3|fp8e5m2|lut[123468])\\.(tensor|channel|(block|rows)[1-9][0-9]*)\\.(f32|f16|e8m0|e4m3)(\\.(zp|scaled))?$"
    })
}

impl TensorEntry {
    /// How it is stored.
    pub fn form(&self) -> Form {
        self.grid.map_or(Form::Block(self.dtype), Form::Grid)
    }
}

/// Why a manifest cannot be used: the field at fault and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ManifestError {
    /// The field, such as `tensors.3.offset`.
    pub field: String,
    /// What is wrong, with expected and found.
    pub problem: String,
}

impl ManifestError {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> ManifestError {
        ManifestError {
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn at(self, path: &Path) -> crate::BundleError {
        crate::BundleError::malformed(path, self.field, self.problem)
    }
}

impl Manifest {
    /// Reads a manifest from JSON and checks it.
    ///
    /// # Errors
    /// Names the field that is missing, unknown, ill-typed or contradictory.
    pub fn parse(json: &[u8]) -> Result<Manifest, ManifestError> {
        /// The two fields that every version of the format has.
        #[derive(Deserialize)]
        struct Head {
            schema: String,
            version: u64,
        }
        if json.len() as u64 > MAX_MANIFEST_BYTES {
            return Err(ManifestError::new(
                "manifest",
                format!(
                    "has {} bytes, at most {MAX_MANIFEST_BYTES} are read",
                    json.len()
                ),
            ));
        }
        let text = std::str::from_utf8(json).map_err(|e| {
            ManifestError::new(
                "manifest",
                format!("is not UTF-8 at byte {}", e.valid_up_to()),
            )
        })?;
        let json_error =
            |e: serde_json::Error| ManifestError::new("manifest", bounded(&e.to_string()));
        let head: Head = serde_json::from_str(text).map_err(json_error)?;
        if head.schema != SCHEMA {
            return Err(ManifestError::new(
                "schema",
                format!("expected {SCHEMA:?}, found {:?}", bounded(&head.schema)),
            ));
        }
        if head.version != u64::from(VERSION) {
            return Err(ManifestError::new(
                "version",
                format!("this carat reads version {VERSION}, found {}", head.version),
            ));
        }
        let manifest: Manifest = serde_json::from_str(text).map_err(json_error)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The manifest as it is written: pretty JSON with a final newline.
    ///
    /// # Errors
    /// When a value cannot be represented, such as a float that is not finite.
    pub fn to_json(&self) -> Result<Vec<u8>, ManifestError> {
        let mut out = serde_json::to_vec_pretty(self)
            .map_err(|e| ManifestError::new("manifest", e.to_string()))?;
        out.push(b'\n');
        // JSON has no NaN and no infinity; what does not come back equal must
        // not be written.
        match Manifest::parse(&out)? {
            back if back == *self => Ok(out),
            _ => Err(ManifestError::new(
                "manifest",
                "does not survive being written as JSON",
            )),
        }
    }

    /// The JSON schema of `manifest.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Manifest).to_value()
    }

    /// Tensors by format in the words of [`Manifest::compression`], vectors
    /// left out: `Q4_1 210, Q8_0 1`.
    pub fn matrix_formats(&self) -> String {
        format_summary(self.tensors.iter().map(|t| (t.role, t.form())))
    }
}

/// Counts matrices by format: `Q4_1 210, Q8_0 1`, most frequent first.
pub fn format_summary<F: Copy + Ord + std::fmt::Display>(
    tensors: impl IntoIterator<Item = (TensorRole, F)>,
) -> String {
    let mut counts: BTreeMap<F, usize> = BTreeMap::new();
    for (role, format) in tensors {
        if is_matrix(role) {
            *counts.entry(format).or_default() += 1;
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let parts: Vec<String> = counts.iter().map(|(d, n)| format!("{d} {n}")).collect();
    parts.join(", ")
}

/// Whether tensors of this role are matrices (and so may be packed).
pub fn is_matrix(role: TensorRole) -> bool {
    matches!(
        role,
        TensorRole::Embedding | TensorRole::Head | TensorRole::Linear
    )
}

/// Name of the segment that holds a tensor: `embed`, `layers.N` or `output`.
pub fn segment_of(tensor: &str) -> &str {
    if let Some(rest) = tensor.strip_prefix("layers.") {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        return &tensor[.."layers.".len() + digits];
    }
    if tensor.starts_with("embed.") {
        "embed"
    } else {
        "output"
    }
}

/// Text of outside origin, cut to a length that fits a message.
pub(crate) fn bounded(s: &str) -> String {
    const MAX: usize = 200;
    if s.len() <= MAX {
        return s.to_string();
    }
    let mut end = MAX;
    while !s.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &s[..end])
}
