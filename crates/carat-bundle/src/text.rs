//! What text needs, as a checkpoint declares it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tokenizer, template and stop declarations of a checkpoint. Everything is
/// optional here because a checkpoint may carry only weights; what a command
/// needs and does not find is that command's error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextAssets {
    /// Content of `tokenizer.json` (GGUF vocabularies are converted at import).
    pub tokenizer_json: Option<Vec<u8>>,
    /// Special tokens, flags and templates.
    pub config: TextConfig,
}

/// What `tokenizer_config.json`, `generation_config.json`, `config.json` and
/// `chat_template.jinja` (or GGUF metadata) say about text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TextConfig {
    /// Jinja source of the chat template (the `.jinja` file wins over the field).
    pub chat_template: Option<String>,
    /// Further templates by name, such as `tool_use`.
    pub named_templates: std::collections::BTreeMap<String, String>,
    /// Beginning-of-sequence token.
    pub bos: Option<SpecialToken>,
    /// End-of-sequence token of the tokenizer.
    pub eos: Option<SpecialToken>,
    /// Padding token.
    pub pad: Option<SpecialToken>,
    /// Unknown token.
    pub unk: Option<SpecialToken>,
    /// Whether raw text is encoded with a beginning-of-sequence token in front;
    /// `None` leaves it to `tokenizer.json`'s post-processor.
    pub add_bos: Option<bool>,
    /// Whether raw text is encoded with an end-of-sequence token behind.
    pub add_eos: Option<bool>,
    /// End-of-sequence ids of `generation_config.json`.
    pub generation_eos_ids: Vec<u32>,
    /// End-of-sequence ids of `config.json` (or GGUF's eos, eot and eom ids).
    pub config_eos_ids: Vec<u32>,
    /// Sampling defaults of `generation_config.json`.
    pub sampling: SamplingDefaults,
    /// `model_max_length` of the tokenizer, where it is a real bound.
    pub model_max_length: Option<usize>,
    /// Why there is no tokenizer although the source has a vocabulary: the file,
    /// the key at fault and what is wrong with it.
    pub tokenizer_problem: Option<String>,
}

/// Whether a token's text closes a turn, whatever the dialect of its brackets:
/// `<end_of_turn>`, `<|im_end|>`, `<|eot_id|>`.
pub fn is_turn_end(token: &str) -> bool {
    let name: String = token
        .chars()
        .filter(|c| c.is_ascii_alphanumeric())
        .map(|c| c.to_ascii_lowercase())
        .collect();
    let bracketed = token.starts_with('<') || token.starts_with('[');
    bracketed
        && matches!(
            name.as_str(),
            "endofturn" | "imend" | "eotid" | "endoftext" | "eottoken" | "eot" | "eomid"
        )
}

/// A special token by text and, where known, id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SpecialToken {
    /// The token's text.
    pub content: String,
    /// The token's id, where the checkpoint states it.
    pub id: Option<u32>,
}

/// Sampling settings that a checkpoint recommends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingDefaults {
    /// `do_sample`: false means greedy.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Keep the k most likely.
    pub top_k: Option<u32>,
    /// Keep the smallest set with this probability mass.
    pub top_p: Option<f32>,
    /// Keep what is at least this fraction of the most likely.
    pub min_p: Option<f32>,
    /// Divide (or multiply) the logits of seen tokens by this.
    pub repetition_penalty: Option<f32>,
}

/// A sampling setting that no sampler can follow.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: {value} is outside {range}")]
pub struct SamplingError {
    /// The setting, as `generation_config.json` calls it.
    pub field: &'static str,
    /// Its value.
    pub value: f32,
    /// The values it may have.
    pub range: &'static str,
}

impl SamplingError {
    /// What is wrong, without the field.
    pub fn problem(&self) -> String {
        format!("{} is outside {}", self.value, self.range)
    }
}

impl SamplingDefaults {
    /// Checks what the types cannot: that each setting is in its range, which is
    /// the sampler's own. Import and bundles ask here.
    ///
    /// # Errors
    /// Names the setting, its value and the allowed range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let check = |field, value: Option<f32>, allowed: fn(f32) -> bool, range| match value {
            Some(value) if !allowed(value) => Err(SamplingError {
                field,
                value,
                range,
            }),
            _ => Ok(()),
        };
        // A temperature of 0 is greedy; NaN lies in no range.
        let temperature = |t: f32| (0.0..=100.0).contains(&t);
        check("temperature", self.temperature, temperature, "0..=100")?;
        let top_p = |p: f32| p > 0.0 && p <= 1.0;
        check("top_p", self.top_p, top_p, "0..=1, 0 excluded")?;
        check("min_p", self.min_p, |p| (0.0..=1.0).contains(&p), "0..=1")?;
        let penalty = |r: f32| r > 0.0 && r <= 100.0;
        let range = "0..=100, 0 excluded";
        check(
            "repetition_penalty",
            self.repetition_penalty,
            penalty,
            range,
        )
    }
}
