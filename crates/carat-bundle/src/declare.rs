//! What a checkpoint declares, and by how much a bundle may differ from it.
//!
//! `verify.toml` names each deliberate deviation with its old and new value. A
//! difference that is not named there is a finding; so is a named one that does
//! not exist. `recipe.toml` records the command that made the bundle and
//! whether its result has been verified.

use std::{collections::BTreeSet, path::Path};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    BundleError,
    manifest::{MAX_MANIFEST_BYTES, SourceKind, bounded},
    spec::ModelSpec,
    text::{SpecialToken, TextAssets},
};

/// `schema` of `verify.toml`.
pub const VERIFY_SCHEMA: &str = "carat.verify";
/// `schema` of `recipe.toml`.
pub const RECIPE_SCHEMA: &str = "carat.recipe-record";
/// `version` of both files.
pub const DECLARE_VERSION: u32 = 1;

/// What a checkpoint says about the things that a bundle must not change in
/// silence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceDeclarations {
    /// Every id that ends generation, ascending: the tokenizer's, the
    /// generation config's and the config's.
    pub eos: Vec<u32>,
    /// Text of the beginning-of-sequence token.
    pub bos: Option<String>,
    /// BLAKE3 of the chat template (64 hex digits).
    pub chat_template: Option<String>,
    /// Longest context in tokens.
    pub context: usize,
    /// Formats of the matrices, such as `Q4_1 210, Q8_0 1`.
    pub formats: String,
}

impl SourceDeclarations {
    /// Reads the declarations of a checkpoint; `formats` as
    /// [`format_summary`](crate::manifest::format_summary) writes it.
    pub fn of(spec: &ModelSpec, text: &TextAssets, formats: String) -> SourceDeclarations {
        let mut eos: BTreeSet<u32> = text.config.generation_eos_ids.iter().copied().collect();
        eos.extend(&text.config.config_eos_ids);
        if let Some(token) = &text.config.eos {
            eos.extend(token_id(token, text.tokenizer_json.as_deref()));
        }
        SourceDeclarations {
            eos: eos.into_iter().collect(),
            bos: text.config.bos.as_ref().map(|t| t.content.clone()),
            chat_template: text
                .config
                .chat_template
                .as_ref()
                .map(|t| blake3::hash(t.as_bytes()).to_hex().to_string()),
            context: spec.max_context,
            formats,
        }
    }
}

/// Id of a special token: the stated one, or the tokenizer's added token of
/// that text.
fn token_id(token: &SpecialToken, tokenizer_json: Option<&[u8]>) -> Option<u32> {
    #[derive(Deserialize)]
    struct Tokenizer {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    token.id.or_else(|| {
        let tokenizer: Tokenizer = serde_json::from_slice(tokenizer_json?).ok()?;
        let added = tokenizer.added_tokens.into_iter();
        added
            .filter(|t| t.content == token.content)
            .map(|t| t.id)
            .next()
    })
}

/// The content of `verify.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Expectations {
    /// Always `carat.verify`.
    #[schemars(extend("const" = VERIFY_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = DECLARE_VERSION))]
    pub version: u32,
    /// What the bundle changes on purpose.
    #[serde(default)]
    pub deviations: Deviations,
}

impl Default for Expectations {
    fn default() -> Self {
        Expectations {
            schema: VERIFY_SCHEMA.into(),
            version: DECLARE_VERSION,
            deviations: Deviations::default(),
        }
    }
}

/// Deliberate differences between source and bundle; what is absent is equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Deviations {
    /// Ids that end generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos: Option<Deviation<Vec<u32>>>,
    /// Beginning-of-sequence token; the empty text is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<Deviation<String>>,
    /// BLAKE3 of the chat template; the empty text is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<Deviation<String>>,
    /// Longest context in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<Deviation<usize>>,
    /// Formats of the matrices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formats: Option<Deviation<String>>,
}

/// One deliberate difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Deviation<T> {
    /// Value in the source.
    pub source: T,
    /// Value in the bundle.
    pub bundle: T,
    /// Why it was changed.
    pub reason: String,
}

/// Whether anybody has checked what a recipe produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecipeStatus {
    /// A gate passed; `verified_by` names its transcript.
    Verified,
    /// Nobody has.
    Unverified,
}

/// The content of `recipe.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecipeRecord {
    /// Always `carat.recipe-record`.
    #[schemars(extend("const" = RECIPE_SCHEMA))]
    pub schema: String,
    /// Version of the format, 1.
    #[schemars(extend("const" = DECLARE_VERSION))]
    pub version: u32,
    /// Name of the bundle.
    pub bundle: String,
    /// BLAKE3 of `manifest.json` as it was written (64 hex digits): a manifest that
    /// was changed since does not have it.
    pub manifest: String,
    /// Program and subcommand, such as `carat convert`.
    pub command: String,
    /// Its arguments, absolute paths cut to their last part.
    pub args: Vec<String>,
    /// Program that ran.
    pub tool: String,
    /// Its version.
    pub tool_version: String,
    /// Name of the recipe, such as `keep`.
    pub recipe: String,
    /// Whether the result was checked.
    pub status: RecipeStatus,
    /// Transcript in `gates/` that proves `verified`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verified_by: Option<String>,
    /// What the command needs besides the source.
    #[serde(default)]
    pub needs: Vec<String>,
    /// Remarks.
    #[serde(default)]
    pub notes: Vec<String>,
    /// What is not known yet.
    #[serde(default)]
    pub open_questions: Vec<String>,
    /// The steps in words.
    #[serde(default)]
    pub steps: Vec<String>,
    /// The checkpoint.
    pub source: RecipeSource,
    /// Settings of the environment that the result depends on.
    #[serde(default)]
    pub runtime_env: std::collections::BTreeMap<String, String>,
}

