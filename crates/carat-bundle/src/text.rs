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
