//! The shape of `tokenizer.json`.
//!
//! Vocabularies have hundreds of thousands of entries, so they are written from
//! borrowed text, without a tree in between.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Value, json};

use super::VocabError;

#[derive(Serialize)]
pub(super) struct File<'a, M> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    pub(super) added_tokens: Vec<Added<'a>>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) decoder: Value,
    pub(super) model: M,
}

#[derive(Serialize)]
pub(super) struct Added<'a> {
    pub(super) id: u32,
    pub(super) content: &'a str,
    pub(super) single_word: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
    pub(super) normalized: bool,
    pub(super) special: bool,
}

#[derive(Serialize)]
pub(super) struct Bpe<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) dropout: Option<f32>,
    pub(super) unk_token: Option<&'a str>,
    pub(super) continuing_subword_prefix: Option<&'a str>,
    pub(super) end_of_word_suffix: Option<&'a str>,
    pub(super) fuse_unk: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
    #[serde(serialize_with = "vocabulary")]
    pub(super) vocab: &'a [String],
    pub(super) merges: Vec<(&'a str, &'a str)>,
}

#[derive(Serialize)]
pub(super) struct Unigram<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) unk_id: Option<u32>,
    pub(super) vocab: Vec<(&'a str, f64)>,
    pub(super) byte_fallback: bool,
}

/// Texts by id as a map from text to id.
fn vocabulary<S: Serializer>(tokens: &&[String], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(tokens.len()))?;
    for (id, token) in tokens.iter().enumerate() {
        map.serialize_entry(token, &id)?;
    }
    map.end()
}

impl<'a, M: Serialize> File<'a, M> {
    pub(super) fn new(added_tokens: Vec<Added<'a>>, model: M) -> Self {
        Self {
            version: "1.0",
            truncation: None,
            padding: None,
            added_tokens,
            normalizer: Value::Null,
            pre_tokenizer: Value::Null,
            post_processor: Value::Null,
            decoder: Value::Null,
            model,
        }
    }

    pub(super) fn write(&self) -> Result<Vec<u8>, VocabError> {
        Ok(serde_json::to_vec(self)?)
    }
}

/// A post-processor that adds special tokens, or null if there are none to add.
pub(super) fn template(bos: Option<(u32, &str)>, eos: Option<(u32, &str)>) -> Value {
    if bos.is_none() && eos.is_none() {
        return Value::Null;
    }
    let special =
        |token: &str, type_id: u32| json!({"SpecialToken": {"id": token, "type_id": type_id}});
    let around = |sequence: &str, type_id: u32| {
        let mut out = Vec::new();
        out.extend(bos.map(|(_, t)| special(t, type_id)));
        out.push(json!({"Sequence": {"id": sequence, "type_id": type_id}}));
        out.extend(eos.map(|(_, t)| special(t, type_id)));
        out
    };
    let single = around("A", 0);
    let pair = [around("A", 0), around("B", 1)].concat();
    let mut tokens = serde_json::Map::new();
    for (id, token) in [bos, eos].into_iter().flatten() {
        tokens.insert(
            token.to_owned(),
            json!({"id": token, "ids": [id], "tokens": [token]}),
        );
    }
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens,
    })
}