/// The checkpoint that a recipe starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecipeSource {
    /// Its container.
    pub kind: SourceKind,
    /// Base name of its file or folder.
    pub name: String,
    /// BLAKE3 of its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Its published revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

impl RecipeRecord {
    /// Refuses an unverified recipe unless `force` is set.
    ///
    /// # Errors
    /// [`BundleError::Unverified`].
    pub fn require_verified(&self, bundle: &Path, force: bool) -> Result<(), BundleError> {
        match self.status {
            RecipeStatus::Verified => Ok(()),
            RecipeStatus::Unverified if force => Ok(()),
            RecipeStatus::Unverified => Err(BundleError::Unverified {
                path: bundle.to_path_buf(),
            }),
        }
    }

    /// The JSON schema of `recipe.toml`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(RecipeRecord).to_value()
    }
}

impl Expectations {
    /// The JSON schema of `verify.toml`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(Expectations).to_value()
    }
}

/// An argument without the location of anything on this machine: absolute paths
/// (also behind `--flag=`) keep only their last part.
pub fn portable_argument(arg: &str) -> String {
    let cut = |path: &str| -> Option<String> {
        let windows = path.as_bytes().get(1) == Some(&b':')
            && path.as_bytes().first().is_some_and(u8::is_ascii_alphabetic)
            && matches!(path.as_bytes().get(2), Some(b'\\' | b'/'));
        if !(path.starts_with('/') || path.starts_with("\\\\") || path.starts_with("~/") || windows)
        {
            return None;
        }
        let trimmed = path.trim_end_matches(['/', '\\']);
        let base = trimmed.rsplit(['/', '\\']).next().unwrap_or_default();
        Some(base.to_string())
    };
    if let Some(base) = cut(arg) {
        return base;
    }
    match arg.split_once('=') {
        Some((flag, value)) => match cut(value) {
            Some(base) => format!("{flag}={base}"),
            None => arg.to_string(),
        },
        None => arg.to_string(),
    }
}

/// A record with `schema` and `version`, kept as TOML.
pub(crate) trait TomlRecord: DeserializeOwned + Serialize {
    const SCHEMA: &'static str;
    fn head(&self) -> (&str, u32);
}

impl TomlRecord for Expectations {
    const SCHEMA: &'static str = VERIFY_SCHEMA;
    fn head(&self) -> (&str, u32) {
        (&self.schema, self.version)
    }
}

impl TomlRecord for RecipeRecord {
    const SCHEMA: &'static str = RECIPE_SCHEMA;
    fn head(&self) -> (&str, u32) {
        (&self.schema, self.version)
    }
}

/// Parses a TOML record; `path` is only for messages.
pub(crate) fn parse_toml<T: TomlRecord>(path: &Path, bytes: &[u8]) -> Result<T, BundleError> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        BundleError::malformed(
            path,
            "content",
            format!("is not UTF-8 at byte {}", e.valid_up_to()),
        )
    })?;
    let record: T = toml::from_str(text).map_err(|e| {
        let line = e.span().map_or(0, |s| {
            text[..s.start.min(text.len())].matches('\n').count() + 1
        });
        BundleError::malformed(path, format!("line {line}"), bounded(e.message()))
    })?;
    let (schema, version) = record.head();
    if schema != T::SCHEMA {
        return Err(BundleError::malformed(
            path,
            "schema",
            format!("expected {:?}, found {:?}", T::SCHEMA, bounded(schema)),
        ));
    }
    if version != DECLARE_VERSION {
        return Err(BundleError::malformed(
            path,
            "version",
            format!("this carat reads version {DECLARE_VERSION}, found {version}"),
        ));
    }
    Ok(record)
}

/// Writes a record as TOML text.
pub(crate) fn to_toml<T: TomlRecord>(record: &T) -> Result<Vec<u8>, BundleError> {
    toml::to_string_pretty(record)
        .map(String::into_bytes)
        .map_err(|e| BundleError::malformed(T::SCHEMA, "content", e.to_string()))
}

/// Reads a TOML record from a bundle.
pub(crate) fn read_toml<T: TomlRecord>(path: &Path) -> Result<T, BundleError> {
    let bytes = crate::bundle::read_capped(path, MAX_MANIFEST_BYTES)?;
    parse_toml(path, &bytes)
}
